"""Local checkpoints: who keeps what, what a file shows, which step is taken."""

from __future__ import annotations

import dataclasses
import errno
import itertools
import logging
import os
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint.checkpoint_managers as policies
import pytest
from helpers.damage import file_size_limited
from helpers.errors import facts
from helpers.saving_worker import check, like, state_at
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import NamedSharding, PartitionSpec

import fsdp_jax as fsdp
from fsdp_jax.checkpoint._leaf_names import Leaf, flatten
from fsdp_jax.checkpoint.local._format import Header, open_file, pack
from fsdp_jax.checkpoint.local._layout import Layout, layout_from_json, layout_of
from fsdp_jax.checkpoint.local._plan import (
    add_copies,
    choose_files,
    find,
    folder_name,
    plan_fetches,
    step_of,
)
from fsdp_jax.checkpoint.local._replication import (
    check_replication_groups,
    place_of,
    rounds,
)

RAGGED = ((2, 6, 7), (3, 1), (5,), (0, 4))  # of Megatron's test


# ReplicationGroups


def test_replication_groups_are_those_of_megatron():
    assert fsdp.checkpoint.make_replication_groups(4) == ((0, 1), (2, 3))
    assert fsdp.checkpoint.make_replication_groups(4, jump=2) == ((0, 2), (1, 3))
    assert fsdp.checkpoint.make_replication_groups(3, size=1) == ((0,), (1,), (2,))
    replication_groups = fsdp.checkpoint.make_replication_groups(32, size=2, jump=8)
    said = "0-8, 1-9, 2-10, 3-11, 4-12, 5-13, 6-14, 7-15, 16-24, 17-25, 18-26, 19-27"
    assert ", ".join(
        "-".join(map(str, group)) for group in replication_groups
    ).startswith(said)


@pytest.mark.parametrize("size, jump", [(2, 1), (1, 2), (0, 1), (3, 3)])
def test_replication_groups_that_leave_some_out_are_refused(size, jump):
    with pytest.raises(ValueError, match=facts("5", f"size={size}", f"jump={jump}")):
        fsdp.checkpoint.make_replication_groups(5, size=size, jump=jump)


def test_named_replication_groups_hold_each_process_once():
    assert check_replication_groups([[0, 1], [2]], 3) == ((0, 1), (2,))
    with pytest.raises(ValueError) as refused:
        check_replication_groups([[0, 1], [1, 5]], 3)
    for part in ("process 1 is in 2", "process 2 is in 0", "there is no process 5"):
        assert part in str(refused.value)


@st.composite
def some_groups(draw):
    members = draw(st.permutations(range(draw(st.integers(1, 9)))))
    cuts = sorted(draw(st.sets(st.integers(1, 8))))
    parts = [members[a:b] for a, b in itertools.pairwise([0, *cuts, 9]) if members[a:b]]
    return tuple(tuple(part) for part in parts)


@given(some_groups())
def test_after_all_rounds_each_member_has_what_the_others_have(replication_groups):
    has = {process: {process} for group in replication_groups for process in group}
    for pairs in rounds(replication_groups):
        assert len({a for a, _ in pairs}) == len({b for _, b in pairs}) == len(pairs)
        for source, destination in pairs:
            has[destination].add(source)
    for group in replication_groups:
        assert all(has[process] == set(group) for process in group)


# Plans


def split_over(num_processes: int) -> Layout:
    """One leaf, a row of it in each process."""
    regions = tuple((((rank, rank + 1),),) for rank in range(num_processes))
    leaf = jax.ShapeDtypeStruct((num_processes,), jnp.float32)
    return Layout({"w": leaf}, {"w": 0}, (regions,))


def inventories(replication_groups, lost=(), duplicates=None):
    """What each process has of one save after some lost their disk."""
    count = sum(map(len, replication_groups))
    about = {
        "duplicates": duplicates or list(range(count)),
        "replication_groups": replication_groups,
        "hosts": [f"node{rank}" for rank in range(count)],
        "places": [],
    }
    kept = {process: list(group) for group in replication_groups for process in group}
    return [
        {}
        if process in lost
        else {folder_name(7, "ab"): about | {"writers": kept[process]}}
        for process in range(count)
    ]


