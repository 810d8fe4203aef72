"""LoRA of the commands, by PEFT's names."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

import bridge
import fsdp_jax as fsdp
from bridge.lora._lora_targets import fan_in_fan_out
from bridge.models import DecoderConfig
from fsdp_jax._tree import PyTree
from fsdp_jax.cli._decoder import plan_decoder

BaseDType = Literal["float32", "bfloat16", "float16", "int8", "nf4"]
_CODES: dict[str, Literal["int8", "nf4"]] = {"int8": "int8", "nf4": "nf4"}


@dataclasses.dataclass(frozen=True)
class Adapter:
    """A LoRA, as options and checkpoints describe it.

    Attributes:
      rank: Rank of the factors.
      alpha: Numerator of the scale `alpha / rank` of their product.
      targets: Modules with factors, by PEFT's names.
      base_dtype: Format of the frozen weights; a floating dtype also computes.
    """

    rank: int
    alpha: float
    targets: tuple[str, ...]
    base_dtype: BaseDType

    def sharding(self, config: DecoderConfig, param_dtype: str) -> fsdp.FSDPConfig:
        """Returns the sharding config of a model with the factors.

        Args:
          config: Config of the model.
          param_dtype: Dtype that quantized weights compute in.
        """
        dtype = param_dtype if self.base_dtype in _CODES else self.base_dtype
        return fsdp.FSDPConfig(
            lora=fsdp.LoRAConfig(
                self.rank,
                [
                    fsdp.lora.LoRATarget(path, num_in=num_in)
                    for path, num_in in bridge.lora_targets(
                        config, self.targets
                    ).items()
                ],
                alpha=self.alpha,
                base=_CODES.get(self.base_dtype),
            ),
            mp_policy=fsdp.MixedPrecisionPolicy(param_dtype=jnp.dtype(dtype)),
        )

    def load_merged(
        self, directory: Path, step: int, like: PyTree, config: DecoderConfig
    ) -> PyTree:
        """Loads a model with its factors merged in, like abstract parameters.

        Args:
          directory: Directory of the checkpoint.
          step: Step to load.
          like: Shapes, dtypes and shardings of the model's own parameters.
          config: Config of the model.
        """
        plan, params = self.load(directory, step, like, config)
        merged = fsdp.training.merge_lora(plan, params, jnp.float32)
        return jax.tree.map(
            lambda leaf, like: jax.device_put(leaf.astype(like.dtype), like.sharding),
            merged,
            like,
        )

    def load(
        self, directory: Path, step: int, like: PyTree, config: DecoderConfig
    ) -> tuple[fsdp.Plan, PyTree]:
        """Loads the plan and the parameters of a checkpoint, on the mesh of `like`."""
        mesh = jax.tree.leaves(like)[0].sharding.mesh
        plan = plan_decoder(config, mesh, self.sharding(config, "float32"))
        params = fsdp.checkpoint.load_params(
            directory, plan.params, step=step, cast="as_stored"
        )
        return plan, params

    def save(
        self, path: Path, factors: PyTree, config: DecoderConfig, base: str | None
    ) -> None:
        """Writes trained factors as an adapter of PEFT.

        Args:
          path: Directory to write.
          factors: Factors of the parameters.
          config: Config of the model.
          base: Directory or hub id of the model; None for unsaid.
        """
        described = bridge.LoraConfig(
            self.rank,
            self.alpha,
            fan_in_fan_out=fan_in_fan_out(config),
            base_model_name_or_path=base,
        )
        arrays = jax.tree.map(np.asarray, fsdp.sharding.unpack(factors))
        bridge.save_lora(path, bridge.Lora(described, arrays, {}), config)


@dataclasses.dataclass(frozen=True)
class AdapterConfig:
    """Options of LoRA.

    Attributes:
      lora_rank: Rank of the factors that are trained in place of the model; 0 for none.
      lora_alpha: Numerator of their scale, `lora_alpha / lora_rank`; None for the rank.
      lora_targets: PEFT's names of the modules with factors, separated by commas.
      base_dtype: Format of the frozen weights; None for the dtype of the others.
    """

    lora_rank: int = 0
    lora_alpha: float | None = None
    lora_targets: str = "all-linear"
    base_dtype: BaseDType | None = None

    def problems(self) -> list[str]:
        """Returns what is out of range or without effect, by option."""
        if not self.lora_rank:
            alone = {
                "--lora-alpha": self.lora_alpha,
                "--lora-targets": self.lora_targets != "all-linear",
                "--base-dtype": self.base_dtype,
            }
            return [f"{name} needs --lora-rank" for name, x in alone.items() if x]
        wrong = []
        if self.lora_rank < 0:
            wrong.append(f"--lora-rank {self.lora_rank} must be at least 1")
        if self.lora_alpha is not None and not 0 < self.lora_alpha < math.inf:
            wrong.append(f"--lora-alpha {self.lora_alpha}: a finite number above 0")
        return wrong

    def make(self, param_dtype: BaseDType) -> Adapter | None:
        """Returns the LoRA that is trained; None if the model is.

        Args:
          param_dtype: Dtype of the weights, and of frozen ones by default.
        """
        if not self.lora_rank:
            return None
        return Adapter(
            self.lora_rank,
            self.lora_alpha or self.lora_rank,
            tuple(self.lora_targets.split(",")),
            self.base_dtype or param_dtype,
        )
