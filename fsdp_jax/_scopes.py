"""Names in a trace that something reads back: named scopes and traced functions.

Passes over a trace, the planner and the audit find units, gathers and reductions by
these names, in jaxprs and in compiled programs. Each name is written and read through
this module alone, so that a rename cannot make a reader find nothing.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any, TypeVar

import jax

Fn = TypeVar("Fn", bound=Callable[..., Any])

PREFETCH = "prefetch"
"""Scope of a gather that a loop runs for a later unit."""

AS_WRITTEN = "as_written"
"""Scope of a loop whose gathers stay in the iteration that uses them."""

OPTIMIZER = "optimizer"
"""Scope of the update."""

BY_LAYER = "by_layer"
"""Scope of the loops of an update over the layers of a stack in host memory."""

HELD = "held"
"""Scope of a barrier that holds a gather in the loop that runs it."""

GATHER_FOR_STEP = "gather_for_step"
"""Scope of the gathers that run once a step, before the first microbatch."""

REDUCE_SCATTER = "reduce_scatter"
"""Scope of the reduction of a unit's gradients."""

ALL_REDUCE = "all_reduce"
"""Scope of the deferred sum of gradients that are not split."""

REDUCE_DEFERRED = "reduce_deferred"
"""Scope of the deferred reduction."""

MODEL_STATE = "model_state"
"""Scope of the reduction of the model's state over ranks."""

RING_ATTENTION = "ring_attention"
"""Scope of ring attention's collectives."""

ALL_GATHER_ATTENTION = "all_gather_attention"
"""Scope of all-gather attention's collectives."""

ULYSSES_ATTENTION = "ulysses_attention"
"""Scope of Ulysses attention's collectives."""

ALL_GATHER_RECURRENCE = "all_gather_recurrence"
"""Scope of the collectives of mixers with a state."""

SHIFT_TOKENS = "shift_tokens"
"""Scope of the collectives of a shift of rows."""

SEQUENCE_PARALLEL = "sequence_parallel"
"""Scope of the collectives of activations over `tp`."""

EXPERT_DISPATCH = "expert_dispatch"
"""Scope of the tokens that are sent to experts of other ranks, and of their results."""

# `bridge.models`, which cannot import this, writes the same name.
_ROWS = "rows_of_experts"


def rows_of_experts(chosen: int, padded: int) -> str:
    """Scope of products of experts, some rows of which are padding.

    Args:
      chosen: Number of rows that tokens chose.
      padded: Number of rows of the products.
    """
    return f"{_ROWS}_{min(chosen, padded)}_of_{padded}"


def part_of_rows(scopes: str) -> float:
    """Returns the part of an operation's rows that is not padding, by its scopes."""
    found = re.findall(rf"{_ROWS}_(\d+)_of_(\d+)", scopes)
    return math.prod(int(chosen) / int(padded) for chosen, padded in found)


CONTEXT_PARALLEL = (
    RING_ATTENTION,
    ALL_GATHER_ATTENTION,
    ULYSSES_ATTENTION,
    ALL_GATHER_RECURRENCE,
    SHIFT_TOKENS,
)
"""Scopes of the collectives of tokens over `cp`: attention, recurrences, shifts."""

FLASH_FORWARD = "flash_attention_forward"
"""Kernel of `bridge.models`, which cannot import this: forward pass of attention."""

FLASH_QUERY_GRAD = "flash_attention_query_grad"
"""Kernel of `bridge.models` for the gradient of queries."""

FLASH_KEY_GRADS = "flash_attention_key_grads"
"""Kernel of `bridge.models` for the gradients of keys and values."""

FSDP_GATHER = "fsdp_gather"
"""Function from one shard to its weight."""

FSDP_UNSHARD = "fsdp_unshard"
"""Function from a unit's shards to its weights and what depends on them alone."""

FSDP_SCAN = "fsdp_scan"
"""Function that runs a stack of units and gathers them ahead."""

FSDP_STACK = "fsdp_stack"
"""Primitive that stands for a stack whose layers pipeline stages run."""

GATHERS = (FSDP_GATHER, FSDP_UNSHARD, FSDP_SCAN)
"""Custom-derivative functions from shards to weights or results."""