def test_ragged_replication_groups_restore_three_lost_hosts():
    (found,) = find(inventories(RAGGED, lost=(6, 3, 4)))
    assert found.is_complete and found.step == 7
    layout = split_over(8)
    chosen = choose_files(found, layout, layout)
    assert chosen == [[rank] for rank in range(8)]  # each its own
    (fetches,) = plan_fetches(found, chosen)  # in one round
    assert {(f.writer, f.destination) for f in fetches} == {(6, 6), (3, 3), (4, 4)}
    assert {f.source for f in fetches} <= {2, 7, 1, 0}


@given(some_groups(), st.data())
def test_a_step_is_complete_unless_a_replication_group_is_lost(
    replication_groups, data
):
    count = sum(map(len, replication_groups))
    lost = data.draw(st.sets(st.integers(0, count - 1), max_size=count - 1))
    (found,) = find(inventories(replication_groups, lost))
    gone = {p for group in replication_groups if set(group) <= lost for p in group}
    assert set(found.lost) == gone
    if gone:
        said = found.what_is_lost()
        assert all(f"those of process {p}, kept by " in said for p in gone)
        assert all(f"{p} (node{p})" in said for p in gone)


@given(some_groups(), st.data())
def test_fetches_give_every_process_its_shards_and_its_copies_again(
    replication_groups, data
):
    count = sum(map(len, replication_groups))
    lost = {data.draw(st.sampled_from(c)) for c in replication_groups if len(c) > 1}
    (found,) = find(inventories(replication_groups, lost))
    layout = split_over(count)
    wanted = add_copies(found, choose_files(found, layout, layout))
    has = {p: {s for s, h in found.owners.items() if p in h} for p in range(count)}
    for one in plan_fetches(found, wanted):
        assert len({f.source for f in one}) == len(one)
        assert len({f.destination for f in one}) == len(one)
        assert all(f.writer in found.owners and f.writer in has[f.source] for f in one)
        for fetch in one:
            has[fetch.destination].add(fetch.writer)
    for group in replication_groups:
        assert all(set(group) <= has[process] for process in group)


def test_of_replicas_one_is_enough():
    replication_groups = fsdp.checkpoint.make_replication_groups(4)
    assert not find(inventories(replication_groups, lost=(0, 1)))[0].is_complete
    (found,) = find(
        inventories(replication_groups, lost=(0, 1), duplicates=[0, 1, 0, 1])
    )
    assert found.is_complete


def test_a_damaged_file_counts_as_lost():
    (found,) = find(inventories(((0, 1),)))
    assert found.without([(0, 0)]).is_complete
    assert found.without([(0, 0), (1, 0)]).lost == [0]


def test_attempts_at_one_step_are_not_mixed():
    one, other = inventories(((0, 1),))
    other = {folder_name(7, "cd"): one[folder_name(7, "ab")] | {"writers": [1]}}
    one = {folder_name(7, "ab"): one[folder_name(7, "ab")] | {"writers": [0]}}
    assert [found.is_complete for found in find([one, other])] == [False, False]


def test_a_folder_says_its_step():
    assert step_of(folder_name(123, "0a1b")) == 123
    assert step_of("123") is step_of("lost+found") is None


# Files


def leaves_of_every_sort():
    mesh = fsdp.make_mesh()
    rows = NamedSharding(mesh, PartitionSpec("dp_shard"))
    whole = NamedSharding(mesh, PartitionSpec())
    values = np.random.default_rng(0).normal(size=(16, 3))
    dtypes = ("float32", "bfloat16", "float8_e4m3fn", "int4", "uint2", "bool")
    tree = {
        name: jax.device_put(jnp.asarray(values).astype(name), rows) for name in dtypes
    }
    padded = np.zeros((16, 3), np.float32)
    padded[:13] = values[:13]
    return tree | {
        "odd": fsdp.Padded(jax.device_put(padded, rows), (13, 3)),
        "scalar": jax.device_put(jnp.float32(3), whole),
        "none": jax.device_put(jnp.zeros((0, 3)), whole),
        "key": jax.device_put(jax.random.key(5), whole),
        "numpy": np.arange(3),
    }


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    """A file, and what was packed into it."""
    leaves = flatten(leaves_of_every_sort())
    packed = pack(Header(0, "7-ab", layout_of(leaves), {"beside": 1}), leaves)
    path = tmp_path_factory.mktemp("file") / "7-ab" / "0.shards"
    path.parent.mkdir()
    path.write_bytes(packed.tobytes())
    return path, leaves


