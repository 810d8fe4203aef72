"""Steps are compiled for GPUs that are not here, and do what was planned."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from helpers.errors import facts
from helpers.llama import Llama, tokens

import fsdp_jax as fsdp
from bridge.models import Decoder, DecoderConfig, DecoderLayer, MoEConfig
from fsdp_jax.planner._comm_table import SentRow, sent_grid
from fsdp_jax.planner._compile import compile_scheduled
from fsdp_jax.planner._flops import product_flops
from fsdp_jax.planner._gpu import GPUS
from fsdp_jax.planner.liveness._operations import Operation, Program, Value

pytestmark = pytest.mark.plan

TX = optax.adamw(1e-3)
WIDE = Llama(
    width=4096, mlp=14336, heads=32, layers=8, vocab=128000, pieces=8
)  # Llama-3 8B, a quarter of its layers.
SMALL = Llama(layers=6)


@pytest.fixture(autouse=True)
def all_optimizations():
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", True)


def estimate(model, batch, *, prefetch=1, unroll=1, config=None, **options):
    plan = model.plan(fsdp.make_mesh(devices=jax.devices()[:1]), **(config or {}))
    loss = model.loss(prefetch, unroll)
    many = math.prod(batch.shape[:1]) * (batch.shape[1] - 1)
    options = {"gpus": 8, "tokens": many, "guide": False} | options
    return fsdp.estimate_step(plan, loss, TX, batch, **options)


@pytest.fixture(scope="module")
def wide():
    jax.config.update("jax_disable_most_optimizations", False)
    return estimate(WIDE, tokens(8, 4096), unroll=2)


def in_loops(found, op):
    return [
        sent for sent in found.timeline.sent if sent.depth and sent.collective.op == op
    ]


def test_what_a_scanned_stack_communicates_is_hidden(wide):
    for op in ("all-gather", "reduce-scatter"):
        sent = in_loops(wide, op)
        exposed = sum(s.exposed for s in sent)
        assert len(sent) >= 8
        assert exposed < 0.02 * sum(s.end - s.start for s in sent)
    assert wide.exposed < 0.06  # At both ends there is nothing to hide behind.


def test_without_prefetch_each_gather_would_be_waited_for():
    plain = estimate(WIDE, tokens(8, 4096), prefetch=0)
    assert "gathers of 'layers' are waited for" in repr(plain)
    sent = in_loops(plain, "all-gather")
    assert sum(s.exposed for s in sent) > 0.8 * sum(s.end - s.start for s in sent)


def test_bfloat16_is_communicated_where_the_policy_says_so(wide):
    large = [row for row in wide.sent if row.bytes > 1 << 20]
    assert large and {row.dtype for row in large} == {"bf16"}
    assert {row.axes for row in large} == {("dp_shard",)}


def test_each_unit_is_communicated_as_often_as_planned(wide):
    times = {"all-gather": 0, "reduce-scatter": 0}
    for row in wide.sent:
        if row.unit == "layers":
            times[row.op] += row.times
    # Each of the 8 layers forward and backward; the last one once for both, but one
    # gather ahead of the first layer's backward, and one of what is not there yet.
    assert times["all-gather"] in (16, 17)
    assert times["reduce-scatter"] in (8, 9)


def test_an_estimate_is_a_table_json_and_a_picture(wide, tmp_path):
    text = repr(wide)
    assert text.startswith("8 x NVIDIA H200 (dp_shard=8)\nstep: ")
    assert "waited for" not in text
    for word in ("tokens/s/GPU", "MFU", "predicted together", "reduce-scatter", "fits"):
        assert word in text
    wide.save_json(tmp_path / "f.json")
    found = json.loads((tmp_path / "f.json").read_text())
    assert found["step_seconds"] == wide.timeline.seconds
    assert found["memory_predicted"]["total"] == wide.memory.total
    assert len(found["collectives"]) == len(wide.sent)
    for name in ("f.png", "f.svg"):
        wide.save_picture(tmp_path / name)
        assert (tmp_path / name).stat().st_size > 10_000
    with pytest.raises(ValueError, match=facts("f.jpeg'", ".png", ".svg")):
        wide.save_picture(tmp_path / "f.jpeg")


def test_model_flops_are_those_of_the_formula(wide):
    # 6 a weight and token, attention 12 a layer, width, position and token.
    weights = sum(
        math.prod(param.shape)
        for param in wide.plan.param_plans
        if len(param.shape) > 1 and param.name != "embed" and "norm" not in param.name
    )
    seq = 4096
    a_token = 6 * weights + 12 * WIDE.layers * WIDE.heads * WIDE.head_dim * seq
    assert wide.model_flops == pytest.approx(a_token * seq, rel=1e-6)


@pytest.mark.parametrize(
    "frozen, products",
    [
        ((), 27),
        (("layers.*",), 10),  # forward, and the gradient of the head
        (("layers.up",), 23),  # no gradients of 4 matrices
        (("head",), 26),
    ],
)
def test_model_flops_are_less_by_the_gradients_that_frozen_parameters_lack(
    frozen, products
):
    layers, width, rows = 4, 64, 32

    def make_weights(key):
        matrix = jax.random.normal(key, (layers, width, width))
        return {"layers": {"up": matrix, "down": matrix}, "head": matrix[0]}

    def layer(w, x):
        return x + jnp.tanh(x @ w["up"]) @ w["down"], None

    def loss(weights, x):
        y, _ = fsdp.scan(layer, weights["layers"], x)
        return jnp.mean((y @ weights["head"]) ** 2)

    stack = [fsdp.Stacked("layers")]
    config = fsdp.FSDPConfig(frozen=frozen)
    plan = fsdp.fully_shard(make_weights, fsdp.make_mesh(), stack, config)
    found = fsdp.planner.model_flops(plan, loss, jnp.zeros((rows, width)))
    assert found == products * 2 * rows * width**2


@pytest.mark.parametrize("factor", [None, 1.0, 2.0])
def test_model_flops_of_experts_are_those_of_the_rows_that_tokens_chose(factor):
    config = DecoderConfig(
        vocab_size=500,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        moe=MoEConfig(num_experts=16, num_experts_per_tok=3, intermediate_size=96),
    )
    dispatch = {}
    if factor is not None:
        dispatch["dispatch"] = functools.partial(
            fsdp.ops.expert_capacity_dispatch, capacity_factor=factor
        )
    plan = fsdp.fully_shard(
        lambda key: Decoder(config, rngs=nnx.Rngs(key), scan=fsdp.scan, **dispatch),
        fsdp.make_mesh(),
        [DecoderLayer],
    )

    def loss(model, batch):
        return jnp.mean(jax.nn.logsumexp(model(batch)[0], -1))

    rows, seq, width = 8, 256, 64
    found = fsdp.planner.model_flops(plan, loss, jnp.zeros((rows, seq), jnp.int32))
    layer = 4 * width**2 + 16 * width + 3 * 3 * width * 96
    a_token = 6 * (2 * layer + 500 * width) + 12 * 2 * width * seq
    assert found == pytest.approx(a_token * rows * seq, rel=1e-2)


def test_each_row_of_a_product_by_groups_is_in_one_product():
    """Forward, for the gradient of the rows, and for that of the matrices."""
    rows, matrices = jnp.zeros((40, 6)), jnp.zeros((3, 6, 10))
    sizes = jnp.array([30, 10, 0], jnp.int32)

    def product(rows, matrices):
        return jax.lax.ragged_dot(rows, matrices, sizes)

    def both_gradients(rows, matrices, grad):
        return jax.vjp(product, rows, matrices)[1](grad)

    found = [
        product_flops(Program((), (), operations_of(made)))
        for made in (
            jax.make_jaxpr(product)(rows, matrices),
            jax.make_jaxpr(both_gradients)(rows, matrices, jnp.zeros((40, 10))),
        )
    ]
    each = 2 * 40 * 6 * 10
    # jax computes the product as well before it is differentiated.
    assert found[0] == each and found[1] in (2 * each, 3 * each)


def operations_of(made) -> tuple[Operation, ...]:
    return tuple(
        Operation(
            eqn.primitive.name,
            tuple(Value(v.aval.shape, v.aval.dtype) for v in eqn.invars),
            tuple(Value(v.aval.shape, v.aval.dtype) for v in eqn.outvars),
            "",
            eqn.params,
        )
        for eqn in made.jaxpr.eqns
        if eqn.primitive.name.startswith("ragged_dot")
    )


CONFIGURATIONS = {
    "two layers an iteration": dict(unroll=2, batch=tokens(8, 4096)),
    "no prefetch": dict(prefetch=0, batch=tokens(8, 4096)),
    "two ahead": dict(prefetch=2, batch=tokens(8, 4096)),
    "short rows": dict(batch=tokens(64, 512)),
    "microbatches": dict(unroll=2, batch=tokens(32, 4096), num_microbatches=4),
    "replicas": dict(batch=tokens(64, 512), gpus=16, mesh={"dp_outer": 2}),
}


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_memory_is_predicted_within_5_percent_of_what_xla_assigns(name, wide):
    options = dict(CONFIGURATIONS[name])
    same = name == "two layers an iteration"
    found = wide if same else estimate(WIDE, options.pop("batch"), **options)
    assert found.memory.total == pytest.approx(found.compiled_bytes, rel=0.05)
    assert found.memory.params == found.plan.bytes_per_device["params"]


def test_a_prediction_that_forgets_the_activations_would_be_noticed(wide):
    without = wide.memory.total - wide.memory.activations
    assert without != pytest.approx(wide.compiled_bytes, rel=0.05)


def test_replicas_gather_within_a_node_and_reduce_behind_the_computation():
    found = estimate(SMALL, tokens(32, 2048), unroll=2, gpus=16, mesh={"dp_outer": 2})
    outer = [s for s in found.timeline.sent if s.collective.group_size == 2]
    assert {s.collective.op for s in outer} == {"all-reduce"}
    gathers = [row for row in found.sent if row.op == "all-gather"]
    assert {row.axes for row in gathers} == {("dp_shard",)}
    looped = [s for s in outer if s.depth]
    assert len(looped) >= SMALL.layers
    assert sum(s.exposed for s in looped) < 0.3 * sum(s.end - s.start for s in looped)


def test_a_schedule_is_guided_where_communication_is_slow():
    """XLA takes a network for faster than it is, and starts gathers too late."""
    plan = SMALL.plan(
        fsdp.make_mesh(devices=fsdp.planner.gpu_devices(GPUS["h200"], 16)),
    )
    step = fsdp.make_train_step(plan, SMALL.loss(1, 2), TX)
    lowered = step.lower(fsdp.abstract_state(plan, TX), tokens(64, 2048))
    slow = dataclasses.replace(GPUS["h200"].cost, network_bandwidth=2.5e9)
    found = compile_scheduled(lowered, slow, 16, fsdp.training.compiler_options())
    assert found.guided
    own = compile_scheduled(
        lowered, slow, 16, fsdp.training.compiler_options(), guide=False
    )
    assert found.timeline.exposed_seconds < 0.8 * own.timeline.exposed_seconds


def test_other_gpus_are_other_targets():
    plan = Llama(width=256, mlp=512, heads=2, kv_heads=2, layers=2, vocab=512).plan(
        fsdp.make_mesh(devices=jax.devices()[:1])
    )
    model = Llama(width=256, mlp=512, heads=2, kv_heads=2, layers=2, vocab=512)
    batch = tokens(8, 128)
    times = {
        gpu: fsdp.estimate_step(
            *(plan, model.loss(), TX, batch), gpu=gpu, gpus=8, guide=False
        )
        for gpu in ("a100", "b200")
    }
    assert times["a100"].timeline.seconds > times["b200"].timeline.seconds


def test_what_makes_no_whole_nodes_is_refused():
    with pytest.raises(ValueError, match=facts("12 GPUs", "8")):
        fsdp.planner.gpu_devices(GPUS["h200"], 12)


STAND_INS = """
import jax, fsdp_jax as fsdp
jax.config.update("jax_platforms", {platforms!r})
try:
    print(len(fsdp.planner.gpu_devices(fsdp.planner.GPUS["h200"], 8)))
