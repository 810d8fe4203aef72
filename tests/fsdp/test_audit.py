"""The audit passes what does as its plan says, and names each planted fault."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from helpers.errors import facts
from helpers.zoo import CASES, batch
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import fsdp_jax as fsdp
from fsdp_jax.hlo._parse import parse
from fsdp_jax.sharding._plan import Plan
from fsdp_jax.step import _collectives, _unit_order
from fsdp_jax.training._compiler_options import compiler_options

TX = optax.adamw(1e-3)
LAYERS, WIDTH, MLP, OUT, ROWS = 3, 32, 64, 16, 96
TENSOR = {"layers.up": 1, "layers.down": 0}
BF16 = fsdp.MixedPrecisionPolicy(param_dtype=jnp.bfloat16, grad_comm_dtype=jnp.bfloat16)
WIDE_SUMS = fsdp.MixedPrecisionPolicy(
    grad_comm_dtype=jnp.bfloat16, reduce_scatter_with_fp32_accumulation=True
)


def make_weights(key, scale=1, layers=LAYERS):
    up, down, head = jax.random.split(key, 3)
    return {
        "layers": {
            "up": jax.random.normal(up, (layers, WIDTH * scale, MLP * scale)),
            "down": jax.random.normal(down, (layers, MLP * scale, WIDTH * scale)),
            "bias": jnp.zeros((layers, MLP * scale)),
        },
        "head": jax.random.normal(head, (WIDTH * scale, OUT)),
    }


def layer(w, x):
    hidden = jnp.tanh(x @ w["up"] + w["bias"][None])
    return x + hidden @ w["down"], None


def loss_of(layer=layer, **options):
    def loss(weights, batch):
        x = batch["x"].astype(weights["head"].dtype)
        x, _ = fsdp.scan(layer, weights["layers"], x, **options)
        return jnp.mean((x @ weights["head"] - batch["y"]) ** 2)

    return loss


def plan_of(
    mesh=None, *, devices=None, units=("layers",), scale=1, layers=LAYERS, **config
) -> Plan:
    return fsdp.fully_shard(
        functools.partial(make_weights, scale=scale, layers=layers),
        fsdp.make_mesh(devices=devices, **(mesh or {})),
        [fsdp.Stacked(unit) for unit in units],
        fsdp.FSDPConfig(**config),
    )


def lowered(plan: Plan, loss=None, num_microbatches=1, state=None, tx=TX):
    step = fsdp.make_train_step(
        plan, loss or loss_of(), tx, num_microbatches=num_microbatches
    )
    width = plan.param_plans[0].shape[0]
    rows = {"x": (ROWS, width), "y": (ROWS, OUT)}
    data = {
        name: jax.ShapeDtypeStruct(shape, jnp.float32, sharding=plan.batch_sharding)
        for name, shape in rows.items()
    }
    return step.jitted.lower(state or fsdp.abstract_state(plan, tx), data)


def differences(plan: Plan, program, **options) -> list[str]:
    with pytest.raises(fsdp.audit.AuditError) as error:
        fsdp.audit_step(plan, program, **options)
    assert all(line in str(error.value) for line in error.value.differences)
    return list(error.value.differences)


# What does as its plan says

HEALTHY = {
    "DDP": ({}, {"zero_dp_strategy": 0}, 3, {}),
    "ZeRO-1": ({}, {"zero_dp_strategy": 1}, 3, {}),
    "ZeRO-2 x 2": ({"dp_outer": 2}, {"zero_dp_strategy": 2}, 3, {}),
    "ZeRO-3": ({}, {}, 1, {}),
    "kept by plan": ({}, {"reshard_after_forward": False}, 1, {}),
    "HSDP": ({"dp_outer": 2}, {}, 3, {}),
    "HSDP, not overlapped": ({"dp_outer": 2}, {"overlap_outer": False}, 3, {}),
    "HFSDP, prefetched": (
        {"dp_outer": 2},
        {"outer_dp_sharding_strategy": 1},
        3,
        {"prefetch": 1, "unroll": 2},
    ),
    "tp": ({"tp": 2}, {"tensor_parallel": TENSOR}, 3, {}),
    "bf16": ({}, {"mp_policy": BF16}, 3, {}),
    "wide sums": ({"dp_outer": 2}, {"mp_policy": WIDE_SUMS}, 1, {}),
    "prefetched": ({}, {}, 1, {"prefetch": 1, "unroll": 2}),
    "partly whole and frozen": (
        {"ep": 2},
        {"replicated": ("layers.bias",), "frozen": ("head",)},
        3,
        {},
    ),
}


@pytest.mark.parametrize("name", HEALTHY)
def test_a_program_of_its_plan_passes(name):
    mesh, config, num_microbatches, options = HEALTHY[name]
    plan = plan_of(mesh, **config)
    program = lowered(plan, loss_of(**options), num_microbatches)
    fsdp.audit_step(plan, program, num_microbatches=num_microbatches)
    compiled = program.compile()
    fsdp.audit_step(plan, compiled, num_microbatches=num_microbatches)
    fsdp.audit_step(plan, compiled.as_text(), num_microbatches=num_microbatches)


@pytest.fixture(scope="module")
def unrolled():
    """`reshard -> (plan, lowered)` of a model with a list of layers."""
    case, made = CASES["nnx unrolled"], {}
    for reshard in (True, False):
        plan = case.plan(fsdp.make_mesh(), reshard_after_forward=reshard)
        step = fsdp.make_train_step(plan, case.loss, TX, report_grad_peaks=True)
        made[reshard] = plan, step.lower(fsdp.abstract_state(plan, TX), batch())
    return made


def test_a_list_of_layers_passes(unrolled):
    plan, program = unrolled[True]
    fsdp.audit_step(plan, program)
    fsdp.audit_step(plan, program.compile())


@pytest.mark.parametrize("sizes", [{}, {"dp_outer": 2}])
def test_a_model_of_which_no_dim_divides_passes(sizes):
    plan = fsdp.fully_shard(
        lambda key: {"layers": jax.random.normal(key, (LAYERS, 13, 13))},
        fsdp.make_mesh(**sizes),
        [fsdp.Stacked("layers")],
    )

    def loss(weights, x):
        def layer(w, x):
            return jnp.tanh(x @ w), None

        return fsdp.scan(layer, weights["layers"], x)[0].mean()

    step = fsdp.make_train_step(plan, loss, TX)
    rows = jax.ShapeDtypeStruct((16, 13), jnp.float32)
    fsdp.audit_step(plan, step.lower(fsdp.abstract_state(plan, TX), rows).compile())
    compute = jax.jit(lambda params, x: fsdp.value_and_grad(plan, loss)(params, x))
    fsdp.audit_step(plan, compute.lower(plan.params, rows))


# 0: no program of the plan at all


def sharded_update(reduce):
    """A step of the user's own: SGD on the shards of one matrix, in a `shard_map`."""

    def make(key):  # Beside a scale, whose sum might be that of a loss.
        return {"w": jax.random.normal(key, (64, 64)), "scale": jnp.ones(())}

    plan = fsdp.fully_shard(make, fsdp.make_mesh(), ["w"])
    spec = jax.tree.map(lambda one: one.spec, plan.shardings)

    @functools.partial(
        jax.shard_map,
        mesh=plan.mesh,
        in_specs=(spec, plan.batch_sharding.spec),
        out_specs=spec,
        check_vma=False,
    )
    def update(params, x):
        w = jax.lax.all_gather(params["w"], "dp_shard", axis=0, tiled=True)
        grad = reduce(jax.grad(lambda w: jnp.square(x @ w).sum())(w))
        scale = jax.lax.pmean(params["scale"] * x.sum(), "dp_shard")
        return {"w": params["w"] - 0.1 * grad, "scale": scale}

    rows = jax.ShapeDtypeStruct((16, 64), jnp.float32)
    return plan, jax.jit(update).lower(plan.params, rows)


