"""A profile is read unit by unit, and laid beside its plan."""

from __future__ import annotations

import json

import pytest
from helpers.errors import facts
from helpers.xplane import Event, write_profile

from fsdp_jax.cli import main
from fsdp_jax.planner import Explanation, PlannedStep, UnitTime, read_profile
from fsdp_jax.planner._unit_times import unit_times_of

COMPUTE, NCCL = "Stream #14(Compute)", "Stream #20(Collective)"
GATHER = "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
REDUCE = "ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL(ncclDevKernelArgsStorage)"


def said(instruction, scope="", module="jit_train_step"):
    return {"hlo_op": instruction, "hlo_module": module, "name": scope}


def one_step(start):
    """A step of 100 microseconds: two layers, their gathers, the head, the update."""
    layer = "jit(train_step)/unit:layers/dot_general"
    events = [
        # 10 of the first gather's 20 microseconds have nothing beside them.
        Event(NCCL, GATHER, 0, 20, said("all-gather-start", "unit:layers/all_gather")),
        Event(COMPUTE, "cutlass", 10, 30, said("fusion.1", layer)),
        Event(COMPUTE, "cutlass", 30, 50, said("fusion.1", layer)),
        Event(COMPUTE, "cutlass", 50, 60, said("gemm.2", "head/dot_general")),
        Event(NCCL, REDUCE, 55, 70, said("reduce-scatter", "unit:layers/psum")),
        Event(COMPUTE, "loop_fusion", 70, 80, said("fusion.3", "optimizer/add")),
        Event(COMPUTE, "graph_node", 80, 100),
    ]
    return [
        Event(e.stream, e.name, start + e.start, start + e.end, e.stats) for e in events
    ]


def of_the_gpu(*, steps=2):
    events = [event for at in range(steps) for event in one_step(100 * at)]
    # Other lines repeat the kernels; another program runs in the end.
    events.append(Event("XLA Ops", "fusion.1", 10, 30, said("fusion.1")))
    other = said("copy", module="jit_init")
    return [*events, Event(COMPUTE, "copy", 100 * steps, 100 * steps + 5, other)]


@pytest.fixture
def profile(tmp_path):
    host = [Event("python", "train_step", 0, 500)]
    planes = {"/host:CPU": host, "/device:GPU:0": of_the_gpu()}
    return write_profile(tmp_path / "trace", planes)


def seconds(times):
    return {
        (one.unit, one.work): (
            round(one.seconds * 1e6, 3),
            round(one.exposed_seconds * 1e6, 3),
            one.times,
        )
        for one in times
    }


def test_the_time_of_a_step_goes_to_its_units(profile):
    found = read_profile(profile)
    assert (found.device, found.module, found.steps) == (
        "/device:GPU:0",
        "jit_train_step",
        2,
    )
    assert found.seconds == pytest.approx(100e-6)
    assert found.others == pytest.approx(5e-6)
    assert seconds(found.times) == {
        ("layers", "all-gather"): (20, 10, 1),
        ("layers", "compute"): (40, 0, 0),
        ("-", "compute"): (10, 0, 0),
        ("layers", "reduce-scatter"): (15, 10, 1),
        ("optimizer", "compute"): (10, 0, 0),
        ("?", "compute"): (20, 0, 0),
    }


def test_the_folder_of_a_run_is_as_good_as_its_file(profile, tmp_path):
    assert read_profile(tmp_path / "trace") == read_profile(profile)


def test_a_number_of_steps_that_is_given_is_not_counted(profile):
    counted, given = read_profile(profile), read_profile(profile, steps=4)
    assert given.seconds == pytest.approx(counted.seconds / 2)
    assert given.times[0].times == counted.times[0].times / 2


@pytest.mark.parametrize(
    "name, op",
    [
        ("ncclDevKernel_AllReduce_Sum_f32_TREE_LL", "all-reduce"),
        ("ncclKernel_SendRecv_RING_SIMPLE_Sum_int8_t", "collective-permute"),
        ("ncclSymDevKernel_Unheard", "collective"),
    ],
)
def test_without_an_instruction_the_kernel_s_name_tells_the_collective(
    tmp_path, name, op
):
    events = [Event(NCCL, name, 0, 10), Event(COMPUTE, "gemm", 20, 30)]
    found = read_profile(write_profile(tmp_path, {"/device:GPU:0": events}), steps=1)
    assert ("?", op) in seconds(found.times)


def test_a_plan_stands_beside_unit_by_unit(profile):
    planned = PlannedStep(
        seconds=80e-6,
        times=(
            UnitTime("layers", "compute", 0, 20e-6, 0.0),
            UnitTime("layers", "all-gather", 2, 10e-6, 5e-6),
            UnitTime("tail", "compute", 0, 1e-6, 0.0),
        ),
        title="8 x NVIDIA H200",
    )
    text = repr(Explanation(read_profile(profile), planned))
    rows = {tuple(line.split()[:2]): line.split() for line in text.splitlines()}
    # Times, planned; exposed, planned; planned ms, ratio, measured ms.
    gather = "1 2 0.01 0.01 0.01 2.00 0.02"
    assert rows["layers", "all-gather"][2:] == gather.split()
    assert rows["layers", "compute"][-3:] == ["0.02", "2.00", "0.04"]
    assert rows["tail", "compute"][-3:] == ["0.00", "-", "-"]
    assert rows["optimizer", "compute"][-3:] == ["-", "-", "0.01"]
    assert "8 x NVIDIA H200" in text and "measured / planned: 1.25" in text
    assert "xla_gpu_enable_command_buffer" in text
    assert "<table>" in Explanation(read_profile(profile), planned)._repr_html_()


def test_the_command_reads_both_files_and_writes_one(profile, tmp_path, capsys):
    plan, out = tmp_path / "plan.json", tmp_path / "out.json"
    time = {"unit": "layers", "work": "compute", "times": 0}
    time |= {"seconds": 20e-6, "exposed_seconds": 0.0}
    plan.write_text(
        json.dumps({"step_seconds": 80e-6, "title": "T", "unit_times": [time]})
    )
    words = ["explain", str(profile), "--plan", str(plan), "--json", str(out)]
    assert main(words) == 0
    printed = capsys.readouterr().out
    assert "planned for T: 0.1 ms" in printed and "layers" in printed
    found = json.loads(out.read_text())
    assert unit_times_of(found["planned"]["times"])[0].seconds == 20e-6
    assert found["profiled"]["steps"] == 2


def test_what_is_no_profile_is_refused_by_name(profile, tmp_path, capsys):
    empty = tmp_path / "empty"
    empty.mkdir()
    other = tmp_path / "other.xplane.pb"
    other.write_bytes(b"no protobuf")
    with pytest.raises(ValueError, match=facts("empty", "*.xplane.pb")):
        read_profile(empty)
    with pytest.raises(ValueError, match=facts("other.xplane.pb")):
        read_profile(other)
    with pytest.raises(ValueError, match=facts("1 GPU(s)", "device 1")):
        read_profile(profile, device=1)
    idle = write_profile(tmp_path / "idle", {"/device:GPU:0": []})
    with pytest.raises(ValueError, match=facts("/device:GPU:0")):
        read_profile(idle)
    assert main(["explain", str(profile), "--steps", "0"]) == 2
    assert main(["explain", str(profile), "--plan", str(other)]) == 2
    assert "--plan" not in capsys.readouterr().out
