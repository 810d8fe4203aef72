"""The steps of a checkpoint directory: one committed folder each."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import orbax.checkpoint as ocp


@contextmanager
def manager(path: str | os.PathLike[str], *, create: bool) -> Iterator:
    """Orbax's manager of the steps under `path`, closed again whatever happens."""
    options = ocp.CheckpointManagerOptions(
        create=create, enable_async_checkpointing=False
    )
    handlers = {"state": ocp.PyTreeCheckpointHandler()}
    # Orbax refuses relative paths.
    with ocp.CheckpointManager(
        Path(path).absolute(), options=options, item_handlers=handlers
    ) as opened:
        yield opened


def latest_step(path: str | os.PathLike[str]) -> int | None:
    """The newest committed step under `path`, or None if there is none.

    A step that was cut off while it was written is not committed and does not count.
    """
    if not Path(path).is_dir():
        return None
    with manager(path, create=False) as steps:
        return steps.latest_step()


def resolve_step(path: str | os.PathLike[str], step: int | None) -> int:
    """`step`, or the newest one.

    Raises:
      ValueError: If `path` holds no such step.
    """
    if not Path(path).is_dir():
        raise ValueError(f"No checkpoint at '{path}': there is no such directory.")
    with manager(path, create=False) as steps:
        available = sorted(steps.all_steps())
    if not available:
        raise ValueError(f"No checkpoint at '{path}': it holds no committed step.")
    if step is not None and step not in available:
        raise ValueError(
            f"No step {step} in '{path}', which holds {', '.join(map(str, available))}."
        )
    return available[-1] if step is None else step