def own_rows(grad):
    size = grad.shape[0] // jax.device_count()
    start = jax.lax.axis_index("dp_shard") * size
    return jax.lax.dynamic_slice_in_dim(grad, start, size)


def sum_of_rows(grad):
    return jax.lax.psum_scatter(grad, "dp_shard", tiled=True)


def test_an_update_without_a_reduction_is_named():
    fsdp.audit_step(*sharded_update(sum_of_rows))
    (found,) = differences(*sharded_update(own_rows))
    assert "'w'" in found and "reduce-scatters over dp_shard" in found
    assert "without one of them" in found


@pytest.mark.parametrize("strategy", [0, 1, 2, 3])
def test_an_evaluation_and_a_forward_need_no_reductions(strategy):
    plan = plan_of(zero_dp_strategy=strategy)
    rows = jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.float32)
    data = {"x": rows, "y": jax.ShapeDtypeStruct((ROWS, OUT), jnp.float32)}
    evaluate = jax.jit(fsdp.make_eval_step(plan, loss_of()))
    forward = jax.jit(
        fsdp.make_forward(plan, lambda params, x: {"head": x @ params["head"]})
    )
    for function, given in ((evaluate, data), (forward, rows)):
        fsdp.audit_step(plan, function.lower(plan.params, given))


