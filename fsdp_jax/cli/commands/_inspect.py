"""`fsdp-jax inspect`: lists the contents of a checkpoint, from headers alone."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Annotated, Any

import tyro

import bridge
import fsdp_jax as fsdp
from bridge.models import DecoderConfig
from fsdp_jax._report import text_table
from fsdp_jax.checkpoint._remove import names_beside
from fsdp_jax.checkpoint._steps import open_step
from fsdp_jax.cli._decoder import plan_decoder
from fsdp_jax.cli._model_source import Checkpoint, HuggingFace, Megatron, open_any
from fsdp_jax.cli._one_tensor import print_tensor
from fsdp_jax.cli._options import Devices, Group, IgnoreField, Unset


@dataclasses.dataclass(frozen=True)
class Inspect:
    """Show what a model or a checkpoint holds, and where each tensor would go.

    Reads headers and no weights, but for --tensor.

    Attributes:
      path: A model's directory, a file of weights, a Megatron checkpoint, or a
        directory of `fsdp-jax train --save` or `fsdp-jax import`.
      sharded: Also plans how it would be sharded over the devices, and says what each
        process would read.
      json: Prints one JSON object instead.
      tensor: Name of one tensor of a model of Hugging Face's, Megatron's or verl's, as
        this command lists it: prints its shape, dtype, statistics and values. Of
        Megatron's Adam state, exp_avg/NAME, exp_avg_sq/NAME and master/NAME.
      ignore_field: Field of config.json to ignore although it is refused; may be
        repeated. For fields that change no number.
      where: Devices, with --sharded.
    """

    path: tyro.conf.Positional[Path]
    sharded: bool = False
    json: bool = False
    tensor: Unset[str] = None
    ignore_field: IgnoreField = ()
    where: Annotated[Devices, Group] = Devices()

    def run(self) -> None:
        """Prints the config, the mapping, and the sums."""
        if self.tensor is not None:
            print_tensor(self.path, self.tensor, as_json=self.json)
            return
        devices = self.where.pick() if self.sharded else None
        origin = open_any(self.path, ignore_fields=self.ignore_field)
        like = None
        if devices is not None:
            mesh = fsdp.make_mesh(devices=devices)
            like = plan_decoder(origin.config, mesh).params
        if isinstance(origin, Checkpoint):
            self._print_checkpoint(origin.config, origin.step)
        else:
            self._print_model(origin, origin.plan_import(like))

    def _print_model(
        self, origin: HuggingFace | Megatron, plan: bridge.ImportPlan
    ) -> None:
        run = run_of(origin.path) if isinstance(origin, Megatron) else {}
        if self.json:
            found = {"config": config_fields(origin.config), **plan.as_dict(), **run}
            print(json.dumps(found))
            return
        print(_trait_table(origin.config))
        print()
        print(plan)
        for name, value in run.items():
            print(f"{name}: {value}")

    def _print_checkpoint(self, config: DecoderConfig, step: int) -> None:
        leaves = {
            name: (tuple(leaf.shape), str(leaf.dtype))
            for name, leaf in fsdp.checkpoint.load_shapes(self.path, step=step).items()
        }
        _, manifest = open_step(self.path, step)
        beside = names_beside(manifest)
        if self.json:
            found = {"config": config_fields(config), "step": step, "leaves": leaves}
            print(json.dumps(found | {"beside": beside}))
            return
        print(_trait_table(config))
        print()
        rows = [
            (name, "x".join(map(str, shape)), dtype)
            for name, (shape, dtype) in leaves.items()
        ]
        print(text_table({"leaf": "left", "shape": "left", "dtype": "left"}, rows))
        if beside:
            print(f"beside them: {', '.join(beside)}")
        print(f"step {step} of {self.path}")


def run_of(megatron: Path) -> dict[str, Any]:
    """Returns what a Megatron checkpoint holds beside the weights."""
    checkpoint = bridge.megatron.open_megatron(megatron)
    return {
        "format": checkpoint.format,
        "iteration": checkpoint.iteration,
        "consumed_samples": checkpoint.consumed_samples,
        "optimizer": None if checkpoint.optimizer is None else "Adam",
        "left_out": checkpoint.left_out,
    }


def config_fields(config: Any) -> dict[str, Any]:
    """Returns the fields of a config that are not the default of all families.

    Args:
      config: A `DecoderConfig`, or one of its parts.
    """
    return {
        field.name: config_fields(value) if dataclasses.is_dataclass(value) else value
        for field in dataclasses.fields(config)
        if (value := getattr(config, field.name)) != field.default
        and field.name != "passthrough"
    }


def _trait_table(config: DecoderConfig) -> str:
    rows = [(name, _short(value)) for name, value in config_fields(config).items()]
    return text_table({"field": "left", "value": "left"}, rows)


def _short(value: Any) -> str:
    """Cuts long values: layer by layer, a large model would fill the screen."""
    if isinstance(value, dict):
        value = ", ".join(f"{name} {part}" for name, part in value.items())
    text = str(value)
    return text if len(text) <= 100 else text[:97] + "..."
