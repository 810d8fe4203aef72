"""What a unit writes, returns, closes over and is given is as in the plain program."""

from __future__ import annotations

import dataclasses
import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers.compare import worst
from helpers.errors import facts

import fsdp_jax as fsdp

# Gradients of two devices and of one, in float32, differ by the order of summation.
RTOL = 1e-5
WIDTH = 4
X = np.random.default_rng(0).normal(size=(8, WIDTH)).astype(np.float32)
# Every rank's rows are alike, so that a mean over them is the global one.
ALIKE = np.tile(X[:4], (2, 1))
MESH = fsdp.make_mesh(devices=jax.devices()[:2])


def assert_as_plain(make, units, loss, batch=X, **config):
    """Loss and gradients of two devices against jax alone, without units."""
    plan = fsdp.fully_shard(make, MESH, units, fsdp.FSDPConfig(**config))
    params = fsdp.init_params(plan, jax.random.key(0))
    _, state = plan.model.split(make(jax.random.key(0)))
    (got, *_), grads = fsdp.value_and_grad(plan, loss)(
        params, batch, model_state=state, key=jax.random.key(0)
    )

    def plain(params):
        return loss(plan.model.merge(params, state), batch)

    want, want_grads = jax.jit(jax.value_and_grad(plain))(fsdp.unshard(params))
    np.testing.assert_allclose(got, want, rtol=RTOL)
    assert worst(grads, want_grads) < RTOL


class Block(nnx.Module):
    """A unit; each subclass writes something when it is called."""

    def __init__(self, rngs):
        self.linear = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.inner = Inner()
        self.spare = Inner()
        self.calls = 0
        self.last = None
        self.gone = 2.0
        self.kept = nnx.data([])
        self.table = nnx.data({"sum": jnp.zeros(())})
        self.seen = nnx.Variable(jnp.zeros(()))

    def __call__(self, x, log=None):
        y = jnp.tanh(self.linear(x))
        self.write(y, log)
        return y * (1 + self.calls)

    def write(self, y, log):
        """Writes nothing."""


class Inner(nnx.Module):
    def __init__(self):
        self.mode = "first"
        self.value = nnx.Cache(jnp.ones(()))


class Counts(Block):
    def write(self, y, log):
        self.calls += 1

    def read(self, log):
        return float(self.calls)


class KeepsAnArray(Block):
    def write(self, y, log):
        self.last = y

    def read(self, log):
        return jnp.mean(self.last**2)


class AddsAnAttribute(Block):
    def write(self, y, log):
        self.fresh = {"y": y, "note": "text"}

    def read(self, log):
        return jnp.mean(self.fresh["y"]) * len(self.fresh["note"])


class DeletesAnAttribute(Block):
    def write(self, y, log):
        if hasattr(self, "gone"):
            del self.gone

    def read(self, log):
        return getattr(self, "gone", 0.5)


class AppendsToItsList(Block):
    def write(self, y, log):
        self.kept.append(y)

    def read(self, log):
        mean = sum(map(jnp.mean, self.kept)) * len(self.kept)
        self.kept.clear()
        return mean


class WritesIntoItsDict(Block):
    def write(self, y, log):
        self.table["sum"] += jnp.mean(y)

    def read(self, log):
        return self.table["sum"]


class WritesAVariable(Block):
    def write(self, y, log):
        self.seen[...] += jnp.mean(y)

    def read(self, log):
        return self.seen[...]


class Sows(Block):
    def write(self, y, log):
        self.sow(nnx.Intermediate, "mean", jnp.mean(y**2))

    def read(self, log):
        return sum(jax.tree.leaves(nnx.pop(self, nnx.Intermediate)))


class WritesBelow(Block):
    def write(self, y, log):
        self.inner.mode = "second"
        self.inner.value[...] *= jnp.mean(y) + 1

    def read(self, log):
        return self.inner.value[...] * len(self.inner.mode)


class WritesAParam(Block):
    def write(self, y, log):
        self.linear.bias[...] += jnp.mean(y)

    def read(self, log):
        return 0.0


class SwapsAModule(Block):
    def write(self, y, log):
        self.spare, self.inner = self.inner, Inner()
        self.inner.value[...] *= jnp.mean(y)

    def read(self, log):
        return self.inner.value[...] * 2 + self.spare.value[...]


