"""Writing on: prompts of unequal lengths, one token a row and step, from a cache."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, Key

from bridge.models._cache import KeyValues, empty_cache
from bridge.models._decoder import Decoder
from bridge.models._sample import GREEDY, Sampling, sample


class Generated(NamedTuple):
    """Prompts and what was written behind them.

    Attributes:
      tokens: Each row begins with its prompt; what lies behind `lengths` is zeros.
      lengths: Tokens of each row, its prompt and the token that ended it included.
    """

    tokens: Int[Array, "batch slots"]
    lengths: Int[Array, " batch"]


class _Running(NamedTuple):
    """Between two steps.

    Attributes:
      tokens: As in `Generated`; the newest is not in the cache yet.
      lengths: Likewise.
      open: Rows that go on.
      cache: Of all stacks.
      step: Tokens written behind the prompts, ended rows aside.
    """

    tokens: Int[Array, "batch slots"]
    lengths: Int[Array, " batch"]
    open: Bool[Array, " batch"]
    cache: list[KeyValues]
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
    """Writes on from each prompt.

    Args:
      model: The decoder, in any dtype.
      prompts: Token ids, from the left; what lies behind `lengths` is not read.
      lengths: Tokens of each prompt, at least 1.
      max_new_tokens: Tokens to write at most, at least 1.
      keys: One a row, for sampling; None at temperature 0.
      sampling: How tokens are drawn; default the likeliest.
      stop: Tokens that end a row.
      any_open: Says whether any row goes on. Where several ranks run this together,
        it must say the same on all.

    Returns:
      The texts, `prompt + max_new_tokens` slots wide.

    Raises:
      ValueError: If there is nothing to write, or sampling lacks keys.
    """
    if max_new_tokens < 1:
        raise ValueError(f"generate({max_new_tokens=}): at least 1.")
    if sampling.temperature and keys is None:
        raise ValueError(f"{sampling} draws at random: pass keys, one a row.")
    batch, width = prompts.shape
    if keys is None:
        keys = jax.random.split(jax.random.key(0), batch)

    def choose(states: Array, step: Int[Array, ""]) -> Int[Array, " batch"]:
        own = jax.vmap(jax.random.fold_in, (0, None))(keys, step)
        return sample(model.logits(states)[:, 0], own, sampling)

    def goes_on(now: _Running) -> Bool[Array, ""]:
        return (now.step < max_new_tokens) & any_open(now.open)

    def one_more(now: _Running) -> _Running:
        last = (now.lengths - 1)[:, None]
        newest = jnp.take_along_axis(now.tokens, last, axis=1)
        states, cache = model.extend(newest, last, now.cache)
        return _write(now._replace(cache=cache), choose(states, now.step), stop)

    cache = empty_cache(model.config, batch, width + max_new_tokens, model.dtype)
    slots = jnp.broadcast_to(jnp.arange(width, dtype=jnp.int32)[None], prompts.shape)
    # Behind a prompt may stand anything, also what is no token.
    tokens = jnp.where(slots < lengths[:, None], prompts, 0)
    states, cache = model.extend(tokens, slots, cache)
    last = jnp.take_along_axis(states, (lengths - 1)[:, None, None], axis=1)
    now = _Running(
        jnp.pad(tokens, ((0, 0), (0, max_new_tokens))),
        lengths,
        jnp.ones(batch, jnp.bool_),
        cache,
        jnp.int32(0),
    )
    now = _write(now, choose(last, now.step), stop)
    done = jax.lax.while_loop(goes_on, one_more, now)
    return Generated(done.tokens, done.lengths)


def _write(
    now: _Running, chosen: Int[Array, " batch"], stop: tuple[int, ...]
) -> _Running:
    """Writes a token behind each row that is open."""
    rows = jnp.arange(chosen.shape[0])
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
