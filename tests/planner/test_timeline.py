"""The replay of a schedule equals what one works out by hand."""

from __future__ import annotations

import dataclasses

import pytest
from helpers.errors import facts

from fsdp_jax.hlo._collectives import collective_of
from fsdp_jax.hlo._parse import parse
from fsdp_jax.planner import _timeline
from fsdp_jax.planner._compile import scheduling_profile
from fsdp_jax.planner._cost import bytes_moved
from fsdp_jax.planner._gpu import _MAY_BE_ZERO, GPUS, CostModel, find_gpu
from fsdp_jax.planner._interconnect import communicated_bytes
from fsdp_jax.planner._kernel import kernel_of, kernel_seconds
from fsdp_jax.planner._schedule import schedule_of

# A second is 1 operation, 1 byte of memory, 1 byte to a neighbour or a tenth of one to
# another node; nodes of 4 devices. NCCL's steps take microseconds beside that.
MICROSECONDS = dict(abs=1e-3)
UNIT = CostModel(
    flops=1.0,
    memory_bandwidth=1.0,
    link_bandwidth=1.0,
    network_bandwidth=0.1,
    latency=5.0,
    devices_per_node=4,
    peak_flops=1.0,
)


def replay(module, cost, num_devices):
    return _timeline.replay(schedule_of(module), cost, num_devices)


def near(*values):
    return pytest.approx(values, **MICROSECONDS)


def schedule(*lines, computations=""):
    body = "\n".join(f"  {line}" for line in lines)
    return parse(f"{computations}\nENTRY %main (p: f32[2]) -> f32[2] {{\n{body}\n}}\n")


P = "%p = f32[2]{0} parameter(0)"
START = (
    "%gs = (f32[2]{0}, f32[8]{0}) all-gather-start(%p), replica_groups={{0,1,2,3}}, "
    'metadata={op_name="jvp(unit:a)/all_gather"}'
)
DONE = "%gd = f32[8]{0} all-gather-done(%gs)"
# 8 bytes read and 8 written.
WORK = "%work = f32[2]{0} negate(%p)"


def test_what_is_computed_meanwhile_hides_communication():
    line = replay(schedule(P, START, WORK, DONE, "ROOT %r = f32[2] copy(%p)"), UNIT, 4)
    # A ring sends 3 of 4 pieces, 24 of 32 bytes, in 5 + 24 s; 16 s are computed then.
    (sent,) = line.sent
    assert (sent.start, sent.end, sent.exposed) == near(0, 29, 13)
    assert (line.seconds, line.compute_seconds) == near(29 + 16, 32)
    assert line.exposed_seconds == pytest.approx(13, **MICROSECONDS)


def test_what_is_waited_for_at_once_is_exposed():
    line = replay(schedule(P, START, DONE, WORK, "ROOT %r = f32[2] copy(%p)"), UNIT, 4)
    assert (line.exposed_seconds, line.seconds) == near(29, 29 + 32)


def test_a_collective_without_a_start_is_waited_for_at_once():
    plain = "%g = f32[8]{0} all-gather(%p), replica_groups={{0,1,2,3}}"
    line = replay(schedule(P, plain, "ROOT %r = f32[2] copy(%p)"), UNIT, 4)
    assert (line.exposed_seconds, line.seconds) == near(29, 29 + 16)


def test_the_floor_is_the_step_with_free_collectives():
    module = schedule(P, START, WORK, DONE, "ROOT %r = f32[2] copy(%p)")
    slowed = dataclasses.replace(UNIT, overlap_slowdown=0.2)
    # Two kernels of 16 s each, and neither is slowed down.
    floor = _timeline.floor_seconds(schedule_of(module), slowed, 4)
    assert floor == pytest.approx(32, **MICROSECONDS)
    assert replay(module, slowed, 4).seconds > floor


def test_one_collective_runs_at_a_time():
    second = START.replace("%gs", "%gs2")
    done = DONE.replace("%gd", "%gd2").replace("%gs", "%gs2")
    module = schedule(P, START, second, DONE, done, "ROOT %r = f32[2] copy(%p)")
    line = replay(module, UNIT, 4)
    first, last = line.sent
    assert (first.start, first.end, last.start, last.end) == near(0, 29, 29, 58)
    assert (first.exposed, last.exposed) == near(29, 29)


