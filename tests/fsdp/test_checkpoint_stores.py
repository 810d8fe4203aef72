"""Checkpoints in object stores: what holds on a disk holds there, and requests fail."""

from __future__ import annotations

import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import jax
import numpy as np
import orbax.checkpoint.checkpoint_managers as policies
import pytest
from helpers.damage import ORBAX_FAILS_NOISILY
from helpers.errors import facts
from helpers.object_server import ObjectStore
from helpers.saving_worker import check, like, state_at
from helpers.stores import found_by_tensorstore

import fsdp_jax as fsdp
from fsdp_jax.checkpoint import ObjectStoreError, _bucket, _store_lease
from fsdp_jax.checkpoint._paths import as_path
from fsdp_jax.checkpoint._store_lease import NAME, StoreLease

pytestmark = [ORBAX_FAILS_NOISILY, pytest.mark.versions]

BUCKETS = ("gs://bucket", "s3://bucket")


@pytest.fixture(scope="module")
def served() -> Iterator[ObjectStore]:
    """One server for all tests: TensorStore looks for that of Google's store once."""
    with found_by_tensorstore() as store:
        yield store


@pytest.fixture
def store(served) -> Iterator[ObjectStore]:
    served.objects.clear()
    yield served
    served.fault = lambda method, key: None


@pytest.fixture(params=BUCKETS)
def run(request, store) -> str:
    return f"{request.param}/runs/1"


def folders(store: ObjectStore) -> set[str]:
    return {key.split("/")[3] for key in store.objects}


def object_of_values(store: ObjectStore) -> tuple[str, int]:
    """An object with values of step 1, and where in it they are.

    How many objects a save makes depends on how fast it is. Not any byte of them will
    do: a database keeps nodes that nothing refers to any more.
    """
    row = np.asarray(jax.tree.leaves(state_at(1).params)[0])[0].tobytes()
    data = next(key for key, one in store.objects.items() if row in one.content)
    return data, store.objects[data].content.index(row)


def test_a_step_is_saved_loaded_and_verified_as_on_a_disk(run, store, tmp_path):
    (tmp_path / "vocab.txt").write_text("a b")
    files = {"tokenizer": tmp_path / "vocab.txt"}
    fsdp.save(run, state_at(1), metadata={"at": (1, 2)}, files=files)
    assert check(fsdp.load(run, like())) == 1
    assert fsdp.latest_step(run) == 1
    assert fsdp.checkpoint.load_metadata(run) == {"at": (1, 2)}
    assert fsdp.checkpoint.verify(Path(run)).num_leaves == 5  # `Path` takes a slash
    found = fsdp.checkpoint.load_files(run, "tokenizer")
    assert (found / "vocab.txt").read_text() == "a b"
    assert NAME not in folders(store)  # the lease is given back
    with pytest.raises(ValueError, match=facts(run, "step 1")):
        fsdp.save(run, state_at(1))
    with pytest.raises(ValueError, match=facts(run)):
        fsdp.checkpoint.remove(run, 1, "opt_state")
    assert not Path("/gs:bucket").exists() and not Path("/s3:bucket").exists()


def test_a_run_goes_on_keeps_the_newest_and_rolls_back(run, store):
    keep = policies.LatestN(2)
    with fsdp.Checkpointer(run, preservation_policy=keep) as checkpointer:
        assert checkpointer.resume(like()) is None
        assert all(checkpointer.save(step, state_at(step)) for step in (1, 2, 3))
        with pytest.raises(ValueError, match=facts(run)):
            fsdp.Checkpointer(run)
    assert folders(store) == {"2", "3", "run_id"}
    with fsdp.Checkpointer(run) as checkpointer:
        assert check(checkpointer.resume(like(), step=2)) == 2
        assert checkpointer.save(3, state_at(3))
    assert folders(store) == {"2", "3", "3.abandoned", "run_id"}
    assert check(fsdp.load(run, like())) == 3


def test_local_steps_beside_a_store_are_resumed_and_their_loss_is_not(store, tmp_path):
    run, disk = "s3://bucket/runs/1", tmp_path / "disk"
    every = policies.FixedIntervalPolicy(2)
    options = fsdp.checkpoint.LocalCheckpoints(disk, every=1)

    def opened():
        return fsdp.Checkpointer(run, save_decision_policy=every, local=options)

    with opened() as checkpointer:
        assert all(checkpointer.save(step, state_at(step)) for step in (1, 2, 3))
    with opened() as checkpointer:
        assert check(checkpointer.resume(like())) == 3
    shutil.rmtree(disk)
    with opened() as checkpointer:
        assert check(checkpointer.resume(like())) == 2
    with pytest.raises(ValueError, match=facts(run)):
        fsdp.checkpoint.LocalCheckpoints(run, every=1)


def test_requests_that_fail_now_and_then_are_repeated(run, store):
    rng = random.Random(0)
    faults = ["503", "429", "reset", "truncate", *[None] * 12]
    store.fault = lambda method, key: rng.choice(faults)
    fsdp.save(run, state_at(1))
    assert check(fsdp.load(run, like())) == 1
    assert fsdp.checkpoint.verify(run).step == 1


@pytest.fixture
def impatient(monkeypatch):
    monkeypatch.setattr(_bucket, "_MAX_RETRIES", 1)


