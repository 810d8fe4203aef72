"""LoRA: factors beside the weights of a frozen model of any kind."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from bridge_helpers import tensors_of
from flax import nnx
from golden.write_peft_lora import (
    ADAMW,
    ALPHA,
    FOLDER,
    RANK,
    batches,
    first_factors,
    write_base,
)
from helpers.compare import host, relative_errors
from helpers.errors import facts
from helpers.zoo import CASES, batch

import bridge
import fsdp_jax as fsdp
from bridge.models import (
    Decoder,
    DecoderConfig,
    DecoderLayer,
    dot_product_attention,
    tensor_parallel_rules,
)
from fsdp_jax.lora._low_rank import Factored, call_with_factors

TX = optax.adamw(1e-2, eps=1e-3)
OUT_FIRST = {"out_first": True}
TARGETS = {
    "nnx unrolled": ["layers.*.up.kernel", "head.kernel"],
    "nnx scanned": [
        "layers.up.kernel",
        fsdp.lora.LoRATarget("layers.attend.query.kernel", num_in=1, rank=2, alpha=6),
        fsdp.lora.LoRATarget("layers.attend.out.kernel", num_in=2),
    ],
    "linen": ["params.block_*.Dense_*.kernel"],
    "linen scanned": ["params.layers.Dense_*.kernel"],
    "equinox": [
        fsdp.lora.LoRATarget("stack.up.weight", **OUT_FIRST),
        fsdp.lora.LoRATarget("layers.*.down.weight", **OUT_FIRST),
    ],
    "plain pytree": ["stack.up", "layers.*.down"],
}


def lora(name, **options):
    return fsdp.LoRAConfig(4, TARGETS[name], alpha=8, **options)


def with_products(params):
    """The same parameters, whose factors have a product that is not zero."""
    keys = iter(jax.random.split(jax.random.key(5), 99))

    def draw(leaf):
        drawn = 0.3 * jax.random.normal(next(keys), leaf.shape, leaf.dtype)
        return jax.device_put(drawn, leaf.sharding)

    return params | {"lora": jax.tree.map(draw, params["lora"])}


@pytest.mark.parametrize("name", list(CASES))
def test_gradients_are_those_of_the_sum_on_one_device(name):
    case = CASES[name]
    plan = case.plan(fsdp.make_mesh(), lora=lora(name))
    params = with_products(fsdp.init_params(plan, jax.random.key(0)))
    _, state = case.weights()
    compute = fsdp.value_and_grad(plan, case.loss)
    given = {"key": jax.random.key(0), "model_state": state} if plan.has_keys else {}
    value, grads = compute(params, batch(), **given)

    def loss(factors, base):
        model = plan.model.merge({"base": base, "lora": factors}, state)
        return case.loss(model, batch())

    whole = jax.device_get(params)
    want, wanted = jax.jit(jax.value_and_grad(loss))(whole["lora"], whole["base"])
    assert abs(float(value[0]) / float(want) - 1) < 1e-6
    assert all(leaf is None for leaf in plan.treedef.flatten_up_to(grads)[:3])
    errors = relative_errors(host(grads["lora"]), host(wanted))
    assert errors and max(errors.values()) < 1e-5, errors


@pytest.mark.parametrize("base", [None, pytest.param("nf4", marks=pytest.mark.long)])
def test_under_tp_gradients_are_those_without_and_the_program_is_the_plans(base):
    """The base is split over tp too, unless it is in codes; factors are replicated."""
    data = np.random.default_rng(0).integers(0, 64, (8, 17)).astype(np.int32)
    plan, without = decoder_plan(4, base), decoder_plan(1, base)
    params = with_products(fsdp.init_params(without, jax.random.key(0)))
    found = []
    for one in (plan, without):
        placed = jax.tree.map(
            lambda x, m: jax.device_put(x, m.sharding), params, one.params
        )
        (value, _), grads = fsdp.value_and_grad(one, next_token_loss)(placed, data)
        found.append((float(value), host(grads["lora"])))
    (value, grads), (want_value, want) = found
    assert value == pytest.approx(want_value, rel=1e-6)
    errors = relative_errors(grads, want)
    assert errors and max(errors.values()) < 2e-5, errors
    step = fsdp.make_train_step(plan, next_token_loss, TX)
    fsdp.audit_step(plan, step.lower(fsdp.abstract_state(plan, TX), data))
    split = {
        param.name for param in plan.param_plans if param.split.tensor_dim is not None
    }
    assert ("layers.mlp.up_proj.kernel" in split) == (base is None)
    assert not any("lora" in name for name in split)


def decoder_plan(tp, base):
    config = DecoderConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    modules = bridge.lora_targets(config, ("q_proj", "o_proj", "up_proj"))
    targets = [fsdp.lora.LoRATarget(path, num_in=n) for path, n in modules.items()]
    return fsdp.fully_shard(
        lambda key: Decoder(
            config,
            rngs=nnx.Rngs(key),
            scan=fsdp.scan,
            attention=fsdp.ops.split_heads(dot_product_attention),
            constrain=fsdp.ops.sequence_parallel,
        ),
        fsdp.make_mesh(tp=tp),
        [DecoderLayer],
        fsdp.FSDPConfig(
            lora=fsdp.LoRAConfig(4, targets, alpha=8, base=base),
            tensor_parallel=tensor_parallel_rules(config, tp),
        ),
    )


# As PEFT


def peft_plan(config, devices=8, **options):
    targets = [
        fsdp.lora.LoRATarget("layers.self_attn.q_proj.kernel", num_in=1),
        fsdp.lora.LoRATarget("layers.self_attn.o_proj.kernel", num_in=2),
        fsdp.lora.LoRATarget("layers.mlp.down_proj.kernel", num_in=1),
    ]
    policy = options.pop("mp_policy", fsdp.MixedPrecisionPolicy())
    return fsdp.fully_shard(
        lambda key: Decoder(config, rngs=nnx.Rngs(key), scan=fsdp.scan),
        fsdp.make_mesh(devices=jax.devices()[:devices]),
        [DecoderLayer],
        fsdp.FSDPConfig(
            lora=fsdp.LoRAConfig(RANK, targets, alpha=ALPHA, **options),
            mp_policy=policy,
        ),
    )


def next_token_loss(model, tokens):
    losses = optax.softmax_cross_entropy_with_integer_labels(
        model(tokens[:, :-1]).astype(jnp.float32), tokens[:, 1:]
    )
    return losses.mean()


@dataclasses.dataclass(frozen=True)
class Tuned:
    """A base, and 20 steps from where PEFT began."""

    path: Path
    config: bridge.models.DecoderConfig
    plan: fsdp.Plan
    tx: optax.GradientTransformation
    step: fsdp.training.TrainStep
    before: dict
    state: fsdp.TrainState
    losses: list[float]


@pytest.fixture(scope="module")
def tuned(tmp_path_factory) -> Tuned:
    folder = tmp_path_factory.mktemp("peft")
    path = write_base(folder / "base")
    config = bridge.from_hf_config(path)
    start = write_adapter(folder / "start", first_factors())
    plan = peft_plan(config)
    base = bridge.load_hf(path, fsdp.training.abstract_base_params(plan))
    factors = bridge.load_lora(start, config).factors
    params = fsdp.training.add_lora(plan, base, factors=factors)
    before = jax.device_get(params["base"])
    tx = optax.adamw(ADAMW["lr"], weight_decay=ADAMW["weight_decay"], eps=ADAMW["eps"])
    step = fsdp.make_train_step(plan, next_token_loss, tx)
    state, losses = fsdp.init_state(plan, tx, params), []
    for tokens in batches():
        state, metrics = step(state, tokens.astype(np.int32))
        losses.append(float(metrics["loss"]))
    return Tuned(path, config, plan, tx, step, before, state, losses)


def write_adapter(path, tensors):
    from safetensors.numpy import save_file

    path.mkdir()
    save_file(tensors, path / "adapter_model.safetensors")
    text = (FOLDER / "adapter_config.json").read_text()
    (path / "adapter_config.json").write_text(text)
    return path


def saved(tuned, path):
    """The adapter as PEFT's files."""
    factors = jax.device_get(fsdp.sharding.unpack(tuned.state.params)["lora"])
    adapter = bridge.load_lora(FOLDER, tuned.config)
    adapter = dataclasses.replace(adapter, factors=factors)
    bridge.save_lora(path, adapter, tuned.config)
    return path


