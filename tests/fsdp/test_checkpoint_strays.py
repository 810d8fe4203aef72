"""Strange entries beside the steps: none hangs, hides a step or leads outside."""

from __future__ import annotations

import json
import os
import shutil
import zlib
from pathlib import Path

import pytest
from helpers.errors import facts
from helpers.saving_worker import check, like, state_at

import fsdp_jax as fsdp
from fsdp_jax.checkpoint import _lease
from fsdp_jax.checkpoint._lease import NAME
from fsdp_jax.checkpoint._writer import decode_writer, this_writer
from fsdp_jax.checkpoint.local._format import _PREFIX, open_file

PRECIOUS = b"precious"


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    run = tmp_path_factory.mktemp("saved") / "run"
    for step in (1, 2):
        fsdp.save(run, state_at(step))
    return run


@pytest.fixture
def run(saved, tmp_path) -> Path:
    """A run of two steps, beside a file that nobody may change."""
    (tmp_path / "outside").write_bytes(PRECIOUS)
    shutil.copytree(saved, tmp_path / "run")
    return tmp_path / "run"


@pytest.fixture
def expired(monkeypatch):
    """Leases expire at once."""
    monkeypatch.setattr(_lease, "_EXPIRES_SECS", -1.0)


def link(path: Path) -> None:
    path.symlink_to(path.parents[1] / "outside")


def sparse(path: Path) -> None:
    path.touch()
    os.truncate(path, 2**40)


STRANGE = {
    "a pipe": os.mkfifo,
    "a link to nothing": lambda path: path.symlink_to("nothing"),
    "a link to itself": lambda path: path.symlink_to(path.name),
    "a link outside": link,
    "larger than the memory": sparse,
    "deep": lambda path: path.write_text("[" * 100_000),
}


@pytest.mark.parametrize("strange", STRANGE.values(), ids=STRANGE)
def test_a_lease_that_no_writer_wrote_expires(run, expired, strange):
    strange(run / NAME)
    fsdp.save(run, state_at(3))
    assert fsdp.latest_step(run) == 3
    assert not (run / NAME).is_symlink() and not (run / NAME).exists()
    assert (run.parent / "outside").read_bytes() == PRECIOUS


def test_a_folder_in_the_place_of_the_lease_is_refused_by_name(run):
    (run / NAME).mkdir()
    with pytest.raises(ValueError, match=facts(repr(str(run / NAME)))):
        fsdp.save(run, state_at(3))


@pytest.mark.parametrize(
    "change",
    [
        {"pid": "x"},
        {"pid": "a\0b"},
        {"pid": -1},
        {"pid": True},
        {"pid": 2**70},
        {"began": []},
        {"host": "\x1b[2J"},
        {"renewals": "1"},
        {"more": 1},
    ],
)
def test_a_lease_with_a_mistyped_field_names_no_writer(change):
    content = json.loads(this_writer().encode())
    assert decode_writer(json.dumps(content).encode()) is not None
    assert decode_writer(json.dumps(content | change).encode()) is None


@pytest.mark.parametrize("strange", [os.mkfifo, link, Path.mkdir, sparse, Path.touch])
def test_a_run_id_that_is_none_is_damage_of_all_that_read_it(run, strange):
    (run / "run_id").unlink()
    strange(run / "run_id")
    for use in (
        lambda: fsdp.load(run, like()),
        lambda: fsdp.checkpoint.verify(run),
        lambda: fsdp.save(run, state_at(3)),
    ):
        with pytest.raises(
            fsdp.checkpoint.DamagedCheckpointError, match=facts("run_id'", "16")
        ):
            use()


def test_a_new_run_id_is_not_written_through_a_link(run):
    kept = (run / "run_id").read_text()
    (run / "run_id").unlink()
    link(run / "run_id.part")
    fsdp.save(run, state_at(3))
    assert (run / "run_id").read_text() == kept  # that of the newest step
    assert (run.parent / "outside").read_bytes() == PRECIOUS


