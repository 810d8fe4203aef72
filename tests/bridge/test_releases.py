"""Releases with code of their own: the model of a family, under other names."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from bridge_helpers import assert_same_bytes, load_model, logits_of, tensors_of
from flax import nnx
from helpers.errors import facts
from release_files import RELEASES
from safetensors.numpy import save_file
from tiny_models import HFModel, make_model

import bridge
from bridge.families.releases import RELEASES as TABLES

pytestmark = [pytest.mark.torch, pytest.mark.each_case]

# As in test_logits.py: two float32 programs that sum in different orders.
RELATIVE = 2e-5


@pytest.fixture(scope="module", params=RELEASES)
def written(request, tmp_path_factory) -> tuple[HFModel, Path]:
    """A model of transformers, and the same as its release."""
    path, release = tmp_path_factory.mktemp(request.param), RELEASES[request.param]
    hf = make_model(path / "family", release.variant, **release.changes)
    return hf, write_release(path / "release", request.param, tensors_of(hf.path))


def write_release(path: Path, model_type: str, family, **changes) -> Path:
    path.mkdir()
    release = RELEASES[model_type]
    save_file(release.tensors(family), path / "model.safetensors")
    fields = {"model_type": model_type, **release.config, **changes}
    (path / "config.json").write_text(json.dumps(fields))
    return path


def test_every_release_is_tried():
    assert RELEASES.keys() == TABLES.keys()


def test_logits_of_a_release_are_those_of_its_family(written):
    hf, path = written
    ours = logits_of(load_model(path), hf.tokens)
    error = np.abs(np.asarray(ours) - hf.logits).max() / np.abs(hf.logits).max()
    assert error <= RELATIVE


def test_an_export_is_the_file_that_transformers_writes(written, tmp_path):
    hf, path = written
    model = load_model(path)
    bridge.save_hf(tmp_path, nnx.state(model, nnx.Param), model.config)
    assert_same_bytes(tensors_of(tmp_path), tensors_of(hf.path))
    again = bridge.from_hf_config(tmp_path)
    assert again == model.config


def test_parts_of_q_k_and_v_in_another_order_are_seen(tmp_path):
    hf = make_model(tmp_path / "family", "llama", num_hidden_layers=2)
    tensors = tensors_of(hf.path)
    path = write_release(tmp_path / "release", "internlm2", tensors)
    fused = tensors_of(path)
    for name in [name for name in fused if name.endswith("wqkv.weight")]:
        q, k, v = (
            tensors[f"model.layers.{name.split('.')[2]}.self_attn.{part}_proj.weight"]
            for part in "qkv"
        )
        fused[name] = np.concatenate([q, k, v])
    save_file(fused, path / "model.safetensors")
    ours = logits_of(load_model(path), hf.tokens)
    error = np.abs(np.asarray(ours) - hf.logits).max() / np.abs(hf.logits).max()
    assert error > 100 * RELATIVE


def test_a_layer_that_predicts_a_further_token_is_left_out(tmp_path):
    hf = make_model(tmp_path / "family", "qwen2", num_hidden_layers=2)
    further = {"model.mtp_layers.0.input_proj.weight": np.zeros((48, 96), np.float32)}
    tensors = tensors_of(hf.path) | further
    path = write_release(
        tmp_path / "release", "mimo", tensors, num_nextn_predict_layers=1
    )
    with pytest.warns(UserWarning, match=facts("1 tensors", "mtp_layers.0")):
        load_model(path)


@pytest.mark.parametrize(
    "model_type, changes, match",
    [
        ("qwen", {"no_bias": False}, ["no_bias", "True"]),
        ("qwen", {"rotary_pct": 0.25}, ["rotary_pct", "0.25"]),
        ("qwen", {"intermediate_size": 161}, ["intermediate_size", "161"]),
        ("qwen", {"rope_theta": 5e5}, ["rope_theta", "rotary_emb_base"]),
        ("qwen", {"new_field": 3}, ["new_field = 3", "ignore_fields", "qwen"]),
        ("chatglm", {"rope_ratio": 50}, ["rope_ratio = 50", "151552"]),
        ("chatglm", {"rmsnorm": False}, ["rmsnorm", "True"]),
        ("chatglm", {"pre_seq_len": 128}, ["pre_seq_len", "128"]),
        ("internlm2", {"hidden_act": "gelu"}, ["hidden_act", "gelu"]),
        ("minicpm", {"num_experts": 8}, ["num_experts = 8"]),
        ("minicpm", {"sparse_config": {"topk": 64}}, ["sparse_config"]),
        ("bailing_moe_v2", {"norm_head": True}, ["norm_head", "False"]),
        (
            "bailing_moe_v2",
            {"moe_shared_expert_intermediate_size": 48},
            ["moe_shared_expert_intermediate_size = 48", "24"],
        ),
        ("hunyuan", {"use_cla": True}, ["use_cla", "False"]),
        ("hunyuan", {"moe_topk": [2, 1]}, ["moe_topk", "[2, 1]"]),
        ("hunyuan", {"num_shared_expert": 2}, ["num_shared_expert = 2", "80"]),
        ("RefinedWebModel", {"alibi": True}, ["alibi", "False"]),
        ("bailing_moe_v2", {"rotary_dim": 12}, ["rotary_dim = 12", "6"]),
        ("chatglm", {"interleaved_qkv": True}, ["interleaved_qkv", "False"]),
        ("hunyuan", {"moe_drop_tokens": True}, ["moe_drop_tokens", "False"]),
        ("hunyuan", {"group_limited_greedy": True}, ["group_limited_greedy"]),
        # What the code takes where the file does not say.
        ("bailing_moe_v2", {"use_bias": None}, ["use_bias", "False"]),
        ("hunyuan", {"use_qk_norm": None}, ["use_qk_norm", "True"]),
    ],
)
def test_what_a_release_computes_otherwise_is_refused(model_type, changes, match):
    fields = {"model_type": model_type, **RELEASES[model_type].config, **changes}
    with pytest.raises(ValueError, match=facts(model_type, *match)):
        bridge.from_hf_config(fields)


def test_the_base_of_glm_4_is_multiplied_by_its_ratio():
    fields = RELEASES["chatglm"].config | {
        "model_type": "chatglm",
        "padded_vocab_size": 151552,
        "rope_ratio": 500,
    }
    rope = bridge.from_hf_config(fields).rope
    assert rope is not None and rope.rope_theta == 5e6


def test_texts_that_qwen_1_would_stretch_are_beyond_the_maximum_length():
    fields = {"model_type": "qwen", **RELEASES["qwen"].config, "seq_length": 64}
    assert bridge.from_hf_config(fields).max_position_embeddings == 64
    plain = {"use_dynamic_ntk": False, "use_logn_attn": False}
    assert bridge.from_hf_config(fields | plain).max_position_embeddings == 256
