"""With `%load_ext fsdp_jax.notebook` an error of ours is a paragraph in a notebook."""

from __future__ import annotations

import pytest
from IPython.core.interactiveshell import InteractiveShell

import fsdp_jax as fsdp

WRONG = """\
import jax.numpy as jnp
import fsdp_jax as fsdp

def make(key):
    return {"w": jnp.zeros((8, 8))}

def plan():
    return fsdp.fully_shard(make, fsdp.make_mesh(), units=["layers.*"])

plan()
"""


@pytest.fixture(scope="module")
def shell(tmp_path_factory):
    """IPython as it is in a notebook, but for the kernel."""
    shell = InteractiveShell(ipython_dir=str(tmp_path_factory.mktemp("ipython")))
    shell.history_manager.enabled = False
    shell.run_line_magic("colors", "nocolor")
    yield shell
    shell.history_manager.end_session()


@pytest.fixture
def extension(shell):
    fsdp.notebook.load_ipython_extension(shell)
    yield
    fsdp.notebook.unload_ipython_extension(shell)


def shown(shell, capsys, cell: str) -> str:
    result = shell.run_cell(cell)
    assert result.error_in_exec is not None  # What follows in a notebook does not run.
    return capsys.readouterr().out.strip()


def test_an_error_of_ours_is_its_message_and_the_cells_line(shell, extension, capsys):
    text = shown(shell, capsys, WRONG)
    message, place = text.split("\n\n")
    assert message.startswith("ValueError: ") and "layers.*" in message
    assert place == "in line 10: plan()\n(%tb shows the whole traceback)"


def test_the_whole_traceback_can_still_be_had(shell, extension, capsys):
    shown(shell, capsys, WRONG)
    shell.run_line_magic("tb", "")
    assert "Traceback" in capsys.readouterr().out


@pytest.mark.parametrize("cell", ["int('x')", "raise ValueError('mine')"])
def test_errors_of_others_are_shown_as_always(shell, extension, capsys, cell):
    assert "Traceback" in shown(shell, capsys, cell)


def test_an_error_of_a_function_that_we_call_is_shown_as_always(
    shell, extension, capsys
):
    raising = WRONG.replace("return {", "raise ValueError('mine')\n    return {")
    text = shown(shell, capsys, raising)
    assert "Traceback" in text and "in make(key)" in text


def test_without_it_nothing_is_changed(shell, capsys):
    assert "Traceback" in shown(shell, capsys, WRONG)
