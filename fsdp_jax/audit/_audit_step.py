"""Audit of a compiled program: raises all differences from its plan."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from fsdp_jax._report import html_page
from fsdp_jax.audit._check_collectives import check_collectives, is_context
from fsdp_jax.audit._check_overlap import exposed
from fsdp_jax.audit._check_pipeline import in_stages
from fsdp_jax.audit._check_placement import check_placement
from fsdp_jax.audit._check_presence import check_presence
from fsdp_jax.audit._check_resharding import kept
from fsdp_jax.audit._check_tensor_parallel import over_tp
from fsdp_jax.audit._check_unsharded import merged, too_many
from fsdp_jax.audit._expected import expected_collectives
from fsdp_jax.audit._mismatch import Difference, difference_grid
from fsdp_jax.audit._report import Audited, audited
from fsdp_jax.hlo._program import (
    CommunicatedArray,
    Program,
    communicated_arrays,
    program_of,
)
from fsdp_jax.sharding._ambient_mesh import check_plan
from fsdp_jax.sharding._plan import Plan


class AuditError(AssertionError):
    """A program differs from its plan.

    Attributes:
      differences: All differences, as lines of the message.
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
        """Formats the differences as an HTML table."""
        return html_page([self._headline, self._grid])


def audit_step(
    plan: Plan, compiled: Any, *, num_microbatches: int = 1, overlapped: bool = False
) -> Audited:
    """Checks that a program runs the plan's collectives and no other large ones.

    XLA, a loss with a `psum` of its own, a `jit` without `out_shardings` or a wrong
    option can each make FSDP slower or larger without changing its numbers. The audit
    reads the program and reports: unsharded weights kept for backward, collectives in
    the wrong dtype, collectives that the plan does not need, deferred reductions that
    run in every microbatch, programs with none of the plan's collectives, updates
    without any reduction of gradients, parameters stored unsharded, gathers that lost
    tp, matrices gathered over tp, collectives over other axes, and collectives in a
    pipeline stage's branch that would deadlock. In a program compiled for GPUs, whose
    schedule shows it, also gathers that XLA merged over units, and more units that are
    unsharded at once than `prefetch + 1`. Those that one iteration of a loop runs, also
    by `unroll`, count as one, and those of a loop that XLA has inlined are not counted.

    Not checked: activations over `tp`, tokens dispatched to experts over `ep`, keys,
    values and borders of rows that `fsdp_jax.ops` sends over `cp`, collectives of the
    optimizer, all-reduces of scalars and other small arrays, and whether each unit is
    gathered and reduced, and how often, since one may be used never or many times. In a
    program compiled for CPUs also not checked: dtypes, since XLA:CPU widens bfloat16,
    and weights kept by units outside of stacks, since XLA:CPU drops the barriers that
    prevent it; audit the lowered step, or compile for GPUs. In text also not checked:
    the shardings of results, and whether updates are of reduced gradients. XLA for GPUs
    concatenates the arrays that it all-reduces together, so only their number of
    elements is compared there.

    Args:
      plan: Plan that the program was made with.
      compiled: `step.lower(state, batch)`, its `.compile()`, or the text of that.
      num_microbatches: Number of microbatches per step, as passed to `make_train_step`.
      overlapped: Whether to also check that loops over layers overlap weight gathers
        and gradient reductions with computation. Needs the schedule of a program
        compiled for GPUs.

    Returns:
      Collectives of a step; print it for a table.

    Raises:
      AuditError: If the program differs from the plan; it lists all differences, each
        with the plan's value, the program's value, and the likely fix.
      TypeError: If `compiled` is neither lowered, compiled nor text.
      ValueError: If the text is not HLO, or `overlapped` is set and the program has no
        schedule for GPUs.

    Examples:
      >>> step = fsdp.make_train_step(plan, loss_fn, tx)
      >>> lowered = step.lower(fsdp.abstract_state(plan, tx), batch)
      >>> audited = fsdp.audit_step(plan, lowered)
      >>> sorted({row.op for row in audited.rows})
      ['all-gather', 'all-reduce', 'reduce-scatter']
    """
    check_plan(plan, "audit_step")
    program = program_of(compiled, plan.mesh)
    if overlapped and not program.is_scheduled_for_gpus:
        raise ValueError(
            "audit_step(overlapped=True) needs a schedule, which only programs "
            "compiled for GPUs have: compile for GPUs, or drop overlapped=True."
        )
    arrays = list(communicated_arrays(program, plan.mesh))
    found = _differences(plan, program, arrays, num_microbatches, overlapped)
    if differences := list(dict.fromkeys(found)):
        raise AuditError(differences)
    return audited(arrays)


def _differences(
    plan: Plan,
    program: Program,
    arrays: list[CommunicatedArray],
    num_microbatches: int,
    overlapped: bool,
) -> Iterator[Difference]:
    yield from in_stages(plan, arrays)
    # Attention over cp is checked for deadlocks only: the plan has no keys and values.
    arrays = [one for one in arrays if not is_context(one)]
    expected = expected_collectives(plan)
    yield from check_placement(plan, program)
    yield from check_collectives(plan, program, arrays, expected)
    yield from check_presence(plan, program, arrays, expected)
    yield from kept(plan, program, arrays, expected, num_microbatches)
    yield from over_tp(plan, program, arrays)
    if program.is_scheduled_for_gpus:
        yield from merged(arrays, expected)
        yield from too_many(plan, program, arrays, expected)
    if overlapped:
        yield from exposed(program, arrays, expected, num_microbatches)