def test_twenty_steps_are_those_of_peft(tuned, tmp_path):
    told = json.loads((FOLDER / "losses.json").read_text())
    np.testing.assert_allclose(tuned.losses, told["losses"], rtol=1e-5)
    ours = tensors_of(saved(tuned, tmp_path / "out") / "adapter_model.safetensors")
    theirs = tensors_of(FOLDER / "adapter_model.safetensors")
    assert ours.keys() == theirs.keys()
    start = first_factors()
    for key, want in theirs.items():
        error = np.linalg.norm(ours[key] - want) / np.linalg.norm(want)
        assert error < 1e-5, (key, error)
        moved = np.linalg.norm(start[key] - want) / np.linalg.norm(want)
        assert moved > 1e-2, (key, moved)


def test_the_base_is_untouched_to_the_bit(tuned):
    after = jax.device_get(fsdp.sharding.unpack(tuned.state.params)["base"])
    jax.tree.map(np.testing.assert_array_equal, tuned.before, after)


def test_merged_it_is_what_the_bridge_merges(tuned, tmp_path):
    merged = fsdp.training.merge_lora(tuned.plan, tuned.state.params)
    path = saved(tuned, tmp_path / "out")
    like = fsdp.training.abstract_base_params(tuned.plan)
    want = bridge.load_hf_with_lora(tuned.path, path, like)
    for ours, theirs in zip(*map(jax.tree.leaves, (merged, want)), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=2e-6)
    changed = [
        bool((np.asarray(a) != b).any())
        for a, b in zip(*map(jax.tree.leaves, (merged, tuned.before)), strict=True)
    ]
    assert sum(changed) == 3


