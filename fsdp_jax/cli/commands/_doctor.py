"""`fsdp-jax doctor`: finds problems of this machine's jax, and their fixes."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from bridge.models import Accelerator, KernelChoice
from fsdp_jax._report import format_bytes, text_table
from fsdp_jax.cli._attention_table import choice_table, example_choices
from fsdp_jax.cli._environment import (
    Finding,
    check_settings,
    check_versions,
    plugins,
    settings,
    versions,
)
from fsdp_jax.cli._errors import CheckFailed
from fsdp_jax.cli._hang_timeouts import HangTimeouts, hang_timeouts
from fsdp_jax.cli._subprocess import Outcome, run_child
from fsdp_jax.cli._xla_flags import BadFlag, Diagnosis, diagnose


@dataclasses.dataclass(frozen=True)
class Doctor:
    """Show versions, devices and settings; report problems and their fixes.

    An unknown flag in XLA_FLAGS aborts every process that starts jax. This command
    tries such things in child processes, and names each flag that XLA refuses.

    Attributes:
      json: Print JSON.
      time_limit: Seconds that a child may take to start the devices.
    """

    json: bool = False
    time_limit: float = 120.0

    def run(self) -> None:
        """Prints what there is; fails if something is wrong with it."""
        if not self.time_limit > 0:
            raise ValueError(f"--time-limit {self.time_limit:g} must be above 0.")
        report = _examine(os.environ, self.time_limit)
        print(json.dumps(report.as_json(), indent=1) if self.json else report.as_text())
        if wrong := report.found(is_wrong=True):
            raise CheckFailed(_listed(f"{len(wrong)} wrong.", wrong))


@dataclasses.dataclass(frozen=True)
class Report:
    """Results of all checks.

    Attributes:
      versions: Version of each package; None if it is not installed.
      xla_flags: Value of `XLA_FLAGS`.
      diagnosis: Problems of these flags.
      backend: Outcome of starting jax, without the flags that XLA refuses.
      planning: Whether XLA compiles for GPUs that are not there.
      settings: Settings of jax in the environment.
      timeouts: Timeouts of hangs on GPUs.
      findings: Problems and their fixes.
    """

    versions: Mapping[str, str | None]
    xla_flags: str
    diagnosis: Diagnosis
    backend: Outcome
    planning: Outcome
    settings: Mapping[str, str]
    timeouts: HangTimeouts
    findings: tuple[Finding, ...]

    def found(self, *, is_wrong: bool) -> list[Finding]:
        """Returns the problems, or the advice."""
        return [one for one in self.findings if one.is_wrong == is_wrong]

    def as_json(self) -> dict[str, Any]:
        """Returns the report as JSON values."""
        wrong, advice = (
            [{"what": one.what, "fix": one.fix} for one in self.found(is_wrong=flag)]
            for flag in (True, False)
        )
        return {
            "ok": not wrong,
            "wrong": wrong,
            "advice": advice,
            "versions": dict(self.versions),
            "xla_flags": {
                "value": self.xla_flags,
                "refused": [dataclasses.asdict(bad) for bad in self.diagnosis.bad],
            },
            "backend": self.backend.result,
            "attention": {
                name: dataclasses.asdict(one)
                for name, one in _attention(self.backend).items()
            },
            "planning_for_gpus": self.planning.alive,
            "settings": {
                **self.settings,
                "nccl_termination_timeout_seconds": self.timeouts.nccl,
                "execution_terminate_timeout": self.timeouts.watchdog or None,
            },
        }

    def as_text(self) -> str:
        """Returns the report as tables."""
        rows = [
            *(
                (name, found or "not installed")
                for name, found in self.versions.items()
            ),
            *_backend_rows(self.backend),
            ("planning for GPUs", "works" if self.planning.alive else "does not work"),
            *self.settings.items(),
            *self.timeouts.rows(),
            ("XLA_FLAGS", _verdict(self.xla_flags, self.diagnosis)),
        ]
        parts = [text_table({"what": "left", "found": "left"}, rows)]
        if self.diagnosis.bad:
            columns = {"refused by XLA": "left", "why": "left", "nearest": "left"}
            bad = [
                (one.text, one.reason, one.nearest or "") for one in self.diagnosis.bad
            ]
            parts.append(text_table(columns, bad))
        if choices := _attention(self.backend):
            parts.append(choice_table(choices))
        if advice := self.found(is_wrong=False):
            parts.append(_listed("Advice:", advice))
        return "\n\n".join(parts)


def _examine(environ: Mapping[str, str], time_limit: float) -> Report:
    flags = environ.get("XLA_FLAGS", "")
    diagnosis, backend = _try_backend(flags, time_limit)
    found = versions()
    planning = _try_planning(found, time_limit)
    timeouts = hang_timeouts(diagnosis.good)
    findings = (
        *_check_flags(diagnosis),
        *check_versions(found),
        *check_settings(environ),
        *_check_backend(backend, environ, time_limit),
        *_check_planning(found, planning),
        *_check_timeouts(timeouts, backend),
    )
    said = settings(environ)
    return Report(found, flags, diagnosis, backend, planning, said, timeouts, findings)


_START = """
import jax

def memory(device):
    try:
        return (device.memory_stats() or {}).get("bytes_limit")
    except Exception:
        return None

result = {
    "platform": jax.default_backend(),
    "processes": jax.process_count(),
    "devices": [
        {
            "platform": device.platform,
            "kind": device.device_kind,
            "memory": memory(device) if device in jax.local_devices() else None,
        }
        for device in jax.devices()
    ],
}
if result["platform"] == "gpu":
    import dataclasses
    from bridge.models import Accelerator

    result["accelerator"] = dataclasses.asdict(Accelerator.of(jax.devices()[0]))
