"""What is split, over what, and what the plan says about it."""

from __future__ import annotations

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers.errors import facts
from helpers.zoo import CASES
from jax.sharding import NamedSharding, PartitionSpec

import fsdp_jax as fsdp
from fsdp_jax._tree import named_leaves
from fsdp_jax.sharding._config import _MAKE_POLICIES
from fsdp_jax.sharding._fully_shard import choose_split
from fsdp_jax.sharding._plan import ROOT

MESH = fsdp.make_mesh()


def plan_shapes(shapes, units=(), mesh=MESH, dtype=jnp.float32, **config) -> fsdp.Plan:
    """The plan of a tree of arrays of these shapes."""

    def make(key):
        return jax.tree.map(
            lambda shape: jnp.ones(shape, dtype),
            shapes,
            is_leaf=lambda node: isinstance(node, tuple),
        )

    return fsdp.fully_shard(make, mesh, units, fsdp.FSDPConfig(**config))


def dims(plan) -> dict[str, int | None]:
    return {param.name: param.split.dim for param in plan.param_plans}


def stacks(plan) -> dict[str, int]:
    return {param.name: param.num_stacked for param in plan.param_plans}


@pytest.mark.parametrize(
    "shape, num_stacked, dim, padding",
    [
        ((1024, 4096), 0, 0, 0),
        ((8, 16, 16), 0, 0, 0),
        ((50257, 768), 0, 1, 0),  # an odd vocabulary
        ((4096,), 0, 0, 0),
        ((8, 24, 16), 1, 1, 0),
        ((64, 8, 16), 1, 1, 0),  # the stack is never split
        ((64, 64, 8), 2, 2, 0),
        ((8, 7), 1, 1, 1),
        ((50257, 770), 0, 0, 7),  # 7 in 50257 adds less than 6 in 770
        ((13, 17), 0, 0, 3),
        ((95, 101), 0, 0, 1),
        ((333,), 0, 0, 3),
        ((3,), 0, 0, 5),
        ((1, 1), 0, None, 0),
        ((8,), 1, None, 0),
        ((0, 8), 0, None, 0),
        ((), 0, None, 0),
    ],
)
def test_the_first_dim_that_divides_is_split_or_the_one_that_needs_least_padding(
    shape, num_stacked, dim, padding
):
    assert choose_split(shape, 8, num_stacked=num_stacked) == (dim, padding)


def test_what_no_dim_of_divides_is_padded_and_the_plan_says_what_that_costs():
    shapes = {"wte": (50257, 770), "good": (8, 8), "layers": {"bias": (2, 7)}}
    plan = plan_shapes(shapes, [fsdp.Stacked("layers")])
    table = repr(plan)
    assert "dim 0 over dp_shard, padded 50257 to 50264" in table
    assert "dim 1 over dp_shard, padded 7 to 8" in table
    # A device holds 6283 rows of 770 where 50257 / 8 would be even, and 2 of 14 / 8.
    zeros = round(4 * (6283 * 770 - 50257 * 770 / 8) + 4 * (2 - 14 / 8))
    assert f"no dim divides: 2, {zeros / 1024:.2f} KiB of zeros a device" in table
    held = 6283 * 770 + 8 + 2
    assert plan.bytes_per_device["params"] == 4 * held


def test_a_padded_parameter_has_its_logical_shape_in_all_but_the_stored_tree():
    plan = plan_shapes({"w": (13, 17)})
    for like in (plan.params["w"], plan.grads["w"], plan.packed_params["w"]):
        assert like.shape == (13, 17)
    assert plan.packed_params["w"].value.shape == (16, 17)
    assert plan.packed_params["w"].value.sharding.spec == PartitionSpec("dp_shard")


def test_a_parameter_that_would_be_padded_can_be_replicated():
    plan = plan_shapes({"wte": (50257, 770), "w": (8, 8)}, replicated=("wte",))
    assert dims(plan) == {"wte": None, "w": 0}
    assert "replicated on every device: wte" in repr(plan)


def test_a_stack_of_more_dims_than_a_parameter_has_is_refused():
    with pytest.raises(ValueError, match=facts("'w'", "(8, 8)", "3", "num_dims")):
        plan_shapes({"w": (8, 8)}, [fsdp.Stacked("w", num_dims=3)])