class AppendsToAnArgument(Block):
    def write(self, y, log):
        log["means"].append(jnp.mean(y))
        log["count"] = log.get("count", 0) + 1

    def read(self, log):
        return sum(log["means"]) * log["count"]


WRITERS = [
    *(Counts, KeepsAnArray, AddsAnAttribute, DeletesAnAttribute, AppendsToItsList),
    *(WritesIntoItsDict, WritesAVariable, Sows, WritesBelow, WritesAParam),
    *(SwapsAModule, AppendsToAnArgument),
]


class Net(nnx.Module):
    def __init__(self, cls, rngs):
        self.block = cls(rngs)


@pytest.mark.filterwarnings("ignore:Using 'Module.sow:DeprecationWarning")
@pytest.mark.parametrize("cls", WRITERS, ids=lambda cls: cls.__name__)
def test_what_an_nnx_unit_writes_is_there_after_the_call(cls):
    def loss(model, x):
        log = {"means": []}
        y = model.block(model.block(x, log), log)
        return jnp.mean(y**2) + model.block.read(log)

    assert_as_plain(lambda key: Net(cls, nnx.Rngs(key)), [cls], loss, ALIKE)


def test_what_an_nnx_unit_writes_is_there_where_weights_are_kept():
    def loss(model, x):
        y = model.block(model.block(x))
        return jnp.mean(y**2) + jnp.mean(model.block.last)

    def make(key):
        return Net(KeepsAnArray, nnx.Rngs(key))

    assert_as_plain(make, [KeepsAnArray], loss, reshard_after_forward=False)


def matrix(key):
    return {"w": jax.random.normal(key, (WIDTH, WIDTH)) / 2}


@dataclasses.dataclass
class Log:
    mean: jax.Array | float


@dataclasses.dataclass(frozen=True)
class Output:
    hidden: jax.Array
    note: str


@pytest.mark.parametrize(
    "log",
    [{"mean": 0.0}, Log(0.0), types.SimpleNamespace(mean=0.0)],
    ids=["dict", "dataclass", "namespace"],
)
def test_what_a_function_writes_into_an_argument_is_there_after_the_call(log):
    @fsdp.unit
    def layer(w, x, log):
        y = jnp.tanh(x @ w)
        if isinstance(log, dict):
            log["mean"] += jnp.mean(y)
        else:
            log.mean += jnp.mean(y)
        return y

    def loss(p, x):
        own = dict(log) if isinstance(log, dict) else type(log)(**vars(log))
        y = layer(p["w"], layer(p["w"], x, own), own)
        mean = own["mean"] if isinstance(own, dict) else own.mean
        return jnp.mean(y**2) + mean

    assert_as_plain(matrix, ["w"], loss)


RESULTS = {
    "string": lambda y: (y, "note"),
    "number": lambda y: (y, 3),
    "none": lambda y: (y, None),
    "dtype": lambda y: (y, y.dtype),
    "numpy": lambda y: (y, np.arange(3)),
    "function": lambda y: (y, jnp.tanh),
    "dict": lambda y: (y, {"mode": "train", "n": 3, "y": y}),
    "dataclass": lambda y: (y, Output(y, "note")),
    "nested": lambda y: (y, [Output({"y": y}, ("a", None))]),  # pyright: ignore
    "namespace": lambda y: (y, types.SimpleNamespace(y=y, n=1)),
    "variable": lambda y: (y, nnx.Cache(y)),
}


def test_what_a_unit_returns_beside_arrays_is_as_in_the_plain_program():
    """All kinds in one loss, since each is a program to compile."""
    seen = {name: set() for name in RESULTS}

    def loss(p, x):
        total = 0.0
        for name, result in RESULTS.items():
            layer = fsdp.unit(lambda w, x, result=result: result(jnp.tanh(x @ w)))
            x, beside = layer(p["w"], x)
            seen[name].add(str(described(beside)))
            total += jnp.mean(x**2) + jnp.mean(hidden(beside))
        return total

    assert_as_plain(matrix, ["w"], loss)
    # The types of what is returned, on two devices and on one.
    assert {name: len(kinds) for name, kinds in seen.items()} == dict.fromkeys(seen, 1)