def elements(tree):
    return sum(leaf.size for leaf in jax.tree.leaves(tree))


def test_optimizer_and_gradients_are_of_the_factors_alone(tuned):
    factors = elements(tuned.state.params["lora"])
    like = fsdp.abstract_state(tuned.plan, tuned.tx)
    assert elements(like.opt_state) == 2 * factors + 1  # two moments and a count
    assert tuned.plan.bytes_per_device["grads"] == factors * 4 // 8
    # What the compiled step takes is that, the parameters, and a few scalars.
    tokens = batches()[0].astype(np.int32)
    memory = tuned.step.lower(like, tokens).compile().memory_analysis()
    kept = tuned.plan.bytes_per_device["params"] + 2 * factors * 4 // 8
    given = memory.argument_size_in_bytes - tokens.nbytes // 8
    assert kept <= given < kept + 256


def test_a_checkpoint_may_hold_the_factors_alone_and_goes_on(tuned, tmp_path):
    fsdp.save(tmp_path, fsdp.training.trained_state(tuned.plan, tuned.state))
    stored = fsdp.checkpoint.load_shapes(tmp_path)
    assert sum(name.startswith("params.") for name in stored) == 6
    assert not any(".base." in name for name in stored)
    plan = peft_plan(tuned.config, devices=4)
    like = fsdp.training.trained_state(plan, fsdp.abstract_state(plan, tuned.tx))
    base = bridge.load_hf(tuned.path, fsdp.training.abstract_base_params(plan))
    params = fsdp.training.add_lora(plan, base, jax.random.key(0))
    loaded = fsdp.training.with_frozen(plan, fsdp.load(tmp_path, like), params)
    for ours, theirs in zip(
        *map(
            jax.tree.leaves,
            (fsdp.sharding.unpack(loaded), fsdp.sharding.unpack(tuned.state)),
        ),
        strict=True,
    ):
        if not jnp.issubdtype(ours.dtype, jax.dtypes.prng_key):
            np.testing.assert_array_equal(ours, theirs)


