"""Sampling of the next token."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Key

_LEAST_TEMPERATURE = 1e-30
"""Of logits below 1e8 it makes no infinite score in float32."""


@dataclasses.dataclass(frozen=True)
class Sampling:
    """Settings for sampling the next token.

    Filters are applied in transformers' order: temperature, `top_k`, `top_p`.

    Args:
      temperature: Divisor of the logits; 0 for the most likely token.
      top_k: Number of most likely tokens to sample from; None for all.
      top_p: Total probability that the smallest set of most likely tokens to sample
        from must reach; None for all tokens.

    Raises:
      ValueError: If a value is out of range, or has no effect. All are listed.

    Source: transformers `generation/logits_process.py`; top-p: Holtzman et al. 2020.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None

    def __post_init__(self):
        """Validates the values."""
        wrong = []
        if not 0 <= self.temperature < float("inf"):
            wrong.append(f"temperature={self.temperature}: a finite number, at least 0")
        elif 0 < self.temperature < _LEAST_TEMPERATURE:
            wrong.append(
                f"temperature={self.temperature}: scores would overflow; use 0, or at "
                f"least {_LEAST_TEMPERATURE}"
            )
        if self.top_k is not None and not _is_count(self.top_k):
            wrong.append(f"top_k={self.top_k} must be a whole number, at least 1")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            wrong.append(f"top_p={self.top_p} must be above 0 and at most 1")
        filters = [n for n in ("top_k", "top_p") if getattr(self, n) is not None]
        if self.temperature == 0 and filters:
            wrong.append(
                f"temperature=0 takes the likeliest token, so {' and '.join(filters)} "
                "would do nothing: set a temperature"
            )
        if wrong:
            raise ValueError(f"Sampling: {'; '.join(wrong)}.")


def _is_count(number: object) -> bool:
    is_number = isinstance(number, int | np.integer)
    return is_number and not isinstance(number, bool) and int(number) >= 1


GREEDY = Sampling()
"""Greedy sampling: always the most likely token."""


def sample(
    logits: Float[Array, "batch vocab"], keys: Key[Array, " batch"], sampling: Sampling
) -> Int[Array, " batch"]:
    """Samples one token per row.

    Args:
      logits: Logits of the full vocabulary.
      keys: One key per row, so that the tokens of a row do not depend on the batch.
      sampling: Sampling settings.

    Returns:
      Sampled tokens, int32.
    """
    wide = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
    if sampling.temperature == 0:
        return jnp.argmax(wide, axis=-1).astype(jnp.int32)
    scores = _filtered(wide / sampling.temperature, sampling)
    return jax.vmap(jax.random.categorical)(keys, scores).astype(jnp.int32)


def _filtered(
    scores: Float[Array, "batch vocab"], sampling: Sampling
) -> Float[Array, "batch vocab"]:
    """Masks all but the most likely tokens; tokens tied with the last one are kept."""
    if sampling.top_k is not None:
        best, _ = jax.lax.top_k(scores, min(sampling.top_k, scores.shape[-1]))
        scores = jnp.where(scores < best[:, -1:], -jnp.inf, scores)
    if sampling.top_p is not None:
        falling = jnp.flip(jnp.sort(scores, axis=-1), axis=-1)
        reached = jnp.cumsum(jax.nn.softmax(falling, axis=-1), axis=-1)
        # Keeps the token that reaches `top_p`, and so at least the most likely one.
        beyond = jnp.pad(reached[:, :-1] >= sampling.top_p, ((0, 0), (1, 0)))
        least = jnp.min(jnp.where(beyond, jnp.inf, falling), axis=-1, keepdims=True)
        scores = jnp.where(scores < least, -jnp.inf, scores)
    return scores
