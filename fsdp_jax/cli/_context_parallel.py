"""Context parallelism of the commands: attention, and the layout of batches."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int32

import fsdp_jax as fsdp
from bridge.models import (
    DecoderConfig,
    WantedKernel,
    dot_product_attention,
    kernel_of_call,
    plain_recurrence,
    positions_in_order,
)
from bridge.models._positions import check_whole_rows

CPForm = Literal["ring", "all_gather", "ulysses"]
"""Context-parallel attention algorithm."""

SEQUENCES: dict[str, int] = {"tokens": 1, "targets": 1}
"""Dim of each leaf of a batch that is split over `cp`."""

DOCUMENT_SEQUENCES: dict[str, int] = {
    name: 1 for name in ("tokens", "targets", "segment_ids", "positions", "weights")
}
"""The same for a batch of documents."""


def decoder_options(
    cp: int, form: CPForm, kernel: WantedKernel = "auto"
) -> dict[str, Any]:
    """Returns the `attention`, `positions` and `recurrence` of a decoder.

    Args:
      cp: Devices that split rows.
      form: Context-parallel attention algorithm.
      kernel: Attention kernel; auto for the first that the devices can run.
    """
    return {
        "attention": fsdp.ops.split_heads(_attention(cp, form, kernel)),
        "positions": positions_in_order if cp == 1 else fsdp.ops.zigzag_positions,
        "recurrence": (plain_recurrence if cp == 1 else fsdp.ops.all_gather_recurrence),
    }


def _attention(cp: int, form: CPForm, kernel: WantedKernel) -> Callable[..., Any]:
    on_rows = functools.partial(dot_product_attention, kernel=kernel)
    if cp == 1:
        return on_rows
    if form == "ulysses":
        return fsdp.ops.ulysses_attention(on_rows)
    if form == "all_gather":
        return fsdp.ops.all_gather_attention
    return functools.partial(_ring, kernel)


def _ring(wanted: WantedKernel, query: Any, key: Any, value: Any, **how: Any) -> Any:
    """Computes ring attention by the kernel for these heads."""
    features = {name: how.get(name) for name in ("segment_ids", "window", "softcap")}
    kernel = kernel_of_call(query, value, **features, context="ring", kernel=wanted)
    return fsdp.ops.ring_attention(query, key, value, **how, kernel=kernel)


def check_context(
    config: DecoderConfig, cp: int, tp: int, form: CPForm, pp: int = 1
) -> None:
    """Raises a `ValueError` if a model does not support the algorithm."""
    if cp == 1:
        return
    if form == "ring" and pp > 1:
        raise ValueError(
            f"cp={cp}, pp={pp}: --cp-form ring sends keys and values between all "
            "devices at once, but only the devices of one stage run a layer at a time. "
            "Use --cp-form all_gather or ulysses."
        )
    counts, full = [config.num_attention_heads], config.full_attention
    if full is not None and full.num_attention_heads is not None:
        counts.append(full.num_attention_heads)
    heads = next((count for count in counts if count % (cp * tp)), None)
    if form == "ulysses" and heads is not None:
        raise ValueError(
            f"cp={cp}, ulysses: the {heads} heads of this model do not divide over cp="
            f"{cp} x tp={tp}. Use the form ring, or fewer ranks."
        )
    check_whole_rows(config, f"cp={cp}")
    ropes = (config.rope, config.sliding_rope)
    types = {rope.rope_type for rope in ropes if rope is not None}
    if found := sorted(types & {"dynamic", "longrope"}):
        raise ValueError(
            f"cp={cp}: ropes of type {', '.join(map(repr, found))} depend on the "
            "length of a text, but each rank has only its part of each row. Use cp=1."
        )


def check_rows(seq: int, tp: int, cp: int = 1) -> None:
    """Raises a `ValueError` if `seq` tokens of a row do not divide over tp and cp."""
    if tp > 1 and seq % (tp * cp):
        raise ValueError(
            f"--seq {seq}: tp={tp} splits the tokens of a row, and does not divide "
            f"them. Use a multiple of {tp * cp}."
        )
    if cp > 1 and seq % (2 * cp):
        raise ValueError(
            f"--seq {seq}: cp={cp} splits the tokens of a row into {2 * cp} chunks, "
            f"and does not divide them. Use a multiple of {2 * cp}."
        )


def split_rows(
    tokens: Int32[np.ndarray, "batch seq+1"] | dict[str, np.ndarray], cp: int
) -> np.ndarray | dict[str, np.ndarray]:
    """Returns a batch as a step takes it: over `cp` in zig-zag, with targets apart.

    Args:
      tokens: Rows of text, or of documents by name.
      cp: Devices that split rows.
    """
    if cp == 1:
        return tokens
    if isinstance(tokens, dict):
        return fsdp.ops.zigzag(tokens, cp)
    return fsdp.ops.zigzag({"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}, cp)


def num_rows(batch: Any) -> int:
    """Returns the number of rows of a batch."""
    return len(jax.tree.leaves(batch)[0])


def num_targets(batch: Any) -> int:
    """Returns the number of targets of a batch; of pairs with rewards, of tokens."""
    if isinstance(batch, dict):
        return batch["tokens"].size
    rows, length = batch.shape
    return rows * (length - 1)


def abstract_pairs(batch: int, seq: int) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns an abstract batch of preference pairs.

    Args:
      batch: Pairs of the global batch.
      seq: Tokens that a row predicts.
    """
    dtypes = dict.fromkeys(DOCUMENT_SEQUENCES, jnp.int32)
    dtypes["weights"] = jnp.float32
    rows = {n: jax.ShapeDtypeStruct((batch, 2, seq), d) for n, d in dtypes.items()}
    return {**rows, "reference": jax.ShapeDtypeStruct((batch, 2), jnp.float32)}


def abstract_reward_pairs(batch: int, seq: int) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns an abstract batch of preference pairs for a reward model.

    Args:
      batch: Pairs of the global batch.
      seq: Tokens of a row.
    """
    pairs = abstract_pairs(batch, seq)
    return {n: x for n, x in pairs.items() if n not in ("targets", "reference")}


def abstract_rows(batch: int, seq: int, cp: int, *, documents: bool = False) -> Any:
    """Returns an abstract batch.

    Args:
      batch: Rows of the global batch.
      seq: Tokens that a row predicts.
      cp: Devices that split rows.
      documents: Whether rows are of documents.
    """
    if documents:
        dtypes = dict.fromkeys(DOCUMENT_SEQUENCES, jnp.int32)
        dtypes["weights"] = jnp.float32
        return {n: jax.ShapeDtypeStruct((batch, seq), d) for n, d in dtypes.items()}
    if cp == 1:
        return jax.ShapeDtypeStruct((batch, seq + 1), jnp.int32)
    return dict.fromkeys(SEQUENCES, jax.ShapeDtypeStruct((batch, seq), jnp.int32))
