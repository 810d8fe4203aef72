"""Modules of flax.nnx, linen and equinox, built of one table of their layers.

A table is a dict from the path of a layer, as transformers names it, to what it is.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import nnx

WIDTH, PATCH = 24, 4


@dataclasses.dataclass(frozen=True)
class Linear:
    inputs: int
    outputs: int
    bias: bool = True


@dataclasses.dataclass(frozen=True)
class Norm:
    epsilon: float
    bias: bool = True
    rms: bool = False


@dataclasses.dataclass(frozen=True)
class Embed:
    rows: int
    width: int = WIDTH


@dataclasses.dataclass(frozen=True)
class Patches:
    bias: bool = True


@dataclasses.dataclass(frozen=True)
class Param:
    shape: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Stacked:
    """Several layers of the same parts, in one whose weights have a dim more."""

    parts: Any
    number: int


Table = Mapping[str, Any]


def nested(table: Table) -> Any:
    """Returns a table as dicts, and lists where paths have numbers."""
    children: dict[str, dict[str, Any]] = {}
    for path, part in table.items():
        if not path:
            return part
        name, _, rest = path.partition(".")
        children.setdefault(name, {})[rest] = part
    built = {name: nested(child) for name, child in children.items()}
    return list(built.values()) if all(map(str.isdigit, built)) else built


# flax.nnx


class Module(nnx.Module):
    """A module with what it is given as attributes."""

    def __init__(self, children: Mapping[str, Any]):
        for name, child in children.items():
            setattr(self, name, child)


def nnx_part(part: Any, rngs: nnx.Rngs) -> Any:
    match part:
        case Linear(inputs, outputs, bias):
            return nnx.Linear(inputs, outputs, use_bias=bias, rngs=rngs)
        case Norm(epsilon, _, True):
            return nnx.RMSNorm(WIDTH, epsilon=epsilon, rngs=rngs)
        case Norm(epsilon, bias):
            return nnx.LayerNorm(WIDTH, epsilon=epsilon, use_bias=bias, rngs=rngs)
        case Embed(rows, width):
            return nnx.Embed(rows, width, rngs=rngs)
        case Patches(bias):
            size = (PATCH, PATCH)
            options = {"strides": size, "padding": "VALID", "use_bias": bias}
            return nnx.Conv(3, WIDTH, size, **options, rngs=rngs)
        case Param(shape):
            return nnx.Param(jnp.zeros(shape))
        case Stacked(parts, number):
            stack = nnx.vmap(lambda rngs: nnx_module(parts, rngs))
            return nnx.split_rngs(splits=number)(stack)(rngs)
    raise TypeError(part)


def nnx_module(parts: Any, rngs: nnx.Rngs) -> Any:
    if isinstance(parts, list):
        return nnx.List([nnx_module(part, rngs) for part in parts])
    if not isinstance(parts, dict):
        return nnx_part(parts, rngs)
    return Module({name: nnx_module(part, rngs) for name, part in parts.items()})


# equinox


def equinox_part(part: Any, key: jax.Array) -> Any:
    match part:
        case Linear(inputs, outputs, bias):
            return eqx.nn.Linear(inputs, outputs, use_bias=bias, key=key)
        case Norm(epsilon, _, True):
            return eqx.nn.RMSNorm(WIDTH, eps=epsilon, use_bias=False)
        case Norm(epsilon, bias):
            return eqx.nn.LayerNorm(WIDTH, eps=epsilon, use_bias=bias)
        case Embed(rows, width):
            return eqx.nn.Embedding(rows, width, key=key)
        case Patches(bias):
            return eqx.nn.Conv2d(3, WIDTH, PATCH, PATCH, use_bias=bias, key=key)
        case Param(shape):
            return jnp.zeros(shape)
        case Stacked(parts, number):
            stack = eqx.filter_vmap(lambda key: equinox_module(parts, key))
            return stack(jax.random.split(key, number))
    raise TypeError(part)


def equinox_module(parts: Any, key: jax.Array) -> Any:
    if isinstance(parts, list):
        return [equinox_module(part, key) for part in parts]
    if not isinstance(parts, dict):
        return equinox_part(parts, key)
    fields = {"__annotations__": dict.fromkeys(parts, Any)}
    built = {name: equinox_module(part, key) for name, part in parts.items()}
    return type("Module", (eqx.Module,), fields)(**built)


# linen


class Linen(nn.Module):
    """A module with the parts of a table; called, it computes `forward`."""

    parts: Callable[[], Any]
    forward: Callable | None = None

    def setup(self):
        for name, part in self.parts().items():
            setattr(self, name, self._built(name, part))

    def _built(self, name: str, part: Any) -> Any:
        if isinstance(part, list):
            return [self._built(name, one) for one in part]
        match part:
            case dict():
                return Linen(lambda: part)
            case Linear(_, outputs, bias):
                return nn.Dense(outputs, use_bias=bias)
            case Norm(epsilon, _, True):
                return nn.RMSNorm(epsilon=epsilon)
            case Norm(epsilon, bias):
                return nn.LayerNorm(epsilon=epsilon, use_bias=bias)
            case Embed(rows, width):
                return nn.Embed(rows, width)
            case Patches(bias):
                size = (PATCH, PATCH)
                return nn.Conv(WIDTH, size, size, "VALID", use_bias=bias)
            case Param(shape):
                return self.param(name, nn.initializers.zeros_init(), shape)
        raise TypeError(part)

    def __call__(self, *inputs):
        assert self.forward is not None
        return self.forward(self, *inputs)


# What computes


def apply(part: Any, x: jax.Array) -> jax.Array:
    """Applies a layer of any library to the last dim, or to images `[B, C, H, W]`."""
    if isinstance(part, eqx.nn.Conv2d):
        return jax.vmap(part)(x).transpose(0, 2, 3, 1)
    if isinstance(part, (nnx.Conv, nn.Conv)):
        return part(x.transpose(0, 2, 3, 1))
    if not isinstance(part, eqx.Module):
        return part(x)
    for _ in range(x.ndim - (not isinstance(part, eqx.nn.Embedding))):
        part = jax.vmap(part)
    return part(x)


def walk(model: Any, path: str) -> Any:
    for name in path.split("."):
        model = model[int(name)] if name.isdigit() else getattr(model, name)
    return model


def sliced(part: Any, number: int) -> Any:
    """Returns one of the layers that are stacked in one."""
    if isinstance(part, nnx.Module):
        graph, state = nnx.split(part)
        return nnx.merge(graph, jax.tree.map(lambda leaf: leaf[number], state))
    return jax.tree.map(lambda leaf: leaf[number] if eqx.is_array(leaf) else leaf, part)