def test_a_program_without_one_of_the_collectives_is_named():
    plan = plan_of()
    scaled = jax.jit(lambda x: 2 * x).lower(jnp.ones(3))
    for program in (scaled, scaled.compile(), scaled.compile().as_text()):
        (found,) = differences(plan, program)
        assert "all-gathers over dp_shard" in found and "none of them" in found


class Member(nnx.Module):
    def __init__(self, rngs):
        self.up = nnx.Linear(32, 64, rngs=rngs)

    def __call__(self, x):
        return self.up(x)


class Ensemble(nnx.Module):
    """Members that a `vmap` runs side by side."""

    def __init__(self, key):
        make = nnx.split_rngs(splits=4)(nnx.vmap(Member))
        self.members = make(nnx.Rngs(key))

    def __call__(self, x):
        return nnx.vmap(lambda member, x: member(x), in_axes=(0, None))(
            self.members, x
        ).mean(0)


class Around(nnx.Module):
    def __init__(self, key):
        self.ensemble = Ensemble(key)

    def __call__(self, x):
        return self.ensemble(x)


def test_a_vmap_over_a_stack_of_units_is_named_and_passes_as_one_unit():
    def program(unit):
        plan = fsdp.fully_shard(Around, fsdp.make_mesh(), [unit])
        step = fsdp.make_train_step(plan, lambda model, x: (model(x) ** 2).mean(), TX)
        rows = jnp.ones((16, 32))
        return plan, step.lower(fsdp.abstract_state(plan, TX), rows).compile()

    found = differences(*program(Member))
    # A matrix and a bias, gathered and reduced.
    assert (
        len([line for line in found if "make the module around the vmap" in line]) == 4
    )
    fsdp.audit_step(*program(Ensemble))


# 1: weights kept for backward


@pytest.fixture(scope="module")
def keeping():
    return lowered(plan_of(reshard_after_forward=False))


@pytest.mark.parametrize("compiles", [False, True], ids=["lowered", "compiled"])
def test_a_stack_of_weights_kept_for_backward_is_named(keeping, compiles):
    found = differences(plan_of(), keeping.compile() if compiles else keeping)
    assert len(found) == 2  # The matrices; of a bias backward needs no value.
    (up,) = [line for line in found if "'layers.up'" in line]
    assert "(unit 'layers')" in up and "f32[3,32,64] through a loop" in up
    assert "reshard_after_forward" in up


def static_layer(w, x, *, static):
    del static  # Layers with one value run in a loop of their own.
    return layer(w, x)


@pytest.mark.parametrize("static", [(0, 1, 1), (0, 0, 1)])
def test_stacks_of_fewer_layers_kept_for_backward_are_named(static):
    loss = loss_of(static_layer, static=static, prefetch=0)
    fsdp.audit_step(plan_of(), lowered(plan_of(), loss))
    keeping = lowered(plan_of(reshard_after_forward=False), loss)
    found = differences(plan_of(), keeping)
    assert len(found) == 2  # The matrices.
    (up,) = [line for line in found if "'layers.up'" in line]
    assert "f32[2,32,64] through a loop, 2 layers' unsharded weights" in up


