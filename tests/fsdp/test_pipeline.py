"""Layers split over `pp`: microbatches pass through the stages, and nothing changes."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers.compare import host, worst
from helpers.errors import facts

import fsdp_jax as fsdp
from fsdp_jax import ops
from fsdp_jax.sharding._stages import Schedule, Stages

# By the norm of all gradients, so that one of them wrong makes all steps wrong.
TX = optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(1e-2, eps=1e-3))
# Five layers divide into no stages; the vocabulary is no data rank's multiple either.
LAYERS, VOCAB, MLP, ROWS, SEQ = 5, 7, 48, 16, 6
EXPERTS, CHOSEN, EMBED = 8, 3, 16
TENSOR = {"layers.up": 1, "layers.down": 0, "layers.bias": 0}
CLOSE = 1e-9
STACK = fsdp.Stacked("layers")


def make_weights(key, with_experts=False):
    up, down, table, router, experts = jax.random.split(key, 5)
    normal = jax.random.normal
    layers = {
        "up": 0.3 * normal(up, (LAYERS, EMBED, MLP)),
        "bias": 0.3 * normal(down, (LAYERS, MLP)),
        "down": 0.3 * normal(down, (LAYERS, MLP, EMBED)),
        "router": normal(router, (LAYERS, EMBED, EXPERTS)),
    }
    if with_experts:
        shape = (LAYERS, EXPERTS, EMBED, EMBED)
        layers["experts"] = {"w": 0.3 * normal(experts, shape)}
    table = 0.3 * normal(table, (VOCAB, EMBED))
    return {"embed": table, "layers": layers, "norm": jnp.ones(EMBED)}


def layer(w, x, gain, shift):
    """What layers have: a router, something of their own, something of all."""
    hidden = jnp.tanh(gain * x @ w["up"] + w["bias"][None, None])
    x = x + hidden @ w["down"] + shift[None, None]
    tokens = x.reshape(-1, EMBED)
    scores = jax.nn.softmax(tokens @ w["router"])
    weights, experts = jax.lax.top_k(scores, CHOSEN)
    counts = jax.nn.one_hot(experts, EXPERTS, dtype=jnp.int32).sum((0, 1))
    if "experts" in w:

        def run(rows, group_sizes):
            return jax.lax.ragged_dot(rows, w["experts"]["w"], group_sizes)

        y, _ = ops.expert_parallel_dispatch(run, tokens, experts, weights, EXPERTS)
        x = x + y.reshape(x.shape)
    return x, (scores.mean(0), counts)


def loss_fn(weights, batch, scan=fsdp.scan):
    """A tied embedding, which layers read too; what each layer made of the tokens."""
    x = weights["embed"][batch["tokens"]]
    gains = jnp.linspace(0.5, 1.0, LAYERS)
    shift = weights["embed"].mean(0)
    x, (scores, counts) = scan(
        layer, weights["layers"], x, xs=(gains,), consts=(shift,)
    )
    logits = (x * weights["norm"][None, None]) @ weights["embed"].T
    error = optax.softmax_cross_entropy_with_integer_labels(logits, batch["tokens"])
    aux = {"counts": counts.sum(), "first": x[:, 0, 0], "scores": scores.mean()}
    return error.mean() + 0.1 * (scores * gains[:, None]).sum(), aux


def batch():
    tokens = np.random.default_rng(0).integers(0, VOCAB, (ROWS, SEQ))
    return {"tokens": tokens.astype(np.int32)}


def plan_of(mesh, with_experts=False, **config):
    if mesh.shape["ep"] > 1:
        config["expert_parallel"] = {"layers.experts": 0}
    if mesh.shape["tp"] > 1:
        config["tensor_parallel"] = TENSOR
    make = functools.partial(make_weights, with_experts=with_experts)
    return fsdp.fully_shard(make, mesh, [STACK], fsdp.FSDPConfig(**config))


def trained(plan, prefetch=0, num_microbatches=4):
    """Parameters, and what three steps report."""
    loss = functools.partial(
        loss_fn, scan=functools.partial(fsdp.scan, prefetch=prefetch)
    )
    step = fsdp.make_train_step(
        plan, loss, TX, has_aux=True, num_microbatches=num_microbatches
    )
    state = fsdp.init_state(plan, TX, fsdp.init_params(plan, jax.random.key(0)))
    rows = jax.device_put(batch(), plan.batch_sharding)
    compiled = step.lower(state, rows).compile()
    fsdp.audit_step(plan, compiled, num_microbatches=num_microbatches)
    metrics = {}
    for _ in range(3):
        state, metrics = compiled(state, rows)
    return state, host(metrics)


@pytest.fixture(scope="module")
def alone():
    """The same on one device, trained when it is first asked for."""

    @functools.cache
    def run(with_experts):
        with jax.enable_x64(True):
            mesh = fsdp.make_mesh(devices=jax.devices()[:1])
            state, metrics = trained(plan_of(mesh, with_experts))
            return host(state.params), metrics

    return run


@dataclasses.dataclass(frozen=True)
class Case:
    """How eight devices share the model, which has experts if one axis is for them."""

    mesh: dict[str, int]
    pipeline: fsdp.PipelineConfig = fsdp.PipelineConfig()
    config: dict[str, Any] = dataclasses.field(default_factory=dict)
    prefetch: int = 0

    @property
    def with_experts(self) -> bool:
        return "ep" in self.mesh


INTERLEAVED = fsdp.PipelineConfig(virtual_stages=2)
GPIPE = fsdp.PipelineConfig("gpipe")
CASES = {
    "dp 4 x pp 2": Case({"pp": 2}, prefetch=1),
    "pp 4 x tp 2": Case({"pp": 4, "tp": 2}),
    "pp 2 x ep 4, interleaved": Case({"pp": 2, "ep": 4}, INTERLEAVED),
    "hsdp 2 x pp 2 x tp 2, weights gathered once": Case(
        {"pp": 2, "dp_outer": 2, "tp": 2}, config={"zero_dp_strategy": 1}
    ),
    "gpipe, dp 4 x pp 2": Case({"pp": 2}, GPIPE),
}


@pytest.fixture(scope="module")
def runs():
    """Each case, trained when it is first asked for."""

    @functools.cache
    def run(name):
        case = CASES[name]
        with jax.enable_x64(True):
            mesh = fsdp.make_mesh(**case.mesh)
            options = {"pipeline": case.pipeline, **case.config}
            plan = plan_of(mesh, case.with_experts, **options)
            return plan, *trained(plan, case.prefetch)

    return run


@pytest.mark.parametrize("name", CASES)
def test_three_steps_of_a_pipeline_are_those_of_one_device(name, runs, alone):
    plan, state, metrics = runs(name)
    want, want_metrics = alone(CASES[name].with_experts)
    assert worst(host(fsdp.sharding.unpack(state.params)), want) < CLOSE
    for metric in ("loss", "grad_norm"):
        np.testing.assert_allclose(metrics[metric], want_metrics[metric], CLOSE)
    for kind in ("counts", "scores", "first"):
        np.testing.assert_allclose(metrics["aux"][kind], want_metrics["aux"][kind])
    # Each stage holds its own layers alone.
    up = state.params["layers"]["up"].value
    pp = plan.mesh.shape["pp"]
    assert up.addressable_shards[0].data.shape[0] == up.shape[0] // pp


def make_three_stacks(key):
    """The first of its parameters are the stages', and need padding."""
    *keys, last = jax.random.split(key, 4)
    layers = {"deep": 5, "first": 3, "late": 2}
    weights = {
        name: {"w": 0.3 * jax.random.normal(key, (size, EMBED, EMBED))}
        for (name, size), key in zip(layers.items(), keys, strict=True)
    }
    return {"embed": jax.random.normal(last, (VOCAB, EMBED)), **weights}


