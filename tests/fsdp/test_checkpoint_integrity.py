"""What was read is what was written, or it is an error: never other numbers."""

from __future__ import annotations

import gc
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from helpers.damage import (
    ORBAX_FAILS_NOISILY,
    files_of,
    first_value,
    flipped,
    random_bit,
)
from helpers.errors import facts
from jax.sharding import NamedSharding, PartitionSpec
from orbax.checkpoint._src.serialization import tensorstore_utils

import fsdp_jax as fsdp
from fsdp_jax.checkpoint import _checksums
from fsdp_jax.checkpoint._zarr import chunk_grid, zarr_metadata
from fsdp_jax.cli import main

pytestmark = [ORBAX_FAILS_NOISILY, pytest.mark.versions]

METADATA = {"order": (3, 1), "seen": {0: "a", 7: "b"}, "iterator": b"\x00\xff"}
SHAPE = (64, 1024)  # a shard of less than 8 KiB would be hashed with the tree
FLIPS = 40  # 200 and more in benchmarks/torture.py


@pytest.fixture(autouse=True)
def failed_reads_end_within_the_test():
    yield
    gc.collect()


def mesh() -> jax.sharding.Mesh:
    return fsdp.make_mesh()


def state_at(step: int) -> fsdp.TrainState:
    """Sharded, replicated, scalar, half-precision and key leaves, none of them zero."""
    rows = NamedSharding(mesh(), PartitionSpec("dp_shard"))
    whole = NamedSharding(mesh(), PartitionSpec())
    rng = np.random.default_rng(step)
    normal = rng.normal(size=SHAPE).astype(np.float32)
    state = fsdp.TrainState(
        step=jnp.int32(step),
        params={"w": jax.device_put(normal, rows), "b": jax.device_put(-normal, whole)},
        opt_state={"mu": jax.device_put(normal.astype(jnp.bfloat16), rows)},
        model_state={},
        key=jax.random.key(step),
        num_skipped=jnp.int32(1),
    )
    return jax.tree.map(
        lambda x: x if isinstance(x.sharding, NamedSharding) else put(x, whole), state
    )


def put(leaf, sharding):
    return jax.device_put(leaf, sharding)


def like() -> fsdp.TrainState:
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding),
        state_at(0),
    )


def assert_same(got, want):
    for (path, a), (_, b) in zip(
        jax.tree.leaves_with_path(got), jax.tree.leaves_with_path(want), strict=True
    ):
        if jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
            a, b = jax.random.key_data(a), jax.random.key_data(b)
        assert a.dtype == b.dtype, path
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b), err_msg=str(path))


@pytest.fixture
def run(tmp_path) -> Path:
    """Steps 1 and 2."""
    for step in (1, 2):
        fsdp.save(tmp_path, state_at(step), metadata=METADATA)
    return tmp_path


def values_of(step: Path) -> Path:
    """The file that holds the most values."""
    return max(files_of(step), key=lambda path: path.stat().st_size)


def is_refused(run: Path) -> bool:
    """Whether step 2 is refused; if it is not, it must be as it was written."""
    try:
        state = fsdp.load(run, like(), step=2)
        metadata = fsdp.checkpoint.load_metadata(run, step=2)
    except fsdp.checkpoint.DamagedCheckpointError:
        return True
    assert_same(state, state_at(2))
    assert metadata == METADATA
    return False


