"""Collectives take the time that rings, trees and switches of NCCL take."""

from __future__ import annotations

import dataclasses

import pytest

from fsdp_jax.hlo._collectives import Collective
from fsdp_jax.hlo._parse import Shape
from fsdp_jax.planner._gpu import GPUS
from fsdp_jax.planner._interconnect import (
    communicated_bytes,
    communication_seconds,
    layout_of,
    links_used,
)

H100 = GPUS["h100"].cost
GIB = 1 << 30


def gathered(size, group, *, op="all-gather"):
    """An all-gather or all-reduce whose larger side has `size` bytes."""
    whole, shard = Shape("u8", (size,)), Shape("u8", (size // len(group),))
    sent = (shard,) if op == "all-gather" else (whole,)
    received = (shard,) if op == "reduce-scatter" else (whole,)
    return Collective(op, sent, received, frozenset({tuple(group)}), "", "c")


def bus_bandwidth(collective, gpus, cost=H100):
    """GB/s as nccl-tests report it."""
    return (
        communicated_bytes(collective, gpus)
        / communication_seconds(collective, gpus, cost)
        / 1e9
    )


@pytest.mark.parametrize(
    "op, published",
    # nccl-tests#212: an all-reduce with NVLink SHARP 480 GB/s; nccl#1281: all-gathers
    # 350 and reduce-scatters 360.
    [("all-gather", 350), ("reduce-scatter", 360), ("all-reduce", 480)],
)
def test_large_messages_in_a_node_reach_the_published_bandwidth(op, published):
    found = bus_bandwidth(gathered(8 * GIB, range(8), op=op), 8)
    assert found == pytest.approx(published, rel=0.02)


# Microseconds in a node, by the bytes that nccl-tests call the size of a message.
# Source: ai-dynamo/aiconfigurator@095f58a, systems/data/*/comm/nccl (NCCL 2.29.2, for
# A100s 2.27.3).
TIMES = {
    ("h100", "all-gather", 8): {2**20: 17.1, 2**24: 68.9, 2**27: 392.8, 2**29: 1401.5},
    ("h100", "all-gather", 4): {2**20: 13.6, 2**24: 66.2, 2**27: 350.3, 2**29: 1267.5},
    ("h100", "all-gather", 2): {2**20: 11.3, 2**24: 56.0, 2**27: 292.5, 2**29: 1038.6},
    ("h100", "all-reduce", 8): {2**20: 25.4, 2**24: 121.9, 2**27: 578.7, 2**29: 2111.1},
    ("h100", "all-reduce", 4): {2**20: 18.1, 2**24: 99.0, 2**27: 613.2, 2**29: 2299.7},
    ("h100", "all-to-all", 8): {2**20: 15.6, 2**24: 75.7, 2**27: 402.4, 2**29: 1490.4},
    ("b200", "all-gather", 8): {2**20: 18.7, 2**26: 137.5, 2**27: 206.8, 2**29: 761.4},
    ("b200", "all-reduce", 8): {2**24: 99.1, 2**26: 278.3, 2**27: 398.4, 2**29: 1334.6},
    ("gb200", "all-gather", 4): {2**20: 15.1, 2**26: 108.3, 2**28: 370.2, 2**29: 714.5},
    ("a100", "all-gather", 8): {2**20: 26.8, 2**26: 351.6, 2**27: 660.3, 2**29: 2288.0},
    ("a100", "all-reduce", 8): {
        2**20: 38.9,
        2**24: 216.5,
        2**27: 1169.1,
        2**29: 4225.9,
    },
}


@pytest.mark.parametrize(
    "gpu, op, ranks", TIMES, ids=lambda value: str(value).replace("-", "_")
)
def test_messages_of_all_sizes_take_the_published_time(gpu, op, ranks):
    cost = GPUS[gpu].cost
    for size, published in TIMES[gpu, op, ranks].items():
        collective = gathered(size, range(ranks), op=op)
        found = 1e6 * communication_seconds(collective, ranks, cost)
        # Runs and versions of NCCL differ by a tenth; the small ones by more.
        tolerance = 0.11 if size >= 2**28 else 0.22
        assert found == pytest.approx(published, rel=tolerance), size
    # Without what it takes to fill the channels the middle ones are too fast.
    size = 2**24 if 2**24 in TIMES[gpu, op, ranks] else 2**26
    link = (op == "all-reduce" and cost.switch_bandwidth) or cost.link_bandwidth
    wire = communicated_bytes(gathered(size, range(ranks), op=op), ranks) / link
    assert 1e6 * wire < 0.85 * TIMES[gpu, op, ranks][size]


def test_an_all_reduce_by_the_switch_takes_the_same_time_with_any_number_of_members():
    eight, four = (
        communication_seconds(gathered(8 * GIB, range(n), op="all-reduce"), n, H100)
        for n in (8, 4)
    )
    # A ring of four sends 6/7 of the bytes; nccl-tests measure 2,300 and 2,111 us.
    assert four == pytest.approx(eight, rel=0.01)


def test_a_ring_has_the_nics_of_all_members_of_a_node():
    # Of 128 GPUs all, or one, two or four of a node: rings over as many NICs.
    for members in (1, 2, 4, 8):
        group = [8 * node + member for node in range(16) for member in range(members)]
        found = bus_bandwidth(gathered(8 * GIB, group), 128)
        limit = min(H100.link_bandwidth, members * H100.network_bandwidth)
        assert found == pytest.approx(limit / 1e9, rel=0.05)


def test_a_step_of_9_seconds_has_less_than_9_seconds_of_communication():
    # Llama-3 70B on 128 H100s, flat: 9.07 s with fp8 (dgxc-benchmarking). Two gathers
    # and one reduction of 141 GB were 9.33 s of communication at a NIC a GPU.
    layer = 141 * 10**9 // 80 // 128 * 128
    gather = communication_seconds(gathered(layer, range(128)), 128, H100)
    reduce = communication_seconds(
        gathered(layer, range(128), op="reduce-scatter"), 128, H100
    )
    assert 80 * (2 * gather + reduce) < 9.07 / 5
    alone = dataclasses.replace(H100, link_bandwidth=H100.network_bandwidth)
    assert 80 * 3 * communication_seconds(gathered(layer, range(128)), 128, alone) > 9


def test_small_messages_cost_their_steps_which_grow_with_the_nodes():
    seconds = [
        communication_seconds(gathered(1024 * 2048, range(gpus)), gpus, H100)
        for gpus in (8, 64, 512, 2048)
    ]
    assert seconds == sorted(seconds)
    # 2,047 steps of NVLink and network against 7, in NCCL's own model.
    assert seconds[0] < 50e-6 and 1.5e-3 < seconds[-1] < 10e-3


def test_of_a_permute_the_device_at_the_border_of_a_node_sends_all_its_bytes():
    ring = gathered(GIB, range(16), op="collective-permute")
    seconds = communication_seconds(ring, 16, H100)
    assert seconds == pytest.approx(GIB / H100.network_bandwidth, rel=0.02)
    to_all = gathered(GIB, range(16), op="all-to-all")  # a half stays in the node
    assert communication_seconds(to_all, 16, H100) < 0.6 * seconds
    inside = gathered(GIB, range(8), op="collective-permute")
    assert communication_seconds(inside, 16, H100) < seconds / 5


def test_an_all_reduce_between_nodes_takes_a_tree_where_that_is_faster():
    group = range(0, 2048, 8)
    small = communication_seconds(gathered(256, group, op="all-reduce"), 2048, H100)
    ring = 2 * 255 * 4e-6
    assert small < ring / 1.5


def test_an_nvlink_domain_is_one_node():
    gb200 = GPUS["gb200"].cost
    inside = bus_bandwidth(gathered(8 * GIB, range(64)), 64, gb200)
    assert inside > 0.9 * gb200.link_bandwidth / 1e9
    assert layout_of(gathered(1 << 20, range(72)), 72, gb200).nodes == 1


def test_collectives_say_which_links_they_occupy():
    def links(group):
        return links_used(layout_of(gathered(1 << 20, group), 64, H100))

    assert links(range(8)) == ("nvlink",)
    assert links(range(64)) == ("nvlink", "network")
    assert links(range(0, 64, 8)) == ("network",)


def test_an_all_to_all_goes_through_its_own_nic():
    sent = (Shape("u8", (GIB,)),)
    groups = frozenset({tuple(range(16))})
    collective = Collective("all-to-all", sent, sent, groups, "", "c")
    # Of 15 peers 8 are on the other node.
    away = GIB * 15 / 16 * 8 / 15
    expected = away / H100.network_bandwidth
    assert communication_seconds(collective, 16, H100) == pytest.approx(
        expected, rel=0.02
    )


OPS = ("all-gather", "reduce-scatter", "all-reduce", "all-to-all")


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("gpu", GPUS)
def test_more_bytes_and_more_members_never_take_less_time(gpu, op):
    cost = GPUS[gpu].cost

    def seconds(size, group):
        return communication_seconds(gathered(size, group, op=op), 4096, cost)

    groups = [range(n) for n in (2, 4, 8, 16, 64, 72, 144, 576, 1152)]
    # A member a node, as of HSDP's replicas.
    replicas = [range(0, n * cost.devices_per_node, 72) for n in (18, 36, 72)]
    for members in (groups, replicas):
        for size in (2**13, 2**20, 2**24, 2**28, 2**32):
            by_members = [seconds(size * 9, group) for group in members]
            assert by_members == sorted(by_members), size
    by_size = [seconds(9 * 2**power, range(144)) for power in range(10, 33)]
    assert by_size == sorted(by_size)


@pytest.mark.parametrize("op", OPS)
def test_a_group_in_a_node_is_never_slower_than_one_across_nodes(op):
    for size in (2**13, 2**20, 2**24, 2**28, 2**32):
        inside, across = (
            communication_seconds(gathered(size, group, op=op), 64, H100)
            for group in (range(8), range(0, 64, 8))
        )
        assert inside < across, size


def test_an_all_gather_over_many_nodes_is_faster_than_the_published_one():
    # nccl#1218: 200 GB/s over 32 nodes, in one iteration; the page on planning says so.
    found = bus_bandwidth(gathered(2 * GIB, range(256)), 256)
    assert found == pytest.approx(316, abs=0.5)
    # And an all-reduce 340 GB/s.
    reduced = bus_bandwidth(gathered(2 * GIB, range(256), op="all-reduce"), 256)
    assert reduced == pytest.approx(340, rel=0.1)
