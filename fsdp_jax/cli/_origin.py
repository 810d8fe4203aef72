"""Where a model comes from: a Hugging Face directory, or a step of a checkpoint."""

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
from fsdp_jax.cli._progress import bytes_bar


@dataclasses.dataclass(frozen=True)
class Origin:
    """A model that is not loaded yet.

    Attributes:
      config: The model.
      hf: Hugging Face's files, if any are at hand.
      checkpoint: The directory of the checkpoint; None if the weights are those of
        `hf`.
      step: Updates made so far.
      metadata: What `fsdp-jax train` saved with the step; empty without a checkpoint.
    """

    config: DecoderConfig
    hf: Path | None
    checkpoint: Path | None = None
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
        assert self.hf is not None
        with bytes_bar(f"loading {self.hf}") as progress:
            return bridge.load_hf(self.hf, mould, config=self.config, progress=progress)


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


def open_model(model: str) -> Origin:
    """Opens what training can start from: a model, or the parameters of a checkpoint.

    Args:
      model: A directory of either kind, a safetensors file, or a hub id.
    """
    path = Path(model)
    is_checkpoint = fsdp.latest_step(path) is not None
    return open_checkpoint(path, None) if is_checkpoint else open_hf(model)


def open_hf(hf: str) -> Origin:
    """Reads the config of a directory, a file or a hub id; headers and no weights.

    Raises:
      ValueError: If it is no safetensors checkpoint of a supported family.
    """
    path = bridge.resolve(hf)
    bridge.open_checkpoint(path)
    return Origin(bridge.from_hf_config(path), path)


def open_run(path: Path, step: int | None, hf: str | None = None) -> Origin:
    """Opens a step that training can go on from, as it was.

    Raises:
      ValueError: As for `open_checkpoint`, or if it was imported and never trained.
    """
    origin = open_checkpoint(path, step, hf)
    if "recipe" not in origin.metadata or "data" not in origin.metadata:
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
    return Origin(config, files, path, step, metadata)


def open_either(path: Path, step: int | None) -> Origin:
    """Opens a file, or a directory with a config, as a model, else as a checkpoint."""
    if not path.is_file() and not (path / "config.json").is_file():
        return open_checkpoint(path, step)
    if step is not None:
        raise ValueError(f"--step {step}: '{path}' is a model, which has no steps.")
    return open_hf(str(path))
