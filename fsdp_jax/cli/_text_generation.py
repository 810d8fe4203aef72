"""Continuation of prompts by a sharded model."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jaxtyping import Array, Int

import fsdp_jax as fsdp
from bridge.models import GREEDY, Decoder, Generated, Sampling, generate
from fsdp_jax.cli._chat_template import read_chat_template
from fsdp_jax.cli._model_source import Origin
from fsdp_jax.cli._tokenizer import TextCodec
from fsdp_jax.sharding._mesh import BATCH_AXES, num_devices

Continuation = Callable[..., list[list[int]]]


def encode_prompt(
    codec: TextCodec, origin: Origin, text: str, *, chat: bool
) -> list[int]:
    """Returns the tokens of a prompt.

    Args:
      codec: Tokenizer.
      origin: Model, with its chat template.
      text: Text to continue, or a question.
      chat: Whether it is rendered as a question in the chat template.

    Raises:
      ValueError: If the model has no chat template.
    """
    if not chat:
        return codec.encode(text)
    template = read_chat_template(origin.files)
    if template is None:
        raise ValueError(
            f"'{text}' cannot be a question of a chat: the model has no chat template. "
            "Leave the option out, or add chat_template.jinja to the model."
        )
    text = template.prompt(text)
    return codec.encode_with_offsets(text, add_specials=False)[0]


def check_prompts(
    texts: Sequence[str], prompts: Sequence[Sequence[int]], option: str = "--prompt"
) -> None:
    """Raises a `ValueError` that lists every prompt without tokens.

    Args:
      texts: Prompts.
      prompts: Tokens of each.
      option: Option that names them, for the message.
    """
    if empty := [repr(t) for t, p in zip(texts, prompts, strict=True) if not p]:
        raise ValueError(
            f"{option} {', '.join(empty)}: no tokens, so nothing to continue."
        )


def make_continuation(
    plan: fsdp.Plan,
    *,
    max_new_tokens: int,
    sampling: Sampling = GREEDY,
    seed: int = 0,
    stop: tuple[int, ...] = (),
) -> Continuation:
    """Makes the function that continues prompts, a part of the rows on each device.

    Args:
      plan: Plan of the decoder.
      max_new_tokens: Maximum number of new tokens.
      sampling: Choice of each token.
      seed: Seed of the draws.
      stop: Tokens that end a text.

    Returns:
      Function `(params, prompts, model_state=None) -> rows`. Prompts are lists of token
      ids, none empty; rows are prompts with their continuations, the token that ended
      one included.
    """
    run = functools.partial(
        _generate,
        max_new_tokens=max_new_tokens,
        sampling=sampling,
        stop=stop,
        seed=seed,
    )
    forward = fsdp.make_forward(plan, run)
    ranks = num_devices(plan.mesh, BATCH_AXES)

    def continue_prompts(
        params: Any, prompts: Sequence[Sequence[int]], model_state: Any = None
    ) -> list[list[int]]:
        rows = _rows(prompts, ranks)
        found = forward(params, _on_devices(plan, rows), model_state=model_state)
        # Rows of other hosts too, for whichever prints them.
        texts, ends = multihost_utils.process_allgather(
            (found.tokens, found.lengths), tiled=True
        )
        return [texts[i, : ends[i]].tolist() for i in range(len(prompts))]

    return continue_prompts


def _rows(prompts: Sequence[Sequence[int]], ranks: int) -> dict[str, np.ndarray]:
    """Returns prompts as rows, of which each rank has as many."""
    rows = -(-len(prompts) // ranks) * ranks
    # What fills up the last rows is a prompt of one token, and is dropped again.
    padded = [*prompts, *[[0]] * (rows - len(prompts))]
    tokens = np.zeros((rows, max(map(len, padded))), np.int32)
    for row, prompt in zip(tokens, padded, strict=True):
        row[: len(prompt)] = prompt
    lengths = np.asarray([len(prompt) for prompt in padded], np.int32)
    return {
        "tokens": tokens,
        "lengths": lengths,
        "row": np.arange(rows, dtype=np.uint32),
    }


def _on_devices(plan: fsdp.Plan, rows: dict[str, np.ndarray]) -> Any:
    shard = fsdp.host_shard(plan.mesh)
    count = len(rows["row"])
    share = count // shard.count
    of_this_host = slice(shard.index * share, (shard.index + 1) * share)
    mine = {name: values[of_this_host] for name, values in rows.items()}
    return fsdp.global_batch(plan.mesh, mine, count)


def _generate(
    model: Decoder,
    batch: dict[str, Int[Array, ...]],
    *,
    max_new_tokens: int,
    sampling: Sampling,
    stop: tuple[int, ...],
    seed: int,
) -> Generated:
    fold = functools.partial(jax.random.fold_in, jax.random.key(seed))
    return generate(
        model,
        batch["tokens"],
        batch["lengths"],
        max_new_tokens=max_new_tokens,
        keys=jax.vmap(fold)(batch["row"]),
        sampling=sampling,
        stop=stop,
        # All ranks gather together, so none may stop before the last has.
        any_open=lambda is_open: fsdp.ops.masked_count(is_open) > 0,
    )
