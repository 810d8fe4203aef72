"""`fsdp-jax export`: writes a checkpoint for transformers or Megatron."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated, Literal

import jax
import tyro

import bridge
import fsdp_jax as fsdp
from fsdp_jax._report import bytes_bar
from fsdp_jax.cli._average import averaged
from fsdp_jax.cli._decoder import plan_decoder
from fsdp_jax.cli._errors import check_empty
from fsdp_jax.cli._hub import check_push, push
from fsdp_jax.cli._megatron import Format, MegatronLayout
from fsdp_jax.cli._model_source import Checkpoint, open_checkpoint
from fsdp_jax.cli._options import Devices, Group, Unset
from fsdp_jax.cli._train_config import adapter_of


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
        if self.ema:
            origin = averaged(origin)
        plan = plan_decoder(origin.config, mesh)
        if self.adapter:
            self._write_adapter(origin, plan)
            self._push(origin)
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
                    dtype=self.dtype,
                    copy_from=self.tokenizer or origin.files,
                    progress=progress,
                )
        print(f"step {origin.step} of {self.checkpoint} is now in {self.out}")
        self._push(origin)

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
        adapter.save(self.out, params["lora"], origin.config)
        print(f"the adapter of step {origin.step} is now in {self.out}")

    def _check(self) -> None:
        if self.private and self.push is None:
            raise ValueError("--private describes a repository: give --push too.")
        if self.adapter and self.ema:
            raise ValueError(
                "--ema is of a model, and --adapter of factors: leave one out."
            )
        if self.adapter and (self.megatron or self.dtype or self.tokenizer):
            raise ValueError(
                "--adapter writes PEFT's files: leave out --megatron, --dtype and "
                "--tokenizer, or it."
            )
        self.layout.check(self.megatron is not None)
        if self.megatron is not None and (self.dtype or self.tokenizer):
            raise ValueError(
                "--dtype and --tokenizer are of transformers' files: leave out "
                f"--megatron {self.megatron}, or them."
            )
