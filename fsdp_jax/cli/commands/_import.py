"""`fsdp-jax import`: imports a model as a sharded checkpoint."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Annotated, Any, Literal

import jax.numpy as jnp
import optax
import tyro

import bridge
import fsdp_jax as fsdp
from fsdp_jax.cli._adam import option, stored_settings
from fsdp_jax.cli._decoder import plan_decoder
from fsdp_jax.cli._errors import check_unwritten
from fsdp_jax.cli._model_source import Megatron, files_to_carry, open_any
from fsdp_jax.cli._optimizer import OptimizerConfig
from fsdp_jax.cli._options import Devices, Group, IgnoreField, Unset
from fsdp_jax.cli._orbax_log import be_brief_about_saves


@dataclasses.dataclass(frozen=True)
class Import:
    """Turn a model of Hugging Face or Megatron into a checkpoint that any mesh loads.

    Each device reads its own shards; no host holds the model. `fsdp-jax train --hf`,
    `export`, `compare` and `inspect` take the checkpoint as they take the model.

    Attributes:
      model: A directory with config.json and weights (safetensors, or
        pytorch_model.bin, read as data), one such file, a hub id, or what Megatron's
        --save named; which it is, is found out.
      out: Directory to write; new, or empty.
      dtype: Dtype of the parameters, which training updates; default float32.
      optimizer: Also takes Adam's state and settings and the step of a Megatron
        checkpoint, so that `fsdp-jax train --resume` goes on.
      config: A `config.json`, or a directory with one, that says what the model is;
        default what the model says.
      ignore_field: Field of config.json to ignore although it is refused; may be
        repeated. For fields that change no number.
      where: Devices.
    """

    model: tyro.conf.Positional[str]
    out: tyro.conf.Positional[Path]
    dtype: Unset[Literal["float32", "bfloat16"]] = None
    optimizer: bool = False
    config: Unset[Path] = None
    ignore_field: IgnoreField = ()
    where: Annotated[Devices, Group] = Devices()

    def run(self) -> None:
        """Loads the weights sharded over all devices, and saves them."""
        check_unwritten(self.out, "OUT")
        be_brief_about_saves()
        mesh = fsdp.make_mesh(devices=self.where.pick())
        origin = open_any(
            self.model, config=self.config, ignore_fields=self.ignore_field
        )
        megatron = origin if isinstance(origin, Megatron) else None
        if self.optimizer and (megatron is None or self.dtype == "bfloat16"):
            raise ValueError(
                "--optimizer needs a Megatron checkpoint and --dtype float32, the "
                "dtype of its moments."
            )
        policy = fsdp.MixedPrecisionPolicy(
            main_params_dtype=jnp.dtype(self.dtype or "float32")
        )
        plan = plan_decoder(origin.config, mesh, fsdp.FSDPConfig(mp_policy=policy))
        metadata: dict[str, Any] = {"config": bridge.to_hf_config(origin.config)}
        if self.optimizer and megatron is not None:
            state, more = _with_adam(megatron, plan)
            metadata |= more
        else:
            params = origin.load_params(plan.params)
            state = fsdp.init_state(plan, optax.identity(), params)
        fsdp.save(self.out, state, metadata=metadata, files=files_to_carry(origin))
        if megatron is not None:
            _say_what_is_left_out(megatron, self.optimizer)
        print(f"{self.model} is now step {int(state.step)} of {self.out}")


def _with_adam(
    origin: Megatron, plan: fsdp.Plan
) -> tuple[fsdp.TrainState, dict[str, Any]]:
    """Loads weights, moments and counts, in the state that `fsdp-jax train` has."""
    checkpoint = bridge.megatron.open_megatron(origin.path)
    adam = bridge.megatron.load_megatron_adam(
        origin.path, plan.params, config=origin.config
    )
    tx = OptimizerConfig().make()  # Its numbers are not part of its state.
    opt_state = optax.tree.set(
        tx.init(fsdp.trainable(plan, adam.params)),
        mu=fsdp.trainable(plan, adam.mu),
        nu=fsdp.trainable(plan, adam.nu),
        count=adam.count,
    )
    step = checkpoint.iteration or int(adam.count)
    state = fsdp.init_state(plan, tx, adam.params, opt_state=opt_state, step=step)
    for name, told in adam.settings.open.items():
        print(
            f"left out: {option(name)} of Adam ({told}): `fsdp-jax train --resume` "
            "asks for it",
            file=sys.stderr,
        )
    more = {"consumed_samples": checkpoint.consumed_samples, "optimizer": "adamw"}
    return state, more | {"adam": stored_settings(adam.settings)}


def _say_what_is_left_out(origin: Megatron, optimizer: bool) -> None:
    checkpoint = bridge.megatron.open_megatron(origin.path)
    if checkpoint.optimizer is not None and not optimizer:
        print("left out: Adam's state (--optimizer takes it)", file=sys.stderr)
    if optimizer and checkpoint.consumed_samples:
        print(
            f"left out: the place in the data, behind {checkpoint.consumed_samples:,} "
            "samples: `fsdp-jax train --resume` begins at the first row of its own",
            file=sys.stderr,
        )
    for line in checkpoint.left_out:
        print(f"left out: {line}", file=sys.stderr)