LOOP = """
%body (s: (f32[2])) -> (f32[2]) {
  %s = (f32[2]{0}) parameter(0)
  %p = f32[2]{0} get-tuple-element(%s), index=0
  %gs = (f32[2]{0}, f32[8]{0}) all-gather-start(%p), replica_groups={{0,1,2,3}}
  %work = f32[2]{0} negate(%p)
  %gd = f32[8]{0} all-gather-done(%gs)
  ROOT %t = (f32[2]{0}) tuple(%work)
}
%cond (c: (f32[2])) -> pred[] {
  %c = (f32[2]{0}) parameter(0)
  ROOT %true = pred[] constant(true)
}
"""


def test_a_loop_runs_as_often_as_it_says():
    loop = (
        "%loop = (f32[2]{0}) while(%t), condition=%cond, body=%body, "
        'backend_config={"known_trip_count":{"n":"3"}}'
    )
    module = schedule(
        *(P, "%t = (f32[2]{0}) tuple(%p)", loop),
        "ROOT %r = f32[2]{0} get-tuple-element(%loop), index=0",
        computations=LOOP,
    )
    line = replay(module, UNIT, 4)
    assert (line.seconds, line.exposed_seconds) == near(3 * 29, 3 * 13)
    assert [sent.depth for sent in line.sent] == [1, 1, 1]


@pytest.mark.parametrize(
    "scope, is_backward", [("transpose(jvp(f))/neg", True), ("f/neg", False)]
)
def test_what_is_sent_again_in_the_loop_of_backward_is_of_backward(scope, is_backward):
    # The gather is computed again, and has the scope of forward in both.
    negated = f'%work = f32[2]{{0}} negate(%p), metadata={{op_name="{scope}"}}'
    body = LOOP.replace(WORK, negated).replace(
        "replica_groups={{0,1,2,3}}",
        'replica_groups={{0,1,2,3}}, metadata={op_name="jvp(f)/all_gather"}',
    )
    loop = (
        "%loop = (f32[2]{0}) while(%t), condition=%cond, body=%body, "
        'backend_config={"known_trip_count":{"n":"2"}}'
    )
    module = schedule(
        *(P, START, DONE, "%t = (f32[2]{0}) tuple(%p)", loop),
        "ROOT %r = f32[2]{0} get-tuple-element(%loop), index=0",
        computations=body,
    )
    assert [sent.in_backward for sent in replay(module, UNIT, 4).sent] == [
        False,
        *2 * [is_backward],
    ]


def test_between_nodes_the_network_is_what_counts():
    start = START.replace("{{0,1,2,3}}", "{{0,4},{1,5},{2,6},{3,7}}")
    start = start.replace("f32[8]", "f32[4]")
    module = schedule(
        P, start, DONE.replace("f32[8]", "f32[4]"), WORK.replace("%work", "ROOT %work")
    )
    (sent,) = replay(module, UNIT, 8).sent
    assert sent.end == pytest.approx(5 + 8 / 0.1, **MICROSECONDS)


@pytest.mark.parametrize(
    "line, sent",
    [
        ("all-gather(%p), replica_groups={{0,1,2,3}}", 8 * 4 * 3 / 4),
        ("all-reduce(%p), replica_groups={{0,1,2,3}}", 2 * 8 * 3 / 4),
        ("all-to-all(%p), replica_groups={{0,1,2,3}}", 8 * 3 / 4),
        ("collective-permute(%p), source_target_pairs={{0,1},{1,0}}", 8),
    ],
)
def test_a_ring_sends_so_many_bytes(line, sent):
    result = "f32[8]{0}" if line.startswith("all-gather") else "f32[2]{0}"
    module = schedule(P, f"ROOT %c = {result} {line}")
    main = module["main"]
    collective = collective_of(module, main, main.by_name["c"])
    assert communicated_bytes(collective, 4) == sent


