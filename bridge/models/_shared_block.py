"""Blocks of attention and an MLP whose weights several layers share."""

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, DTypeLike, Float

from bridge.models._attention import Attention
from bridge.models._config import DecoderConfig
from bridge.models._constrain import Constrain
from bridge.models._decoder_parts import make_mlp, make_norm
from bridge.models._layer_kinds import DENSE_ATTENTION, LayerKind
from bridge.models._layer_mixer import MixerInputs, Stream, run_attention
from bridge.models._layer_products import LayerProducts, set_products
from bridge.models._layer_state import LayerState
from bridge.models._linear import Linear
from bridge.models._norm import Norm
from bridge.models._self_attention import MakeLinear, SelfAttention

Module = TypeVar("Module", bound=nnx.Module)
Made = TypeVar("Made")


class Adapter(nnx.Module):
    """Two narrow matrices, whose product a layer adds to a projection of a block.

    Args:
      in_shape: Dims of the input.
      rank: Width between the two.
      out_shape: Dims of the output.
      linear: Function that makes a `Linear` of two shapes.
    """

    def __init__(
        self,
        in_shape: tuple[int, ...],
        rank: int,
        out_shape: tuple[int, ...],
        linear: MakeLinear,
    ):
        """Initializes both matrices."""
        self.down, self.up = linear(in_shape, (rank,)), linear((rank,), out_shape)


class GatedAdapter(Adapter):
    """An adapter of the projections to the gate and into an MLP, with one `down`."""

    def __init__(
        self,
        in_shape: tuple[int, ...],
        rank: int,
        out_shape: tuple[int, ...],
        linear: MakeLinear,
    ):
        """Initializes three matrices."""
        super().__init__(in_shape, rank, out_shape, linear)
        self.gate = linear((rank,), out_shape)


class AdaptedLinear(nnx.Module):
    """Linear projection to which the output of two narrow matrices is added.

    Args:
      linear: Projection of a block.
      down: The first of the two.
      up: The second.
    """

    def __init__(self, linear: Linear, down: Linear, up: Linear):
        """Keeps the three, which belong to other modules."""
        self.linear, self.down, self.up = linear, down, up

    def __call__(self, x: Float[Array, "batch seq *in"]) -> Float[Array, "..."]:
        """Projects the dims after `batch seq`."""
        return self.linear(x) + self.up(self.down(x))


class BlockAdapters(nnx.Module):
    """Adapters that a layer adds to the projections of a shared block.

    Args:
      config: Config of the decoder, with `shared_blocks`.
      linear: Function that makes a `Linear` of two shapes.
    """

    def __init__(self, config: DecoderConfig, linear: MakeLinear):
        """Initializes the adapters that the config has."""
        sizes, embed = config.shared_blocks, config.hidden_size
        assert sizes is not None
        query, key, value = (
            (config.num_attention_heads, config.head_dim),
            (config.num_key_value_heads, config.head_dim),
            (config.num_key_value_heads, config.v_head_dim),
        )
        of_head = partial(_adapter, Adapter, linear, (2 * embed,), sizes.attention_rank)
        self.q_adapter, self.k_adapter = of_head(query), of_head(key)
        self.v_adapter = of_head(value)
        make, inside = GatedAdapter, (config.intermediate_size,)
        self.mlp_adapter = _adapter(make, linear, (embed,), sizes.mlp_rank, inside)

    def of_attention(self) -> dict[str, tuple[Linear, Linear]]:
        """Returns the matrices of each adapted projection of attention."""
        adapters = {
            "q_proj": self.q_adapter,
            "k_proj": self.k_adapter,
            "v_proj": self.v_adapter,
        }
        return {n: (a.down, a.up) for n, a in adapters.items() if a is not None}

    def of_mlp(self) -> dict[str, tuple[Linear, Linear]]:
        """Returns the matrices of each adapted projection of the MLP."""
        if (adapter := self.mlp_adapter) is None:
            return {}
        return {
            "gate_proj": (adapter.down, adapter.gate),
            "up_proj": (adapter.down, adapter.up),
        }


class SharedBlockAttention(SelfAttention):
    """Self-attention whose queries, keys and values are of two streams side by side."""

    def _make_projections(
        self, config: DecoderConfig, linear: MakeLinear, param_dtype: DTypeLike
    ) -> None:
        wide = dataclasses.replace(config, hidden_size=2 * config.hidden_size)
        super()._make_projections(wide, linear, param_dtype)


