"""Checks of the state and the parameters that a compiled step is called with."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import jax
from jax import core
from jax.sharding import NamedSharding

from fsdp_jax._tree import PyTree, tree_differences
from fsdp_jax.sharding._padded import Padded
from fsdp_jax.sharding._plan import Plan
from fsdp_jax.training._donation import check_not_donated
from fsdp_jax.training._state import TrainState
from fsdp_jax.training._state_check import described


class StateWatch:
    """Check of each state of a step, but of those that the step itself returned.

    jax would compile another program for a state that is sharded otherwise, which takes
    the memory of that sharding.
    """

    def __init__(self, abstract: TrainState):
        self._abstract = abstract
        self._returned: Callable[[], TrainState | None] = lambda: None

    def look(self, state: Any) -> None:
        """Raises a `ValueError` unless the state is one of the plan's, and at hand."""
        if self._returned() is not state:
            _check_state(state, self._abstract)
        else:  # Another step, or a move to the host, may have donated it since.
            check_not_donated(state, "state")

    def keep(self, state: TrainState) -> None:
        """Remembers the state that a call returns, without keeping it alive."""
        self._returned = weakref.ref(state)


class ParamsWatch:
    """Check of the parameters of each call, by name where the last call had others."""

    def __init__(self, plan: Plan):
        self._plan = plan
        self._fitting: Any = None

    def look(self, params: Any) -> None:
        """Raises a `ValueError` unless parameters fit the plan and were not donated.

        They may have any sharding, and be stored or in their logical shapes.
        """
        check_not_donated(params, "params")
        leaves, structure = jax.tree.flatten(params)
        # Names take longer than a short call: 0.03 s for a thousand leaves.
        arrays = [(getattr(x, "shape", None), getattr(x, "dtype", x)) for x in leaves]
        if (structure, arrays) != self._fitting:
            _check_params(params, self._plan)
            self._fitting = structure, arrays


def is_traced(*trees: PyTree) -> bool:
    """Whether an array of the trees is traced, as within `jax.jit`."""
    return any(isinstance(leaf, core.Tracer) for leaf in jax.tree.leaves(trees))


def _check_params(params: Any, plan: Plan) -> None:
    if isinstance(params, TrainState):
        raise ValueError(
            "params is a TrainState. Pass its parameters, state.params, and "
            "model_state=state.model_state if the model has any."
        )
    if problems := tree_differences(params, plan.params, _other_array):
        raise ValueError(
            f"params does not fit the plan in {len(problems)} place(s):\n  "
            + "\n  ".join(problems)
            + "\nPass state.params, or what init_params(plan, key) returns."
        )


def _check_state(state: Any, abstract: TrainState) -> None:
    if not isinstance(state, TrainState):
        raise ValueError(
            f"step(state, batch): state is of {type(state).__name__}, not a "
            "TrainState. Make it with fsdp_jax.init_state(plan, tx, params)."
        )
    check_not_donated(state, "state")
    if (state.loss_scale is None) != (abstract.loss_scale is None):
        with_one, without = "make_train_step", "init_state"
        if abstract.loss_scale is None:
            with_one, without = without, with_one
        raise ValueError(
            f"{with_one} was given a loss_scale and {without} was not. Pass the same "
            "loss_scale=... to both."
        )
    if problems := tree_differences(state, abstract, _misfits):
        raise ValueError(
            f"state does not fit the plan and optimizer of the step in {len(problems)} "
            "place(s):\n  "
            + "\n  ".join(problems)
            + "\nMake it with init_state(plan, tx, params), of the same plan and tx. A "
            "state of other shardings is moved by jax.device_put(state, "
            "jax.tree.map(lambda x: x.sharding, step.abstract))."
        )


def _other_array(name: str, leaf: Any, wanted: Any) -> list[str]:
    """Describes a leaf of another shape or dtype."""
    have, want = (described(x) for x in (leaf, wanted))
    return [] if have == want else [f"{name}: {have}, planned {want}"]


def _misfits(name: str, leaf: Any, wanted: Any) -> list[str]:
    if isinstance(leaf, Padded) != isinstance(wanted, Padded):
        given, planned = ("padded", "plain")[:: 1 if isinstance(leaf, Padded) else -1]
        return [f"{name}: {given}, planned {planned}"]
    if other := _other_array(name, leaf, wanted):
        return other
    # One array, or those of a node that counts as a leaf.
    arrays = zip(jax.tree.leaves(leaf), jax.tree.leaves(wanted), strict=True)
    return [
        f"{name}: {_placed(_sharding(have))}, planned {_placed(want.sharding)}"
        for have, want in arrays
        if not _is_placed(have, want)
    ]


def _is_placed(have: Any, want: Any) -> bool:
    if isinstance(have, core.Tracer) or want.ndim == 0:
        return True  # Scalars are replicated where they are used.
    sharding = _sharding(have)
    return sharding is not None and sharding.is_equivalent_to(want.sharding, want.ndim)


def _sharding(array: Any) -> Any:
    return getattr(array, "sharding", None)


def _placed(sharding: Any) -> str:
    if sharding is None:
        return "on the host"
    if not isinstance(sharding, NamedSharding):
        return str(sharding)
    axes = {axis: size for axis, size in sharding.mesh.shape.items() if size > 1}
    return f"{sharding.spec} in {sharding.memory_kind} memory of {axes}"
