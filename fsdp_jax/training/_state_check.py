"""Checks that given parameters and states are those of a plan."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax

from fsdp_jax._tree import PyTree, tree_differences
from fsdp_jax.sharding._padded import Padded
from fsdp_jax.sharding._plan import Plan
from fsdp_jax.training._optimizer import abstract_optimizer_state
from fsdp_jax.training._trainable import seen_by_optimizer


def check_key(key: Any, function: str) -> None:
    """Raises a `ValueError` unless `key` is one PRNG key, typed or of two words."""
    dtype = getattr(key, "dtype", None)
    is_typed = dtype is not None and jnp.issubdtype(dtype, jax.dtypes.prng_key)
    if not is_typed and (dtype != jnp.uint32 or key.ndim != 1):
        shown = repr(key) if dtype is None else f"{dtype}{list(key.shape)}"
        raise ValueError(
            f"{function}(key={shown}): pass a PRNG key, such as jax.random.key(0)."
        )


def check_opt_state(
    plan: Plan, tx: optax.GradientTransformation, opt_state: PyTree
) -> None:
    """Raises one `ValueError` that lists all differences from the state `tx` makes."""
    abstract = abstract_optimizer_state(tx, seen_by_optimizer(plan, plan.params))
    problems = tree_differences(opt_state, abstract, _in_other_form)
    if problems:
        raise ValueError(
            f"opt_state is not what this optimizer makes, in {len(problems)} place(s):"
            "\n  "
            + "\n  ".join(problems)
            + "\nPass arrays, numbers too: jnp.int32(1000) for a count."
        )


def check_fits(tree: PyTree, abstract: PyTree, what: str) -> None:
    """Raises one `ValueError` that lists every leaf that does not match `abstract`."""
    problems = tree_differences(tree, abstract, _misfits)
    if problems:
        raise ValueError(
            f"{what} does not fit the plan in {len(problems)} place(s):\n  "
            + "\n  ".join(problems)
            + "\nMake it with init_params(plan, key), load it with "
            "like=abstract_state(plan, tx), or place weights of the right shapes and "
            "dtypes with jax.device_put(params, plan.shardings)."
        )


def described(leaf: Any) -> str:
    """Returns dtype and shape of an array, or the type of anything else."""
    if not hasattr(leaf, "shape") or not hasattr(leaf, "dtype"):
        return type(leaf).__name__
    # Keys of all implementations are fine: a step only folds numbers into them.
    is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    return f"{'key' if is_key else leaf.dtype}{list(leaf.shape)}"


def _in_other_form(name: str, leaf: Any, abstract: Any) -> list[str]:
    have, want = described(leaf), described(abstract)
    return [] if have == want else [f"{name}: {have}, wanted {want}"]


def _misfits(name: str, leaf: Any, abstract: jax.ShapeDtypeStruct) -> list[str]:
    if isinstance(leaf, Padded):
        return [
            f"{name}: padded, as in a TrainState; take "
            "fsdp.sharding.unpack(state.params)"
        ]
    if not hasattr(leaf, "shape") or not hasattr(leaf, "dtype"):
        return [f"{name}: {described(leaf)}, planned {described(abstract)}"]
    if tuple(leaf.shape) != abstract.shape:
        return [f"{name}: shape {tuple(leaf.shape)}, planned {abstract.shape}"]
    if leaf.dtype != abstract.dtype:
        return [f"{name}: dtype {leaf.dtype}, planned {abstract.dtype}"]
    sharding = getattr(leaf, "sharding", None)
    if sharding is None or not sharding.is_equivalent_to(abstract.sharding, leaf.ndim):
        return [f"{name}: sharding {sharding}, planned {abstract.sharding}"]
    return []
