"""Imported models with experts train over `ep`, and `ep` and `tp`, as on one device."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from helpers.compare import host, worst
from helpers.errors import facts
from tiny_configs import hf_fields

import bridge
import fsdp_jax as fsdp
from bridge.models import (
    Decoder,
    DecoderConfig,
    DecoderLayer,
    _grouped,
    correction_bias_paths,
    dot_product_attention,
    expert_parallel_rules,
    tensor_parallel_rules,
)
from fsdp_jax import ops

# In float64, but for the softmax of jax's attention, which leaves 1e-6; Adam's eps is
# large, so that no gradient of nothing is blown up.
CLOSE = 2e-5
TX = optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(1e-2, eps=1e-2))
ROWS, SEQ = 8, 12
# With biases, groups and shared experts, where a family has them.
SIZES = {"vocab_size": 128, "num_hidden_layers": 2}
CHANGES: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 8},
    "qwen3_moe": {"mlp_only_layers": []},
    "olmoe": {},
    "gpt_oss": {},
    "deepseek_v3": {"n_shared_experts": 1, "first_k_dense_replace": 1},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
}
MESHES = {
    "mixtral": {"dp_outer": 2, "ep": 2, "tp": 2},
    "qwen3_moe": {"ep": 4},
    "olmoe": {"ep": 4, "tp": 2},
    "gpt_oss": {"dp_outer": 2, "ep": 4},
    "deepseek_v3": {"ep": 2, "tp": 2},
    "lfm2_moe": {"ep": 2, "tp": 2},
}


def make(config: DecoderConfig, key) -> Decoder:
    return Decoder(
        config,
        rngs=nnx.Rngs(key),
        param_dtype=jnp.float64,
        scan=fsdp.scan,
        attention=ops.split_heads(dot_product_attention),
        dispatch=ops.expert_parallel_dispatch,
        constrain=ops.sequence_parallel,
    )


def loss(model: Decoder, tokens):
    logits, stats = model.with_router_stats(tokens[:, :-1])
    assert stats is not None
    balance = ops.load_balancing_loss(*stats[:2], over="global").sum()
    losses = ops.vocab_parallel_cross_entropy(logits, tokens[:, 1:])
    return losses.mean() + 0.01 * balance + 1e-3 * stats.z_loss.mean(-1).sum()


def plan_of(config, mesh, stack=None) -> fsdp.Plan:
    return fsdp.fully_shard(
        functools.partial(make, config),
        mesh,
        [DecoderLayer],
        fsdp.FSDPConfig(
            frozen=correction_bias_paths(config),
            tensor_parallel=tensor_parallel_rules(config, mesh.shape["tp"]),
            expert_parallel=expert_parallel_rules(config),
            pipeline=fsdp.PipelineConfig(stack=stack),
        ),
    )


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """Writes a model of a family to Hugging Face's files, random, none of it zero."""

    def write(family: str, **changes):
        fields = hf_fields(family, **SIZES | changes, **CHANGES[family])
        config = bridge.from_hf_config(fields)
        graph, like = nnx.split(nnx.eval_shape(lambda: make(config, jax.random.key(0))))
        leaves, structure = jax.tree.flatten(like)
        keys = jax.random.split(jax.random.key(1), len(leaves))
        values = [
            0.2 * jax.random.normal(key, leaf.shape, jnp.float32) + 0.1
            for key, leaf in zip(keys, leaves, strict=True)
        ]
        path = tmp_path_factory.mktemp(family) / "model"
        bridge.save_hf(path, jax.tree.unflatten(structure, values), config)
        return path

    return write


def trained(path, mesh, stack=None, num_microbatches=1):
    """Parameters and loss after 3 steps of what a directory holds."""
    config = bridge.from_hf_config(path)
    plan = plan_of(config, mesh, stack)
    state = fsdp.init_state(plan, TX, bridge.load_hf(path, plan.params))
    step = fsdp.make_train_step(plan, loss, TX, num_microbatches=num_microbatches)
    tokens = np.random.default_rng(0).integers(0, 128, (ROWS, SEQ + 1))
    metrics = {}
    for _ in range(3):
        state, metrics = step(state, jnp.asarray(tokens))
    return host(fsdp.sharding.unpack(state.params)), float(metrics["loss"])


