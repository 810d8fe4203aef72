"""`fsdp-jax import`: from a Hugging Face model to a sharded checkpoint."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated, Literal

import jax.numpy as jnp
import optax
import tyro

import bridge
import fsdp_jax as fsdp
from fsdp_jax.cli._errors import check_empty
from fsdp_jax.cli._model import plan_decoder
from fsdp_jax.cli._options import Devices
from fsdp_jax.cli._origin import open_hf


@dataclasses.dataclass(frozen=True)
class Import:
    """Turn a Hugging Face model into a checkpoint that any mesh loads.

    Each device reads its own shards; no host holds the model. `fsdp-jax train --hf`,
    `export`, `compare` and `inspect` take the checkpoint as they take the model.

    Attributes:
      model: A directory with config.json and safetensors files, one such file, or a
        hub id.
      out: The directory to write; new, or empty.
      dtype: Dtype of the parameters; what training updates.
      where: On which devices.
    """

    model: tyro.conf.Positional[str]
    out: tyro.conf.Positional[Path]
    dtype: Literal["float32", "bfloat16"] = "float32"
    where: Annotated[Devices, tyro.conf.arg(name="")] = Devices()

    def run(self) -> None:
        """Loads the weights sharded over all devices, and saves them as step 0."""
        check_empty(self.out, "OUT")
        mesh = fsdp.make_mesh(devices=self.where.pick())
        origin = open_hf(self.model)
        policy = fsdp.MixedPrecisionPolicy(main_params_dtype=jnp.dtype(self.dtype))
        plan = plan_decoder(origin.config, mesh, fsdp.FSDPConfig(mp_policy=policy))
        params = origin.load_params(plan.params)
        state = fsdp.init(plan, optax.identity(), params)
        metadata = {"config": bridge.to_hf_config(origin.config)}
        fsdp.save(self.out, state, metadata=metadata)
        print(f"{self.model} is now step 0 of {self.out}")
