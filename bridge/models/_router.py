"""Routers: choice of the experts of each token, and their weights."""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, DTypeLike, Float, Int

from bridge.models._linear import Linear
from bridge.models._moe_config import MoEConfig


class Router(nnx.Module):
    """Router that chooses experts for each token, with the dtypes of transformers.

    The correction bias gets no gradient. Freeze it (`correction_bias_paths`), as an
    optimizer's weight decay would shrink it nevertheless.

    Args:
      config: Config of the experts.
      hidden_size: Width of a token.
      chooses: Whether it chooses experts; else it weights those it is given.
      std: Standard deviation of the initial kernel.
      rngs: Source of keys.
      param_dtype: Dtype of the parameters.

    Source: transformers, the `*TopKRouter` of each family; see `MoEConfig`.
    """

    def __init__(
        self,
        config: MoEConfig,
        hidden_size: int,
        *,
        chooses: bool = True,
        std: float,
        rngs: nnx.Rngs,
        param_dtype: DTypeLike,
    ):
        """Initializes the projection and, if configured, a zero correction bias."""
        self.gate = Linear(
            (hidden_size,),
            (config.num_choices,),
            bias=config.router_bias,
            std=std,
            rngs=rngs,
            param_dtype=param_dtype,
        )
        # Always float32, as in transformers: it is updated in steps of 1e-3, which
        # would be lost in bfloat16.
        bias = jnp.zeros(config.num_choices, jnp.float32)
        corrected = config.correction_bias and chooses
        self.correction_bias = nnx.Param(bias) if corrected else None
        self.chooses = chooses
        scales = jnp.ones(config.num_experts, param_dtype)
        self.expert_scale = nnx.Param(scales) if config.expert_scale else None
        self.config = config

    def __call__(
        self,
        x: Float[Array, "batch seq embed"],
        experts: Int[Array, "batch seq chosen"] | None = None,
    ) -> tuple[
        Int[Array, "batch seq chosen"],
        Float[Array, "batch seq chosen"],
        Float[Array, "batch seq experts"],
    ]:
        """Chooses the experts of each token.

        Args:
          x: Tokens.
          experts: Experts that were chosen before, of which only the weights are
            computed; None to choose.

        Returns:
          Indices of the chosen experts, best first; their weights; and the logits of
          all experts.
        """
        config = self.config
        logits = self.gate(_widen(x) if config.float32_logits else x)
        if config.scoring == "softmax_of_chosen":
            experts = self._choose(logits) if experts is None else experts
            best = jnp.take_along_axis(logits, experts, axis=-1)
            return experts, jax.nn.softmax(best, axis=-1), logits
        if config.scoring == "sparsemixer":
            experts = self._choose(logits) if experts is None else experts
            return experts, self._weights_among_close(logits, experts), logits
        scores = _SCORES[config.scoring](_widen(logits))
        if experts is None:
            wide = _widen(logits)
            experts = self._choose(wide if config.corrected_logits else scores)
        weights = jnp.take_along_axis(scores, experts, axis=-1)
        if config.norm_topk_prob:
            total = weights.sum(axis=-1, keepdims=True)
            # Scores that are not of a softmax can all underflow to 0.
            least = 0 if config.scoring == "softmax" else config.norm_topk_eps
            weights /= total + least
        weights *= config.routed_scaling_factor
        if self.expert_scale is not None:
            scales = self.expert_scale[...].astype(weights.dtype)
            weights *= jnp.take(scales, experts, axis=0)
        if config.rounded_weights:
            weights = weights.astype(x.dtype)
        return experts, weights, logits

    def _weights_among_close(
        self,
        logits: Float[Array, "batch seq experts"],
        chosen: Int[Array, "batch seq two"],
    ) -> Float[Array, "batch seq two"]:
        """Returns each chosen expert's share of the logits close to the best left.

        Source: https://arxiv.org/abs/2409.12136; transformers
          `modeling_phimoe.py::sparsemixer`.
        """
        assert self.config.sparsemixer_jitter is not None
        weights, left = [], logits
        for expert in (chosen[..., :1], chosen[..., 1:]):
            best = left.max(axis=-1, keepdims=True)
            scale = jnp.maximum(jnp.abs(logits), best)
            far = (best - logits) / scale > 2 * self.config.sparsemixer_jitter
            close = jnp.where(jax.lax.stop_gradient(far), -jnp.inf, left)
            shares = jax.nn.softmax(close, axis=-1)
            weights.append(jnp.take_along_axis(shares, expert, axis=-1))
            is_chosen = jax.nn.one_hot(
                expert[..., 0], logits.shape[-1], dtype=jnp.bool_
            )
            left = jnp.where(is_chosen, -jnp.inf, logits)
        return jnp.concatenate(weights, axis=-1)

    def _choose(
        self, scores: Float[Array, "batch seq experts"]
    ) -> Int[Array, "batch seq chosen"]:
        """Returns the experts of the best scores, best first."""
        if not self.chooses:
            raise ValueError(
                "hash_layers: the experts of a token follow from its id, and this "
                "router was given none. Run the layer by its Decoder."
            )
        if self.correction_bias is not None:
            # It changes only the choice, not the weights, to balance the load; it is
            # not trained by gradients.
            bias = jax.lax.stop_gradient(self.correction_bias[...])
            scores = scores + jnp.expand_dims(bias.astype(scores.dtype), (0, 1))
        scores = _mask_groups(scores, self.config)
        return jax.lax.top_k(scores, self.config.num_experts_per_tok)[1]


def _root_of_softplus(logits: Array) -> Array:
    return jnp.sqrt(jax.nn.softplus(logits))


_SCORES = {
    "softmax": jax.nn.softmax,
    "sigmoid": jax.nn.sigmoid,
    "sqrtsoftplus": _root_of_softplus,
}
"""Scores of all experts, by `MoEConfig.scoring`."""


def _widen(x: Array) -> Array:
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def _mask_groups(scores: Array, config: MoEConfig) -> Array:
    """Masks the scores of experts outside of the best groups."""
    if config.n_group is None or config.topk_group is None:
        return scores
    groups = scores.reshape(*scores.shape[:-1], config.n_group, -1)
    if config.group_scoring == "max":
        group_scores = groups.max(axis=-1)
    else:
        group_scores = jax.lax.top_k(groups, 2)[0].sum(axis=-1)
    # Masked scores are 0 or -inf, each as in the transformers model of that scoring.
    lost = -jnp.inf if config.group_scoring == "top2_sum" else 0.0
    _, chosen = jax.lax.top_k(group_scores, config.topk_group)
    open_groups = jax.nn.one_hot(chosen, config.n_group, dtype=jnp.bool_).any(axis=-2)
    kept = jnp.broadcast_to(open_groups[..., None], groups.shape)
    return jnp.where(kept, groups, lost).reshape(scores.shape)