@pytest.mark.parametrize("family", CHANGES)
def test_three_steps_of_an_imported_model_are_those_of_one_device(family, written):
    with jax.enable_x64(True):
        path = written(family)
        sizes = MESHES[family]
        devices = jax.devices()[: max(8, math.prod(sizes.values()))]
        got, got_loss = trained(path, fsdp.make_mesh(**sizes, devices=devices))
        want, want_loss = trained(path, fsdp.make_mesh(devices=jax.devices()[:1]))
    # The gradient of a key's bias is zero, so that only rounding moves it.
    assert worst(got, want, without=("k_proj.bias",)) < CLOSE
    assert abs(got_loss - want_loss) < CLOSE


def test_experts_train_the_same_in_blocks_as_on_gpus(written, monkeypatch):
    """Of four rows and more, since tokens here are few; half of the room is empty."""
    monkeypatch.setattr(_grouped, "_SMALLEST", 4)
    monkeypatch.setattr(
        _grouped, "on_gpus", lambda blocks, ragged_dot, *args: blocks(*args)
    )
    with jax.enable_x64(True):
        path = written("qwen3_moe")
        alone = fsdp.make_mesh(devices=jax.devices()[:1])
        got, got_loss = trained(path, fsdp.make_mesh(ep=4))
        monkeypatch.undo()
        want, want_loss = trained(path, alone)
    assert worst(got, want) < CLOSE
    assert abs(got_loss - want_loss) < CLOSE


def test_layers_of_another_structure_run_before_the_stages(written):
    with jax.enable_x64(True):
        path = written(
            "deepseek_v3", num_hidden_layers=4
        )  # a dense one, three with experts
        mesh = fsdp.make_mesh(pp=2, ep=2, tp=2)
        got, got_loss = trained(path, mesh, "layers.1", num_microbatches=2)
        alone = fsdp.make_mesh(devices=jax.devices()[:1])
        want, want_loss = trained(path, alone, num_microbatches=2)
    assert worst(got, want) < CLOSE
    assert abs(got_loss - want_loss) < CLOSE


def test_an_abstract_tree_over_ep_is_filled_with_each_device_s_own_experts(written):
    with jax.enable_x64(True):
        path = written("olmoe")
        config = bridge.from_hf_config(path)
        plan = plan_of(config, fsdp.make_mesh(ep=8))
        whole = plan_of(config, fsdp.make_mesh(devices=jax.devices()[:1]))
        given = bridge.load_hf(path, plan.params), bridge.load_hf(path, whole.params)
    rows = zip(plan.param_plans, *map(jax.tree.leaves, given), strict=True)
    experts = [(got, np.asarray(want)) for param, got, want in rows if param.is_expert]
    assert len(experts) == 2
    for got, want in experts:
        for shard in got.addressable_shards:
            assert shard.data.shape[1] == 1
            np.testing.assert_array_equal(shard.data, want[shard.index])


def test_a_dispatch_that_leaves_tokens_where_they_are_is_refused():
    config = bridge.from_hf_config(hf_fields("olmoe", **SIZES))
    plan = fsdp.fully_shard(
        lambda key: Decoder(config, rngs=nnx.Rngs(key), scan=fsdp.scan),
        fsdp.make_mesh(ep=4),
        [DecoderLayer],
        fsdp.FSDPConfig(expert_parallel=expert_parallel_rules(config)),
    )
    step = fsdp.make_train_step(plan, lambda model, x: model(x).mean(), TX)
    tokens = jax.ShapeDtypeStruct((ROWS, SEQ), jnp.int32)
    with pytest.raises(
        ValueError,
        match=facts(
            "2 of 8",
            "FSDPConfig(expert_parallel=...)",
            "fsdp_jax.ops.expert_parallel_dispatch",
        ),
    ):
        step.lower(fsdp.abstract_state(plan, TX), tokens)
