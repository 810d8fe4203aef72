"""`fsdp-jax plan`: a model's config in, what its training takes out."""

from __future__ import annotations

import json

import jax
import optax
import pytest
from helpers.llama import Llama, tokens
from tiny_configs import hf_fields

import bridge
import fsdp_jax as fsdp
from fsdp_jax.cli import main
from fsdp_jax.cli._decoder import plan_decoder
from fsdp_jax.cli._schedule_search import KNOBS
from fsdp_jax.planner import count_on_cpu

TINY = Llama(width=64, mlp=128, heads=2, kv_heads=1, layers=3, vocab=256, head_dim=32)


def plan(llama, *options: str) -> int:
    return main(["plan", "--config", str(llama / "config.json"), *options])


@pytest.mark.plan
def test_a_plan_is_printed_and_written(llama, capsys, tmp_path):
    files = tmp_path / "new" / "plan.json", tmp_path / "plan.svg"
    assert not plan(
        *(llama, "--gpus", "16", "--mesh", "dp_outer=2,dp_shard=-1", "--seq", "64"),
        *("--batch", "16", "--json", str(files[0]), "--picture", str(files[1])),
    )
    out = capsys.readouterr().out
    assert out.startswith("16 x NVIDIA H200 (dp_outer=2, dp_shard=8)\nstep: ")
    assert "reduce-scatter" in out and "predicted together" in out
    assert "2 x full attention xla    head dims of 4" in out
    found = json.loads(files[0].read_text())
    assert found["mesh"] == {"dp_outer": 2, "dp_shard": 8}
    assert found["tokens"] == 16 * 64
    assert "<svg" in files[1].read_text()


@pytest.mark.plan
def test_figures_of_the_cost_model_change_the_time_alone(llama, capsys, tmp_path):
    found = []
    for name, speed in (("fast", "1000000"), ("slow", "0.01")):
        file = tmp_path / f"{name}.json"
        options = ("--seq", "64", "--link-gbs", speed, "--json", str(file))
        assert not plan(llama, *options)
        found.append(json.loads(file.read_text()))
    capsys.readouterr()
    assert found[0]["step_seconds"] < found[1]["step_seconds"]
    assert found[1]["cost_model"]["link_bandwidth"] == 0.01e9
    assert found[0]["memory_predicted"] == found[1]["memory_predicted"]


@pytest.mark.plan
def test_nodes_of_any_size_communicate_over_the_network(llama, capsys, tmp_path):
    found = []
    for nodes in ((), ("--gpus-per-node", "3")):
        file = tmp_path / f"{len(found)}.json"
        options = ("--gpu", "H100", "--gpus", "6", "--batch", "6", "--seq", "64")
        slow = ("--network-gbs", "0.001", "--json", str(file))
        assert not plan(llama, *options, *slow, *nodes)
        found.append(json.loads(file.read_text()))
    capsys.readouterr()
    assert found[0]["step_seconds"] < 0.1 * found[1]["step_seconds"]
    assert [one["cost_model"]["devices_per_node"] for one in found] == [8, 3]


@pytest.mark.plan
def test_fewer_communicated_and_stored_bytes_are_planned(write_llama, capsys, tmp_path):
    llama, found = write_llama(tmp_path / "model", hidden_size=128), []
    for options in (
        (),
        ("--param-gather", "float8", "--optimizer-bits", "8"),
        ("--offload", "all"),
        ("--offload", "stream"),
    ):
        file = tmp_path / f"{len(found)}.json"
        sizes = ("--gpus", "8", "--seq", "64", "--json", str(file))
        assert not plan(llama, *sizes, *options)
        found.append((json.loads(file.read_text()), capsys.readouterr().out))
    (plain, table), (fewer, in_bytes), (away, _), (streamed, _) = found
    assert " u8+bf16 " in in_bytes and "u8" not in table
    copied = [one["offloaded"]["fetched"] for one in (away, streamed)]
    assert copied[0] < copied[1]
    plain, fewer, away = (one["memory_predicted"] for one in (plain, fewer, away))
    # Norms and their moments stay what and where they were.
    assert fewer["optimizer"] < 0.35 * plain["optimizer"]
    assert away["optimizer"] < 0.1 * plain["optimizer"]
    assert away["params"] < 0.1 * plain["params"]


