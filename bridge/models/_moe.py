"""Mixture of experts, dropless: tokens sorted by expert, one grouped product each."""

from collections.abc import Callable
from functools import partial
from typing import Protocol

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, DTypeLike, Float, Int

from bridge.models._config import DecoderConfig
from bridge.models._grouped import grouped_matmul
from bridge.models._linear import Linear
from bridge.models._mlp import ACTIVATIONS, MLP
from bridge.models._router import Router
from bridge.models._router_stats import RouterStats, router_stats

Rows = Float[Array, "rows embed"]
Sizes = Int[Array, " experts"] | np.ndarray
RunExperts = Callable[[Rows, Sizes], Rows]


class Dispatch(Protocol):
    """What the decoder asks of a dispatch: each token through its experts, summed."""

    def __call__(
        self,
        run: RunExperts,
        x: Float[Array, "tokens embed"],
        experts: Int[Array, "tokens chosen"],
        weights: Float[Array, "tokens chosen"],
        num_experts: int,
    ) -> tuple[Float[Array, "tokens embed"], Int[Array, " tokens"]]:
        """Sums over the chosen experts `weight * expert(token)`.

        Returns:
          The sums, and how many of its experts each token did not get.
        """
        ...


def sorted_dispatch(
    run: RunExperts,
    x: Float[Array, "tokens embed"],
    experts: Int[Array, "tokens chosen"],
    weights: Float[Array, "tokens chosen"],
    num_experts: int,
) -> tuple[Float[Array, "tokens embed"], Int[Array, " tokens"]]:
    """Gives every token to every expert it chose; none is dropped.

    The default of the decoder's `dispatch` argument, and the signature that any other
    must have. All experts are on this device.

    Args:
      run: `run(rows, group_sizes)` computes rows sorted by expert, of which the first
        `group_sizes[0]` belong to the first, and so on.
      x: Tokens.
      experts: The experts that each token chose.
      weights: What each one's word weighs.
      num_experts: Experts in all.

    Returns:
      The weighted sums, added in float32 and rounded once; and zeros, for every token
      got all experts it chose.
    """
    chosen = experts.shape[-1]
    flat = experts.reshape(-1)
    order = jnp.argsort(flat)  # stable: equal experts keep the tokens' order
    group_sizes = jnp.bincount(flat, length=num_experts).astype(jnp.int32)
    rows = run(jnp.take(x, order // chosen, axis=0), group_sizes)
    wide = jnp.promote_types(x.dtype, jnp.float32)
    back = jnp.take(rows, jnp.argsort(order), axis=0).reshape(*experts.shape, -1)
    y = jnp.einsum("tce,tc->te", back.astype(wide), weights.astype(wide))
    return y.astype(x.dtype), jnp.zeros(len(x), jnp.int32)


class Experts(nnx.Module):
    """The weights of all experts of a layer, experts first.

    Gate and up are one kernel, so that a token meets them in one product.

    Args:
      config: Sizes and traits; `config.moe` is set.
      rngs: Source of keys.
      param_dtype: Dtype of the parameters.
    """

    def __init__(
        self, config: DecoderConfig, *, rngs: nnx.Rngs, param_dtype: DTypeLike
    ):
        """Makes normal kernels and, if asked for, zero biases."""
        moe = config.moe
        assert moe is not None
        experts, embed, width = (
            moe.num_experts,
            config.hidden_size,
            moe.intermediate_size,
        )
        init = nnx.initializers.normal(config.initializer_range, dtype=param_dtype)
        zeros = partial(jnp.zeros, dtype=param_dtype)
        self.gate_up_proj = nnx.Param(init(rngs.params(), (experts, embed, 2, width)))
        self.down_proj = nnx.Param(init(rngs.params(), (experts, width, embed)))
        biased = moe.expert_bias
        self.gate_up_bias = nnx.Param(zeros((experts, 2, width))) if biased else None
        self.down_bias = nnx.Param(zeros((experts, embed))) if biased else None
        self.moe = moe
        self.activation = config.hidden_act

    def __call__(
        self, x: Rows, group_sizes: Sizes, expected_rows: int | None = None
    ) -> Rows:
        """Runs rows that are sorted by expert.

        Args:
          x: Rows; what a dispatch leaves room for, and is of no expert, at the end.
          group_sizes: How many are of each expert.
          expected_rows: How many there are of all of them, as for `grouped_matmul`.

        Raises:
          ValueError: If the rows are of other experts than those at hand.
        """
        kernel = self.gate_up_proj[...]
        experts = kernel.shape[0]
        if len(group_sizes) != experts:
            raise ValueError(
                f"This device has {experts} of {self.moe.num_experts} experts, and the "
                f"dispatch hands it rows of {len(group_sizes)}. Where a plan splits "
                "experts over `ep` (FSDPConfig(expert_parallel=...)), and only there, "
                "the dispatch has to send tokens to other ranks: Decoder(dispatch="
                "fsdp_jax.ops.expert_parallel_dispatch)."
            )
        down, owner = self.down_proj[...], None
        product = partial(
            _product, group_sizes=group_sizes, expected_rows=expected_rows
        )
        gate, up = _halves(x, kernel, product)
        if self.gate_up_bias is not None:
            owner = jnp.repeat(
                jnp.arange(experts), group_sizes, total_repeat_length=x.shape[0]
            )
            of_gate, of_up = jnp.moveaxis(self.gate_up_bias[...], 1, 0)
            gate += jnp.take(of_gate, owner, axis=0)
            up += jnp.take(of_up, owner, axis=0)
        y = product(self._activate(gate, up), down)
        if self.down_bias is not None and owner is not None:
            y += jnp.take(self.down_bias[...], owner, axis=0)
        return y

    def _activate(self, gate: Array, up: Array) -> Array:
        limit, alpha = self.moe.swiglu_limit, self.moe.swiglu_alpha
        if limit is None or alpha is None:
            return ACTIVATIONS[self.activation](gate) * up
        gate, up = jnp.minimum(gate, limit), jnp.clip(up, -limit, limit)
        return (up + 1) * gate * jax.nn.sigmoid(gate * alpha)


def _halves(
    x: Rows,
    kernel: Float[Array, "experts embed 2 width"],
    product: Callable[..., Float[Array, "rows width"]],
) -> tuple[Float[Array, "rows width"], Float[Array, "rows width"]]:
    """What gates and what is gated, of rows sorted by expert.

    In one product, unless XLA splits the width over devices: halves of gate beside up
    lie on other devices than the product's, and it would send rows to mend that.
    """
    if _is_split():
        return (
            product(x, kernel[:, :, 0]),
            product(x, kernel[:, :, 1]),
        )
    experts, embed, _, width = kernel.shape
    kernel = kernel.reshape(experts, embed, 2 * width)
    gate, up = jnp.split(product(x, kernel), 2, axis=-1)
    return gate, up


def _product(
    x: Rows,
    kernel: Float[Array, "experts embed width"],
    group_sizes: Sizes,
    expected_rows: int | None,
) -> Float[Array, "rows width"]:
    """Each row times its expert's matrix.

    In no loop where XLA splits the matrix: it would add up the parts of each block's
    rows by a collective of their own.
    """
    if _is_split():
        return jax.lax.ragged_dot(x, kernel, jnp.asarray(group_sizes))
    return grouped_matmul(x, kernel, group_sizes, expected_rows=expected_rows)


def _is_split() -> bool:
    """Whether some axis of the mesh is left to XLA: that of tensor parallelism."""
    mesh = jax.sharding.get_abstract_mesh()
    return any(mesh.shape[axis] > 1 for axis in mesh.auto_axes)


class MoE(nnx.Module):
    """Router, experts, and an MLP that all tokens share, if there is one.

    Args:
      config: Sizes and traits; `config.moe` is set.
      rngs: Source of keys.
      param_dtype: Dtype of the parameters.
      dispatch: Brings tokens to their experts; the signature of `sorted_dispatch`.
    """

    def __init__(
        self,
        config: DecoderConfig,
        *,
        rngs: nnx.Rngs,
        param_dtype: DTypeLike,
        dispatch: Dispatch = sorted_dispatch,
    ):
        """Makes the parts."""
        moe = config.moe
        assert moe is not None
        std, embed = config.initializer_range, config.hidden_size
        self.router = Router(moe, embed, std=std, rngs=rngs, param_dtype=param_dtype)
        self.experts = Experts(config, rngs=rngs, param_dtype=param_dtype)
        shared = partial(MLP, config, bias=False, rngs=rngs, param_dtype=param_dtype)
        width = moe.shared_intermediate_size
        self.shared_expert = None if width is None else shared(width)
        gate = partial(Linear, std=std, rngs=rngs, param_dtype=param_dtype)
        self.shared_gate = gate((embed,), (1,)) if moe.shared_gate else None
        self.dispatch = dispatch
        self.num_experts = moe.num_experts

    def __call__(
        self, x: Float[Array, "batch seq embed"]
    ) -> tuple[Float[Array, "batch seq embed"], RouterStats]:
        """Works on each token by itself, and says what the router did."""
        experts, weights, logits = self.router(x)
        tokens = x.reshape(-1, x.shape[-1])
        y, dropped = self.dispatch(
            # Here and elsewhere, if all experts are chosen as often.
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
        y = y.reshape(x.shape)
        if self.shared_expert is None:
            return y, stats
        shared = self.shared_expert(x)
        if self.shared_gate is not None:
            shared *= jax.nn.sigmoid(self.shared_gate(x))
        return y + shared, stats


def expert_parallel_rules(config: DecoderConfig) -> dict[str, int]:
    """Says which dim of a decoder's parameters counts experts.

    For `fsdp_jax.FSDPConfig(expert_parallel=...)`; empty if the model has no experts.

    Args:
      config: Of the decoder.

    Returns:
      Path patterns, and the dim in the slice of one layer.
    """
    return {f"{path}.experts": 0 for path in _paths(config)}


def correction_bias_paths(config: DecoderConfig) -> tuple[str, ...]:
    """Names the parameters of a decoder that no gradient trains: routers' biases.

    For `FSDPConfig(frozen=...)`, since weight decay would shrink them all the same, and
    `MixedPrecisionPolicy(param_name_patterns_in_fp32=...)`; empty if there are none.
    """
    if config.moe is None or not config.moe.correction_bias:
        return ()
    return tuple(f"{path}.router.correction_bias" for path in _paths(config))


def _paths(config: DecoderConfig) -> list[str]:
    """Paths of the `MoE` of each stack of layers that has one."""
    runs = config.layer_runs
    stacks = ["layers"] if len(runs) == 1 else [f"layers.{i}" for i in range(len(runs))]
    pairs = zip(stacks, runs, strict=True)
    return [f"{stack}.mlp" for stack, run in pairs if run.sparse]
