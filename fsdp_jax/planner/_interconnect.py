"""Seconds of a collective: rings over NVLink and NICs, trees, and NVLink SHARP.

Each algorithm has a bandwidth and a latency that grows with the group, as in NCCL's own
tuning model; the fastest one counts, as NCCL chooses it. Messages of some MB do not
fill its channels, which costs a time of its own.

Source: NCCL `src/graph/tuning.cc` (latencies of a step; rings, trees);
  nccl-tests#290, "46-48 GB/s per NIC"; nccl-tests#212, 370 GB/s of bus bandwidth in a
  node of H100s, and 480 for an all-reduce with NVLink SHARP; by size of the message,
  nccl-tests on 2 to 8 A100s, H100s, H200s, B200s and B300s in
  ai-dynamo/aiconfigurator@095f58a, `systems/data/*/comm/nccl`, and on 8 H100s in
  NVIDIA/dgxc-benchmarking@46e4201, `nccl/README.md`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence

from fsdp_jax.hlo._collectives import Collective
from fsdp_jax.planner._gpu import CostModel


@dataclasses.dataclass(frozen=True)
class Protocol:
    """A protocol of NCCL: how fast, and seconds a step.

    Attributes:
      base: Seconds before the first step, without those of a launch.
      link: Seconds of a step over NVLink.
      network: Seconds of a step over the network.
      efficiency: Part of the bandwidth that carries data.
    """

    base: float
    link: float
    network: float
    efficiency: float


# "Simple" for large messages; "LL128" sends a flag with every 120 bytes of 128, "LL"
# with every 4 bytes of 8.
PROTOCOLS = (
    Protocol(base=8.4e-6, link=3.4e-6, network=9.6e-6, efficiency=1.0),
    Protocol(base=10.0e-6, link=1.25e-6, network=4.0e-6, efficiency=0.92),
    Protocol(base=6.6e-6, link=0.6e-6, network=2.7e-6, efficiency=0.5),
)
TREE = Protocol(base=0.0, link=28e-6, network=50e-6, efficiency=0.9)
SWITCH = Protocol(base=14.5e-6, link=0.0, network=9.6e-6, efficiency=1.0)


@dataclasses.dataclass(frozen=True)
class Filling:
    """Seconds until the channels of a collective are full, which small ones never are.

    Fitted to the times of nccl-tests in a node, from 64 KB to 512 MB.

    Attributes:
      most: Seconds that it costs a large message.
      half: Bytes that each device sends at which it costs half of that.
    """

    most: float
    half: float

    def seconds(self, moved: float) -> float:
        """Returns the seconds that it costs a message."""
        return self.most * moved / (moved + self.half)


RING_FILLING = Filling(most=65e-6, half=80e6)
SWITCH_FILLING = Filling(most=95e-6, half=30e6)


@dataclasses.dataclass(frozen=True)
class Layout:
    """Placement of a replica group on nodes, or on NVLink domains.

    Attributes:
      size: Devices of the group.
      nodes: Nodes that the group spans.
      in_node: Devices of the group in a node; the fewest, if they differ.
    """

    size: int
    nodes: int
    in_node: int


def layout_of(collective: Collective, num_devices: int, cost: CostModel) -> Layout:
    """Returns how the widest replica group of a collective lies on nodes.

    Args:
      collective: Collective; no groups mean one of all devices.
      num_devices: Number of devices of the mesh.
      cost: Cost model, for the devices of a node.
    """
    groups: Sequence[Sequence[int]] = [*collective.groups] or [range(num_devices)]
    found = [_layout(group, cost.devices_per_node) for group in groups]
    return max(found, key=lambda layout: (layout.nodes, layout.size, -layout.in_node))


def _layout(group: Sequence[int], per_node: int) -> Layout:
    counts: dict[int, int] = {}
    for device in group:
        counts[device // per_node] = counts.get(device // per_node, 0) + 1
    return Layout(len(group), len(counts), min(counts.values()))


def communicated_bytes(collective: Collective, num_devices: int) -> float:
    """Returns the bytes that each device sends in a ring algorithm."""
    n = collective.group_size or num_devices
    sent = sum(shape.bytes for shape in collective.sent)
    received = sum(shape.bytes for shape in collective.received)
    around = (n - 1) / n
    return {
        "all-gather": received * around,
        "reduce-scatter": sent * around,
        "all-reduce": 2 * sent * around,
        "all-to-all": sent * around,
        # One side is a buffer for the worst case, the other the actual tokens.
        "ragged-all-to-all": min(sent, received) * around,
    }.get(collective.op, float(sent))


def communication_seconds(
    collective: Collective, num_devices: int, cost: CostModel
) -> float:
    """Returns the seconds of a collective with the links to itself."""
    layout = layout_of(collective, num_devices, cost)
    moved = communicated_bytes(collective, num_devices)
    if collective.op in ("all-gather", "reduce-scatter", "all-reduce"):
        ways = _reductions(collective.op, moved, layout, cost)
    else:
        ways = _messages(collective.op, moved, layout, cost)
    return cost.latency + min(ways) + _own_seconds(collective, layout, cost)


def ring_bandwidth(layout: Layout, cost: CostModel) -> float:
    """Returns the bytes/s that each device of a ring sends.

    NCCL runs a ring a NIC: it enters a node through one NIC and leaves through another
    device's. The rings of `m` members of a node have the NICs of all of them, and each
    device forwards all rings over NVLink.
    """
    if layout.nodes == 1:
        return cost.link_bandwidth
    return min(cost.link_bandwidth, layout.in_node * cost.network_bandwidth)


def links_used(layout: Layout) -> tuple[str, ...]:
    """Returns the kinds of links that a ring occupies: "nvlink", "network" or both."""
    inside = ("nvlink",) if layout.in_node > 1 or layout.nodes == 1 else ()
    return (*inside, *(("network",) if layout.nodes > 1 else ()))


def _own_seconds(collective: Collective, layout: Layout, cost: CostModel) -> float:
    """Returns the seconds in which a device copies its own shard to the result."""
    if collective.op not in ("all-gather", "reduce-scatter", "all-to-all"):
        return 0.0
    sides = (collective.sent, collective.received)
    largest = max(sum(shape.bytes for shape in side) for side in sides)
    return largest / layout.size / cost.copy_bandwidth


def _reductions(
    op: str, moved: float, layout: Layout, cost: CostModel
) -> Iterator[float]:
    rounds = 2 if op == "all-reduce" else 1
    between = rounds * (layout.nodes - 1)
    within = rounds * (layout.size - 1) - between
    bandwidth = ring_bandwidth(layout, cost)
    filling = RING_FILLING.seconds(moved)
    for protocol in PROTOCOLS:
        start = protocol.base + within * protocol.link + between * protocol.network
        yield start + filling + moved / (protocol.efficiency * bandwidth)
    if op != "all-reduce":
        return
    depth = 2 * math.ceil(math.log2(layout.nodes)) if layout.nodes > 1 else 0
    if layout.nodes > 1:
        chain = 2 * (layout.in_node - 1)
        start = TREE.base + chain * TREE.link + depth * TREE.network
        yield start + filling + moved / (TREE.efficiency * bandwidth)
    if cost.switch_bandwidth and layout.in_node > 2:
        # The switch adds, so that bytes go up and down once, with any number of
        # members; between nodes, trees.
        around = (layout.in_node - 1) / layout.in_node
        inside = cost.switch_bandwidth * around / SWITCH_AROUND
        outer = layout.in_node * cost.network_bandwidth
        speed = min(inside, outer if layout.nodes > 1 else math.inf)
        start = SWITCH.base + depth * SWITCH.network
        yield start + SWITCH_FILLING.seconds(moved) + moved / speed


SWITCH_AROUND = 7 / 8
"""Part of a message that is another device's, of the 8 for which speeds are stated."""


def _messages(
    op: str, moved: float, layout: Layout, cost: CostModel
) -> Iterator[float]:
    """All-to-all and permutes: each device sends to others through its own NIC."""
    filling = RING_FILLING.seconds(moved)
    if layout.nodes == 1:
        yield PROTOCOLS[0].base + filling + moved / cost.link_bandwidth
        return
    # Of a permute the device at the border of a node sends all of its bytes to another.
    is_permute = op == "collective-permute"
    away = 1 - (layout.in_node - 1) / max(layout.size - 1, 1) if not is_permute else 1.0
    slowest = max(
        moved * away / cost.network_bandwidth, moved * (1 - away) / cost.link_bandwidth
    )
    yield PROTOCOLS[0].network + filling + slowest
