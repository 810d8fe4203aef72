"""Checkpoints mistreated: killed writers, flipped bits, full disks.

    PYTHONPATH=tests python benchmarks/torture.py [--rounds 200] [--out FILE]

Counts what must not happen, and exits with 1 if it did: a committed step that is lost
when its process is killed, another value than was written, a step that a full disk
spoils. The tests run the short form. A disk is filled only where one can be mounted
(Linux, as root); JSON goes to stdout.
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
        places = {name: Path(scratch, name) for name in ("flips", "disk", "kills")}
        for place in places.values():
            place.mkdir()
        found["flips"] = flips(places["flips"], options.rounds)
        _say(json.dumps(found["flips"]))
        with _small_disk(places["disk"]) as disk:
            found["full_disk"] = full_disks(disk, max(1, options.rounds // 10))
        _say(json.dumps(found["full_disk"]))
        found["kills"] = kills(places["kills"], options.rounds)
    found["minutes"] = round((time.monotonic() - start) / 60, 1)
    result.write(options, conditions, found)
    bad = (
        found["flips"]["wrong_values_returned"],
        found["full_disk"]["previous_step_spoilt"],
        found["full_disk"]["next_save_failed"],
        found["kills"]["steps_lost"],
        found["kills"]["latest_unreadable"],
    )
    return 1 if any(bad) else 0


if __name__ == "__main__":
    sys.exit(main())