@pytest.mark.parametrize("name", ["007", "\u0663", "-3", "3 "])
def test_a_name_that_no_step_has_is_left_alone(run, name):
    (run / name).mkdir()
    (run / "2.abandoned").symlink_to("nothing")
    with fsdp.Checkpointer(run) as checkpointer:
        assert check(checkpointer.resume(like(), step=1)) == 1
        assert checkpointer.save(2, state_at(2))
        assert checkpointer.save(3, state_at(3))
    assert (run / name).is_dir() and fsdp.latest_step(run) == 3
    assert (run / "2.abandoned-1").is_dir()


@pytest.mark.parametrize("suffix", [".fsdp-jax-new", ".fsdp-jax-old"])
def test_an_incomplete_replacement_neither_hides_nor_replaces_a_step(run, suffix):
    (run / f"2{suffix}" / "state").mkdir(parents=True)
    (run / f"3{suffix}").mkdir()
    assert check(fsdp.load(run, like())) == 2
    with fsdp.Checkpointer(run) as checkpointer:
        assert check(checkpointer.resume(like(), step=1)) == 1
        assert checkpointer.save(2, state_at(2))
    assert check(fsdp.load(run, like(), step=2)) == 2


def test_what_is_left_of_a_replaced_step_is_not_in_the_way_of_the_next(
    run, monkeypatch
):
    # As NFS keeps the files that a reader has open.
    remove = shutil.rmtree
    monkeypatch.setattr(
        shutil,
        "rmtree",
        lambda path, **_: None if "-old" in str(path) else remove(path),
    )
    for part in ("opt_state", "params.w"):
        fsdp.checkpoint.remove(run, 2, part)
    monkeypatch.undo()
    olds = ["2.fsdp-jax-old", "2.fsdp-jax-old1"]
    assert sorted(path.name for path in run.glob("2.*")) == olds
    fsdp.save(run, state_at(3))
    assert not list(run.glob("2.*")) and fsdp.latest_step(run) == 3
    assert check(fsdp.load(run, like(), step=1)) == 1


@pytest.mark.parametrize(
    "noted", [[], {"performance_metrics": []}, {"init_timestamp_nsecs": "x"}]
)
def test_mistyped_notes_of_orbax_are_named_and_nothing_of_the_step(run, noted):
    file = run / "1" / "_CHECKPOINT_METADATA"
    file.write_text(json.dumps(noted))
    assert check(fsdp.load(run, like(), step=1)) == 1
    with pytest.raises(
        fsdp.checkpoint.DamagedCheckpointError, match=facts(repr(str(file)))
    ):
        fsdp.Checkpointer(run)
    file.unlink()
    fsdp.save(run, state_at(3))


def sealed(header: dict) -> bytes:
    """A file of local shards whose header has a right checksum."""
    text = json.dumps(header).encode()
    return _PREFIX.pack(b"fsdpjax2", len(text), 0, zlib.crc32(text)) + text


@pytest.mark.parametrize(
    "header",
    [
        {},
        {
            "layout": {"tables": [], "leaves": []},
            "process": 0,
            "folder": "",
            "about": 0,
        },
        {"layout": {"tables": [[[[0]]]], "leaves": {}}},
        {"layout": {"tables": [], "leaves": {"a": [[1], "evil", 0]}}},
    ],
)
def test_local_shards_with_a_mistyped_header_are_damage(tmp_path, header):
    path = tmp_path / "1-abcdef" / "0.shards"
    path.parent.mkdir()
    path.write_bytes(sealed(header))
    with pytest.raises(
        fsdp.checkpoint.DamagedCheckpointError, match=facts(repr(str(path)), "header")
    ):
        open_file(path)


@pytest.mark.parametrize("strange", [os.mkfifo, link])
def test_local_shards_that_are_no_file_are_passed_over(run, tmp_path, strange):
    local = fsdp.checkpoint.LocalCheckpoints(tmp_path / "disk", every=1, keep=3)
    with fsdp.Checkpointer(run, local=local) as checkpointer:
        checkpointer.resume(like())
        checkpointer.save(3, state_at(3))
    (shards,) = (tmp_path / "disk").glob("*/3-*/0.shards")
    shards.unlink()
    shutil.rmtree(run / "3")
    (tmp_path / "disk" / "outside").write_bytes(PRECIOUS)
    strange(shards)
    with fsdp.Checkpointer(run, local=local) as checkpointer:
        assert check(checkpointer.resume(like())) == 2
