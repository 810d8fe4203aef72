"""Layers from the stages that keep them to those that run them, and gradients back.

At rest a stage has neighbouring layers, so that arrays, checkpoints and optimizers see
the stack in its own order. With virtual stages it runs others.
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


def deal_out(row: ParamPlan, stages: Stages, tree: Any) -> Any:
    """From the chunks that this stage keeps to those that it runs.

    Args:
      row: Of a staged parameter.
      stages: Its stack.
      tree: This device's piece, `[layers of the stage, ...]`, or its encoded form.
    """
    return _exchange(row, stages, tree, _routes(stages))


def bring_back(row: ParamPlan, stages: Stages, tree: Any) -> Any:
    """The inverse of `deal_out`, for gradients."""
    back = [(to, there, source, here) for source, here, to, there in _routes(stages)]
    return _exchange(row, stages, tree, back)


Route = tuple[int, int, int, int]
"""`(source stage, its slot, destination stage, its slot)` of one chunk."""


def _routes(stages: Stages) -> list[Route]:
    kept = [divmod(g, stages.num_virtual) for g in range(stages.num_chunks)]
    run = [divmod(g, stages.num_stages) for g in range(stages.num_chunks)]
    return [
        (source, here, to, there)
        for (source, here), (there, to) in zip(kept, run, strict=True)
    ]


def _exchange(row: ParamPlan, stages: Stages, tree: Any, routes: list[Route]) -> Any:
    if stages.num_virtual == 1:
        return tree
    with jax.named_scope("interleave"):
        return jax.tree.map(
            lambda x: at_tp_width(row, lambda x: _moved(x, stages, routes), x), tree
        )


def _moved(x: Array, stages: Stages, routes: list[Route]) -> Array:
    chunks = x.reshape(stages.num_virtual, -1, *x.shape[1:])
    moved = jnp.zeros_like(chunks)
    stage = lax.axis_index("pp")
    nowhere = stages.num_virtual
    for shift, sent in _rounds(stages, routes):
        slots = np.full((stages.num_stages, 2), nowhere)
        for source, here, to, there in sent:
            slots[source, 0], slots[to, 1] = here, there
        here, there = jnp.asarray(slots)[stage]
        chunk = lax.dynamic_index_in_dim(chunks, here, keepdims=False)
        if shift:
            chunk = lax.ppermute(chunk, "pp", [(s, to) for s, _, to, _ in sent])
        moved = moved.at[there].set(chunk, mode="drop")
    return moved.reshape(x.shape)


def _rounds(stages: Stages, routes: list[Route]) -> Iterator[tuple[int, list[Route]]]:
    """Routes in rounds in which no stage sends or receives more than one chunk.

    In each all that is sent goes equally far around the ring.
    """
    for shift in range(stages.num_stages):
        left = [r for r in routes if (r[2] - r[0]) % stages.num_stages == shift]
        while left:
            first = {route[0]: route for route in reversed(left)}
            yield shift, list(first.values())
            left = [route for route in left if route not in first.values()]