def test_a_flipped_bit_anywhere_is_an_error_or_changes_nothing(run):
    rng = np.random.default_rng(0)
    bits = [random_bit(run / "2", rng) for _ in range(FLIPS)]
    bits += [(path, 8 * (path.stat().st_size // 2)) for path in files_of(run / "2")]
    refused = 0
    for path, bit in bits:
        with flipped(path, bit):
            refused += is_refused(run)
    assert not is_refused(run)  # each was put right again
    assert refused > len(bits) / 2  # so the flips did reach what is read


def test_a_flipped_bit_of_the_metadata_is_an_error(run):
    """Which alone lies in the manifest, and nowhere else."""
    manifest = run / "2" / "state" / "manifest.json"
    first = manifest.read_bytes().index(b'"metadata"')
    for byte in range(first, first + 60):
        with (
            flipped(manifest, 8 * byte),
            pytest.raises(fsdp.checkpoint.DamagedCheckpointError),
        ):
            fsdp.checkpoint.load_metadata(run)
    assert fsdp.checkpoint.load_metadata(run) == METADATA


def read_by_orbax(directory: Path, name: str) -> np.ndarray:
    """One leaf, read as anybody would who has no fsdp_jax."""
    item = {name: like().params["w"]}
    arguments = ocp.args.PyTreeRestore(
        item=item,
        restore_args=ocp.checkpoint_utils.construct_restore_args(item),
        partial_restore=True,
    )
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as plain:
        return np.asarray(plain.restore(directory, args=arguments)[name])


def test_a_flipped_bit_of_a_value_is_found_by_orbax_alone(run):
    state, want = run / "2" / "state", np.asarray(state_at(2).params["w"])
    np.testing.assert_array_equal(read_by_orbax(state, "params.w"), want)
    with flipped(*first_value(state, want[3])):
        with pytest.raises(Exception, match=facts("crc32c")):
            read_by_orbax(state, "params.w")


def test_without_our_checksums_orbax_would_return_another_value(tmp_path):
    w = state_at(2).params["w"]
    handler = ocp.PyTreeCheckpointHandler(use_zarr3=True, use_compression=False)
    with ocp.Checkpointer(handler) as plain:
        plain.save(tmp_path / "plain", args=ocp.args.PyTreeSave({"w": w}))
    (array,) = zarr_metadata(tmp_path / "plain").values()
    assert not _checksums.is_checksummed(array)  # others' use of Orbax is as it was
    with flipped(*first_value(tmp_path / "plain", np.asarray(w)[3])):
        wrong = read_by_orbax(tmp_path / "plain", "w") != np.asarray(w)
    assert wrong.sum() == 1


def test_every_leaf_is_written_with_checksums(run):
    arrays = zarr_metadata(run / "2" / "state")
    assert len(arrays) == 6
    assert all(map(_checksums.is_checksummed, arrays.values()))


def test_an_orbax_that_writes_no_checksums_commits_no_step(run, monkeypatch):
    bare = _checksums._metadata_of_orbax
    monkeypatch.setattr(tensorstore_utils, "_build_zarr3_metadata", bare)
    with pytest.raises(RuntimeError, match=facts("orbax-checkpoint", "6", "key")):
        fsdp.save(run, state_at(3))
    assert fsdp.latest_step(run) == 2


@pytest.mark.parametrize("how", ["gone", "short", "long"])
def test_a_file_that_is_gone_or_of_another_size_is_named(run, how):
    path = values_of(run / "2")
    whole = path.read_bytes()
    match how:
        case "gone":
            path.unlink()
        case "short":
            path.write_bytes(whole[:-1])
        case "long":
            path.write_bytes(whole + b"\0")
    with pytest.raises(fsdp.checkpoint.DamagedCheckpointError, match=facts(path.name)):
        fsdp.load(run, like())


def test_verify_reads_all_of_a_step_and_says_how_much_it_is(run):
    report = fsdp.checkpoint.verify(run)
    assert (report.step, report.num_leaves) == (2, 6)
    assert report.num_bytes > np.prod(SHAPE) * (4 + 4 + 2)
    row = np.asarray(state_at(2).params["w"])[-1]
    with flipped(*first_value(run / "2" / "state", row)):
        with pytest.raises(
            fsdp.checkpoint.DamagedCheckpointError, match=facts("2/state'", "DATA_LOSS")
        ):
            fsdp.checkpoint.verify(run)
        assert fsdp.checkpoint.verify(run, step=1).step == 1
    assert fsdp.checkpoint.verify(run) == report


def test_every_chunk_of_an_array_is_read_once():
    seen = np.zeros((5, 7), int)
    for rows, columns in chunk_grid((5, 7), (2, 3)):
        seen[slice(*rows), slice(*columns)] += 1
    assert (seen == 1).all()
    assert list(chunk_grid((), ())) == [()]


@pytest.mark.parametrize("gone", ["state/manifest.json", "commit_success.txt"])
def test_a_step_without_manifest_or_commit_marker_is_not_the_latest(run, gone):
    (run / "2" / gone).unlink()
    assert fsdp.latest_step(run) == 1
    with pytest.raises(ValueError, match=facts("step 2", "1")):
        fsdp.load(run, like(), step=2)
    with pytest.raises(ValueError, match=facts("2'", "step 2")):
        fsdp.save(run, state_at(2))


def test_a_damaged_newest_step_falls_back_to_the_one_before_only_when_asked(run):
    row = np.asarray(state_at(2).params["b"])[1]
    with flipped(*first_value(run / "2" / "state", row)):
        with pytest.raises(
            fsdp.checkpoint.DamagedCheckpointError,
            match=facts("2/state'", "DATA_LOSS", 'step="latest-good"'),
        ):
            fsdp.load(run, like())
        with pytest.warns(UserWarning, match=facts("Step 2", "DATA_LOSS")):
            state = fsdp.load(run, like(), step="latest-good")
    assert_same(state, state_at(1))
    assert_same(fsdp.load(run, like(), step="latest-good"), state_at(2))


def test_where_no_step_is_intact_none_is_loaded(run):
    shutil.rmtree(run / "2")
    row = np.asarray(state_at(1).params["w"])[0]
    with (
        flipped(*first_value(run / "1" / "state", row)),
        pytest.warns(UserWarning, match=facts("Step 1", "DATA_LOSS")),
        pytest.raises(
            fsdp.checkpoint.DamagedCheckpointError, match=facts(repr(str(run)), "1")
        ),
    ):
        fsdp.load(run, like(), step="latest-good")


def test_the_command_line_verifies_every_step_or_one(run, capsys):
    assert main(["verify", str(run)]) == 0
    assert "step 1: " in (said := capsys.readouterr().out) and "step 2: " in said
    row = np.asarray(state_at(2).params["w"])[0]
    with flipped(*first_value(run / "2" / "state", row)):
        assert main(["verify", str(run)]) == 1
        assert "computed digest is" in capsys.readouterr().err
        assert main(["verify", str(run), "--step", "1"]) == 0
    assert main(["verify", str(run / "absent")]) == 2
