"""The notebooks run, and are stored as they ran: with pictures, without warnings."""

from __future__ import annotations

import base64
import io
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import matplotlib.image
import nbformat
import numpy as np
import pytest
import social_card
from run_notebooks import execute, kernel, said_on_stderr, without_waits

FOLDER = Path(__file__).parents[1] / "notebooks"
# Without these the others run, and these say at their top what they need.
NEEDS = {
    "3_from_hugging_face_and_back": pytest.mark.torch,
    "5_planning_a_70b_run": pytest.mark.plan,
    "8_fine_tune_on_chats": pytest.mark.torch,  # Transformers renders its template.
    "9_the_fastest_plan": pytest.mark.plan,
}
NOTEBOOKS = [
    pytest.param(path, marks=NEEDS.get(path.stem, ()), id=path.stem)
    for path in sorted(FOLDER.glob("*.ipynb"))
]
# What the first of a kernel's cells may count on, whichever notebook was there before.
AFRESH = "import os\nos.chdir({!r})\n%reset -f"


@pytest.fixture(scope="module")
def manager(tmp_path_factory):
    """One kernel for all notebooks: jax and torch are imported once.

    Without most optimizations, as in the other tests, since most of the time is theirs.
    """
    folder = tmp_path_factory.mktemp("notebooks")
    with kernel(folder, JAX_DISABLE_MOST_OPTIMIZATIONS="1") as manager:
        yield manager


@pytest.fixture(scope="module", params=NOTEBOOKS)
def stored(request) -> nbformat.NotebookNode:
    return nbformat.read(request.param, as_version=4)


@pytest.fixture(scope="module")
def executed(stored, manager, tmp_path_factory) -> nbformat.NotebookNode:
    """The notebook run once for all tests, in a folder of its own.

    Any cell that raises fails here, with its traceback.
    """
    folder = tmp_path_factory.mktemp("notebook")
    before = nbformat.v4.new_code_cell(AFRESH.format(str(folder)))
    cells = [before, *stored["cells"]]
    ran = execute(nbformat.v4.new_notebook(cells=cells), manager)
    ran["cells"] = ran["cells"][1:]
    return ran


def test_there_are_nine_in_order():
    numbers = [path.name.partition("_")[0] for path in sorted(FOLDER.glob("*.ipynb"))]
    assert numbers == list("123456789")


def test_the_first_cell_installs_on_colab_an_extra_that_exists(stored):
    first = code_cells(stored)[0]["source"]
    assert 'if "google.colab" in sys.modules:' in first
    extras = re.findall(r'%pip install -q "fsdp-jax(?:\[(\w+)\])?"', first)
    pyproject = tomllib.loads((FOLDER.parent / "pyproject.toml").read_text())
    assert {*extras} <= {"", *pyproject["project"]["optional-dependencies"]} and extras


def test_a_badge_opens_a_notebook_of_the_repository_in_colab():
    badge = social_card.colab_badge("https://github.com/a/b/", "notebooks/1_x.ipynb")
    assert "colab.research.google.com/github/a/b/blob/main/notebooks/1_x.ipynb" in badge


def test_nothing_is_written_to_stderr(executed):
    assert list(said_on_stderr(executed)) == []


def test_that_a_disk_was_slow_is_not_kept_and_all_else_is():
    slow = (
        "WARNING:absl:Waiting for previous save to complete took 1.067076 seconds. If "
        "this number is high, consider checkpointing less frequently.\n"
    )

    def notebook(text):
        output = nbformat.v4.new_output("stream", name="stderr", text=text)
        cell = nbformat.v4.new_code_cell("", outputs=[output])
        return nbformat.v4.new_notebook(cells=[cell])

    assert not without_waits(notebook(slow))["cells"][0]["outputs"]
    assert list(said_on_stderr(without_waits(notebook(f"no{slow}\n")))) == ["no\n"]


def test_every_picture_shows_something(executed, stored):
    assert pictures(executed)
    for picture in [*pictures(executed), *pictures(stored)]:
        assert shows_something(picture)


def test_a_blank_picture_is_noticed():
    white, drawn = np.ones((40, 40, 3)), np.ones((40, 40, 3))
    drawn[10:20, 10:20], drawn[20:30, 20:30] = (0, 0, 1), (1, 0, 0)
    for image, shows in ((white, False), (drawn, True)):
        file = io.BytesIO()
        matplotlib.image.imsave(file, image, format="png")
        assert shows_something(io.BytesIO(file.getvalue())) == shows


def test_the_stored_outputs_are_those_of_a_run(executed, stored):
    for ran, kept in zip(code_cells(executed), code_cells(stored), strict=True):
        source = kept["source"]
        assert bool(kept["outputs"]) == bool(ran["outputs"]), source
        assert len(pictures_of(kept)) == len(pictures_of(ran)), source
        assert [o for o in kept["outputs"] if o["output_type"] == "error"] == [], source


def test_what_is_stored_says_no_more_than_a_run_on_any_machine(stored):
    assert list(said_on_stderr(stored)) == []
    counts = [cell["execution_count"] for cell in code_cells(stored)]
    assert counts == list(range(1, len(counts) + 1))
    assert stored["metadata"]["kernelspec"]["name"] == "python3"
    assert [cell["metadata"] for cell in stored["cells"] if cell["metadata"]] == []
    text = "\n".join(texts(stored))
    assert text and paths_in(text) == []
    assert "Traceback" not in text


def test_a_path_of_a_machine_is_noticed():
    assert paths_in("in '/home/me/run/3'") == ["/home/me/run/3'"]
    assert paths_in(r"C:\Users\me") == [r"C:\Users\me"]
    assert paths_in("run/3, 1/8 of it, tokens/s/GPU, MFU 40%") == []


def paths_in(text: str) -> list[str]:
    return re.findall(r"(?<![\w.>])/(?:[\w.]+/)+\S*|[A-Z]:\\\S*", text)


def code_cells(notebook) -> list[nbformat.NotebookNode]:
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    return [cell for cell in cells if cell["source"].strip()]


def shows_something(picture: io.BytesIO) -> bool:
    """Whether there is more in it than a background: colours, and enough of them."""
    image = matplotlib.image.imread(picture, format="png")[::2, ::2, :3]
    colours = np.unique((image * 15).astype(int) @ [256, 16, 1])
    return image.std() > 0.02 and len(colours) >= 3


def pictures_of(cell) -> list[io.BytesIO]:
    data = (output.get("data", {}).get("image/png") for output in cell["outputs"])
    return [io.BytesIO(base64.b64decode(png)) for png in data if png]


def pictures(notebook) -> list[io.BytesIO]:
    return [picture for cell in code_cells(notebook) for picture in pictures_of(cell)]


def texts(notebook) -> Iterator[str]:
    for cell in code_cells(notebook):
        for output in cell["outputs"]:
            yield output.get("text", "")
            for kind, value in output.get("data", {}).items():
                if kind.startswith("text/"):
                    yield value
