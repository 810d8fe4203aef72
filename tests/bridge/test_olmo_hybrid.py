"""OLMo Hybrid: norms by kind of layer, without a rope, and files as published."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from bridge_helpers import assert_same_bytes, load_model, logits_of, tensors_of
from flax import nnx
from helpers.errors import facts
from tiny_configs import hf_fields
from tiny_models import hf_logits, make_model
from transformers import AutoModelForCausalLM

import bridge

pytestmark = pytest.mark.torch

# The largest difference over the largest logit; as in test_logits.py.
RELATIVE = 2e-5
STILL: dict[str, Any] = {"rope_theta": None, "rope_type": "default"}
# Attention in the middle, whose norm transformers writes under another name.
TYPES = ["linear_attention", "full_attention", "linear_attention"]


def renamed(name: str) -> str:
    """The name of a tensor as it was published."""
    if ".layers.1." not in name:
        return name
    return name.replace("feedforward_layer_norm", "post_attention_layernorm")


def test_a_model_without_a_rope_is_written_under_published_names(tmp_path: Path):
    fields: dict[str, Any] = {"layer_types": TYPES, "rope_parameters": STILL}
    hf = make_model(tmp_path / "in", "olmo_hybrid", **fields)
    model = load_model(hf.path)
    assert model.config.rope is None and not model.config.learned_positions
    ours = logits_of(model, hf.tokens)
    assert np.abs(ours - hf.logits).max() <= RELATIVE * np.abs(hf.logits).max()
    out = tmp_path / "out"
    bridge.save_hf(out, nnx.state(model, nnx.Param), model.config)
    theirs = {renamed(name): t for name, t in tensors_of(hf.path).items()}
    assert_same_bytes(tensors_of(out), theirs)
    again = AutoModelForCausalLM.from_pretrained(out).eval()
    np.testing.assert_array_equal(hf_logits(again, hf.tokens), hf.logits)
    np.testing.assert_array_equal(logits_of(load_model(out), hf.tokens), ours)


def test_layers_norm_before_a_delta_net_and_after_attention():
    model = nnx.eval_shape(
        lambda: bridge.models.Decoder(
            bridge.from_hf_config(hf_fields("olmo_hybrid")), rngs=nnx.Rngs(0)
        )
    )
    delta, full = model.layers
    assert delta.input_layernorm is not None
    assert delta.post_attention_layernorm is None
    assert full.input_layernorm is None
    assert full.post_attention_layernorm is not None


def test_sizes_of_delta_nets_follow_where_the_file_does_not_say():
    names = ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim")
    fields = hf_fields("olmo_hybrid")
    for name in names:
        del fields[f"linear_{name}"]
    delta = bridge.from_hf_config(fields).delta_net
    assert [getattr(delta, name) for name in names] == [4, 4, 9, 18]


def test_convolutions_in_equal_parts_are_refused_with_their_shapes(tmp_path: Path):
    hf = make_model(tmp_path / "in", "olmo_hybrid", linear_value_head_dim=8)
    with pytest.raises(ValueError, match=facts("q_conv1d", "27", "24")):
        load_model(hf.path)


NOTHING: dict[str, Any] = {"rope_parameters": None}


@pytest.mark.parametrize(
    "changes, base",
    [
        ({"rope_parameters": STILL}, None),
        (NOTHING | {"rope_theta": None}, None),
        (NOTHING | {"rope_scaling": STILL}, None),
        (NOTHING, 10000.0),
        (NOTHING | {"rope_theta": 500.0}, 500.0),
        ({"rope_parameters": STILL | {"rope_theta": 77.0}, "rope_theta": 500.0}, 77.0),
    ],
)
def test_a_base_of_null_is_no_rope_wherever_it_is_said(changes, base):
    fields = {k: v for k, v in hf_fields("olmo_hybrid").items() if "rope" not in k}
    rope = bridge.from_hf_config(fields | changes).rope
    assert (rope and rope.rope_theta) == base


@pytest.mark.parametrize("kind", ["full_attention", "linear_attention"])
def test_layers_of_one_kind_are_refused(kind):
    others = {"full_attention", "linear_attention"} - {kind}
    with pytest.raises(ValueError, match=facts("layer_types", *others)):
        bridge.from_hf_config(hf_fields("olmo_hybrid", layer_types=[kind, kind]))