def test_weights_of_a_list_of_layers_kept_for_backward_are_named(unrolled):
    found = differences(unrolled[True][0], unrolled[False][1])
    for unit in ("layers.0", "layers.1"):
        # Of the attention backward needs all four, of the other layers two.
        assert sum(f"(unit '{unit}')" in line for line in found) >= 4
    assert all("forward gathered in backward" in line for line in found)


def test_a_module_that_the_last_two_units_share_stays_as_the_last_unit_does():
    class Layer(nnx.Module):
        def __init__(self, shared, rngs):
            self.own, self.shared = nnx.Linear(16, 16, rngs=rngs), shared

        def __call__(self, x):
            return self.shared(jnp.tanh(self.own(x)))

    class Model(nnx.Module):
        def __init__(self, rngs):
            shared = nnx.Linear(16, 16, rngs=rngs)
            self.layers = nnx.List([Layer(shared, rngs) for _ in range(3)])

        def __call__(self, x):
            for one in self.layers:
                x = one(x)
            return x

    def make_model(key):
        return Model(nnx.Rngs(key))

    def planned(reshard):
        config = fsdp.FSDPConfig(reshard_after_forward=reshard)
        return fsdp.fully_shard(make_model, fsdp.make_mesh(dp_shard=8), [Layer], config)

    def program(plan):
        step = fsdp.make_train_step(plan, lambda model, x: model(x).mean(), TX)
        rows = jax.ShapeDtypeStruct((16, 16), jnp.float32)
        return step.lower(fsdp.abstract_state(plan, TX), rows)

    plan = planned(reshard=True)
    fsdp.audit_step(plan, program(plan))
    found = differences(plan, program(planned(reshard=False)))
    assert any("'layers.1.own.kernel'" in line for line in found)


def test_a_stack_that_is_gathered_at_once_is_named():
    found = differences(plan_of(), lowered(plan_of(units=())).compile())
    gathered = [line for line in found if "all-gather of f32[3,4,64]" in line]
    assert len(gathered) == 1 and gathered[0].startswith("'layers.up'")
    assert "unit by unit" in gathered[0]


# 2: dtypes


@pytest.fixture(scope="module")
def full_precision():
    return lowered(plan_of())


def test_gathers_in_full_precision_are_named(full_precision):
    policy = fsdp.MixedPrecisionPolicy(
        param_dtype=jnp.bfloat16, grad_comm_dtype=jnp.float32
    )
    found = differences(plan_of(mp_policy=policy), full_precision)
    assert len([line for line in found if "has all-gather of f32" in line]) == len(
        found
    )
    (head,) = [line for line in found if line.startswith("'head'")]
    assert "all-gather of bf16[4,16] to bf16[32,16] over dp_shard" in head
    assert "has all-gather of f32[4,16] to f32[32,16]" in head
    assert "param_dtype" in head


def test_reductions_in_full_precision_are_named(full_precision):
    policy = fsdp.MixedPrecisionPolicy(grad_comm_dtype=jnp.bfloat16)
    found = differences(plan_of(mp_policy=policy), full_precision)
    assert sorted(line.split(" (")[0] for line in found) == [
        *("'head'", "'layers.bias'", "'layers.down'", "'layers.up'")
    ]
    assert all("has reduce-scatter of f32" in line for line in found)
    assert all("grad_comm_dtype" in line for line in found)


def test_of_a_program_for_cpus_dtypes_are_not_judged(full_precision):
    fsdp.audit_step(plan_of(mp_policy=BF16), full_precision.compile())


# 3: what the plan does not need


def with_psum_of_activations(w, x):
    y, _ = layer(w, x)
    return y + 1e-3 * lax.psum(x, "dp_shard"), None


def with_psum_of_a_weight(w, x):
    return layer(w | {"up": lax.pmean(w["up"], "dp_shard")}, x)


