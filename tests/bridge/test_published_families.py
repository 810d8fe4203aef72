"""Files of every family under the names that they are published by."""

from __future__ import annotations

import dataclasses
import functools
import json
import re
from pathlib import Path

import numpy as np
import pytest
from helpers.errors import facts
from safetensors.numpy import save_file
from tiny_configs import FAMILIES as VARIANTS
from tiny_configs import hf_fields

import bridge
from bridge.families import FAMILIES
from bridge.hf._tied_head import table_of

# Whose layers share weights only if the head is tied.
TIED_ALONE = {"zamba", "zamba2", "zamba2-small"}


@functools.cache
def family_of(variant: str, tied: bool):
    """Returns a config, its tensors (zeros), and the name of the embedding."""
    fields = hf_fields(variant) | {"tie_word_embeddings": tied}
    said = fields | {"tie_word_embeddings": tied or variant in TIED_ALONE}
    config = bridge.from_hf_config(said)
    config = dataclasses.replace(config, tie_word_embeddings=tied)
    mapping = FAMILIES[config.model_type].mapping(config)
    tensors = {
        name: np.zeros(pieces[0].source_shape, np.float32)
        for name, pieces in mapping.by_source().items()
    }
    return fields, tensors, table_of(mapping)


def write(path: Path, tensors, fields) -> Path:
    path.mkdir(exist_ok=True)
    save_file(tensors, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(fields))
    return path


def leaves_of(path: Path) -> dict[str, tuple[int, ...]]:
    return {leaf.name: leaf.shape for leaf in bridge.plan(path).leaves}


def without_prefix(tensors, table: str):
    """Returns the tensors as the base model has them, and the heads as they are."""
    prefix = table.partition(".")[0] + "."
    return {key.removeprefix(prefix): array for key, array in tensors.items()}


# Heads that transformers does not tie.
UNTIED = dict.fromkeys(("gptj", "codegen", "dbrx", "mllama"), "tie_word_embeddings")
TIED = [variant for variant in VARIANTS if variant not in UNTIED]


@pytest.mark.parametrize("variant, field", UNTIED.items())
def test_a_head_of_its_own_is_not_tied(variant, field):
    with pytest.raises(ValueError, match=facts(field)):
        family_of(variant, True)


@pytest.mark.parametrize("variant", TIED)
def test_a_base_models_file_is_read_in_every_family(tmp_path, variant):
    fields, tensors, table = family_of(variant, True)
    want = leaves_of(write(tmp_path / "own", tensors, fields))
    base = write(tmp_path / "base", without_prefix(tensors, table), fields)
    assert leaves_of(base) == want and not bridge.plan(base).left_out


@pytest.mark.parametrize("variant", sorted(TIED_ALONE))
def test_a_head_beside_shared_layers_is_tied(variant):
    with pytest.raises(ValueError, match=facts("tie_word_embeddings", "False")):
        bridge.from_hf_config(hf_fields(variant, tie_word_embeddings=False))


@pytest.mark.parametrize("variant", [v for v in VARIANTS if v not in TIED_ALONE])
def test_an_untied_model_needs_its_head_in_every_family(tmp_path, variant):
    fields, tensors, table = family_of(variant, False)
    base = without_prefix(tensors, table)
    want = leaves_of(write(tmp_path / "own", tensors, fields))
    assert leaves_of(write(tmp_path / "base", base, fields)) == want
    for head in [key for key in tensors if key in base]:
        rest = {key: array for key, array in base.items() if key != head}
        with pytest.raises(ValueError, match=facts(head)):
            bridge.plan(write(tmp_path / "rest", rest, fields))


@pytest.mark.parametrize("variant", TIED)
def test_a_tied_file_may_hold_the_head_in_every_family(tmp_path, variant):
    fields, tensors, table = family_of(variant, True)
    want = leaves_of(write(tmp_path / "own", tensors, fields))
    (head,) = set(family_of(variant, False)[1]) - set(tensors)
    alone = {head if key == table else key: array for key, array in tensors.items()}
    assert leaves_of(write(tmp_path / "head", alone, fields)) == want
    both = write(tmp_path / "both", alone | {table: tensors[table]}, fields)
    assert leaves_of(both) == want and bridge.plan(both).left_out == (head,)
    other = {head: tensors[table] + 1, table: tensors[table]}
    with pytest.raises(ValueError, match=facts(head, table)):
        bridge.plan(write(tmp_path / "other", alone | other, fields))


# Of old files: rotary frequencies and what masks the future.
BUFFERS = ("rotary_emb.inv_freq", "rotary_emb.cos_cached", "masked_bias")
# Families whose attention kept the mask itself: the name of its module.
MASKS = {
    **dict.fromkeys(("gpt2", "gptj", "gpt_bigcode", "openai-gpt"), "attn"),
    "gpt_neox": "attention",
}


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("base", [False, True], ids=["head", "base"])
def test_buffers_are_left_out_in_every_family(tmp_path, variant, base):
    fields, tensors, table = family_of(variant, variant in TIED_ALONE)
    in_layer = re.compile(r".*\b(layers|h|blocks)\.0(?=\.)")
    layer = next(found[0] for key in tensors if (found := in_layer.match(key)))
    module = MASKS.get(fields["model_type"], "self_attn")
    names = [f"{layer}.{module}.{name}" for name in BUFFERS]
    names += [f"{layer}.{module}.bias"] * (fields["model_type"] in MASKS)
    names += [f"{table.partition('.')[0]}.rotary_emb.inv_freq"]
    extra = {name: np.zeros(3, np.float32) for name in names}
    extra["embeddings.position_ids"] = np.zeros(3, np.int64)
    if base:
        tensors, extra = (without_prefix(t, table) for t in (tensors, extra))
    path = write(tmp_path / "in", tensors | extra, fields)
    assert len(bridge.plan(path).left_out) == len(extra)
