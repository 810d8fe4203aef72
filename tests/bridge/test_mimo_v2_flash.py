"""MiMo-V2-Flash: what published files say in fields of their own."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers.errors import facts
from tiny_configs import hf_fields

import bridge
from bridge.models import Decoder

REMOTE = {"auto_map": {"AutoModelForCausalLM": "modeling.MiMoV2FlashForCausalLM"}}
PUBLISHED = {
    "add_full_attention_sink_bias": False,
    "add_swa_attention_sink_bias": True,
    "hybrid_layer_pattern": [0, 1, 1],
    "layernorm_epsilon": 1e-5,
    "moe_layer_freq": [0, 1, 1],
    "n_shared_experts": None,
    "routed_scaling_factor": None,
    "scoring_func": "sigmoid",
    "sliding_window_size": 8,
    "swa_head_dim": 24,
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 4,
    "swa_v_head_dim": 14,
    "topk_method": "noaux_tc",
    **REMOTE,
}
# Two float32 programs that sum in other orders.
TOLERANCE = 2e-5


def test_a_published_file_says_the_same_in_other_fields():
    fields = hf_fields("mimo_v2_flash")
    want = bridge.from_hf_config(fields)
    assert bridge.from_hf_config({**fields, **PUBLISHED}) == want


@pytest.mark.parametrize(
    "name, value, said",
    [
        ("hybrid_layer_pattern", [1, 1, 1], ("[1, 1, 1]", "[0, 1, 1]")),
        ("moe_layer_freq", [1, 1, 1], ("[1, 1, 1]", "[0, 1, 1]")),
        ("swa_num_key_value_heads", 2, ("2", "4")),
        ("swa_head_dim", 16, ("16", "24")),
        ("layernorm_epsilon", 1e-6, ("1e-06", "1e-05")),
        ("add_full_attention_sink_bias", True, ("True",)),
        ("swa_rope_theta", 500000, ("500000",)),
    ],
)
def test_a_published_field_that_says_otherwise_is_refused(name, value, said):
    fields = {**hf_fields("mimo_v2_flash"), **PUBLISHED, name: value}
    with pytest.raises(ValueError, match=facts(name, *said)):
        bridge.from_hf_config(fields)


def test_full_layers_have_half_the_key_heads_and_no_sinks():
    config = bridge.from_hf_config(hf_fields("mimo_v2_flash"))
    model = nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0)))
    full, sliding = (layer.self_attn for layer in model.layers)
    assert full.sinks is None and sliding.sinks.shape == (2, 4)
    assert full.k_proj.kernel.shape == (1, 48, 2, 24)
    assert sliding.v_proj.kernel.shape == (2, 48, 4, 14)


def test_texts_of_a_packed_row_do_not_see_each_other():
    config = bridge.from_hf_config(hf_fields("mimo_v2_flash"))
    model = Decoder(config, rngs=nnx.Rngs(0))
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 131, (1, 20)))
    ids = jnp.asarray([[0] * 12 + [1] * 8])
    packed = model(tokens, segment_ids=ids)[:, 12:]
    alone = model(tokens[:, 12:])
    scale = np.abs(alone).max()
    assert np.abs(packed - alone).max() <= TOLERANCE * scale
    assert np.abs(model(tokens)[:, 12:] - alone).max() > 0.01 * scale