@pytest.mark.parametrize(
    "body, array",
    [(with_psum_of_activations, "f32[12,32]"), (with_psum_of_a_weight, "f32[32,64]")],
)
@pytest.mark.parametrize("compiles", [False, True], ids=["lowered", "compiled"])
def test_an_all_reduce_that_the_plan_does_not_need_is_named(body, array, compiles):
    # A loop that gathers ahead gathers more often, which hides what it keeps.
    program = lowered(plan_of(), loss_of(body, prefetch=0))
    found = differences(plan_of(), program.compile() if compiles else program)
    reduced = [line for line in found if "all-reduce" in line]
    assert reduced and all("a psum, pmean" in line for line in reduced)
    seen = f"has all-reduce of {array} over dp_shard (6 a step, in a loop)"
    assert all(seen in line for line in reduced)
    # What a psum makes of a weight is no longer a weight, and is kept for backward.
    kept = [line for line in found if "through a loop" in line]
    assert len(found) == len(reduced) + len(kept)
    assert bool(kept) == (body is with_psum_of_a_weight)


# 4: too often


def test_a_reduction_in_each_microbatch_is_named():
    loss = loss_of(prefetch=0)
    program = lowered(plan_of(zero_dp_strategy=2), loss, num_microbatches=3)
    plan = plan_of(zero_dp_strategy=1)
    for form in (program, program.compile()):
        found = differences(plan, form, num_microbatches=3)
        (up,) = [line for line in found if line.startswith("'layers.up'")]
        assert "over dp_shard, once a step (3 of this shape)" in up
        assert "9 times a step, 9 of them in loops" in up
        assert any(line.startswith("'head' (unit '(root)')") for line in found)