"""

_PLAN = """
from fsdp_jax.planner._compile import gpu_devices
from fsdp_jax.planner._gpu import GPUS

result = len(gpu_devices(GPUS["h200"], 8))
"""


def _try_backend(flags: str, time_limit: float) -> tuple[Diagnosis, Outcome]:
    """Starts the devices in a child, without the flags that XLA refuses."""

    def start(flags: str, **environ: str) -> Outcome:
        return run_child(_START, {"XLA_FLAGS": flags, **environ}, time_limit)

    if not flags:
        return Diagnosis(), start("")
    # CPUs parse the same flags, start sooner, and are there whatever JAX_PLATFORMS is.
    diagnosis = diagnose(flags, functools.partial(start, JAX_PLATFORMS="cpu"))
    backend = start(diagnosis.good)
    if backend.alive or "XLA_FLAGS" not in backend.error:
        return diagnosis, backend
    # The plugin for GPUs has an XLA of its own, which may know others.
    more = diagnose(diagnosis.good, start)
    return Diagnosis(diagnosis.bad + more.bad, more.good), start(more.good)


def _try_planning(found: Mapping[str, str | None], time_limit: float) -> Outcome:
    """Asks the CUDA plugin for GPUs to compile for, where it is installed."""
    if not plugins(found):
        return Outcome(error="no CUDA plugin is installed")
    return run_child(_PLAN, {"XLA_FLAGS": "", "JAX_PLATFORMS": "cpu"}, time_limit)


def _check_flags(diagnosis: Diagnosis) -> Iterator[Finding]:
    if not diagnosis.bad:
        return
    lines = "".join(f"\n     {_in_words(bad)}" for bad in diagnosis.bad)
    yield Finding(
        f"XLA aborts over XLA_FLAGS, or reads only some of them:{lines}",
        f"Without them: export XLA_FLAGS={shlex.quote(diagnosis.good)}. As a name in "
        "make_train_step(compiler_options=...) a wrong one raises; it aborts nothing.",
    )


def _in_words(bad: BadFlag) -> str:
    nearest = f"; the nearest that it knows is {bad.nearest}" if bad.nearest else ""
    return f"{bad.text}: {bad.reason}{nearest}"


def _check_backend(
    backend: Outcome, environ: Mapping[str, str], time_limit: float
) -> Iterator[Finding]:
    named = environ.get("JAX_PLATFORMS")
    on = f" with JAX_PLATFORMS={named}" if named else ""
    if backend.timed_out:
        yield Finding(
            f"jax did not start its devices within {time_limit:g} seconds.",
            "See with nvidia-smi whether the driver answers; --time-limit gives more.",
        )
    elif not backend.alive:
        yield Finding(
            f"jax does not start{on}: {backend.reason}",
            "unset JAX_PLATFORMS, or install jax for that platform."
            if named
            else "Install jax anew: pip install --upgrade 'fsdp-jax[cuda12]'",
        )
    elif _platform(backend) == "cpu" and not named and _has_nvidia_driver():
        yield Finding(
            "There is an NVIDIA driver, but jax runs on the CPU.",
            "pip install 'fsdp-jax[cuda12]', or cuda13",
            is_wrong=False,
        )


def _check_planning(
    found: Mapping[str, str | None], planning: Outcome
) -> Iterator[Finding]:
    # Without the plugin it is not a fault that planning for GPUs does not work.
    if plugins(found) and not planning.alive:
        yield Finding(
            f"XLA does not compile for GPUs that are not there: {planning.reason}",
            "pip install --upgrade 'fsdp-jax[plan]'",
        )


def _check_timeouts(timeouts: HangTimeouts, backend: Outcome) -> Iterator[Finding]:
    if _platform(backend) != "cpu" and _num_devices(backend) > 1:
        yield from timeouts.findings()


def _platform(backend: Outcome) -> str:
    return backend.result["platform"] if backend.alive else "cpu"


def _num_devices(backend: Outcome) -> int:
    return len(backend.result["devices"]) if backend.alive else 0


def _has_nvidia_driver() -> bool:
    return Path("/proc/driver/nvidia/version").exists()


def _backend_rows(backend: Outcome) -> Iterator[tuple[str, str]]:
    if not backend.alive:
        yield "devices", "none: jax does not start"
        return
    kinds = [_kind(device) for device in backend.result["devices"]]
    counted = [f"{kinds.count(kind)} x {kind}" for kind in dict.fromkeys(kinds)]
    yield "devices", "; ".join(counted)
    yield "processes", str(backend.result["processes"])


def _attention(backend: Outcome) -> dict[str, KernelChoice]:
    """Returns the attention kernels of a GPU; nothing for CPUs, where XLA has all."""
    told = backend.result.get("accelerator") if backend.alive else None
    if told is None:
        return {}
    capability = told["capability"] and tuple(told["capability"])
    return example_choices(Accelerator(told["kind"], capability, told["cudnn"]))


def _kind(device: Mapping[str, Any]) -> str:
    memory = device["memory"]
    limit = f", {format_bytes(memory)} for jax" if memory else ""
    return f"{device['kind']} ({device['platform']}{limit})"


def _verdict(flags: str, diagnosis: Diagnosis) -> str:
    if not flags:
        return "unset"
    return "XLA refuses them, see below" if diagnosis.bad else f"fine: {flags}"


def _listed(title: str, findings: list[Finding]) -> str:
    lines = [
        f"  {number}. {one.what}\n     {one.fix}"
        for number, one in enumerate(findings, start=1)
    ]
    return "\n".join([title, *lines])
