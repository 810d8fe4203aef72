"""What a loss does with the shards of units: gather them in a unit, or misuse them.

Read from the traced program, since no error of a `Shard` itself can see everything: a
loss that maps over the leaves of its model reads shards as if they were weights.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jax.extend import core

GATHERS = ("fsdp_gather", "fsdp_unshard", "fsdp_scan")
"""Names of the custom-derivative functions that take shards and return weights."""

MANY = 2
"""Stands for more than one use, and for a use that may not happen."""


@dataclasses.dataclass
class Uses:
    """How often each shard is gathered, and which ones are read by anything else.

    Attributes:
      gathers: Name -> 0, 1, or `MANY`. A stack that a loop takes slice by slice counts
        as often as each slice.
      misread: Names of shards that are computed with, or returned, as if they were
        weights.
    """

    gathers: dict[str, int]
    misread: set[str]


@dataclasses.dataclass(frozen=True)
class _Tracked:
    """What a variable holds of a shard.

    Attributes:
      name: Of the parameter.
      many: Whether a gather of it may be one of several, or may not happen: in a loop
        or a branch, or of pieces that were moved about.
    """

    name: str
    many: bool = False


_Known = dict[Any, _Tracked]
_Given = Sequence[_Tracked | None]

# What moves or cuts an array, as maps and stacks do, without reading it.
_MOVES = {
    *("broadcast_in_dim", "concatenate", "convert_element_type", "copy"),
    *("dynamic_slice", "gather", "name", "optimization_barrier", "reshape", "rev"),
    *("sharding_constraint", "slice", "split", "squeeze", "stop_gradient", "transpose"),
}


def uses_of_shards(jaxpr: core.Jaxpr, shards: Mapping[Any, str]) -> Uses:
    """Follows shards through the program of a loss.

    Args:
      jaxpr: Of the loss, as a function of shards and other things.
      shards: The input variables that are shards, with the parameter's name.
    """
    uses = Uses(dict.fromkeys(shards.values(), 0), set())
    known: _Known = {v: _Tracked(name) for v, name in shards.items()}
    _follow(jaxpr, known, uses)
    results = [v for v in jaxpr.outvars if isinstance(v, core.Var)]
    uses.misread |= {known[v].name for v in results if v in known}
    return uses


def _follow(jaxpr: core.Jaxpr, known: _Known, uses: Uses) -> None:
    """Adds to `uses` what the program does, and to `known` the shards it moves."""
    for eqn in jaxpr.eqns:
        given = [known.get(v) if isinstance(v, core.Var) else None for v in eqn.invars]
        if not any(given):
            continue
        if _is_gather(eqn):
            for tracked in filter(None, given):
                many = tracked.many or uses.gathers[tracked.name]
                uses.gathers[tracked.name] = MANY if many else 1
        elif bodies := list(_bodies(eqn, given)):
            for body, arguments in bodies:
                inner = {v: t for v, t in zip(body.invars, arguments, strict=True) if t}
                _follow(body, inner, uses)
                for out, result in zip(eqn.outvars, body.outvars, strict=False):
                    if isinstance(result, core.Var) and result in inner:
                        known[out] = dataclasses.replace(inner[result], many=True)
        elif eqn.primitive.name in _MOVES:
            moved = _as_many(given)
            if eqn.primitive.name != "optimization_barrier":  # One result an operand.
                moved = [next(filter(None, moved))] * len(eqn.outvars)
            known |= {v: t for v, t in zip(eqn.outvars, moved, strict=True) if t}
        else:
            uses.misread |= {tracked.name for tracked in given if tracked}


def _is_gather(eqn: Any) -> bool:
    if eqn.primitive.name == "fsdp_stack":
        return True
    call = eqn.params.get("call_jaxpr")
    return call is not None and call.jaxpr.debug_info.func_name in GATHERS


def _bodies(eqn: Any, given: _Given) -> Iterator[tuple[core.Jaxpr, _Given]]:
    """The programs within an equation, each with what its inputs hold."""
    params, kind = eqn.params, eqn.primitive.name
    if kind == "scan":
        # Each slice of what is scanned over is its own, once; all else is as in a loop.
        # By rank, since jax 0.10 and 0.12 name what is scanned over differently.
        body = params["jaxpr"].jaxpr
        many = _as_many(given) if params["length"] > 1 else given
        held = zip(given, many, eqn.invars, body.invars, strict=True)
        yield (
            body,
            [s if a.aval.ndim > b.aval.ndim else loop for s, loop, a, b in held],
        )
    elif kind == "while":
        held = _as_many(given)
        cond, body = params["cond_nconsts"], params["body_nconsts"]
        carry = held[cond + body :]
        yield params["cond_jaxpr"].jaxpr, [*held[:cond], *carry]
        yield params["body_jaxpr"].jaxpr, [*held[cond : cond + body], *carry]
    elif kind == "cond":
        for branch in params["branches"]:
            yield branch.jaxpr, _as_many(given[1:])
    else:
        inner = params.get("jaxpr", params.get("call_jaxpr"))
        inner = getattr(inner, "jaxpr", inner)
        if isinstance(inner, core.Jaxpr) and len(inner.invars) == len(given):
            yield inner, given


def _as_many(given: _Given) -> list[_Tracked | None]:
    return [dataclasses.replace(t, many=True) if t else None for t in given]