_UNIT = "unit:"
# A transform puts a scope in parentheses: `transpose(jvp(unit:layers))`. XLA joins the
# scopes of instructions that it merges with a colon or a semicolon.
_UNITS = re.compile(re.escape(_UNIT) + r"([^/():;]+)")
_MERGED = re.compile(rf";|(?<!{_UNIT[:-1]}):")
_OPT_STATE = re.compile(r"\bopt_state\b")
_TURNS = re.compile(r"turns_(\d+)_(\d+)/cond$")


def unit_scope(unit: str) -> Any:
    """Returns a named scope, a context manager, for what a unit runs."""
    return jax.named_scope(f"{_UNIT}{unit}")


def units_in(scopes: Any) -> list[str]:
    """Returns the units in a path of scopes, the outermost first.

    Args:
      scopes: A name stack of jax, or an `op_name` of HLO.
    """
    return _UNITS.findall(str(scopes))


def unit_of(scopes: Any) -> str | None:
    """Returns the innermost unit in a path of scopes; None if there is none."""
    return next(reversed(units_in(scopes)), None)


def merged_units(scopes: Any) -> set[str]:
    """Returns the innermost unit in each of the paths that XLA merged.

    Examples:
      >>> from fsdp_jax._scopes import merged_units
      >>> merged_units("step/unit:group/while/unit:layers/all_gather")
      {'layers'}
      >>> sorted(merged_units("step/unit:0/all_gather;step/unit:1/all_gather"))
      ['0', '1']
    """
    units = map(unit_of, _MERGED.split(str(scopes)))
    return {unit for unit in units if unit}


def is_in(scopes: Any, name: str) -> bool:
    """Returns whether a path of scopes has `name` among its parts.

    Examples:
      >>> from fsdp_jax._scopes import PREFETCH, is_in
      >>> is_in("jit(step)/transpose(jvp(unit:layers))/prefetch/all_gather", PREFETCH)
      True
    """
    return name in re.split(r"[/():;]", str(scopes))


def is_of_optimizer(scopes: Any) -> bool:
    """Returns whether an operation is the update's, or moves what the optimizer keeps.

    XLA names an operation that only moves an argument after that argument.

    Examples:
      >>> from fsdp_jax._scopes import is_of_optimizer
      >>> is_of_optimizer("jit(step)/optimizer/add")
      True
      >>> is_of_optimizer("state.opt_state[0].mu['head']")
      True
    """
    return is_in(scopes, OPTIMIZER) or bool(_OPT_STATE.search(str(scopes)))


def turns_scope(start: int, stop: int) -> Any:
    """Returns a named scope that tells the planner in which ticks a stage has a turn.

    Stages wait for each other, so a tick takes as long as its slowest stage.

    Args:
      start: First such tick.
      stop: Tick behind the last one.
    """
    return jax.named_scope(f"turns_{start}_{stop}")


def turns_of(scopes: str) -> tuple[int, int] | None:
    """Returns the ticks of `turns_scope` for a conditional; None for any other."""
    found = _TURNS.search(scopes)
    return (int(found[1]), int(found[2])) if found else None


def is_transposed(scopes: Any) -> bool:
    """Returns whether jax made an operation by transposing another, for backward."""
    return "transpose(" in str(scopes)


def is_recomputed(scopes: Any) -> bool:
    """Returns whether an operation is recomputed by `jax.checkpoint`, for backward."""
    return "rematted_computation" in str(scopes)


def traced_as(name: str) -> Callable[[Fn], Fn]:
    """Decorates a function that readers find in a trace by its name.

    Args:
      name: One of the names above.

    Raises:
      RuntimeError: At its definition, if the function has another name.
    """

    def check(fn: Fn) -> Fn:
        if fn.__name__ != name:
            raise RuntimeError(f"traces find {fn.__name__} as '{name}': rename both.")
        return fn

    return check


def traced_function(eqn: Any) -> str | None:
    """Returns the name of the custom-derivative function that an equation calls."""
    called = eqn.params.get("call_jaxpr")
    return called and getattr(called, "jaxpr", called).debug_info.func_name
