"""Generation from prompts of unequal lengths with a KV cache."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import core
from jaxtyping import Array, Bool, Float, Int, Key

from bridge.models._cache import empty_cache
from bridge.models._decoder import Decoder
from bridge.models._layer_inputs import check_exact
from bridge.models._layer_state import LayerState
from bridge.models._positions import check_length
from bridge.models._sample import GREEDY, Sampling, sample


class Generated(NamedTuple):
    """Prompts with their generated tokens.

    Attributes:
      tokens: Prompt and generated tokens of each row, followed by zeros.
      lengths: Number of tokens in each row, including its prompt and stop token.
    """

    tokens: Int[Array, "batch slots"]
    lengths: Int[Array, " batch"]


class _Running(NamedTuple):
    """State of the generation loop between two steps.

    Attributes:
      tokens: Tokens so far, as in `Generated`; the newest is not in the cache yet.
      lengths: Number of tokens in each row so far.
      open: True for rows that have not ended.
      cache: Caches of all stacks.
      step: Number of tokens generated in each open row.
    """

    tokens: Int[Array, "batch slots"]
    lengths: Int[Array, " batch"]
    open: Bool[Array, " batch"]
    cache: list[LayerState | None]
    step: Int[Array, ""]


def generate(
    model: Decoder,
    prompts: Int[Array, "batch prompt"],
    lengths: Int[Array, " batch"],
    *,
    max_new_tokens: int,
    keys: Key[Array, " batch"] | None = None,
    sampling: Sampling = GREEDY,
    stop: tuple[int, ...] = (),
    any_open: Callable[[Bool[Array, " batch"]], Bool[Array, ""]] = jnp.any,
) -> Generated:
    """Generates a continuation of each prompt.

    Args:
      model: Decoder, in any dtype.
      prompts: Token ids, left-aligned; entries beyond `lengths` are ignored.
      lengths: Number of tokens in each prompt, at least 1.
      max_new_tokens: Maximum number of tokens to generate, at least 1.
      keys: One key per row, for sampling; may be None at temperature 0.
      sampling: Sampling settings; greedy by default.
      stop: Tokens that end a row.
      any_open: Function from the mask of open rows to whether to continue. If several
        ranks run this together, it must return the same value on all of them.

    Returns:
      Prompts and continuations, `prompt + max_new_tokens` slots wide.

    Raises:
      ValueError: If `max_new_tokens` is below 1, sampling lacks keys, positions end
        before, or `lengths`, where they are not traced, are none of the prompts.

    Examples:
      >>> model = Decoder(config, rngs=nnx.Rngs(0))
      >>> prompts, lengths = jnp.array([[1, 2, 3], [4, 5, 0]]), jnp.array([3, 2])
      >>> out = bridge.models.generate(model, prompts, lengths, max_new_tokens=4)
      >>> out.tokens.shape
      (2, 7)
    """
    if max_new_tokens < 1:
        raise ValueError(f"generate({max_new_tokens=}) must be at least 1.")
    slots = prompts.shape[1] + max_new_tokens
    subject = f"A prompt of {prompts.shape[1]} with {max_new_tokens=}"
    check_length(model.config, slots, subject)
    if model.config.alibi_bias_max is not None:
        check_exact(slots, model.dtype)
    _check_lengths(prompts, lengths)
    if sampling.temperature and keys is None:
        raise ValueError(f"{sampling} draws at random: pass keys, one a row.")
    if keys is None:
        keys = jax.random.split(jax.random.key(0), prompts.shape[0])

    def choose(states: Array, step: Int[Array, ""]) -> Int[Array, " batch"]:
        own = jax.vmap(jax.random.fold_in, (0, None))(keys, step)
        return sample(model.logits(states)[:, 0], own, sampling)

    def goes_on(now: _Running) -> Bool[Array, ""]:
        return (now.step < max_new_tokens) & any_open(now.open)

    def one_more(now: _Running) -> _Running:
        # The newest token of each row enters the cache here, one step after its choice.
        last = (now.lengths - 1)[:, None]
        newest = jnp.take_along_axis(now.tokens, last, axis=1)
        states, cache = model.extend(newest, last, now.cache)
        return _write(now._replace(cache=cache), choose(states, now.step), stop)

    last, now = _prefill(model, prompts, lengths, max_new_tokens)
    now = _write(now, choose(last, now.step), stop)
    done = jax.lax.while_loop(goes_on, one_more, now)
    return Generated(done.tokens, done.lengths)


def _check_lengths(prompts: Array, lengths: Array) -> None:
    if isinstance(lengths, core.Tracer):
        return
    least, most = int(jnp.min(lengths)), int(jnp.max(lengths))
    if least < 1 or most > prompts.shape[1]:
        raise ValueError(
            f"generate(lengths): {least} to {most} tokens of prompts that are "
            f"{prompts.shape[1]} wide. Give each its number of tokens, at least 1."
        )


def _prefill(
    model: Decoder,
    prompts: Int[Array, "batch prompt"],
    lengths: Int[Array, " batch"],
    max_new_tokens: int,
) -> tuple[Float[Array, "batch 1 embed"], _Running]:
    """Runs all prompts, and returns the states of their last tokens and the carry."""
    batch, width = prompts.shape
    cache = empty_cache(model.config, batch, width + max_new_tokens, model.dtype)
    slots = jnp.broadcast_to(jnp.arange(width, dtype=jnp.int32)[None], prompts.shape)
    # Padding may be any value, including invalid token ids.
    is_token = slots < lengths[:, None]
    tokens = jnp.where(is_token, prompts, 0)
    states, cache = model.extend(tokens, slots, cache, is_token)
    # The state of each prompt's last token predicts the first new one.
    last = jnp.take_along_axis(states, (lengths - 1)[:, None, None], axis=1)
    return last, _Running(
        jnp.pad(tokens, ((0, 0), (0, max_new_tokens))),
        lengths,
        jnp.ones(batch, jnp.bool_),
        cache,
        jnp.int32(0),
    )


def _write(
    now: _Running, chosen: Int[Array, " batch"], stop: tuple[int, ...]
) -> _Running:
    """Appends a token to each open row."""
    rows = jnp.arange(chosen.shape[0])
    # Closed rows rewrite the value in place; writes beyond a full row are dropped.
    old = jnp.take_along_axis(
        now.tokens, jnp.minimum(now.lengths, now.tokens.shape[1] - 1)[:, None], axis=1
    )[:, 0]
    token = jnp.where(now.open, chosen, old)
    ends = jnp.isin(chosen, jnp.asarray(stop, jnp.int32))
    return now._replace(
        tokens=now.tokens.at[rows, now.lengths].set(token, mode="drop"),
        lengths=now.lengths + now.open,
        open=now.open & ~ends,
        step=now.step + 1,
    )
