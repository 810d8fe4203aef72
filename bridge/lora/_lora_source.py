"""Reader of PEFT's LoRA adapters: factors by module, and full tensors.

Source: huggingface/peft src/peft/utils/save_and_load.py::get_peft_model_state_dict
"""

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path

from bridge.formats._source import Source
from bridge.formats._weight_files import open_checkpoint
from bridge.lora._lora_config import LoraConfig, read_lora_config

WEIGHTS_NAME = "adapter_model.safetensors"
BIN_NAME = "adapter_model.bin"
PREFIX = "base_model.model."
A_SUFFIX = ".lora_A.weight"
B_SUFFIX = ".lora_B.weight"
M_SUFFIX = ".lora_magnitude_vector"
"""Ending of the magnitudes of DoRA, a vector with a number for each output."""
_SUFFIXES = (A_SUFFIX, B_SUFFIX, M_SUFFIX)


@dataclasses.dataclass(frozen=True)
class LoraSource:
    """Opened LoRA adapter.

    Args:
      config: Config of the adapter: ranks and scales.
      source: Tensors of the adapter.
      modules: Paths of the adapted modules, as in the base model.
      whole: Names of tensors in the file that replace tensors of the base model, by
        the base model's names: biases and fully saved modules.
    """

    config: LoraConfig
    source: Source
    modules: tuple[str, ...]
    whole: Mapping[str, str]

    def suffixes(self) -> tuple[str, ...]:
        """Returns the endings of the tensors that each module has in the file."""
        return (A_SUFFIX, B_SUFFIX, *([M_SUFFIX] if self.config.use_dora else []))


def open_lora(path: str | os.PathLike[str]) -> LoraSource:
    """Opens an adapter saved by PEFT; reads config and headers only.

    Args:
      path: Directory with `adapter_config.json` and `adapter_model.safetensors`, or
        `adapter_model.bin` of older PEFT versions.

    Raises:
      FileNotFoundError: If a file is missing.
      ValueError: If the adapter is damaged, sets unsupported fields, or has factors
        that are missing or not of the config's rank.
    """
    config = read_lora_config(path)
    source = _open_weights(Path(path))
    names = [key.removeprefix(PREFIX) for key in source.keys()]
    modules = {
        name.removesuffix(suffix): None
        for name in names
        for suffix in _SUFFIXES
        if name.endswith(suffix)
    }
    whole = {
        name.replace(".base_layer.", "."): PREFIX + name
        for name in names
        if not name.endswith(_SUFFIXES)
    }
    wrong = [f"  {key} {why}" for key, why in _strange(source).items()]
    wrong += [line for module in modules for line in _misfits(module, config, source)]
    if wrong:
        raise ValueError(f"'{source.name}' is not a plain LoRA:\n" + "\n".join(wrong))
    return LoraSource(config, source, tuple(modules), whole)


def _open_weights(directory: Path) -> Source:
    if (directory / WEIGHTS_NAME).is_file() or not (directory / BIN_NAME).is_file():
        return open_checkpoint(directory / WEIGHTS_NAME)
    return open_checkpoint(directory / BIN_NAME)


def _strange(source: Source) -> dict[str, str]:
    """Returns the tensors that are not of a plain LoRA, each with what it is."""
    strange = {}
    for key in source.keys():
        if not key.startswith(PREFIX):
            strange[key] = f"is not a tensor of the model: it lacks '{PREFIX}'"
        elif "lora_embedding_" in key:
            strange[key] = "is a factor of an embedding: merge it with PEFT first"
        elif "lora_" in key and not key.endswith(_SUFFIXES):
            strange[key] = "is not a tensor of the model"
    return strange


def _misfits(module: str, config: LoraConfig, source: Source) -> list[str]:
    a, b, magnitude = (PREFIX + module + suffix for suffix in _SUFFIXES)
    wanted = (a, b, magnitude) if config.use_dora else (a, b)
    if absent := [key for key in wanted if key not in source.keys()]:
        return [f"  {absent[0]} is missing beside the others of its module"]
    if not config.use_dora and magnitude in source.keys():
        return [f"  {magnitude} is there, and the config has no use_dora"]
    shapes, rank = (source.shape(a), source.shape(b)), config.rank(module)
    if any(len(shape) != 2 for shape in shapes):
        return [f"  {module}: factors of shapes {shapes} are not matrices"]
    if shapes[0][0] != rank or shapes[1][1] != rank:
        return [f"  {module}: factors of shapes {shapes}, and the config's rank {rank}"]
    if config.use_dora and source.shape(magnitude) != shapes[1][:1]:
        sizes = source.shape(magnitude), shapes[1][0]
        return [f"  {magnitude}: shape {sizes[0]}, and {sizes[1]} outputs"]
    return []
