"""Each host reads its own rows of every global batch, and no row is lost."""

from __future__ import annotations

from types import SimpleNamespace

import grain
import jax
import numpy as np
import pytest
from helpers.errors import facts

import fsdp_jax as fsdp
from fsdp_jax.data import HostBatches, HostShard


def hosts(count: int) -> list[HostShard]:
    return [HostShard(index, count) for index in range(count)]


def batches(num_rows: int, batch: int, count: int) -> list[list[list[int]]]:
    """Of each host, the rows of each of its batches."""
    rows = np.arange(num_rows)
    return [
        [rows.tolist() for rows in list_of(HostBatches(rows, batch, shard))]
        for shard in hosts(count)
    ]


def list_of(source: HostBatches) -> list:
    return list(source)  # as Python iterates: until an index is refused


@pytest.mark.parametrize("num_rows", [24, 25, 31, 3])
def test_the_global_batches_are_the_same_on_any_number_of_hosts(num_rows):
    def joined(count: int) -> list[list[int]]:
        each = batches(num_rows, 8, count)
        return [sum(parts, []) for parts in zip(*each, strict=True)]

    assert joined(1) == joined(2) == joined(8)
    assert sum(joined(4), []) == list(range(num_rows))


def test_hosts_that_a_last_batch_does_not_reach_get_no_rows():
    assert [host[-1] for host in batches(11, 8, 4)] == [[8, 9], [10], [], []]
    rows = [{"x": np.zeros((2, 3)), "n": 1}] * 9
    empty = HostBatches(rows, 8, HostShard(3, 4))[1]
    assert empty["x"].shape == (0, 2, 3) and empty["n"].shape == (0,)


def test_a_batch_that_the_hosts_do_not_divide_is_refused():
    with pytest.raises(ValueError, match=facts("6 rows", "4 hosts")):
        HostBatches(range(10), 6, HostShard(0, 4))


def loader(shard: HostShard):
    rows = grain.MapDataset.source(np.arange(100)).seed(3).shuffle().repeat()
    source = grain.MapDataset.source(HostBatches(rows, 8, shard))
    return iter(source.to_iter_dataset(grain.ReadOptions(num_threads=1)))


def test_grain_goes_on_with_the_same_batches_on_other_hosts():
    whole = loader(HostShard(0, 1))
    expected = [next(whole).tolist() for _ in range(16)]  # into the second epoch
    on_four = [loader(shard) for shard in hosts(4)]
    seen = [sum((next(host).tolist() for host in on_four), []) for _ in range(5)]
    (state,) = {str(host.get_state()) for host in on_four}  # one for all
    on_two = [loader(shard) for shard in hosts(2)]
    for host in on_two:
        host.set_state(on_four[0].get_state())
    seen += [sum((next(host).tolist() for host in on_two), []) for _ in range(11)]
    assert seen == expected


def test_a_batch_of_one_host_is_split_over_its_devices():
    mesh = fsdp.make_mesh(dp_outer=2)
    rows = {"x": np.arange(16.0).reshape(8, 2)}
    made = fsdp.global_batch(mesh, rows, 8)
    np.testing.assert_array_equal(made["x"], rows["x"])
    assert len({str(shard.index) for shard in made["x"].addressable_shards}) == 8
    with pytest.raises(ValueError, match=facts("16", "8", "padded_global_batch")):
        fsdp.global_batch(mesh, rows, 16)


@pytest.mark.parametrize("real", [0, 3, 8])
def test_rows_that_are_added_are_marked(real):
    rows = 1 + np.arange(real)
    made, mask = fsdp.data.padded_global_batch(fsdp.make_mesh(), rows, 8)
    assert np.asarray(mask).tolist() == [True] * real + [False] * (8 - real)
    assert np.asarray(made)[:real].tolist() == rows.tolist()
    assert set(np.asarray(made).tolist()) == (set(rows.tolist()) or {0})
    with pytest.raises(ValueError, match=facts("8 rows", "9")):
        fsdp.data.padded_global_batch(fsdp.make_mesh(), np.zeros(9), 8)


# Which rows a host holds, of meshes of several processes


def mesh_of(processes, **sizes):
    """A mesh as `host_shard` sees it, its devices of these processes in order."""
    mesh = fsdp.make_mesh(**sizes)
    devices = np.array(
        [SimpleNamespace(process_index=process) for process in processes]
    )
    return SimpleNamespace(
        axis_names=mesh.axis_names,
        shape=mesh.shape,
        devices=devices.reshape(mesh.devices.shape),
    )


@pytest.mark.parametrize(
    "processes, sizes, shard",
    [
        ([1, 1, 0, 0, 2, 2, 3, 3], {}, (1, 4)),  # by their rows, not their numbers
        ([0, 0, 1, 1, 2, 2, 3, 3], {"tp": 2}, (0, 4)),
        ([0, 0, 1, 1, 2, 2, 3, 3], {"tp": 4}, (0, 2)),  # with process 1
        ([3, 3, 1, 1, 2, 2, 0, 0], {"dp_outer": 2}, (3, 4)),
        ([0] * 8, {"tp": 8}, (0, 1)),
    ],
)
def test_a_host_reads_the_rows_that_its_devices_hold(processes, sizes, shard):
    assert fsdp.host_shard(mesh_of(processes, **sizes)) == HostShard(*shard)


@pytest.mark.parametrize(
    "processes, sizes",
    [
        ([0, 1, 0, 1, 2, 3, 2, 3], {}),  # interleaved
        ([0, 1, 1, 2, 2, 3, 3, 0], {"tp": 2}),  # overlapping
        ([0, 0, 0, 0, 1, 1, 2, 2], {}),  # of other sizes
    ],
)
def test_hosts_whose_rows_are_no_whole_part_are_refused(processes, sizes):
    with pytest.raises(ValueError, match=facts("process 0", "(0, ")):
        fsdp.host_shard(mesh_of(processes, **sizes))
    assert jax.process_index() == 0


def test_a_process_without_a_device_of_the_mesh_has_no_rows():
    with pytest.raises(ValueError, match=facts("process 1, 2", "process 0")):
        fsdp.host_shard(mesh_of([1] * 4 + [2] * 4))