def hidden(beside):
    """The arrays that were computed, wherever a result has them."""
    found = described(beside, arrays=True)
    arrays = [x for x in jax.tree.leaves(found) if isinstance(x, jax.Array)]
    return sum(map(jnp.mean, arrays), jnp.zeros(()))


def described(node, *, arrays=False):
    if isinstance(node, nnx.Variable):
        node = {"value": node.get_value()}
    if dataclasses.is_dataclass(node) or isinstance(node, types.SimpleNamespace):
        node = {"kind": type(node).__name__, **vars(node)}
    if isinstance(node, dict):
        return {k: described(v, arrays=arrays) for k, v in node.items()}
    if isinstance(node, (list, tuple)):
        return [described(v, arrays=arrays) for v in node]
    if arrays:
        return node
    return "Array" if isinstance(node, jax.Array) else type(node).__name__


class Opaque:
    def __init__(self, y):
        self.y = y


def test_an_opaque_object_with_computed_arrays_is_refused():
    def loss(p, x):
        return jnp.mean(fsdp.unit(lambda w, x: Opaque(x @ w))(p["w"], x).y)

    with pytest.raises(ValueError, match=facts("Opaque", "y")):
        assert_as_plain(matrix, ["w"], loss)


def by_closure(scale):
    return lambda w, x: x @ (w * scale)


def by_default(scale):
    return lambda w, x, scale=scale: x @ (w * scale)


def by_keyword_default(scale):
    return lambda w, x, *, scale=scale: x @ (w * scale)


def by_partial(scale):
    return functools.partial(lambda w, x, scale: x @ (w * scale), scale=scale)


def by_method(scale):
    return Scaled(scale).apply


@dataclasses.dataclass
class Scaled:
    scale: jax.Array

    def apply(self, w, x):
        return x @ (w * self.scale)

    def layer(self, w, x):
        return self.apply(w, x), None


CLOSURES = [by_closure, by_default, by_keyword_default, by_partial, by_method]


def test_a_unit_may_close_over_traced_values():
    def make(key):
        return {**matrix(key), "scale": jnp.ones((1, WIDTH)) * 1.5}

    def loss(p, x):
        # One value is differentiated by, the other is of the rank's rows.
        scale = jnp.tanh(p["scale"]) + jnp.mean(x)
        for closing in CLOSURES:
            fn = closing(scale)
            x = fsdp.unit(lambda *args, fn=fn: fn(*args))(p["w"], x)
        return jnp.mean(x**2)

    assert_as_plain(make, ["w"], loss, ALIKE)


@pytest.mark.parametrize("prefetch", [0, 1])
@pytest.mark.parametrize("closing", CLOSURES[:-1], ids=lambda fn: fn.__name__)
def test_a_scan_that_closes_over_a_traced_value_is_refused(closing, prefetch):
    def loss(p, x):
        fn = closing(jnp.mean(x))
        return jnp.mean(fsdp.scan(fn, p["w"], x, prefetch=prefetch)[0])

    with pytest.raises(ValueError, match=facts("fsdp.scan", "scale")):
        assert_as_plain(stack, [fsdp.Stacked("w")], loss)


def stack(key):
    return {"w": jax.random.normal(key, (2, WIDTH, WIDTH)) / 2}


def test_a_scan_over_a_method_computes_with_what_its_object_holds():
    def loss(p, x):
        scaled = Scaled(jnp.mean(x))
        return jnp.mean(fsdp.scan(scaled.layer, p["w"], x)[0] ** 2)

    assert_as_plain(stack, [fsdp.Stacked("w")], loss, ALIKE)


def test_a_scan_that_prefetches_over_a_method_that_holds_a_traced_value_is_refused():
    def loss(p, x):
        layer = Scaled(jnp.mean(x)).layer
        return jnp.mean(fsdp.scan(layer, p["w"], x, prefetch=1)[0] ** 2)

    with pytest.raises(ValueError, match=facts("fsdp.scan", "float32[]")):
        assert_as_plain(stack, [fsdp.Stacked("w")], loss)


