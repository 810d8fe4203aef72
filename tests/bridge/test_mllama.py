"""Llama 3.2 Vision without images: layers that see are left out, and said to be."""

from __future__ import annotations

import dataclasses
import json
import warnings

import numpy as np
import pytest
from bridge_helpers import load_model, logits_of, tensors_of
from flax import nnx
from helpers.errors import facts
from safetensors.numpy import load_file
from tiny_configs import SIZES, hf_fields
from tiny_models import HFModel, hf_logits, make_model
from transformers import AutoModelForCausalLM

import bridge
from bridge.megatron import to_transformer_config

pytestmark = pytest.mark.torch

RELATIVE = 2e-5  # as in test_logits.py
FIELD = "cross_attention_layers"
SEEING = [1, 3]


@pytest.fixture(scope="module")
def seeing(tmp_path_factory) -> HFModel:
    """A model of five layers, two of which attend to images."""
    path = tmp_path_factory.mktemp("mllama") / "in"
    return make_model(path, "mllama", num_hidden_layers=5, **{FIELD: SEEING})


def relative_error(ours, theirs) -> float:
    return float(np.abs(np.asarray(ours) - theirs).max() / np.abs(theirs).max())


def test_texts_are_read_by_the_other_layers(seeing):
    skipped = [key for key in tensors_of(seeing.path) if ".1." in key or ".3." in key]
    with pytest.warns(UserWarning, match=facts(len(skipped), FIELD, "layers.1.")):
        model = load_model(seeing.path)
    assert model.config.num_hidden_layers == 3
    assert relative_error(logits_of(model, seeing.tokens), seeing.logits) <= RELATIVE


@pytest.mark.filterwarnings("ignore:.*cross_attention_layers")
def test_tokens_of_images_have_rows_and_no_logits(seeing):
    tokens = SIZES["vocab_size"] + np.arange(8)[None]
    model = AutoModelForCausalLM.from_pretrained(seeing.path).eval()
    ours, theirs = logits_of(load_model(seeing.path), tokens), hf_logits(model, tokens)
    assert ours.shape == (1, 8, SIZES["vocab_size"])
    assert relative_error(ours, theirs) <= RELATIVE


@pytest.mark.filterwarnings("ignore:.*cross_attention_layers")
def test_an_export_has_no_layers_that_see(tmp_path, seeing):
    model = load_model(seeing.path)
    bridge.save_hf(tmp_path / "out", nnx.state(model), model.config)
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (written[FIELD], written["num_hidden_layers"]) == ([], 3)
    theirs, problems = AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", output_loading_info=True
    )
    assert not problems["missing_keys"] and not problems["unexpected_keys"]
    np.testing.assert_array_equal(
        hf_logits(theirs.eval(), seeing.tokens), seeing.logits
    )
    before, after = tensors_of(seeing.path), tensors_of(tmp_path / "out")
    for name, tensor in after.items():
        for ours, of_file in (("layers.2.", "layers.4."), ("layers.1.", "layers.2.")):
            if ours in name:
                name = name.replace(ours, of_file)
                break
        assert tensor.tobytes() == before[name].tobytes()


@pytest.mark.filterwarnings("ignore:.*cross_attention_layers")
@pytest.mark.parametrize("of_export", [False, True])
def test_an_export_is_read_as_it_was_written(tmp_path, seeing, of_export):
    """By its own config, and by that of the file with layers that see."""
    model = load_model(seeing.path)
    bridge.save_hf(tmp_path / "out", nnx.state(model), model.config)
    own = bridge.from_hf_config(tmp_path / "out")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        planned = bridge.plan(
            tmp_path / "out", config=own if of_export else model.config
        )
    assert planned.left_out == () and own.num_hidden_layers == 3
    tensors = [leaf.tensors for leaf in planned.leaves if "layers" in leaf.name]
    assert all(len(names) == 3 for names in tensors)


@pytest.mark.filterwarnings("ignore:.*cross_attention_layers")
def test_other_layers_than_those_of_the_file_are_refused(seeing):
    fields = json.loads((seeing.path / "config.json").read_text()) | {FIELD: [2, 3]}
    with pytest.raises(ValueError, match=facts("model.layers.1.self_attn")):
        bridge.plan(seeing.path, config=bridge.from_hf_config(fields))


@pytest.mark.parametrize("absent", [False, True])
def test_every_fifth_layer_sees_where_the_file_does_not_say(absent):
    fields = hf_fields("mllama", num_hidden_layers=40, **{FIELD: None})
    if absent:
        del fields[FIELD]
    config = bridge.from_hf_config(fields)
    assert config.num_hidden_layers == 32
    names = bridge.families.FAMILIES["mllama_text_model"].mappings(config)[1]
    assert "model.layers.39.self_attn.q_proj.weight" in names.by_source()
    assert "model.layers.38.self_attn.q_proj.weight" not in names.by_source()


@pytest.mark.parametrize("given", [[0, 1, 2], "1", [True], [0.5], 1])
def test_layers_that_are_none_or_all_are_refused(given):
    with pytest.raises(ValueError, match=facts(FIELD, repr(given))):
        bridge.from_hf_config(hf_fields("mllama", **{FIELD: given}))


def test_a_tied_embedding_has_no_rows_without_a_logit():
    config = bridge.from_hf_config(hf_fields("mllama"))
    with pytest.raises(ValueError, match=facts("unscored_tokens", "tied")):
        dataclasses.replace(config, tie_word_embeddings=True)
    with pytest.raises(ValueError, match=facts("unscored_tokens", -1)):
        dataclasses.replace(config, unscored_tokens=-1)
    with pytest.raises(ValueError, match=facts("unscored_tokens", 8, 0)):
        bridge.to_hf_config(dataclasses.replace(config, unscored_tokens=0))
    with pytest.raises(ValueError, match=facts("unscored_tokens", 8)):
        to_transformer_config(config)


@pytest.mark.filterwarnings("ignore:.*cross_attention_layers")
@pytest.mark.parametrize("layers", [[4], [3, 4], [0]])
def test_layers_that_see_may_be_the_last(tmp_path, layers):
    """Then the other layers are counted as those of a model without them."""
    model = make_model(tmp_path, "mllama", num_hidden_layers=5, **{FIELD: layers})
    ours = logits_of(load_model(model.path), model.tokens)
    assert relative_error(ours, model.logits) <= RELATIVE


@pytest.mark.parametrize("layers, numbers", [(SEEING, {0, 2, 4}), ([], range(5))])
def test_an_adapter_counts_the_layers_of_its_base(tmp_path, layers, numbers):
    config = bridge.from_hf_config(
        hf_fields("mllama", num_hidden_layers=5, **{FIELD: layers})
    )
    leaf = "layers.mlp.down_proj.kernel"
    sizes = (config.intermediate_size, 4), (4, config.hidden_size)
    factors = {
        name: np.random.default_rng(0).normal(size=(len(numbers), *size)).astype("f4")
        for name, size in zip(("lora_a", "lora_b"), sizes, strict=True)
    }
    lora = bridge.Lora(bridge.LoraConfig(4, 8), {leaf: factors}, {})
    bridge.save_lora(tmp_path / "adapter", lora, config)
    names = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert {int(name.split("layers.")[1][0]) for name in names} == set(numbers)
    again = bridge.load_lora(tmp_path / "adapter", config)
    for name, array in factors.items():
        np.testing.assert_array_equal(again.factors[leaf][name], array)
