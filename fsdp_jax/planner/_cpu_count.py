"""Counts a step's memory and collectives with the compiler for CPUs."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import optax

from fsdp_jax._report import format_bytes, html_document, html_page
from fsdp_jax._tree import PyTree
from fsdp_jax.hlo._parse import parse
from fsdp_jax.planner._comm_table import SentRow, sent_grid, sent_rows
from fsdp_jax.planner._compile import text_of
from fsdp_jax.planner._gpu import find_gpu
from fsdp_jax.planner._schedule import schedule_of
from fsdp_jax.planner._timeline import replay
from fsdp_jax.sharding._plan import Plan
from fsdp_jax.step._loss_arguments import LossFn
from fsdp_jax.training._memory_check import compiled_bytes
from fsdp_jax.training._state import abstract_state
from fsdp_jax.training._train_step import make_train_step

_TIMES = ("seconds", "exposed_seconds")
"""Fields of a row that the compiler for CPUs says nothing of."""


@dataclasses.dataclass(frozen=True, repr=False)
class CpuCount:
    """A step compiled for CPUs: what it needs and sends, without times.

    Attributes:
      mesh: Sizes of the mesh axes.
      compiled_bytes: Peak bytes on a device, as XLA:CPU assigns them.
      sent: Collectives, in the dtypes of XLA:CPU and with times that say nothing.
    """

    mesh: dict[str, int]
    compiled_bytes: int
    sent: tuple[SentRow, ...]

    def to_dict(self) -> dict[str, Any]:
        """Returns the count as JSON values, under the names of a plan's."""
        rows = [dataclasses.asdict(row) for row in self.sent]
        return {
            "compiler": "cpu",
            "jax": jax.__version__,
            "mesh": {axis: size for axis, size in self.mesh.items() if size > 1},
            "memory_compiled": self.compiled_bytes,
            "collectives": [
                {k: v for k, v in row.items() if k not in _TIMES} for row in rows
            ],
        }

    def save_json(self, path: str | Path) -> None:
        """Writes `to_dict()` to a file."""
        Path(path).write_text(json.dumps(self.to_dict(), indent=1) + "\n")

    def save_html(self, path: str | Path) -> None:
        """Writes the tables to a file for a browser."""
        Path(path).write_text(html_document("fsdp-jax plan", self._repr_html_()))

    def __repr__(self) -> str:
        """Formats headline and table as text."""
        table = sent_grid(self.sent, timed=False)
        return "\n".join([self._headline(), "", table.as_text()])

    def _repr_html_(self) -> str:
        """Formats headline and table as HTML."""
        return html_page([self._headline(), sent_grid(self.sent, timed=False)])

    def _headline(self) -> str:
        size = format_bytes(self.compiled_bytes)
        return f"memory: {size} a device, as the compiler for CPUs assigns it"


def count_on_cpu(
    plan: Plan,
    loss_fn: LossFn,
    tx: optax.GradientTransformation,
    batch: PyTree,
    **step_options: Any,
) -> CpuCount:
    """Counts a step's memory and collectives with XLA:CPU, where XLA:GPU is missing.

    Args:
      plan: Plan from `fully_shard`, on simulated CPU devices.
      loss_fn: Loss function, as for `make_train_step`.
      tx: Optimizer.
      batch: Global batch, of concrete or abstract arrays.
      **step_options: Options of `make_train_step`.
    """
    step = make_train_step(plan, loss_fn, tx, **step_options)
    compiled = step.lower(abstract_state(plan, tx), batch).compile()
    # XLA:CPU runs all collectives synchronously: the counts need no particular model.
    cost = find_gpu("h200").cost
    schedule = schedule_of(parse(text_of(compiled)))
    timeline = replay(schedule, cost, plan.mesh.size)
    rows = sent_rows(timeline, plan)
    return CpuCount(dict(plan.mesh.shape), compiled_bytes(compiled), rows)