def test_a_numpy_argument_reaches_a_unit_as_it_is():
    given = [np.array([0, 2]), np.array([True, False]), np.array(["a"]), np.int32(1)]
    seen = []

    @fsdp.unit
    def layer(w, x, given):
        seen.append([(type(g), g.dtype) for g in given])
        size = 1 + max(given[0]) + given[1].sum() + len(given[2]) - given[3]
        return jnp.tanh(x @ w[:, :size])

    def loss(p, x):
        return jnp.mean(layer(p["w"], x, given) ** 2)

    assert_as_plain(matrix, ["w"], loss)
    assert all(kinds == [(type(g), g.dtype) for g in given] for kinds in seen)


class Normed(nnx.Module):
    def __init__(self, rngs):
        self.linear = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.norm = nnx.BatchNorm(WIDTH, use_running_average=True, rngs=rngs)

    def __call__(self, x):
        return jnp.tanh(self.norm(self.linear(x)))


TRANSFORMED = {
    "grad": lambda f, x: jax.grad(lambda x: f(x).sum())(x),
    "vmap": lambda f, x: jax.vmap(f)(x),
    "checkpoint": lambda f, x: jax.checkpoint(f)(x),
    "jit": lambda f, x: jax.jit(f)(x),
    "jvp": lambda f, x: jax.jvp(f, (x,), (x,))[1],
    "scan": lambda f, x: jax.lax.scan(lambda c, _: (f(c), None), x, length=2)[0],
}


def test_a_unit_with_variables_that_it_only_reads_can_be_transformed():
    def loss(model, x):
        outs = [transformed(model.block, x) for transformed in TRANSFORMED.values()]
        return jnp.mean(jnp.stack(outs) ** 2)

    assert_as_plain(lambda key: Net(Normed, nnx.Rngs(key)), [Normed], loss)


class Stack(nnx.Module):
    def __init__(self, key):
        self.layers = nnx.vmap(lambda k: Normed(nnx.Rngs(k)))(jax.random.split(key, 2))


def test_a_scan_over_variables_that_it_only_reads_can_be_transformed():
    def run(model, prefetch, x):
        return fsdp.scan(
            *(lambda block, x: (block(x), None), model.layers, x), prefetch=prefetch
        )[0]

    def loss(model, x):
        outs = [
            TRANSFORMED[name](functools.partial(run, model, prefetch), x)
            for name, prefetch in (("vmap", 0), ("vmap", 1), ("grad", 0), ("scan", 0))
        ]
        return jnp.mean(jnp.stack(outs) ** 2)

    assert_as_plain(Stack, [fsdp.Stacked("layers")], loss)


class Attributes(nnx.Module):
    """Holds arrays in every way that nnx allows beside a Param of an array."""

    def __init__(self, rngs):
        self.linear = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.gain = nnx.Param(1.5)
        self.plain = jnp.arange(WIDTH)[None] / WIDTH
        self.host = np.ones((1, WIDTH), np.float32) * 2
        self.variable = nnx.Variable(jnp.ones((1, WIDTH)) / 2)
        self.number = nnx.Variable(0.5)
        self.dict = nnx.data({"a": jnp.ones((1, WIDTH)) * 3, "b": [jnp.ones(())]})
        self.list = nnx.List([jnp.ones((1, WIDTH))])

    def __call__(self, x):
        y = self.linear(x) * self.gain + self.plain * self.host
        y = y * self.dict["a"] + self.dict["b"][0] * self.variable[...]
        return jnp.tanh(y + self.list[0]) * self.number


@pytest.mark.parametrize("units", [[], [Attributes]], ids=["no units", "unit"])
def test_arrays_in_attributes_of_a_module_are_part_of_the_model(units):
    def make(key):
        return Net(Attributes, nnx.Rngs(key))

    assert_as_plain(make, units, lambda m, x: jnp.mean(m.block(x) ** 2))


class Closes(nnx.Module):
    def __init__(self, rngs):
        self.linear = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        table = jnp.ones(WIDTH)
        self.fn = lambda x: x * table


def test_a_function_in_a_model_that_closes_over_an_array_is_refused():
    with pytest.raises(ValueError, match=facts("block.fn", "table")):
        fsdp.fully_shard(lambda key: Net(Closes, nnx.Rngs(key)), MESH)
