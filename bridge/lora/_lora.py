"""Unmerged LoRA: conversion between a PEFT adapter and a tree beside the weights."""

import dataclasses
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from bridge._local_path import check_local
from bridge._new_directory import new_directory
from bridge.formats._safetensors import encode_header
from bridge.hf._config import find_family
from bridge.lora._lora_config import CONFIG_NAME, LoraConfig
from bridge.lora._lora_names import in_family
from bridge.lora._lora_rules import A_LEAF, B_LEAF, Adapted, adapted_weights
from bridge.lora._lora_source import WEIGHTS_NAME, open_lora
from bridge.models import DecoderConfig
from bridge.pytorch._back import follow_back
from bridge.rules._mapping import Mapping as WeightMapping
from bridge.streaming._load import load


@dataclasses.dataclass(frozen=True)
class Lora:
    """Factors of an adapter, in the layout of the weights they adapt.

    The weight at `path` becomes `w + scale * tensordot(lora_a, lora_b, 1)`; layers
    that are stacked in `w` are stacked in the factors and in the scale.

    Args:
      config: Config of the adapter: ranks and scales.
      factors: Factors `{"lora_a": [..., in, rank], "lora_b": [..., rank, out]}` by path
        of the weight, where in and out are the dims of the weight.
      scales: Scales by path of the weight: one per stacked layer, or a 0-d array
        without stacked dims.

    Examples:
      >>> {path: scale.tolist() for path, scale in adapter.scales.items()}
      {'layers.self_attn.q_proj.kernel': [2.0, 2.0]}
    """

    config: LoraConfig
    factors: Mapping[str, Mapping[str, Any]]
    scales: Mapping[str, np.ndarray]


def load_lora(path: str | os.PathLike[str], config: DecoderConfig) -> Lora:
    """Loads a PEFT adapter as a tree beside the weights.

    Args:
      path: Directory saved by PEFT.
      config: Config of the base model.

    Returns:
      Factors in their stored dtype, on the default device.

    Raises:
      FileNotFoundError: If a file is missing.
      ValueError: If the adapter is not supported or not of this model, if it saves
        full tensors, or if layers stacked in the tree are not all adapted with the
        same rank.

    Examples:
      >>> bridge.save_lora(path, adapter, config)
      >>> loaded = bridge.load_lora(path, config)
      >>> loaded.factors["layers.self_attn.q_proj.kernel"]["lora_a"].shape
      (2, 16, 4)
    """
    opened = open_lora(path)
    family = find_family(config.model_type)
    adapter = in_family(opened, family.mapping(config), config)
    if adapter.config.use_dora:
        raise ValueError(
            f"'{path}' has use_dora=True: its magnitudes scale the base weights too. "
            "bridge.load_hf_with_lora merges it into them."
        )
    if adapter.whole:
        raise ValueError(
            f"'{path}' saves whole tensors beside its factors; `load_hf_with_lora` "
            f"puts them in their places: {', '.join(adapter.whole)}."
        )
    keys = tuple(f"{module}.weight" for module in adapter.modules)
    base = family.mapping_for(config, keys)
    transposed = family.fan_in_fan_out
    weights = adapted_weights(base, adapter.modules, transposed=transposed)
    mapping = _mapping(weights, base, adapter.config)
    like = {
        leaf: jax.ShapeDtypeStruct(
            parts[0].destination_shape, adapter.source.dtype(parts[0].source)
        )
        for leaf, parts in mapping.by_destination().items()
    }
    arrays = load(adapter.source, mapping, like)
    factors = {
        weight.leaf: {
            name: arrays[f"{weight.leaf}.{name}"] for name in (A_LEAF, B_LEAF)
        }
        for weight in weights
    }
    return Lora(adapter.config, factors, _scales(adapter.config, weights))


def save_lora(path: str | os.PathLike[str], lora: Lora, config: DecoderConfig) -> None:
    """Saves an adapter in PEFT's format: the bit-exact inverse of `load_lora`.

    Args:
      path: Directory that does not exist yet, or is empty.
      lora: Factors, trained or as loaded.
      config: Config of the base model.

    Raises:
      ValueError: If `path` is not empty, the factors are not of this model, or their
        ranks differ from their config's. Nothing is then written.

    Examples:
      >>> bridge.save_lora(path, adapter, config)
      >>> bridge.load_lora(path, config).config.r
      4
    """
    check_local(path)
    path = Path(path)
    if path.exists() and not (path.is_dir() and not any(path.iterdir())):
        raise ValueError(f"Cannot save to '{path}': it is not an empty directory.")
    family = find_family(config.model_type)
    base, transposed = family.adapter_mapping(config), family.fan_in_fan_out
    modules = _modules(lora, base)
    weights = adapted_weights(base, modules, transposed=transposed)
    leaves = {
        f"{leaf}.{name}": np.asarray(array)
        for leaf, pair in lora.factors.items()
        for name, array in pair.items()
    }
    mapping = _mapping(weights, base, lora.config)
    mapping.check(
        {name: jax.ShapeDtypeStruct(a.shape, a.dtype) for name, a in leaves.items()}
    )
    _write(path, follow_back(mapping, leaves), lora.config.to_json(modules))


def _modules(lora: Lora, base: WeightMapping) -> list[str]:
    """Returns the modules whose weights have factors."""
    pieces = base.by_destination()
    if unknown := [leaf for leaf in lora.factors if leaf not in pieces]:
        raise ValueError(f"The model has no weights {', '.join(unknown)}.")
    return [
        piece.source.removesuffix(".weight")
        for leaf in lora.factors
        for piece in pieces[leaf]
    ]


def _scales(config: LoraConfig, weights: tuple[Adapted, ...]) -> dict[str, np.ndarray]:
    return {
        weight.leaf: np.array(
            [config.scale(module) for module in weight.modules], np.float32
        ).reshape(weight.stacked)
        for weight in weights
    }


def _mapping(
    weights: tuple[Adapted, ...], base: WeightMapping, config: LoraConfig
) -> WeightMapping:
    rules, sizes, wrong = [], dict(base.sizes), []
    for number, weight in enumerate(weights):
        ranks = sorted({config.rank(module) for module in weight.modules})
        if len(ranks) > 1:
            wrong.append(f"  {weight.leaf}: ranks {ranks} in layers that are stacked")
        sizes[f"lora_rank{number}"] = ranks[0]
        rules += weight.factor_rules(f"lora_rank{number}")
    if wrong:
        raise ValueError(
            "The factors cannot be kept beside the weights (merging them may do):\n"
            + "\n".join(wrong)
        )
    return WeightMapping(tuple(rules), sizes)


def _write(path: Path, tensors: dict[str, np.ndarray], fields: dict[str, Any]) -> None:
    # Widest dtype first: every tensor then starts at a multiple of its itemsize.
    tensors = dict(sorted(tensors.items(), key=lambda item: -item[1].itemsize))
    with new_directory(path) as directory:
        with (directory / WEIGHTS_NAME).open("wb") as stream:
            entries = {key: (a.shape, a.dtype) for key, a in tensors.items()}
            stream.write(encode_header(entries))
            for array in tensors.values():
                stream.write(np.ascontiguousarray(array).view(np.uint8).data)
        text = json.dumps(fields, indent=2) + "\n"
        (directory / CONFIG_NAME).write_text(text, encoding="utf-8")
