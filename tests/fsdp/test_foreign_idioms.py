"""Models as others write them: entered by any method, annotated, in their meshes."""

from __future__ import annotations

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from helpers.compare import worst
from helpers.errors import facts
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import fsdp_jax as fsdp

pytestmark = pytest.mark.versions

# Gradients of two devices and of one, in float32, differ by the order of summation.
RTOL = 1e-5
WIDTH, VOCAB = 4, 6
X = np.random.default_rng(0).normal(size=(8, WIDTH)).astype(np.float32)
MESH = fsdp.make_mesh(devices=jax.devices()[:2])
MESH_DEVICE = jax.devices()[:1]
TX = optax.sgd(0.1)


def assert_as_plain(make, units, loss, batch=X):
    """Loss and gradients of two devices against jax alone, without units."""
    plan = fsdp.fully_shard(make, MESH, units)
    params = fsdp.init_params(plan, jax.random.key(0))
    (got, _), grads = fsdp.value_and_grad(plan, loss)(params, batch)
    _, state = plan.model.split(make(jax.random.key(0)))

    def plain(params):
        return loss(plan.model.merge(params, state), batch)

    want, want_grads = jax.jit(jax.value_and_grad(plain))(fsdp.unshard(params))
    np.testing.assert_allclose(got, want, rtol=RTOL)
    assert worst(grads, want_grads) < RTOL
    assert all(param.unit != "root" for param in plan.param_plans)


# Methods


class Block(nnx.Module):
    def __init__(self, rngs):
        self.linear = nnx.Linear(WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x):
        return self.encode(x)

    def encode(self, x):
        return x + jnp.tanh(self.linear(x))

    def inner(self):
        return self.linear


class Language(nnx.Module):
    """Enters its parts by methods, unbound ones and objects that a method returns."""

    def __init__(self, rngs):
        self.embed = nnx.Embed(VOCAB, WIDTH, rngs=rngs)
        self.blocks = nnx.List([Block(rngs) for _ in range(4)])

    def __call__(self, x):
        first, second, third, fourth = self.blocks
        x = first.encode(x)
        x = nnx.remat(Block.__call__)(second, x)
        x = Block.encode(third, x)
        x = x + fourth.inner()(x)
        return self.embed.attend(x)


def mean_square(model, x):
    return jnp.mean(model(x) ** 2)


def make_language(key):
    return Language(nnx.Rngs(key))


def test_nnx_units_are_entered_by_any_method_bound_or_not():
    units = [Block, nnx.Embed, nnx.Linear]
    assert_as_plain(make_language, units, mean_square)


def test_the_users_classes_are_as_before_after_a_loss_was_traced():
    before = dict(vars(Block)), dict(vars(nnx.Embed))
    plan = fsdp.fully_shard(make_language, MESH, [Block, nnx.Embed, nnx.Linear])
    jax.eval_shape(fsdp.value_and_grad(plan, mean_square), plan.params, X)
    assert (dict(vars(Block)), dict(vars(nnx.Embed))) == before


class EqxBlock(eqx.Module):
    weight: jax.Array
    activation: object = jnp.tanh

    def __init__(self, key):
        self.weight = jax.random.normal(key, (WIDTH, WIDTH))
        self.activation = jnp.tanh

    def __call__(self, x):
        return self.encode(x)

    def encode(self, x):
        return x + self.activation(self.weight @ x)


class EqxModel(eqx.Module):
    blocks: list

    def __init__(self, key):
        self.blocks = [EqxBlock(k) for k in jax.random.split(key, 3)]

    def __call__(self, x):
        first, second, third = self.blocks
        x = jax.vmap(first.encode)(x)
        x = eqx.filter_checkpoint(lambda b, x: jax.vmap(b)(x))(second, x)
        return jax.vmap(EqxBlock.encode, in_axes=(None, 0))(third, x)


def test_equinox_units_are_entered_by_any_method_bound_or_not():
    assert_as_plain(EqxModel, [EqxBlock], mean_square)


class Head(nnx.Module):
    def __init__(self, rngs):
        self.block = Block(rngs)
        self.bias = nnx.Param(jnp.ones((1, WIDTH)))

    def features(self, x):
        return self.block(x) + self.bias

    def __call__(self, x):
        return self.features(x)


def make_head(key):
    return Head(nnx.Rngs(key))


def test_a_unit_of_named_methods_is_entered_by_these_alone():
    def by_method(model, x):
        return jnp.mean(model.features(x) ** 2)

    assert_as_plain(make_head, [Head.features], by_method)
    plan = fsdp.fully_shard(make_head, MESH, [Head.__call__])
    with pytest.raises(ValueError, match=facts("block.linear.kernel", "model")):
        jax.eval_shape(fsdp.value_and_grad(plan, by_method), plan.params, X)


def test_a_function_of_no_class_is_no_unit():
    with pytest.raises(ValueError, match=facts("mean_square")):
        fsdp.fully_shard(make_head, MESH, [mean_square])


# Constructors


class Rates(nnx.Module):
    def __init__(self, rngs, space):
        self.linear = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.rates = [float(rate) for rate in space(0, 0.1, 2)]


def test_a_constructor_that_reads_an_array_is_refused_with_the_line():
    with pytest.raises(
        ValueError, match=facts("make_model", "test_foreign_idioms.py", "float(rate)")
    ):
        fsdp.fully_shard(lambda key: Rates(nnx.Rngs(key), jnp.linspace), MESH)


def in_eager_jax(*args):
    with jax.ensure_compile_time_eval():
        return [float(rate) for rate in jnp.linspace(*args)]