def loss_of_three_stacks(weights, batch):
    def layer(w, x):
        return x + jnp.tanh(x @ w["w"]), x.mean()

    x, means = weights["embed"][batch["tokens"]], []
    for name in ("first", "deep", "late"):
        x, mean = fsdp.scan(layer, weights[name], x, prefetch=1)
        means.append(mean.sum())
    logits = x @ weights["embed"].T
    error = optax.softmax_cross_entropy_with_integer_labels(logits, batch["tokens"])
    # Of what comes before the stages too: the last one computes it once more.
    return error.mean() + 0.1 * sum(means)


@pytest.mark.parametrize("pipeline", [INTERLEAVED, GPIPE])
def test_stacks_beside_the_one_that_stages_split_run_in_the_first_and_the_last(
    pipeline,
):
    found = []
    for mesh in (
        fsdp.make_mesh(pp=2),
        fsdp.make_mesh(devices=jax.devices()[:1]),
    ):
        with jax.enable_x64(True):
            units = [fsdp.Stacked(name) for name in ("deep", "first", "late")]
            config = fsdp.FSDPConfig(
                pipeline=dataclasses.replace(pipeline, stack="deep")
            )
            plan = fsdp.fully_shard(make_three_stacks, mesh, units, config)
            step = fsdp.make_train_step(
                plan, loss_of_three_stacks, TX, num_microbatches=4
            )
            state = fsdp.init_state(plan, TX, fsdp.init_params(plan, jax.random.key(0)))
            rows = jax.device_put(batch(), plan.batch_sharding)
            for _ in range(3):
                state, metrics = step(state, rows)
            found.append(
                (host(fsdp.sharding.unpack(state.params)), host(metrics), repr(plan))
            )
    (got, got_metrics, said), (want, want_metrics, _) = found
    assert worst(got, want) < CLOSE
    for metric in ("loss", "grad_norm"):
        np.testing.assert_allclose(got_metrics[metric], want_metrics[metric], CLOSE)
    assert (
        "run besides in the first or the last stage: first (3 units), late (2 units)"
        in said
    )


