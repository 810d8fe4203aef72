"""Origins of a model: Hugging Face, Megatron, a config, or a checkpoint."""

from __future__ import annotations

import dataclasses
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, Protocol

import jax

import bridge
import fsdp_jax as fsdp
from bridge.formats._json import INFINITE, read_json
from bridge.models import DecoderConfig
from bridge.streaming._sidecars import find_sidecars
from fsdp_jax._report import bytes_bar
from fsdp_jax._tree import PyTree
from fsdp_jax.checkpoint._assets import copy_for_process, names_of_files
from fsdp_jax.checkpoint._steps import open_step, resolve_step
from fsdp_jax.cli._decoder import plan_decoder
from fsdp_jax.cli._log import say
from fsdp_jax.cli._train_config import adapter_of, is_reward_model

_WEIGHTS = ("*.safetensors", "pytorch_model*.bin")

# Under this name a step carries the tokenizer, chat template and generation config.
TOKENIZER = "tokenizer"


class Origin(Protocol):
    """A model that is not loaded yet."""

    @property
    def config(self) -> DecoderConfig:
        """Config of the model."""
        ...

    @property
    def files(self) -> Path | None:
        """Directory with the model's tokenizer; None if there is none."""
        ...

    def load_params(self, like: PyTree) -> PyTree:
        """Loads the weights like `like`, shard by shard, in its dtypes."""
        ...

    def lazy_params(self) -> PyTree:
        """Returns leaves that are read when they are written elsewhere."""
        ...


@dataclasses.dataclass(frozen=True)
class HuggingFace:
    """A model in safetensors files.

    Attributes:
      path: Directory of the model, or its single file.
      config: Config of the model.
    """

    path: Path
    config: DecoderConfig

    @property
    def files(self) -> Path:
        """Directory of the model, which may have a tokenizer."""
        return _directory_of(self.path)

    def load_params(self, like: PyTree) -> PyTree:
        """Loads the weights like `like`."""
        with bytes_bar(f"loading {self.path}") as progress:
            return bridge.load_hf(
                self.path, like, config=self.config, progress=progress
            )

    def lazy_params(self) -> PyTree:
        """Returns leaves that are read when they are written elsewhere."""
        return bridge.lazy_hf(self.path, self.config)[0]

    def plan_import(self, like: PyTree | None) -> bridge.ImportPlan:
        """Returns the plan of `load_params`."""
        return bridge.plan(self.path, like, config=self.config)


def name_for_adapters(origin: Any, given: str | None) -> str | None:
    """Returns what an adapter of a model names as its base; None if nothing fits.

    Its modules are those of a model of text. A model that sees has them elsewhere, and
    a run or a checkpoint of Megatron's is no model that PEFT opens.

    Args:
      origin: Model.
      given: Directory or hub id that it was opened by; None for a run that goes on.
    """
    if given is None or not isinstance(origin, HuggingFace):
        return None
    file = origin.files / "config.json"
    fields = read_json(file, f"'{file}'", INFINITE) if file.is_file() else {}
    if fields.get("model_type") != origin.config.model_type:
        return None
    return str(Path(given).absolute()) if Path(given).exists() else given


@dataclasses.dataclass(frozen=True)
class Megatron:
    """A checkpoint of Megatron's, of any format.

    Attributes:
      path: Directory of the checkpoint.
      config: Config of the model.
    """

    path: Path
    config: DecoderConfig
    files: None = None

    def load_params(self, like: PyTree) -> PyTree:
        """Loads the weights like `like`."""
        with bytes_bar(f"loading {self.path}") as progress:
            return bridge.load_megatron(
                self.path, like, config=self.config, progress=progress
            )

    def lazy_params(self) -> PyTree:
        """Returns leaves that are read when they are written elsewhere."""
        return bridge.megatron.lazy_megatron(self.path, self.config)[0]

    def plan_import(self, like: PyTree | None) -> bridge.ImportPlan:
        """Returns the plan of `load_params`."""
        return bridge.megatron.plan_megatron(self.path, like, config=self.config)