@pytest.mark.parametrize("space", [np.linspace, in_eager_jax])
def test_what_the_error_proposes_makes_the_model(space):
    plan = fsdp.fully_shard(lambda key: Rates(nnx.Rngs(key), space), MESH)
    assert plan.model.merge(plan.model.params, plan.model.state).rates[1] == (
        pytest.approx(0.1)
    )


# Annotations and meshes


class Annotated(nnx.Module):
    def __init__(self, rngs):
        init = nnx.with_partitioning(nnx.initializers.normal(), ("embed", "model"))
        self.linear = nnx.Linear(WIDTH, WIDTH, rngs=rngs, kernel_init=init)

    def __call__(self, x):
        return self.linear(x)


def make_annotated(key):
    return Annotated(nnx.Rngs(key))


class LinenAnnotated(nn.Module):
    @nn.compact
    def __call__(self, x):
        init = nn.with_logical_partitioning(nn.initializers.normal(), ("embed", "mlp"))
        x = nn.Dense(WIDTH, kernel_init=init, name="dense")(x)
        return nn.with_logical_constraint(x, ("batch", "embed"))


def make_linen(key):
    return LinenAnnotated().init(key, X[:1])


@pytest.mark.parametrize(
    "make, name, axes",
    [
        (make_annotated, "linear.kernel", "embed, model"),
        (make_linen, "params.dense.kernel.value", "embed, mlp"),
    ],
    ids=["nnx", "linen"],
)
def test_annotations_are_ignored_with_one_line_or_become_tp_rules(make, name, axes):
    plan = fsdp.fully_shard(make, MESH)
    (line,) = [line for line in str(plan).splitlines() if "ignored" in line]
    assert axes in line and "annotated_dims" in line
    rules = fsdp.sharding.annotated_dims(make, {axes.split(", ")[1]})
    assert rules == {name: -1}
    config = fsdp.FSDPConfig(tensor_parallel=rules)
    mesh = fsdp.make_mesh(tp=2, devices=jax.devices()[:2])
    split = fsdp.fully_shard(make, mesh, config=config)
    assert {p.name: p.split.tensor_dim for p in split.param_plans}[name] == 1
    assert "ignored" not in str(split)


def test_an_annotated_model_has_the_structure_of_one_that_was_made_eagerly():
    plan = fsdp.fully_shard(make_annotated, MESH)
    with jax.set_mesh(jax.make_mesh((1, 1), ("embed", "model"), devices=MESH_DEVICE)):
        eager = nnx.state(make_annotated(jax.random.key(0)), nnx.Param)
    assert jax.tree.structure(eager) == jax.tree.structure(plan.params)


def test_axes_that_no_dim_or_two_dims_are_annotated_with_are_refused():
    with pytest.raises(ValueError, match=facts("heads", "embed", "model")):
        fsdp.sharding.annotated_dims(make_annotated, {"heads"})
    with pytest.raises(ValueError, match=facts("linear.kernel")):
        fsdp.sharding.annotated_dims(make_annotated, {"embed", "model"})


def own_mesh(axis_type):
    devices = np.array(jax.devices()[:2]).reshape(1, 2)
    return Mesh(devices, ("data", "model"), axis_types=(axis_type,) * 2)


EXPLICIT = Mesh(MESH.devices, MESH.axis_names, axis_types=(AxisType.Explicit,) * 6)


def trained(mesh, tmp_path=None):
    """The loss of the second step, and the parameters after it."""
    plan = fsdp.fully_shard(make_annotated, mesh, [Annotated])
    state = fsdp.init_state(plan, TX, fsdp.init_params(plan, jax.random.key(0)))
    step = fsdp.make_train_step(plan, mean_square, TX)
    lowered = step.lower(fsdp.abstract_state(plan, TX), X)
    fsdp.audit_step(plan, lowered.compile())
    state, metrics = step(state, X)
    fsdp.save(tmp_path, state)
    state = fsdp.load(tmp_path, fsdp.abstract_state(plan, TX))
    state, metrics = step(state, X)
    return float(metrics["loss"]), fsdp.unshard(state.params)


@pytest.fixture(scope="module")
def plainly_trained(tmp_path_factory):
    return trained(MESH, tmp_path_factory.mktemp("plain") / "step")


@pytest.mark.parametrize(
    "ambient, mesh",
    [
        (own_mesh(AxisType.Auto), MESH),
        (own_mesh(AxisType.Explicit), MESH),
        (EXPLICIT, EXPLICIT),
        (EXPLICIT, MESH),
    ],
    ids=["auto of other axes", "explicit of other axes", "explicit", "explicit, auto"],
)
def test_the_mesh_that_a_program_has_set_changes_nothing(
    plainly_trained, ambient, mesh, tmp_path
):
    with jax.set_mesh(ambient):
        loss, params = trained(mesh, tmp_path / "step")
    want_loss, want = plainly_trained
    np.testing.assert_allclose(loss, want_loss, rtol=RTOL)
    assert worst(params, want) < RTOL


@pytest.mark.parametrize(
    "spec", [P("data"), NamedSharding(own_mesh(AxisType.Auto), P())]
)
def test_constraints_over_other_axes_are_ignored_in_a_step_and_logged(spec, caplog):
    def constrained(model, x):
        for _ in range(3):
            x = jax.lax.with_sharding_constraint(x, spec)
        return mean_square(model, x)

    original = jax.lax.with_sharding_constraint
    plan = fsdp.fully_shard(make_annotated, MESH, [Annotated])
    params = fsdp.init_params(plan, jax.random.key(0))
    losses = [
        float(fsdp.make_eval_step(plan, loss)(params, X)["loss"])
        for loss in (constrained, mean_square)
    ]
    assert losses[0] == losses[1]
    # Once, though it is applied three times and the loss is traced more than once.
    assert caplog.text.count(f"with_sharding_constraint(..., {spec})") == 1
    assert jax.lax.with_sharding_constraint is original
