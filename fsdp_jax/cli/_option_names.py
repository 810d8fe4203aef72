"""Names that other trainers have for our options, and commands near a mistyped one."""

from __future__ import annotations

import dataclasses
import difflib
import typing
from collections.abc import Iterator, Mapping, Sequence

from fsdp_jax.sharding._mesh import AXES

# Of transformers, TRL, torchtitan, Megatron-LM and accelerate.
_OTHER_NAMES = {
    "adam-beta1": "b1",
    "adam-beta2": "b2",
    "adam-epsilon": "eps",
    "batch-size": "batch",
    "bf16": "param-dtype bfloat16",
    "block-size": "seq",
    "clip-grad": "clip",
    "checkpoint-dir": "save",
    "clip-grad-norm": "clip",
    "context-length": "seq",
    "context-parallel-size": "cp",
    "data-path": "data",
    "dataset": "data",
    "eval-steps": "eval-every",
    "validation-file": "eval-data",
    "expert-model-parallel-size": "ep",
    "fp16": "param-dtype float16",
    "global-batch-size": "batch",
    "gradient-accumulation-steps": "microbatches",
    "gradient-checkpointing": "remat nothing",
    "learning-rate": "lr",
    "load": "resume",
    "log-file": "metrics",
    "lora-r": "lora-rank",
    "max-grad-norm": "clip",
    "max-length": "seq",
    "max-seq-length": "seq",
    "max-steps": "steps",
    "micro-batch-size": "microbatches",
    "model": "hf",
    "model-name-or-path": "hf",
    "num-steps": "steps",
    "out": "save",
    "output": "save",
    "output-dir": "save",
    "per-device-train-batch-size": "batch",
    "pipeline-model-parallel-size": "pp",
    "pretrained-model": "hf",
    "resume-from-checkpoint": "resume",
    "save-steps": "save-every",
    "save-total-limit": "keep",
    "sequence-length": "seq",
    "tensor-model-parallel-size": "tp",
    "tensor-parallel-size": "tp",
    "train-file": "data",
    "train-iters": "steps",
    "warmup-steps": "warmup",
    "lr-scheduler-type": "lr-schedule",
    "lr-warmup-iters": "warmup",
    "optim": "optimizer",
    "wd": "weight-decay",
}


_AXES = {axis.replace("_", "-"): axis for axis in AXES}
"""Axes of a mesh as options: `train` has one for each, `plan` one for all."""


def suggestions(words: Sequence[str], commands: Mapping[str, type]) -> Iterator[str]:
    """Yields a line for a mistyped command, or each option that has another name.

    Args:
      words: Name of the command, and its arguments.
      commands: Dataclass of each command, by its name.
    """
    if not words:
        return
    if words[0] not in commands:
        for near in difflib.get_close_matches(words[0], commands, n=1):
            yield f"there is no command {words[0]!r}: did you mean fsdp-jax {near}?"
        return
    if words[0] == "launch" and "--" not in words:
        yield "the program follows a --, as in fsdp-jax launch --processes 8 -- PROGRAM"
    known = set(option_names(commands[words[0]]))
    for word in words[1:]:
        name = word.partition("=")[0].removeprefix("--").replace("_", "-")
        ours = _OTHER_NAMES.get(name, "")
        is_option = word.startswith("--") and name not in known
        if is_option and name in _AXES and "mesh" in known:
            ours = f"mesh {_AXES[name]}=N"
        elif is_option and name == "mesh" and known.issuperset(_AXES):
            ours = " N, --".join(_AXES) + " N"
        elif not is_option or ours.partition(" ")[0] not in known:
            continue
        yield f"--{name} is --{ours} here (see fsdp-jax {words[0]} --help)"


def option_names(command: type) -> Iterator[str]:
    """Yields the options of a command, without their dashes.

    Args:
      command: Dataclass of the command; a field that is a dataclass is a group.
    """
    hints = typing.get_type_hints(command)
    for field in dataclasses.fields(command):
        if dataclasses.is_dataclass(group := hints[field.name]):
            assert isinstance(group, type)
            yield from option_names(group)
        else:
            yield field.name.replace("_", "-")