@dataclasses.dataclass(frozen=True)
class RandomModel:
    """A model that starts from random weights, by its config.

    Attributes:
      config: Config of the model.
      files: Directory of the config, which may have a tokenizer.
    """

    config: DecoderConfig
    files: Path

    def load_params(self, like: PyTree) -> PyTree:
        """Raises a `ValueError`: there are no weights to load."""
        raise ValueError(f"'{self.files}' is used as a config: it has no weights.")

    def lazy_params(self) -> PyTree:
        """Raises a `ValueError`: there are no weights to read."""
        return self.load_params(None)


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """A step of `fsdp-jax train` or `fsdp-jax import`.

    Attributes:
      path: Directory of the run.
      step: Number of the step.
      config: Config of the model.
      metadata: Metadata of the step.
      files: Directory with the model's tokenizer; None if there is none.
      averaged: Whether its weights are the average that --ema made.
    """

    path: Path
    step: int
    config: DecoderConfig
    metadata: dict[str, Any]
    files: Path | None = None
    averaged: bool = False

    def load_params(self, like: PyTree) -> PyTree:
        """Loads the weights like `like`, in its dtypes; LoRA's factors merged in."""
        if adapter := adapter_of(self.metadata):
            return adapter.load_merged(self.path, self.step, like, self.config)
        return self._load(like, cast="floats")

    def load_params_as_stored(self, like: PyTree) -> PyTree:
        """Loads the weights like `like`, in the dtypes of the checkpoint.

        Weights with merged factors get the dtypes of the like.
        """
        if adapter_of(self.metadata):
            return self.load_params(like)
        return self._load(like, cast="as_stored")

    def _load(self, like: PyTree, cast: Literal["floats", "as_stored"]) -> PyTree:
        if self.averaged:
            load = fsdp.checkpoint.load_average
        else:
            load = fsdp.checkpoint.load_params
        return load(self.path, like, step=self.step, cast=cast)

    def lazy_params(self) -> PyTree:
        """Returns leaves that are read now, onto one device."""
        mesh = fsdp.make_mesh(devices=jax.devices()[:1])
        return self.load_params_as_stored(plan_decoder(self.config, mesh).params)


def _refuse_fields(path: Path, ignore_fields: Sequence[str]) -> None:
    if ignore_fields:
        raise ValueError(
            f"--ignore-field {' '.join(ignore_fields)}: '{path}' is a run, which has "
            "read its config.json. Leave it out."
        )


def open_any(
    model: str | Path,
    step: int | None = None,
    *,
    config: Path | None = None,
    ignore_fields: Sequence[str] = (),
) -> HuggingFace | Megatron | Checkpoint:
    """Opens a model or a checkpoint of any kind, which is detected.

    Args:
      model: Directory of Hugging Face, Megatron or fsdp-jax, a file of weights, or a
        hub id.
      step: Step of a checkpoint of fsdp-jax; None for the newest.
      config: Config to use instead of that of the model.
      ignore_fields: Fields of config.json to ignore although they are refused.

    Raises:
      ValueError: If it is none of them, or one that is not supported.
    """
    path = Path(model)
    if not (path / "config.json").is_file():
        if fsdp.latest_step(path) is not None:
            origin = open_language_model(path, step)
            if config is None:
                _refuse_fields(path, ignore_fields)
                return origin
            own = read_config(config, ignore_fields)
            return dataclasses.replace(origin, config=own)
        if bridge.megatron.is_megatron(path):
            return _open_megatron(path, step, config, ignore_fields)
        if path.is_dir() and not any(any(path.glob(p)) for p in _WEIGHTS):
            raise ValueError(
                f"No checkpoint at '{path}': the directory is neither a Hugging Face "
                "model (config.json) nor a Megatron checkpoint, and has no committed "
                "step."
            )
    _refuse_step(step, path)
    return open_hf(str(model), config, ignore_fields)


def read_config(source: Path, ignore_fields: Sequence[str] = ()) -> DecoderConfig:
    """Reads a config file, and says which of its fields are left out.

    Args:
      source: A config.json, or a directory with one.
      ignore_fields: Fields of config.json to ignore although they are refused.
    """
    config = bridge.from_hf_config(source, ignore_fields=ignore_fields)
    left_out = bridge.left_out_fields(source, ignore_fields=ignore_fields)
    if left_out:
        values = [textwrap.shorten(f"{k} = {v!r}", 60) for k, v in left_out.items()]
        say(
            f"left out: fields of config.json that {config.model_type} models do not "
            f"read: {', '.join(values)}"
        )
    return config


