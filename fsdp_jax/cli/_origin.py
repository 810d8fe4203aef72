"""Where a model comes from: Hugging Face, Megatron, or a step of a checkpoint."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import jax

import bridge
import fsdp_jax as fsdp
from bridge.models import DecoderConfig
from fsdp_jax._tree import PyTree
from fsdp_jax.checkpoint._steps import resolve_step
from fsdp_jax.cli._model import plan_decoder
from fsdp_jax.cli._progress import bytes_bar


@dataclasses.dataclass(frozen=True)
class Origin:
    """A model that is not loaded yet.

    Attributes:
      config: The model.
      hf: Hugging Face's files, if any are at hand.
      checkpoint: The directory of the checkpoint that holds the weights; None if they
        are elsewhere.
      megatron: The directory of Megatron's checkpoint that holds them; None likewise.
        With neither, they are those of `hf`.
      step: Updates made so far.
      metadata: What `fsdp-jax train` saved with the step; empty without a checkpoint.
    """

    config: DecoderConfig
    hf: Path | None
    checkpoint: Path | None = None
    megatron: Path | None = None
    step: int = 0
    metadata: dict[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def tokenizer_file(self) -> Path | None:
        """The model's own tokenizer, if it is at hand."""
        if self.hf is None:
            return None
        file = (self.hf if self.hf.is_dir() else self.hf.parent) / "tokenizer.json"
        return file if file.is_file() else None

    def load_params(self, mould: PyTree, *, as_stored: bool = False) -> PyTree:
        """Fills a mould with the weights, shard by shard.

        Args:
          mould: Shapes, dtypes and shardings.
          as_stored: Takes the dtypes of the checkpoint instead.
        """
        if self.checkpoint is not None:
            stored = _with_stored_dtypes(mould, self.checkpoint, self.step)
            params = fsdp.load_params(self.checkpoint, stored, step=self.step)
            return params if as_stored else jax.tree.map(_cast, params, mould)
        path = self.megatron or self.hf
        assert path is not None
        load = bridge.load_hf if self.megatron is None else bridge.load_megatron
        with bytes_bar(f"loading {path}") as progress:
            return load(path, mould, config=self.config, progress=progress)

    def lazy_params(self) -> PyTree:
        """Returns leaves that are read when they are written elsewhere.

        Those of a checkpoint of ours are read now, onto one device.
        """
        if self.checkpoint is not None:
            mesh = fsdp.make_mesh(devices=jax.devices()[:1])
            mould = plan_decoder(self.config, mesh).params
            return self.load_params(mould, as_stored=True)
        if self.megatron is not None:
            return bridge.megatron.lazy_megatron(self.megatron, self.config)[0]
        assert self.hf is not None
        return bridge.lazy_hf(self.hf, self.config)[0]

    def plan_import(self, mould: PyTree | None) -> bridge.ImportPlan:
        """Says what `load_params` would do; of a checkpoint of ours it is not said."""
        if self.megatron is not None:
            plan = bridge.megatron.plan_megatron
            return plan(self.megatron, mould, config=self.config)
        assert self.hf is not None
        return bridge.plan(self.hf, mould, config=self.config)


def _with_stored_dtypes(mould: PyTree, checkpoint: Path, step: int) -> PyTree:
    """The mould in the floating dtypes in which `fsdp-jax import --dtype` saved it."""
    stored = fsdp.load_shapes(checkpoint, step=step)
    dtypes = iter(
        stored[key].dtype if (key := f"params.{name}") in stored else leaf.dtype
        for name, leaf in fsdp.named_leaves(mould)
    )
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(
            leaf.shape, next(dtypes), sharding=leaf.sharding
        ),
        mould,
    )


def _cast(leaf: jax.Array, mould: jax.ShapeDtypeStruct) -> jax.Array:
    return leaf.astype(mould.dtype)


def open_any(
    model: str | Path, step: int | None = None, *, config: Path | None = None
) -> Origin:
    """Opens a model or a checkpoint of any kind, which is found out.

    Args:
      model: A directory of Hugging Face, Megatron or ours, a safetensors file, or a
        hub id.
      step: Which step of a checkpoint of ours; None for the newest.
      config: Says what the model is, in the place of what it says itself.

    Raises:
      ValueError: If it is none of them, or one that is not supported.
    """
    path = Path(model)
    if not (path / "config.json").is_file():
        if fsdp.latest_step(path) is not None:
            origin = open_checkpoint(path, step)
            if config is None:
                return origin
            return dataclasses.replace(origin, config=bridge.from_hf_config(config))
        if bridge.megatron.is_megatron(path):
            return _open_megatron(path, step, config)
        if path.is_dir() and not any(path.glob("*.safetensors")):
            raise ValueError(
                f"No checkpoint at '{path}': the directory has no config.json, as a "
                "model of Hugging Face, nothing of Megatron, and no committed step."
            )
    _refuse_step(step, path)
    return open_hf(str(model), config)


def _open_megatron(path: Path, step: int | None, config: Path | None) -> Origin:
    _refuse_step(step, path)
    if config is not None:
        return Origin(bridge.from_hf_config(config), None, megatron=path)
    args = bridge.megatron.open_megatron(path).args
    return Origin(bridge.megatron.from_args(args), None, megatron=path)


def _refuse_step(step: int | None, path: Path) -> None:
    if step is not None:
        raise ValueError(f"--step {step}: '{path}' is a model, which has no steps.")


def open_hf(hf: str, config: Path | None = None) -> Origin:
    """Reads the config of a directory, a file or a hub id; headers and no weights.

    Args:
      hf: The model.
      config: Says what it is; None for what lies beside the weights.

    Raises:
      ValueError: If it is no safetensors checkpoint of a supported family.
    """
    path = bridge.resolve(hf)
    bridge.open_checkpoint(path)
    return Origin(bridge.from_hf_config(path if config is None else config), path)


def open_run(path: Path, step: int | None, hf: str | None = None) -> Origin:
    """Opens a step that training can go on from, as it was.

    Raises:
      ValueError: As for `open_checkpoint`, or if it was imported and never trained.
    """
    origin = open_checkpoint(path, step, hf)
    trained = {"recipe", "data"} <= set(origin.metadata)
    if not trained and "optimizer" not in origin.metadata:
        raise ValueError(
            f"Step {origin.step} of '{path}' was imported, not trained: there is "
            f"nothing to go on from. Start from it with --hf {path}."
        )
    return origin


def open_checkpoint(path: Path, step: int | None, hf: str | None = None) -> Origin:
    """Reads the metadata of one step.

    Args:
      path: A directory that `fsdp-jax train` or `fsdp-jax import` saved to.
      step: Which; None for the newest.
      hf: Takes the config from there instead, and the tokenizer.

    Raises:
      ValueError: If there is no such step, or another program saved it.
    """
    step = resolve_step(path, step)
    metadata = fsdp.load_metadata(path, step=step)
    if "config" not in metadata:
        raise ValueError(
            f"Step {step} of '{path}' was not saved by `fsdp-jax train`: its metadata "
            "has no config. Load it with fsdp_jax.load instead."
        )
    files = bridge.resolve(hf) if hf is not None else None
    config = bridge.from_hf_config(files if files is not None else metadata["config"])
    return Origin(config, files, path, step=step, metadata=metadata)