@pytest.mark.plan
def test_a_sweep_recommends_what_is_fastest_of_what_fits(llama, capsys, tmp_path):
    files = tmp_path / "sweep.svg", tmp_path / "sweep.html", tmp_path / "best.json"
    assert not plan(
        *(llama, "--gpus", "16", "--seq", "64", "--sweep", "--picture", str(files[0])),
        *("--html", str(files[1]), "--json", str(files[2])),
    )
    lines = capsys.readouterr().out.splitlines()
    rows = [line for line in lines if "GiB" in line or "MiB" in line]
    assert len(rows) == 7
    for axis in ("tp=2", "pp=2"):
        assert sum(axis in row for row in rows) == 1
    assert lines[-1].startswith("recommended: ")
    assert lines[-1].removeprefix("recommended: ") in rows[0]
    assert any("compile to the same step: with one microbatch" in x for x in lines)
    drawn, page = files[0].read_text(), files[1].read_text()
    # matplotlib writes each text beside its outlines, as a comment.
    for row in rows:
        name = row.split("  ")[0]
        assert f"<!-- {name} -->" in drawn and name in page
    assert "16 x NVIDIA H200" in drawn and "<title>16 x NVIDIA H200" in page
    assert json.loads(files[2].read_text())["gpus"] == 16


@pytest.mark.plan
def test_a_search_says_what_the_best_schedule_gains(
    llama, capsys, tmp_path, monkeypatch
):
    symmetric = "symmetric_buffers"
    knobs = [knob for knob in KNOBS if knob.name in ("unroll", symmetric)]
    monkeypatch.setattr("fsdp_jax.cli._schedule_search.KNOBS", knobs)
    file = tmp_path / "search.json"
    step = (llama, "--seq", "64", "--unroll", "1")
    assert not plan(*step, "--search", "--search-minutes", "60", "--json", str(file))
    out, err = capsys.readouterr()
    found = json.loads(file.read_text())
    default, *others, last = found["search"]["trials"]
    given = tmp_path / "given.json"
    assert not plan(*step, "--json", str(given))
    assert json.loads(given.read_text())["step_seconds"] == default["step_seconds"]
    assert default["changed"] == {} and found["search"]["complete"]
    assert [one["changed"] for one in others] == [{"unroll": 2}, {"unroll": 4}]
    assert last["changed"][symmetric] and not last["measured"]
    assert err.count("compiling unroll=") == 4
    best = min(one["step_seconds"] for one in (default, *others))
    assert best <= found["step_seconds"] <= 1.001 * best
    assert {one["unit"] for one in found["unit_times"]} >= {"layers", "optimizer"}
    before, after = out.split("not measured")
    assert symmetric in after and symmetric not in before
    assert "against the default" in out and "schedules" in out.splitlines()[-1]


def test_stages_split_the_longest_run_of_layers_of_one_structure():
    sizes = {"num_hidden_layers": 4, "first_k_dense_replace": 1}
    config = bridge.from_hf_config(hf_fields("deepseek_v3", **sizes))
    plan = plan_decoder(config, fsdp.make_mesh(pp=2))
    assert "2 stages of 2 or 1 layers" in repr(plan)
    assert "run besides in the first or the last stage: layers.0 (1 unit)" in repr(plan)


@pytest.mark.plan
def test_a_sweep_splits_rows_that_are_long_and_fewer_than_gpus(llama, capsys):
    assert not plan(llama, "--seq", "8192", "--batch", "1", "--sweep")
    out, err = capsys.readouterr()
    assert out.splitlines()[-1] == "recommended: FSDP, cp=8"
    assert "skipping ZeRO-2: 1 rows do not divide over 8 ranks" in err
    assert "skipping FSDP, cp=2: 1 rows do not divide over 4 ranks" in err


