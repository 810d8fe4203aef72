"""A Hugging Face checkpoint: its config and its tensors, decoded if need be."""

import os
import warnings

from bridge.formats._source import Source, open_checkpoint
from bridge.formats._torch_dtypes import DTYPES
from bridge.formats.quantized._decode import decode_quantized
from bridge.hf._config import find_family, from_hf_config, read_config_file
from bridge.hf._tied_head import TIED_HEAD, check_tied_head
from bridge.models import DecoderConfig
from bridge.rules._mapping import Mapping, is_ignored
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
    """Opens a checkpoint and finds the rules that it follows.

    Only headers are read, and of a tied model that stores its output projection all the
    same, that and the embedding.

    Args:
      path: A directory with `config.json` and safetensors files, or one such file.
      config: The model; None reads `config.json`. A file that stands alone, without
        one, is taken to hold plain numbers.

    Returns:
      The tensors (quantized ones decoded, to the config's dtype), the model, and the
      mapping between the two.

    Raises:
      FileNotFoundError: If there is no checkpoint, or no config.
      ValueError: If the checkpoint is damaged, its family not supported, or the config
        ties an output projection that is stored with other values.
    """
    source = open_checkpoint(path)
    try:
        fields = read_config_file(path)
    except FileNotFoundError:
        if config is None:
            raise
        fields = {}
    config = config or from_hf_config(fields)
    dtype = DTYPES[config.dtype]
    source = decode_quantized(source, fields.get("quantization_config"), dtype)
    mapping = find_family(config.model_type).mapping_for(config, source.keys())
    if config.tie_word_embeddings:
        check_tied_head(source, mapping)
    _warn_of_left_out(source, mapping, config)
    return source, config, mapping


def _warn_of_left_out(source: Source, mapping: Mapping, config: DecoderConfig) -> None:
    """Says which layers of the checkpoint the model does not have."""
    announced = find_family(config.model_type).left_out
    left_out = [
        key
        for key in source.keys()
        if announced and key != TIED_HEAD and is_ignored(key, mapping.ignore)
    ]
    if left_out:
        fields = ", ".join(f"{name} = {value}" for name, value in announced.items())
        warnings.warn(
            f"'{source.name}' holds {len(left_out)} tensors of layers that predict "
            f"further tokens, from '{left_out[0]}' on. They are not modelled and left "
            f"out; an export says {fields}.",
            stacklevel=4,
        )