@pytest.mark.parametrize(
    "pattern, replicated",
    [
        ("layers.*.norm", {"layers.0.norm", "layers.1.norm"}),
        ("layers.1", {"layers.1.norm", "layers.1.w"}),
        ("*", {"layers.0.norm", "layers.0.w", "layers.1.norm", "layers.1.w", "out"}),
        ("ou?", {"out"}),
        ("**.norm", {"layers.0.norm", "layers.1.norm"}),
        ("layers.**.w", {"layers.0.w", "layers.1.w"}),
        ("**.out", {"out"}),
    ],
)
def test_what_a_replicated_pattern_matches_is_replicated(pattern, replicated):
    layer = {"norm": (8,), "w": (8, 8)}
    shapes = {"layers": [layer, layer], "out": (8, 8)}
    plan = plan_shapes(shapes, replicated=(pattern,))
    assert {name for name, dim in dims(plan).items() if dim is None} == replicated


def test_patterns_that_match_nothing_are_all_named():
    policy = fsdp.MixedPrecisionPolicy(
        main_grads_dtype=jnp.bfloat16,
        param_name_patterns_for_fp32_local_accumulation=("norm", "w"),
    )
    with pytest.raises(ValueError) as error:
        plan_shapes(
            {"w": (8, 8)},
            replicated=("bias", "w", "w.x"),
            frozen=("v",),
            tensor_parallel={"up": 0, "w": 1},
            mp_policy=policy,
        )
    for named in (
        "FSDPConfig(replicated=...): 'bias'; FSDPConfig(replicated=...): 'w.x'",
        "FSDPConfig(frozen=...): 'v'",
        "FSDPConfig(tensor_parallel=...): 'up'",
        "param_name_patterns_for_fp32_local_accumulation: 'norm'",
        "Parameter paths begin: w.",
    ):
        assert named in str(error.value)


def test_smaller_parameters_than_asked_for_are_replicated():
    plan = plan_shapes({"a": (8, 8), "b": (63,), "c": (64,)}, min_shard_elements=64)
    assert dims(plan) == {"a": 0, "b": None, "c": 0}


def test_scalars_are_replicated_without_a_warning():
    plan = plan_shapes({"temperature": (), "w": (8, 8)})
    assert dims(plan) == {"temperature": None, "w": 0}


def test_a_scalar_for_each_unit_of_a_stack_is_replicated():
    plan = plan_shapes({"layers": {"scale": (8,), "w": (8, 8, 8)}}, ["layers"])
    assert dims(plan) == {"layers.scale": 0, "layers.w": 0}
    plan = plan_shapes(
        {"layers": {"scale": (8,), "w": (8, 8, 8)}}, [fsdp.Stacked("layers")]
    )
    assert dims(plan) == {"layers.scale": None, "layers.w": 1}


class Norm(nnx.Module):
    def __init__(self, rngs):
        self.scale = nnx.Param(jnp.ones(8))
        self.matrix = nnx.Param(jnp.ones((8, 8)))


class NormStack(nnx.Module):
    def __init__(self, rngs):
        make = nnx.vmap(lambda rngs: Norm(rngs), in_axes=(0,), out_axes=0)
        self.stack = nnx.split_rngs(splits=8)(make)(rngs)
        self.single = Norm(rngs)


class EquinoxNorm(eqx.Module):
    scale: jax.Array
    matrix: jax.Array

    def __init__(self, key):
        self.scale = jax.random.normal(key, (8,))
        self.matrix = jax.random.normal(key, (8, 8))


class EquinoxNormStack(eqx.Module):
    stack: EquinoxNorm
    single: EquinoxNorm

    def __init__(self, key):
        self.stack = eqx.filter_vmap(EquinoxNorm)(jax.random.split(key, 8))
        self.single = EquinoxNorm(key)


@pytest.mark.parametrize(
    "make, unit",
    [
        (lambda key: NormStack(nnx.Rngs(key)), Norm),
        (EquinoxNormStack, EquinoxNorm),
    ],
    ids=["nnx", "equinox"],
)
def test_eight_stacked_norms_of_eight_are_told_from_a_matrix(make, unit):
    plan = fsdp.fully_shard(make, MESH, [unit])
    assert stacks(plan) == {
        "single.matrix": 0,
        "single.scale": 0,
        "stack.matrix": 1,
        "stack.scale": 1,
    }
    assert dims(plan)["stack.scale"] == 1
    assert dims(plan)["single.scale"] == 0
    init = vars(unit)["__init__"]
    assert init.__qualname__.startswith(unit.__name__)  # the class is as it was


