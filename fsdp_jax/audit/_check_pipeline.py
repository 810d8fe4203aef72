"""Finds collectives in a pipeline stage's branch that would deadlock."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from fsdp_jax.audit._mismatch import Difference, observed
from fsdp_jax.hlo._program import CommunicatedArray
from fsdp_jax.sharding._plan import Plan
from fsdp_jax.training._stage_check import remedy, stalling


def in_stages(plan: Plan, arrays: Sequence[CommunicatedArray]) -> Iterator[Difference]:
    """Yields collectives of all devices inside a branch that one stage takes."""
    if plan.mesh.shape["pp"] == 1:
        return
    for one in stalling(arrays):
        yield Difference(
            f"{one.op} in {one.scope.strip('/') or 'no scope'}",
            "a stage in its turn waits for no other",
            observed(one),
            remedy(one),
        )
