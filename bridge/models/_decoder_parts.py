"""Parts of a decoder and of its layers, made by the config and a layer's kind."""

import dataclasses
from functools import partial
from typing import NamedTuple

from flax import nnx
from jaxtyping import DTypeLike

from bridge.models._altup import StreamProjections
from bridge.models._attention import Attention
from bridge.models._attention_experts import ExpertAttention
from bridge.models._block_sparse_attention import BlockSparseAttention
from bridge.models._compressed_attention import CompressedAttention
from bridge.models._config import DecoderConfig
from bridge.models._constrain import Constrain
from bridge.models._delta_net import DeltaNet
from bridge.models._differential_attention import DifferentialAttention
from bridge.models._dynamic_mask_attention import DynamicMaskAttention
from bridge.models._gated_norm import GatedNorm
from bridge.models._hyper_connections import StreamEnds
from bridge.models._indexed_attention import IndexedAttention
from bridge.models._latent_attention import LatentAttention
from bridge.models._layer_kinds import LayerKind
from bridge.models._lightning import LightningAttention
from bridge.models._mamba import Mamba
from bridge.models._mamba1 import Mamba1
from bridge.models._mlp import MLP
from bridge.models._moe import Dispatch, MoE
from bridge.models._norm import Norm
from bridge.models._rg_lru import RGLRU
from bridge.models._self_attention import SelfAttention
from bridge.models._shared_attention import SharedAttention
from bridge.models._short_conv import ShortConv

RECURRENT_MIXERS = {
    "short_conv": ShortConv,
    "delta_net": DeltaNet,
    "lightning": LightningAttention,
    "mamba": Mamba,
    "mamba1": Mamba1,
    "rg_lru": RGLRU,
}
"""Mixers with a state, by the attribute of a layer that holds each."""


def make_norm(config: DecoderConfig, param_dtype: DTypeLike) -> Norm:
    """Returns a norm for the residual stream."""
    return Norm(
        (config.hidden_size,),
        config.norm,
        config.norm_eps,
        scale=config.norm_scale,
        bias=config.norm_bias,
        narrow=config.residual_in_fp32,
        param_dtype=param_dtype,
    )


def make_final_norm(config: DecoderConfig, param_dtype: DTypeLike) -> Norm:
    """Returns the norm behind the last layer."""
    if (epsilon := config.final_norm_eps) is not None:
        config = dataclasses.replace(config, norm_eps=epsilon)
    return make_norm(config, param_dtype)


class LayerNorms(NamedTuple):
    """Norms of a layer, each None where there is none.

    Attributes:
      before_mixer: Of the stream that the mixer reads.
      after_mixer: Of the output of the mixer.
      before_mlp: Of the stream that the MLP reads.
      after_mlp: Of the output of the MLP.
    """

    before_mixer: Norm | None
    after_mixer: Norm | None
    before_mlp: Norm | None
    after_mlp: Norm | None


def make_norms(
    config: DecoderConfig, kind: LayerKind, rngs: nnx.Rngs, param_dtype: DTypeLike
) -> LayerNorms:
    """Returns the norms before and after the mixer and MLP of a layer.

    Args:
      config: Config of the decoder.
      kind: Kind of the layer.
      rngs: Source of keys.
      param_dtype: Dtype of the parameters.
    """
    placement = config.norm_placement
    if kind.mixer in RECURRENT_MIXERS:
        placement = config.recurrent_norm_placement or placement
    before, after = placement != "post", placement in ("post", "both")
    own = placement in ("pre", "both", "in_stream", "parallel_two")
    mixes, feeds = kind.mixer is not None, kind.channels is not None

    gated, sparse = config.norm_gate_rank is not None, kind.channels == "sparse"

    def norm(exists: bool, has_gate: bool = False) -> Norm | None:
        if exists and has_gate:
            return GatedNorm(config, rngs=rngs, param_dtype=param_dtype)
        return make_norm(config, param_dtype) if exists else None

    return LayerNorms(
        norm(before and mixes and kind.norms_mixer, gated),
        norm(after),
        norm(own and feeds, gated and sparse),
        norm(after),
    )


def make_streams(
    config: DecoderConfig, rngs: nnx.Rngs, param_dtype: DTypeLike
) -> StreamProjections | StreamEnds | None:
    """Returns what makes several streams of one, and one of them; None of one stream.

    Args:
      config: Config of the decoder.
      rngs: Source of keys.
      param_dtype: Dtype of the parameters.
    """
    if config.hyper_connections is not None:
        return StreamEnds(config, rngs=rngs, param_dtype=param_dtype)
    if config.altup is not None:
        return StreamProjections(config, rngs=rngs, param_dtype=param_dtype)
    return None


def make_attention(
    config: DecoderConfig,
    kind: LayerKind,
    rngs: nnx.Rngs,
    param_dtype: DTypeLike,
    attention: Attention,
    constrain: Constrain,
) -> SelfAttention | CompressedAttention:
    """Returns the attention of a layer, of the class that its config asks for.

    Args:
      config: Config of the decoder.
      kind: Kind of the layer, which attends.
      rngs: Source of keys.
      param_dtype: Dtype of the parameters.
      attention: Attention function, with the signature of `dot_product_attention`.
      constrain: Sharding constraint of activations.
    """
    make, full = LatentAttention if config.mla else SelfAttention, config.full_attention
    if config.indexer is not None:
        make = partial(IndexedAttention, indexes=kind.indexes)
    elif kind.indexes:
        make = BlockSparseAttention
    elif full is not None and kind.is_full:
        make = partial(SelfAttention, shared_key_value=full.shared_key_value)
    if config.differential_attention:
        make = DifferentialAttention
    elif config.dynamic_mask_size is not None:
        make = DynamicMaskAttention
    elif config.attention_experts is not None:
        make = ExpertAttention
    if config.compressed_attention is not None:
        make = partial(CompressedAttention, compresses=kind.compresses)
    if config.kv_sharing is not None:
        same = full is not None and kind.is_full and full.shared_key_value
        make = partial(SharedAttention, reuses=kind.reuses, shared_key_value=same)
    return make(
        config.of_kind(kind),
        window=_shared_window(config),
        rngs=rngs,
        param_dtype=param_dtype,
        attention=attention,
        constrain=constrain,
    )


def make_channels(
    config: DecoderConfig,
    kind: LayerKind,
    rngs: nnx.Rngs,
    param_dtype: DTypeLike,
    dispatch: Dispatch,
) -> MLP | MoE | None:
    """Returns the MLP or the experts of a layer; None if its kind has neither.

    Args:
      config: Config of the decoder.
      kind: Kind of the layer.
      rngs: Source of keys.
      param_dtype: Dtype of the parameters.
      dispatch: Function that runs experts, with the signature of `sorted_dispatch`.
    """
    if kind.channels is None:
        return None
    if kind.channels == "sparse":
        return MoE(
            config,
            rngs=rngs,
            param_dtype=param_dtype,
            dispatch=dispatch,
            hashes=kind.hashes,
        )
    return make_mlp(config, kind, rngs, param_dtype)


def make_mlp(
    config: DecoderConfig, kind: LayerKind, rngs: nnx.Rngs, param_dtype: DTypeLike
) -> MLP:
    """Returns a dense MLP of a layer."""
    return MLP(
        config,
        config.mlp_width(kind),
        bias=config.mlp_bias,
        sparsity=config.gate_sparsity if kind.cuts_gate else None,
        rngs=rngs,
        param_dtype=param_dtype,
    )


def _shared_window(config: DecoderConfig) -> int | None:
    windows = set(config.windows)
    return windows.pop() if len(windows) == 1 else None
