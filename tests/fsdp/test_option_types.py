"""Options of another type are refused by name, where they are written."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from helpers.errors import facts

import fsdp_jax as fsdp
from fsdp_jax.training import LossScale

WRONG = {
    "sync_batch_norm": ["False", 1, None],
    "reshard_after_forward": ["no", 0],
    "overlap_outer": ["false"],
    "prefetch": [1.0, True, "1"],
    "min_shard_elements": [2.5, None],
    "zero_dp_strategy": [True, 2.0, 4, -1, None],
    "outer_dp_sharding_strategy": [False, "hsdp"],
    "mp_policy": [jnp.bfloat16, None],
    "offload": [True],
    "pipeline": ["1f1b", None],
    "lora": [8],
    "placements": [("dp_shard",)],
    "frozen": [None, {"w": False}, [nnx.Linear], 3],
    "replicated": [None, "w"],
    "tensor_parallel": [None, {"w": "1"}, {"w": 1.0}, {1: 1}, [("w", 1)]],
    "expert_parallel": [{"w": None}],
    "context_parallel": [1],
}


@pytest.mark.parametrize(
    "option, value", [(name, value) for name in WRONG for value in WRONG[name]]
)
def test_an_option_of_another_type_is_refused_by_name(option, value):
    with pytest.raises(ValueError, match=facts(option)):
        fsdp.FSDPConfig(**{option: value})


def test_all_wrong_options_are_said_at_once():
    with pytest.raises(
        ValueError,
        match=facts("sync_batch_norm='False'", "prefetch=1.5", "offload=True"),
    ):
        fsdp.FSDPConfig(sync_batch_norm="False", prefetch=1.5, offload=True)


def test_numbers_of_numpy_are_whole_numbers():
    config = fsdp.FSDPConfig(
        zero_dp_strategy=np.int64(2), prefetch=np.int32(1), sync_batch_norm=np.False_
    )
    assert config.zero_dp_strategy == "optim_grads" and config.prefetch == 1
    assert fsdp.FSDPConfig(tensor_parallel={"w": np.int64(1)}).tensor_parallel == {
        "w": 1
    }


def test_the_letters_of_a_string_are_no_axes():
    with pytest.raises(
        ValueError,
        match=facts("parameter='dp_shard'", "optimizer='dp_shard'"),
    ):
        fsdp.Placements("dp_shard", ("dp_shard",), "dp_shard")
    assert fsdp.Placements(*3 * [["dp_shard"]]).gradient == ("dp_shard",)


OTHERS = {
    "a dtype": (lambda: fsdp.MixedPrecisionPolicy(param_dtype="bf16"), "'bf16'"),
    "a flag": (
        lambda: fsdp.MixedPrecisionPolicy(stochastic_rounding="yes"),
        "stochastic_rounding='yes'",
    ),
    "a fraction": (
        lambda: fsdp.OffloadPolicy(optimizer_fraction=float("nan")),
        "optimizer_fraction=nan",
    ),
    "a schedule": (lambda: fsdp.PipelineConfig(virtual_stages=2.0), "2.0"),
    "a rank": (lambda: fsdp.LoRAConfig("8", targets=["w"]), "rank='8'"),
    "a target": (lambda: fsdp.LoRAConfig(8, targets=[nnx.Linear]), "targets"),
    "a scale": (lambda: LossScale(float("nan")), "initial_scale=nan"),
    "a growth": (lambda: LossScale(growth_factor="2"), "growth_factor='2'"),
    "a count": (lambda: fsdp.checkpoint.KeepBest("run", "x", n=2.0), "n=2.0"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_options_of_other_classes_are_refused_by_name(name):
    make, said = OTHERS[name]
    with pytest.raises(ValueError, match=facts(said)):
        make()


TX = optax.sgd(1.0)


def make(key):
    return {"w": jnp.ones((8, 8))}


def loss(params, rows):
    return jnp.mean((rows @ params["w"]) ** 2)


@pytest.fixture(scope="module")
def plan():
    return fsdp.fully_shard(make, fsdp.make_mesh())


def test_a_config_is_an_fsdp_config():
    wrong = {"zero_dp_strategy": 2}
    for config in (wrong, {}, "zero3"):
        with pytest.raises(ValueError, match=facts(f"config={config!r}", "FSDPConfig")):
            fsdp.fully_shard(make, fsdp.make_mesh(), config=config)


def test_devices_are_a_flat_sequence():
    devices = np.array(jax.devices())
    assert fsdp.make_mesh(devices=devices).size == devices.size
    with pytest.raises(ValueError, match=facts("devices", 2)):
        fsdp.make_mesh(devices=devices.reshape(2, -1))


@pytest.mark.parametrize("count", [2.0, "2", True, 0, None])
def test_microbatches_are_counted_by_whole_numbers(plan, count):
    with pytest.raises(ValueError, match=facts(f"num_microbatches={count!r}")):
        fsdp.make_train_step(plan, loss, TX, num_microbatches=count)
    with pytest.raises(ValueError, match=facts(f"num_microbatches={count!r}")):
        fsdp.value_and_grad(plan, loss, num_microbatches=count)


@pytest.mark.parametrize("scale", [1024.0, "dynamic", True])
def test_a_loss_scale_is_a_loss_scale(plan, scale):
    params = fsdp.init_params(plan, jax.random.key(0))
    with pytest.raises(ValueError, match=facts(f"loss_scale={scale!r}", "LossScale")):
        fsdp.init_state(plan, TX, params, loss_scale=scale)
    with pytest.raises(ValueError, match=facts(f"loss_scale={scale!r}", "LossScale")):
        fsdp.make_train_step(plan, loss, TX, loss_scale=scale)


def test_patterns_of_other_shapes_may_come_from_a_generator(tmp_path, plan):
    state = fsdp.init_state(plan, TX, fsdp.init_params(plan, jax.random.key(0)))
    fsdp.save(tmp_path, state)
    longer = dataclasses.replace(state, params={"w": jnp.ones((16, 8))})
    given = (name for name in ["params.*"])
    found = fsdp.load(tmp_path, longer, allow_shape_mismatch=given)
    assert found.params["w"].shape == (16, 8)
    with pytest.raises(ValueError, match=facts("allow_shape_mismatch='params.w'")):
        fsdp.load(tmp_path, longer, allow_shape_mismatch="params.w")


@pytest.mark.parametrize("rules", [{"a": "b"}, "ab", ["ab"], [("a", 1)], 3])
def test_rules_are_pairs_of_strings(tmp_path, plan, rules):
    like = fsdp.abstract_state(plan, TX)
    with pytest.raises(ValueError, match=facts(f"rules={rules!r}")):
        fsdp.load(tmp_path, like, rules=rules)


@pytest.mark.parametrize("window", [0, -1])
@pytest.mark.parametrize(
    "attention", [fsdp.ops.ring_attention, fsdp.ops.all_gather_attention]
)
def test_a_window_without_a_token_is_refused(attention, window):
    heads = jnp.ones((1, 8, 2, 4))
    with pytest.raises(ValueError, match=facts(f"window={window}", 1)):
        attention(heads, heads, heads, scale=1.0, window=window)
