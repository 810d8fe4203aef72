"""Budgets of a compiled step: what a change may cost before a test fails."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax

from fsdp_jax._report import format_bytes
from fsdp_jax.hlo._parse import parse
from fsdp_jax.planner._comm_table import sent_rows
from fsdp_jax.planner._gpu import GPU, find_gpu
from fsdp_jax.planner._kernel import workspace_bytes
from fsdp_jax.planner._schedule import kernels_of, schedule_of
from fsdp_jax.planner._timeline import replay
from fsdp_jax.sharding._plan import Plan
from fsdp_jax.training._memory_check import compiled_bytes


class BudgetError(AssertionError):
    """A compiled step costs more than its budget.

    Attributes:
      over: One line for each budget that is exceeded.
    """

    def __init__(self, over: list[str]):
        self.over = tuple(over)
        lines = "\n".join(f"- {line}" for line in over)
        super().__init__(f"The step exceeds {len(over)} budget(s):\n{lines}")


def assert_budget(
    plan: Plan,
    compiled: jax.stages.Compiled,
    *,
    exposed: float | None = None,
    memory: int | None = None,
    collectives: Mapping[str, int] | None = None,
    gpu: str | GPU = "h200",
) -> Mapping[str, Any]:
    """Checks a compiled step against budgets, for a test that runs without GPUs.

    Compile the step for absent GPUs, `fsdp.estimate_step(...).compiled`, and pin what
    it costs: a change of the model, of options or of a version that costs more fails.

    Args:
      plan: Plan of the step, on the mesh that it was compiled for.
      compiled: Step compiled for GPUs.
      exposed: Fraction of the step that may be exposed communication, as replayed.
      memory: Bytes that a GPU may need.
      collectives: Bytes that each device may send in a step, by opcode
        (`{"all-gather": 20_000_000_000}`); an opcode that is not named may send none,
        except for scalars.
      gpu: Name in `GPUS`, or a GPU, for the replay.

    Returns:
      What the step costs, under the names of the arguments.

    Raises:
      BudgetError: If any budget is exceeded; all are listed.
      ValueError: If no budget is given, or the GPU is unknown.

    Example:
      >>> import fsdp_jax as fsdp
      >>> fsdp.audit.assert_budget.__name__
      'assert_budget'
    """
    if exposed is None and memory is None and collectives is None:
        raise ValueError(
            "assert_budget got none of exposed, memory and collectives: it would check "
            "nothing. Give at least 1."
        )
    found = _costs(plan, compiled, find_gpu(gpu))
    over = []
    if exposed is not None and found["exposed"] > exposed:
        over.append(
            f"exposed: {found['exposed']:.2%} of the step, budget {exposed:.2%}"
        )
    if memory is not None and found["memory"] > memory:
        over.append(
            f"memory: {format_bytes(found['memory'])} a GPU, budget "
            f"{format_bytes(memory)}"
        )
    if collectives is not None:
        over += _over(found["collectives"], collectives)
    if over:
        raise BudgetError(over)
    return found


SCALARS = 1 << 16
"""Bytes of a run up to which a collective is not held to a budget: losses, norms."""


def _costs(plan: Plan, compiled: jax.stages.Compiled, gpu: GPU) -> dict[str, Any]:
    text = compiled.as_text()
    assert text
    schedule = schedule_of(parse(text))
    timeline = replay(schedule, gpu.cost, plan.mesh.size)
    sent: dict[str, int] = {}
    for param in sent_rows(timeline, plan):
        if param.bytes > SCALARS:
            sent[param.op] = sent.get(param.op, 0) + param.bytes * param.times
    return {
        "exposed": timeline.exposed_seconds / timeline.seconds,
        "memory": compiled_bytes(compiled) + workspace_bytes(kernels_of(schedule)),
        "collectives": sent,
    }


def _over(sent: Mapping[str, int], budget: Mapping[str, int]) -> list[str]:
    return [
        f"{op}: {format_bytes(size)} sent a step, budget "
        f"{format_bytes(budget.get(op, 0))}"
        for op, size in sent.items()
        if size > budget.get(op, 0)
    ]
