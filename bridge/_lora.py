"""LoRA, kept apart: an adapter of PEFT as a tree beside the weights, and back."""

import dataclasses
import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from bridge._back import follow_back
from bridge._config import find_family
from bridge._load import load
from bridge._lora_config import CONFIG_NAME, LoraConfig
from bridge._lora_rules import (
    A_LEAF,
    B_LEAF,
    adapted_rules,
    expand,
    factor_rules,
    stem_of,
)
from bridge._lora_source import A_SUFFIX, PREFIX, WEIGHTS_NAME, LoraSource, open_lora
from bridge._mapping import Mapping as WeightMapping
from bridge._rules import Rule
from bridge._safetensors import encode_header
from bridge.models import DecoderConfig


@dataclasses.dataclass(frozen=True)
class Lora:
    """The factors of an adapter, laid out like the weights they adapt.

    The weight at `path` becomes `w + scale * tensordot(lora_a, lora_b, 1)`; layers
    that are stacked in `w` are stacked in the factors and in the scale.

    Args:
      config: How the factors are scaled.
      factors: By path of the weight, `{"lora_a": [..., in, rank], "lora_b": [..., rank,
        out]}`, where in and out are the dims of the weight.
      scales: By path, one number for each stacked layer; no dim where none is.
    """

    config: LoraConfig
    factors: Mapping[str, Mapping[str, Any]]
    scales: Mapping[str, np.ndarray]


def load_lora(path: str | os.PathLike[str], config: DecoderConfig) -> Lora:
    """Reads an adapter of PEFT as a tree beside the weights.

    Args:
      path: A directory that PEFT saved.
      config: The base model.

    Returns:
      The factors, in their own dtype, on the default device.

    Raises:
      FileNotFoundError: If a file is not there.
      ValueError: If the adapter is none that is modelled, or not of this model; if it
        saves tensors whole; or if layers stacked in the tree are not adapted alike.
    """
    adapter = open_lora(path)
    if adapter.whole:
        raise ValueError(
            f"'{path}' saves whole tensors beside its factors; `load_hf_with_lora` "
            f"puts them in their places: {', '.join(adapter.whole)}."
        )
    base = find_family(config.model_type).mapping(config)
    rules = adapted_rules(base, adapter.modules)
    mapping = _mapping(rules, base, {r.sources: _rank(r, base, adapter) for r in rules})
    mould = {
        leaf: jax.ShapeDtypeStruct(
            parts[0].destination_shape, adapter.source.dtype(parts[0].source)
        )
        for leaf, parts in mapping.by_destination().items()
    }
    arrays = load(adapter.source, mapping, mould)
    factors = {
        path: {name: arrays[f"{path}.{name}"] for name in (A_LEAF, B_LEAF)}
        for path in (rule.destinations[0] for rule in rules)
    }
    return Lora(adapter.config, factors, scales_of(adapter.config, rules, base))


def save_lora(path: str | os.PathLike[str], lora: Lora, config: DecoderConfig) -> None:
    """Writes an adapter as PEFT does: bit by bit what `load_lora` read.

    Args:
      path: A directory that does not exist yet, or is empty.
      lora: The factors, trained or as they were read.
      config: The base model.

    Raises:
      ValueError: If `path` is taken, or the factors are not of this model or not of
        the ranks that their config says; nothing is written.
    """
    path = Path(path)
    if path.exists() and not (path.is_dir() and not any(path.iterdir())):
        raise ValueError(f"Cannot save to '{path}': it is no empty directory.")
    base = find_family(config.model_type).mapping(config)
    by_leaf = {rule.destinations: rule for rule in base.rules}
    if unknown := [leaf for leaf in lora.factors if (leaf,) not in by_leaf]:
        raise ValueError(f"The model has no weights {', '.join(unknown)}.")
    rules = tuple(by_leaf[leaf,] for leaf in lora.factors)
    ranks = {rule.sources: _config_rank(rule, base, lora.config) for rule in rules}
    leaves = {
        f"{leaf}.{name}": np.asarray(array)
        for leaf, pair in lora.factors.items()
        for name, array in pair.items()
    }
    mapping = _mapping(rules, base, ranks)
    shapes = {name: jax.ShapeDtypeStruct(a.shape, a.dtype) for name, a in leaves.items()}
    mapping.check(shapes)
    modules = [name for rule in rules for name in expand(stem_of(rule), base.sizes)]
    fields = lora.config.to_json(modules)
    _write(path, follow_back(mapping, leaves), fields)


def scales_of(
    config: LoraConfig, rules: tuple[Rule, ...], base: WeightMapping
) -> dict[str, np.ndarray]:
    """Returns the scale of each weight, by path, stacked like its layers."""
    scales = {}
    for rule in rules:
        names = expand(stem_of(rule), base.sizes)
        shape = next(
            piece.destination_shape[: len(piece.destination_box) - _num_dims(rule)]
            for piece in rule.pieces(base.sizes)
        )
        found = np.array([config.scale(name) for name in names], np.float32)
        scales[rule.destinations[0]] = found.reshape(shape)
    return scales


def _num_dims(rule: Rule) -> int:
    return len(rule.layouts[0].destination)


def _mapping(
    rules: tuple[Rule, ...], base: WeightMapping, ranks: Mapping[Any, int]
) -> WeightMapping:
    factors, sizes = factor_rules(rules, lambda rule: ranks[rule.sources])
    return WeightMapping(factors, {**base.sizes, **sizes})


def _rank(rule: Rule, base: WeightMapping, adapter: LoraSource) -> int:
    names = expand(stem_of(rule), base.sizes)
    ranks = {adapter.source.shape(PREFIX + name + A_SUFFIX)[0] for name in names}
    return _same(rule, ranks)


def _config_rank(rule: Rule, base: WeightMapping, config: LoraConfig) -> int:
    names = expand(stem_of(rule), base.sizes)
    return _same(rule, {config.rank(name) for name in names})


def _same(rule: Rule, ranks: set[int]) -> int:
    if len(ranks) > 1:
        raise ValueError(
            f"{stem_of(rule)}: layers stacked in the tree have factors of the ranks "
            f"{sorted(ranks)}, which do not stack. Merge them instead."
        )
    return ranks.pop()


def _write(path: Path, tensors: dict[str, np.ndarray], fields: dict[str, Any]) -> None:
    # Widest first: every tensor then starts at a multiple of its item size.
    tensors = dict(sorted(tensors.items(), key=lambda item: -item[1].itemsize))
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.name}.") as temp:
        # Not the temporary directory itself: that one is closed to other users.
        directory = Path(temp) / "adapter"
        directory.mkdir()
        with (directory / WEIGHTS_NAME).open("wb") as stream:
            entries = {key: (a.shape, a.dtype) for key, a in tensors.items()}
            stream.write(encode_header(entries))
            for array in tensors.values():
                stream.write(np.ascontiguousarray(array).view(np.uint8).data)
        text = json.dumps(fields, indent=2) + "\n"
        (directory / CONFIG_NAME).write_text(text, encoding="utf-8")
        directory.rename(path)
