"""Flattens a traced program into a list of operations, in the shapes of one device."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend import core

from fsdp_jax.planner.liveness._control_flow import bodies_of, branch_for_gpus
from fsdp_jax.planner.liveness._operations import (
    MOVE,
    SLICE,
    ZEROS,
    Operation,
    Program,
    Value,
)
from fsdp_jax.planner.liveness._ragged_products import with_dense_forms
from fsdp_jax.planner.liveness._slice_pushdown import made_in_parts
from fsdp_jax.planner.liveness._tp_propagation import (
    AXIS,
    COPIES,
    Dim,
    dim_of,
    is_sum_over_ranks,
    read_dims,
    split_dims,
)

INLINED = {
    "pjit",
    "jit",
    "closed_call",
    "core_call",
    "eval_jaxpr",
    "remat2",
    "checkpoint",
    "custom_jvp_call",
    "custom_vjp_call",
    "custom_vjp_call_jaxpr",
    "shard_map",
    "xla_metadata_call",
}
"""Primitives that only call an inner jaxpr."""


def flatten(jaxpr: core.Jaxpr) -> Program:
    """Returns the program of a jaxpr, with calls inlined and per-device shapes.

    Args:
      jaxpr: Jaxpr from `jax.make_jaxpr`. Inside a `shard_map` shapes are per device.
    """
    return _flatten(jaxpr, [None] * len(jaxpr.invars), 1)[0]


def on_one_device(
    jaxpr: core.Jaxpr, dims: Sequence[Dim] | None = None
) -> Program | None:
    """Returns the program inside the first `shard_map` of a step; None without one.

    Args:
      jaxpr: Jaxpr of the step.
      dims: Dim of each argument that is split over `tp`; None if none is.
    """
    env = dict(zip(jaxpr.invars, dims or [None] * len(jaxpr.invars), strict=True))
    for eqn in jaxpr.eqns:
        read = [None if isinstance(v, core.Literal) else env.get(v) for v in eqn.invars]
        inner = _called(eqn)
        if inner is not None and eqn.primitive.name == "shard_map":
            # If the shard_map is manual over tp too, its shapes are already per device.
            ranks = 1 if _is_over_tp(eqn) else eqn.params["mesh"].shape.get(AXIS, 1)
            return _flatten(inner, read, ranks, _asked(jaxpr, eqn))[0]
        if inner is not None and (found := on_one_device(inner, read)) is not None:
            return found
        env.update(zip(eqn.outvars, split_dims(eqn, read, 1), strict=True))
    return None


def _asked(jaxpr: core.Jaxpr, eqn: Any) -> list[Dim]:
    """Returns the dims along which later sharding constraints split the results."""
    asked = {
        later.invars[0]: dim_of(later.params["sharding"].spec)
        for later in jaxpr.eqns
        if later.primitive.name == "sharding_constraint"
    }
    return [asked.get(v) for v in eqn.outvars]


def _alive(
    operations: Sequence[Operation], outputs: Sequence[Value | None]
) -> list[Operation]:
    """Returns the operations whose results are read; XLA drops the others."""
    needed, alive = set(outputs), []
    for operation in reversed(operations):
        if needed.intersection(operation.outputs):
            alive.append(operation)
            needed.update(operation.inputs)
    return alive[::-1]


class _Placed(NamedTuple):
    """A value with the dim split over `tp` while XLA partitions that axis."""

    value: Value | None
    dim: Dim


@dataclasses.dataclass
class _Sum:
    """A product of which each rank has a part of each element, and its copies.

    Attributes:
      dim: Dim along which ranks get their shard of the sum; None while nothing that is
        split was combined with it: then all ranks get all of it.
      shards: Shards of the product and of its copies, those that were read.
    """

    dim: Dim = None
    shards: dict[Value, Value] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class _Frame:
    """State of an inlined call.

    Attributes:
      env: Placed values by variable.
      operations: Output list, shared by all frames of a program.
      scopes: jax's named scopes around the call.
      ranks: Devices along `tp` if XLA partitions that axis, else 1.
      sums: Sums over ranks by value, shared like the operations.
    """

    env: dict[Any, _Placed]
    operations: list[Operation]
    scopes: str
    ranks: int
    sums: dict[Value, _Sum]

    def bind(self, v: Any, dim: Dim = None) -> Value:
        """Returns the value of a variable, creating it if it has none."""
        if v not in self.env:
            self.env[v] = _Placed(_value(v, dim, self.ranks), dim)
        value = self.env[v].value
        assert value is not None
        return value

    def read(self, v: Any) -> _Placed:
        """Returns the placed value of a variable; an empty one for a literal."""
        if isinstance(v, core.Literal):
            return _Placed(None, None)
        value = self.bind(v)
        total = self.sums.get(value)
        if total is None or total.dim is None:
            return self.env[v]
        if value not in total.shards:
            total.shards[value] = made = _value(v, total.dim, self.ranks)
            self.operations.append(Operation(MOVE, (value,), (made,), self.scopes))
        return _Placed(total.shards[value], total.dim)

    def moved(self, v: Any, dim: Dim) -> Value | None:
        """Returns the value split along `dim`; a replicated value is only sliced.

        Of a sum over ranks each then gets its shard, and nobody all of it.
        """
        value, given = self.read(v)
        if value is None or given == dim:
            return value
        if given is None and (total := self.sums.get(value)):
            total.dim = dim
            return self.read(v).value
        made = _value(v, dim, self.ranks)
        name = SLICE if given is None else MOVE
        self.operations.append(Operation(name, (value,), (made,), self.scopes))
        return made


def _flatten(
    jaxpr: core.Jaxpr,
    dims: Sequence[Dim],
    ranks: int,
    asked: Sequence[Dim] | None = None,
) -> tuple[Program, list[Dim]]:
    """Returns the program, and the dims along which its results are split.

    Args:
      jaxpr: Jaxpr as for `flatten`, with shapes global over axes that XLA partitions.
      dims: Dim of each argument that is split over `tp`; None if none is.
      ranks: Devices along `tp` if XLA partitions that axis, else 1.
      asked: Dim along which each result must be split; None to leave it as it is.
    """
    frame = _Frame({}, [], "", ranks, {})
    inputs = [frame.bind(v) for v in jaxpr.constvars]
    inputs += [frame.bind(v, dim) for v, dim in zip(jaxpr.invars, dims, strict=True)]
    _inline(jaxpr, frame)
    made = [frame.read(v).dim for v in jaxpr.outvars]
    asked = asked or [None] * len(made)
    made = [own if dim is None else dim for own, dim in zip(made, asked, strict=True)]
    given = zip(jaxpr.outvars, made, strict=True)
    outputs = tuple(frame.moved(v, dim) for v, dim in given)
    operations = made_in_parts(_alive(frame.operations, outputs), outputs)
    operations = with_dense_forms(operations)
    return Program(tuple(inputs), outputs, tuple(operations)), made


def _inline(jaxpr: core.Jaxpr, frame: _Frame) -> None:
    for eqn in jaxpr.eqns:
        scopes = f"{frame.scopes}/{eqn.source_info.name_stack}"
        here = dataclasses.replace(frame, scopes=scopes)
        if (branch := branch_for_gpus(eqn)) is not None:
            _call_branch(eqn, branch, here)
        elif eqn.primitive.name in INLINED and (inner := _called(eqn)) is not None:
            _call(eqn, inner, here)
        else:
            _record(eqn, here)


def _call(eqn: Any, inner: core.Jaxpr, frame: _Frame) -> None:
    """Inlines a call; inside a `shard_map` over tp shapes are already per device."""
    is_manual = frame.ranks > 1 and _is_over_tp(eqn)
    dims = [frame.read(v).dim for v in eqn.invars]
    if is_manual:
        dims = [dim_of(spec) for spec in eqn.params["in_specs"]]
    own = dataclasses.replace(frame, env={}, ranks=1 if is_manual else frame.ranks)
    for v, outer, dim in zip(inner.invars, eqn.invars, dims, strict=True):
        value, dim_within = frame.moved(outer, dim), None if is_manual else dim
        local = _value(v, dim_within, own.ranks)
        # Inside a shard_map over other axes the same array has its local shape.
        same = value is not None and value.shape == local.shape
        own.env[v] = _Placed(value if same else local, dim_within)
    _inline(inner, own)
    for at, (v, out) in enumerate(zip(eqn.outvars, inner.outvars, strict=True)):
        value, dim = own.read(out)
        if is_manual:
            dim = dim_of(eqn.params["out_specs"][at])
        frame.env[v] = _Placed(value or _value(v, dim, frame.ranks), dim)


def _call_branch(eqn: Any, branch: core.Jaxpr, frame: _Frame) -> None:
    """Inlines the branch that XLA compiles; its first operand is the platform."""
    own = dataclasses.replace(frame, env={})
    for v, outer in zip(branch.invars, eqn.invars[1:], strict=True):
        value, dim = frame.read(outer)
        own.env[v] = _Placed(value or _value(v, dim, frame.ranks), dim)
    _inline(branch, own)
    for v, out in zip(eqn.outvars, branch.outvars, strict=True):
        value, dim = own.read(out)
        frame.env[v] = _Placed(value or _value(v, dim, frame.ranks), dim)


def _record(eqn: Any, frame: _Frame) -> None:
    """Adds an equation that is not a call, and the layout changes of its operands."""
    dims = [frame.read(v).dim for v in eqn.invars]
    bodies = bodies_of(
        eqn, dims, lambda body, given: _flatten(body, given, frame.ranks)
    )
    if bodies is None:
        made = split_dims(eqn, dims, frame.ranks)
        read = read_dims(eqn, dims, made)
    else:
        made, read = bodies.made, bodies.read
    name = eqn.primitive.name
    if name == "sharding_constraint" and made != dims:
        if frame.read(eqn.invars[0]).value in frame.sums:
            shard = frame.moved(eqn.invars[0], made[0])
            frame.env[eqn.outvars[0]] = _Placed(shard, made[0])
            return
        name = MOVE
    elif name == "broadcast_in_dim" and _is_zero(eqn.invars[0]):
        name = ZEROS
    inputs = tuple(frame.moved(v, dim) for v, dim in zip(eqn.invars, read, strict=True))
    outputs = tuple(frame.bind(v, d) for v, d in zip(eqn.outvars, made, strict=True))
    if made == [None]:
        if is_sum_over_ranks(eqn, dims):
            frame.sums[outputs[0]] = _Sum()
        elif name in COPIES and inputs[0] in frame.sums:
            frame.sums[outputs[0]] = frame.sums[inputs[0]]
    frame.operations.append(
        Operation(
            name,
            inputs,
            outputs,
            frame.scopes,
            eqn.params,
            bodies.programs if bodies else (),
            bodies.carry if bodies else (0, 0),
        )
    )


def _is_zero(v: Any) -> bool:
    is_number = jnp.issubdtype(v.aval.dtype, jnp.number)
    return isinstance(v, core.Literal) and is_number and v.val == 0


def _is_over_tp(eqn: Any) -> bool:
    return AXIS in eqn.params.get("newly_manual_axes", ())


def _called(eqn: Any) -> Any:
    for key in ("jaxpr", "call_jaxpr", "fun_jaxpr"):
        inner = eqn.params.get(key)
        if inner is not None:
            return getattr(inner, "jaxpr", inner)
    return None


def _value(v: Any, dim: Dim, ranks: int) -> Value:
    is_on_host = v.aval.memory_space == jax.memory.Space.Host
    shape = list(v.aval.shape)
    if dim is not None:
        shape[dim] //= ranks
    return Value(tuple(shape), v.aval.dtype, is_on_host)