def test_a_matrix_product_takes_as_long_as_its_arithmetic():
    text = """ENTRY %main (a: bf16[4,8], b: bf16[8,2]) -> bf16[4,2] {
  %a = bf16[4,8]{1,0} parameter(0)
  %b = bf16[8,2]{1,0} parameter(1)
  ROOT %c = (bf16[4,2]{1,0}, s8[64]{0}) custom-call(%a, %b), \
custom_call_target="__cublas$lt$matmul", backend_config={"gemm_backend_config":\
{"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"]}}}
}
"""
    module = parse(text)
    main = module["main"]
    kernel = kernel_of(module, main, main.root)
    assert kernel_seconds(kernel, UNIT) == 2 * 4 * 2 * 8
    # Its workspace is neither read nor written as a whole.
    assert bytes_moved(module, main, main.root) == 2 * (32 + 16 + 8)


FUSION = """
%fused (a: f32[16,4], b: f32[1,4], i: s32[]) -> f32[16,4] {
  %a = f32[16,4]{1,0} parameter(0)
  %b = f32[1,4]{1,0} parameter(1)
  %i = s32[] parameter(2)
  %zero = s32[] constant(0)
  %twice = f32[1,4]{1,0} add(%b, %b)
  ROOT %put = f32[16,4]{1,0} dynamic-update-slice(%a, %twice, %i, %zero)
}
"""


def test_what_is_updated_in_place_counts_as_the_update():
    text = (
        FUSION
        + """ENTRY %main (a: f32[16,4], b: f32[1,4], i: s32[]) -> f32[16,4] {
  %a = f32[16,4]{1,0} parameter(0)
  %b = f32[1,4]{1,0} parameter(1)
  %i = s32[] parameter(2)
  ROOT %f = f32[16,4]{1,0} fusion(%a, %b, %i), kind=kLoop, calls=%fused
}
"""
    )
    module = parse(text)
    main = module["main"]
    assert bytes_moved(module, main, main.root) == 16 + 16 + 4


def test_the_profile_tells_the_scheduler_what_the_replay_uses():
    module = schedule(P, START, WORK, DONE, "ROOT %r = f32[2] copy(%p)")
    profile = scheduling_profile(module, UNIT, 4)
    assert profile.splitlines() == [
        'costs { name: "gs" cost_us: 29000018.600 }',
        'costs { name: "work" cost_us: 16000000.000 }',
        'costs { name: "r" cost_us: 16000000.000 }',
    ]


def test_figures_of_the_cost_model_can_be_replaced():
    slow = find_gpu("h200", network_bandwidth=1e9)
    assert slow.cost.network_bandwidth == 1e9
    assert slow.cost.flops == GPUS["h200"].cost.flops
    with pytest.raises(
        ValueError, match=facts("speed=1, flops=0", "flops, memory_bandwidth")
    ):
        find_gpu("h200", speed=1, flops=0)
    with pytest.raises(ValueError, match=facts("'v100'", "a100, a100-40gb")):
        find_gpu("v100")
    assert find_gpu("h100", memory=99e9).memory == 99_000_000_000
    with pytest.raises(ValueError, match=facts("memory=80", "80e9")):
        find_gpu("h100", memory=80)
    assert find_gpu("H200", devices_per_node=4).cost.devices_per_node == 4
    with pytest.raises(ValueError, match=facts("devices_per_node=4.5, latency=nan")):
        find_gpu("h200", devices_per_node=4.5, latency=float("nan"))


def test_a_cluster_may_lack_a_switch_and_all_that_costs_time_beside_bytes():
    nothing = dict.fromkeys(_MAY_BE_ZERO, 0.0)
    cost = find_gpu("h100", attention_forward=None, **nothing).cost
    assert all(getattr(cost, name) == 0 for name in nothing)
    assert cost.attention_forward is None
    for slowdown in (1.0, 1.5, -0.1):
        with pytest.raises(ValueError, match=facts(f"overlap_slowdown={slowdown}")):
            find_gpu("h100", overlap_slowdown=slowdown)
    with pytest.raises(ValueError, match=facts("latency=inf, flops=None")):
        find_gpu("h100", latency=float("inf"), flops=None)
