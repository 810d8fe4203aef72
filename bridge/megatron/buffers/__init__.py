"""Layouts of Megatron's flat parameter buffers, from names, shapes and dtypes.

Megatron-Core copies a model's parameters into a few flat buffers, splits each into
buckets, and gives every data-parallel rank one shard of every bucket. Its optimizer
files hold those shards without recording which parameter an element belongs to, so a
reader must recompute the layout. The computation uses integers only and creates no
arrays.

```python
params = [ParamSpec("fc1.weight", (256, 64)), ParamSpec("fc1.bias", (256,))]
(buffer,) = full_layout(params, dp_size=4)
for piece in owned_pieces(buffer.layout, rank=2):
    ...  # shard elements piece.in_shard are elements piece.in_param of piece.param
```

All positions and sizes are in elements, never in bytes.
"""

from bridge.megatron._swiglu import swiglu_shard_index as swiglu_shard_index
from bridge.megatron.buffers._bucket_groups import BucketId as BucketId
from bridge.megatron.buffers._bucket_groups import (
    partition_buckets as partition_buckets,
)
from bridge.megatron.buffers._buffer_layout import Bucket as Bucket
from bridge.megatron.buffers._buffer_layout import BufferLayout as BufferLayout
from bridge.megatron.buffers._buffer_layout import Placement as Placement
from bridge.megatron.buffers._full_layout import Buffer as Buffer
from bridge.megatron.buffers._full_layout import full_layout as full_layout
from bridge.megatron.buffers._full_layout import (
    resolve_bucket_size as resolve_bucket_size,
)
from bridge.megatron.buffers._layer_wise_layout import (
    layer_wise_layout as layer_wise_layout,
)
from bridge.megatron.buffers._layer_wise_layout import (
    newton_schulz_cost as newton_schulz_cost,
)
from bridge.megatron.buffers._layer_wise_layout import shard_divisor as shard_divisor
from bridge.megatron.buffers._padding import bucket_end_divisor as bucket_end_divisor
from bridge.megatron.buffers._padding import pad_bucket_end as pad_bucket_end
from bridge.megatron.buffers._padding import pad_param_start as pad_param_start
from bridge.megatron.buffers._padding import pad_to_divisor as pad_to_divisor
from bridge.megatron.buffers._param_groups import BufferKey as BufferKey
from bridge.megatron.buffers._param_groups import ParamGroup as ParamGroup
from bridge.megatron.buffers._param_groups import group_params as group_params
from bridge.megatron.buffers._param_groups import is_layer_wise as is_layer_wise
from bridge.megatron.buffers._param_spec import ParamSpec as ParamSpec
from bridge.megatron.buffers._sequential_layout import default_layout as default_layout
from bridge.megatron.buffers._sequential_layout import (
    distributed_optimizer_layout as distributed_optimizer_layout,
)
from bridge.megatron.buffers._sequential_layout import packed_layout as packed_layout
from bridge.megatron.buffers._shards import Piece as Piece
from bridge.megatron.buffers._shards import owned_pieces as owned_pieces
from bridge.megatron.buffers._shards import shard_bucket as shard_bucket
