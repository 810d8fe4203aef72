"""`fsdp-jax audit`: replays part of a run. Not `fsdp_jax.audit`, of compiled steps."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import math
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import jax
import tyro

import fsdp_jax as fsdp
from fsdp_jax.checkpoint._multihost import exchange
from fsdp_jax.checkpoint._paths import as_path
from fsdp_jax.checkpoint._steps import committed_steps
from fsdp_jax.cli._chain import (
    Link,
    broken_links,
    options_digest,
    read_link,
    stored_digest,
    stored_state,
)
from fsdp_jax.cli._errors import CheckFailed
from fsdp_jax.cli._option_schema import schema_of
from fsdp_jax.cli._options import Devices, Group, Unset
from fsdp_jax.cli._run_file import NAME, read_run_file, words_of
from fsdp_jax.cli.commands._train import Train
from fsdp_jax.replay._bound import leaves_beyond

# Sections of options that a replay sets itself, or has no use for. It checks the steps
# that the run checked: their programs record, and round otherwise.
_SECTIONS_NOT_REPLAYED = (
    *("start", "save", "steps", "checkpoints", "evaluation", "logs"),
    *("profiling", "where"),
)


@dataclasses.dataclass(frozen=True)
class Audit:
    """Replay a part of a run that was trained with --chain.

    Reads the checkpoints from one step to another, compares what they hold with what
    their links say, and each link with the one before. Then trains again from the first
    one, with the data and the options of the run, and compares state and position in
    the data with those of the last one.

    The digests do not depend on the number of processes. The order in which collectives
    sum does: with another number than the run had, give --rtol.

    Attributes:
      checkpoint: Directory of `fsdp-jax train --save`.
      first: Step to begin from; default the oldest there is.
      last: Step to compare with; default the newest.
      rtol: Largest difference of an element of the replayed state, relative to the
        largest magnitude in its leaf; default 0, for the same bits.
      scratch: Directory for what the replay saves, which all processes reach; default
        the system's temporary one.
      where: Devices.
    """

    checkpoint: tyro.conf.Positional[Path]
    first: Annotated[int | None, tyro.conf.arg(name="from")] = None
    last: Annotated[int | None, tyro.conf.arg(name="to")] = None
    rtol: Unset[float] = None
    scratch: Unset[Path] = None
    where: Annotated[Devices, Group] = Devices()

    def run(self) -> None:
        """Prints a line for each checkpoint, then whether the last one follows."""
        if self.rtol is not None and not 0 <= self.rtol < math.inf:
            raise ValueError(f"--rtol {self.rtol}: a finite number, at least 0.")
        self.where.pick()
        steps = _between(self.checkpoint, self.first, self.last)
        links = {step: read_link(self.checkpoint, step) for step in steps}
        wrong = broken_links(links)
        for step, link in links.items():
            found = stored_digest(self.checkpoint, step)
            if found != link.state:
                wrong.append(f"step {step}: its state is not the one of its link")
            _print(f"step {step}: state {found[:16]}, link {link.digest[:16]}")
        first, last = links[steps[0]], links[steps[-1]]
        values = _values(self.checkpoint)
        if options_digest(values) != last.options:
            wrong.append(f"step {last.step}: other options than {NAME} has")
        if wrong:
            raise CheckFailed(_not_following(first, last, wrong))
        with _scratch_directory(self.scratch) as directory:
            again = _replay(self.checkpoint, values, first.step, last.step, directory)
            wrong = _differences(again, last)
            if self.rtol is not None and again.state != last.state:
                wrong = [line for line in wrong if line != _differs(last, "state")]
                wrong += _beyond(self.checkpoint, directory, last, self.rtol)
        if wrong:
            raise CheckFailed(_not_following(first, last, wrong))
        _print(f"step {last.step} follows from step {first.step}")


def _print(line: str) -> None:
    if jax.process_index() == 0:
        print(line)


@contextlib.contextmanager
def _scratch_directory(parent: Path | None) -> Iterator[Path]:
    """Makes a directory in process 0 for all, and deletes it when all are done."""
    with contextlib.ExitStack() as stack:
        made = None
        if jax.process_index() == 0:
            made = stack.enter_context(tempfile.TemporaryDirectory(dir=parent))
        yield Path(exchange(made)[0])
        exchange(None)


def _between(path: Path, first: int | None, last: int | None) -> list[int]:
    steps = committed_steps(path)
    asked = [step for step in (first, last) if step is not None]
    if missing := [str(step) for step in asked if step not in steps]:
        raise ValueError(
            f"'{path}' has no step {' and no step '.join(missing)}: it has "
            f"{', '.join(map(str, steps)) or 'none'}."
        )
    low = steps[0] if first is None and steps else first or 0
    high = steps[-1] if last is None and steps else last or 0
    chosen = [step for step in steps if low <= step <= high]
    if len(chosen) < 2:
        raise ValueError(
            f"--from {low} --to {high}: '{path}' has {len(chosen)} step(s) there, and "
            "an audit compares 2 or more. Train with --save-every N."
        )
    return chosen


def _values(path: Path) -> dict[str, Any]:
    return read_run_file(as_path(path) / NAME, schema_of(Train))


def _replay(
    path: Path, values: dict[str, Any], first: int, last: int, directory: Path
) -> Link:
    """Trains again from a step, and saves in a directory; returns the last link."""
    kept = {
        name: value
        for name, value in values.items()
        if name not in _SECTIONS_NOT_REPLAYED
    }
    save = _replayed_run(directory)
    words = [
        *words_of(kept, Train),
        *("--resume", str(path), "--resume-step", str(first), "--chain"),
        *("--save", str(save), "--steps", str(last)),
        *("--metrics", str(directory / "metrics.jsonl")),
    ]
    config = (tyro.conf.DisallowNone, tyro.conf.PositionalMetavarFromFieldName)
    command = tyro.cli(Train, args=words, config=config)
    with contextlib.redirect_stdout(io.StringIO()):
        command.run()
    return read_link(save, fsdp.latest_step(save) or last)


def _replayed_run(directory: Path) -> Path:
    return directory / "run"


def _differences(again: Link, link: Link) -> list[str]:
    """Returns what a replay makes otherwise than the run did."""
    named = ("state", "position", "tokens", "options", "plan", "code")
    return [
        _differs(link, name)
        for name in named
        if getattr(again, name) != getattr(link, name)
    ]


def _differs(link: Link, name: str) -> str:
    return f"step {link.step}: the replay has another {name}"


def _beyond(path: Path, directory: Path, link: Link, rtol: float) -> list[str]:
    """Returns the leaves of a replayed state that differ by more than the bound."""
    again = stored_state(_replayed_run(directory), link.step)
    wrong = leaves_beyond(again, stored_state(path, link.step), rtol)
    return [f"{_differs(link, 'state')}: {name} beyond {rtol}" for name in wrong]


def _not_following(first: Link, last: Link, wrong: list[str]) -> str:
    return (
        f"Step {last.step} does not follow from step {first.step}, in {len(wrong)} "
        "place(s):\n  " + "\n  ".join(wrong)
    )
