"""The notebooks run, and are stored as they ran: with pictures, without warnings."""

from __future__ import annotations

import base64
import io
import os
import re
from collections.abc import Iterator
from pathlib import Path

import matplotlib.image
import nbformat
import pytest
from jupyter_client.kernelspec import KernelSpecManager
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


class ThisInterpreter(AsyncKernelManager):
    """Starts the kernel `python3` from the interpreter that runs the tests.

    Given no folders to look for kernels in, jupyter falls back on that one; else it
    may find another Python's in the user's home.
    """

    def _kernel_spec_manager_default(self) -> KernelSpecManager:
        return KernelSpecManager(kernel_dirs=[])


@pytest.fixture(scope="module", params=NOTEBOOKS, ids=lambda path: path.stem)
def stored(request) -> nbformat.NotebookNode:
    return nbformat.read(request.param, as_version=4)


@pytest.fixture(scope="module")
def executed(stored, tmp_path_factory) -> nbformat.NotebookNode:
    """The notebook run once for all tests, in a folder of its own.

    Any cell that raises fails here, with its traceback.
    """
    folder = tmp_path_factory.mktemp("notebook")
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    env = os.environ | {
        "PYTHONPATH": os.pathsep.join(paths),  # this checkout, installed or not
        "JAX_PLATFORMS": "cpu",  # the same test on a machine with a GPU
        "IPYTHONDIR": str(folder / "ipython"),  # and whatever the user's own profile is
    }
    client = NotebookClient(
        nbformat.from_dict(stored),
        kernel_manager_class=ThisInterpreter,
        timeout=300,
        resources={"metadata": {"path": str(folder)}},
    )
    return client.execute(env=env)


def test_there_is_a_notebook():
    assert NOTEBOOKS


def test_nothing_is_written_to_stderr(executed):
    assert [o["text"] for o in outputs(executed) if o.get("name") == "stderr"] == []


def test_every_picture_shows_something(executed, stored):
    assert pictures(executed)
    for picture in [*pictures(executed), *pictures(stored)]:
        assert matplotlib.image.imread(picture, format="png")[..., :3].std() > 0.02


def test_the_stored_outputs_are_those_of_a_run(executed, stored):
    for ran, kept in zip(code_cells(executed), code_cells(stored), strict=True):
        source = kept["source"]
        assert bool(kept["outputs"]) == bool(ran["outputs"]), source
        assert len(pictures_of(kept)) == len(pictures_of(ran)), source
        assert errors_of(kept) == [], source


def test_the_cells_were_run_in_order(stored):
    counts = [cell["execution_count"] for cell in code_cells(stored)]
    assert counts == list(range(1, len(counts) + 1))


def test_what_is_stored_is_the_same_on_every_machine(stored):
    assert stored["metadata"]["kernelspec"]["name"] == "python3"
    assert [cell["metadata"] for cell in stored["cells"] if cell["metadata"]] == []
    text = "\n".join(texts(stored))
    assert re.findall(r"(?<![\w.])/(?:\w+/)+\S*|[A-Z]:\\\S*", text) == []
    assert "Warning" not in text


def code_cells(notebook) -> list[nbformat.NotebookNode]:
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    return [cell for cell in cells if cell["source"].strip()]


def outputs(notebook) -> Iterator[nbformat.NotebookNode]:
    for cell in code_cells(notebook):
        yield from cell["outputs"]


def errors_of(cell) -> list[nbformat.NotebookNode]:
    return [
        output
        for output in cell["outputs"]
        if output["output_type"] == "error" or output.get("name") == "stderr"
    ]


def pictures_of(cell) -> list[io.BytesIO]:
    data = (output.get("data", {}).get("image/png") for output in cell["outputs"])
    return [io.BytesIO(base64.b64decode(png)) for png in data if png]


def pictures(notebook) -> list[io.BytesIO]:
    return [picture for cell in code_cells(notebook) for picture in pictures_of(cell)]


def texts(notebook) -> Iterator[str]:
    for output in outputs(notebook):
        yield output.get("text", "")
        for kind, value in output.get("data", {}).items():
            if kind.startswith("text/"):
                yield value
