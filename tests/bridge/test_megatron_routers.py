"""Megatron's router, with the fields that we write, chooses and weighs as ours does."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers.errors import facts
from megatron_variants import WITH, twin_config

from bridge.megatron import to_transformer_config
from bridge.models import DecoderConfig
from bridge.models._router import Router


def megatron_routing(
    logits: np.ndarray, bias: np.ndarray, fields: dict[str, Any]
) -> np.ndarray:
    """Weights of all experts, 0 of those not chosen.

    Source: Megatron-LM moe_utils.py::topk_routing_with_score_function.
    """
    chosen, before = fields["moe_router_topk"], fields["moe_router_pre_softmax"]
    if fields["moe_router_score_function"] == "sigmoid":
        scores = 1 / (1 + np.exp(-logits))
        biased = scores + bias * fields["moe_router_enable_expert_bias"]
        picked = best(biased, chosen, fields)
        weights = np.where(picked, scores, 0)
        if chosen > 1:
            weights /= weights.sum(-1, keepdims=True) + 1e-20
    elif before:
        scores = softmax(logits)
        weights = np.where(best(scores, chosen, fields), scores, 0)
    else:
        weights = softmax(np.where(best(logits, chosen, fields), logits, -np.inf))
    return weights * (fields["moe_router_topk_scaling_factor"] or 1)


def best(scores: np.ndarray, chosen: int, fields: dict[str, Any]) -> np.ndarray:
    groups, kept = fields["moe_router_num_groups"], fields["moe_router_group_topk"]
    if groups:
        by_group = scores.reshape(len(scores), groups, -1)
        sums = np.sort(by_group)[..., -(chosen // kept) :].sum(-1)
        allowed = np.argsort(np.argsort(-sums)) < kept
        scores = np.where(allowed[..., None], by_group, -np.inf).reshape(scores.shape)
    return np.argsort(np.argsort(-scores)) < chosen


def softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def our_routing(config: DecoderConfig) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Our router's weights of all experts, and its logits and bias."""
    moe = config.moe
    assert moe is not None
    router = Router(moe, 16, std=1.0, rngs=nnx.Rngs(0), param_dtype=jnp.float32)
    bias = 0.1 * jax.random.normal(jax.random.key(2), (moe.num_experts,))
    if router.correction_bias is not None:
        router.correction_bias[...] = bias
    x = jax.random.normal(jax.random.key(1), (1, 500, 16)) / math.sqrt(16)
    chosen, weights, _ = router(x)
    dense = jnp.einsum("btc,btce->te", weights, jax.nn.one_hot(chosen, moe.num_experts))
    return np.asarray(dense), np.asarray(router.gate(x)[0]), np.asarray(bias)


SPARSE = [name for name in WITH if twin_config(name).moe is not None]


@pytest.mark.parametrize("variant", SPARSE)
def test_megatrons_router_with_our_fields_is_our_router(variant):
    """Ours is transformers' (`test_logits`), so this is too."""
    config = twin_config(variant)
    weights, logits, bias = our_routing(config)
    theirs = megatron_routing(logits, bias, to_transformer_config(config))
    np.testing.assert_allclose(theirs, weights, atol=2e-6)


@pytest.mark.parametrize(
    "variant, upstream, share",
    [
        ("mixtral", {"moe_router_pre_softmax": True}, 1.0),
        ("qwen2_moe-mixed", {"moe_router_pre_softmax": True}, 1.0),
        (
            "deepseek_v3",
            {"moe_router_num_groups": None, "moe_router_group_topk": None},
            0.3,
        ),
        (
            "deepseek_v2-groups",
            {"moe_router_num_groups": None, "moe_router_group_topk": None},
            0.2,
        ),
        ("deepseek_v2", {"moe_router_topk_scaling_factor": None}, 1.0),
    ],
)
def test_the_fields_that_upstream_writes_are_another_router(variant, upstream, share):
    config = twin_config(variant)
    weights, logits, bias = our_routing(config)
    fields = {**to_transformer_config(config), **upstream}
    theirs = megatron_routing(logits, bias, fields)
    differ = np.abs(theirs - weights).max(-1) > 1e-3
    assert differ.mean() >= share


def test_deepseek_v2_of_236b_is_refused_for_megatron_would_choose_others():
    """It judges a group by its best two of 6 / 3; DeepSeek-V2 by the best one."""
    config = twin_config("deepseek_v2-groups")
    assert config.moe is not None
    moe = dataclasses.replace(
        config.moe, num_experts=32, n_group=8, topk_group=3, num_experts_per_tok=6
    )
    config = dataclasses.replace(config, moe=moe)
    with pytest.raises(
        ValueError, match=facts("moe.group_scoring = 'max'", "6 / 3 = 2")
    ):
        to_transformer_config(config)
    simpler = dataclasses.replace(moe, n_group=None, topk_group=None)
    fields = to_transformer_config(dataclasses.replace(config, moe=simpler))
    fields |= {"moe_router_num_groups": 8, "moe_router_group_topk": 3}
    weights, logits, bias = our_routing(config)
    chosen = megatron_routing(logits, bias, fields) > 0
    assert ((weights > 0) != chosen).any(-1).mean() > 0.1