def test_a_file_holds_each_part_once_and_logical_shapes_alone(shards):
    path, leaves = shards
    file = open_file(path)
    file.check()
    parts = {name: 0 for name in leaves}
    for (name, region), data in file.read().items():
        whole = np.asarray(leaves[name].value)
        inside = tuple(slice(start, stop) for start, stop in region)
        assert data.tobytes() == whole[inside].tobytes()
        assert data.dtype == leaves[name].value.dtype
        parts[name] += data.size
    assert parts == {name: int(np.prod(leaf.shape)) for name, leaf in leaves.items()}
    layout = file.header.layout
    assert layout_from_json(layout.as_json()) == layout


def test_every_flipped_bit_and_every_lost_byte_of_a_file_is_noticed(shards):
    path, _ = shards
    content = path.read_bytes()
    bits = np.random.default_rng(0).integers(8 * len(content), size=300)
    damaged = path.parents[1] / "damaged" / "7-ab" / "0.shards"
    damaged.parent.mkdir(parents=True)
    for bit in [*bits.tolist(), 0, 8 * len(content) - 1]:
        flipped = bytearray(content)
        flipped[bit // 8] ^= 1 << bit % 8
        damaged.write_bytes(flipped)
        with pytest.raises(
            fsdp.checkpoint.DamagedCheckpointError, match=facts("7-ab/0.shards'")
        ):
            open_file(damaged).check()
    for length in (0, 5, 40, len(content) // 2, len(content) - 1):
        damaged.write_bytes(content[:length])
        with pytest.raises(fsdp.checkpoint.DamagedCheckpointError):
            open_file(damaged)


@pytest.mark.parametrize("place", ["8-ab/0.shards", "7-cd/0.shards", "7-ab/1.shards"])
def test_a_file_of_another_step_attempt_or_process_is_not_taken(shards, place):
    path, _ = shards
    moved = path.parents[1] / "moved" / place
    moved.parent.mkdir(parents=True)
    shutil.copyfile(path, moved)
    with pytest.raises(
        fsdp.checkpoint.DamagedCheckpointError, match=facts(place, "7-ab/0.shards")
    ):
        open_file(moved)


# One process


@dataclasses.dataclass(frozen=True)
class Places:
    """A run's directory and a disk."""

    run: Path
    disk: Path

    def open(self, *, every=2, keep=2, persistent=1000) -> fsdp.Checkpointer:
        return fsdp.Checkpointer(
            self.run,
            save_decision_policy=policies.FixedIntervalPolicy(persistent),
            local=fsdp.checkpoint.LocalCheckpoints(self.disk, every, keep),
        )

    def save(self, *steps: int, resume=None, **options) -> None:
        with self.open(**options) as checkpointer:
            checkpointer.resume(like(), step=resume)
            for step in steps:
                checkpointer.save(step, state_at(step), metadata={"at": (step,)})

    def resume(self, step=None) -> tuple:
        with self.open() as checkpointer:
            state = checkpointer.resume(like(), step=step)
            return None if state is None else check(state), checkpointer.metadata

    @property
    def steps(self) -> list[int]:
        folders = [p.name for p in self.disk.glob("*/*-*")]
        return sorted(step for f in folders if (step := step_of(f)) is not None)

    @property
    def abandoned(self) -> list[int]:
        folders = self.disk.glob("*/*.abandoned")
        return sorted(int(folder.name.split("-")[0]) for folder in folders)


@pytest.fixture
def places(tmp_path) -> Places:
    return Places(tmp_path / "run", tmp_path / "a" / "disk")


def test_local_steps_have_a_cadence_of_their_own_and_the_newest_few_stay(places):
    places.save(*range(1, 8), persistent=5)
    assert places.steps == [4, 6]
    assert fsdp.latest_step(places.run) == 5
    assert places.resume() == (6, {"at": (6,)})
    assert places.resume(5) == (5, {"at": (5,)})
    assert places.resume(4) == (4, {"at": (4,)})
    assert places.resume("latest-good") == (6, {"at": (6,)})
    with pytest.raises(ValueError, match=facts("step 2", "5")):
        places.resume(2)


def test_a_local_step_carries_files_and_is_on_the_disk_when_it_counts(
    places, tmp_path, monkeypatch
):
    source = tmp_path / "tokenizer"
    (source / "d").mkdir(parents=True)
    (source / "d" / "vocab.txt").write_text("a b c")
    (source / "empty").touch()
    synced, fsync = [], os.fsync
    monkeypatch.setattr(
        os, "fsync", lambda fd: synced.append(os.readlink(f"/dev/fd/{fd}")) or fsync(fd)
    )
    with places.open() as checkpointer:
        checkpointer.save(2, state_at(2), files={"tokenizer": source})
        checkpointer.wait()
        (folder,) = places.disk.glob("*/2-*")
        assert [f"{folder}/0.part", str(folder), str(folder.parent)] == synced[-3:]
        with pytest.raises(ValueError, match=facts("'tokenizer'")):
            checkpointer.files("tokenizer")
        shutil.rmtree(source)
        checkpointer.resume(like())
        carried = checkpointer.files("tokenizer")
        assert (carried / "d" / "vocab.txt").read_text() == "a b c"
        assert (carried / "empty").read_bytes() == b""
        with pytest.raises(ValueError, match=facts("'text'", "tokenizer")):
            checkpointer.files("text")


def test_of_one_step_the_local_is_taken_and_of_another_the_newer(places):
    places.save(1, 2, persistent=2)
    assert places.resume() == (2, {"at": (2,)})
    shutil.rmtree(places.run / "2" / "state")  # that it was not read
    assert places.resume() == (2, {"at": (2,)})
    shutil.rmtree(places.run / "2")
    places.save(3, persistent=3)
    assert places.resume() == (3, {"at": (3,)})


def test_without_local_steps_the_persistent_one_is_taken(places):
    places.save(2, persistent=2)
    shutil.rmtree(places.disk)
    assert places.resume() == (2, {"at": (2,)})


def test_a_damaged_local_step_is_passed_over_and_the_log_says_so(places, caplog):
    places.save(2, 4)
    (path,) = places.disk.glob("*/4-*/0.shards")
    content = bytearray(path.read_bytes())
    content[-1000] ^= 1
    path.write_bytes(content)
    with caplog.at_level(logging.WARNING, "fsdp_jax"):
        assert places.resume() == (2, {"at": (2,)})
    assert "1 shard(s): opt_state.mu" in caplog.text
    assert "Local step 4 is not complete" in caplog.text


def test_steps_of_another_run_on_the_disk_are_let_be_and_not_loaded(places):
    places.save(2, 4)
    shutil.rmtree(places.run)
    assert places.resume() == (None, None)
    places.save(2)
    assert places.steps == [2, 2, 4]


def test_who_goes_back_to_an_older_step_sets_the_newer_ones_aside(places):
    places.save(2, 4, 6, keep=3)
    places.save(4, resume=2)
    assert places.steps == [2, 4] and places.abandoned == [4, 6]
    assert places.resume() == (4, {"at": (4,)})
    places.save(4, resume=2)  # and keeps those of the last time
    assert places.steps == [2, 4] and places.abandoned == [4]


def test_a_start_without_resume_removes_no_step_that_is_complete(places):
    places.save(4, 6)
    with places.open() as checkpointer:
        checkpointer.save(2, state_at(2))
    assert places.steps == [2] and places.abandoned == [4, 6]


def half_of_a_step(folder: Path, step: int) -> None:
    """What process 0 of two has of a step, while the disk of process 1 is elsewhere."""
    name = folder_name(step, "ab")
    about = {"metadata": {}, "extras": {}, "own": [], "impls": {}}
    about |= {"replication_groups": [[0], [1]], "hosts": ["node0", "node1"]}
    about |= {"places": [place_of(folder), "node1:1:2"]}
    leaves = {"w": Leaf(np.ones(1, np.float32), (1,))}
    content = pack(Header(0, name, split_over(2), about), leaves)
    (folder / name).mkdir()
    (folder / name / "0.shards").write_bytes(content.tobytes())


def test_a_start_without_all_hosts_keeps_what_a_start_with_them_would_use(
    places, caplog
):
    places.save(2)
    (folder,) = places.disk.iterdir()
    half_of_a_step(folder, 6)
    with caplog.at_level(logging.WARNING, "fsdp_jax"):
        assert places.resume() == (2, {"at": (2,)})
    for said in ("Local step 6", "2 processes", "1 (node1)", "6-ab"):
        assert said in caplog.text
    places.save(4)
    assert places.steps == [2, 4, 6]  # nobody lost anything by the wrong start
    places.save(8)
    assert places.steps == [4, 8]  # a newer one is complete


def test_what_no_start_can_use_is_removed(places):
    """The only file of the step is damaged."""
    places.save(2)
    (folder,) = places.disk.iterdir()
    half_of_a_step(folder, 6)
    (path,) = folder.glob("6-*/0.shards")
    content = path.read_bytes().replace(b"node1:1:2", b"node1:1:3")
    path.write_bytes(content)  # its header is damaged
    places.save(4)
    assert places.steps == [2, 4]


def test_what_a_crash_left_is_removed_by_the_next_save(places):
    places.save(2)
    (good,) = places.disk.glob("*/2-*")
    left = good.with_name(folder_name(4, "00"))
    left.mkdir()
    (left / "0.part").write_bytes(b"half")
    assert places.resume() == (2, {"at": (2,)})
    places.save(6)
    assert places.steps == [2, 6]


def test_a_local_save_that_fails_spoils_neither_the_last_nor_the_next(places, caplog):
    with places.open() as checkpointer:
        checkpointer.save(2, state_at(2))
        checkpointer.wait()
        with file_size_limited(100_000):
            checkpointer.save(4, state_at(4))
            with pytest.raises(
                RuntimeError, match=facts("step 4", f"Errno {errno.EFBIG}")
            ):
                checkpointer.wait()
            assert check(checkpointer.resume(like())) == 2
            checkpointer.save(6, state_at(6))
            checkpointer.save(8, state_at(8))  # waits for the one before
        assert "Local step 6 is not saved" in caplog.text  # and that is all
        checkpointer.save(10, state_at(10))
    assert places.resume()[0] == 10
    assert 6 not in places.steps and 4 not in places.steps


def test_the_state_may_be_donated_as_soon_as_it_is_saved(places):
    state = state_at(2)
    with places.open() as checkpointer:
        checkpointer.save(2, state)
        for leaf in jax.tree.leaves(state):
            leaf.delete()
    assert places.resume()[0] == 2


@pytest.mark.parametrize("sizes", [{}, {"dp_outer": 2}, {"dp_outer": 8}, {"num": 2}])
def test_any_mesh_loads_a_local_step(places, sizes):
    """With leaves that are padded, otherwise on each mesh."""

    def place(tree, mesh):
        rows = NamedSharding(mesh, PartitionSpec("dp_shard"))
        padding = -13 % mesh.shape["dp_shard"]
        odd = np.pad(np.asarray(tree["odd"]), [(0, padding), (0, 0)])
        return {
            "odd": fsdp.Padded(jax.device_put(odd, rows), (13, 3)),
            "even": jax.device_put(tree["even"], rows),
        }

    devices = jax.devices()[: sizes.pop("num", 8)]
    values = {"odd": np.arange(39.0).reshape(13, 3), "even": np.arange(16.0)}
    saved = place(values, fsdp.make_mesh())
    wanted = place(values, fsdp.make_mesh(devices=devices, **sizes))
    with places.open() as checkpointer:
        state = dataclasses.replace(state_at(2), params=saved)
        checkpointer.save(2, state)
        checkpointer.wait()
        got = checkpointer.resume(dataclasses.replace(like(), params=wanted)).params
    for name, leaf in wanted.items():
        assert (
            jax.tree.leaves(got[name])[0].sharding == jax.tree.leaves(leaf)[0].sharding
        )
        np.testing.assert_array_equal(np.asarray(got[name]), np.asarray(leaf))


class Average:
    """An object with a tree of arrays and a number."""

    def __init__(self, step: int):
        self.state = {"mean": state_at(step).params, "count": np.int64(step)}

    def get_state(self):
        return self.state

    def set_state(self, state):
        self.state = state


def test_objects_beside_the_state_come_back(places):
    with places.open() as checkpointer:
        checkpointer.save(2, state_at(2), extras={"average": Average(2)})
        checkpointer.wait()
        average = Average(0)
        checkpointer.resume(like(), extras={"average": average})
        with pytest.raises(
            ValueError, match=facts("extras.average", "extras.average.mean.w")
        ):
            checkpointer.resume(like())
    assert average.state["count"] == 2
    want = Average(2).state["mean"]["w"]
    np.testing.assert_array_equal(average.state["mean"]["w"], want)


def test_values_that_make_no_sense_are_refused(places):
    for name in ("every", "keep"):
        with pytest.raises(
            ValueError, match=facts("LocalCheckpoints", f"{name}=0", "1")
        ):
            places.open(**{name: 0})
    with pytest.raises(ValueError, match=facts("replication_groups=[]", "1", "0")):
        fsdp.Checkpointer(
            places.run,
            local=fsdp.checkpoint.LocalCheckpoints(
                places.disk, 1, replication_groups=[]
            ),
        )
