"""Permutes layers between the stages that store them and the stages that run them.

A stage stores consecutive layers, so that arrays, checkpoints and optimizers see the
stack in its own order. With virtual stages it runs every `num_stages`-th chunk instead.

Example: 3 stages, 2 virtual stages, chunks 0..5 of the stack, two slots a stage.

              stage 0   stage 1   stage 2
    stored     0  1      2  3      4  5
    run        0  3      1  4      2  5

Each round moves at most one chunk from and to every stage, all by the same distance
around the ring, so it is one `ppermute`. Slot read -> slot written by each stage,
`-` for the spare slot `num_virtual`, which stands for "no chunk":

    round  shift  stage 0   stage 1   stage 2
    0      0      0 -> 0    - -> -    1 -> 1     local copy, no collective
    1      1      1 -> -    0 -> 0    - -> 0
    2      2      - -> 1    1 -> 1    0 -> -
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array

from fsdp_jax.sharding._plan import ParamPlan
from fsdp_jax.sharding._stages import Stages
from fsdp_jax.step._collectives import at_tp_width


def permute_layers(param: ParamPlan, stages: Stages, tree: Any) -> Any:
    """Permutes a staged parameter from the order stored to the order in which it runs.

    Args:
      param: Plan of a staged parameter.
      stages: Split of its stack over stages.
      tree: This device's shard, `[layers of the stage, ...]`, or its quantized form.
    """
    return _exchange(param, stages, tree, _routes(stages))


def restore_layers(param: ParamPlan, stages: Stages, tree: Any) -> Any:
    """Restores the stored order of a gradient: the inverse of `permute_layers`."""
    back = [(to, there, source, here) for source, here, to, there in _routes(stages)]
    return _exchange(param, stages, tree, back)


Route = tuple[int, int, int, int]
"""`(source stage, its slot, destination stage, its slot)` of one chunk."""


def _routes(stages: Stages) -> list[Route]:
    # divmod of a chunk's number: (stage, slot) stored, but (slot, stage) run.
    kept = [divmod(g, stages.num_virtual) for g in range(stages.num_chunks)]
    run = [divmod(g, stages.num_stages) for g in range(stages.num_chunks)]
    return [
        (source, here, to, there)
        for (source, here), (there, to) in zip(kept, run, strict=True)
    ]


def _exchange(param: ParamPlan, stages: Stages, tree: Any, routes: list[Route]) -> Any:
    if stages.num_virtual == 1:
        return tree
    with jax.named_scope("interleave"):
        return jax.tree.map(
            lambda x: at_tp_width(param, lambda x: _moved(x, stages, routes), x), tree
        )


def _moved(x: Array, stages: Stages, routes: list[Route]) -> Array:
    chunks = x.reshape(stages.num_virtual, -1, *x.shape[1:])
    moved = jnp.zeros_like(chunks)
    stage = lax.axis_index("pp")
    # The spare slot is one past the end. A read of it is clamped to the last chunk,
    # which no route of the round sends; a write to it is discarded by `mode="drop"`.
    nowhere = stages.num_virtual
    for shift, sent in _rounds(stages, routes):
        slots = np.full((stages.num_stages, 2), nowhere)
        for source, here, to, there in sent:
            slots[source, 0], slots[to, 1] = here, there
        # All stages run one program: the slots are data, looked up by stage.
        here, there = jnp.asarray(slots)[stage]
        chunk = lax.dynamic_index_in_dim(chunks, here, keepdims=False)
        if shift:
            chunk = lax.ppermute(chunk, "pp", [(s, to) for s, _, to, _ in sent])
        moved = moved.at[there].set(chunk, mode="drop")
    return moved.reshape(x.shape)


def _rounds(stages: Stages, routes: list[Route]) -> Iterator[tuple[int, list[Route]]]:
    """Yields `(shift, routes)`: rounds with at most one chunk from and to each stage.

    All chunks of a round move by `shift` stages around the ring.
    """
    for shift in range(stages.num_stages):
        left = [r for r in routes if (r[2] - r[0]) % stages.num_stages == shift]
        while left:
            # One route a source, reversed so that its first one stays. Sources differ
            # and the shift is the same, so destinations differ too.
            first = {route[0]: route for route in reversed(left)}
            yield shift, list(first.values())
            left = [route for route in left if route not in first.values()]
