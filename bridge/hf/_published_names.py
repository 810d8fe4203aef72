"""Tensor names as they are published, and the names of the family's own checkpoints.

A base model's file lacks the prefix of the model with a head; a multimodal model's has
a longer one; a file of a tied model may hold the output projection in the place of the
embedding.
"""

import collections
import dataclasses
import math
from collections.abc import Collection, Iterable, Mapping
from types import MappingProxyType

import numpy as np

from bridge.formats._source import SafetensorsSource, Source
from bridge.hf._tied_head import head_of, table_of
from bridge.models import DecoderConfig
from bridge.rules._mapping import Mapping as WeightMapping


@dataclasses.dataclass(frozen=True)
class FamilyNames:
    """A checkpoint under the names of its family.

    Args:
      source: The checkpoint, its tensors renamed.
      other_parts: Published names of tensors of other parts than the text part.
      zero_biases: Published names of biases that the model does not have, all zero.
    """

    source: Source
    other_parts: tuple[str, ...] = ()
    zero_biases: tuple[str, ...] = ()


def family_names(
    source: Source,
    mapping: WeightMapping,
    config: DecoderConfig,
    *,
    multimodal: bool = False,
    quantized: bool = False,
) -> FamilyNames:
    """Renames the tensors of a checkpoint as its family names them.

    Args:
      source: Checkpoint under any of the published names.
      mapping: Rules of the model.
      config: The model.
      multimodal: Whether tensors of other parts than the text part are left out.
      quantized: Whether biases that the model does not have are left out if they are
        zero: AutoGPTQ writes them beside every weight.

    Returns:
      The checkpoint; `source` itself if it has the family's names already.

    Raises:
      ValueError: If two tensors have the same name in the family.
    """
    keys, expected = source.keys(), mapping.by_source()
    names = names_in_family(keys, mapping, config, multimodal=multimodal)
    if config.tie_word_embeddings:
        _name_embedding(names, head_of(config), table_of(mapping))
    _check_unique(source, names)
    zero = [
        key
        for key, name in names.items()
        if quantized and _is_zero_bias(source, key, name, expected)
    ]
    kept = {name: key for key, name in names.items() if key not in zero}
    others = tuple(key for key in keys if key not in names)
    if not zero and not others and all(name == key for name, key in kept.items()):
        return FamilyNames(source)
    return FamilyNames(renamed(source, kept), others, tuple(zero))


def nearest_mapping(
    keys: Collection[str],
    mappings: Collection[WeightMapping],
    config: DecoderConfig,
    *,
    multimodal: bool = False,
) -> WeightMapping:
    """Returns the mapping whose names are the most like the published ones.

    Args:
      keys: Published names of all tensors of a model.
      mappings: The ways in which the family names its tensors.
      config: The model.
      multimodal: Whether names of other parts than the text part are left out.
    """

    def unlike(mapping: WeightMapping) -> tuple[int, ...]:
        expected = mapping.by_source().keys()
        found = names_in_family(keys, mapping, config, multimodal=multimodal)
        names = set(found.values())
        known = len(names & expected)
        # What the file has weighs more: adapters have a part of the names, and of a
        # multimodal model names that are not known count for nothing.
        missing = len(expected - names), len({*keys} ^ expected)
        return -known, len(names - expected), *(missing if known else ())

    return min(mappings, key=unlike)


def names_in_family(
    keys: Iterable[str],
    mapping: WeightMapping,
    config: DecoderConfig,
    *,
    multimodal: bool = False,
) -> dict[str, str]:
    """Returns the family's name of each published name.

    Args:
      keys: Published names of tensors, all of a model or some.
      mapping: Rules of the model.
      config: The model.
      multimodal: Whether names of other parts than the text part are left out; they
        keep their names else.
    """
    expected, head, table = mapping.by_source(), head_of(config), table_of(mapping)
    if root := _root(expected, table):
        return _with_root(tuple(keys), expected, root, head, multimodal)
    return {key: key for key in keys}


