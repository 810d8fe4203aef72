"""A program that ends by `sys.exit` is seen to fail, and one that caught it is not."""

from __future__ import annotations

import subprocess
import sys

import pytest

START = """
import atexit, sys
from importlib.util import module_from_spec, spec_from_file_location

spec = spec_from_file_location("exit_status", {file!r})
module = module_from_spec(spec)
sys.modules["exit_status"] = module
spec.loader.exec_module(module)
exit = module.Exit()
exit.watch()
atexit.register(lambda: print(module.status_of(exit.uncaught())))
"""
ENDS = {
    "a status": ("sys.exit(3)", "3"),
    "a status in a function": ("def main():\n    sys.exit(4)\nmain()", "4"),
    "a status within a context": (
        "import contextlib\nwith contextlib.nullcontext():\n    sys.exit(5)",
        "5",
    ),
    "a message": ("sys.exit('no file')", "1"),
    "no status": ("sys.exit()", "0"),
    "success": ("sys.exit(0)", "0"),
    "the last line": ("pass", "0"),
    "a status that its caller catches": (
        "def main():\n    try:\n        sys.exit(3)\n    except SystemExit:\n"
        "        pass\nmain()",
        "0",
    ),
    "a status that its module catches": (
        "try:\n    sys.exit(3)\nexcept SystemExit:\n    pass",
        "0",
    ),
    "a status of a thread": (
        "import threading\nthread = threading.Thread(target=lambda: sys.exit(3))\n"
        "thread.start()\nthread.join()",
        "0",
    ),
}


def test_a_stop_by_a_signal_is_no_failure():
    from fsdp_jax.launch._exit_status import is_failure

    assert [is_failure(status) for status in (0, 1, 3, 143)] == [0, 1, 1, 0]
    # Ctrl-C and a signal of one's own; what Python makes of -1 and -7.
    assert [is_failure(status) for status in (130, 138, 255, 249)] == [0, 0, 1, 1]


@pytest.mark.parametrize("program, found", ENDS.values(), ids=ENDS)
def test_the_status_of_an_uncaught_exit_is_known_as_the_program_ends(program, found):
    from fsdp_jax.launch import _exit_status

    # Loaded by itself: the package would import jax in each of these programs.
    start = START.format(file=_exit_status.__file__)
    run = subprocess.run(
        [sys.executable, "-c", start + program], capture_output=True, text=True
    )
    assert run.stdout.strip() == found, run.stderr
