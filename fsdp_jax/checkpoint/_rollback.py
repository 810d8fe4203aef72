"""Makes way for the saves of a run that goes on from an older step than its newest."""

from __future__ import annotations

import logging
import os

import jax

from fsdp_jax.checkpoint._multihost import together
from fsdp_jax.checkpoint._paths import as_path
from fsdp_jax.checkpoint._replace import steps_in
from fsdp_jax.checkpoint._steps import committed_steps, set_aside


def make_way(path: str | os.PathLike[str], resumed: int | None) -> None:
    """Renames every step behind the one that the run goes on from.

    They are kept, under names that are not steps: else no save could become the newest
    step. So is a folder that has the name of a step and is none.

    Args:
      path: Directory of the run.
      resumed: Step that was loaded; None if none was, for the newest step.
    """
    with together("Setting steps aside"):
        if jax.process_index() == 0 and as_path(path).is_dir():
            _set_aside_after(path, resumed)


def _set_aside_after(path: str | os.PathLike[str], resumed: int | None) -> None:
    committed = committed_steps(path)
    if resumed is None:
        resumed = max(committed, default=-1)
    # The newest first: if this is interrupted, no step that stays is behind a gap.
    for step in sorted(steps_in(as_path(path)), reverse=True):
        if step <= resumed:
            continue
        is_step = step in committed
        to = set_aside(path, step, "abandoned" if is_step else "stray")
        logging.getLogger("fsdp_jax").warning(
            "'%s' goes on from step %d: step %d%s is kept as '%s'.",
            f"{path}",
            resumed,
            step,
            "" if is_step else ", which is not complete,",
            to.name,
        )