except ValueError as error:
    print(error)
"""


@pytest.mark.parametrize(
    "platforms, says",
    # Where there is a driver it works either way.
    [("cpu", ["8\n"]), (None, ["8\n", "jax did not set up its CUDA plugin"])],
)
def test_a_machine_without_a_driver_is_told_what_to_say(platforms, says):
    """In a process of its own: jax looks for its plugins once."""
    environment = {k: v for k, v in os.environ.items() if k != "JAX_PLATFORMS"}
    code = STAND_INS.format(platforms=platforms)
    out = subprocess.check_output(
        [sys.executable, "-c", code], env=environment, text=True, stderr=subprocess.PIPE
    )
    assert out.startswith(tuple(says))


def test_the_axes_of_a_mesh_of_stand_ins_are_those_asked_for():
    found = estimate(
        Llama(width=256, mlp=512, heads=2, kv_heads=2, layers=2, vocab=512),
        tokens(16, 128),
        gpus=16,
        mesh={"dp_outer": 4, "dp_shard": -1},
    )
    assert dict(found.plan.mesh.shape)["dp_shard"] == 4
    assert jnp.dtype(found.plan.param_plans[0].precision.param) == jnp.bfloat16


def test_a_gpu_that_the_step_does_not_fit_is_told_of(wide):
    assert wide.memory_alarms == ()
    small = dataclasses.replace(GPUS["h200"], memory=round(wide.compiled_bytes / 0.97))
    near = dataclasses.replace(wide, gpu=small)
    (alarm,) = near.memory_alarms
    assert "97.0% of the" in alarm and alarm in repr(near)
    assert near.to_dict()["memory_alarms"] == [alarm]


def test_what_xla_recomputes_of_itself_is_told_of():
    # With nothing recomputed by plan, on a GPU with a third of the memory for it.
    config = {"remat_policy": None}
    plain = estimate(Llama(layers=2), tokens(64), prefetch=0, config=config)
    assert plain.memory_alarms == ()
    gpu = dataclasses.replace(GPUS["h200"], memory=plain.compiled_bytes // 3)
    tight = estimate(Llama(layers=2), tokens(64), prefetch=0, config=config, gpu=gpu)
    assert any("XLA recomputes" in alarm for alarm in tight.memory_alarms)


def test_padding_that_is_more_than_a_little_is_said():
    small = Llama(width=256, mlp=512, heads=2, kv_heads=1, layers=2, vocab=512)
    found = estimate(small, tokens(96, 64), gpus=96)
    params = found.plan.param_plans
    times = sum(math.prod(p.padded_shape) for p in params) / sum(
        math.prod(p.shape) for p in params
    )
    assert times > 1.1  # 256 rows over 96 ranks are stored as 288
    (line,) = (one for one in repr(found).splitlines() if one.startswith("padding"))
    assert f"{times:.2f} times" in line
    assert "padding" not in repr(estimate(small, tokens(8, 64)))


def test_a_step_with_a_loss_scale_is_estimated():
    policy = fsdp.MixedPrecisionPolicy(param_dtype=jnp.float16)
    scale, config = fsdp.training.LossScale(), {"mp_policy": policy}
    small = Llama(width=256, mlp=512, heads=2, kv_heads=1, layers=2, vocab=512)
    found = estimate(small, tokens(8, 256), config=config, loss_scale=scale)
    assert found.fits and found.timeline.seconds > 0


def test_an_optimizer_that_is_made_for_a_plan_is_made_for_that_of_the_gpus():
    model = Llama(width=256, mlp=512, heads=2, kv_heads=1, layers=2, vocab=512)
    plan = model.plan(fsdp.make_mesh(devices=jax.devices()[:1]))
    rest, matrices = optax.adamw(1e-3), ["layers.q", "layers.up"]

    def layer_wise(plan):
        return fsdp.optim.layer_wise(plan, optax.trace(0.9), rest, matrices)

    given = (model.loss(), layer_wise, tokens(8, 256))
    found = fsdp.estimate_step(plan, *given, gpus=8, guide=False)
    fsdp.audit_step(found.plan, found.compiled)
    assert "all-to-all" in {row.op for row in found.sent}
    with pytest.raises(
        ValueError, match=facts("1 devices", "8 GPUs", "layer_wise(plan")
    ):
        fsdp.estimate_step(plan, given[0], layer_wise(plan), given[2], gpus=8)


def test_units_that_share_a_collective_fit_into_a_row_of_the_table():
    names = [f"layers.{number}" for number in range(80)]
    rows = [
        SentRow("all-gather", "forward", " + ".join(units), "f32", ("dp",), 8, 1, 0, 0)
        for units in (names[:1], names[:3], names)
    ]
    shown = [row[2] for row in sent_grid(rows).rows]
    assert shown == [
        "layers.0",
        "layers.0 + layers.1 + layers.2",
        "layers.0 + layers.1 + 78 others",
    ]