def test_evaluation_passes_through_the_stages_too(runs, alone):
    plan, state, _ = runs("dp 4 x pp 2")
    with jax.enable_x64(True):
        params = jax.device_put(fsdp.sharding.unpack(state.params), plan.shardings)
        evaluate = fsdp.make_eval_step(plan, loss_fn, has_aux=True)
        got = evaluate(params, batch())
        one = plan_of(fsdp.make_mesh(devices=jax.devices()[:1]))
        params = jax.device_put(alone(False)[0], one.shardings)
        want = fsdp.make_eval_step(one, loss_fn, has_aux=True)(params, batch())
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, CLOSE), got, want)


@pytest.mark.parametrize("pipeline", [fsdp.PipelineConfig(), INTERLEAVED, GPIPE])
def test_a_replicated_embedder_has_the_sum_of_all_its_uses(pipeline):
    # Upstream: 4 stages of 2 chunks with gradients 10 * stage + chunk: 124.
    chunk, stage = np.divmod(np.arange(8), 4)
    uses = jnp.asarray(10 * stage + chunk, jnp.float32)

    def layer(w, x, use, embedder):
        return x + use * (embedder.sum() + w["w"].sum()), None

    def loss(weights, batch):
        x, _ = fsdp.scan(
            layer,
            weights["layers"],
            0 * batch["x"].mean(),
            xs=(uses,),
            consts=(weights["embedder"],),
        )
        return x + 7 * weights["other"].sum()

    def make(key):
        sizes = {"embedder": (8, 8), "other": (8,)}
        alone = {name: jnp.ones(size) for name, size in sizes.items()}
        return {"layers": {"w": jnp.ones((8, 4))}, **alone}

    config = fsdp.FSDPConfig(pipeline=pipeline)
    mesh = fsdp.make_mesh(pp=4)
    plan = fsdp.fully_shard(make, mesh, [fsdp.Stacked("layers")], config)
    params = fsdp.init_params(plan, jax.random.key(0))
    x = np.ones((8, 2), np.float32)
    compute = fsdp.value_and_grad(plan, loss, num_microbatches=4)
    _, grads = compute(params, {"x": x})
    np.testing.assert_array_equal(grads["embedder"], np.full((8, 8), 124))
    np.testing.assert_array_equal(grads["other"], np.full(8, 7))
    # Each layer has its own, wherever it was run.
    own = np.broadcast_to(np.asarray(uses)[:, None], (8, 4))
    np.testing.assert_array_equal(grads["layers"]["w"], own)


def test_a_checkpoint_of_a_pipeline_fills_any_other_abstract_tree(runs, tmp_path):
    _, state, _ = runs("pp 2 x ep 4, interleaved")
    with jax.enable_x64(True):
        fsdp.save(tmp_path, state)
        keys = {
            key
            for key in fsdp.checkpoint.load_shapes(tmp_path)
            if key.endswith("layers.up")
        }
        assert len(keys) == 3  # And two moments: keys know nothing of stages.
        for mesh, pipeline in (
            ({"pp": 4, "tp": 2}, fsdp.PipelineConfig()),
            ({"dp_outer": 2}, fsdp.PipelineConfig()),
            ({"pp": 2}, INTERLEAVED),
        ):
            other = plan_of(fsdp.make_mesh(**mesh), True, pipeline=pipeline)
            like = fsdp.abstract_state(other, TX)
            loaded = fsdp.load(tmp_path, like)
            same = jax.tree.map(lambda a, m: a.sharding == m.sharding, loaded, like)
            assert all(jax.tree.leaves(same))
            pair = (
                host(fsdp.sharding.unpack((s.params, s.opt_state)))
                for s in (loaded, state)
            )
            jax.tree.map(np.testing.assert_array_equal, *pair)