class SharedBlock(nnx.Module):
    """Attention, then an MLP, without a residual stream; several layers run it.

    Args:
      config: Config of the decoder, with `shared_blocks`.
      rngs: Source of keys.
      param_dtype: Dtype of the parameters.
      attention: Attention function, with the signature of `dot_product_attention`.
      constrain: Sharding constraint of activations.

    Source: transformers `modeling_zamba2.py::Zamba2AttentionDecoderLayer`.
    """

    def __init__(
        self,
        config: DecoderConfig,
        *,
        rngs: nnx.Rngs,
        param_dtype: DTypeLike,
        attention: Attention,
        constrain: Constrain,
    ):
        """Initializes the weights of one block."""
        self.input_layernorm = Norm(
            (2 * config.hidden_size,),
            config.norm,
            config.norm_eps,
            param_dtype=param_dtype,
        )
        self.self_attn = SharedBlockAttention(
            config,
            window=None,
            rngs=rngs,
            param_dtype=param_dtype,
            attention=attention,
            constrain=constrain,
        )
        self.pre_feedforward_layernorm = make_norm(config, param_dtype)
        self.mlp = make_mlp(config, DENSE_ATTENTION, rngs, param_dtype)
        self.constrain = constrain

    def __call__(
        self,
        x: Stream,
        embeddings: Stream,
        adapters: BlockAdapters,
        inputs: MixerInputs,
        cache: LayerState | None,
    ) -> tuple[Stream, LayerState | None]:
        """Runs attention and the MLP, with the adapters of a layer.

        Args:
          x: Residual stream before the layer.
          embeddings: Residual stream before the first layer.
          adapters: Adapters of the layer.
          inputs: What attention reads beside its input.
          cache: KV cache of the layer; None without a cache.

        Returns:
          Output of the MLP, and the cache with the new tokens.
        """
        both = self.input_layernorm(jnp.concatenate([x, embeddings], axis=-1))
        attention = _adapted(self.self_attn, adapters.of_attention())
        mixed = run_attention(attention, self.constrain(both, "input"), cache, inputs)
        x = self.pre_feedforward_layernorm(self.constrain(mixed.output, "output"))
        mlp = _adapted(self.mlp, adapters.of_mlp())
        x = self.constrain(mlp(self.constrain(x, "input")), "output")
        return x, mixed.cache


class SharedBlocks(NamedTuple):
    """What layers that run a shared block receive.

    Attributes:
      blocks: All blocks; a layer runs the one of its kind.
      embeddings: Residual stream before the first layer.
    """

    blocks: Sequence[SharedBlock]
    embeddings: Stream


class SharedBlockUse(nnx.Module):
    """Part of a layer that runs a shared block: adapters, and a projection behind it.

    Args:
      config: Config of the decoder, with `shared_blocks`.
      rngs: Source of keys.
      param_dtype: Dtype of the parameters.
      constrain: Sharding constraint of activations.

    Source: transformers `modeling_zamba2.py::Zamba2HybridLayer`.
    """

    def __init__(
        self,
        config: DecoderConfig,
        *,
        rngs: nnx.Rngs,
        param_dtype: DTypeLike,
        constrain: Constrain,
    ):
        """Initializes the weights that the layers do not share."""
        linear = partial(
            Linear, std=config.initializer_range, rngs=rngs, param_dtype=param_dtype
        )
        self.adapters = BlockAdapters(config, linear)
        self.out_proj = linear((config.hidden_size,), (config.hidden_size,))
        self.constrain = constrain

    def __call__(
        self,
        block: SharedBlock,
        x: Stream,
        inputs: MixerInputs,
        cache: LayerState | None,
    ) -> tuple[Stream, LayerState | None]:
        """Returns what is added to the input of the mixer, and the cache.

        Args:
          block: Block that the layer runs.
          x: Residual stream before the layer.
          inputs: What attention reads beside its input, and the embeddings.
          cache: KV cache of the layer; None without a cache.
        """
        embeddings = inputs.embeddings
        assert embeddings is not None
        out, cache = block(x, embeddings, self.adapters, inputs, cache)
        return self.constrain(self.out_proj(out), "tokens"), cache


def make_block_use(
    config: DecoderConfig,
    kind: LayerKind,
    rngs: nnx.Rngs,
    param_dtype: DTypeLike,
    constrain: Constrain,
) -> SharedBlockUse | None:
    """Returns the part of a layer that runs a shared block; None if it runs none.

    Args:
      config: Config of the decoder.
      kind: Kind of the layer.
      rngs: Source of keys.
      param_dtype: Dtype of the parameters.
      constrain: Sharding constraint of activations.
    """
    if kind.shared_block is None:
        return None
    return SharedBlockUse(
        config, rngs=rngs, param_dtype=param_dtype, constrain=constrain
    )


def make_shared_blocks(
    config: DecoderConfig,
    rngs: nnx.Rngs,
    products: Sequence[LayerProducts],
    **options: Any,
) -> nnx.List | None:
    """Returns the shared blocks of a decoder; None if it has none.

    Args:
      config: Config of the decoder.
      rngs: Source of keys for the initial weights.
      products: Products of each layer of the decoder.
      **options: Those of `SharedBlock`, the same for all blocks.

    Raises:
      ValueError: If layers that share a block multiply in different precisions.
    """
    if (sizes := config.shared_blocks) is None:
        return None
    own, *others = dict.fromkeys(products[layer] for layer in sizes.layers)
    if others:
        raise ValueError(
            f"num_layers_at_start_in_bf16, num_layers_at_end_in_bf16: layers "
            f"{sizes.layers} share the weights of {sizes.num_blocks} blocks, and would "
            "multiply them in two precisions. Set both so that these are none of the "
            "first and last layers."
        )
    blocks = [
        SharedBlock(config, rngs=rngs, **options) for _ in range(sizes.num_blocks)
    ]
    for block in blocks:
        set_products(block, own)
    return nnx.List(blocks)


def _adapter(
    make: Callable[..., Made],
    linear: MakeLinear,
    in_shape: tuple[int, ...],
    rank: int | None,
    out_shape: tuple[int, ...],
) -> Made | None:
    return None if rank is None else make(in_shape, rank, out_shape, linear)


def _adapted(module: Module, adapters: dict[str, tuple[Linear, Linear]]) -> Module:
    """Returns a copy of a module whose named projections have adapters."""
    copy = jax.tree.map(lambda leaf: leaf, module)
    for name, matrices in adapters.items():
        setattr(copy, name, AdaptedLinear(getattr(copy, name), *matrices))
    return copy
