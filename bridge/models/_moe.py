"""Dropless mixture of experts: tokens sorted by expert, then grouped products."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, DTypeLike, Float, Int

from bridge.models._config import DecoderConfig
from bridge.models._expert_split import ExpertKernels, is_split, run_split, split_axis
from bridge.models._float8_grouped import GroupedProduct
from bridge.models._grouped import grouped_matmul
from bridge.models._linear import Linear
from bridge.models._mlp import ACTIVATIONS, MLP, gated
from bridge.models._moe_norms import MoENorms
from bridge.models._router import Router
from bridge.models._router_stats import RouterStats, router_stats

Rows = Float[Array, "rows embed"]
Sizes = Int[Array, " experts"] | np.ndarray
EXPERT_PRODUCT = "expert_product"
"""`checkpoint_name` of the products of rows and their experts' matrices."""
RunExperts = Callable[[Rows, Sizes], Rows]


class Dispatch(Protocol):
    """Signature of a dispatch: runs each token through its experts and sums."""

    def __call__(
        self,
        run: RunExperts,
        x: Float[Array, "tokens embed"],
        experts: Int[Array, "tokens chosen"],
        weights: Float[Array, "tokens chosen"],
        num_experts: int,
    ) -> tuple[Float[Array, "tokens embed"], Int[Array, " tokens"]]:
        """Returns the sums of `weight * expert(token)` over the chosen experts.

        Returns:
          Sums, and the number of dropped experts of each token.
        """
        ...


