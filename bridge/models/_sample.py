"""Choosing the next token."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How the next token is drawn from the logits.

    The filters come in transformers' order: temperature, `top_k`, `top_p`.

    Args:
      temperature: Divides the logits; 0 takes the likeliest token, always.
      top_k: Only so many of the likeliest tokens are drawn from; None for all.
      top_p: Only the fewest likeliest tokens whose probabilities reach it are drawn
        from; None for all.

    Raises:
      ValueError: If a number is out of its range, or would do nothing; all offenders.

    Source: transformers `generation/logits_process.py`; top-p: Holtzman et al. 2020.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None

    def __post_init__(self):
        """Checks the ranges."""
        wrong = []
        if not 0 <= self.temperature < float("inf"):
            wrong.append(f"temperature={self.temperature}: a finite number, at least 0")
        if self.top_k is not None and self.top_k < 1:
            wrong.append(f"top_k={self.top_k}: at least 1")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            wrong.append(f"top_p={self.top_p}: above 0, at most 1")
        filters = [n for n in ("top_k", "top_p") if getattr(self, n) is not None]
        if self.temperature == 0 and filters:
            wrong.append(
                f"temperature=0 takes the likeliest token, so {' and '.join(filters)} "
                "would do nothing: set a temperature"
            )
        if wrong:
            raise ValueError(f"Sampling: {'; '.join(wrong)}.")


GREEDY = Sampling()
"""The likeliest token, always."""


def sample(
    logits: Float[Array, "batch vocab"], keys: Key[Array, " batch"], sampling: Sampling
) -> Int[Array, " batch"]:
    """Draws one token a row.

    Args:
      logits: Scores of the whole vocabulary.
      keys: One a row, so that a row's tokens do not depend on who it is batched with.
      sampling: How.

    Returns:
      The tokens, int32.
    """
    wide = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
    if sampling.temperature == 0:
        return jnp.argmax(wide, axis=-1).astype(jnp.int32)
    scores = _filtered(wide / sampling.temperature, sampling)
    return jax.vmap(jax.random.categorical)(keys, scores).astype(jnp.int32)


def _filtered(
    scores: Float[Array, "batch vocab"], sampling: Sampling
) -> Float[Array, "batch vocab"]:
    """Leaves only the likeliest tokens in the running; equal ones stay together."""
    if sampling.top_k is not None:
        best, _ = jax.lax.top_k(scores, min(sampling.top_k, scores.shape[-1]))
        scores = jnp.where(scores < best[:, -1:], -jnp.inf, scores)
    if sampling.top_p is not None:
        falling = jnp.flip(jnp.sort(scores, axis=-1), axis=-1)
        reached = jnp.cumsum(jax.nn.softmax(falling, axis=-1), axis=-1)
        # The one that reaches it is still in, and so is the likeliest in any case.
        beyond = jnp.pad(reached[:, :-1] >= sampling.top_p, ((0, 0), (1, 0)))
        least = jnp.min(jnp.where(beyond, jnp.inf, falling), axis=-1, keepdims=True)
        scores = jnp.where(scores < least, -jnp.inf, scores)
    return scores
