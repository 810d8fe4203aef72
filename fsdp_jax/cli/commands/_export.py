"""`fsdp-jax export`: writes a checkpoint for transformers or Megatron."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated, Literal

import jax
import numpy as np
import tyro
from jax.sharding import Mesh

import bridge
import fsdp_jax as fsdp
from fsdp_jax._report import bytes_bar
from fsdp_jax.cli._average import averaged
from fsdp_jax.cli._decoder import plan_decoder
from fsdp_jax.cli._errors import check_empty
from fsdp_jax.cli._hub import check_push, push
from fsdp_jax.cli._log import say
from fsdp_jax.cli._megatron import Format, MegatronLayout, OptimizerFormat
from fsdp_jax.cli._model_source import Checkpoint, open_checkpoint
from fsdp_jax.cli._options import Devices, Group, Unset
from fsdp_jax.cli._step_metadata import BASE_MODEL
from fsdp_jax.cli._train_config import adapter_of, is_reward_model
from fsdp_jax.cli._trained_adam import load_trained_adam


@dataclasses.dataclass(frozen=True)
class Export:
    """Write a checkpoint as a directory that transformers, or Megatron, loads.

    Attributes:
      checkpoint: Directory given to --save of fsdp-jax train.
      out: Directory to write; new, or empty.
      step: Step to export; default the newest.
      ema: Writes the average of the weights, of a run with --ema.
      adapter: Writes the factors of a run with --lora-rank as an adapter of PEFT;
        without it they are merged into the model.
      dtype: Dtype of transformers' files; default that of the checkpoint.
      megatron: Format of a checkpoint for Megatron to write instead: torch_dist, which
        any run reads, or legacy, for a run of the parallel sizes below.
      optimizer: Writes Adam's state, step and settings for Megatron too, so that a run
        of Megatron goes on with the next step; start it with --no-load-rng.
      optimizer_format: Form of Adam's state, as `fsdp-jax convert` has it; default that
        of a distributed optimizer.
      consumed_samples: Rows trained so far, where Megatron's data goes on; default the
        steps times --batch of the run.
      tokenizer: Directory of a model whose tokenizer, chat template and generation
        config are copied; default those saved with the checkpoint.
      push: Repository of the Hugging Face hub, org/name, to which OUT is uploaded.
      private: Makes that repository private if it is new.
      layout: Parallel sizes of a checkpoint for Megatron.
      where: Devices.
    """

    checkpoint: tyro.conf.Positional[Path]
    out: tyro.conf.Positional[Path]
    step: Unset[int] = None
    ema: bool = False
    adapter: bool = False
    dtype: Unset[Literal["float32", "bfloat16", "float16"]] = None
    megatron: Unset[Format] = None
    optimizer: bool = False
    optimizer_format: Unset[OptimizerFormat] = None
    consumed_samples: Unset[int] = None
    tokenizer: Unset[Path] = None
    push: Unset[str] = None
    private: bool = False
    layout: Annotated[MegatronLayout, Group] = MegatronLayout()
    where: Annotated[Devices, Group] = Devices()

    def run(self) -> None:
        """Loads the parameters sharded over all devices, and writes them."""
        check_empty(self.out, "OUT")
        self._check()
        if self.push is not None:
            check_push(self.push)
        mesh = fsdp.make_mesh(devices=self.where.pick())
        origin = open_checkpoint(self.checkpoint, self.step)
        scored = is_reward_model(origin.metadata)
        if scored:
            self._check_scored(origin)
        if self.ema:
            origin = averaged(origin)
        plan = plan_decoder(origin.config, mesh, scored=scored)
        if self.adapter:
            self._write_adapter(origin, plan)
            self._push(origin)
            return
        if self.optimizer:
            self._write_with_adam(origin, mesh)
            return
        params = origin.load_params_as_stored(plan.params)
        with bytes_bar(f"writing {self.out}") as progress:
            if self.megatron is not None:
                self.layout.save(
                    self.out, params, origin.config, self.megatron, progress
                )
            else:
                bridge.save_hf(
                    self.out,
                    params,
                    origin.config,
                    head="score" if scored else "lm_head",
                    dtype=self.dtype,
                    copy_from=self.tokenizer or origin.files,
                    progress=progress,
                )
        print(f"step {origin.step} of {self.checkpoint} is now in {self.out}")
        self._push(origin)

    def _check_scored(self, origin: Checkpoint) -> None:
        """Refuses what a reward model does not have."""
        given = {
            "--adapter": self.adapter,
            f"--megatron {self.megatron}": self.megatron is not None,
        }
        if wrong := [option for option, is_given in given.items() if is_given]:
            raise ValueError(
                f"Step {origin.step} of '{self.checkpoint}' is a reward model, with a "
                f"score head: leave out {', '.join(wrong)}."
            )
        padding, ends = origin.config.pad_token_id, origin.config.eos_token_id
        if padding is None or padding == ends or np.isin(padding, ends or ()):
            say(
                f"pad_token_id is {padding}. transformers reads the score at the last "
                "token that is not padding: before it scores several rows, set a "
                "pad_token_id that is not an end of text"
            )

    def _push(self, origin: Checkpoint) -> None:
        if self.push is None or jax.process_index() > 0:
            return
        message = f"Upload step {origin.step}"
        url = push(self.out, self.push, private=self.private, message=message)
        print(f"uploaded to {url}")

    def _write_adapter(self, origin: Checkpoint, plan: fsdp.Plan) -> None:
        adapter = adapter_of(origin.metadata)
        if adapter is None:
            raise ValueError(
                f"--adapter: step {origin.step} of '{self.checkpoint}' was not trained "
                "with --lora-rank, so that it has none. Leave the option out."
            )
        place = (self.checkpoint, origin.step)
        _, params = adapter.load(*place, plan.params, origin.config)
        base = origin.metadata.get(BASE_MODEL)
        adapter.save(self.out, params["lora"], origin.config, base)
        print(f"the adapter of step {origin.step} is now in {self.out}")

    def _write_with_adam(self, origin: Checkpoint, mesh: Mesh) -> None:
        assert self.megatron is not None
        adam = load_trained_adam(origin, mesh)
        train = origin.metadata["train"]
        samples = self.consumed_samples
        if samples is None:
            samples = origin.step * train["data"]["batch"]
        options = (self.megatron, self.optimizer_format, origin.step, samples)
        with bytes_bar(f"writing {self.out}") as progress:
            self.layout.save_adam(self.out, adam, origin.config, *options, progress)
        shape = train["optimizer"]["lr_schedule"]
        if shape != "constant" or train["optimizer"]["warmup"]:
            say(
                f"left out: the schedule of --lr ({shape}), of which the next rate is "
                f"{adam.settings.lr:g}: give Megatron its own"
            )
        print(
            f"step {origin.step} of {self.checkpoint} is now in {self.out}, with "
            f"Adam's state, after {samples:,} samples"
        )

    def _check(self) -> None:
        of_optimizer = {
            "--optimizer-format": self.optimizer_format is not None,
            "--consumed-samples": self.consumed_samples is not None,
        }
        given = [name for name, is_given in of_optimizer.items() if is_given]
        if given and not self.optimizer:
            raise ValueError(f"{', '.join(given)}: give --optimizer too.")
        if self.optimizer and (self.megatron is None or self.ema or self.push):
            raise ValueError(
                "--optimizer writes Adam's state for Megatron: give --megatron, and "
                "leave out --ema and --push."
            )
        if (self.consumed_samples or 0) < 0:
            raise ValueError(
                f"--consumed-samples {self.consumed_samples} must be at least 0."
            )
        if self.private and self.push is None:
            raise ValueError(
                "--private makes the repository of --push private: give --push too."
            )
        if self.adapter and self.ema:
            raise ValueError(
                "--ema exports averaged weights and --adapter LoRA factors: leave one "
                "out."
            )
        if self.adapter and (self.megatron or self.dtype or self.tokenizer):
            raise ValueError(
                "--adapter writes PEFT's files: leave out --megatron, --dtype and "
                "--tokenizer, or it."
            )
        self.layout.check(self.megatron is not None)
        if self.megatron is not None and (self.dtype or self.tokenizer):
            raise ValueError(
                "--dtype and --tokenizer apply to transformers' files: leave them out, "
                f"or --megatron {self.megatron}."
            )
