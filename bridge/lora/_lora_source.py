"""Reader of PEFT's LoRA adapters: factors by module, and full tensors.

Source: huggingface/peft src/peft/utils/save_and_load.py::get_peft_model_state_dict
"""

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path

from bridge.formats._source import Source, open_checkpoint
from bridge.formats._torch_zip import open_torch_file
from bridge.lora._lora_config import LoraConfig, read_lora_config

WEIGHTS_NAME = "adapter_model.safetensors"
BIN_NAME = "adapter_model.bin"
PREFIX = "base_model.model."
A_SUFFIX = ".lora_A.weight"
B_SUFFIX = ".lora_B.weight"


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
        for suffix in (A_SUFFIX, B_SUFFIX)
        if name.endswith(suffix)
    }
    whole = {
        name.replace(".base_layer.", "."): PREFIX + name
        for name in names
        if not name.endswith((A_SUFFIX, B_SUFFIX))
    }
    wrong = [f"  {key} is not a tensor of the model" for key in _strange(source)]
    wrong += [line for module in modules for line in _misfits(module, config, source)]
    if wrong:
        raise ValueError(f"'{source.name}' is not a plain LoRA:\n" + "\n".join(wrong))
    return LoraSource(config, source, tuple(modules), whole)


def _open_weights(directory: Path) -> Source:
    if (directory / WEIGHTS_NAME).is_file() or not (directory / BIN_NAME).is_file():
        return open_checkpoint(directory / WEIGHTS_NAME)
    return open_torch_file(directory / BIN_NAME)


def _strange(source: Source) -> list[str]:
    plain = (A_SUFFIX, B_SUFFIX)
    return [
        key
        for key in source.keys()
        if not key.startswith(PREFIX) or ("lora_" in key and not key.endswith(plain))
    ]


def _misfits(module: str, config: LoraConfig, source: Source) -> list[str]:
    a, b = (PREFIX + module + suffix for suffix in (A_SUFFIX, B_SUFFIX))
    if absent := [key for key in (a, b) if key not in source.keys()]:
        return [f"  {absent[0]} is missing beside its other factor"]
    shapes, rank = (source.shape(a), source.shape(b)), config.rank(module)
    if any(len(shape) != 2 for shape in shapes):
        return [f"  {module}: factors of shapes {shapes} are not matrices"]
    if shapes[0][0] != rank or shapes[1][1] != rank:
        return [f"  {module}: factors of shapes {shapes}, and the config's rank {rank}"]
    return []
