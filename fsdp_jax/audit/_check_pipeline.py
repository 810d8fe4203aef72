"""Finds collectives in a pipeline stage's branch that would deadlock."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from fsdp_jax.audit._mismatch import Difference, observed
from fsdp_jax.hlo._program import CommunicatedArray
from fsdp_jax.sharding._plan import Plan


def in_stages(plan: Plan, arrays: Sequence[CommunicatedArray]) -> Iterator[Difference]:
    """Yields collectives of all devices inside a branch that one stage takes.

    A collective among the devices of one stage is safe there. But a collective-permute
    has no replica groups in XLA: all devices of the mesh must run it, or none.
    """
    if plan.mesh.shape["pp"] == 1:
        return
    for one in arrays:
        is_of_all = one.op == "collective-permute" or "pp" in (one.axes or ())
        if one.is_in_branch and is_of_all:
            yield Difference(
                f"{one.op} in {one.scope.strip('/') or 'no scope'}",
                "a stage in its turn waits for no other",
                observed(one),
                "send by an all-gather or all-to-all among the devices of a stage; of "
                "rows over cp, by all_gather_attention or ulysses_attention",
            )
