"""Kimi Linear: decays of each dim, and files as they were published."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from bridge_helpers import assert_same_bytes, load_model, logits_of, tensors_of
from flax import nnx
from helpers.errors import facts
from tiny_configs import hf_fields
from tiny_models import hf_logits, make_model
from transformers import AutoModelForCausalLM

import bridge
from bridge.models import Decoder
from bridge.models._delta_rule import gated_delta_rule

pytestmark = pytest.mark.torch

ROOT = Path(__file__).parents[2]
# The largest difference over the largest value, of float32 sums in another order.
RELATIVE = 2e-5
DENSE: dict[str, Any] = {"mlp_layer_types": ["dense", "sparse", "sparse"]}
BATCH, SEQ, HEADS, KEY, VALUE = 2, 150, 3, 5, 4
REMOTE = {"auto_map": {"AutoModelForCausalLM": "modeling.KimiLinearForCausalLM"}}
PUBLISHED = {
    "head_dim": 72,
    "linear_attn_config": {
        "full_attn_layers": [3],
        "head_dim": 12,
        "kda_layers": [1, 2],
        "num_heads": 4,
        "short_conv_kernel_size": 4,
    },
    "first_k_dense_replace": 1,
    "mla_use_nope": True,
    "moe_layer_freq": 1,
    "moe_router_activation_func": "sigmoid",
    "num_nextn_predict_layers": 0,
    "rope_scaling": None,
    "use_grouped_topk": True,
    **REMOTE,
}
OTHERS = ("linear_num_heads", "linear_head_dim", "layer_types", "mlp_layer_types")


def published(**changes) -> dict:
    fields = {k: v for k, v in hf_fields("kimi_linear").items() if k not in OTHERS}
    return {**fields, **PUBLISHED, **changes}


def by_token(query, key, value, log_decay, beta, starts) -> np.ndarray:
    state, outs = np.zeros((BATCH, HEADS, KEY, VALUE)), []
    for t in range(SEQ):
        state = state * 0 if t in starts else state
        state = state * np.exp(log_decay[:, t])[..., None]
        found = np.einsum("bhkv,bhk->bhv", state, key[:, t])
        learned = (value[:, t] - found) * beta[:, t, :, None]
        state = state + np.einsum("bhk,bhv->bhkv", key[:, t], learned)
        outs.append(np.einsum("bhkv,bhk->bhv", state, query[:, t]))
    return np.stack(outs, 1)


# Of the steepest, a chunk of 64 tokens decays by exp(-6400), which no float holds.
@pytest.mark.parametrize("steepness", [0.1, 100.0])
def test_decays_of_each_dim_by_chunks_are_those_by_tokens(steepness):
    draw = np.random.default_rng(0)
    query, key = draw.normal(size=(2, BATCH, SEQ, HEADS, KEY))
    key /= np.linalg.norm(key, axis=-1, keepdims=True)
    value = draw.normal(size=(BATCH, SEQ, HEADS, VALUE))
    log_decay = -draw.exponential(steepness, (BATCH, SEQ, HEADS, KEY))
    log_decay[..., 0] = -0.01
    beta = draw.uniform(size=(BATCH, SEQ, HEADS))
    inputs = query, key, value, log_decay, beta
    ids = np.repeat([[0] * 50 + [1] * 40 + [2] * 60], BATCH, 0)
    q, k, v, g, b = (jnp.asarray(x, jnp.float32) for x in inputs)
    got, _ = gated_delta_rule(q, k, v, g, b, None, jnp.asarray(ids))
    want = by_token(*inputs, starts={50, 90})
    assert np.abs(got - want).max() <= RELATIVE * np.abs(want).max()


def test_gradients_of_decays_of_each_dim_are_those_in_float64():
    draw, seq = np.random.default_rng(0), 40
    shape = (1, seq, HEADS)
    query, key = draw.normal(size=(2, *shape, KEY))
    value = draw.normal(size=(*shape, VALUE))
    log_decay = -draw.exponential(0.3, (*shape, KEY))
    inputs = query, key / np.linalg.norm(key, axis=-1, keepdims=True), value, log_decay
    ids = jnp.asarray([[0] * 15 + [1] * (seq - 15)])

    def gradients(dtype):
        def loss(query, key, value, log_decay):
            beta = jnp.full(shape, 0.5, dtype)
            given = query, key, value, log_decay, beta
            return (gated_delta_rule(*given, None, ids)[0] ** 2).sum()

        given = [jnp.asarray(x, dtype) for x in inputs]
        made = jax.jit(jax.grad(loss, argnums=(0, 1, 2, 3)))(*given)
        return [np.asarray(grad) for grad in made]

    narrow = gradients(jnp.float32)
    with jax.enable_x64(True):
        wide = gradients(jnp.float64)
    for ours, theirs in zip(narrow, wide, strict=True):
        assert np.abs(ours - theirs).max() <= RELATIVE * np.abs(theirs).max()


AS_USERS = """
import jax, jax.numpy as jnp
from bridge.models._channel_decay import channel_decays
x = jnp.ones((1, 4, 4, 32, 12))
loss = lambda a, b, g: channel_decays(g, None).products(a, b).sum()
print(jax.jit(jax.grad(loss, argnums=(0, 1, 2)))(x, x, -x)[0].shape)
"""


def test_gradients_compile_as_users_compile_them():
    """XLA:CPU of jaxlib 0.10.2 ends the process in those of a broadcast key."""
    own = {k: v for k, v in os.environ.items() if not k.startswith(("XLA", "JAX"))}
    command = [sys.executable, "-c", AS_USERS]
    env = own | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    ran = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stdout.strip()) == (0, "(1, 4, 4, 32, 12)"), ran.stderr


def test_a_published_file_says_the_same_in_other_fields():
    want = bridge.from_hf_config(hf_fields("kimi_linear", **DENSE))
    assert bridge.from_hf_config(published()) == want


@pytest.mark.parametrize(
    "changes, said",
    [
        ({"mla_use_nope": 1.5}, ("mla_use_nope", "1.5")),
        ({"moe_router_activation_func": "softmax"}, ("softmax",)),
        ({"linear_attn_config": {"heads": 4}}, ("linear_attn_config", "heads")),
        (
            {"linear_attn_config": {"full_attn_layers": [3], "kda_layers": [1, 1]}},
            ("full_attn_layers [3]", "kda_layers [1, 1]", "3"),
        ),
        ({"qk_head_dim": 20}, ("qk_head_dim", "20", "18")),
    ],
)
def test_a_field_that_says_otherwise_is_refused(changes, said):
    with pytest.raises(ValueError, match=facts(*said)):
        bridge.from_hf_config(published(**changes))


def renamed(name: str) -> str:
    """The name of a tensor as it was published."""
    is_dense = ".layers.0.block_sparse_moe." in name
    return name.replace("block_sparse_moe", "mlp") if is_dense else name


def test_a_dense_mlp_has_the_published_name_and_is_read_by_either(tmp_path: Path):
    hf = make_model(tmp_path / "in", "kimi_linear", **DENSE)
    model = load_model(hf.path)
    ours = logits_of(model, hf.tokens)
    assert np.abs(ours - hf.logits).max() <= RELATIVE * np.abs(hf.logits).max()
    out = tmp_path / "out"
    bridge.save_hf(out, nnx.state(model, nnx.Param), model.config)
    theirs = {renamed(name): t for name, t in tensors_of(hf.path).items()}
    assert_same_bytes(tensors_of(out), theirs)
    assert "model.layers.0.mlp.gate_proj.weight" in theirs
    again = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32).eval()
    np.testing.assert_array_equal(hf_logits(again, hf.tokens), hf.logits)
    again = load_model(out)
    np.testing.assert_array_equal(logits_of(again, hf.tokens), ours)


def test_names_of_memory_are_read_as_well(tmp_path: Path):
    hf = make_model(tmp_path / "in", "kimi_linear")
    whole = AutoModelForCausalLM.from_pretrained(hf.path)
    whole.save_pretrained(tmp_path / "fused", save_original_format=False)
    assert any("forget_gate" in name for name in tensors_of(tmp_path / "fused"))
    ours = logits_of(load_model(tmp_path / "fused"), hf.tokens)
    assert np.abs(ours - hf.logits).max() <= RELATIVE * np.abs(hf.logits).max()


def test_texts_of_a_packed_row_do_not_see_each_other():
    config = bridge.from_hf_config(hf_fields("kimi_linear"))
    model = Decoder(config, rngs=nnx.Rngs(0))
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 131, (1, 20)))
    ids = jnp.asarray([[0] * 12 + [1] * 8])
    alone = model(tokens[:, 12:])
    packed = model(tokens, segment_ids=ids)[:, 12:]
    scale = np.abs(alone).max()
    assert np.abs(packed - alone).max() <= RELATIVE * scale
    assert np.abs(model(tokens)[:, 12:] - alone).max() > 0.01 * scale
