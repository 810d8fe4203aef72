"""`fsdp-jax demo`: runs the main commands, one after the other."""

from __future__ import annotations

import contextlib
import dataclasses
import shlex
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from fsdp_jax.cli._errors import CheckFailed, check_empty
from fsdp_jax.cli._options import Unset

# Two meshes add up the same numbers in different orders: in float32 on CPUs the losses
# of 20 steps were at most 1e-7 apart, one rounding. GPUs round the factors of a product
# to 10 bits, so there is some room above that; another batch is 1e-2 off and more.
_LOSS_TOLERANCE = "1e-4"

_TEXT = ("argparse.py", "inspect.py", "typing.py")
"""Files of the standard library to train on: real text that is on every machine."""


@dataclasses.dataclass(frozen=True)
class Demo:
    """Make a model, train, resume on another mesh, export, compare with transformers.

    Runs every step as a command of its own, and shows it. Uses up to 8 GPUs, or as many
    simulated CPU devices where there are none.

    Attributes:
      dir: Works in this directory, new or empty, and leaves everything there; default
        a temporary one, removed at the end.
      steps: Steps to train.
      small: A smaller model and fewer steps (unless --steps is given).
    """

    dir: Unset[Path] = None
    steps: Unset[int] = None
    small: bool = False

    def run(self) -> None:
        """Runs the commands; stops at the first that fails."""
        steps = self.steps if self.steps is not None else 6 if self.small else 40
        if steps < 2:
            raise ValueError(
                f"--steps {steps} must be at least 2, to stop in the middle."
            )
        with _directory(self.dir) as directory:
            for title, command in _commands(directory, steps, self.small):
                _run(title, command)
        print("\nAll of it holds.")


def _commands(
    directory: Path, steps: int, small: bool
) -> Iterator[tuple[str, Sequence[str]]]:
    """Yields a title and a command for each step of the demo."""
    llama, run, resumed, out = (
        str(directory / name) for name in ("tiny-llama", "run", "resumed", "exported")
    )
    middle = steps // 2
    all_devices, fewer_devices, fewer = _meshes()
    to_the_end = ["--data", *_text_files(), "--steps", str(steps)]
    size = ["--batch", "8", "--seq", "32" if small else "128", "--lr", "3e-3"]
    tiny = ["--layers", "2", "--hidden", "32"] if small else []
    yield "A small Llama, written by transformers", ["make-tiny-llama", llama, *tiny]
    yield (
        "Train it on the bytes of Python's standard library",
        ["train", "--hf", llama, *to_the_end, *size, *all_devices]
        + ["--save", run, "--save-every", str(middle), "--metrics", f"{run}.jsonl"],
    )
    yield (
        f"Go on from step {middle} {fewer}",
        ["train", "--resume", run, "--resume-step", str(middle), *to_the_end]
        + [*fewer_devices, "--save", resumed, "--metrics", f"{resumed}.jsonl"],
    )
    yield (
        "It is the same run",
        ["diff-metrics", f"{run}.jsonl", f"{resumed}.jsonl"]
        + ["--tolerance", _LOSS_TOLERANCE],
    )
    yield "Hand the result back to transformers", ["export", run, out, *all_devices]
    yield (
        "which computes the same logits from it",
        ["compare", run, out, *all_devices],
    )


def _meshes() -> tuple[list[str], list[str], str]:
    """Returns options for all devices and for half of them, and a label."""
    gpus = _count_gpus()
    if gpus == 0:
        return ["--cpu-devices", "8"], ["--cpu-devices", "4"], "on 4 devices, not 8"
    if gpus == 1:
        return [], [], "on the same GPU, as there is only one"
    most = max(n for n in (2, 4, 8) if n <= gpus)  # what the sizes divide by
    half = most // 2
    fewer = f"on {half} GPU(s), not {most}"
    return ["--devices", str(most)], ["--devices", str(half)], fewer


def _count_gpus() -> int:
    """Counts GPUs in another process, since jax takes most of their memory."""
    code = "import jax; print(sum(d.platform != 'cpu' for d in jax.devices()))"
    asked = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    if asked.returncode:
        raise CheckFailed(f"jax finds no devices:\n{asked.stderr.strip()}")
    return int(asked.stdout)


def _text_files() -> list[str]:
    library = Path(sysconfig.get_paths()["stdlib"])
    return [str(library / name) for name in _TEXT]


def _run(title: str, command: Sequence[str]) -> None:
    print(f"\n# {title}\n$ {shlex.join(['fsdp-jax', *command])}", flush=True)
    # Not by the name: the demo also runs where the script is not on the PATH.
    program = [sys.executable, "-m", "fsdp_jax.cli"]
    status = subprocess.run([*program, *command], check=False).returncode
    if status:
        raise CheckFailed(f"fsdp-jax {command[0]} ended with status {status}.")


@contextlib.contextmanager
def _directory(chosen: Path | None) -> Iterator[Path]:
    if chosen is None:
        with tempfile.TemporaryDirectory(prefix="fsdp-jax-demo-") as temporary:
            yield Path(temporary)
        return
    check_empty(chosen, "--dir")
    yield chosen
