"""Of three runs, the first event that differs names a device, or none."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest

import fsdp_jax as fsdp
from fsdp_jax.replay._digest import DeviceDigests
from fsdp_jax.replay._events import Event, Loop
from fsdp_jax.replay._suspects import Recorded, suspect_devices

STEPS = 3


def recorded(by: int, *wrong: tuple[str, int, int], tp: int = 1) -> Recorded:
    """A run on the mesh with its ranks exchanged, wrong at (event, iteration, rank)."""
    mesh = fsdp.make_mesh(devices=list(np.roll(jax.devices(), by)), tp=tp)
    ranks = 8 // tp
    digests = {
        "read": np.zeros((8, 1, 2), np.uint32),
        "sent": np.zeros((ranks, STEPS), np.uint32),
        "received": np.zeros((ranks, STEPS), np.uint32),
        "made": np.zeros((8, 1, 2), np.uint32),
        "sums": np.zeros((1, 2), np.uint32),
    }
    for event, iteration, rank in wrong:
        if event in {"sent", "received"}:
            digests[event][rank, iteration] = 1 + by
        else:
            digests[event][rank] = 1 + by
    body = (Event(digests["sent"], True), Event(digests["received"], False))
    events = (Event(digests["read"], True), Loop(body, True))
    devices = tuple(mesh.devices.flat)
    given = DeviceDigests(("w",), devices, np.zeros((8, 1, 2), np.uint32))
    made = dataclasses.replace(given, values=digests["made"])
    return Recorded(mesh, given, events, digests["sums"][0], made)


def named(*runs: Recorded, is_exact: bool = True) -> list[int]:
    return [d.id for d in suspect_devices(runs, is_exact=is_exact)]


EVERYWHERE = [("received", i, rank) for i in range(STEPS) for rank in range(8)]


@pytest.mark.parametrize(
    ("wrong", "devices"),
    [
        ([("sent", 1, 3), *EVERYWHERE[:16]], [3]),  # the loop runs backwards
        ([("sent", 1, 3), *EVERYWHERE], []),  # iteration 2 was wrong before
        ([("sent", 1, 3), ("sent", 1, 4)], []),
        ([("received", 1, 3)], []),
        ([("made", 0, 5)], [5]),
        ([("sums", 0, 0), ("made", 0, 5)], []),
        ([("read", 0, 2), ("sent", 2, 6)], [2]),
        ([], []),
    ],
)
def test_what_a_rank_computes_wrong_first_names_its_device(wrong, devices):
    assert named(recorded(0, *wrong), recorded(1), recorded(2)) == devices
    # On the mesh whose first device is the last of all, rank 3 is device 2.
    moved = [(device - 1) % 8 for device in devices]
    assert named(recorded(0), recorded(1, *wrong), recorded(2)) == moved


def test_a_device_that_is_wrong_in_every_run_is_what_they_have_in_common():
    runs = [recorded(by, ("sent", 2, 5 + by)) for by in range(3)]
    assert named(*runs) == [5]
    others = [recorded(by, ("sent", 2, 5)) for by in range(3)]
    assert named(*others) == []  # a rank of which no two results agree


def test_of_a_rank_over_tp_all_devices_are_named_that_it_may_be():
    fault = ("sent", 2, 1)
    assert named(recorded(0, fault, tp=2), recorded(1, tp=2), recorded(2, tp=2)) == [
        2,
        3,
    ]


def test_where_sums_have_other_bits_only_what_comes_before_them_names_a_device():
    sums = recorded(1, *EVERYWHERE)
    assert named(recorded(0, ("sent", 2, 4)), sums, recorded(2), is_exact=False) == [4]
    assert named(recorded(0, ("sent", 1, 4)), sums, recorded(2), is_exact=False) == []
    made = recorded(0, ("made", 0, 4))
    assert named(made, recorded(1), recorded(2), is_exact=False) == []


def test_of_meshes_of_other_shapes_only_what_is_stored_is_compared():
    others = [recorded(1, tp=2), recorded(2, tp=2)]
    assert named(recorded(0, ("sent", 2, 4)), *others) == []
    assert named(recorded(0, ("read", 0, 4)), *others) == [4]