def turns(schedule: Schedule, direction: str) -> dict[tuple[int, int], Any]:
    """`(microbatch, number of the chunk) -> (tick, slot)`; each once."""
    found = {}
    stages = schedule.stages.num_stages
    for tick in range(schedule.ticks):
        for stage in range(stages):
            turn = getattr(schedule, direction)(tick, stage)
            if turn.is_due:
                key = (turn.microbatch, turn.chunk * stages + stage)
                assert key not in found
                found[key] = (tick, turn.slot)
    return found


@pytest.mark.parametrize("microbatches", [1, 3, 8])
@pytest.mark.parametrize("virtual", [1, 2, 3])
@pytest.mark.parametrize("stages", [2, 3, 4])
def test_turns_follow_each_other_and_keep_what_they_need(stages, virtual, microbatches):
    stack = Stages(stages * virtual, stages, virtual)
    schedule = Schedule(stack, microbatches)
    forward, backward = turns(schedule, "forward"), turns(schedule, "backward")
    assert len(forward) == len(backward) == microbatches * stack.num_chunks
    for (microbatch, chunk), (tick, slot) in forward.items():
        if chunk:
            assert forward[microbatch, chunk - 1][0] == tick - 1
        if chunk == stack.num_chunks - 1:
            assert schedule.last_tick(microbatch) == tick
        else:
            later = backward[microbatch, chunk + 1][0]
            assert backward[microbatch, chunk][0] == later + 1
        end, read = backward[microbatch, chunk]
        assert tick <= end and read == slot < schedule.num_slots
        # Nobody else on the stage writes there in between.
        others = [
            at
            for (m, c), (at, where) in forward.items()
            if where == slot and c % stages == chunk % stages
            if (m, c) != (microbatch, chunk)
        ]
        assert not any(tick <= at <= end for at in others)


def test_a_bubble_is_what_the_papers_say():
    def bubble(virtual, microbatches):
        stages = Stages(8, 4, virtual)
        return Schedule(stages, microbatches).bubble

    assert bubble(1, 8) == pytest.approx(3 / 11)
    assert bubble(2, 8) == pytest.approx(1.5 / 9.5)
    assert Stages(5, 2, 1).layers_of_stages == (3, 2)
    assert Stages(5, 2, 2).layers_of_stages == (3, 2)
    assert Stages(80, 4, 5).layers_of_stages == (20,) * 4


def temporaries(pipeline, microbatches):
    """Of a compiled step, in inputs of a stage."""

    def make(key):
        return {"layers": {"w": jnp.ones((4, 64, 64))}, "head": jnp.ones((64, 64))}

    def loss(weights, batch):
        x, _ = fsdp.scan(
            lambda w, x: (jnp.tanh(x @ w["w"]), None), weights["layers"], batch["x"]
        )
        return (x @ weights["head"]).mean()

    config = fsdp.FSDPConfig(pipeline=pipeline)
    mesh = fsdp.make_mesh(pp=2, devices=jax.devices()[:2])
    plan = fsdp.fully_shard(make, mesh, [fsdp.Stacked("layers")], config)
    step = fsdp.make_train_step(
        plan, loss, optax.sgd(0.1), num_microbatches=microbatches
    )
    x = jax.ShapeDtypeStruct((8 * microbatches, 64, 64), jnp.float32)
    state = fsdp.abstract_state(plan, optax.sgd(0.1))
    memory = step.lower(state, {"x": x}).compile().memory_analysis()
    return memory.temp_size_in_bytes / (8 * 64 * 64 * 4)


def test_what_one_forward_one_backward_keeps_is_bounded_by_stages():
    # Measured with the optimizations that the other tests go without.
    jax.config.update("jax_disable_most_optimizations", False)
    try:
        few, many = (temporaries(fsdp.PipelineConfig(), count) for count in (4, 32))
        assert abs(many - few) < 0.1
        # The negative control: one more input for each microbatch more.
        few, many = (temporaries(GPIPE, count) for count in (4, 32))
        assert 27 < many - few < 29
    finally:
        jax.config.update("jax_disable_most_optimizations", True)


def refused(loss, make=make_weights, units=(STACK,)):
    plan = fsdp.fully_shard(make, fsdp.make_mesh(pp=2), units)
    step = fsdp.make_train_step(plan, loss, TX)
    step.lower(fsdp.abstract_state(plan, TX), batch())


