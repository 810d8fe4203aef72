"""A part is taken out of a step whole, or not at all, and the rest stays as it was."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from helpers import removing_worker
from helpers.damage import files_of, first_value, flipped
from helpers.errors import facts
from helpers.saving_worker import check, like, state_at

import fsdp_jax as fsdp
from fsdp_jax.cli import main

ROOT = Path(__file__).parents[2]


class Count:
    """An object to be saved beside the state."""

    value = 7

    def get_state(self):
        return self.value

    def set_state(self, value):
        self.value = value


@pytest.fixture
def run(tmp_path) -> Path:
    """Steps 1 and 2."""
    (tmp_path / "vocab.txt").write_text("a b c")
    for step in (1, 2):
        fsdp.save(
            tmp_path / "run",
            state_at(step),
            metadata={"at": (step,)},
            extras={"count": Count()},
            files={"tokenizer": tmp_path / "vocab.txt"},
        )
    return tmp_path / "run"


def size_of(step: Path) -> int:
    return sum(path.stat().st_size for path in files_of(step))


def test_the_optimizer_goes_and_everything_else_stays(run):
    before = size_of(run / "2")
    assert fsdp.checkpoint.remove(run, 2, "opt_state") == ["opt_state.mu"]
    moments = state_at(2).opt_state["mu"].nbytes
    assert size_of(run / "2") < before - 0.99 * moments  # its room is given back
    assert sorted(p.name for p in run.iterdir() if p.is_dir()) == ["1", "2"]
    assert fsdp.checkpoint.verify(run).num_leaves == 4
    assert fsdp.checkpoint.load_metadata(run) == {"at": (2,)}
    assert (
        fsdp.checkpoint.load_files(run, "tokenizer") / "vocab.txt"
    ).read_text() == "a b c"
    params = fsdp.checkpoint.load_params(run, like().params)
    np.testing.assert_array_equal(params["w"], state_at(2).params["w"])
    with pytest.raises(ValueError, match=facts("opt_state.mu")):
        fsdp.load(run, like(), extras={"count": Count()})
    rest, count = {"step": like().step, "params": like().params}, Count()
    count.value = 0
    extras = {"count": count}
    fsdp.load(run, rest, extras=extras, strict="raise_unexpected")
    assert count.value == 7
    assert check(fsdp.load(run, like(), step=1, extras=extras)) == 1


def test_the_run_goes_on_after_a_removal(run):
    fsdp.checkpoint.remove(run, 2, "opt_state", "files.tokenizer")
    with pytest.raises(ValueError, match=facts("'tokenizer'")):
        fsdp.checkpoint.load_files(run, "tokenizer")
    with fsdp.Checkpointer(run) as checkpointer:
        checkpointer.save(3, state_at(3))
    assert fsdp.latest_step(run) == 3
    assert fsdp.checkpoint.remove(run, 1, "extras.count") == ["extras.count"]
    assert check(fsdp.load(run, like(), step=1)) == 1


def test_orbax_alone_reads_all_that_is_left(run):
    fsdp.checkpoint.remove(run, 2, "opt_state")
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as plain:
        tree = plain.metadata(run / "2" / "state").item_metadata.tree
        assert sorted(tree) == ["key", "num_skipped", "params.w", "step"]
        arguments = ocp.args.PyTreeRestore(
            restore_args=ocp.checkpoint_utils.construct_restore_args(
                jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), dict(tree))
            )
        )
        restored = plain.restore(run / "2" / "state", args=arguments)
    np.testing.assert_array_equal(restored["params.w"], state_at(2).params["w"])


@pytest.mark.parametrize(
    "parts, says",
    [
        (["opt"], ["'opt'"]),
        (["opt_state", "params.x"], ["'params.x'"]),
        ([], ["0 parts"]),
        (["*"], ["0 leaves"]),
    ],
)
def test_what_makes_no_sense_is_refused_and_nothing_is_touched(run, parts, says):
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    with pytest.raises(ValueError, match=facts(*says)):
        fsdp.checkpoint.remove(run, None, *parts)
    assert {path: path.stat().st_mtime_ns for path in run.rglob("*")} == before


def test_a_damaged_step_is_not_replaced_by_what_could_be_read_of_it(run):
    rows = np.asarray(state_at(2).params["w"])[5:7]
    with flipped(*first_value(run / "2", rows)):
        with pytest.raises(
            fsdp.checkpoint.DamagedCheckpointError,
            match=facts("DATA_LOSS", "params.w/c/0/0"),
        ):
            fsdp.checkpoint.remove(run, 2, "opt_state")
    assert "opt_state.mu" in fsdp.checkpoint.load_shapes(run)
    assert fsdp.checkpoint.verify(run).step == 2


def test_the_command_line_removes_and_says_what_is_gone(run, capsys):
    assert main(["remove", str(run), "opt_state", "--step", "1"]) == 0
    said = capsys.readouterr().out
    assert "opt_state.mu" in said and "gone from step 1" in said and "iB" in said
    assert "opt_state.mu" not in fsdp.checkpoint.load_shapes(run, step=1)
    assert "opt_state.mu" in fsdp.checkpoint.load_shapes(run, step=2)
    assert main(["remove", str(run), "no_such", "--step", "1"]) == 2


def test_killed_at_any_call_the_step_is_whole_as_it_was_or_without(run, tmp_path):
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    done = subprocess.run(
        [sys.executable, str(removing_worker.__file__), str(run), str(scratch)],
        env=os.environ | {"PYTHONPATH": path, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    kills = [json.loads(line) for line in done.stdout.splitlines()]
    found = [state for _, state in kills]
    first = found.index("without")
    assert found == ["as it was"] * first + ["without"] * (len(found) - first)
    assert first > 10 and len(found) - first > 3
    renames = [call for call, _ in kills if call.startswith("os.rename")]
    assert len([call for call in renames if "writer.json" not in call]) == 3
