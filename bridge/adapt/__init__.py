"""Rules for common layers, to build the argument of `from_torch` and `to_torch`.

`adapt.linear("fc1", "layers.fc1")` returns the two rules that map an `nn.Linear` to
a `flax.nnx.Linear` or `linen.Dense` and back. The modules are not inspected: the
caller states the layer type and whether it has a bias. Layers of equinox are in
`adapt.equinox`.
"""

from bridge.adapt import equinox as equinox
from bridge.adapt._adapter import Adapter as Adapter
from bridge.adapt._flax import attention as attention
from bridge.adapt._flax import batch_norm as batch_norm
from bridge.adapt._flax import conv as conv
from bridge.adapt._flax import conv_transpose as conv_transpose
from bridge.adapt._flax import embedding as embedding
from bridge.adapt._flax import linear as linear
from bridge.adapt._flax import norm as norm
from bridge.adapt._recurrent import gru as gru
from bridge.adapt._recurrent import lstm as lstm
