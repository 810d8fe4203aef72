"""Four processes save and load as one: what fails in one of them fails in all."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint.checkpoint_managers as policies
import pytest
from helpers.damage import file_size_limited, first_value, flipped
from helpers.errors import facts
from helpers.object_server import serving
from helpers.processes import run_processes
from helpers.stores import variables
from jax.sharding import NamedSharding, PartitionSpec

import fsdp_jax as fsdp
from fsdp_jax.checkpoint._multihost import exchange

pytestmark = pytest.mark.distributed

PROCESSES = 4
SHAPE = (64, 128)


def values(step: int) -> np.ndarray:
    return np.random.default_rng(step).normal(size=SHAPE).astype(np.float32)


def like() -> fsdp.TrainState:
    def leaf(shape, dtype, *spec):
        sharding = NamedSharding(fsdp.make_mesh(), PartitionSpec(*spec))
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    scalar = leaf((), jnp.int32)
    params = {"rows": leaf(SHAPE, jnp.float32, "dp_shard")}
    opt_state = {"whole": leaf(SHAPE, jnp.float32)}
    return fsdp.TrainState(scalar, params, opt_state, {}, scalar, scalar)


def state_at(step: int) -> fsdp.TrainState:
    def make(leaf):
        whole = value_of(leaf, step)
        return jax.make_array_from_callback(
            leaf.shape, leaf.sharding, lambda i: whole[i]
        )

    return jax.tree.map(make, like())


def value_of(leaf, step: int) -> np.ndarray:
    """Other numbers in each leaf, so that none stands in for another."""
    if not leaf.shape:
        return np.asarray(step, leaf.dtype)
    return -values(step) if leaf.sharding.is_fully_replicated else values(step)


def holds(state: fsdp.TrainState, step: int) -> bool:
    """Whether the parts of this process are those of the step."""
    return all(
        np.array_equal(shard.data, value_of(leaf, step)[shard.index])
        for leaf in jax.tree.leaves(state)
        for shard in leaf.addressable_shards
    )


def outcome(action, *arguments, **options) -> list:
    """What came of it: kind, message, seconds."""
    start = time.monotonic()
    try:
        result = action(*arguments, **options)
        said = ["well", result if isinstance(result, bool | int) else ""]
    except Exception as error:
        said = [type(error).__name__, str(error)]
    exchange(None)  # all are done, before the next begins
    return [*said, time.monotonic() - start]


def scenario(directory: str) -> dict[str, list]:
    """All that one process of the job sees."""
    rank, seen = jax.process_index(), {}

    def load() -> bool:
        state = fsdp.load(directory, like())
        return holds(state, int(state.step))

    def save(step, only=None, **options):
        limit = file_size_limited(1000) if rank == only else contextlib.nullcontext()
        with limit:
            fsdp.save(directory, state_at(step), **options)

    seen["save"] = outcome(save, 1, metadata={"at": 1})
    seen["load"] = outcome(load)
    seen["other metadata"] = outcome(save, 2, metadata={"rank": rank == 2})
    wider = dataclasses.replace(state_at(2), model_state={"x": state_at(2).step})
    other = wider if rank == 1 else state_at(2)
    seen["other leaves"] = outcome(fsdp.save, directory, other)
    numbers = {"n": np.full(3, rank == 1)}  # which one process writes for all
    other = dataclasses.replace(state_at(2), model_state=numbers)
    seen["other numbers"] = outcome(fsdp.save, directory, other)
    seen["cannot write"] = outcome(save, 2, only=3)
    seen["cannot write, the first"] = outcome(save, 2, only=0)
    seen["latest after"] = outcome(fsdp.latest_step, directory)
    seen["load after"] = outcome(load)
    seen["save after"] = outcome(save, 2)
    asked = dataclasses.replace(like(), model_state={"x": like().step})
    asked = asked if rank == 1 else like()
    seen["other like"] = outcome(fsdp.load, directory, asked)
    with damaged_by_the_first(directory):
        seen["cannot read"] = outcome(load)
    seen["read again"] = outcome(load)
    seen["in the background"] = outcome(background, directory)
    seen["load at the end"] = outcome(load)
    seen["kept"] = outcome(newest_only, f"{directory}-kept")
    seen["own"] = outcome(own_state, f"{directory}-own")
    one = {"one": Place(rank)}
    seen["not the same"] = outcome(fsdp.save, f"{directory}-no", wider, extras=one)
    seen["bytes"] = bytes_moved(f"{directory}-large")
    return seen


LARGE = (1024, 2048)


def bytes_moved(directory: str) -> list:
    """What this process writes and reads of a state that all hold; and if it is it."""
    mesh, large = fsdp.make_mesh(dp_outer=2), np.zeros(LARGE, np.float32)
    large += np.arange(LARGE[1], dtype=np.float32)

    def leaf(*spec):
        sharding = NamedSharding(mesh, PartitionSpec(*spec))
        return jax.make_array_from_callback(LARGE, sharding, lambda i: large[i])

    # Held by all, and by two each.
    params = {
        "whole": leaf(),
        "rows": leaf("dp_shard"),
        "columns": leaf(None, "dp_shard"),
    }
    state = dataclasses.replace(state_at(1), params=params, opt_state={})
    start = storage_bytes()
    fsdp.save(directory, state)
    saved = storage_bytes()
    loaded = fsdp.load(directory, jax.tree.map(like_of, state))
    end = storage_bytes()
    same = all(
        np.array_equal(shard.data, large[shard.index])
        for leaf in loaded.params.values()
        for shard in leaf.addressable_shards
    )
    exchange(None)
    return [saved["wchar"] - start["wchar"], end["rchar"] - saved["rchar"], same]


def like_of(x: jax.Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)


def storage_bytes() -> dict[str, int]:
    lines = Path("/proc/self/io").read_text().splitlines()
    return {name: int(count) for name, count in (line.split(": ") for line in lines)}


@dataclasses.dataclass
class Place:
    """Where the iterator of a process stands."""

    state: Any

    def get_state(self):
        return self.state

    def set_state(self, state):
        self.state = state


def own_state(directory: str) -> int:
    """Saves another state in each process; what each gets back."""
    place = fsdp.checkpoint.PerProcess(Place(10 + jax.process_index()))
    fsdp.save(directory, state_at(1), extras={"own": place})
    again = Place(None)
    fsdp.load(directory, like(), extras={"own": fsdp.checkpoint.PerProcess(again)})
    return again.state


@contextlib.contextmanager
def damaged_by_the_first(directory: str):
    """A bit of what process 2 alone reads is flipped, of step 2."""
    row = values(2)[-17]  # the third quarter ends one row before the last 16
    path, at = first_value(Path(directory, "2"), row)
    exchange(None)
    first = jax.process_index() == 0
    with flipped(path, at) if first else contextlib.nullcontext():
        exchange(None)
        yield
        exchange(None)
    exchange(None)


def background(directory: str) -> str:
    """A save of a `Checkpointer` that fails in one process, and the next one."""
    with fsdp.Checkpointer(directory) as checkpointer:
        only = jax.process_index() == 2
        with file_size_limited(1000) if only else contextlib.nullcontext():
            checkpointer.save(3, state_at(3))
            try:
                checkpointer.wait()
            except RuntimeError as error:
                said = str(error)
        checkpointer.save(4, state_at(4))
    raise RuntimeError(said)


def newest_only(directory: str) -> None:
    """A save that is to replace the only step fails in one process, and the next one.

    Raises a `RuntimeError` that says what is there after each of the three saves.
    """
    keep, only = policies.LatestN(1), jax.process_index() == 2
    there = []
    with fsdp.Checkpointer(directory, preservation_policy=keep) as checkpointer:
        for step in (1, 2, 3):
            limited = only and step == 2
            with file_size_limited(1000) if limited else contextlib.nullcontext():
                checkpointer.save(step, state_at(step))
                with contextlib.suppress(fsdp.checkpoint.NotSavedError):
                    checkpointer.wait()
            there.append(sorted(p.name for p in Path(directory).glob("[0-9]*")))
            exchange(None)
    raise RuntimeError(str(there))


@pytest.fixture(scope="module")
def directory(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("job")


@pytest.fixture(scope="module")
def seen(directory) -> list[dict[str, list]]:
    return run_processes(scenario, PROCESSES, str(directory))


def kinds(seen, what: str) -> list[str]:
    return [process[what][0] for process in seen]


def messages(seen, what: str) -> list[str]:
    return [process[what][1] for process in seen]


def test_four_processes_save_and_load_as_one(seen):
    assert kinds(seen, "save") == ["well"] * PROCESSES
    assert messages(seen, "load") == [True] * PROCESSES


def test_four_processes_write_and_read_every_byte_once_and_a_fourth_each(seen):
    size = 3 * 4 * np.prod(LARGE)
    for kind in (0, 1):
        shares = [process["bytes"][kind] / size for process in seen]
        assert 1 <= sum(shares) < 1.1, shares
        assert max(shares) < 0.3, shares
    assert all(process["bytes"][2] for process in seen)


@pytest.mark.parametrize(
    "what, says",
    [
        ("other metadata", ["metadata", "0, 1, 3; 2"]),
        ("other leaves", ["layout", "0, 2, 3; 1"]),
        ("other numbers", ["layout", "0, 2, 3; 1"]),
    ],
)
def test_what_differs_between_processes_is_refused_in_all(seen, what, says):
    assert kinds(seen, what) == ["ValueError"] * PROCESSES
    for message in messages(seen, what):
        with pytest.raises(ValueError, match=facts(*says)):
            raise ValueError(message)


@pytest.mark.parametrize(
    "what, rank",
    [("cannot write", 3), ("cannot write, the first", 0), ("cannot read", None)],
)
def test_what_fails_in_one_process_is_raised_in_all_with_its_cause_at_once(
    seen, what, rank
):
    if rank is None:  # Which process checks which file is theirs to share out.
        (rank,) = (i for i, p in enumerate(seen) if p[what][0] != "OtherProcessError")
    for process, (kind, message, seconds) in enumerate(p[what] for p in seen):
        if process != rank:
            assert kind == "OtherProcessError"
            assert f"process {rank}: " in message
        else:
            assert kind not in ("well", "OtherProcessError")
        damaged = "it holds other chunks than were written"
        cause = damaged if what == "cannot read" else "File too large"
        assert cause in message
        assert seconds < 30


def test_a_failed_save_leaves_the_last_step_and_does_not_spoil_the_next(seen):
    assert messages(seen, "latest after") == [1] * PROCESSES
    assert messages(seen, "load after") == [True] * PROCESSES
    assert kinds(seen, "save after") == ["well"] * PROCESSES
    assert messages(seen, "read again") == [True] * PROCESSES


def test_an_abstract_tree_that_fits_in_all_but_one_process_is_refused_in_all(seen):
    assert kinds(seen, "other like") == [
        "OtherProcessError",
        "ValueError",
        "OtherProcessError",
        "OtherProcessError",
    ]
    assert all("not in the checkpoint" in said for said in messages(seen, "other like"))


def test_a_failure_in_the_background_is_raised_in_all_and_the_next_is_saved(seen):
    for said in messages(seen, "in the background"):
        assert "Step 3 is not saved" in said and "File too large" in said
    assert messages(seen, "load at the end") == [True] * PROCESSES


def test_no_step_is_removed_for_one_that_a_process_could_not_save(seen):
    assert messages(seen, "kept") == [str([["1"], ["1"], ["3"]])] * PROCESSES


def test_one_process_loads_what_four_have_saved(seen, directory):
    assert fsdp.latest_step(directory) == 4
    assert holds(fsdp.load(directory, like()), 4)
    assert fsdp.checkpoint.verify(directory).step == 4
    assert sorted(p.name for p in directory.iterdir() if p.is_dir()) == ["1", "2", "4"]


def load_in_fewer(directory: str) -> list:
    loaded = holds(fsdp.load(directory, like(), step="latest-good"), 4)
    place, own = Place(None), f"{directory}-own"
    refused = outcome(
        fsdp.load, own, like(), extras={"own": fsdp.checkpoint.PerProcess(place)}
    )
    merged = fsdp.checkpoint.PerProcess(
        place, merge=lambda states: states[jax.process_index() :]
    )
    fsdp.load(own, like(), extras={"own": merged})
    return [loaded, refused[:2], place.state]


@pytest.fixture(scope="module")
def fewer(seen, directory) -> list[list]:
    return run_processes(load_in_fewer, 2, str(directory))


def test_two_processes_load_what_four_have_saved(fewer):
    assert [loaded for loaded, _, _ in fewer] == [True, True]


def test_each_process_gets_back_the_object_that_it_saved(seen):
    assert messages(seen, "own") == [10, 11, 12, 13]


def test_another_number_of_processes_says_how_to_merge_what_each_had(fewer):
    for rank, (_, (kind, says), merged) in enumerate(fewer):
        assert kind == "ValueError"
        assert "extras.own: 4 process(es) saved, 2 load" in says
        assert merged == [10, 11, 12, 13][rank:]


def test_an_object_that_differs_between_processes_is_not_stored_once_for_all(seen):
    assert kinds(seen, "not the same") == ["ValueError"] * PROCESSES
    assert all(
        "what extras hold that are not PerProcess differs" in said
        for said in messages(seen, "not the same")
    )


def saves_to_a_store(url: str) -> list[bool]:
    """Saves a step, resumes it, and saves another in the background."""
    os.environ.update(variables(url))
    run = "gs://bucket/run"
    fsdp.save(run, state_at(1))
    with fsdp.Checkpointer(run) as checkpointer:
        resumed = holds(checkpointer.resume(like()), 1)
        checkpointer.save(2, state_at(2))
    return [resumed, holds(fsdp.load(run, like()), 2)]


def test_processes_save_to_one_object_store():
    with serving() as (store, url):
        assert run_processes(saves_to_a_store, 2, url) == [[True, True]] * 2
        written = "bucket/run/2/state/ocdbt.process_1/manifest.ocdbt"
        assert written in store.objects
