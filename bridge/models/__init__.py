"""Reference models, into which the weights of the supported families are loaded."""

from bridge.models._altup_config import AltUpConfig as AltUpConfig
from bridge.models._attention import Attention as Attention
from bridge.models._attention import dot_product_attention as dot_product_attention
from bridge.models._attention import kernel_of_call as kernel_of_call
from bridge.models._attention_choice import Accelerator as Accelerator
from bridge.models._attention_choice import AttentionShape as AttentionShape
from bridge.models._attention_choice import KernelChoice as KernelChoice
from bridge.models._attention_choice import WantedKernel as WantedKernel
from bridge.models._attention_choice import choose_attention as choose_attention
from bridge.models._attention_experts_config import (
    AttentionExpertsConfig as AttentionExpertsConfig,
)
from bridge.models._attention_kernel import AttentionKernel as AttentionKernel
from bridge.models._block_indexer_config import (
    BlockIndexerConfig as BlockIndexerConfig,
)
from bridge.models._cache import empty_cache as empty_cache
from bridge.models._compressed_attention_config import (
    CompressedAttentionConfig as CompressedAttentionConfig,
)
from bridge.models._config import DecoderConfig as DecoderConfig
from bridge.models._constant_paths import constant_paths as constant_paths
from bridge.models._constrain import Constrain as Constrain
from bridge.models._constrain import unconstrained as unconstrained
from bridge.models._cudnn import CudnnKernel as CudnnKernel
from bridge.models._decoder import Decoder as Decoder
from bridge.models._decoder_layer import DecoderLayer as DecoderLayer
from bridge.models._delta_net_config import DeltaNetConfig as DeltaNetConfig
from bridge.models._flash_kernel import FlashKernel as FlashKernel
from bridge.models._float8 import Product as Product
from bridge.models._float8 import float8_product as float8_product
from bridge.models._float8_grouped import GroupedProduct as GroupedProduct
from bridge.models._float8_grouped import float8_grouped_matmul as float8_grouped_matmul
from bridge.models._full_attention_config import (
    FullAttentionConfig as FullAttentionConfig,
)
from bridge.models._generate import Generated as Generated
from bridge.models._generate import generate as generate
from bridge.models._grouped import grouped_matmul as grouped_matmul
from bridge.models._head_transform_config import (
    HeadTransformConfig as HeadTransformConfig,
)
from bridge.models._hyper_connections_config import (
    HyperConnectionsConfig as HyperConnectionsConfig,
)
from bridge.models._indexer_config import IndexerConfig as IndexerConfig
from bridge.models._kv_sharing_config import KVSharingConfig as KVSharingConfig
from bridge.models._layer_kinds import LayerBlock as LayerBlock
from bridge.models._layer_kinds import LayerKind as LayerKind
from bridge.models._layer_kinds import LayerStack as LayerStack
from bridge.models._layer_loop import plain_scan as plain_scan
from bridge.models._layer_state import AttentionMambaState as AttentionMambaState
from bridge.models._layer_state import CompressedKeyValues as CompressedKeyValues
from bridge.models._layer_state import CompressorInputs as CompressorInputs
from bridge.models._layer_state import ConvState as ConvState
from bridge.models._layer_state import DeltaNetState as DeltaNetState
from bridge.models._layer_state import IndexedKeyValues as IndexedKeyValues
from bridge.models._layer_state import KeyValues as KeyValues
from bridge.models._layer_state import LayerState as LayerState
from bridge.models._layer_state import Mamba1State as Mamba1State
from bridge.models._layer_state import MambaState as MambaState
from bridge.models._lightning_config import LightningConfig as LightningConfig
from bridge.models._mamba1_config import Mamba1Config as Mamba1Config
from bridge.models._mamba_config import MambaConfig as MambaConfig
from bridge.models._mla_config import MLAConfig as MLAConfig
from bridge.models._moe import Dispatch as Dispatch
from bridge.models._moe import MoE as MoE
from bridge.models._moe import correction_bias_paths as correction_bias_paths
from bridge.models._moe import expert_parallel_rules as expert_parallel_rules
from bridge.models._moe import sorted_dispatch as sorted_dispatch
from bridge.models._moe_config import MoEConfig as MoEConfig
from bridge.models._multipliers_config import MultipliersConfig as MultipliersConfig
from bridge.models._mxfp8 import mxfp8_product as mxfp8_product
from bridge.models._per_layer_input_config import (
    PerLayerInputConfig as PerLayerInputConfig,
)
from bridge.models._positions import Positions as Positions
from bridge.models._positions import positions_in_order as positions_in_order
from bridge.models._query_scale_config import QueryScaleConfig as QueryScaleConfig
from bridge.models._recurrence import Recurrence as Recurrence
from bridge.models._recurrence import plain_recurrence as plain_recurrence
from bridge.models._residual_factors_config import (
    ResidualFactorsConfig as ResidualFactorsConfig,
)
from bridge.models._rg_lru_config import RGLRUConfig as RGLRUConfig
from bridge.models._rope_config import RopeConfig as RopeConfig
from bridge.models._router_stats import RouterStats as RouterStats
from bridge.models._sample import GREEDY as GREEDY
from bridge.models._sample import Sampling as Sampling
from bridge.models._sample import sample as sample
from bridge.models._shared_block import SharedBlock as SharedBlock
from bridge.models._shared_blocks_config import (
    SharedBlocksConfig as SharedBlocksConfig,
)
from bridge.models._short_conv_config import ShortConvConfig as ShortConvConfig
from bridge.models._tensor_parallel import (
    tensor_parallel_rules as tensor_parallel_rules,
)
from bridge.models._token_experts import token_expert_paths as token_expert_paths
