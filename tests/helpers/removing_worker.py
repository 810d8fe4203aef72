"""Removals, each killed at another call into the file system.

`python removing_worker.py SOURCE SCRATCH` copies a checkpoint, takes its optimizer out,
and is killed before the first call, before the second, and so on until none is left to
be killed at. Prints one line of JSON a kill: the call, whether the step was then as it
was or without the optimizer. After each kill the removal is done again.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
import signal
import sys
from pathlib import Path

import fsdp_jax as fsdp
from fsdp_jax._tree import matches

CHANGES = {"os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.truncate", "os.link"}


def in_a_child(action, *arguments) -> int:
    """The exit status of a fork that calls it; it has threads of its own."""
    child = os.fork()
    if child == 0:
        try:
            action(*arguments)
            os._exit(0)
        except BaseException as error:
            print(repr(error), file=sys.stderr, flush=True)
            os._exit(1)
    return os.waitpid(child, 0)[1]


def remove_until(run: Path, at: int, said: Path) -> None:
    """Removes, and ends before the call of that number that changes the checkpoint."""
    count = 0

    def count_calls(event: str, arguments: tuple) -> None:
        nonlocal count
        if not changes(run, event, arguments):
            return
        count += 1
        if count == at:
            said.write_text(f"{event} {arguments[0]}")
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(count_calls)
    fsdp.checkpoint.remove(run, None, "opt_state")


def changes(run: Path, event: str, arguments: tuple) -> bool:
    """Whether what Python is about to call changes what lies under a directory."""
    writes = event == "open" and arguments[2] & (os.O_WRONLY | os.O_RDWR)
    if event not in CHANGES and not writes:
        return False
    # What is deleted within a folder is named relative to it.
    path = str(arguments[0])
    return path.startswith(f"{run}{os.sep}") or not path.startswith(os.sep)


def look_at(run: Path, said: Path) -> None:
    """Says what there is, every byte of it read, and has the next removal clear up."""
    assert fsdp.checkpoint.verify(run).step == fsdp.latest_step(run) == 2
    names = fsdp.checkpoint.load_shapes(run)
    has_optimizer = any(matches("opt_state", name) for name in names)
    assert {"params.w", "step", "key"} <= names.keys()
    said.write_text("as it was" if has_optimizer else "without")
    fsdp.checkpoint.remove(run, None, "opt_state" if has_optimizer else "num_skipped")
    assert fsdp.checkpoint.verify(run).step == 2
    # The lease of the process that was killed is gone too.
    assert sorted(child.name for child in run.iterdir()) == ["1", "2", "run_id"]


def main(source: Path, scratch: Path) -> None:
    for at in itertools.count(1):
        run, said = scratch / str(at), scratch / f"{at}.txt"
        shutil.copytree(source, run)
        status = in_a_child(remove_until, run, at, said)
        if status == 0:
            return
        assert os.WTERMSIG(status) == signal.SIGKILL, status
        call = said.read_text()
        well = in_a_child(look_at, run, said) == 0
        print(json.dumps([call, said.read_text() if well else "damaged"]), flush=True)
        shutil.rmtree(run)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