@pytest.mark.parametrize(
    "options, message",
    [
        (("--gpu", "v100"), "'v100' is unknown: use a100, a100-40gb, h20, h800, h100"),
        (("--mesh", "dp_shard:8"), "'dp_shard:8' is no size of pp, dp_outer"),
        (("--mesh", "tp=2", "--seq", "63"), "--seq 63: tp=2 splits the tokens"),
        (("--mesh", "tp=8"), "num_attention_heads 4 is not a multiple of 8"),
        (("--mesh", "cp=4", "--seq", "36"), "--seq 36: cp=4 splits the tokens"),
        (("--mesh", "cp=2,pp=2"), "Use --cp-form all_gather or ulysses"),
        (("--remat", "attention"), "--remat attention saves the outputs"),
        (("--tflops", "-1"), "--tflops -1"),
        (("--sweep", "--zero", "2"), "leave out --mesh, --zero"),
        (("--gpus", "-4"), "must be at least 1, got -4"),
        (("--gpus", "12"), "12 GPUs are neither a part of a node of 8"),
        (("--gpus", "12"), "--gpus-per-node"),
        (("--gpus-per-node", "0"), "--gpus-per-node 0"),
        (("--network-gbs", "nan"), "--network-gbs nan"),
        (("--latency-us", "inf"), "--latency-us inf: a finite number above 0"),
        (("--hf", "somewhere"), "--model package.module:make_model"),
        (("--search", "--sweep"), "sweep first, and search with the --mesh"),
        (("--search", "--search-minutes", "0"), "--search-minutes 0: above 0"),
        (("--search-minutes", "9"), "--search-minutes 9: give --search too"),
        (("--batch", "-8"), "--batch -8: at least 1 row"),
        (("--mesh", "tp=2,tp=4"), "'tp' has two sizes, 2 and 4"),
        (("--seq", "0"), "--seq 0: at least 1"),
        (("--seq", "-1"), "--seq -1: at least 1"),
        (("--capacity-factor", "1.0"), "the model has no experts"),
        (("--dispatch-dtype", "float8"), "--dispatch-dtype float8: without effect"),
        (("--picture", "plan.pdf"), "'plan.pdf' must end in .png or .svg"),
        (("--no-reshard", "--prefetch", "2"), "--prefetch 2 has no effect"),
        (("--no-reshard", "--remat", "dots"), "--remat dots is of layers that"),
        (("--no-reshard", "--zero", "2"), "--no-reshard has no effect with --zero 2"),
        (("--batch-parts", "2"), "--batch-parts 2 has no effect with tp=1"),
        (("--batch-parts", "2", "--mesh", "tp=2"), "Use --batch 8"),
        (("--batch-parts", "0"), "--batch-parts 0: at least 1"),
    ],
)
def test_wrong_options_are_told_in_a_line(llama, capsys, options, message):
    assert plan(llama, *options) == 2
    assert message in capsys.readouterr().err


def test_without_the_compiler_for_gpus_the_cpu_s_says_what_it_can(
    llama, capsys, monkeypatch, tmp_path
):
    def absent(gpu, count):
        raise ValueError("pip install 'fsdp-jax[plan]'")

    monkeypatch.setattr("fsdp_jax.cli.commands._plan.gpu_devices", absent)
    files = tmp_path / "count.json", tmp_path / "count.html"
    assert not plan(
        *(llama, "--gpus", str(jax.device_count()), "--seq", "16"),
        *("--json", str(files[0]), "--html", str(files[1])),
    )
    out, err = capsys.readouterr()
    assert "no time is estimated" in err
    assert "as the compiler for CPUs assigns it" in out
    assert "all-gather" in out and "ms each" not in out
    found = json.loads(files[0].read_text())
    assert found["compiler"] == "cpu" and found["memory_compiled"] > 0
    assert found["collectives"] and "seconds" not in found["collectives"][0]
    assert "all-gather" in files[1].read_text()
    # What needs times is refused, and not left out.
    assert plan(llama, "--trace", str(tmp_path / "trace.json")) == 2


def test_the_counts_of_the_cpu_are_those_of_the_plan():
    llama = TINY.plan(fsdp.make_mesh())
    found = count_on_cpu(llama, TINY.loss(0), optax.sgd(0.1), tokens(8, 16))
    assert found.compiled_bytes > sum(llama.bytes_per_device.values())
    times = {"all-gather": 0, "reduce-scatter": 0}
    for row in found.sent:
        if row.unit == "layers" and row.op in times:
            times[row.op] += row.times
    layers = [param for param in llama.param_plans if param.unit == "layers"]
    # Each weight of 3 layers, forward and backward; each gradient once.
    assert times["reduce-scatter"] == 3 * len(layers)
    assert times["all-gather"] == 2 * 3 * len(layers)


@pytest.mark.plan
def test_a_sweep_saves_less_where_a_mesh_does_not_fit_otherwise(tmp_path, capsys):
    sizes = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 8}
    (tmp_path / "config.json").write_text(json.dumps(hf_fields("llama", **sizes)))
    long = (tmp_path, "--gpu", "h100", "--gpus", "1", "--seq", "4096", "--batch", "256")
    assert not plan(*long, "--sweep")
    rows = [line for line in capsys.readouterr().out.splitlines() if "GiB" in line]
    fits = {row.split("  ")[0]: "DOES NOT FIT" not in row for row in rows}
    assert not fits["FSDP (ZeRO-3)"] and fits["FSDP (ZeRO-3), --remat nothing"]