def own_loop(plan: Plan):
    """Microbatches in a loop around `value_and_grad`, each one's gradients clipped.

    Without that XLA could, and in part does, move their reduction out of the loop.
    """
    compute = fsdp.value_and_grad(plan, loss_of())

    def step(params, batches):
        def body(total, rows):
            _, grads = compute(params, rows)
            return jax.tree.map(lambda t, g: t + g.clip(-1, 1), total, grads), None

        zeros = jax.tree.map(jnp.zeros_like, params)
        return lax.scan(body, zeros, batches)[0]

    rows = NamedSharding(plan.mesh, P(None, ("dp_outer", "dp_shard")))
    data = {
        name: jax.ShapeDtypeStruct((3, ROWS // 3, size), jnp.float32, sharding=rows)
        for name, size in (("x", WIDTH), ("y", OUT))
    }
    return jax.jit(step).lower(plan.params, data)


def test_replicas_reduced_in_each_microbatch_are_named():
    plan = plan_of({"dp_outer": 2})
    found = differences(plan, own_loop(plan).compile(), num_microbatches=3)
    (head,) = [line for line in found if line.startswith("'head'")]
    assert "all-reduce of f32[8,16] over dp_outer, once a step" in head
    assert "3 times a step" in head


# 5: what lies whole


@pytest.fixture(scope="module")
def replicated_arguments():
    """A step that is given one parameter, and one of its moments, whole."""
    plan = plan_of()
    everywhere = NamedSharding(plan.mesh, P())

    def place(path, leaf):
        name = jax.tree_util.keystr(path)
        if name in (".params['layers']['up']", ".opt_state[0].nu['layers']['up']"):
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=everywhere)
        return leaf

    state = jax.tree_util.tree_map_with_path(place, fsdp.abstract_state(plan, TX))
    return lowered(plan, state=state)


@pytest.mark.parametrize("compiles", [False, True], ids=["lowered", "compiled"])
def test_arguments_that_are_replicated_are_named(replicated_arguments, compiles):
    program = replicated_arguments.compile() if compiles else replicated_arguments
    first, second = differences(plan_of(), program)
    assert first.startswith("'layers.up' (unit 'layers')")
    assert "[3, 4, 64] on each device" in first
    assert "takes state.params['layers']['up'] as [3, 32, 64]" in first
    assert "takes state.opt_state[0].nu['layers']['up'] as" in second


def test_results_that_are_replicated_are_named():
    plan = plan_of()
    everywhere = NamedSharding(plan.mesh, P())
    halve = jax.jit(
        lambda p: jax.tree.map(lambda w: w / 2, p), out_shardings=everywhere
    )
    found = differences(plan, halve.lower(plan.params).compile())
    returned = [line for line in found if "program returns [" in line]
    assert len(returned) == len(plan.param_plans)
    assert "returns ['head'] as [32, 16]" in returned[0]


# 6: tp lost


def test_a_gather_at_full_width_is_named(monkeypatch):
    plan = plan_of({"tp": 2}, tensor_parallel=TENSOR)
    monkeypatch.setattr(
        _collectives, "at_tp_width", lambda row, collective, x: collective(x)
    )
    found = differences(plan, lowered(plan).compile())
    gathers = [line for line in found if "has all-gather" in line]
    # XLA brings each together over tp first, which is named as well.
    gathers = [line for line in gathers if "over tp (" not in line]
    assert {line.split(" ")[0] for line in gathers} == {"'layers.up'", "'layers.down'"}
    (up,) = [line for line in gathers if line.startswith("'layers.up'")]
    assert "f32[8,32] to f32[32,32]" in up and "f32[8,64] to f32[32,64]" in up
    assert "tp was lost" in up


def test_a_matrix_that_crosses_tp_is_named():
    def reading_all_of_it(w, x):
        up = lax.with_sharding_constraint(w["up"], P(None, None))
        return layer({**w, "up": up}, x)

    plan = plan_of({"tp": 2}, tensor_parallel=TENSOR)
    found = differences(plan, lowered(plan, loss_of(reading_all_of_it)).compile())
    assert all(line.startswith("'layers.up' (unit 'layers')") for line in found)
    assert any(
        "all-gather of f32[32,32] to f32[32,64] over tp" in line for line in found
    )
    assert "each rank of tp computes with its own part" in found[0]


# 8: other axes


def test_collectives_over_other_axes_are_named():
    # All of a size, so that the communicated arrays are the same.
    mesh = {"dp_outer": 2, "ep": 2}
    inner, outer = (
        plan_of(mesh, placements=fsdp.Placements(*3 * [(axis,)]))
        for axis in ("dp_shard", "dp_outer")
    )
    program = lowered(outer)
    for form in (program, program.compile()):
        found = differences(inner, form)
        gathers = [line for line in found if "has all-gather" in line]
        assert {line.split(" ")[0] for line in gathers} == {
            *("'head'", "'layers.bias'", "'layers.down'", "'layers.up'")
        }
        assert all("over dp_shard; the program" in line for line in gathers)
        assert all("over dp_outer (" in line for line in gathers)
        assert any("has reduce-scatter" in line for line in found)


# What cannot be audited


def test_all_differences_are_in_one_error():
    program = lowered(
        plan_of(reshard_after_forward=False), loss_of(with_psum_of_a_weight)
    )
    found = differences(plan_of(mp_policy=BF16), program)
    for part in ("through a loop", "all-reduce of f32[32,64]", "of bf16[4,16]"):
        assert any(part in line for line in found), part


def test_what_is_no_program_is_refused(full_precision):
    with pytest.raises(TypeError, match=facts("audit", "step.lower(...)", "function")):
        fsdp.audit_step(plan_of(), loss_of())
    with pytest.raises(ValueError, match=facts("ENTRY", "compiled.as_text()")):
        fsdp.audit_step(plan_of(), full_precision.as_text())
    with pytest.raises(ValueError, match=facts("audit_step(overlapped=True)", "GPUs")):
        fsdp.audit_step(plan_of(), full_precision.compile(), overlapped=True)


# Compiled for GPUs, without one. 7: what nothing computes beside


def compiled_for(gpus, mesh=None, loss=None, num_microbatches=1, scale=1, **config):
    plan = plan_of(mesh, devices=gpus, scale=scale, **config)
    program = lowered(plan, loss, num_microbatches)
    return plan, program.compile(compiler_options=compiler_options())


GPU_HEALTHY = ["DDP", "HSDP", "HFSDP, prefetched", "tp", "bf16", "wide sums"]


@pytest.mark.parametrize("name", GPU_HEALTHY)
def test_a_program_for_gpus_of_its_plan_passes(gpus, name):
    mesh, config, num_microbatches, options = HEALTHY[name]
    plan, program = compiled_for(
        gpus, mesh, loss_of(**options), num_microbatches, **config
    )
    fsdp.audit_step(plan, program, num_microbatches=num_microbatches)


def test_the_last_microbatch_runs_after_the_loop_over_the_others(gpus):
    """Run before it, its weights and activations would be in memory beside theirs."""
    mesh, config, num_microbatches, options = HEALTHY["HSDP"]
    assert num_microbatches > 1
    plan, program = compiled_for(
        gpus, mesh, loss_of(**options), num_microbatches, **config
    )
    module = parse(program.as_text())
    loops = [one for one in module[module.entry].instructions if one.opcode == "while"]
    # The loop over microbatches has the loops over layers in its body.
    inner = [
        any(one.opcode == "while" for one in module[loop.calls[0]].instructions)
        for loop in loops
    ]
    assert inner == [True, False, False]


def test_microbatches_of_unrolled_layers_are_not_gathered_together(gpus):
    """XLA inlines the loop over the others where it is of one."""
    case = CASES["nnx unrolled"]
    plan = case.plan(fsdp.make_mesh(dp_outer=2, devices=gpus))
    step = fsdp.make_train_step(plan, case.loss, TX, num_microbatches=2)
    compiled = step.lower(fsdp.abstract_state(plan, TX), batch()).compile()
    fsdp.audit_step(plan, compiled, num_microbatches=2)


def test_what_the_optimizer_reduces_beside_gradients_is_not_judged(gpus):
    """Of as many layers as ranks, Adafactor's sums over a split dim are split by layer.

    XLA merges their reduction with that of gradients, and names it as one of them.
    """
    plan = plan_of(devices=gpus, scale=4, layers=8)
    tx = optax.adafactor(0.01, min_dim_size_to_factor=16)
    program = lowered(plan, tx=tx).compile(compiler_options=compiler_options())
    merged = [
        line
        for line in program.as_text().splitlines()
        if "reduce-scatter-start(" in line and "reduce_scatter" in line
    ]
    assert any("f32[8,128]" in line for line in merged)
    fsdp.audit_step(plan, program)


@pytest.fixture(scope="module")
def faulty(gpus):
    """A program in full precision that keeps its weights, and has a psum."""
    return compiled_for(
        gpus,
        loss=loss_of(with_psum_of_a_weight),
        reshard_after_forward=False,
    )[1]


@pytest.mark.parametrize(
    "part",
    [
        "f32[3,32,64] through a loop",
        "the plan says all-gather of bf16[4,16]",
        "the plan says reduce-scatter of bf16[32,64]",
        "has all-reduce of f32[32,64] over dp_shard (6 a step, in a loop)",
    ],
)
def test_faults_of_a_program_for_gpus_are_named(gpus, faulty, part):
    plan = plan_of(devices=gpus, mp_policy=BF16)
    assert sum(part in line for line in differences(plan, faulty)) == 1


def test_merged_reductions_in_each_microbatch_are_named_by_their_elements(gpus):
    plan = plan_of({"dp_outer": 2}, devices=gpus)
    program = own_loop(plan).compile(compiler_options=compiler_options())
    found = differences(plan, program, num_microbatches=3)
    assert any(line.startswith("all-reduces over dp_outer") for line in found)


@pytest.mark.parametrize("waits", [True, False])
def test_backward_of_a_mean_waits_for_the_products_of_forward(gpus, waits, monkeypatch):
    """Its gradient is a constant, so that products with it may run at any time."""
    if not waits:
        monkeypatch.setattr(_unit_order, "unimplied_reads", lambda *args: ())

    def make(key):
        weights = make_weights(key)["layers"]
        return {
            "layers": [jax.tree.map(lambda w, i=i: w[i], weights) for i in range(3)]
        }

    def loss(weights, batch):
        for w in weights["layers"]:
            batch, _ = fsdp.unit(layer)(w, batch)
        return batch.mean()

    plan = fsdp.fully_shard(make, fsdp.make_mesh(devices=gpus), ["layers.*"])
    step = fsdp.make_train_step(plan, loss, TX)
    rows = jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.float32)
    program = step.lower(fsdp.abstract_state(plan, TX), rows)
    program = program.compile(compiler_options=compiler_options())
    if waits:
        fsdp.audit_step(plan, program)
    else:
        found = differences(plan, program)
        assert any("has 3 unsharded at once" in line for line in found)