def test_a_stack_that_a_step_cannot_see_is_refused():
    def hidden(weights, batch):
        return jax.jit(loss_fn)(weights, batch)[0]

    def twice(weights, batch):
        return loss_fn(weights, batch)[0] + loss_fn(weights, batch)[0]

    for loss, times in ((hidden, 0), (twice, 2)):
        with pytest.raises(ValueError, match=facts("fsdp.scan", times, "jax.jit")):
            refused(loss)


def test_a_loop_of_the_models_own_is_told_that_a_stage_has_some_layers():
    def loss(weights, batch):
        x = jnp.zeros((ROWS, EMBED)).at[:, 0].set(batch["tokens"][:, 0])

        def body(x, w):
            return jnp.tanh(x @ w["router"] @ w["router"].T), None

        # The length is what `linen.scan` asks for.
        return jax.lax.scan(body, x, weights["layers"], length=LAYERS)[0].mean()

    plan = fsdp.fully_shard(make_weights, fsdp.make_mesh(pp=2), units=[STACK])
    step = fsdp.make_train_step(plan, loss, optax.sgd(0.1), num_microbatches=2)
    params = fsdp.init_params(plan, jax.random.key(0))
    state = fsdp.init_state(plan, optax.sgd(0.1), params)
    with pytest.raises(ValueError) as error:
        step(state, jax.device_put(batch(), plan.batch_sharding))
    assert "fsdp.scan" in "".join(error.value.__notes__)


def test_an_audit_finds_what_a_stage_would_wait_for_without_end():
    def loss(weights, batch):
        def layer(w, x):
            around = [(rank, (rank + 1) % 4) for rank in range(4)]
            return x + jax.lax.ppermute(x, "dp_shard", around) @ w["w"], None

        x = jnp.ones((6, EMBED)) * batch["tokens"].mean()
        return fsdp.scan(layer, weights["layers"], x)[0].mean()

    def make(key):
        return {"layers": {"w": jnp.ones((4, EMBED, EMBED))}}

    plan = fsdp.fully_shard(make, fsdp.make_mesh(pp=2), [STACK])
    step = fsdp.make_train_step(plan, loss, TX)
    compiled = step.lower(fsdp.abstract_state(plan, TX), batch()).compile()
    with pytest.raises(
        fsdp.audit.AuditError, match=facts("collective-permute", "dp_shard")
    ):
        fsdp.audit_step(plan, compiled)


FUSED = {"layers.up": 1, "layers.down": 0}


def fused_layer(w, x, whole):
    """Cuts a product over `tp` at a place that is no border of its ranks' parts."""
    hidden = x @ w["up"]
    if whole:
        spec = jax.sharding.PartitionSpec()
        hidden = jax.lax.with_sharding_constraint(hidden, spec)
    heads = jnp.split(hidden, [16, 24], axis=-1)
    query, key, value = (y.reshape(*y.shape[:2], -1, 4) for y in heads)
    key, value = jnp.repeat(key, 2, axis=2), jnp.repeat(value, 2, axis=2)
    mixed = jax.nn.dot_product_attention(query, key, value)
    return x + mixed.reshape(*x.shape[:2], -1) @ w["down"], None


def make_fused(key):
    up = 0.1 * jax.random.normal(key, (4, EMBED, 32))
    return {"layers": {"up": up, "down": 0.1 * jnp.ones((4, 16, EMBED))}}


def fused_loss(weights, batch, whole=False):
    x = jax.nn.one_hot(batch["tokens"], EMBED)
    run = functools.partial(fused_layer, whole=whole)
    return jnp.tanh(fsdp.scan(run, weights["layers"], x)[0]).mean()


def test_a_program_in_which_a_stage_would_wait_without_end_is_not_run():
    config = fsdp.FSDPConfig(tensor_parallel=FUSED)
    mesh = fsdp.make_mesh(pp=2, tp=2)
    plan = fsdp.fully_shard(make_fused, mesh, [STACK], config)
    params = fsdp.init_params(plan, jax.random.key(0))
    state = fsdp.init_state(plan, TX, params)
    says = ("collective-permute", "tp", "with_sharding_constraint")
    step = fsdp.make_train_step(plan, fused_loss, TX, num_microbatches=2)
    with pytest.raises(ValueError, match=facts(*says)):
        step(state, batch())
    with pytest.raises(ValueError, match=facts(*says)):
        fsdp.value_and_grad(plan, fused_loss, num_microbatches=2)(params, batch())
    # What the message says to do.
    whole = functools.partial(fused_loss, whole=True)
    step = fsdp.make_train_step(plan, whole, TX, num_microbatches=2)
    loss = step(state, batch())[1]["loss"]
    alone = fused_loss(make_fused(jax.random.key(0)), batch())
    assert abs(float(loss) - float(alone)) < 1e-6


