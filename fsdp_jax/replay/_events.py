"""What each device reads, sends and receives in a step, as digests in program order."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jaxtyping import UInt32


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=("digest",),
    meta_fields=("is_computed",),
)
@dataclasses.dataclass(frozen=True)
class Event:
    """A moment of a step at which each rank has something to compare.

    Attributes:
      digest: Digest of it, `uint32[*iterations]` on a rank and
        `uint32[ranks, *iterations]` of all; of a state `uint32[devices, leaves, 2]`.
      is_computed: Whether the rank has computed or stored it, and not received it.
    """

    digest: Any
    is_computed: bool


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=("events",),
    meta_fields=("is_reversed",),
)
@dataclasses.dataclass(frozen=True)
class Loop:
    """The events of a loop's body; their digests have a dim for its iterations.

    Attributes:
      events: Events and loops of the body.
      is_reversed: Whether the last iteration runs first.
    """

    events: tuple[Any, ...]
    is_reversed: bool


Events = tuple["Event | Loop", ...]
"""Events of a program, in its order."""


@dataclasses.dataclass(frozen=True)
class Moment:
    """An event of one iteration.

    Attributes:
      digest: Digests, `uint32[ranks]`, or `uint32[devices, leaves, 2]` of a state.
      is_computed: Whether the rank has computed or stored it, and not received it.
    """

    digest: UInt32[np.ndarray, "ranks ..."]
    is_computed: bool


def in_order(events: Events) -> Iterator[Moment]:
    """Yields the events of all ranks in the order in which they happen.

    Args:
      events: Events with digests in host memory.
    """
    yield from _in_order(events, ())


def _in_order(events: Sequence[Event | Loop], at: tuple[int, ...]) -> Iterator[Moment]:
    for event in events:
        if isinstance(event, Event):
            digest = np.asarray(event.digest)[(slice(None), *at)]
            yield Moment(digest, event.is_computed)
            continue
        leaves = jax.tree.leaves(event)
        numbers = range(leaves[0].shape[1 + len(at)]) if leaves else range(0)
        for number in reversed(numbers) if event.is_reversed else numbers:
            yield from _in_order(event.events, (*at, number))
