"""Runs notebooks and keeps what they show: `make notebooks`.

    python notebooks/run_notebooks.py [NOTEBOOK ...]

Each in a kernel and a folder of its own, on 8 simulated CPU devices. What a cell writes
to stderr is an error here, as a warning is in the tests. Nothing is kept that would
differ from one machine to the next by itself: times, versions, folders.
"""

from __future__ import annotations

import json
import os
import re
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import nbformat
from jupyter_client.kernelspec import KernelSpecManager
from jupyter_client.manager import AsyncKernelManager
from jupyter_core.utils import run_sync
from nbclient import NotebookClient

FOLDER = Path(__file__).parent
METADATA = {
    "kernelspec": {
        "display_name": "Python 3",
        "language": "python",
        "name": "python3",
    },
    "language_info": {"name": "python"},
}


class ThisInterpreter(AsyncKernelManager):
    """Starts the kernel `python3` from the interpreter that runs this.

    Given no folders to look for kernels in, jupyter falls back on that one; else it
    may find another Python's in the user's home.
    """

    def _kernel_spec_manager_default(self) -> KernelSpecManager:
        return KernelSpecManager(kernel_dirs=[])


def environment(folder: Path) -> dict[str, str]:
    """What a kernel is started with, so that every machine is alike to it."""
    paths = [str(FOLDER.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    return os.environ | {
        "PYTHONPATH": os.pathsep.join(paths),  # this checkout, installed or not
        "JAX_PLATFORMS": "cpu",
        "IPYTHONDIR": str(folder / "ipython"),  # whatever the user's own profile is
    }


@contextmanager
def kernel(folder: Path, **more: str) -> Iterator[AsyncKernelManager]:
    """A running kernel, for `execute`.

    Args:
      folder: Where it runs.
      **more: Of its environment.
    """
    manager = ThisInterpreter()
    # What XLA logs, such as that it found no driver, stays in the terminal.
    options = ["--IPKernelApp.capture_fd_output=False"]
    env = environment(folder) | more
    run_sync(manager.start_kernel)(extra_arguments=options, cwd=str(folder), env=env)
    try:
        yield manager
    finally:
        run_sync(manager.shutdown_kernel)(now=True)


def execute(
    notebook: nbformat.NotebookNode, manager: AsyncKernelManager
) -> nbformat.NotebookNode:
    """The notebook as it is after a run; raises what a cell raises.

    Args:
      notebook: As read; outputs are ignored.
      manager: Its kernel, which another notebook may have used before.
    """
    client = NotebookClient(
        nbformat.from_dict(notebook),
        km=manager,
        timeout=300,
        record_timing=False,
        coalesce_streams=True,
    )
    try:
        return without_waits(client.execute())
    finally:
        client.kc.stop_channels()  # a manager that is given is left as it is


WAITED = re.compile(r"WARNING:absl:Waiting for previous save to complete took .*\n")
"""What Orbax says where a disk needs more than a second: of a machine, no notebook."""


def without_waits(notebook: nbformat.NotebookNode) -> nbformat.NotebookNode:
    """The notebook without what its cells wrote of a slow disk."""
    for cell in notebook["cells"]:
        for output in cell.get("outputs", []):
            if output.get("name") == "stderr":
                output["text"] = WAITED.sub("", output["text"])
        if "outputs" in cell:
            cell["outputs"] = [one for one in cell["outputs"] if one.get("text") != ""]
    return notebook


def said_on_stderr(notebook: nbformat.NotebookNode) -> Iterator[str]:
    """What its cells wrote there."""
    for cell in notebook["cells"]:
        for output in cell.get("outputs", []):
            if output.get("name") == "stderr":
                yield output["text"]


def save(notebook: nbformat.NotebookNode, path: Path) -> None:
    """Writes a notebook as `git diff` reads it best."""
    notebook["metadata"] = METADATA
    for cell in notebook["cells"]:
        cell["metadata"] = {}
    split = nbformat.v4.rwbase.split_lines(nbformat.from_dict(notebook))
    text = json.dumps(split, indent=1, ensure_ascii=False, sort_keys=True)
    path.write_text(text + "\n", encoding="utf-8")


def main(paths: Sequence[str]) -> int:
    """Runs them all, or those named; tells how long each took."""
    for path in [Path(p) for p in paths] or sorted(FOLDER.glob("*.ipynb")):
        start = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            with kernel(Path(folder)) as manager:
                ran = execute(nbformat.read(path, as_version=4), manager)
        if said := "".join(said_on_stderr(ran)):
            print(f"{path.name} writes to stderr:\n{said}", file=sys.stderr)
            return 1
        save(ran, path)
        print(f"{path.name}: {time.monotonic() - start:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