def test_weights_of_single_layers_kept_on_gpus_are_named(gpus):
    def make(key):
        single = jax.tree.map(lambda w: w[0], make_weights(key)["layers"])
        return {"first": single, "second": single}

    def loss(weights, batch):
        x, _ = fsdp.unit(layer)(weights["first"], batch)
        return fsdp.unit(layer)(weights["second"], x)[0].mean()

    plans, programs = {}, {}
    for reshard in (True, False):
        config = fsdp.FSDPConfig(reshard_after_forward=reshard)
        mesh = fsdp.make_mesh(devices=gpus)
        plan = fsdp.fully_shard(make, mesh, ["first", "second"], config)
        step = fsdp.make_train_step(plan, loss, TX)
        rows = jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.float32)
        program = step.lower(fsdp.abstract_state(plan, TX), rows)
        plans[reshard] = plan
        programs[reshard] = program.compile(compiler_options=compiler_options())
    fsdp.audit_step(plans[True], programs[True])
    found = differences(plans[True], programs[False])
    assert all("forward gathered in backward" in line for line in found)
    # Of the first layer backward needs no `up`: there is nothing before it.
    assert {line.split(" (")[1] for line in found} == {
        "unit 'first'): the plan says it is gathered again for backward",
        "unit 'second'): the plan says it is gathered again for backward",
    }