def test_two_maps_around_a_constructor_are_two_stacked_dims():
    def make(key):
        keys = jax.random.split(key, (3, 8))
        return {"stack": eqx.filter_vmap(eqx.filter_vmap(EquinoxNorm))(keys)}

    plan = fsdp.fully_shard(make, MESH, [EquinoxNorm])
    assert stacks(plan) == {"stack.matrix": 2, "stack.scale": 2}


def test_a_path_pattern_is_a_stack_only_where_it_is_said_to_be():
    shapes = {"layers": (8, 16, 16)}
    assert stacks(plan_shapes(shapes, ["layers"])) == {"layers": 0}
    stacked = plan_shapes(shapes, [fsdp.Stacked("layers")])
    assert (stacks(stacked), dims(stacked)) == ({"layers": 1}, {"layers": 1})
    twice = plan_shapes(shapes, [fsdp.Stacked("layers", num_dims=2)])
    assert (stacks(twice), dims(twice)) == ({"layers": 2}, {"layers": 2})


def test_the_innermost_unit_owns_a_parameter():
    shapes = {"block": {"w": (8, 8), "mlp": {"w": (8, 8)}}, "out": (8, 8)}
    for units in (["block", "block.mlp"], ["block.mlp", "block"]):
        plan = plan_shapes(shapes, units)
        assert {param.name: param.unit for param in plan.param_plans} == {
            "block.mlp.w": "block.mlp",
            "block.w": "block",
            "out": ROOT,
        }


def test_a_unit_is_no_prefix_of_a_longer_name():
    plan = plan_shapes({"layer": {"w": (8,)}, "layer_norm": {"w": (8,)}}, ["layer"])
    assert [param.unit for param in plan.param_plans] == ["layer", ROOT]


class Absent(nnx.Module):
    pass


def test_units_that_match_nothing_are_all_named():
    with pytest.raises(ValueError, match=facts("Absent", "'blocks.*'", "w")):
        plan_shapes({"w": (8, 8)}, [Absent, "w", "blocks.*"])


def test_a_model_without_trainable_arrays_is_refused():
    with pytest.raises(ValueError, match=facts("make_model", "dict")):
        plan_shapes({"i": (8, 8)}, dtype=jnp.int32)


def test_without_units_the_model_is_one_and_the_plan_says_what_that_costs():
    plan = plan_shapes({"w": (1024, 256)})
    assert plan.units == ()
    assert "1.00 MiB in no unit" in repr(plan)
    assert "no units: the whole model is gathered" in repr(plan)


def test_the_plan_prints_a_line_a_parameter_and_the_totals():
    policy = fsdp.MixedPrecisionPolicy(
        param_dtype=jnp.bfloat16, main_grads_dtype=jnp.bfloat16
    )
    shapes = {"layers": {"b": (3, 8), "w": (3, 8, 64)}, "head": (64, 16), "s": ()}
    plan = plan_shapes(shapes, [fsdp.Stacked("layers")], mp_policy=policy)
    lines = repr(plan).splitlines()
    # name, shape, stored as, gathered as, unit, split, bytes/device
    assert [line.split() for line in lines[1:5]] == [
        "head (64, 16) float32 bfloat16 (root) dim 0 over dp_shard 512".split(),
        (
            "layers.b (3, 8) float32 bfloat16 layers (stacked) dim 1 over dp_shard 12"
        ).split(),
        (
            "layers.w (3, 8, 64) float32 bfloat16 layers (stacked) "
            "dim 1 over dp_shard 768"
        ).split(),
        "s () float32 bfloat16 (root) replicated 4".split(),
    ]
    elements = 64 * 16 // 8 + 3 * 8 // 8 + 3 * 8 * 64 // 8 + 1
    assert plan.bytes_per_device == {"params": 4 * elements, "grads": 2 * elements}
    assert lines[6] == "parameters: 4, units: 1, devices: 8 (dp_shard=8)"
    assert "1.27 KiB params, 648 B grads" in lines[7]
    # Of no unit: head and s. The largest unit: one layer of the three. In bfloat16.
    assert "2.00 KiB in no unit" in lines[8]
    assert "1.02 KiB in the largest unit" in lines[8]
    assert lines[9] == "replicated on every device: s"


