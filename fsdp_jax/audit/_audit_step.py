"""Does a compiled program do what its plan says? All that it does not, in one error."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from fsdp_jax._report import html_page
from fsdp_jax.audit._check_collectives import is_context, travel
from fsdp_jax.audit._check_overlap import exposed
from fsdp_jax.audit._check_pipeline import in_stages
from fsdp_jax.audit._check_placement import at_rest
from fsdp_jax.audit._check_resharding import kept
from fsdp_jax.audit._check_tensor_parallel import over_tp
from fsdp_jax.audit._expected import legs
from fsdp_jax.audit._mismatch import Difference, difference_grid
from fsdp_jax.audit._report import Audited, audited
from fsdp_jax.hlo._collectives import Moved, Program, moved, program_of
from fsdp_jax.sharding._plan import Plan


class AuditError(AssertionError):
    """A program does otherwise than its plan says.

    Attributes:
      differences: All of them, as written in the message.
    """

    def __init__(self, differences: list[Difference]):
        self.differences = tuple(map(str, differences))
        self._headline = (
            f"The program differs from its plan in {len(differences)} way(s):"
        )
        self._grid = difference_grid(differences)
        lines = "\n".join(f"- {line}" for line in self.differences)
        super().__init__(f"{self._headline}\n{lines}")

    def _repr_html_(self) -> str:
        """The same for a notebook, as a table."""
        return html_page([self._headline, self._grid])


def audit_step(
    plan: Plan, compiled: Any, *, accumulate: int = 1, overlapped: bool = False
) -> Audited:
    """Checks that a program moves what its plan says, and nothing else of any size.

    XLA, a loss with a `psum` of its own, a `jit` without `out_shardings` or a wrong
    option can each turn FSDP into something slower or larger that computes the same
    numbers. This reads the program instead: weights kept for backward, wrong dtypes on
    the wire, collectives that the plan does not need, reductions in every microbatch
    that belong behind the last one, parameters that lie whole, tp lost in a gather,
    matrices that cross tp, collectives over other axes, and what one stage of a
    pipeline would wait for without end.

    Not judged: activations over `tp`, tokens on their way to experts over `ep`, keys
    and values that the attentions of `fsdp_jax.ops` send over `cp`, what the optimizer
    sends, all-reduces of scalars and other small arrays, and how often a
    unit is gathered, since it may be used more than once. Of a program compiled for
    CPUs besides: dtypes, since XLA widens bfloat16 there, and whether weights of units
    in no stack are kept, since it drops the barriers that keep it from doing so; lower
    the step, or compile it for GPUs, and audit that. Of text: how results lie. XLA for
    GPUs lays what it all-reduces together end to end, so that there the number of
    elements is judged.

    Args:
      plan: What the program was made for.
      compiled: What `step.lower(state, batch)` returns, its `.compile()`, or the text
        of that.
      accumulate: Microbatches a step, as `make_train_step` was told.
      overlapped: Also check that in loops over layers something is computed while
        weights are gathered and gradients reduced. Only a program compiled for GPUs
        shows that, in the order of its schedule.

    Returns:
      What the program moves in a step; print it.

    Raises:
      AuditError: If it does otherwise; with all differences, each with what the plan
        says, what the program does, and the likely fix.
      TypeError: If `compiled` is nothing that was lowered or compiled.
      ValueError: If it is no HLO, or has no schedule and `overlapped` is asked for.
    """
    program = program_of(compiled, plan.mesh)
    if overlapped and not program.is_scheduled_for_gpus:
        raise ValueError(
            "audit_step(overlapped=True) reads the order of a schedule, which only a "
            "program compiled for GPUs shows: compile for them, or leave it out."
        )
    arrays = list(moved(program, plan.mesh))
    found = _differences(plan, program, arrays, accumulate, overlapped)
    if differences := list(dict.fromkeys(found)):
        raise AuditError(differences)
    return audited(arrays)


def _differences(
    plan: Plan, program: Program, arrays: list[Moved], accumulate: int, overlapped: bool
) -> Iterator[Difference]:
    yield from in_stages(plan, arrays)
    arrays = [one for one in arrays if not is_context(one)]
    planned = legs(plan)
    yield from at_rest(plan, program)
    yield from travel(plan, program, arrays, planned)
    yield from kept(plan, program, arrays, planned, accumulate)
    yield from over_tp(plan, arrays)
    if overlapped:
        yield from exposed(program, arrays, planned, accumulate)