@pytest.mark.parametrize("is_once", [True, False], ids=["once", "again"])
def test_a_table_goes_once_its_rows_are_read(gpus, is_once, monkeypatch):
    """XLA would look rows up again in backward, beside two units of weights."""

    def make(key):
        weights = make_weights(key)
        layers = [jax.tree.map(lambda w, i=i: w[i], weights["layers"]) for i in (0, 1)]
        table = jnp.sin(jnp.arange(512.0 * WIDTH)).reshape(512, WIDTH)
        return {"table": table, "layers": layers}

    def loss(weights, tokens):
        x = fsdp.unit(lambda table: table[tokens])(weights["table"])
        for w in weights["layers"]:
            x, _ = fsdp.unit(layer)(w, x * lax.rsqrt(jnp.mean(x**2, -1, keepdims=True)))
        return jnp.mean(x**2)

    if not is_once:
        monkeypatch.setattr(_unit_order, "recomputable", lambda *args: {})
    units = ["table", "layers.*"]
    plan = fsdp.fully_shard(make, fsdp.make_mesh(devices=gpus), units)
    step = fsdp.make_train_step(plan, loss, TX)
    tokens = jax.ShapeDtypeStruct((ROWS,), jnp.int32)
    lowered = step.lower(fsdp.abstract_state(plan, TX), tokens)
    program = lowered.compile(compiler_options=compiler_options())
    if is_once:
        fsdp.audit_step(plan, program)
    else:
        found = differences(plan, program)
        assert any("has 3 unsharded at once" in line for line in found)


def test_what_nothing_computes_beside_is_named(gpus):
    plan, program = compiled_for(gpus, loss=loss_of(prefetch=0), scale=64)
    found = differences(plan, program, overlapped=True)
    fsdp.audit_step(plan, program)
    assert all("(unit 'layers')" in line for line in found)
    assert any("all-gather" in line for line in found)
    assert all("matrix product" in line or "at once" in line for line in found)


def test_what_is_gathered_ahead_is_overlapped(gpus):
    loss = loss_of(unroll=2)
    plan, program = compiled_for(gpus, loss=loss, scale=64)
    fsdp.audit_step(plan, program, overlapped=True)
