"""A Hugging Face checkpoint: its config and its tensors, decoded if need be."""

import os
import warnings

from bridge.families._family import FURTHER, STALE
from bridge.formats._source import Source
from bridge.formats._torch_dtypes import DTYPES
from bridge.formats._weight_files import open_checkpoint
from bridge.formats.quantized._decode import decode_quantized
from bridge.hf._config import find_family, from_hf_config
from bridge.hf._config_file import read_config_file
from bridge.hf._copies import check_copies
from bridge.hf._published_names import (
    FamilyNames,
    describe,
    family_names,
    nearest_mapping,
)
from bridge.hf._text_part import is_multimodal, quantization_of
from bridge.hf._tied_head import check_tied_head, head_of
from bridge.models import DecoderConfig
from bridge.rules._mapping import Mapping, is_ignored
from bridge.streaming._lazy import LazyLeaf, lazy_tree


def lazy_hf(
    path: str | os.PathLike[str], config: DecoderConfig | None = None
) -> tuple[dict[str, LazyLeaf], DecoderConfig]:
    """Opens a checkpoint as a tree whose leaves are read when they are saved.

    So a checkpoint is converted with a few tensors in memory.

    Args:
      path: Checkpoint, as `load_hf` takes it.
      config: Config of the decoder, as `load_hf` takes it.

    Returns:
      Leaves by dotted path, and the config of the decoder.

    Raises:
      FileNotFoundError: If there is no checkpoint, or no config.
      ValueError: If the checkpoint is damaged, its family not supported, or the two do
        not fit.

    Examples:
      >>> tree, config = bridge.lazy_hf("small-llama")
      >>> tree["norm.scale"].shape
      (16,)
      >>> bridge.save_megatron(path, tree, config)
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
      path: A directory with `config.json` and files as `open_checkpoint` takes them,
        or one such file.
      config: The model; None reads `config.json`. A file that stands alone, without
        one, is taken to hold plain numbers.

    Returns:
      The tensors (quantized ones decoded, to the config's dtype), the model, and the
      mapping between the two.

    Raises:
      FileNotFoundError: If there is no checkpoint, or no config.
      ValueError: If the checkpoint is damaged, its family not supported, or the config
        ties an output projection, or shares weights between layers, that are stored
        with other values.
    """
    source = open_checkpoint(path)
    try:
        fields = read_config_file(path)
    except FileNotFoundError:
        if config is None:
            raise
        fields = {}
    config = config or from_hf_config(fields)
    stored = decode_quantized(source, quantization_of(fields), DTYPES[config.dtype])
    family = find_family(config.model_type)
    multimodal, ways = is_multimodal(fields), family.mappings(config)
    named = family_names(
        stored,
        nearest_mapping(stored.keys(), ways, config, multimodal=multimodal),
        config,
        multimodal=multimodal,
        quantized=stored is not source,
    )
    _warn_of_other_tensors(stored, named)
    source = named.source
    mapping = family.mapping_for(config, source.keys(), source.shape)
    if config.tie_word_embeddings:
        check_tied_head(source, mapping, config)
    check_copies(source, family.copies(config))
    _warn_of_left_out(source, mapping, config)
    return source, config, mapping


def _warn_of_other_tensors(source: Source, named: FamilyNames) -> None:
    """Says which tensors belong to another part of the model, or to none."""
    for keys, reason in (
        (named.other_parts, "They are not part of the text model"),
        (named.zero_biases, "They are biases that the model does not have, all zero"),
    ):
        if keys:
            warnings.warn(
                f"'{source.name}' holds {describe(source, keys)}. {reason}: they are "
                "left out.",
                stacklevel=4,
            )


def _warn_of_left_out(source: Source, mapping: Mapping, config: DecoderConfig) -> None:
    """Says which layers of the checkpoint the model does not have."""
    announced = find_family(config.model_type).left_out
    silent = (head_of(config), *STALE)
    left_out = [
        key
        for key in source.keys()
        if is_ignored(key, mapping.ignore if announced else FURTHER)
        and not is_ignored(key, silent)
    ]
    if left_out:
        fields = ", ".join(f"{name} = {value}" for name, value in announced.items())
        export = f"; an export says {fields}" if fields else ""
        further = all(is_ignored(key, FURTHER) for key in left_out)
        which = "predict further tokens" if further else "are not modelled"
        warnings.warn(
            f"'{source.name}' holds {len(left_out)} tensors of layers that {which}, "
            f"from '{left_out[0]}' on. They are left out{export}.",
            stacklevel=4,
        )
