"""Checkpoints mistreated: killed writers, flipped bits, moved bytes, full disks.

    PYTHONPATH=tests python benchmarks/torture.py [--rounds 200] [--kills 200]

Counts what must not happen, and exits with 1 if it did: a committed step that is lost
when its process is killed, another value than was written, also where chunks, files or
folders were moved, a step that a full disk spoils, a save that a rollback or a second
writer prevents. The tests run the short form. A disk is filled only where one can be
mounted (Linux, as root); JSON goes to stdout.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import numpy as np
import result
from helpers.damage import flipped, random_bit
from helpers.saving_worker import check, kill_while_saving, like, state_at

import fsdp_jax as fsdp

DISK_MEGABYTES = 24


def kills(directory: Path, rounds: int) -> dict[str, int]:
    """Kills processes that do nothing but save, in two runs side by side."""
    with ThreadPoolExecutor() as pool:
        runs = [(directory / "a", rounds // 2), (directory / "b", rounds - rounds // 2)]
        found = list(pool.map(lambda run: kills_of_one(*run), runs))
    return {what: sum(one[what] for one in found) for what in found[0]}


def kills_of_one(directory: Path, rounds: int) -> dict[str, int]:
    """Kills the process again and again, and looks each time at what it left."""
    directory.mkdir()
    moments, lost, unreadable, during = random.Random(directory.name), 0, 0, 0
    for number in range(rounds):
        committed = kill_while_saving(directory, moments.uniform(0, 1.5))
        during += any(".orbax-checkpoint-tmp" in p.name for p in directory.iterdir())
        newest = fsdp.latest_step(directory) or 0
        lost += newest < committed[-1]
        if newest:
            unreadable += check(fsdp.load(directory, like())) != newest
            _keep_newest(directory, newest)
        _say(f"{directory.name}: kill {number + 1} of {rounds}: step {newest}")
    return {
        "rounds": rounds,
        "killed_while_writing": during,
        "steps_committed": newest,
        "steps_lost": lost,
        "latest_unreadable": unreadable,
    }


def flips(directory: Path, rounds: int) -> dict[str, int]:
    """Flips one bit anywhere in a step, and reads all of it."""
    fsdp.save(directory, state_at(1), metadata={"at": (1, "a")})
    rng, refused, wrong = np.random.default_rng(0), 0, 0
    for _ in range(rounds):
        with flipped(*random_bit(directory, rng)):
            try:
                state = fsdp.load(directory, like(), step=1)
                metadata = fsdp.checkpoint.load_metadata(directory, step=1)
            except fsdp.checkpoint.DamagedCheckpointError:
                refused += 1
                continue
        try:
            wrong += check(state) != 1 or metadata != {"at": (1, "a")}
        except AssertionError:
            wrong += 1
    return {"rounds": rounds, "refused": refused, "wrong_values_returned": wrong}


def swaps(directory: Path, rounds: int) -> dict[str, dict[str, int]]:
    """Moves a chunk with its checksum, a file of another step, or two folders."""
    for step in (1, 2):
        fsdp.save(directory, state_at(step))
    rng, found = random.Random(0), {}
    for swap in (chunk_moved, file_of_another_step, folders_exchanged):
        refused = wrong = 0
        for _ in range(rounds // 3):
            with swap(directory, rng):
                try:
                    wrong += check(fsdp.load(directory, like(), step=2)) != 2
                except fsdp.checkpoint.DamagedCheckpointError:
                    refused += 1
                except AssertionError:
                    wrong += 1
        found[swap.__name__] = {
            "rounds": rounds // 3,
            "refused": refused,
            "wrong_values_returned": wrong,
        }
    check(fsdp.load(directory, like(), step=2))  # all was put back
    return found


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


def rollbacks(directory: Path, rounds: int) -> dict[str, int]:
    """Resumes an older step again and again, and saves from there."""
    for step in (1, 2, 3):
        fsdp.save(directory, state_at(step))
    rng, unsaved, lost, wrong = random.Random(0), 0, 0, 0
    for _ in range(rounds):
        before = sum(path.is_dir() for path in directory.iterdir())
        back = rng.choice((1, 2))
        with fsdp.Checkpointer(directory) as checkpointer:
            checkpointer.resume(like(), step=back)
            for step in range(back + 1, 4):
                unsaved += not checkpointer.save(step, state_at(step))
        after = sum(path.is_dir() for path in directory.iterdir())
        lost += after != before + 3 - back  # each given up is kept
        wrong += check(fsdp.load(directory, like())) != 3
        for path in directory.glob("*.abandoned*"):
            subprocess.run(["rm", "-r", str(path)], check=True)
    return {
        "rounds": rounds,
        "steps_not_saved": unsaved,
        "steps_lost": lost,
        "latest_wrong": wrong,
    }


def second_writers(directory: Path, rounds: int) -> dict[str, int]:
    """Opens the directory a second time while a save is under way."""
    refused = lost = 0
    for step in range(1, rounds + 1):
        with fsdp.Checkpointer(directory) as checkpointer:
            checkpointer.save(step, state_at(step))
            try:
                fsdp.Checkpointer(directory)
            except ValueError:
                refused += 1
        newest = fsdp.latest_step(directory)
        lost += newest != step or check(fsdp.load(directory, like())) != step
        _keep_newest(directory, step)
    return {"rounds": rounds, "refused": refused, "steps_lost": lost}


def full_disks(disk: Path, rounds: int) -> dict[str, int]:
    """Saves where so much room is left that the disk is full at some moment."""
    rng, failed, spoilt, stuck = random.Random(0), 0, 0, 0
    fsdp.save(disk / "run", state_at(1))
    for step in range(2, 2 * rounds + 2, 2):
        with _filled(disk, leaving=rng.randrange(0, 3_000_000)):
            try:
                fsdp.save(disk / "run", state_at(step))
            except Exception:
                failed += 1
            newest = fsdp.latest_step(disk / "run")
            spoilt += newest is None or check(fsdp.load(disk / "run", like())) != newest
        try:
            fsdp.save(disk / "run", state_at(step + 1))
        except Exception:
            stuck += 1
        _keep_newest(disk / "run", step + 1)
    return {
        "rounds": rounds,
        "saves_that_failed": failed,
        "previous_step_spoilt": spoilt,
        "next_save_failed": stuck,
    }


def _keep_newest(directory: Path, newest: int) -> None:
    for folder in directory.iterdir():
        if folder.name.isdecimal() and int(folder.name) < newest:
            subprocess.run(["rm", "-r", str(folder)], check=True)


@contextlib.contextmanager
def _filled(disk: Path, *, leaving: int) -> Iterator[None]:
    ballast = disk / "ballast"
    free = DISK_MEGABYTES * 2**20 - sum(
        path.stat().st_blocks * 512 for path in disk.rglob("*")
    )
    ballast.write_bytes(bytes(max(0, free - leaving)))
    try:
        yield
    finally:
        ballast.unlink()


@contextlib.contextmanager
def _small_disk(directory: Path) -> Iterator[Path]:
    options = ["-t", "tmpfs", "-o", f"size={DISK_MEGABYTES}m", "tmpfs"]
    subprocess.run(["mount", *options, str(directory)], check=True)
    try:
        yield directory
    finally:
        subprocess.run(["umount", str(directory)], check=True)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--kills", type=int, help="as many as --rounds if left out")
    result.add_arguments(parser)
    options = parser.parse_args()
    packages = ("jax", "orbax-checkpoint", "tensorstore", "numpy")
    conditions = result.begin(options, packages)
    logging.disable(logging.CRITICAL)  # what Orbax says of each failed write
    sys.unraisablehook = lambda _: None  # and what ends unheard
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)
    start = time.monotonic()
    found: dict = {}
    with tempfile.TemporaryDirectory() as scratch:
        names = ("flips", "swaps", "rollbacks", "writers", "disk", "kills")
        places = {name: Path(scratch, name) for name in names}
        for place in places.values():
            place.mkdir()
        found["flips"] = flips(places["flips"], options.rounds)
        _say(json.dumps(found["flips"]))
        found["swaps"] = swaps(places["swaps"], options.rounds)
        _say(json.dumps(found["swaps"]))
        few = max(1, options.rounds // 10)
        found["rollbacks"] = rollbacks(places["rollbacks"], few)
        _say(json.dumps(found["rollbacks"]))
        found["second_writers"] = second_writers(places["writers"], few)
        _say(json.dumps(found["second_writers"]))
        with _small_disk(places["disk"]) as disk:
            found["full_disk"] = full_disks(disk, few)
        _say(json.dumps(found["full_disk"]))
        found["kills"] = kills(places["kills"], options.kills or options.rounds)
    found["minutes"] = round((time.monotonic() - start) / 60, 1)
    result.write(options, conditions, found)
    bad = (
        found["flips"]["wrong_values_returned"],
        *(one["wrong_values_returned"] for one in found["swaps"].values()),
        found["rollbacks"]["steps_not_saved"],
        found["rollbacks"]["steps_lost"],
        found["rollbacks"]["latest_wrong"],
        found["second_writers"]["steps_lost"],
        found["second_writers"]["rounds"] - found["second_writers"]["refused"],
        found["full_disk"]["previous_step_spoilt"],
        found["full_disk"]["next_save_failed"],
        found["kills"]["steps_lost"],
        found["kills"]["latest_unreadable"],
    )
    return 1 if any(bad) else 0


if __name__ == "__main__":
    sys.exit(main())
