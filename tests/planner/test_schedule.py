"""Schedules are data: kept in files, replayed on any cost model."""

from __future__ import annotations

import dataclasses
import json

import pytest

from fsdp_jax.hlo._collectives import Collective
from fsdp_jax.hlo._parse import Shape, parse
from fsdp_jax.planner._gpu import GPUS
from fsdp_jax.planner._kernel import Kernel, kernel_of, kernel_seconds
from fsdp_jax.planner._schedule import (
    Branch,
    Loop,
    Run,
    Start,
    Wait,
    kernels_of,
    schedule_of,
)
from fsdp_jax.planner._schedule_file import load_schedule, save_schedule
from fsdp_jax.planner._timeline import replay
from fsdp_jax.planner._trace_file import save_trace
from fsdp_jax.planner._unit_times import unit_times, unit_times_of

H100 = GPUS["h100"].cost
PRODUCT = Kernel("matmul", 4e12, "bf16", 1e9)
ADD = Kernel("memory", 0.0, "bf16", 3e9)
ATTENTION = Kernel("attention_backward", 1e12, "bf16", 1e9, length=8192, width=128)


def collective(name, group):
    whole = Shape("bf16", (1 << 30,))
    shard = Shape("bf16", ((1 << 30) // len(group),))
    scope = "jvp(unit:layers)/all_gather"
    groups = frozenset({tuple(group)})
    return Collective("all-gather", (shard,), (whole,), groups, scope, name)


SCHEDULE = (
    Start(collective("far", range(0, 64, 8)), is_async=True),
    Loop(
        3,
        (
            Start(collective("near", range(8)), is_async=True, in_backward=True),
            Run(PRODUCT, "forward"),
            Wait("near"),
        ),
    ),
    Run(ADD, "backward", "layers"),
    Branch(((Run(ATTENTION, "backward"),), ()), (1, 4)),
    Branch(((Run(ADD, "optimizer"),),), None),
    Wait("far"),
)


def test_a_schedule_is_read_as_it_was_written(tmp_path):
    file = tmp_path / "schedule.json.gz"
    save_schedule(SCHEDULE, file)
    assert load_schedule(file) == SCHEDULE
    other = tmp_path / "again.json.gz"
    save_schedule(load_schedule(file), other)
    assert other.read_bytes() == file.read_bytes()


@pytest.mark.parametrize(
    "group", [(3,), (0, 5), (0, 1, 2, 3), (1, 4, 5, 9), (0, 1, 8, 9, 16, 17)]
)
def test_any_replica_group_is_kept(group, tmp_path):
    save_schedule((Start(collective("c", group), True),), tmp_path / "s.json.gz")
    (start,) = load_schedule(tmp_path / "s.json.gz")
    assert start.collective.groups == frozenset({group})


def test_kernels_are_those_of_loops_and_branches_too():
    assert set(kernels_of(SCHEDULE)) == {PRODUCT, ADD, ATTENTION}


def test_collectives_on_other_links_run_at_once():
    far, near = collective("far", range(0, 64, 8)), collective("near", range(8))
    both = replay((Start(far, True), Start(near, True)), H100, 64)
    assert [sent.start for sent in both.sent] == [0, 0]
    flat = collective("flat", range(64))
    shared = replay((Start(flat, True), Start(near, True)), H100, 64)
    assert shared.sent[1].start == shared.sent[0].end


def test_kernels_are_slower_while_a_collective_runs():
    start, run = Start(collective("c", range(8)), True), Run(PRODUCT, "forward")
    alone = replay((run,), H100, 8).seconds
    communication = replay((start,), H100, 8).seconds
    assert communication < alone
    found = replay((start, run), H100, 8).compute_seconds
    assert found == pytest.approx(alone + communication * H100.overlap_slowdown)
    ideal = dataclasses.replace(H100, overlap_slowdown=0.0)
    assert replay((start, run), ideal, 8).compute_seconds == pytest.approx(alone)


def test_attention_has_a_speed_of_its_own_that_short_rows_do_not_reach():
    def rate(length, width=128, kind="attention"):
        kernel = Kernel(kind, 1e13, "bf16", 1e6, length, width)
        return kernel.flops / kernel_seconds(kernel, H100)

    product = Kernel("matmul", 1e13, "bf16", 1e6)
    assert rate(16384) < product.flops / kernel_seconds(product, H100)
    assert rate(1024) < 0.75 * rate(16384)
    assert rate(8192, width=64) < 0.8 * rate(8192)
    assert rate(8192, kind="attention_backward") < rate(8192)


BACKWARD = """ENTRY %main (q: bf16[2,4096,32,192], k: bf16[2,512,8,192], \
v: bf16[2,512,8,128]) -> bf16[2,4096,32,192] {
  %q = bf16[2,4096,32,192]{3,2,1,0} parameter(0)
  %k = bf16[2,512,8,192]{3,2,1,0} parameter(1)
  %v = bf16[2,512,8,128]{3,2,1,0} parameter(2)
  ROOT %g = bf16[2,4096,32,192]{3,2,1,0} custom-call(%q, %k, %v), \
custom_call_target="__cudnn$fmhaSoftmaxBackward", backend_config={"mask_type":"MASK"}
}
"""


@pytest.mark.parametrize("mask", ["CAUSAL", "NO_MASK"])
def test_backward_attention_needs_a_float32_gradient_of_queries(mask):
    module = parse(BACKWARD.replace('"MASK"', f'"{mask}"'))
    found = kernel_of(module, module["main"], module["main"].root)
    assert found.kind == "attention_backward"
    assert found.workspace == 4 * (2 * 4096 * 32) * (192 + 1)
    assert PRODUCT.workspace == 0


def test_a_trace_has_each_kernel_and_collective_at_its_time(tmp_path):
    line = replay(SCHEDULE, H100, 64)
    save_trace(line, tmp_path / "trace.json", title="8 GPUs")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    spans = [event for event in events if event["ph"] == "X"]
    computed = sum(event["dur"] for event in spans if event["tid"] == 0)
    assert computed == pytest.approx(line.compute_seconds * 1e6)
    waited = sum(event["dur"] for event in spans if event["tid"] == 1)
    assert waited == pytest.approx(line.exposed_seconds * 1e6)
    sent = [event["name"] for event in spans if event["tid"] == 2]
    assert sent == ["all-gather layers"] * 4
    assert max(event["ts"] + event["dur"] for event in spans) == pytest.approx(
        line.seconds * 1e6
    )


def test_the_times_of_units_are_those_of_the_step():
    body = (
        Start(collective("w", range(8)), True),
        Run(ADD, "forward", "layers"),
        Wait("w"),
    )
    update = Run(ADD, "optimizer", "layers")
    schedule = (Run(PRODUCT, "forward"), Loop(4, body), update)
    timeline = replay(schedule, H100, 8)
    found = {(one.unit, one.work): one for one in unit_times(timeline)}
    assert set(found) == {
        ("-", "compute"),
        ("layers", "compute"),
        ("optimizer", "compute"),
        ("layers", "all-gather"),
    }
    assert found["layers", "all-gather"].times == 4
    computed = sum(one.seconds for key, one in found.items() if key[1] == "compute")
    assert computed == pytest.approx(timeline.compute_seconds)
    exposed = sum(one.exposed_seconds for one in found.values())
    assert exposed == pytest.approx(timeline.exposed_seconds) and exposed > 0
    communication = found["layers", "all-gather"].seconds
    assert communication == pytest.approx(timeline.communication_seconds)
    assert unit_times_of(map(dataclasses.asdict, found.values())) == tuple(
        found.values()
    )


def test_a_fusion_that_runs_beside_others_takes_the_time_of_its_bytes():
    def program(*lines):
        listed = "\n  ".join(lines)
        return parse(
            f"""HloModule step, is_scheduled=true

%double (a: f32[1024]) -> f32[1024] {{
  %a = f32[1024] parameter(0)
  ROOT %sum = f32[1024] add(%a, %a)
}}

ENTRY %main (x: f32[1024]) -> f32[1024] {{
  %x = f32[1024] parameter(0)
  {listed}
}}
"""
        )

    how = "kind=kLoop, calls=%double"
    plain = program(f"ROOT %y = f32[1024] fusion(%x), {how}")
    beside = program(
        f"%s = ((f32[1024]), f32[1024], u32[]) fusion-start(%x), {how}",
        "ROOT %y = f32[1024] fusion-done(%s)",
    )
    assert schedule_of(beside) == schedule_of(plain)
    (kernel,) = kernels_of(schedule_of(plain))
    assert kernel.bytes == 2 * 4 * 1024