def test_transforms_around_the_stack_are_refused():
    def batched(weights, batch):
        def one(x):
            return fsdp.scan(plain_layer, weights["layers"], x)[0]

        return jax.vmap(one)(jnp.ones((2, 8, EMBED))).mean()

    def differentiated(weights, batch):
        def total(x):
            return fsdp.scan(plain_layer, weights["layers"], x)[0].sum()

        return jax.grad(total)(jnp.ones((8, EMBED))).mean()

    def plain_layer(w, x):
        return x @ w["w"], None

    def make(key):
        return {"layers": {"w": jnp.ones((4, EMBED, EMBED))}}

    for loss in (batched, differentiated):
        with pytest.raises(
            ValueError, match=facts("fsdp.scan", "jax.vmap", "jax.grad")
        ):
            refused(loss, make)


def test_a_unit_that_returns_no_pair_is_refused():
    def loss(weights, batch):
        x = weights["embed"][batch["tokens"]]
        return fsdp.scan(lambda w, x: x, weights["layers"], x)[0].mean()

    for pp in (1, 2):
        plan = fsdp.fully_shard(make_weights, fsdp.make_mesh(pp=pp), [STACK])
        step = fsdp.make_train_step(plan, loss, TX)
        with pytest.raises(ValueError, match=facts("fsdp.scan", "(carry, y)")):
            step.lower(fsdp.abstract_state(plan, TX), batch())


@pytest.mark.parametrize(
    ("layers", "stages", "stored"), [(3, 2, 2), (3, 8, 1), (5, 4, 2)]
)
def test_a_plan_counts_the_layers_that_pad_a_stage(layers, stages, stored):
    def make(key):
        return {"layers": {"w": jnp.ones((layers, 16, 16))}, "head": jnp.ones((16, 4))}

    devices = jax.devices()[:stages]
    mesh = fsdp.make_mesh(pp=stages, devices=devices)
    plan = fsdp.fully_shard(make, mesh, [STACK])
    params = fsdp.init_params(plan, jax.random.key(0))
    state = fsdp.init_state(plan, optax.sgd(0.1), params)
    (weights,) = jax.tree.leaves(state.params["layers"])
    assert weights.addressable_shards[0].data.nbytes == stored * 1024
    head = 16 * 4 * 4
    assert plan.bytes_per_device["params"] == stored * 1024 + head
    lines = str(plan).splitlines()
    (line,) = [line for line in lines if line.startswith("replicated")]
    assert line.endswith(": head")


def test_slices_of_another_number_of_layers_are_refused():
    def loss(weights, batch):
        x = weights["embed"][batch["tokens"]]
        xs = (jnp.ones(4),)
        return fsdp.scan(layer, weights["layers"], x, xs, (x[0, 0],))[0].mean()

    with pytest.raises(ValueError, match=facts("5 layers", "(4,)")):
        refused(loss)


def test_models_without_a_stack_and_stacks_that_are_none_are_refused():
    def two(key):
        return {"a": {"w": jnp.ones((4, 8))}, "b": {"w": jnp.ones((4, 8))}}

    stacks, mesh = [fsdp.Stacked("a"), fsdp.Stacked("b")], fsdp.make_mesh(pp=2)
    for units, stack, shown in (
        ([], None, ["units=[fsdp_jax.Stacked(...)]"]),
        (stacks, None, ["'a'", "'b'", "fsdp_jax.PipelineConfig(stack=...)"]),
        (stacks, "c", ["PipelineConfig(stack='c')", "'a'", "'b'"]),
    ):
        config = fsdp.FSDPConfig(pipeline=fsdp.PipelineConfig(stack=stack))
        with pytest.raises(ValueError, match=facts("pp=2", *shown)):
            fsdp.fully_shard(two, mesh, units, config)


def test_schedules_that_are_none_are_refused():
    for wrong, known in (
        ({"schedule": "zero-bubble"}, ("'1f1b'", "'gpipe'")),
        ({"virtual_stages": 0}, ("virtual_stages=0", 1)),
    ):
        with pytest.raises(ValueError, match=facts("PipelineConfig", *wrong, *known)):
            fsdp.PipelineConfig(**wrong)
