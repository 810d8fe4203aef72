"""Weight files under the names that they are published by are read as the family's."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import jax
import numpy as np
import pytest
import quantized_writers as writers
from bridge_helpers import (
    HF_CONFIG,
    assert_same_bytes,
    assert_same_leaves,
    like_of,
    random_tensors,
    tensors_of,
)
from helpers.errors import facts
from safetensors.numpy import save_file
from tiny_configs import hf_fields

import bridge
from bridge.families import FAMILIES
from bridge.families._class_defaults import CLASS_DEFAULTS
from bridge.families._family import REQUIRED

HEAD, TABLE = "lm_head.weight", "model.embed_tokens.weight"
TENSORS = random_tensors(np.float32)
TIED = {key: array for key, array in TENSORS.items() if key != HEAD}


def write(path: Path, tensors, fields=HF_CONFIG) -> Path:
    path.mkdir(exist_ok=True)
    save_file(tensors, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(fields))
    return path


def saved(path: Path, out: Path) -> dict[str, np.ndarray]:
    """What is exported of an import: the family's names, and all numbers."""
    config = bridge.from_hf_config(path)
    params = bridge.load_hf(path, like_of(config))
    lazy, _ = bridge.lazy_hf(path)
    assert sorted(lazy) == sorted(leaf.name for leaf in bridge.plan(path).leaves)
    bridge.save_hf(out, params, config)
    return tensors_of(out)


def base_model(tensors):
    return {key.removeprefix("model."): array for key, array in tensors.items()}


def test_a_base_models_file_lacks_the_prefix(tmp_path):
    fields = HF_CONFIG | {"tie_word_embeddings": True, "architectures": ["LlamaModel"]}
    path = write(tmp_path / "in", base_model(TIED), fields)
    assert_same_bytes(saved(path, tmp_path / "out"), TIED)


def test_a_head_beside_a_base_models_names_is_the_head(tmp_path):
    path = write(tmp_path / "in", base_model(TENSORS))
    assert_same_bytes(saved(path, tmp_path / "out"), TENSORS)


def test_a_base_models_file_of_an_untied_model_lacks_its_head(tmp_path):
    path = write(tmp_path / "in", base_model(TIED))
    with pytest.raises(ValueError, match=facts(HEAD)):
        bridge.plan(path)


def test_a_tied_file_may_hold_the_head_alone(tmp_path):
    tensors = {key: array for key, array in TIED.items() if key != TABLE}
    tensors[HEAD] = TIED[TABLE]
    path = write(tmp_path / "in", tensors, HF_CONFIG | {"tie_word_embeddings": True})
    assert_same_bytes(saved(path, tmp_path / "out"), TIED)
    with pytest.raises(ValueError, match=facts(TABLE)):
        bridge.plan(write(tmp_path / "in", tensors))  # untied, it lacks the embedding


@pytest.mark.parametrize("prefix", ["transformer.", ""])
def test_a_tied_gpt2_may_hold_the_head_alone(tmp_path, prefix):
    config = bridge.from_hf_config(hf_fields("gpt2"))
    zeros = jax.tree.map(lambda leaf: np.ones(leaf.shape, "f4"), like_of(config))
    bridge.save_hf(tmp_path / "a", zeros, config)
    found = tensors_of(tmp_path / "a")
    tensors = {
        prefix + key.removeprefix("transformer."): array for key, array in found.items()
    }
    tensors[HEAD] = tensors.pop(f"{prefix}wte.weight")
    masks = {f"{prefix}h.0.attn.{name}": np.ones(1) for name in ("bias", "masked_bias")}
    path = write(tmp_path / "in", tensors | masks, bridge.to_hf_config(config))
    assert_same_bytes(saved(path, tmp_path / "out"), found)
    assert sorted(bridge.plan(path).left_out) == sorted(masks)


# From old files of several families, and some exports.
BUFFERS = (
    "model.layers.0.self_attn.rotary_emb.inv_freq",
    "model.layers.2.self_attn.rotary_emb.cos_cached",
    "model.rotary_emb.inv_freq",
    "model.embeddings.position_ids",
    "model.layers.1.self_attn.masked_bias",
)


def test_buffers_that_follow_from_the_config_are_left_out(tmp_path):
    buffers = {name: np.ones(3, np.float32) for name in BUFFERS}
    path = write(tmp_path / "in", TENSORS | buffers)
    assert_same_bytes(saved(path, tmp_path / "out"), TENSORS)
    assert sorted(bridge.plan(path).left_out) == sorted(BUFFERS)


def test_an_unknown_tensor_stays_refused_by_its_published_name(tmp_path):
    unknown = {"layers.0.self_attn.gate.weight": np.ones(3, np.float32)}
    path = write(tmp_path / "in", base_model(TENSORS) | unknown)
    with pytest.raises(ValueError, match=facts("layers.0.self_attn.gate.weight")):
        bridge.plan(path)
    path = write(tmp_path / "in", TENSORS | {"vision.x": np.ones(3, np.float32)})
    with pytest.raises(ValueError, match=facts("vision.x")):
        bridge.plan(path)


