"""Every family of bridge trains under a plan of fsdp_jax as it does on one device."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from helpers.compare import host, worst
from tiny_configs import FAMILIES, hf_fields

import bridge
import fsdp_jax as fsdp
from bridge.models import (
    Decoder,
    DecoderConfig,
    DecoderLayer,
    SharedBlock,
    constant_paths,
    dot_product_attention,
    plain_scan,
)

# ||a - b|| / ||b|| of each gradient. In float64, so that no rounding gives a
# token to other experts; but for the softmax of jax's attention, which is float32, and
# leaves 3e-7.
GRADIENTS = 1e-5
# That of the second is rounding where nothing is turned; none reaches the others.
UNTRAINED = ("correction_bias", "k_proj.bias", "xielu.beta", "xielu.eps")
ROWS, SEQ = 8, 12
# Trained over tp or ep by test_tensor_parallel.py and test_expert_families.py, so that
# here `make test-long` is soon enough.
ELSEWHERE = {
    *("llama", "qwen3", "gpt2", "deepseek_v2"),
    *("mixtral", "qwen3_moe", "olmoe", "gpt_oss", "deepseek_v3"),
}
# Without a feature that no other family has.
LIKE_OTHERS = {
    *("gemma", "starcoder2", "phi", "gptj", "opt", "gpt_bigcode", "falcon", "stablelm"),
    *("cohere2", "exaone4", "glm", "seed_oss", "ernie4_5", "arcee", "nemotron"),
    *("internlm3", "hunyuan", "hunyuan_moe", "granitemoe", "granitemoeshared"),
    *("glm4_moe", "glm4_moe_lite", "ernie4_5_moe", "minimax_m2", "dots1", "ministral3"),
    *("mpt", "phimoe", "mamba", "mamba2", "falcon_h1", "apertus", "llama4"),
    *("lfm2_moe", "jamba", "minicpm3", "deepseek_v32", "glm_moe_dsa", "gemma4"),
    *("ministral", "helium", "cwm", "vaultgemma", "youtu", "exaone", "iquestcoder"),
    *("hyperclovax", "jais2", "granite_swa", "granitemoe_swa", "solar_open"),
    *("sarvam_moe", "sarvam_mla", "mellum", "exaone_moe", "flex_olmo", "hy_v3"),
    *("bamba", "codegen", "dbrx", "deepseek", "flint", "kolibri1", "lfm3"),
    *("nemotron-nas", "minimax_m3", "longcat_flash", "mimo_v2_flash"),
    *("minimax", "kimi_linear", "cohere2_moe", "olmo_hybrid"),
    *("recurrent_gemma", "diffllama", "doge", "persimmon", "xglm", "biogpt", "aria"),
    *("bitnet", "modernbert", "mistral4", "cohere_compass", "lara_mini", "laguna"),
    *("bailing_hybrid", "mllama", "hy_v4", "axk2", "zamba", "jetmoe"),
    "openai-gpt",
}
# Of many kinds of layers, each compiled by itself; over tp in test_hybrid_families.py.
LONG_TO_COMPILE = {"gemma3n", "deepseek_v4"}
LATER = ELSEWHERE | LIKE_OTHERS | LONG_TO_COMPILE
CASES = [
    pytest.param(name, marks=(pytest.mark.long,) if name in LATER else ())
    for name in FAMILIES
]


# Whose gradients of queries and keys are so small that the float32 softmax of jax's
# attention leaves 4e-5 of them, and one in float64 4e-14.
SMALL_GRADIENTS = {"openai-gpt"}


def make(config: DecoderConfig, scan, key) -> Decoder:
    attention = dot_product_attention
    if config.model_type in SMALL_GRADIENTS:
        attention = float64_attention
    return Decoder(
        config,
        rngs=nnx.Rngs(key),
        param_dtype=jnp.float64,
        scan=scan,
        attention=attention,
    )


def float64_attention(query, key, value, *, scale, **others):
    """Full attention of as many key heads as query heads, in the dtype of both."""
    assert not any(option is not None for option in others.values())
    scores = jnp.einsum("bqhd,bkhd->bhqk", query, key) * scale
    seen = jnp.tril(jnp.ones(scores.shape[2:], jnp.bool_))
    weights = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf), axis=-1)
    return jnp.einsum("bhqk,bkhd->bqhd", weights, value)


def loss(model: Decoder, tokens):
    logits = model(tokens[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


def last_gradients() -> optax.GradientTransformation:
    """An optimizer whose state is the last gradient, and that takes a step by it."""
    return optax.GradientTransformation(
        lambda params: jax.tree.map(jnp.zeros_like, params),
        lambda grads, state, params=None: (grads, grads),
    )


def weights(config: DecoderConfig) -> tuple[Any, Any]:
    """Random weights, none of them zero."""
    model = nnx.eval_shape(lambda: make(config, plain_scan, jax.random.key(0)))
    graph, like = nnx.split(model)
    leaves, structure = jax.tree.flatten_with_path(like)
    keys = jax.random.split(jax.random.key(1), len(leaves))
    values = [
        weight(config, jax.tree_util.keystr(path), key, leaf)
        for key, (path, leaf) in zip(keys, leaves, strict=True)
    ]
    return graph, jax.tree.unflatten(structure, values)


def weight(config: DecoderConfig, path: str, key, like) -> jax.Array:
    if "token_experts" in path:
        assert config.moe is not None
        ids = jax.random.randint(key, like.shape, 0, config.moe.num_experts)
        return ids.astype(like.dtype)
    # Layers with shared blocks amplify roundings unless what they add to is wide.
    wide = config.shared_blocks is not None and "embed_tokens" in path
    scale = 8.0 if wide else 1.0
    return scale * (jax.random.normal(key, like.shape, like.dtype) * 0.3 + 0.1)


def gradients_of_eight(config: DecoderConfig, params, tokens):
    plan = fsdp.fully_shard(
        functools.partial(make, config, fsdp.scan),
        fsdp.make_mesh(),
        units=[DecoderLayer, *([SharedBlock] * (config.shared_blocks is not None))],
    )
    params = jax.tree.map(
        lambda leaf, like: jax.device_put(leaf, like.sharding), params, plan.params
    )
    tx = last_gradients()
    step = fsdp.make_train_step(plan, loss, tx)
    state, _ = step(fsdp.init_state(plan, tx, params), jnp.asarray(tokens))
    return host(fsdp.sharding.unpack(state.opt_state))


def test_each_model_type_names_one_family():
    names = [
        name
        for family in bridge.families.FAMILIES.values()
        for name in (family.model_type, *family.also_named)
    ]
    assert len(names) == len(set(names))


@pytest.mark.parametrize("variant", CASES)
def test_a_step_on_eight_devices_is_that_of_one(variant):
    with jax.enable_x64(True):
        config = bridge.from_hf_config(hf_fields(variant))
        tokens = np.random.default_rng(0).integers(0, 131, (ROWS, SEQ + 1))
        graph, params = weights(config)
        gradients = jax.jit(
            jax.grad(lambda p, tokens: loss(nnx.merge(graph, p), tokens))
        )
        want, other = host(gradients(params, tokens)), tokens[::-1].copy()
        other[0] = 0  # another text in one row of eight
        wrong = host(gradients(params, other))
        got = gradients_of_eight(config, params, tokens)
    without = (*UNTRAINED, *constant_paths(config))
    assert worst(got, want, without=without) < GRADIENTS
    assert worst(wrong, want, without=without) > 100 * GRADIENTS
