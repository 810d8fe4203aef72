"""Fields of a decoder's config, with their types and defaults."""

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Literal

from bridge.models._altup_config import AltUpConfig
from bridge.models._attention_experts_config import AttentionExpertsConfig
from bridge.models._block_indexer_config import BlockIndexerConfig
from bridge.models._compressed_attention_config import CompressedAttentionConfig
from bridge.models._delta_net_config import DeltaNetConfig
from bridge.models._full_attention_config import FullAttentionConfig
from bridge.models._head_transform_config import HeadTransformConfig
from bridge.models._hyper_connections_config import HyperConnectionsConfig
from bridge.models._indexer_config import IndexerConfig
from bridge.models._kv_sharing_config import KVSharingConfig
from bridge.models._layer_kinds import Compression
from bridge.models._lightning_config import LightningConfig
from bridge.models._mamba1_config import Mamba1Config
from bridge.models._mamba_config import MambaConfig
from bridge.models._mla_config import MLAConfig
from bridge.models._moe_config import MoEConfig
from bridge.models._multipliers_config import MultipliersConfig
from bridge.models._per_layer_input_config import PerLayerInputConfig
from bridge.models._query_scale_config import QueryScaleConfig
from bridge.models._residual_factors_config import ResidualFactorsConfig
from bridge.models._rg_lru_config import RGLRUConfig
from bridge.models._rope_config import RopeConfig
from bridge.models._shared_blocks_config import SharedBlocksConfig
from bridge.models._short_conv_config import ShortConvConfig

LayerType = Literal[
    "full_attention",
    "sliding_attention",
    "chunked_attention",
    "block_sparse_attention",
    "compressed_sparse_attention",
    "heavily_compressed_attention",
    "short_conv",
    "delta_net",
    "lightning",
    "mamba",
    "mamba1",
    "rg_lru",
    "attention_mamba",
    "none",
]
COMPRESSIONS: Mapping[str, Compression] = MappingProxyType(
    {
        "compressed_sparse_attention": "sparse",
        "heavily_compressed_attention": "heavy",
    }
)
"""Entries that attention reads beside single tokens, by the type of a layer."""

BLOCK_SPARSE: LayerType = "block_sparse_attention"
"""Type of layers whose queries attend to the blocks that an indexer selects."""

Norm = Literal["rms", "rms_wide", "rms_zero_centered", "layer", "layer_zero_centered"]
NormPlacement = Literal["pre", "post", "both", "in_stream", "parallel", "parallel_two"]
Activation = Literal[
    "silu", "gelu", "gelu_pytorch_tanh", "gelu_new", "relu", "relu2", "xielu"
]


@dataclasses.dataclass(frozen=True)
class DecoderFields:
    """Fields of a `DecoderConfig`, which documents and validates them.

    A class of its own, so that the checks can name the type of what they check.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int = None  # pyright: ignore[reportAssignmentType]
    head_dim: int = None  # pyright: ignore[reportAssignmentType]
    value_head_dim: int | None = None
    max_position_embeddings: int = 2048
    norm: Norm = "rms"
    norm_eps: float = 1e-6
    final_norm_eps: float | None = None
    norm_scale: bool = True
    norm_bias: bool = False
    norm_gate_rank: int | None = None
    norm_placement: NormPlacement = "pre"
    recurrent_norm_placement: Literal["pre", "post", "both"] | None = None
    hidden_act: Activation = "silu"
    gated_mlp: bool = True
    mlp_bias: bool = False
    swiglu_limit: float | None = None
    swiglu_alpha: float | None = None
    attention_bias: bool = False
    attention_out_bias: bool = False
    qk_norm: Literal["head", "per_head", "full", "l2"] | None = None
    qk_norm_bias: bool = False
    value_norm: bool = False
    qk_norm_after_rope: bool = False
    query_pre_attn_scalar: float | None = None
    attention_multiplier: float | None = None
    attn_logit_softcapping: float | None = None
    final_logit_softcapping: float | None = None
    attention_sinks: bool = False
    attention_gate: bool = False
    attention_gate_per_head: bool = False
    attention_gate_activation: Literal["sigmoid", "softplus"] = "sigmoid"
    clip_qkv: float | None = None
    inner_norms: bool = False
    differential_attention: bool = False
    dynamic_mask_size: int | None = None
    attention_experts: AttentionExpertsConfig | None = None
    mla: MLAConfig | None = None
    full_attention: FullAttentionConfig | None = None
    kv_sharing: KVSharingConfig | None = None
    indexer: IndexerConfig | None = None
    shared_indexer_layers: tuple[int, ...] = ()
    block_indexer: BlockIndexerConfig | None = None
    compressed_attention: CompressedAttentionConfig | None = None
    short_conv: ShortConvConfig | None = None
    delta_net: DeltaNetConfig | None = None
    lightning: LightningConfig | None = None
    mamba: MambaConfig | None = None
    mamba1: Mamba1Config | None = None
    rg_lru: RGLRUConfig | None = None
    shared_blocks: SharedBlocksConfig | None = None
    rope: RopeConfig | None = RopeConfig()
    learned_positions: bool = None  # pyright: ignore[reportAssignmentType]
    sinusoidal_positions: bool = False
    position_offset: int = 0
    sliding_rope: RopeConfig | None = None
    attention_chunk_size: int | None = None
    no_rope_layers: tuple[int, ...] = ()
    query_scale: QueryScaleConfig | None = None
    alibi_bias_max: float | None = None
    sliding_window: int | None = None
    layer_types: tuple[LayerType, ...] | None = None
    unscored_tokens: int = 0
    scale_embeddings: bool = False
    multipliers: MultipliersConfig | None = None
    embedding_multiplier: float = 1.0
    embedding_norm: bool = False
    per_layer_input: PerLayerInputConfig | None = None
    altup: AltUpConfig | None = None
    hyper_connections: HyperConnectionsConfig | None = None
    laurel_rank: int | None = None
    gate_sparsity: float | None = None
    cut_gate_layers: tuple[int, ...] = ()
    layer_scale: bool = False
    residual_in_fp32: bool = False
    residual_multiplier: float = 1.0
    residual_factors: ResidualFactorsConfig | None = None
    learned_residual: bool = False
    logit_scale: float = 1.0
    logits_scaling: float = 1.0
    moe: MoEConfig | None = None
    dense_layers: tuple[int, ...] = ()
    hash_layers: tuple[int, ...] = ()
    dense_branch: bool = False
    mixer_only_layers: tuple[int, ...] = ()
    unnormed_mixer_layers: tuple[int, ...] = ()
    mlp_sizes: tuple[tuple[int, int], ...] = ()
    tie_word_embeddings: bool = False
    head_bias: bool = False
    head_transform: HeadTransformConfig | None = None
    initializer_range: float = 0.02
    bos_token_id: int | None = None
    eos_token_id: int | tuple[int, ...] | None = None
    pad_token_id: int | None = None
    model_type: str = "llama"
    dtype: str = "float32"
    passthrough: tuple[tuple[str, Any], ...] = ()

    @property
    def rope_dim(self) -> int:
        """Number of rotated dims of a head; 0 if positions are learned."""
        if self.rope is None:
            return 0
        width = self.mla.qk_rope_head_dim if self.mla else self.head_dim
        if self.rope.rope_type == "proportional":
            return width
        return int(width * self.rope.partial_rotary_factor)
