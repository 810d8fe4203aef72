"""Layers of several kinds repeat in blocks, each of which is one loop."""

import dataclasses
import random

import pytest
from helpers.errors import facts
from tiny_configs import VARIANTS, hf_fields

import bridge
from bridge.models import LayerKind
from bridge.models._layer_kinds import layer_blocks

KINDS = {
    "A": LayerKind(),
    "S": LayerKind(channels="sparse"),
    "C": LayerKind("short_conv"),
    "M": LayerKind("mamba"),
}
LETTERS = {kind: letter for letter, kind in KINDS.items()}

# The layers of a decoder, and its blocks: a period, and how often it comes.
DECODERS = {
    "AAAA": "A4",
    "ASSS": "A1 S3",
    "AS": "A1 S1",
    "ASAS": "AS2",
    "AAASASAS": "A2 AS3",
    "CCACCACCACACAC": "CCA3 CA2 C1",  # LFM2's
    "CCACCAC": "CCA2 C1",
    "MMMMMAMMMM" * 4: "MMMMMAMMMM4",  # Granite 4's
    "CCAC": "C2 A1 C1",
}


def kinds_of(letters: str) -> tuple[LayerKind, ...]:
    return tuple(KINDS[letter] for letter in letters)


def shown(letters: str) -> str:
    return " ".join(
        "".join(LETTERS[kind] for kind in block.kinds) + str(block.num_periods)
        for block in layer_blocks(kinds_of(letters))
    )


@pytest.mark.parametrize("letters", DECODERS)
def test_the_fewest_layers_are_compiled(letters):
    compiled = sum(c.isalpha() for c in shown(letters))
    assert compiled == sum(c.isalpha() for c in DECODERS[letters])
    assert len(shown(letters).split()) == len(DECODERS[letters].split())


def test_any_layers_are_what_their_blocks_say():
    draw = random.Random(0)
    for _ in range(50):
        letters = "".join(draw.choices("ASCM", k=draw.randint(1, 24)))
        kinds, found = kinds_of(letters), {}
        for block in layer_blocks(kinds):
            for stack in block.stacks("layers"):
                found |= dict.fromkeys(stack.layers, stack.kind)
        assert tuple(found[i] for i in range(len(kinds))) == kinds
        assert len(found) == len(kinds)


@pytest.mark.parametrize("variant", VARIANTS)
def test_layers_of_one_kind_need_one_loop_a_block(variant):
    config = bridge.from_hf_config(hf_fields(variant))
    if len(set(config.layer_kinds)) == 1:
        assert [stack.path for stack in config.layer_stacks] == ["layers"]
    layers = sorted(i for stack in config.layer_stacks for i in stack.layers)
    assert layers == list(range(config.num_hidden_layers))


def test_a_layer_of_a_kind_without_sizes_is_refused():
    config = bridge.from_hf_config(hf_fields("lfm2"))
    with pytest.raises(ValueError, match=facts("layer_types", "short_conv", "None")):
        dataclasses.replace(config, short_conv=None)


def test_norms_that_a_mixer_has_not_are_of_no_kind():
    sizes = bridge.from_hf_config(hf_fields("mamba")).mamba1
    for change in ({"norm_scale": False}, {"norm_eps": 1e-6}):
        with pytest.raises(ValueError, match=facts("norm_scale", "norm_eps")):
            dataclasses.replace(sizes, **change)
        dataclasses.replace(sizes, norm=True, **change)
