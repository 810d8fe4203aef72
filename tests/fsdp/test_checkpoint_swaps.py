"""Every byte is bound to its place, step, run and attempt: what is moved is refused."""

from __future__ import annotations

import dataclasses
import itertools
import json
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.damage import files_of
from helpers.errors import facts
from helpers.saving_worker import check, like, state_at

import fsdp_jax as fsdp
from fsdp_jax.checkpoint._seal import seal, seal_files

# The checksum behind a chunk of values, in bytes.
CRC_BYTES = 4


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    """Steps 1 and 2 of one run, and step 2 of another."""
    root = tmp_path_factory.mktemp("saved")
    for step in (1, 2):
        fsdp.save(root / "run", state_at(step))
    fsdp.save(root / "other", state_at(2))
    return root


@pytest.fixture
def run(saved, tmp_path) -> Path:
    shutil.copytree(saved / "run", tmp_path / "run")
    return tmp_path / "run"


def assert_refused(run: Path, step: int, *said: object) -> None:
    with pytest.raises(fsdp.checkpoint.DamagedCheckpointError, match=facts(*said)):
        fsdp.load(run, like(), step=step)
    with pytest.raises(fsdp.checkpoint.DamagedCheckpointError, match=facts(*said)):
        fsdp.checkpoint.verify(run, step=step)


def largest(step: Path) -> Path:
    return max(files_of(step), key=lambda path: path.stat().st_size)


def chunks(path: Path, step: int) -> list[tuple[int, int]]:
    """Where in a data file the shards of `w` and `mu` begin, and their lengths."""
    content, state = path.read_bytes(), state_at(step)
    arrays = (state.params["w"], state.opt_state["mu"])
    shards = [np.asarray(s.data) for x in arrays for s in x.addressable_shards]
    found = [(content.find(x.tobytes()), x.nbytes) for x in shards]
    return [(start, length) for start, length in found if start >= 0]


def test_a_chunk_copied_over_another_with_its_checksum_is_refused(run):
    path = largest(run / "2")
    content = path.read_bytes()
    places = chunks(path, 2)
    assert len(places) >= 2
    for (source, length), (target, _) in itertools.pairwise(places):
        moved = bytearray(content)
        end = length + CRC_BYTES
        moved[target : target + end] = content[source : source + end]
        path.write_bytes(moved)
        assert_refused(run, 2, path.name)
    path.write_bytes(content)
    assert check(fsdp.load(run, like(), step=2)) == 2


def test_a_data_file_of_another_step_is_refused(run):
    """Of equal size too, which a name and a size would not tell apart."""
    path, other = largest(run / "2"), largest(run / "1")
    size = path.stat().st_size
    path.write_bytes(other.read_bytes()[:size].ljust(size, b"\0"))
    assert_refused(run, 2, path.name)


def test_two_step_folders_exchanged_are_refused_by_their_numbers(run):
    for source, target in [("1", "x"), ("2", "1"), ("x", "2")]:
        (run / source).rename(run / target)
    assert_refused(run, 1, "step 2", "step 1")
    assert_refused(run, 2, "step 1", "step 2")
    with (
        pytest.warns(UserWarning),
        pytest.raises(fsdp.checkpoint.DamagedCheckpointError),
    ):
        fsdp.load(run, like(), step="latest-good")


def test_a_step_of_another_run_is_refused(saved, run):
    shutil.rmtree(run / "2")
    shutil.copytree(saved / "other" / "2", run / "2")
    assert_refused(run, 2, (run / "run_id").read_text())


def test_a_step_copied_alone_is_loaded_and_its_run_goes_on(saved, tmp_path):
    shutil.copytree(saved / "run" / "2", tmp_path / "2")
    assert check(fsdp.load(tmp_path, like())) == 2
    fsdp.save(tmp_path, state_at(3))
    assert check(fsdp.load(tmp_path, like(), step=2)) == 2
    assert (tmp_path / "run_id").read_text() == (saved / "run/run_id").read_text()


def test_a_step_in_an_older_format_is_refused_by_number(run):
    path = run / "2" / "state" / "manifest.json"
    body = json.loads(path.read_bytes())["body"]
    assert body["format"] == 2
    del body["format"]
    write_manifest(path, body)
    with pytest.raises(ValueError, match=facts("format 1", "format 2")):
        fsdp.load(run, like(), step=2)


def write_manifest(path: Path, body) -> None:
    """A manifest that its own digest does not give away."""
    from fsdp_jax.checkpoint._manifest import _sha256_of

    path.write_text(json.dumps({"body": body, "sha256": _sha256_of(body)}))


def test_a_save_reads_nothing_of_the_large_values_again(run):
    """What is hashed of a data file is what lies between them."""
    sealed = seal_files(run / "2" / "state" / "ocdbt.process_0")
    of_values = sum(b - a for one in sealed.values() for a, b in one.values)
    states = (state_at(2).params["w"], state_at(2).opt_state["mu"])
    assert of_values == sum(x.nbytes for x in states)
    assert sum(one.size for one in sealed.values()) - of_values < 20_000


def test_a_seal_changes_with_every_byte_outside_of_its_values(tmp_path):
    path, content = tmp_path / "sealed", bytes(range(40))
    spans = ((5, 10), (10, 12), (20, 29))
    path.write_bytes(content)
    before = seal(path, spans)
    for place in range(len(content)):
        path.write_bytes(content[:place] + b"\xff" + content[place + 1 :])
        inside = any(start <= place < stop for start, stop in spans)
        assert (seal(path, spans) == before) == inside, place
    path.write_bytes(content + b"\0")
    assert seal(path, spans) != before


def test_wide_values_are_refused_and_not_narrowed(tmp_path):
    """With 64-bit types off jax would make inf of 1e300, without a word."""
    wide = {
        "f": np.array([np.pi, 1e300]),
        "g": np.array([np.pi, 0.1]),
        "i": np.array([2**40 + 5]),
    }
    fsdp.save(tmp_path, dataclasses.replace(state_at(1), params=wide))
    whole = like().step.sharding
    asked = {
        name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=whole)
        for name, x in wide.items()
    }
    wanted = dataclasses.replace(like(), params=asked)
    for cast in ("never", "as_stored"):
        with pytest.raises(
            ValueError,
            match=facts("params.f", "float64", "params.i", "int64", "jax_enable_x64"),
        ):
            fsdp.load(tmp_path, wanted, cast=cast)
    with jax.enable_x64(True):
        got = fsdp.load(tmp_path, wanted).params
        np.testing.assert_array_equal(got["f"], wide["f"])
        np.testing.assert_array_equal(got["i"], wide["i"])
    narrow = {"g": jax.ShapeDtypeStruct((2,), jnp.float32, sharding=whole)}
    wanted = dataclasses.replace(like(), params=narrow)
    got = fsdp.load(tmp_path, wanted, cast="floats", strict="ignore_all").params["g"]
    np.testing.assert_array_equal(got, wide["g"].astype(np.float32))