def test_a_tensor_under_two_published_names_is_refused(tmp_path):
    one = "layers.0.mlp.up_proj.weight"
    twice = {f"model.{one}": TENSORS[f"model.{one}"]}
    path = write(tmp_path / "in", base_model(TENSORS) | twice)
    with pytest.raises(ValueError, match=facts(one, f"model.{one}")):
        bridge.plan(path)


@pytest.mark.parametrize("prefix", ["mtp.", "model.mtp."])
def test_layers_that_predict_further_tokens_are_left_out_with_a_warning(
    tmp_path, prefix
):
    further = {f"{prefix}layers.0.norm.weight": np.ones(3, np.float32)}
    path = write(tmp_path / "in", TENSORS | further)
    with pytest.warns(UserWarning, match=facts(1, f"'{prefix}layers.0.norm.weight'")):
        assert bridge.plan(path).left_out == tuple(further)


def test_dropout_changes_no_config_and_is_told():
    fields = HF_CONFIG | {"attention_dropout": 0.1}
    assert bridge.from_hf_config(fields) == bridge.from_hf_config(HF_CONFIG)
    assert bridge.left_out_fields(fields) == {"attention_dropout": 0.1}


# Multimodal checkpoints

TEXT = {name: v for name, v in HF_CONFIG.items() if name != "architectures"}
LLAVA = {
    "model_type": "llava",
    "architectures": ["LlavaForConditionalGeneration"],
    "text_config": TEXT,
    "vision_config": {"model_type": "clip_vision_model", "hidden_size": 8},
    "torch_dtype": "float16",
}
VISION = {
    "{}vision_tower.layers.0.input_layernorm.weight": np.ones(3, np.float32),
    "{}vision_tower.norm.weight": np.ones(5, np.float32),
    "{}multi_modal_projector.linear_1.weight": np.ones((2, 2), np.float32),
}
# Where transformers 4 and 5, and others, put the text part, its head, and the rest.
PREFIXES = {
    "transformers 4": ("language_model.model.", "language_model.lm_head.weight", ""),
    "transformers 5": ("model.language_model.", HEAD, "model."),
    "SmolVLM": ("model.text_model.", HEAD, "model."),
    "the text at the root": ("model.", HEAD, "model."),
}


def multimodal(text, head, rest, tensors=TENSORS):
    named = {
        head if key == HEAD else text + key.removeprefix("model."): array
        for key, array in tensors.items()
    }
    return named | {key.format(rest): array for key, array in VISION.items()}


@pytest.mark.parametrize("names", PREFIXES.values(), ids=PREFIXES)
def test_the_text_part_is_read_and_the_rest_is_told_in_a_line(tmp_path, names):
    path = write(tmp_path / "in", multimodal(*names), LLAVA)
    config = bridge.from_hf_config(path)
    assert config == bridge.from_hf_config(TEXT | {"torch_dtype": "float16"})
    part = f"{names[2]}multi_modal_projector" if names[2] else "norm"
    with pytest.warns(UserWarning, match=facts(3, "48", part)):
        found = bridge.load_hf(path, like_of(config))
    plain = bridge.load_hf(write(tmp_path / "plain", TENSORS), like_of(config))
    assert_same_leaves(found, plain)


def test_a_tensor_of_the_text_part_that_is_unknown_is_refused(tmp_path):
    tensors = multimodal(*PREFIXES["transformers 4"])
    tensors["language_model.model.layers.0.self_attn.gate"] = np.ones(3, np.float32)
    path = write(tmp_path / "in", tensors, LLAVA)
    with (
        pytest.warns(UserWarning),
        pytest.raises(ValueError, match=facts("model.layers.0.self_attn.gate")),
    ):
        bridge.plan(path)


def test_a_quantized_text_part_is_decoded(tmp_path):
    names = PREFIXES["transformers 4"]
    key = "model.layers.1.mlp.up_proj.weight"
    written = writers.bnb_4bit(
        np.random.default_rng(0), f"language_model.{key[:-7]}", (80, 48), np.float16
    )
    half = {key: array.astype(np.float16) for key, array in TENSORS.items()}
    tensors = multimodal(*names, half) | written.tensors
    quantization = {"quant_method": "bitsandbytes"}
    fields = LLAVA | {"quantization_config": quantization}
    path = write(tmp_path / "in", tensors, fields)
    with pytest.warns(UserWarning):
        tree, config = bridge.lazy_hf(path)
    assert config.dtype == "float16"
    kernel = tree["layers.mlp.up_proj.kernel"][(slice(1, 2),)]
    np.testing.assert_array_equal(kernel[0], written.values.T)