LAYER_BY_LAYER = (
    "unsharded during a step: 256 B in no unit, all the time; "
    "256 B in the largest unit, while it runs"
)


@pytest.mark.parametrize(
    "strategies, lines",
    [
        ((0, 0), ["unsharded during a step: 768 B, all the time"]),
        ((2, 0), ["unsharded during a step: 768 B, all the time"]),  # gathered once
        ((3, 0), [LAYER_BY_LAYER]),
        (
            (3, 1),
            [
                LAYER_BY_LAYER,
                "shards gathered from smaller ones before a step: 192 B",
            ],
        ),
    ],
)
def test_the_plan_says_what_is_unsharded_under_each_strategy(strategies, lines):
    zero, outer = strategies
    plan = plan_shapes(
        {"layers": {"w": (2, 8, 8)}, "head": (8, 8)},
        [fsdp.Stacked("layers")],
        mesh=fsdp.make_mesh(dp_outer=2),
        zero_dp_strategy=zero,
        outer_dp_sharding_strategy=outer,
    )
    said = repr(plan).splitlines()
    assert [line for line in said if "a step" in line] == lines


def test_on_two_axes_a_parameter_is_split_over_their_product():
    plan = plan_shapes({"w": (8, 24)}, mesh=fsdp.make_mesh(dp_outer=2, ep=2))
    (row,) = plan.param_plans
    assert plan.specs == {"w": PartitionSpec(("dp_shard", "ep"))}
    assert "dim 0 over dp_shard x ep" in repr(plan)
    assert plan.bytes_per_device["params"] == 4 * 8 * 24 // 4
    assert "devices: 8 (dp_outer=2, dp_shard=2, ep=2)" in repr(plan)


def test_on_one_device_everything_is_unsharded_without_a_warning():
    plan = plan_shapes({"odd": (7, 9)}, mesh=fsdp.make_mesh(devices=jax.devices()[:1]))
    assert dims(plan) == {"odd": None}
    assert "devices: 1 (a single one)" in repr(plan)
    assert "replicated on every device" not in repr(plan)


def test_abstract_trees_have_the_shapes_dtypes_and_shardings_of_the_plan():
    policy = fsdp.MixedPrecisionPolicy(
        param_dtype=jnp.bfloat16, main_grads_dtype=jnp.bfloat16
    )
    plan = plan_shapes({"w": (16, 8), "v": (4, 16)}, mp_policy=policy)
    specs = {"w": PartitionSpec("dp_shard"), "v": PartitionSpec(None, "dp_shard")}
    assert plan.specs == specs
    for name, shape in (("w", (16, 8)), ("v", (4, 16))):
        sharding = NamedSharding(MESH, specs[name])
        assert plan.shardings[name] == sharding
        for like, dtype in ((plan.params, jnp.float32), (plan.grads, jnp.bfloat16)):
            assert (like[name].shape, like[name].dtype) == (shape, dtype)
            assert like[name].sharding == sharding


@pytest.mark.parametrize("name", CASES)
def test_abstract_trees_have_the_structure_of_the_model_for_every_library(name):
    case = CASES[name]
    params, _ = case.weights()
    plan = case.plan(MESH)
    for like in (plan.params, plan.grads):
        assert jax.tree.structure(like) == jax.tree.structure(params)
    shapes = [(name, leaf.shape) for name, leaf in named_leaves(params)]
    assert [(param.name, param.shape) for param in plan.param_plans] == shapes
    assert not any(param.name.endswith(".value") for param in plan.param_plans)


BF16, FP16, FP32, FP64 = jnp.bfloat16, jnp.float16, jnp.float32, np.float64


