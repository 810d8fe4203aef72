"""Options of what a run of `fsdp-jax train` saves, evaluates and logs."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import orbax.checkpoint.checkpoint_managers as policies

import fsdp_jax as fsdp
from fsdp_jax.cli._errors import check_creatable
from fsdp_jax.cli._log_writers import check_writers
from fsdp_jax.cli._metrics import EVAL_LOSS
from fsdp_jax.cli._options import LogTo, Unset
from fsdp_jax.cli._records import check_kinds, has_records
from fsdp_jax.cli._tokens import check_files
from fsdp_jax.cli._train_options import MeshOptions


@dataclasses.dataclass(frozen=True)
class SaveOptions:
    """Checkpoints.

    Attributes:
      save_every: Interval of steps to save, in the background; 0 for the last alone.
      keep: Number of newest checkpoints to keep; 0 for all.
      keep_best: Number of checkpoints to keep besides, those of the least held-out
        loss; needs --save-every, --keep, --eval-data and --eval-every.
      local_checkpoints: Directory on a disk of each host for more frequent checkpoints,
        which the same command resumes from after a failure.
      local_every: Interval of steps to save there; default 1.
      local_keep: Number of newest steps to keep there; default 2.
    """

    save_every: int = 0
    keep: int = 0
    keep_best: int = 0
    local_checkpoints: Unset[Path] = None
    local_every: Unset[int] = None
    local_keep: Unset[int] = None

    def check(self, *, eval_every: int | None) -> None:
        """Raises a `ValueError` for numbers out of range, or without effect.

        Args:
          eval_every: Interval of steps of which held-out data is evaluated, 0 for the
            last alone; None if none is.
        """
        if self.save_every < 0 or self.keep < 0:
            raise ValueError(
                f"--save-every {self.save_every} and --keep {self.keep} must not be "
                "negative; 0 saves only at the end, and keeps all steps."
            )
        ranks = eval_every is not None and self.keep
        if self.keep_best and not (self.keep_best > 0 and ranks):
            raise ValueError(
                f"--keep-best {self.keep_best}: it is at least 1, and needs --keep N, "
                "which keeps the newest steps too, and --eval-data FILE, whose loss "
                "ranks all steps."
            )
        # Of steps without a loss none is removed before there is one with a loss.
        if self.keep_best and not (self.save_every and eval_every):
            raise ValueError(
                f"--keep-best {self.keep_best}: steps before the last need a loss. "
                f"Give --save-every and --eval-every, which are {self.save_every} and "
                f"{eval_every}."
            )
        numbers = {"--local-every": self.local_every, "--local-keep": self.local_keep}
        given = {name: x for name, x in numbers.items() if x is not None}
        shown = ", ".join(f"{name} {x}" for name, x in given.items())
        if given and self.local_checkpoints is None:
            raise ValueError(f"{shown}: give --local-checkpoints DIR too.")
        if any(x < 1 for x in given.values()):
            raise ValueError(f"{shown}: each must be at least 1.")
        if self.local_checkpoints is not None:
            check_creatable(self.local_checkpoints, "--local-checkpoints")

    @property
    def local(self) -> fsdp.checkpoint.LocalCheckpoints | None:
        """Options of checkpoints on the disks of the hosts; None for no such ones."""
        if self.local_checkpoints is None:
            return None
        return fsdp.checkpoint.LocalCheckpoints(
            self.local_checkpoints,
            every=self.local_every or 1,
            keep=self.local_keep or 2,
        )

    def decision(self, last: int) -> policies.SaveDecisionPolicy:
        """Returns which steps are saved.

        Args:
          last: Last step of the run.
        """
        due = [policies.FixedIntervalPolicy(self.save_every)] if self.save_every else []
        return policies.AnySavePolicy([*due, policies.SpecificStepsPolicy([last])])

    def preservation(self, save: Any) -> policies.PreservationPolicy | None:
        """Returns which saved steps are kept; None for all.

        Args:
          save: Directory of the checkpoints.
        """
        if not self.keep:
            return None
        newest = policies.LatestN(self.keep)
        if not self.keep_best:
            return newest
        best = fsdp.checkpoint.KeepBest(save, EVAL_LOSS, n=self.keep_best)
        return policies.AnyPreservationPolicy([newest, best])


@dataclasses.dataclass(frozen=True)
class EvalOptions:
    """Evaluation while training.

    Attributes:
      eval_data: Held-out files of the kind of --data, whose mean loss is measured
        without label smoothing and z-loss.
      eval_every: Interval of steps at which it is measured; default only after the
        last.
      sample: Prompts that are continued while training, greedily, and printed.
      sample_every: Interval of steps at which they are; default only after the last.
      sample_tokens: Maximum number of new tokens of each; default 64.
      sample_chat: Renders each as a question in the model's chat template.
    """

    eval_data: tuple[Path, ...] = ()
    eval_every: Unset[int] = None
    sample: tuple[str, ...] = ()
    sample_every: Unset[int] = None
    sample_tokens: Unset[int] = None
    sample_chat: bool = False

    def check(self, data: tuple[Path, ...], mesh: MeshOptions) -> None:
        """Raises a `ValueError` for options that do not fit.

        Args:
          data: Files to train on.
          mesh: Device mesh.
        """
        self._check_samples(mesh)
        cp = mesh.cp
        if not self.eval_data:
            if self.eval_every is not None:
                raise ValueError(
                    f"--eval-every {self.eval_every}: give --eval-data FILE too."
                )
            return
        if self.eval_every is not None and self.eval_every < 1:
            raise ValueError(f"--eval-every {self.eval_every} must be at least 1.")
        check_files(self.eval_data, "--eval-data")
        check_kinds((*data, *self.eval_data))
        if cp > 1 and not has_records(data[0]):
            raise ValueError(
                f"--eval-data with text and cp={cp} is not supported: give lines of "
                '{"text": ...} in .jsonl files, or use cp=1.'
            )

    def _check_samples(self, mesh: MeshOptions) -> None:
        numbers = {
            "--sample-every": self.sample_every,
            "--sample-tokens": self.sample_tokens,
            "--sample-chat": self.sample_chat or None,
        }
        given = {name: x for name, x in numbers.items() if x is not None}
        shown = ", ".join(f"{name} {x}" for name, x in given.items())
        if given and not self.sample:
            raise ValueError(f"{shown}: give --sample PROMPT too.")
        if any(x < 1 for x in given.values()):
            raise ValueError(f"{shown}: each must be at least 1.")
        split = {"tp": mesh.tp, "cp": mesh.cp, "pp": mesh.pp}
        if self.sample and any(size > 1 for size in split.values()):
            sizes = ", ".join(f"{axis}={n}" for axis, n in split.items() if n > 1)
            raise ValueError(
                f"--sample with {sizes} is not supported: generation runs with data "
                "parallelism only. Leave it out, and use fsdp-jax generate on a saved "
                "step."
            )


@dataclasses.dataclass(frozen=True)
class LogOptions:
    """Metrics.

    Attributes:
      metrics: New file for the metrics, one JSON object a step, instead of stdout.
      callback: Function, as module:function, called with the metrics of each step, a
        dict of numbers, after they are written; in the first process alone.
      log_to: Further log of the metrics: tensorboard:DIR, wandb:PROJECT,
        mlflow:EXPERIMENT or trackio:PROJECT, each by its own package; may be repeated.
      log_every: Interval of steps whose metrics are written; held-out losses and the
        last step always are. Default 1.
      peak_tflops: Peak of a device in TFLOP/s, for MFU; default that of the data sheet
        of known GPUs, without MFU on others.
    """

    metrics: Unset[Path] = None
    callback: Unset[str] = None
    log_to: LogTo = ()
    log_every: Unset[int] = None
    peak_tflops: Unset[float] = None

    def check(self) -> None:
        """Raises a `ValueError` for numbers out of range, or writers there are not."""
        wrong = []
        if self.log_every is not None and self.log_every < 1:
            wrong.append(f"--log-every {self.log_every} must be at least 1")
        if self.peak_tflops is not None and not 0 < self.peak_tflops < math.inf:
            wrong.append(f"--peak-tflops {self.peak_tflops}: finite, more than 0")
        if wrong:
            raise ValueError("; ".join(wrong) + ".")
        check_writers(self.log_to)