@pytest.mark.parametrize("fault", ["503", "403", "reset", "truncate"])
def test_an_outage_is_no_damage(fault, store, impatient):
    run = "s3://bucket/runs/1"
    fsdp.save(run, state_at(1))
    whole = dict(store.objects)
    data, _ = object_of_values(store)
    for failing in (data, "manifest.json", ".ocdbt"):
        store.fault = lambda method, key, end=failing: (
            fault if key.endswith(end) else None
        )
        with pytest.raises(ObjectStoreError, match=facts(run[:12])):
            fsdp.load(run, like(), step="latest-good")
    assert store.objects == whole


def test_a_store_that_hangs_is_left_in_time(store, monkeypatch):
    monkeypatch.setattr(_bucket, "TIMEOUT_SECS", 1.0)
    store.fault = lambda method, key: "hang"
    with pytest.raises(ObjectStoreError, match=facts("1 s", "s3://bucket/runs/1")):
        fsdp.latest_step("s3://bucket/runs/1")


@pytest.mark.parametrize("failing", ["/d/", "manifest.json", "commit_success.txt"])
def test_a_save_that_fails_is_no_step_and_is_removed_by_the_next(
    failing, store, impatient
):
    run = "gs://bucket/runs/1"
    fsdp.save(run, state_at(1))
    store.fault = lambda method, key: (
        "503" if method == "POST" and failing in key else None
    )
    with pytest.raises((ObjectStoreError, ValueError)):
        fsdp.save(run, state_at(2))
    store.fault = lambda method, key: None
    assert fsdp.latest_step(run) == 1
    left = [key for key in store.objects if "/runs/1/2/" in key]
    fsdp.save(run, state_at(3))
    assert left and not any("/runs/1/2/" in key for key in store.objects)
    assert check(fsdp.load(run, like())) == 3


def test_a_save_in_the_background_that_fails_is_reported(store, impatient):
    run = "s3://bucket/runs/1"
    with fsdp.Checkpointer(run) as checkpointer:
        checkpointer.save(1, state_at(1))
        checkpointer.wait()
        store.fault = lambda method, key: "503" if "/1/2/" in key else None
        checkpointer.save(2, state_at(2))
        with pytest.raises(fsdp.checkpoint.NotSavedError, match=facts("Step 2")):
            checkpointer.wait()
        store.fault = lambda method, key: None
        checkpointer.save(2, state_at(2))
    assert check(fsdp.load(run, like())) == 2


def test_what_is_damaged_or_cut_is_found(run, store):
    fsdp.save(run, state_at(1))
    data, at = object_of_values(store)
    content = store.objects[data].content
    flipped = content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :]
    for damage in (content[:-1], content + b"x", flipped, None):
        if damage is None:
            store.delete(data, None)
        else:
            store.put(data, damage, None)
        with pytest.raises(fsdp.checkpoint.DamagedCheckpointError):
            fsdp.load(run, like())
    store.put(data, content, None)
    assert check(fsdp.load(run, like())) == 1


def test_a_folder_of_another_program_is_left_alone(store):
    run = "s3://bucket/runs/1"
    store.put("bucket/runs/1/2/notes.txt", b"mine", None)
    with pytest.raises(ValueError, match=facts("step 2", f"{run}/2")):
        fsdp.save(run, state_at(2))
    fsdp.save(run, state_at(1))
    assert store.objects["bucket/runs/1/2/notes.txt"].content == b"mine"


@pytest.fixture
def foreign(run, monkeypatch) -> str:
    """The lease of a writer on another machine."""
    monkeypatch.setattr(_store_lease, "_LOOK_SECS", 0.01)
    monkeypatch.setattr(_store_lease, "_EXPIRES_SECS", 0.1)
    lease = StoreLease(run)
    file = as_path(run) / NAME
    content = file.read_bytes().replace(lease._writer.id.encode(), b"f" * 16)
    file.write_bytes(content.replace(b'"machine": "', b'"machine": "another '))
    lease.release()
    assert file.is_file()
    return run


def test_a_writer_elsewhere_counts_as_long_as_it_renews(foreign):
    file = as_path(foreign) / NAME
    renewals = iter(range(1000))

    def renew(_):
        file.write_bytes(file.read_bytes() + b" " * (1 + next(renewals)))

    with mock.patch.object(_store_lease.time, "sleep", renew):
        with pytest.raises(ValueError, match=facts(foreign)):
            StoreLease(foreign)


def test_a_writer_elsewhere_that_stopped_renewing_is_replaced(foreign, store):
    lease = StoreLease(foreign)
    lease.check()
    with pytest.raises(ValueError, match=facts(foreign)):
        StoreLease(foreign)
    lease.release()
    assert not (as_path(foreign) / NAME).is_file()
    before = store.requests.total()
    lease.release()  # as at the exit of a program that closed its Checkpointer
    assert store.requests.total() == before


def test_of_two_that_replace_a_dead_writer_one_wins(foreign):
    file = as_path(foreign) / NAME
    _, version = file.read_version()
    assert file.write_if(b"first", version) is not None
    assert file.write_if(b"second", version) is None
    assert file.read_bytes() == b"first"


def test_other_schemes_stay_refused(tmp_path):
    for url in ("msc://profile/run", "file:///run", "hf://a/b"):
        with pytest.raises(ValueError, match=facts("URL", url, "gs://", "s3://")):
            fsdp.save(url, state_at(1))