def sorted_dispatch(
    run: RunExperts,
    x: Float[Array, "tokens embed"],
    experts: Int[Array, "tokens chosen"],
    weights: Float[Array, "tokens chosen"],
    num_experts: int,
) -> tuple[Float[Array, "tokens embed"], Int[Array, " tokens"]]:
    """Runs every token through all of its experts, without dropping any.

    Default of the decoder's `dispatch` argument, and the required signature of any
    replacement. All experts are on this device.

    Args:
      run: Function `run(rows, group_sizes)` that applies experts to rows sorted by
        expert: the first `group_sizes[0]` rows belong to expert 0, and so on.
      x: Tokens.
      experts: Indices of the chosen experts of each token; from `num_experts` on, they
        are of none, and add nothing.
      weights: Weights of the chosen experts.
      num_experts: Total number of experts.

    Returns:
      Weighted sums, added in float32 and rounded once; and zeros, the number of
      dropped experts of each token.
    """
    chosen = experts.shape[-1]
    flat = experts.reshape(-1)
    order = jnp.argsort(flat)  # stable: equal experts keep the tokens' order
    group_sizes = jnp.bincount(flat, length=num_experts).astype(jnp.int32)
    # Entry i of `flat` belongs to token i // chosen.
    rows = run(jnp.take(x, order // chosen, axis=0), group_sizes)
    wide = jnp.promote_types(x.dtype, jnp.float32)
    # The argsort of a permutation is its inverse.
    back = jnp.take(rows, jnp.argsort(order), axis=0).reshape(*experts.shape, -1)
    y = jnp.einsum("tce,tc->te", back.astype(wide), weights.astype(wide))
    return y.astype(x.dtype), jnp.zeros(len(x), jnp.int32)


class Experts(nnx.Module):
    """Experts of a layer, with weights stacked along a leading expert dim.

    Gate and up projection are one kernel, so that they are one product. Experts of a
    config without `gated_mlp` have only an up projection.

    Args:
      config: Config of the decoder, with `config.moe` set.
      rngs: Source of keys.
      param_dtype: Dtype of the parameters.
    """

    def __init__(
        self, config: DecoderConfig, *, rngs: nnx.Rngs, param_dtype: DTypeLike
    ):
        """Initializes normal kernels and, with `expert_bias`, zero biases."""
        moe = config.moe
        assert moe is not None
        embed = moe.latent_size or config.hidden_size
        experts, width = moe.num_experts, moe.intermediate_size
        init = nnx.initializers.normal(config.initializer_range, dtype=param_dtype)
        zeros = partial(jnp.zeros, dtype=param_dtype)
        gated = config.gated_mlp
        shape = (experts, embed, 2, width) if gated else (experts, embed, width)
        kernel = nnx.Param(init(rngs.params(), shape))
        self.gate_up_proj, self.up_proj = (kernel, None) if gated else (None, kernel)
        self.down_proj = nnx.Param(init(rngs.params(), (experts, width, embed)))
        biased = moe.expert_bias
        self.gate_up_bias = nnx.Param(zeros((experts, 2, width))) if biased else None
        self.down_bias = nnx.Param(zeros((experts, embed))) if biased else None
        self.moe = moe
        self.activation = config.hidden_act
        self.product: GroupedProduct = grouped_matmul

    def __call__(
        self, x: Rows, group_sizes: Sizes, expected_rows: int | None = None
    ) -> Rows:
        """Applies the experts to rows sorted by expert.

        Args:
          x: Rows sorted by expert; padding rows, if any, are last.
          group_sizes: Number of rows of each expert.
          expected_rows: Expected number of rows without padding, as in
            `grouped_matmul`.

        Raises:
          ValueError: If `group_sizes` is not of the experts on this device.
        """
        down = self.down_proj[...]
        experts = down.shape[0]
        if len(group_sizes) != experts:
            raise ValueError(
                f"This device has {experts} of {self.moe.num_experts} experts, and the "
                f"dispatch passes it rows of {len(group_sizes)}. Where a plan splits "
                "experts over `ep` (FSDPConfig(expert_parallel=...)), and only there, "
                "the dispatch has to send tokens to other ranks: "
                "Decoder(dispatch=fsdp_jax.ops.expert_parallel_dispatch)."
            )
        up = self.up_proj if self.gate_up_proj is None else self.gate_up_proj
        assert up is not None
        bias = self.gate_up_bias
        kernels = ExpertKernels(up[...], None if bias is None else bias[...], down)
        run = partial(self._apply, expected_rows=expected_rows)
        axis = split_axis(down.shape[1])
        if axis is None:
            y = run(kernels, x, group_sizes)
        else:
            y = run_split(run, axis, kernels, x, group_sizes)
        if self.down_bias is not None:
            y += jnp.take(self.down_bias[...], _owners(x, group_sizes), axis=0)
        return y

    def _apply(
        self,
        kernels: ExpertKernels,
        x: Rows,
        group_sizes: Sizes,
        *,
        expected_rows: int | None,
    ) -> Rows:
        """Applies experts, or a part of the width of each, without the last bias."""
        product = partial(
            _product, self.product, group_sizes=group_sizes, expected_rows=expected_rows
        )
        if self.gate_up_proj is None:
            inside = ACTIVATIONS[self.activation](product(x, kernels.up))
            return product(inside, kernels.down)
        gate, up = _halves(x, kernels.up, product)
        if kernels.up_bias is not None:
            owners = _owners(x, group_sizes)
            of_gate, of_up = jnp.moveaxis(kernels.up_bias, 1, 0)
            gate += jnp.take(of_gate, owners, axis=0)
            up += jnp.take(of_up, owners, axis=0)
        return product(self._activate(gate, up), kernels.down)

    def _activate(self, gate: Array, up: Array) -> Array:
        limit, alpha = self.moe.swiglu_limit, self.moe.swiglu_alpha
        return gated(ACTIVATIONS[self.activation], gate, up, limit, alpha)


def _halves(
    x: Rows,
    kernel: Float[Array, "experts embed 2 width"],
    product: Callable[..., Float[Array, "rows *width"]],
) -> tuple[Float[Array, "rows width"], Float[Array, "rows width"]]:
    """Returns gate and up projections of rows sorted by expert.

    Computed as one product, unless XLA shards the width: the halves of the concatenated
    product would then be on other devices than needed, and XLA would communicate rows.
    """
    if is_split():
        return product(x, kernel[:, :, 0]), product(x, kernel[:, :, 1])
    gate, up = jnp.split(product(x, kernel).reshape(len(x), -1), 2, axis=-1)
    return gate, up


def _product(
    multiply: GroupedProduct,
    x: Rows,
    kernel: Float[Array, "experts embed *width"],
    group_sizes: Sizes,
    expected_rows: int | None,
) -> Float[Array, "rows *width"]:
    """Multiplies each row by its expert's matrix.

    Without a loop over blocks if XLA shards the matrix: it would add one collective per
    block to sum the partial products.
    """
    if is_split() and multiply is grouped_matmul:
        made = jax.lax.ragged_dot(x, kernel, jnp.asarray(group_sizes))
        return checkpoint_name(made, EXPERT_PRODUCT)
    if is_split():
        raise ValueError(
            f"Experts of width {kernel.shape[-1]} that XLA splits over tp, in a "
            "pipeline stage or unevenly, have no product in float8. Leave "
            "expert_product=grouped_matmul, or use tp=1."
        )
    made = multiply(x, kernel, group_sizes, expected_rows=expected_rows)
    return checkpoint_name(made, EXPERT_PRODUCT)


def _owners(x: Rows, group_sizes: Sizes) -> Int[Array, " rows"]:
    """Returns the expert of each row; padding rows get the last and are not used."""
    experts = jnp.arange(len(group_sizes))
    return jnp.repeat(experts, group_sizes, total_repeat_length=len(x))


def _add_itself(
    y: Float[Array, "batch seq embed"],
    x: Float[Array, "batch seq embed"],
    weights: Float[Array, "batch seq chosen"],
) -> Float[Array, "batch seq embed"]:
    """Adds the token, weighted, for each of its experts that computes nothing."""
    wide = jnp.promote_types(x.dtype, jnp.float32)
    weight = weights.astype(wide).sum(-1, keepdims=True)
    return (y.astype(wide) + x.astype(wide) * weight).astype(y.dtype)


class Routed(NamedTuple):
    """What a router chose.

    Attributes:
      stats: Statistics of the router.
      experts: Experts of each token.
    """

    stats: RouterStats
    experts: Int[Array, "batch seq chosen"]


class MoE(nnx.Module):
    """Mixture of experts: router, experts, and an optional shared MLP for all tokens.

    Args:
      config: Config of the decoder, with `config.moe` set.
      rngs: Source of keys.
      param_dtype: Dtype of the parameters.
      dispatch: Function that runs experts, with the signature of `sorted_dispatch`.
      hashes: Whether the router only weights experts that follow from the token's id.
    """

    def __init__(
        self,
        config: DecoderConfig,
        *,
        rngs: nnx.Rngs,
        param_dtype: DTypeLike,
        dispatch: Dispatch = sorted_dispatch,
        hashes: bool = False,
    ):
        """Initializes router, experts, shared MLP and its gate."""
        moe = config.moe
        assert moe is not None
        std, embed = config.initializer_range, config.hidden_size
        self.router = Router(
            moe, embed, chooses=not hashes, std=std, rngs=rngs, param_dtype=param_dtype
        )
        self.experts = Experts(config, rngs=rngs, param_dtype=param_dtype)
        shared = partial(MLP, config, bias=False, rngs=rngs, param_dtype=param_dtype)
        width = moe.shared_intermediate_size
        self.shared_expert = None if width is None else shared(width)
        gate = partial(Linear, std=std, rngs=rngs, param_dtype=param_dtype)
        self.shared_gate = gate((embed,), (1,)) if moe.shared_gate else None
        latent = partial(gate, bias=config.mlp_bias)
        narrow = None if moe.latent_size is None else (moe.latent_size,)
        self.latent_in = latent((embed,), narrow) if narrow else None
        self.latent_out = latent(narrow, (embed,)) if narrow else None
        own = MoENorms(config, param_dtype=param_dtype) if moe.own_norms else None
        self.norms = own
        zeros = jnp.zeros(embed, param_dtype)
        self.output_bias = nnx.Param(zeros) if moe.output_bias else None
        self.dispatch = dispatch
        self.num_experts = moe.num_experts

    def __call__(
        self,
        x: Float[Array, "batch seq embed"],
        experts: Int[Array, "batch seq chosen"] | None = None,
        stream: Float[Array, "batch seq embed"] | None = None,
    ) -> tuple[Float[Array, "batch seq embed"], Routed]:
        """Returns the output for each token, and what the router chose.

        Args:
          x: Tokens.
          experts: Experts of each token; None for those that the router chooses.
          stream: Residual stream; read by norms of their own alone.
        """
        routed = read = x
        if self.norms is not None:
            assert stream is not None
            routed, read = self.norms.to_router(stream), self.norms.input(stream)
        experts, weights, logits = self.router(routed, experts)
        read = read if self.latent_in is None else self.latent_in(x)
        if self.experts.moe.weighted_inputs:  # of one expert, so of one weight
            read, weights = read * weights.astype(read.dtype), jnp.ones_like(weights)
        tokens = read.reshape(-1, read.shape[-1])
        y, dropped = self.dispatch(
            # Rows of the local experts if all experts are chosen equally often: under
            # expert parallelism a rank receives as many rows as it sends.
            partial(self.experts, expected_rows=experts.size),
            tokens,
            experts.reshape(len(tokens), -1),
            weights.reshape(len(tokens), -1),
            self.num_experts,
        )
        stats = router_stats(
            logits,
            experts,
            dropped.reshape(x.shape[:-1]),
            sigmoid=self.experts.moe.scoring == "sigmoid",
        )
        y = y.reshape(read.shape)
        if self.experts.moe.num_zero_experts:
            y = _add_itself(y, read, jnp.where(experts < self.num_experts, 0, weights))
        if self.latent_out is not None:
            y = self.latent_out(y)
        if self.output_bias is not None:
            y += jnp.expand_dims(self.output_bias[...], (0, 1))
        if self.shared_expert is None:
            return y, Routed(stats, experts)
        shared = self.shared_expert(x)
        if self.norms is not None:
            y, shared = self.norms.output(y), self.norms.shared(shared)
        if self.shared_gate is not None:
            shared *= jax.nn.sigmoid(self.shared_gate(x))
        y = y + shared
        y = y / 2 if self.experts.moe.shared_average else y
        return y, Routed(stats, experts)


def expert_parallel_rules(config: DecoderConfig) -> dict[str, int]:
    """Returns the expert dim of a decoder's parameters, by path pattern.

    For `fsdp_jax.FSDPConfig(expert_parallel=...)`; empty if the model has no experts.

    Args:
      config: Config of the decoder.

    Returns:
      Expert dim, in the slice of one layer, by path pattern.
    """
    return {f"{path}.experts": 0 for path in _paths(config)}


def correction_bias_paths(config: DecoderConfig) -> tuple[str, ...]:
    """Returns the paths of router correction biases, which no gradient trains.

    For `FSDPConfig(frozen=...)`, as weight decay would shrink them nevertheless, and
    `MixedPrecisionPolicy(param_name_patterns_in_fp32=...)`; empty if there are none.
    """
    if config.moe is None or not config.moe.correction_bias:
        return ()
    return tuple(
        f"{path}.router.correction_bias" for path in _paths(config, hashed=False)
    )


def _paths(config: DecoderConfig, *, hashed: bool = True) -> list[str]:
    """Returns the path of the `MoE` module of each stack of sparse layers."""
    return [
        f"{stack.path}.mlp"
        for stack in config.layer_stacks
        if stack.kind.channels == "sparse" and (hashed or not stack.kind.hashes)
    ]