def _root(expected: Collection[str], table: str) -> str:
    """Returns what precedes the names of a base model in a family; may be empty.

    `model.` in most: what the embedding has in common with most tensors.
    """
    root = table.partition(".")[0] + "."
    return (
        root
        if 2 * sum(key.startswith(root) for key in expected) > len(expected)
        else ""
    )


def _with_root(
    keys: Iterable[str],
    expected: Collection[str],
    root: str,
    head: str,
    multimodal: bool,
) -> dict[str, str]:
    """Returns the family's name of each published name that belongs to the text."""
    inside = {key.removeprefix(root) for key in expected if key.startswith(root)}
    modules = {name.partition(".")[0] for name in inside}
    prefix = _prefix(keys, inside, root)
    heads = {head, prefix.removesuffix(root) + head, prefix + head}
    names = {}
    for key in keys:
        rest = key.removeprefix(prefix)
        if key in heads and rest not in inside:
            names[key] = head
        elif key.startswith(prefix) and rest.partition(".")[0] in modules:
            names[key] = root + rest
        elif not multimodal:
            names[key] = key
    return names


def _prefix(keys: Iterable[str], inside: Collection[str], root: str) -> str:
    """Returns what precedes the family's names in the most published names."""
    counts: collections.Counter[str] = collections.Counter({root: 0})
    for key in keys:
        parts = key.split(".")
        for i in range(len(parts)):
            if ".".join(parts[i:]) in inside:
                counts["".join(f"{part}." for part in parts[:i])] += 1
    return counts.most_common(1)[0][0]


def _name_embedding(names: dict[str, str], head: str, table: str) -> None:
    """Names the output projection of a tied model that has no embedding."""
    if table not in names.values():
        for key, name in names.items():
            if name == head:
                names[key] = table


def _check_unique(source: Source, names: Mapping[str, str]) -> None:
    published: dict[str, list[str]] = collections.defaultdict(list)
    for key, name in names.items():
        published[name].append(key)
    twice = [f"  {', '.join(keys)}" for keys in published.values() if len(keys) > 1]
    if twice:
        raise ValueError(
            f"'{source.name}' holds tensors twice, under several names:\n"
            + "\n".join(twice)
        )


def _is_zero_bias(
    source: Source, key: str, name: str, expected: Collection[str]
) -> bool:
    weight = name.removesuffix(".bias") + ".weight"
    unknown = name.endswith(".bias") and name not in expected and weight in expected
    return unknown and not np.any(source.read(key))


def renamed(source: Source, names: Mapping[str, str]) -> Source:
    """Returns a source of some tensors of another one, under other names.

    Args:
      source: The other one.
      names: Its name of each tensor, by the name that the tensor gets.
    """
    if isinstance(source, SafetensorsSource):
        tensors = {name: source.tensors[key] for name, key in names.items()}
        return dataclasses.replace(source, tensors=MappingProxyType(tensors))
    return _RenamedSource(source, names)


@dataclasses.dataclass(frozen=True)
class _RenamedSource:
    """Source of some tensors of another one, under other names."""

    source: Source
    names: Mapping[str, str]

    @property
    def name(self) -> str:
        return self.source.name

    def keys(self) -> tuple[str, ...]:
        return tuple(self.names)

    def shape(self, key: str) -> tuple[int, ...]:
        return self.source.shape(self.names[key])

    def dtype(self, key: str) -> np.dtype:
        return self.source.dtype(self.names[key])

    def read(self, key: str, slices: tuple[slice, ...] = ()) -> np.ndarray:
        return self.source.read(self.names[key], slices)


def describe(source: Source, keys: tuple[str, ...]) -> str:
    """Describes tensors in a line: how many, of how many bytes, of which parts.

    Args:
      source: Source of the tensors.
      keys: Their names.
    """
    nbytes = sum(math.prod(source.shape(k)) * source.dtype(k).itemsize for k in keys)
    parts = dict.fromkeys(".".join(key.split(".")[:2]) for key in keys)
    shown = ", ".join(list(parts)[:4]) + ", ..." * (len(parts) > 4)
    return f"{len(keys):,} tensors ({nbytes:,} bytes) of {shown}"
