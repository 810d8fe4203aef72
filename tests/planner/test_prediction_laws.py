"""Predicted steps obey laws of any machine: faster parts never make them slower."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
from published_errors import schedule_of

from fsdp_jax.planner._accuracy import PUBLISHED, seconds_range
from fsdp_jax.planner._gpu import GPUS
from fsdp_jax.planner._schedule import Loop, Run
from fsdp_jax.planner._timeline import floor_seconds, replay

# Kept schedules of published steps by their GPUs: ZeRO-2 over nodes, ZeRO-3, and tensor
# parallelism.
STEPS = {
    "mpt-1b_h100_128x12x2048_outer1_micro1_zero2_none_bf16_bfloat16": 128,
    "mpt-760m_h100_16x24x2048_outer1_micro1_zero3_none_bf16_bfloat16": 16,
    "llama3-8b_h100-500w_64x12x8192_outer1_micro1_zero3_selective_op_bf16_float32_"
    "tp8": 64,
}
SPEEDS = (
    "flops",
    "attention_forward",
    "attention_backward",
    "memory_bandwidth",
    "copy_bandwidth",
    "link_bandwidth",
    "network_bandwidth",
    "switch_bandwidth",
)
# Each of them as fast as the one before it in every part.
FASTER = ("h100-500w", "h100", "h200", "b200")
# Sums of as many addends, in another order.
ROUNDING = 1e-9

steps = pytest.mark.parametrize("name", STEPS, ids=lambda name: name.split("_outer")[0])


def seconds(name, cost):
    return replay(schedule_of(name), cost, STEPS[name]).seconds


@steps
@pytest.mark.parametrize("speed", SPEEDS)
def test_a_faster_part_never_makes_a_step_slower(name, speed):
    cost = GPUS["h100"].cost
    faster = dataclasses.replace(cost, **{speed: 1.5 * getattr(cost, speed)})
    assert seconds(name, faster) <= seconds(name, cost) * (1 + ROUNDING)


def test_each_speed_is_read():
    # What the laws would pass without: a speed that no step depends on.
    cost = GPUS["h100"].cost
    before = {name: seconds(name, cost) for name in STEPS}
    for speed in SPEEDS:
        slower = dataclasses.replace(cost, **{speed: getattr(cost, speed) / 4})
        gains = [seconds(name, slower) / before[name] for name in STEPS]
        # The switch's is of scalars alone.
        assert max(gains) > (1 + 1e-6 if speed == "switch_bandwidth" else 1.001), speed


@steps
def test_a_faster_gpu_never_makes_a_step_slower(name):
    found = [seconds(name, GPUS[gpu].cost) for gpu in FASTER]
    for slower, faster in itertools.pairwise(found):
        assert faster <= slower * (1 + ROUNDING)


def larger(schedule, factor):
    """A schedule whose kernels compute and move more, as those of more rows do."""

    def step_of(step):
        if isinstance(step, Loop):
            return Loop(step.times, larger(step.body, factor))
        if not isinstance(step, Run):
            return step
        flops, size = step.kernel.flops * factor, step.kernel.bytes * factor
        kernel = dataclasses.replace(step.kernel, flops=flops, bytes=size)
        return dataclasses.replace(step, kernel=kernel)

    return tuple(map(step_of, schedule))


@steps
def test_a_larger_batch_never_takes_less_a_step_nor_more_a_row(name):
    cost = GPUS["h100"].cost
    found = [
        replay(larger(schedule_of(name), rows), cost, STEPS[name]).seconds
        for rows in (1, 1.5, 2, 4)
    ]
    assert found == sorted(found)
    a_row = [one / rows for one, rows in zip(found, (1, 1.5, 2, 4), strict=True)]
    assert a_row == sorted(a_row, reverse=True)


@steps
def test_a_step_is_never_faster_than_its_floor_and_within_its_range(name):
    cost = GPUS["h100"].cost
    found = seconds(name, cost)
    assert floor_seconds(schedule_of(name), cost, STEPS[name]) <= found
    low, high = seconds_range(found)
    assert low < found < high
    # At least as wide as the errors of the median of published steps.
    assert high / found - 1 > PUBLISHED.median < 1 - low / found
