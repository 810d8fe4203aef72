"""One mesh, every axis, and an error that says which number to change."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from helpers.errors import facts
from jax.sharding import AxisType

import fsdp_jax as fsdp
from fsdp_jax.sharding._mesh import AXES


def sizes(mesh) -> dict[str, int]:
    """The axes that have more than one device."""
    return {axis: size for axis, size in mesh.shape.items() if size > 1}


def make_weights(key):
    return {"w": jnp.ones((8, 8))}


@pytest.mark.parametrize(
    "asked, got",
    [
        ({}, {"dp_shard": 8}),
        ({"dp_shard": 8}, {"dp_shard": 8}),
        ({"dp_outer": 2}, {"dp_outer": 2, "dp_shard": 4}),
        ({"dp_outer": -1, "dp_shard": 2}, {"dp_outer": 4, "dp_shard": 2}),
        ({"dp_outer": 2, "ep": 2}, {"dp_outer": 2, "dp_shard": 2, "ep": 2}),
        ({"dp_outer": 8}, {"dp_outer": 8}),
        ({"dp_shard": 1, "tp": 8}, {"tp": 8}),
    ],
)
def test_an_open_size_takes_the_devices_that_the_others_leave(asked, got):
    assert sizes(fsdp.make_mesh(**asked)) == got


def test_every_axis_is_there_outermost_first_and_automatic():
    mesh = fsdp.make_mesh()
    assert mesh.axis_names == ("pp", "dp_outer", "dp_shard", "ep", "cp", "tp")
    assert mesh.axis_types == (AxisType.Auto,) * 6


def test_neighbouring_devices_lie_on_the_last_axis():
    ids = [d.id for d in fsdp.make_mesh(dp_outer=2, dp_shard=2, ep=2).devices.flat]
    assert ids == [d.id for d in jax.devices()]


def test_a_mesh_has_the_devices_it_is_given():
    chosen = jax.devices()[2:6]
    mesh = fsdp.make_mesh(devices=chosen)
    assert sizes(mesh) == {"dp_shard": 4}
    assert list(mesh.devices.flat) == chosen


@pytest.mark.parametrize(
    "asked, says",
    [
        (
            {"dp_shard": 3},
            ["dp_shard=3", "8", "devices=jax.devices()[:n]"],
        ),
        (
            {"dp_outer": 3},
            ["dp_outer=3, dp_shard=-1", "3", "8"],
        ),
        ({"dp_shard": 16}, ["dp_shard=16", "16", "8"]),
        ({"dp_shard": 1}, ["size 1", "1", "8"]),
        ({"dp_outer": 0}, ["dp_outer=0, dp_shard=-1", "1"]),
        ({"dp_shard": -2}, ["dp_shard=-2", "1"]),
        ({"dp_outer": -1}, ["dp_outer=-1, dp_shard=-1", "-1"]),
        ({"tp": 2.0}, ["dp_shard=-1, tp=2.0"]),
    ],
)
def test_sizes_that_do_not_fit_are_an_error_with_the_numbers(asked, says):
    with pytest.raises(ValueError, match=facts(*says)):
        fsdp.make_mesh(**asked)


def test_no_devices_make_no_mesh():
    with pytest.raises(ValueError, match=facts("devices=[]", "1")):
        fsdp.make_mesh(devices=[])
    with pytest.raises(ValueError, match=facts("devices=4", "jax.devices()[:4]")):
        fsdp.make_mesh(devices=4)


def test_a_mesh_made_elsewhere_is_refused():
    foreign = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    with pytest.raises(
        ValueError, match=facts("('data',)", "pp", "fsdp_jax.make_mesh")
    ):
        fsdp.fully_shard(make_weights, foreign)


def test_a_mesh_made_elsewhere_with_every_axis_is_as_good():
    sizes = (1, 1, 8, 1, 1, 1)
    mesh = jax.make_mesh(sizes, AXES, axis_types=(AxisType.Auto,) * 6)
    assert fsdp.fully_shard(make_weights, mesh).param_plans[0].split.dim == 0


@pytest.mark.parametrize("axis", ["cp", "tp"])
def test_axes_that_no_plan_uses_are_refused(axis):
    mesh = fsdp.make_mesh(**{axis: 2})
    with pytest.raises(ValueError, match=facts(f"{axis}=2", "dp_shard")):
        fsdp.fully_shard(make_weights, mesh)


def test_all_unused_axes_are_named_at_once():
    mesh = fsdp.make_mesh(cp=2, tp=2)
    with pytest.raises(ValueError, match=facts("cp=2, tp=2")):
        fsdp.fully_shard(make_weights, mesh)