def _open_megatron(
    path: Path, step: int | None, config: Path | None, ignore_fields: Sequence[str]
) -> Megatron:
    _refuse_step(step, path)
    if config is not None:
        return Megatron(path, read_config(config, ignore_fields))
    args = bridge.megatron.open_megatron(path).args
    return Megatron(path, bridge.megatron.from_args(args))


def _refuse_step(step: int | None, path: Path) -> None:
    if step is not None:
        raise ValueError(f"--step {step}: '{path}' is a model, which has no steps.")


def open_hf(
    hf: str, config: Path | None = None, ignore_fields: Sequence[str] = ()
) -> HuggingFace:
    """Reads the config of a directory, a file or a hub id; headers and no weights.

    Args:
      hf: Directory, file or hub id of the model.
      config: Config to use; None for that beside the weights.
      ignore_fields: Fields of config.json to ignore although they are refused.

    Raises:
      ValueError: If it is not a checkpoint of a supported family.
    """
    path = bridge.resolve(hf)
    bridge.open_checkpoint(path)
    source = path if config is None else config
    return HuggingFace(path, read_config(source, ignore_fields))


def open_random(config: Path, ignore_fields: Sequence[str] = ()) -> RandomModel:
    """Reads the config of a model that starts from random weights.

    Args:
      config: A config.json, or a directory with one.
      ignore_fields: Fields of config.json to ignore although they are refused.

    Raises:
      ValueError: If there is no config of a supported family.
    """
    return RandomModel(read_config(config, ignore_fields), _directory_of(config))


def open_run(path: Path, step: int | None) -> Checkpoint:
    """Opens a step that training can resume from.

    Args:
      path: Directory given to `--save` of `fsdp-jax train` before.
      step: Step; None for the newest.

    Raises:
      ValueError: If there is no such step, or it was imported and never trained.
    """
    origin = open_checkpoint(path, step)
    trained = {"train", "data"} <= set(origin.metadata)
    if not trained and "optimizer" not in origin.metadata:
        raise ValueError(
            f"Step {origin.step} of '{path}' was imported, not trained: there is no "
            f"run to resume. Start from it with --hf {path}."
        )
    return origin


def open_checkpoint(path: Path, step: int | None) -> Checkpoint:
    """Reads the metadata of one step.

    Args:
      path: Directory that `fsdp-jax train` or `fsdp-jax import` saved to.
      step: Step; None for the newest.

    Raises:
      ValueError: If there is no such step, or another program saved it.
    """
    step = resolve_step(path, step)
    metadata = fsdp.checkpoint.load_metadata(path, step=step)
    if "config" not in metadata:
        raise ValueError(
            f"Step {step} of '{path}' was not saved by `fsdp-jax train`: its metadata "
            "has no config. Load it with fsdp_jax.load instead."
        )
    config = bridge.from_hf_config(metadata["config"])
    return Checkpoint(path, step, config, metadata, _carried_files(path, step))


def open_language_model(path: Path, step: int | None) -> Checkpoint:
    """Reads the metadata of a step of a model with logits, as `open_checkpoint` does.

    Args:
      path: Directory that `fsdp-jax train` or `fsdp-jax import` saved to.
      step: Step; None for the newest.

    Raises:
      ValueError: Also if the step is one of a reward model.
    """
    origin = open_checkpoint(path, step)
    if is_reward_model(origin.metadata):
        raise ValueError(
            f"Step {origin.step} of '{path}' is a reward model, with a score head and "
            "no logits: `fsdp-jax train --resume` goes on with it, `fsdp-jax export` "
            "writes it, and other commands do not read it."
        )
    return origin


def files_to_carry(origin: Origin) -> dict[str, list[Path]]:
    """Returns the files that are saved with a step, as for `fsdp_jax.save`."""
    if origin.files is None:
        return {}
    # Of a folder of templates, the folder.
    names = {file.parts[0] for file in find_sidecars(origin.files)}
    if not names:
        return {}
    # A run deletes old steps (--keep), and with them the one that it has resumed from.
    is_step = isinstance(origin, Checkpoint)
    folder = copy_for_process(origin.files) if is_step else origin.files
    return {TOKENIZER: [folder / name for name in sorted(names)]}


def _carried_files(path: Path, step: int) -> Path | None:
    _, manifest = open_step(path, step)
    if TOKENIZER not in names_of_files(manifest):
        return None
    return fsdp.checkpoint.load_files(path, TOKENIZER, step=step)


def _directory_of(model: Path) -> Path:
    return model if model.is_dir() else model.parent
