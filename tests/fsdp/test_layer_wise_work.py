"""Matrices left over go to the devices with the least work."""

import jax
import numpy as np
import pytest
from jax.sharding import AbstractMesh

import fsdp_jax as fsdp
from fsdp_jax.optim._matrix_stack import Member, StackLayout
from fsdp_jax.optim._matrix_work import balanced, matrix_work, work_of

# Of Llama 3 8B: matrices in 32 layers of [rows, cols].
LLAMA = {
    "q and o": (64, 4096, 4096),
    "k and v": (64, 4096, 1024),
    "gate and up": (64, 4096, 14336),
    "down": (32, 14336, 4096),
}


def layouts_of(stacks, num_devices):
    mesh = AbstractMesh((num_devices,), ("dp_shard",))
    return {
        name: StackLayout(mesh, (Member(name, shape, shape, ((), ("dp_shard",), ())),))
        for name, shape in stacks.items()
    }


def drawn(seed):
    """Stacks of up to 40 matrices of shapes that differ up to 64-fold in work."""
    random = np.random.default_rng(seed)
    return {
        str(n): (int(random.integers(1, 40)), *random.choice([16, 32, 64], 2).tolist())
        for n in range(random.integers(1, 12))
    }, int(random.integers(1, 17))


@pytest.mark.parametrize("seed", range(40))
def test_no_device_has_more_work_than_greedy_scheduling_allows(seed):
    stacks, num_devices = drawn(seed)
    layouts = balanced(layouts_of(stacks, num_devices))
    work = work_of(layouts)
    assert sum(work.loads) == sum(
        layout.count * matrix_work(layout) for layout in layouts.values()
    )
    assert work.maximum <= work.with_zeros
    # Two devices differ by the largest matrix at most (Graham's bound).
    assert work.maximum <= (2 - 1 / num_devices) * work.bound
    assert work.bound <= work.with_zeros
    for layout in layouts.values():
        assert sum(layout.num_owned) == layout.count
        assert max(layout.num_owned) - min(layout.num_owned) <= 1


@pytest.mark.parametrize(
    "num_devices, zeros, owned", [(32, 1.0, 1.0), (128, 2.3, 1.29), (256, 2.3, 1.0)]
)
def test_many_devices_come_near_the_bound_for_llama(num_devices, zeros, owned):
    work = work_of(balanced(layouts_of(LLAMA, num_devices)))
    assert round(work.with_zeros / work.bound, 2) == zeros
    assert round(work.maximum / work.bound, 2) == owned


def test_without_balancing_the_first_devices_have_most_work():
    layouts = layouts_of({"a": (5, 16, 16), "b": (5, 16, 32)}, 4)
    assert work_of(layouts).loads == (24576, 24576, 12288, 0)
    assert work_of(balanced(layouts)).loads == (20480, 16384, 12288, 12288)


def test_work_counts_the_matrices_of_a_plan_and_prints_itself():
    plan = fsdp.fully_shard(
        lambda key: {"a": jax.numpy.ones((5, 8, 16))},
        fsdp.make_mesh(devices=jax.devices()[:4]),
        [fsdp.Stacked("a")],
    )
    work = fsdp.optim.layer_wise_work(plan, ["a"])
    assert work.loads == (2048, 1024, 1024, 1024)
    assert "2.05e+03" in str(work) and "1.60 times" in str(work)
    assert fsdp.optim.layer_wise_work(plan, (name for name in ["a"])) == work
    padded = fsdp.optim.layer_wise_work(plan, ["a"], per_matrix=False)
    assert padded.loads == (2048, 2048, 1024, 0)
