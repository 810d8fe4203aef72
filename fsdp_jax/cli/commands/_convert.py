"""`fsdp-jax convert`: converts a checkpoint to another format, without devices."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated, Literal

import tyro

import bridge
from fsdp_jax._report import bytes_bar
from fsdp_jax.cli._errors import check_empty, check_unwritten
from fsdp_jax.cli._log import say
from fsdp_jax.cli._megatron import MegatronLayout, OptimizerFormat
from fsdp_jax.cli._model_source import Checkpoint, open_any
from fsdp_jax.cli._options import Group, IgnoreField, Unset
from fsdp_jax.cli.commands._import import Import


@dataclasses.dataclass(frozen=True)
class Convert:
    """Turn a checkpoint into one of another kind, tensor by tensor.

    Reads Hugging Face's models, Megatron's checkpoints of every format, and those of
    `fsdp-jax`; which of them SRC is, is found out. A few tensors are in memory at a
    time, unless SRC or DST is a checkpoint of fsdp-jax: then the model is.

    Attributes:
      src: Checkpoint to read: a directory, a file of weights, or a hub id.
      dst: Directory to write; new, or empty.
      to: Format to write: Hugging Face's files; Megatron's torch_dist, or fsdp_dtensor
        of Megatron-FSDP, which any run reads; Megatron's legacy files, for a run of the
        parallel sizes below; or a checkpoint of fsdp-jax (orbax).
      optimizer: Writes Adam's state too, from one format of Megatron to another. No
        model is built, so that any family is converted.
      optimizer_format: Form of Adam's state; default that of a distributed optimizer,
        unless SRC has a plain one.
      dtype: Dtype of Hugging Face's files; default that of SRC.
      config: A `config.json`, or a directory with one, that says what model SRC is;
        default what SRC says. Megatron's settings lack the tokens, and often the size
        of the vocabulary.
      ignore_field: Field of config.json to ignore although it is refused; may be
        repeated. For fields that change no number.
      tokenizer: A model's directory whose tokenizer, chat template and generation
        config are copied along, to Hugging Face's files; default those that SRC has.
      layout: Parallel sizes of a checkpoint for Megatron.
    """

    src: tyro.conf.Positional[str]
    dst: tyro.conf.Positional[Path]
    to: Literal["hf", "torch_dist", "legacy", "fsdp_dtensor", "orbax"]
    optimizer: bool = False
    optimizer_format: Unset[OptimizerFormat] = None
    dtype: Unset[Literal["float32", "bfloat16", "float16"]] = None
    config: Unset[Path] = None
    ignore_field: IgnoreField = ()
    tokenizer: Unset[Path] = None
    layout: Annotated[MegatronLayout, Group] = MegatronLayout()

    def run(self) -> None:
        """Opens the one, and writes the other."""
        check = check_unwritten if self.to == "orbax" else check_empty
        check(self.dst, "DST")
        self._check()
        if self.optimizer:
            self._with_optimizer()
            return
        if self.to == "orbax":
            Import(
                self.src,
                self.dst,
                config=self.config,
                ignore_field=self.ignore_field,
            ).run()
            return
        origin = open_any(self.src, config=self.config, ignore_fields=self.ignore_field)
        params = origin.lazy_params()
        # Not what lies beside a file, nor what is of another model than --config.
        is_whole = not (Path(self.src).is_file() or self.config)
        files = origin.files if is_whole or isinstance(origin, Checkpoint) else None
        with bytes_bar(f"writing {self.dst}") as progress:
            if self.to == "hf":
                bridge.save_hf(
                    self.dst,
                    params,
                    origin.config,
                    dtype=self.dtype,
                    copy_from=self.tokenizer or files,
                    progress=progress,
                )
            else:
                self.layout.save(self.dst, params, origin.config, self.to, progress)
        print(f"{self.src} is now in {self.dst}")

    def _with_optimizer(self) -> None:
        if self.to == "hf" or self.to == "orbax":
            raise ValueError(
                f"--optimizer converts between Megatron formats, not --to {self.to}. "
                "`fsdp-jax import --optimizer` takes Adam's state to fsdp-jax."
            )
        with bytes_bar(f"writing {self.dst}") as progress:
            left_out = self.layout.convert(
                Path(self.src), self.dst, self.to, self.optimizer_format, progress
            )
        for line in left_out:
            say(f"left out: {line}")
        print(f"{self.src} is now in {self.dst}")

    def _check(self) -> None:
        self.layout.check(self.to in ("torch_dist", "legacy", "fsdp_dtensor"))
        if self.optimizer_format and not self.optimizer:
            raise ValueError("--optimizer-format: give --optimizer too.")
        if self.optimizer and self.config:
            raise ValueError("--config: --optimizer builds no model; leave it out.")
        if self.to != "hf" and (self.dtype or self.tokenizer):
            raise ValueError(
                "--dtype and --tokenizer apply to Hugging Face checkpoints, not --to "
                f"{self.to}."
            )
