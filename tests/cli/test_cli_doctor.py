"""The doctor: it names what is wrong, says how to mend it, and lives through it all."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from fsdp_jax.cli import main
from fsdp_jax.cli._environment import check_settings, check_versions, settings
from fsdp_jax.cli._subprocess import Outcome, run_child
from fsdp_jax.cli._xla_flags import diagnose, split, value_of
from fsdp_jax.cli._xla_names import option_names
from fsdp_jax.cli.commands import _doctor

GOOD = "--xla_force_host_platform_device_count=3"


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch):
    for name in ("XLA_FLAGS", *settings({})):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")


@pytest.fixture
def examine(monkeypatch, capsys):
    """Runs `fsdp-jax doctor --json` under some `XLA_FLAGS`."""

    def run(flags: str, *options: str):
        monkeypatch.setenv("XLA_FLAGS", flags)
        status = main(["doctor", "--json", *options])
        out, err = capsys.readouterr()
        return status, json.loads(out), err

    return run


def refused(report) -> dict[str, str]:
    return {bad["text"]: bad["reason"] for bad in report["xla_flags"]["refused"]}


# XLA_FLAGS


def test_flags_that_are_fine_are_in_force(examine):
    status, report, err = examine(GOOD)
    assert (status, err) == (0, "")
    assert report["ok"] and report["wrong"] == [] and refused(report) == {}
    assert len(report["backend"]["devices"]) == 3
    assert report["backend"]["platform"] == "cpu"


def test_a_process_that_jax_would_abort_in_lives_and_names_the_flag():
    # A process of its own: nothing here may start a backend before the verdict.
    flags = "--xla_gpu_enable_latency_hiding_schedular=true"
    argv = [sys.executable, "-m", "fsdp_jax.cli", "doctor"]
    environ = {"XLA_FLAGS": flags, "PYTHONPATH": ":".join(filter(None, sys.path))}
    child = subprocess.run(argv, env=environ, capture_output=True, text=True)
    assert child.returncode == 1
    assert "Traceback" not in child.stderr
    assert "xla_gpu_enable_latency_hiding_scheduler" in child.stdout
    assert flags in child.stderr and "compiler_options" in child.stderr
    assert "1 x cpu" in child.stdout


def test_several_unknown_flags_are_all_named_and_the_good_ones_kept(examine):
    flags = f"--xla_foo=1 {GOOD} --xla_gpu_autotune_levle=0"
    status, report, err = examine(flags)
    assert status == 1 and not report["ok"]
    bad = {one["text"]: one["nearest"] for one in report["xla_flags"]["refused"]}
    assert bad == {
        "--xla_foo=1": None,
        "--xla_gpu_autotune_levle=0": "xla_gpu_autotune_level",
    }
    assert len(report["backend"]["devices"]) == 3
    assert f"export XLA_FLAGS={GOOD}" in err


@pytest.mark.parametrize(
    "flag, says",
    [
        ("--xla_cpu_enable_fast_math=maybe", "'maybe' does not do: XLA wants bool"),
        ("--xla_cpu_scheduler_type=NO", "'NO' does not do"),
        ("--xla_gpu_autotune_level", "needs a value: --xla_gpu_autotune_level=VALUE"),
        ("-xla_dump_to=x", "two dashes"),
        (GOOD + ",--xla_dump_to=x", "separated by spaces"),
        ("xla_dump_to=x", "name of a file"),
    ],
)
def test_a_malformed_flag_has_its_reason(examine, flag, says):
    status, report, _ = examine(flag)
    assert status == 1
    assert list(refused(report)) == [flag]
    assert says in refused(report)[flag]


def test_a_flag_that_stops_the_devices_is_found_by_trying(examine):
    flag = "--xla_force_host_platform_device_count=-3"
    _, report, _ = examine(f"--xla_dump_to=x {flag}")
    assert list(refused(report)) == [flag]


def test_several_faults_of_different_kinds_are_all_found(examine):
    flags = f'--xla_foo="a b" --xla_gpu_autotune_level=high = 4 {GOOD}'
    _, report, _ = examine(flags)
    assert set(refused(report)) == {
        "--xla_foo=a b",
        "--xla_gpu_autotune_level=high",
        "= 4",
    }
    assert len(report["backend"]["devices"]) == 3


def starts(*faults):
    """A substitute for XLA, which says nothing of what it does not take."""

    def probe(flags):
        return Outcome(error="no") if any(f in flags for f in faults) else Outcome(1)

    return probe


def test_words_after_one_that_is_no_flag_are_reported_though_xla_starts():
    [stray] = diagnose("--xla_a=1 b --xla_c=2", starts()).bad
    assert stray.text == "b" and "reads none of what follows" in stray.reason


def test_without_a_word_from_xla_each_flag_is_tried():
    diagnosis = diagnose("--xla_a=1 --xla_b=2 --xla_c=3", starts("a=", "c="))
    assert [bad.text for bad in diagnosis.bad] == ["--xla_a=1", "--xla_c=3"]
    assert diagnosis.good == "--xla_b=2"


def test_flags_are_not_blamed_where_nothing_starts_without_them():
    diagnosis = diagnose("--xla_a=1", starts(""))
    assert diagnosis.bad == () and diagnosis.good == "--xla_a=1"


def test_flags_may_be_in_a_file(tmp_path):
    (tmp_path / "flags").write_text("--xla_a=1\n--xla_b=2\n")
    diagnosis = diagnose(str(tmp_path / "flags"), starts("b="))
    assert diagnosis.good == "--xla_a=1"


@pytest.mark.parametrize("flags", ["  ", "/no/such/file", "\0"])
def test_what_is_neither_flags_nor_a_file_is_refused(flags):
    [bad] = diagnose(flags, starts()).bad
    assert "name of a file" in bad.reason


def test_quotes_go_and_come_back():
    flags = """--xla_a="it's two" --xla_b='say "x"' --xla_c=\\\\"""
    good = diagnose(flags, starts()).good
    assert split(good) == split(flags)
    assert value_of(flags, "xla_a") == "it's two" and value_of(flags, "xla_d") is None
    assert split('--xla_a="open') == ['--xla_a="open']


def test_the_names_are_those_of_this_xla():
    names = option_names()
    assert {"xla_dump_to", "xla_gpu_nccl_termination_timeout_seconds"} <= names
    assert len(names) > 200


# The rest


def test_the_table_shows_versions_devices_and_settings(monkeypatch, capsys):
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", "/somewhere")
    assert main(["doctor"]) == 0
    out, err = capsys.readouterr()
    rows = dict(line.split(maxsplit=1) for line in out.splitlines() if " " in line)
    assert rows["jax"][0].isdigit() and rows["devices"].startswith("1 x cpu")
    assert rows["JAX_COMPILATION_CACHE_DIR"] == "/somewhere"
    assert rows["XLA_CLIENT_MEM_FRACTION"] == "unset: 0.75"
    assert err == ""


def test_a_platform_that_is_not_there_is_said(monkeypatch, examine):
    monkeypatch.setenv("JAX_PLATFORMS", "nonsense")
    status, report, err = examine("")
    assert status == 1 and report["backend"] is None
    assert "JAX_PLATFORMS=nonsense" in err and "unset JAX_PLATFORMS" in err
    assert "Traceback" not in err


def test_devices_that_do_not_start_in_time_are_said(examine):
    status, report, err = examine("", "--time-limit", "0.01")
    assert status == 1 and report["backend"] is None
    assert "within 0.01 seconds" in err


def test_a_time_limit_of_nothing_is_refused(capsys):
    assert main(["doctor", "--time-limit", "0"]) == 2
    assert "--time-limit 0 must be above 0" in capsys.readouterr().err


def test_a_child_that_aborts_is_an_outcome():
    outcome = run_child("import os; os.abort()", {}, 60)
    assert not outcome.alive and "status" in outcome.reason
    assert run_child("print('noise'); result = [1]", {}, 60).result == [1]


def test_what_a_child_cannot_be_given_is_an_outcome():
    assert not run_child("result = 1", {"XLA_FLAGS": "x" * 10**6}, 60).alive
    assert not run_child("result = 1", {"XLA_FLAGS": "\0"}, 60).alive


@pytest.mark.parametrize(
    "versions, says",
    [
        ({"jax": "0.10.2", "flax": "0.12.8"}, ""),
        ({"jax": "0.12.0.1", "flax": "0.12.12"}, ""),
        ({"jax": "0.11.1", "flax": "0.12.8"}, "flax 0.12.8 cannot be imported"),
        ({"jax": "0.12.0", "jaxlib": "0.11.2"}, "made for each other"),
        ({"jaxlib": "0.10.2", "jax-cuda12-plugin": "0.10.2"}, ""),
        ({"jaxlib": "0.10.2", "jax-cuda13-pjrt": "0.11.2"}, "does not fit jaxlib"),
    ],
)
def test_versions_that_do_not_fit_are_said(versions, says):
    found = [finding.what for finding in check_versions(versions)]
    assert says in "".join(found) and bool(found) == bool(says)


@pytest.mark.parametrize(
    "environ, says",
    [
        ({"XLA_CLIENT_MEM_FRACTION": "0.9"}, ""),
        ({"XLA_PYTHON_CLIENT_MEM_FRACTION": ".8"}, ""),
        ({"XLA_CLIENT_MEM_FRACTION": "90%"}, "not a share of the memory"),
        ({"XLA_CLIENT_MEM_FRACTION": "0"}, "not a share of the memory"),
        (
            {"XLA_CLIENT_MEM_FRACTION": "1", "XLA_PYTHON_CLIENT_MEM_FRACTION": "1"},
            "both set",
        ),
    ],
)
def test_memory_that_jax_refuses_is_said(environ, says):
    found = [finding.what for finding in check_settings(environ)]
    assert says in "".join(found) and bool(found) == bool(says)


def two_gpus(*_):
    gpu = {"platform": "gpu", "kind": "NVIDIA H200", "memory": 100 << 30}
    result = {"platform": "gpu", "processes": 1, "devices": [gpu, gpu]}
    return Outcome(result)


def test_gpus_that_would_wait_for_ever_are_advised_a_time_out(
    monkeypatch, examine, capsys
):
    monkeypatch.setattr(_doctor, "run_child", two_gpus)
    status, report, _ = examine("--xla_gpu_nccl_termination_timeout_seconds=-1")
    assert status == 0 and report["ok"]
    assert "timeout_seconds=600" in report["advice"][0]["fix"]
    status, report, _ = examine("")  # as steps are compiled
    assert report["advice"] == []
    assert report["settings"]["nccl_termination_timeout_seconds"] == 600
    assert report["settings"]["execution_terminate_timeout"] == "1800s"
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert "2 x NVIDIA H200 (gpu, 100.00 GiB for jax)" in out and "600 s" in out
    assert "1800s" in out


@pytest.mark.parametrize(
    "value, wrong, advised",
    [("inf", 0, 1), ("90s", 0, 0), ("1h30m", 0, 0), ("soon", 1, 0), ("90", 1, 0)],
)
def test_the_watchdog_is_a_time_and_not_off(
    monkeypatch, examine, value, wrong, advised
):
    monkeypatch.setattr(_doctor, "run_child", two_gpus)
    _, report, _ = examine(f"--xla_gpu_execution_terminate_timeout={value}")
    assert (len(report["wrong"]), len(report["advice"])) == (wrong, advised)
    assert all("=1800s" in one["fix"] for one in report["wrong"] + report["advice"])


def test_a_plugin_that_does_not_plan_is_wrong_and_none_is_not():
    broken = Outcome(error="RuntimeError: no topology")
    assert list(_doctor._check_planning({}, broken)) == []
    [finding] = _doctor._check_planning({"jax-cuda12-plugin": "0.10.2"}, broken)
    assert "no topology" in finding.what