# Precision, storage


def test_a_base_in_bfloat16_has_factors_in_float32_that_it_does_not_round_away(tuned):
    policy = fsdp.MixedPrecisionPolicy(param_dtype=jnp.bfloat16)
    plan = peft_plan(tuned.config, mp_policy=policy)
    dtypes = {
        param.name: param.precision.main_params.name for param in plan.param_plans
    }
    assert {d for n, d in dtypes.items() if "lora_" in n} == {"float32"}
    assert {d for n, d in dtypes.items() if "lora_" not in n} == {"bfloat16"}

    # Powers of two: the base's product is exact, and the factors' a 2^-12 of it.
    x = jnp.ones((1, 4), jnp.bfloat16)
    base, a = jnp.ones((4, 2), jnp.bfloat16), jnp.full((4, 1), 2.0**-12)
    weight = Factored("w", base, a, jnp.ones((1, 2)), (0,), (1,))

    def product(weights, x):
        return jnp.dot(x, weights[0], preferred_element_type=jnp.float32)

    got = call_with_factors(product, [weight], x)
    np.testing.assert_array_equal(got, np.full((1, 2), 4 + 4 * 2.0**-12))
    summed = product([weight.total()], x)
    np.testing.assert_array_equal(summed, np.full((1, 2), 4.0))  # rounded away


def coded_weights(plan):
    return [w for w in plan.model.adapted.weights.values() if w.recipe.form]


@pytest.mark.parametrize("form", ["int8", "nf4"])
def test_a_quantized_base_is_communicated_as_codes_and_trains(tuned, form):
    plan = peft_plan(tuned.config, base=form)
    loaded = bridge.load_hf(tuned.path, fsdp.training.abstract_base_params(plan))
    params = fsdp.training.add_lora(plan, loaded, jax.random.key(0))
    step = fsdp.make_train_step(plan, next_token_loss, tuned.tx)
    state = fsdp.init_state(plan, tuned.tx, params)
    coded = [param for param in plan.param_plans if param.name.endswith(".codes")]
    assert len(coded) == 7
    text = step.lower(state, batches()[0].astype(np.int32)).as_text()
    gathers = re.findall(r"all_gather\"?\(.*?-> tensor<([\dx]*)x(\w+)>", text)
    dtype = "i8" if form == "int8" else "ui8"
    gathered = {shape for shape, kind in gathers if kind == dtype}
    assert gathered == {"x".join(map(str, param.shape[1:])) for param in coded}
    whole = {weight.recipe.shape for weight in coded_weights(plan)}
    assert not whole & {tuple(map(int, shape.split("x"))) for shape, _ in gathers}
    matrices = sum(np.prod(weight.shape) for weight in coded_weights(plan))
    held = sum(
        np.prod(param.shape) * param.precision.param.itemsize
        for param in plan.param_plans
        if param.name in plan.model.codes
    )
    assert held == matrices * (0.5 if form == "nf4" else 1) + matrices / 64 * 4
    before = jax.device_get(params["quantized"])
    losses = []
    for tokens in batches()[:6]:
        state, metrics = step(state, tokens.astype(np.int32))
        losses.append(float(metrics["loss"]))
    after = jax.device_get(fsdp.sharding.unpack(state.params)["quantized"])
    jax.tree.map(np.testing.assert_array_equal, before, after)
    # Near the exact base's, and not it.
    assert 1e-7 < max(abs(np.subtract(losses, tuned.losses[:6]))) < 0.1


