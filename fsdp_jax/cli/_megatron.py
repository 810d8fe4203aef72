"""Options of commands that write for Megatron."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import bridge
from bridge.megatron import Adam
from bridge.models import DecoderConfig
from fsdp_jax.cli._options import Unset

Format = Literal["torch_dist", "legacy", "fsdp_dtensor"]
OptimizerFormat = Literal[
    "plain", "fully_reshardable", "dp_reshardable", "distributed", "fsdp_dtensor"
]


@dataclasses.dataclass(frozen=True)
class MegatronLayout:
    """Parallel sizes of a checkpoint for Megatron.

    Attributes:
      tensor_parallel: Tensor-parallel ranks of a legacy checkpoint, or of one with an
        optimizer in dp_reshardable, as are the next three; others fit any run.
      pipeline_parallel: Pipeline stages.
      virtual_pipeline: Model chunks a stage; default one.
      expert_parallel: Expert-parallel ranks.
      vocab_divisor: Divisor of the vocabulary, times the tensor-parallel ranks; rows of
        zeros are added.
    """

    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    virtual_pipeline: Unset[int] = None
    expert_parallel: int = 1
    vocab_divisor: int = 128

    def check(self, written: bool) -> None:
        """Refuses these options where nothing is written for Megatron."""
        default = MegatronLayout()
        changed = [
            f"--{field.name.replace('_', '-')}"
            for field in dataclasses.fields(self)
            if getattr(self, field.name) != getattr(default, field.name)
        ]
        if changed and not written:
            raise ValueError(
                f"{', '.join(changed)} apply to Megatron checkpoints, and none is "
                "written."
            )

    def save(
        self,
        out: Path,
        params: Any,
        config: DecoderConfig,
        format: Format,
        progress: Callable[[int, int], None],
    ) -> None:
        """Writes parameters, or leaves that are read when they are written."""
        bridge.save_megatron(
            out,
            params,
            config,
            format=format,
            tensor_parallel=self.tensor_parallel,
            pipeline_parallel=self.pipeline_parallel,
            virtual_pipeline=self.virtual_pipeline,
            expert_parallel=self.expert_parallel,
            make_vocab_size_divisible_by=self.vocab_divisor,
            progress=progress,
        )

    def save_adam(
        self,
        out: Path,
        adam: Adam,
        config: DecoderConfig,
        format: Format,
        optimizer_format: OptimizerFormat | None,
        iteration: int,
        consumed_samples: int,
        progress: Callable[[int, int], None],
    ) -> None:
        """Writes parameters with Adam's state, from which a Megatron run goes on."""
        bridge.megatron.save_megatron_adam(
            out,
            adam,
            config,
            format=format,
            optimizer_format=optimizer_format,
            iteration=iteration,
            consumed_samples=consumed_samples,
            tensor_parallel=self.tensor_parallel,
            pipeline_parallel=self.pipeline_parallel,
            virtual_pipeline=self.virtual_pipeline,
            expert_parallel=self.expert_parallel,
            make_vocab_size_divisible_by=self.vocab_divisor,
            flags={"clip_grad": adam.settings.clip_grad},
            progress=progress,
        )

    def convert(
        self,
        src: Path,
        out: Path,
        format: Format,
        optimizer_format: OptimizerFormat | None,
        progress: Callable[[int, int], None],
    ) -> tuple[str, ...]:
        """Writes a Megatron checkpoint in another format, with its optimizer.

        Returns:
          What is not converted, one line each.
        """
        if self.vocab_divisor != MegatronLayout().vocab_divisor:
            raise ValueError(
                "--vocab-divisor cannot be set with --optimizer, which "
                "keeps that of SRC."
            )
        return bridge.megatron.convert_megatron(
            src,
            out,
            format=format,
            optimizer_format=optimizer_format,
            tp=self.tensor_parallel,
            pp=self.pipeline_parallel,
            ep=self.expert_parallel,
            vpp=self.virtual_pipeline or 1,
            progress=progress,
        )