def test_zero_biases_beside_quantized_weights_are_left_out_with_a_warning(tmp_path):
    random = np.random.default_rng(0)
    name = "model.layers.1.mlp.up_proj"
    written = writers.gptq(random, name, (80, 48), np.dtype(np.float32))
    tensors = {k: v for k, v in TENSORS.items() if k != f"{name}.weight"}
    bias = {f"{name}.bias": np.zeros(80, np.float32)}
    fields = HF_CONFIG | {"quantization_config": {"quant_method": "gptq", "bits": 4}}
    path = write(tmp_path / "in", tensors | written.tensors | bias, fields)
    with pytest.warns(UserWarning, match=facts(1, "320")):
        bridge.plan(path)
    bias[f"{name}.bias"][7] = 1
    path = write(tmp_path / "in", tensors | written.tensors | bias, fields)
    with pytest.raises(ValueError, match=facts(f"{name}.bias")):
        bridge.plan(path)


def test_what_is_said_of_the_entire_model_holds_for_the_text_part():
    fields = LLAVA | {"tie_word_embeddings": True}
    assert bridge.from_hf_config(fields).tie_word_embeddings
    text = TEXT | {"tie_word_embeddings": False, "torch_dtype": "bfloat16"}
    config = bridge.from_hf_config(fields | {"text_config": text})
    assert not config.tie_word_embeddings
    assert config.dtype == "bfloat16"
    left_out = bridge.left_out_fields(LLAVA | {"text_config": TEXT | {"new": 3}})
    assert left_out == {"new": 3}


def test_keys_of_layers_that_attend_to_those_of_others_are_left_out(tmp_path):
    fields = hf_fields("gemma4-small")
    config = bridge.from_hf_config(fields)
    mapping = FAMILIES["gemma4_text"].mapping(config)
    tensors = {
        name: np.zeros(pieces[0].source_shape, np.float32)
        for name, pieces in mapping.by_source().items()
    }
    key = "model.layers.{}.self_attn.k_proj.weight"
    assert key.format(2) in tensors and key.format(3) not in tensors
    extra = {key.format(3): tensors[key.format(0)]}
    path = write(tmp_path / "published", tensors | extra, fields)
    assert len(bridge.plan(path).leaves) == len(
        bridge.plan(write(tmp_path / "own", tensors, fields)).leaves
    )
    with pytest.raises(ValueError, match=facts("layers.0.self_attn.other")):
        other = {"model.layers.0.self_attn.other.weight": extra[key.format(3)]}
        bridge.plan(write(tmp_path / "other", tensors | other, fields))


def test_gemma_3_is_read_as_it_is_published():
    text = {  # gemma-3-27b-it, with what its file says beside
        **{"model_type": "gemma3_text", "head_dim": 128, "hidden_size": 5376},
        **{"intermediate_size": 21504, "num_attention_heads": 32},
        **{"num_hidden_layers": 62, "num_key_value_heads": 16},
        **{"query_pre_attn_scalar": 168, "sliding_window": 1024},
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
    }
    fields = {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "model_type": "gemma3",
        **{"boi_token_index": 255999, "mm_tokens_per_image": 256},
        **{"eos_token_id": [1, 106], "initializer_range": 0.02},
        "torch_dtype": "bfloat16",
    }
    config = bridge.from_hf_config(fields | {"text_config": text})
    assert (config.model_type, config.dtype) == ("gemma3_text", "bfloat16")
    assert (config.vocab_size, config.num_hidden_layers) == (262208, 62)
    assert config.tie_word_embeddings
    written = bridge.to_hf_config(config)
    assert written["eos_token_id"] == [1, 106]
    assert {name: written[name] for name in text if name != "rope_scaling"} == {
        name: value for name, value in text.items() if name != "rope_scaling"
    }


def test_fields_that_a_text_config_leaves_out_have_the_defaults_of_the_class():
    short = {"model_type": "llama", "max_position_embeddings": 4096, "vocab_size": 64}
    config = bridge.from_hf_config(LLAVA | {"text_config": short})
    assert (config.hidden_size, config.num_hidden_layers) == (4096, 32)
    with pytest.raises(ValueError, match=facts("hidden_size")):
        bridge.from_hf_config(short)  # a config of its own says it


@pytest.mark.parametrize("model_type", CLASS_DEFAULTS)
def test_defaults_of_classes_are_those_of_transformers(model_type):
    configs = pytest.importorskip("transformers.models.auto.configuration_auto")
    fields = configs.CONFIG_MAPPING[model_type]().to_dict()
    required = {
        name: fields[name]
        for name, field in FAMILIES[model_type].fields.items()
        if field.default is REQUIRED
    }
    assert CLASS_DEFAULTS[model_type] == required


@pytest.mark.parametrize(
    "changes, match",
    [
        (
            {"model_type": "paligemma"},
            ["'paligemma'", "'llama'", "llava"],
        ),
        (
            {"text_config": {"model_type": "ctrl"}},
            ["'llava'", "'ctrl'", "gemma3_text"],
        ),
        ({"text_config": {}}, ["'llava'", "'None'"]),
    ],
)
def test_a_multimodal_model_of_another_kind_is_refused_by_name(changes, match):
    with pytest.raises(ValueError, match=facts(*match)):
        bridge.from_hf_config(LLAVA | changes)


def test_a_checkpoint_of_the_familys_own_names_is_read_without_a_warning(tmp_path):
    path = write(tmp_path, TENSORS)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert bridge.plan(path).left_out == ()