# Dropout


def test_dropout_is_of_training_alone_and_of_each_step_its_own():
    case = CASES["plain pytree"]
    plan = case.plan(fsdp.make_mesh(), lora=lora("plain pytree", dropout=0.5))
    params = with_products(fsdp.init_params(plan, jax.random.key(0)))
    evaluate = fsdp.make_eval_step(plan, case.loss)
    exact = evaluate(params, batch())["loss"]
    compute = fsdp.value_and_grad(plan, case.loss)

    def loss(seed):
        return float(compute(params, batch(), key=jax.random.key(seed))[0][0])

    assert loss(0) == loss(0) != loss(1)
    assert abs(loss(0) - exact) > 1e-3
    with pytest.raises(ValueError, match=facts("key=jax.random.key(...)")):
        compute(params, batch())


def test_dropout_leaves_the_mean_of_a_product_as_it_is():
    x = jnp.ones((1, 4096))
    keys = jax.random.split(jax.random.key(0), 64)

    def product(key):
        a, b = jnp.ones((4096, 1)), jnp.ones((1, 1))
        weight = Factored("w", jnp.zeros((4096, 1)), a, b, (0,), (1,), 0.25, key)
        return call_with_factors(lambda w, x: x @ w[0], [weight], x)[0, 0]

    got = jax.vmap(product)(keys)
    assert abs(got.mean() / 4096 - 1) < 0.01 and got.std() > 1


# What is refused


@pytest.mark.parametrize(
    "options, said",
    [
        ({"targets": "stack.up"}, ["targets='stack.up'"]),
        ({"targets": []}, ["targets"]),
        ({"targets": ["stack.up"], "rank": 0}, ["'stack.up'", "rank=0", "1"]),
        ({"targets": ["stack.up"], "dropout": 1.0}, ["dropout=1.0"]),
        ({"targets": ["stack.up"], "base": "fp4"}, ["base='fp4'", "'nf4'"]),
        ({"targets": ["stack.no"]}, ["'stack.no'"]),
        ({"targets": ["stack.bias"]}, ["'stack.bias'", "1"]),
        ({"targets": ["stack"]}, ["'stack.bias'", "1"]),
        ({"targets": ["head"], "dropout": 0.1}, ["'head'", "dropout=0.1"]),
        (
            {"targets": ["head"], "modules_to_save": ("head",)},
            ["'head'", "modules_to_save"],
        ),
    ],
)
def test_what_makes_no_sense_is_refused_by_name(options, said):
    with pytest.raises(ValueError, match=facts(*said)):
        CASES["plain pytree"].plan(
            fsdp.make_mesh(), lora=fsdp.LoRAConfig(**{"rank": 2} | options)
        )


def test_weights_of_more_dims_say_which_are_inputs():
    with pytest.raises(
        ValueError,
        match=facts(
            "'layers.attend.query.kernel'",
            "3 dims",
            "fsdp.lora.LoRATarget(..., num_in=...)",
        ),
    ):
        CASES["nnx scanned"].plan(
            fsdp.make_mesh(), lora=fsdp.LoRAConfig(2, ["layers.attend.query.kernel"])
        )


def test_lora_beside_frozen_is_refused():
    with pytest.raises(
        ValueError, match=facts("FSDPConfig(lora=..., frozen=('head',))")
    ):
        CASES["plain pytree"].plan(
            fsdp.make_mesh(), lora=lora("plain pytree"), frozen=("head",)
        )


def test_what_is_saved_unfactored_is_trained():
    case = CASES["plain pytree"]
    options = lora("plain pytree", modules_to_save=("stack.bias", "head"))
    plan = case.plan(fsdp.make_mesh(), lora=options)
    trained = {param.name for param in plan.param_plans if not param.is_frozen}
    assert {"stack.bias", "head", "stack.up.lora_a"} <= trained
    assert "stack.down" not in trained
