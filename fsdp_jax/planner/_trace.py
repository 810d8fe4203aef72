"""A traced program as a flat list of operations, as far as memory and work ask."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax.extend import core

INLINED = {
    "pjit",
    "jit",
    "closed_call",
    "core_call",
    "remat2",
    "checkpoint",
    "custom_jvp_call",
    "custom_vjp_call",
    "custom_vjp_call_jaxpr",
    "shard_map",
    "xla_metadata_call",
}
"""Primitives that merely call what is in them."""


@dataclasses.dataclass(frozen=True, eq=False)
class Value:
    """An array of a traced program, by identity.

    Attributes:
      shape: Its dims on one device.
      dtype: Its dtype.
      is_on_host: Whether it is none of the device's, as what is offloaded for backward.
    """

    shape: tuple[int, ...]
    dtype: Any
    is_on_host: bool = False

    @property
    def bytes(self) -> int:
        """Bytes of it on one device."""
        if self.is_on_host:
            return 0
        return math.prod(self.shape) * self.dtype.itemsize


@dataclasses.dataclass(frozen=True)
class Operation:
    """One equation of a traced program; what is called is inlined.

    Attributes:
      name: Of the primitive.
      inputs: What it reads; constants are left out.
      outputs: What it makes.
      params: Of the primitive.
      bodies: The programs within: of a loop its body, of a condition its branches.
      scopes: jax's named scopes around it.
    """

    name: str
    inputs: tuple[Value | None, ...]
    outputs: tuple[Value, ...]
    params: Mapping[str, Any]
    bodies: tuple[Program, ...]
    scopes: str


@dataclasses.dataclass(frozen=True)
class Program:
    """A traced function.

    Attributes:
      inputs: Its arguments, closed-over constants first.
      outputs: Its results; None for a literal.
      operations: In the order of the trace.
    """

    inputs: tuple[Value, ...]
    outputs: tuple[Value | None, ...]
    operations: tuple[Operation, ...]


def flatten(jaxpr: core.Jaxpr) -> Program:
    """The program of a jaxpr, with calls inlined and shapes as on one device.

    Args:
      jaxpr: From `jax.make_jaxpr`. Within a `shard_map` shapes are a device's own.
    """
    env: dict[Any, Value] = {}
    inputs = tuple(_bind(env, v) for v in (*jaxpr.constvars, *jaxpr.invars))
    operations: list[Operation] = []
    _inline(jaxpr, env, operations, "")
    outputs = tuple(_read(env, v) for v in jaxpr.outvars)
    return Program(inputs, outputs, tuple(_alive(operations, outputs)))


def on_one_device(jaxpr: core.Jaxpr) -> Program | None:
    """The program within the first `shard_map` of a traced step; None without one."""
    for eqn in jaxpr.eqns:
        inner = _called(eqn)
        if inner is None:
            continue
        if eqn.primitive.name == "shard_map":
            return flatten(inner)
        if (found := on_one_device(inner)) is not None:
            return found
    return None


def _alive(
    operations: Sequence[Operation], outputs: Sequence[Value | None]
) -> list[Operation]:
    """Those whose results somebody reads; XLA drops the others."""
    needed, alive = set(outputs), []
    for operation in reversed(operations):
        if needed.intersection(operation.outputs):
            alive.append(operation)
            needed.update(operation.inputs)
    return alive[::-1]


def _inline(jaxpr, env, operations: list[Operation], scopes: str) -> None:
    for eqn in jaxpr.eqns:
        here = f"{scopes}/{eqn.source_info.name_stack}"
        name = eqn.primitive.name
        inputs = tuple(_read(env, v) for v in eqn.invars)
        if name in INLINED and (inner := _called(eqn)) is not None:
            own: dict[Any, Value] = {v: _value(v) for v in inner.constvars}
            for v, value in zip(inner.invars, inputs, strict=True):
                local = _value(v)
                # Within a shard_map the same array has a device's shape.
                same = value is not None and value.shape == local.shape
                own[v] = value if value is not None and same else local
            _inline(inner, own, operations, here)
            for v, out in zip(eqn.outvars, inner.outvars, strict=True):
                value = _read(own, out)
                env[v] = value if value is not None else _value(v)
            continue
        outputs = tuple(_bind(env, v) for v in eqn.outvars)
        bodies = tuple(flatten(body.jaxpr) for body in _bodies(eqn))
        operations.append(Operation(name, inputs, outputs, eqn.params, bodies, here))


def _called(eqn) -> Any:
    for key in ("jaxpr", "call_jaxpr", "fun_jaxpr"):
        inner = eqn.params.get(key)
        if inner is not None:
            return getattr(inner, "jaxpr", inner)
    return None


def _bodies(eqn) -> Sequence[core.ClosedJaxpr]:
    if eqn.primitive.name == "scan":
        return [eqn.params["jaxpr"]]
    if eqn.primitive.name == "while":
        return [eqn.params["body_jaxpr"]]
    if eqn.primitive.name == "cond":
        return list(eqn.params["branches"])
    return []


def _bind(env: dict[Any, Value], v: Any) -> Value:
    if v not in env:
        env[v] = _value(v)
    return env[v]


def _value(v: Any) -> Value:
    is_on_host = v.aval.memory_space == jax.memory.Space.Host
    return Value(tuple(v.aval.shape), v.aval.dtype, is_on_host)


def _read(env: dict[Any, Value], v: Any) -> Value | None:
    return None if isinstance(v, core.Literal) else _bind(env, v)