@pytest.mark.parametrize(
    "policy, model, resolved",
    [
        ({}, FP32, (FP32, FP32, FP32, FP32)),
        ({}, BF16, (BF16, FP32, FP32, FP32)),
        ({}, FP64, (FP64, FP64, FP64, FP64)),
        ({"param_dtype": BF16}, FP32, (BF16, FP32, FP32, FP32)),
        ({"main_params_dtype": BF16}, BF16, (BF16, BF16, BF16, BF16)),
        ({"main_grads_dtype": FP32}, BF16, (BF16, FP32, FP32, FP32)),
        ({"main_grads_dtype": BF16}, FP32, (FP32, FP32, BF16, BF16)),
        ({"grad_comm_dtype": "float16"}, FP32, (FP32, FP32, FP32, FP16)),
    ],
)
def test_a_precision_policy_fills_in_what_is_not_said(policy, model, resolved):
    got = fsdp.MixedPrecisionPolicy(**policy).resolve("w", model)
    have = (got.param, got.main_params, got.main_grads, got.grad_comm)
    assert have == tuple(map(jnp.dtype, resolved))


@pytest.mark.parametrize(
    "policy, name",
    [
        ({"main_grads_dtype": FP16}, "float16"),
        ({"main_params_dtype": "float16"}, "float16"),
        ({"main_grads_dtype": jnp.float8_e5m2}, "float8_e5m2"),
    ],
)
def test_main_gradients_of_a_small_range_are_refused(policy, name):
    given = f"MixedPrecisionPolicy({next(iter(policy))}={name})"
    says = given, "jnp.float32", f"grad_comm_dtype=jnp.{name}"
    with pytest.raises(ValueError, match=facts(*says)):
        fsdp.MixedPrecisionPolicy(**policy)
    fsdp.MixedPrecisionPolicy(**(policy | {"main_grads_dtype": BF16}))


def test_precisions_that_are_not_floating_point_are_all_named():
    with pytest.raises(
        ValueError, match=facts("param_dtype=int8, grad_comm_dtype=bool")
    ):
        fsdp.MixedPrecisionPolicy(
            param_dtype=jnp.int8, main_grads_dtype=FP32, grad_comm_dtype=bool
        )


@pytest.mark.parametrize(
    "config, says",
    [
        ({"replicated": "w"}, ["FSDPConfig(replicated='w')", "replicated=('w',)"]),
        ({"min_shard_elements": -1}, ["min_shard_elements=-1", "0"]),
        ({"min_shard_elements": 1.5}, ["min_shard_elements=1.5"]),
        ({"prefetch": True}, ["prefetch=True"]),
        ({"remat_policy": "dots"}, ["remat_policy='dots'", "checkpoint_policies"]),
        (
            {"remat_policy": jax.checkpoint_policies.save_only_these_names},
            ["checkpoint_policies.save_only_these_names(...)"],
        ),
        (
            {
                "remat_policy": jax.checkpoint_policies.dots_saveable,
                "reshard_after_forward": False,
            },
            ["remat_policy=...", "reshard_after_forward=False"],
        ),
    ],
)
def test_options_that_would_do_nothing_are_refused(config, says):
    with pytest.raises(ValueError, match=facts(*says)):
        fsdp.FSDPConfig(**config)


def test_planning_takes_no_device_memory():
    def make(key):
        return {"w": jax.random.normal(key, (2**20, 2**20))}  # 4 TiB

    before = {id(array) for array in jax.live_arrays()}
    plan = fsdp.fully_shard(make, MESH)
    assert {id(array) for array in jax.live_arrays()} <= before
    assert "512.00 GiB params" in repr(plan)


def test_a_config_can_be_hashed():
    config = fsdp.FSDPConfig(tensor_parallel={"w": 0})
    assert hash(config) == hash(fsdp.FSDPConfig(tensor_parallel={"w": 0}))


def test_devices_are_no_mesh():
    with pytest.raises(ValueError, match=facts("list", "make_mesh", "devices=")):
        fsdp.fully_shard(lambda key: {"w": jnp.ones(8)}, jax.devices())


def test_each_function_of_jax_that_makes_a_policy_is_told_from_a_policy():
    # A policy returns whether a primitive's result is saved.
    for name in dir(jax.checkpoint_policies):
        if name.startswith("_"):
            continue
        policy = getattr(jax.checkpoint_policies, name)
        if name in _MAKE_POLICIES:
            with pytest.raises(ValueError, match=facts(f"remat_policy={name}")):
                fsdp.FSDPConfig(remat_policy=policy)
        else:
            dot = jax.make_jaxpr(jnp.dot)(jnp.ones(2), jnp.ones(2)).eqns[0]
            saved = policy(dot.primitive, *dot.invars, **dot.params)
            assert isinstance(saved, bool)
            fsdp.FSDPConfig(remat_policy=policy)
