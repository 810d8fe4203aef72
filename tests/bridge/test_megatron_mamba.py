"""Megatron's own Mamba mixers, in hybrid models: what the files of Nemotron-H hold."""

import re

import numpy as np
import pytest
from bridge_helpers import assert_same_leaves, like_of
from helpers.errors import facts
from tiny_models import make_model

import bridge
from bridge.megatron import megatron_tensors, write_megatron
from bridge.megatron._names import canonical_tensors

pytestmark = pytest.mark.torch

SYMBOLS = {"mamba": "M", "attention": "*", "dense": "-", "sparse": "E"}
# Of Megatron's names those that are not Hugging Face's, within a layer.
RENAMED = {
    r"mixer\.in_proj\.layer_norm_weight": "norm.weight",
    r"self_attention\.linear_qkv\.layer_norm_weight": "norm.weight",
    r"mlp\.linear_fc1\.layer_norm_weight": "norm.weight",
    r"pre_mlp_layernorm\.weight": "norm.weight",
    r"self_attention\.linear_proj\.": "mixer.o_proj.",
    r"mlp\.router\.weight": "mixer.gate.weight",
    r"mlp\.router\.expert_bias": "mixer.gate.e_score_correction_bias",
    r"mlp\.(fc\d_latent_proj)\.": r"mixer.\1.",
    r"mlp\.(.*)linear_fc1\.": r"mixer.\1up_proj.",
    r"mlp\.(.*)linear_fc2\.": r"mixer.\1down_proj.",
}
OUTER = {
    "embedding.word_embeddings.weight": "backbone.embeddings.weight",
    "decoder.final_layernorm.weight": "backbone.norm_f.weight",
    "output_layer.weight": "lm_head.weight",
}


@pytest.fixture(scope="module", params=["nemotron_h", "nemotron_h-dense"])
def model(request, tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("model") / "hf", request.param).path


@pytest.fixture(scope="module")
def loaded(model):
    config = bridge.from_hf_config(model)
    return config, bridge.load_hf(model, like_of(config))


def pattern_of(config) -> str:
    return "".join(SYMBOLS[kind.mixer or kind.channels] for kind in config.layer_kinds)


def in_hugging_face(name: str) -> str:
    if name in OUTER:
        return OUTER[name]
    layer, _, rest = name.removeprefix("decoder.layers.").partition(".")
    for pattern, replacement in RENAMED.items():
        if re.match(pattern, rest):
            rest = re.sub(pattern, replacement, rest, count=1)
            break
    return f"backbone.layers.{layer}.{rest}"


def test_a_mixer_s_tensors_are_those_of_hugging_face_to_the_bit(model, loaded):
    config, params = loaded
    tensors = megatron_tensors(params, config)
    theirs = bridge.open_checkpoint(model)
    left = set(theirs.keys())
    for name in tensors.keys():
        if "linear_qkv" in name and "layer_norm" not in name:
            continue  # three tensors there; tested with Megatron's own checkpoints
        key = in_hugging_face(name)
        left.discard(key)
        assert tensors.read(name).tobytes() == theirs.read(key).tobytes(), name
    assert left and all(re.search(r"\.[qkv]_proj\.", key) for key in left)


@pytest.mark.parametrize("format", ["torch_dist", "fsdp_dtensor"])
def test_a_hybrid_run_loads_to_the_bit(loaded, tmp_path, format):
    config, params = loaded
    args = {"hybrid_layer_pattern": pattern_of(config), "num_layers": None}
    source = megatron_tensors(params, config)
    write_megatron(tmp_path, source, args, format=format)
    found = bridge.load_megatron(tmp_path, like_of(config), config=config)
    assert_same_leaves(found, params)
    with pytest.raises(ValueError, match=facts("hybrid_layer_pattern", "config=")):
        bridge.load_megatron(tmp_path, like_of(config))


def test_a_missing_part_of_a_mixer_is_named():
    name = "decoder.layers.0.mixer.in_proj.weight"
    parts = {f"{name}.{part}": np.zeros((2, 2), np.float32) for part in "zxBC"}
    with pytest.raises(ValueError, match=facts(name, f"{name}.dt")):
        canonical_tensors(parts)
