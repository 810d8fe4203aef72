"""Checkpoints mistreated: killed writers, flipped bits, moved bytes, full disks.

    PYTHONPATH=tests python benchmarks/torture.py [--rounds 1000] [--kills 200]
        [--out benchmarks/results/torture.json] [--only KIND:ROUND]

Counts what must not happen, and exits with 1 if it did: a committed step that is lost
when its process is killed, another value than was written, also where chunks, files or
folders were moved, a step that a full disk spoils, a save that a rollback or a second
writer prevents. The tests run the short form.

With `--out` it goes on where an earlier run of it stopped. Rounds that are not as they
should be are listed in `odd`, and `--only KIND:ROUND` repeats one. A disk is filled
only where one can be mounted (Linux, as root); JSON goes to stdout.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import logging
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import jax
import numpy as np
import result
from helpers.damage import flipped, random_bit
from helpers.saving_worker import check, kill_while_saving, like, state_at

import fsdp_jax as fsdp

DISK_MEGABYTES = 24
_WRITTEN_EVERY_SECS = 5


@dataclasses.dataclass(frozen=True)
class Kind:
    """One way to mistreat checkpoints.

    Attributes:
      prepare: Makes what the rounds need in an empty folder.
      run: One round in the folder, by its number; returns counts.
      counts: Names of the counts that may be anything.
      never: Names of the counts that must stay 0.
      share: Rounds of this kind for each of `--rounds`.
    """

    prepare: Callable[[Path], None]
    run: Callable[[Path, int], Mapping[str, int]]
    counts: tuple[str, ...]
    never: tuple[str, ...]
    share: float = 1.0


def save_steps(*steps: int) -> Callable[[Path], None]:
    """Returns a function that saves these steps."""

    def prepare(directory: Path) -> None:
        for step in steps:
            fsdp.save(directory, state_at(step), metadata={"at": (step, "a")})

    return prepare


def flip(directory: Path, number: int) -> dict[str, int]:
    """Flips one bit anywhere in a step, and reads all of it."""
    with flipped(*random_bit(directory, np.random.default_rng(number))):
        return _read_damaged(directory, 1)


def _read_damaged(directory: Path, step: int) -> dict[str, int]:
    """Reads a damaged step: it is refused, or as it was written."""
    try:
        state = fsdp.load(directory, like(), step=step)
        metadata = fsdp.checkpoint.load_metadata(directory, step=step)
    except fsdp.checkpoint.DamagedCheckpointError:
        return {"refused": 1}
    try:
        right = check(state) == step and metadata == {"at": (step, "a")}
    except AssertionError:
        right = False
    return {"wrong_values_returned": not right}


def swap(
    how: Callable[[Path, random.Random], contextlib.AbstractContextManager[None]],
) -> Callable[[Path, int], dict[str, int]]:
    """Returns a round that moves bytes, and reads step 2."""

    def run(directory: Path, number: int) -> dict[str, int]:
        with how(directory, random.Random(number)):
            return _read_damaged(directory, 2)

    return run


@contextlib.contextmanager
def chunk_moved(directory: Path, rng: random.Random) -> Iterator[None]:
    """A chunk of step 2 over another one, with the checksum behind it."""
    manifest = json.loads((directory / "2" / "state" / "manifest.json").read_bytes())
    spans = [
        (directory / "2" / "state" / name, start, stop)
        for name, sealed in manifest["body"]["files"].items()
        for start, stop in sealed["values"]
    ]
    (source, start, stop), (target, at, _) = rng.sample(spans, 2)
    content = bytearray(target.read_bytes())
    content[at : at + stop - start + 4] = source.read_bytes()[start : stop + 4]
    with _written(target, bytes(content)):
        yield


@contextlib.contextmanager
def file_of_another_step(directory: Path, rng: random.Random) -> Iterator[None]:
    """A data file of step 1 over one of step 2, cut or filled to its size."""
    paths = [sorted((directory / step).rglob("d/*")) for step in ("1", "2")]
    source, target = map(rng.choice, paths)
    size = target.stat().st_size
    with _written(target, source.read_bytes()[:size].ljust(size, b"\0")):
        yield


@contextlib.contextmanager
def folders_exchanged(directory: Path, rng: random.Random) -> Iterator[None]:
    """Steps 1 and 2, each under the number of the other."""
    exchange = [("1", "x"), ("2", "1"), ("x", "2")]
    for source, target in exchange:
        (directory / source).rename(directory / target)
    try:
        yield
    finally:
        for source, target in exchange:
            (directory / source).rename(directory / target)


@contextlib.contextmanager
def _written(path: Path, content: bytes) -> Iterator[None]:
    whole = path.read_bytes()
    path.write_bytes(content)
    try:
        yield
    finally:
        path.write_bytes(whole)


def roll_back(directory: Path, number: int) -> dict[str, int]:
    """Resumes an older step of three, and saves from there."""
    before = sum(path.is_dir() for path in directory.iterdir())
    back = random.Random(number).choice((1, 2))
    with fsdp.Checkpointer(directory) as checkpointer:
        checkpointer.resume(like(), step=back)
        steps = range(back + 1, 4)
        unsaved = [s for s in steps if not checkpointer.save(s, state_at(s))]
    after = sum(path.is_dir() for path in directory.iterdir())
    wrong = check(fsdp.load(directory, like())) != 3
    for path in directory.glob("*.abandoned*"):
        subprocess.run(["rm", "-r", str(path)], check=True)
    return {
        "steps_not_saved": len(unsaved),
        "steps_lost": after != before + 3 - back,  # each that is given up is kept
        "latest_wrong": wrong,
    }


def open_twice(directory: Path, number: int) -> dict[str, int]:
    """Opens the directory a second time while a save is under way."""
    step, refused = number + 1, False
    with fsdp.Checkpointer(directory) as checkpointer:
        checkpointer.save(step, state_at(step))
        try:
            fsdp.Checkpointer(directory)
        except ValueError:
            refused = True
    newest = fsdp.latest_step(directory)
    lost = newest != step or check(fsdp.load(directory, like())) != step
    _keep_newest(directory, step)
    return {"refused": refused, "let_in": not refused, "steps_lost": lost}


def fill_disk(disk: Path, number: int) -> dict[str, int]:
    """Saves where so much room is left that the disk is full at some moment."""
    step, failed, stuck = 2 * number + 2, False, False
    run = disk / "run"
    with _filled(disk, leaving=random.Random(number).randrange(0, 3_000_000)):
        try:
            fsdp.save(run, state_at(step))
        except Exception:
            failed = True
        newest = fsdp.latest_step(run)
        spoilt = newest is None or check(fsdp.load(run, like())) != newest
    try:
        fsdp.save(run, state_at(step + 1))
    except Exception:
        stuck = True
    _keep_newest(run, step + 1)
    return {
        "saves_that_failed": failed,
        "previous_step_spoilt": spoilt,
        "next_save_failed": stuck,
    }


def kill(directory: Path, number: int) -> dict[str, int]:
    """Kills a process that does nothing but save, and looks at what it left."""
    committed = kill_while_saving(directory, random.Random(number).uniform(0, 1.5))
    during = any(".orbax-checkpoint-tmp" in p.name for p in directory.iterdir())
    newest = fsdp.latest_step(directory) or 0
    unreadable = newest > 0 and check(fsdp.load(directory, like())) != newest
    _keep_newest(directory, newest)
    return {
        "killed_while_writing": during,
        "steps_committed": newest - committed[0],
        "steps_lost": newest < committed[-1],
        "latest_unreadable": unreadable,
    }


def _keep_newest(directory: Path, newest: int) -> None:
    for folder in directory.iterdir():
        if folder.name.isdecimal() and int(folder.name) < newest:
            subprocess.run(["rm", "-r", str(folder)], check=True)


@contextlib.contextmanager
def _filled(disk: Path, *, leaving: int) -> Iterator[None]:
    ballast = disk / "ballast"
    used = sum(path.stat().st_blocks * 512 for path in disk.rglob("*"))
    ballast.write_bytes(bytes(max(0, DISK_MEGABYTES * 2**20 - used - leaving)))
    try:
        yield
    finally:
        ballast.unlink()


def _mount(directory: Path) -> None:
    options = ["-t", "tmpfs", "-o", f"size={DISK_MEGABYTES}m", "tmpfs"]
    subprocess.run(["mount", *options, str(directory)], check=True)
    fsdp.save(directory / "run", state_at(1))


_REFUSED, _WRONG = ("refused",), ("wrong_values_returned",)
KINDS = {
    "flips": Kind(save_steps(1), flip, _REFUSED, _WRONG),
    **{
        how.__name__: Kind(save_steps(1, 2), swap(how), _REFUSED, _WRONG, share=1 / 3)
        for how in (chunk_moved, file_of_another_step, folders_exchanged)
    },
    "rollbacks": Kind(
        save_steps(1, 2, 3),
        roll_back,
        (),
        ("steps_not_saved", "steps_lost", "latest_wrong"),
        share=0.1,
    ),
    "second_writers": Kind(
        save_steps(), open_twice, _REFUSED, ("let_in", "steps_lost"), share=0.1
    ),
    "full_disk": Kind(
        _mount,
        fill_disk,
        ("saves_that_failed",),
        ("previous_step_spoilt", "next_save_failed"),
        share=0.1,
    ),
    "kills": Kind(
        save_steps(),
        kill,
        ("killed_while_writing", "steps_committed"),
        ("steps_lost", "latest_unreadable"),
    ),
}


def run_kind(
    name: str, rounds: range, found: dict, written: Callable[[], None]
) -> None:
    """Runs the rounds of one kind, and adds what they find to `found`."""
    kind = KINDS[name]
    counts = Counter(dict.fromkeys((*kind.counts, *kind.never, "errors"), 0))
    counts.update(found.get(name, {}))
    found[name] = {"rounds": counts.pop("rounds", 0), **counts}
    with tempfile.TemporaryDirectory() as directory, contextlib.ExitStack() as stack:
        if name == "full_disk":
            stack.callback(subprocess.run, ["umount", directory], check=True)
        kind.prepare(Path(directory))
        for number in rounds:
            try:
                counted: dict = dict(kind.run(Path(directory), number))
            except Exception as error:  # noqa: BLE001 - any error is an outcome
                _say(f"{name}:{number}: {type(error).__name__}: {error}")
                counted = {"errors": 1}
            counts.update({what: int(n) for what, n in counted.items()})
            found[name] = {"rounds": number + 1, **counts}
            if any(counted.get(what) for what in (*kind.never, "errors")):
                found["odd"].append(f"{name}:{number}")
            written()
    _say(f"{name}: {found[name]}")


def is_bad(found: Mapping) -> bool:
    """Returns whether anything has happened that must not."""
    return any(
        found[name].get(what)
        for name, kind in KINDS.items()
        if name in found
        for what in (*kind.never, "errors")
    )


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--kills", type=int, help="as many as --rounds if left out")
    parser.add_argument("--only", help="one round, as KIND:ROUND")
    result.add_arguments(parser)
    options = parser.parse_args()
    packages = ("jax", "orbax-checkpoint", "tensorstore", "numpy")
    conditions = result.begin(options, packages)
    logging.disable(logging.CRITICAL)  # what Orbax says of each failed write
    sys.unraisablehook = lambda _: None  # and what ends unheard
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)
    found: dict = {"odd": [], "minutes": 0.0}
    if options.only:
        name, number = options.only.split(":")
        run_kind(name, range(int(number), int(number) + 1), found, lambda: None)
        return int(is_bad(found))
    if options.out:
        found = result.resumed(options, found)
    start, before, at = time.monotonic(), found["minutes"], time.monotonic()

    def written(*, at_once: bool = False) -> None:
        nonlocal at
        found["minutes"] = round(before + (time.monotonic() - start) / 60, 1)
        if at_once or options.out and time.monotonic() - at > _WRITTEN_EVERY_SECS:
            at = time.monotonic()
            result.write(options, conditions, found, show=at_once)

    for name, kind in KINDS.items():
        wanted = max(1, round(options.rounds * kind.share))
        if name == "kills" and options.kills is not None:
            wanted = options.kills
        run_kind(
            name, range(found.get(name, {}).get("rounds", 0), wanted), found, written
        )
    written(at_once=True)
    return int(is_bad(found))


if __name__ == "__main__":
    sys.exit(main())
