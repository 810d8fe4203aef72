"""A Hugging Face checkpoint: its config and its tensors, decoded if need be."""

import os

from bridge.formats._block_scaled import decode_block_scaled
from bridge.formats._source import Source, open_checkpoint
from bridge.hf._config import find_family, from_hf_config, read_config_file
from bridge.models import DecoderConfig
from bridge.rules._mapping import Mapping
from bridge.streaming._lazy import LazyLeaf, lazy_tree


def lazy_hf(
    path: str | os.PathLike[str], config: DecoderConfig | None = None
) -> tuple[dict[str, LazyLeaf], DecoderConfig]:
    """Opens a checkpoint as a tree of which nothing is read yet, to be saved elsewhere.

    ```python
    tree, config = bridge.lazy_hf("mixtral")
    bridge.save_megatron("megatron", tree, config)  # a few tensors in memory
    ```

    Args:
      path: As for `load_hf`.
      config: As for `load_hf`.

    Returns:
      Leaves by dotted path, and the model.

    Raises:
      FileNotFoundError: If there is no checkpoint, or no config.
      ValueError: If the checkpoint is damaged, its family not supported, or the two do
        not fit.
    """
    source, config, mapping = open_hf(path, config)
    return lazy_tree(source, mapping), config


def open_hf(
    path: str | os.PathLike[str], config: DecoderConfig | None = None
) -> tuple[Source, DecoderConfig, Mapping]:
    """Opens a checkpoint and finds the rules that it follows; reads headers only.

    Args:
      path: A directory with `config.json` and safetensors files, or one such file.
      config: The model; None reads `config.json`. A file that stands alone, without
        one, is taken to hold plain numbers.

    Returns:
      The tensors (block-scaled ones as the bfloat16 they stand for), the model, and
      the mapping between the two.

    Raises:
      FileNotFoundError: If there is no checkpoint, or no config.
      ValueError: If the checkpoint is damaged, or its family not supported.
    """
    source = open_checkpoint(path)
    try:
        fields = read_config_file(path)
    except FileNotFoundError:
        if config is None:
            raise
        fields = {}
    config = config or from_hf_config(fields)
    source = decode_block_scaled(source, fields.get("quantization_config"))
    mapping = find_family(config.model_type).mapping_for(config, source.keys())
    return source, config, mapping
