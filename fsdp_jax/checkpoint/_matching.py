"""Compares stored leaves with requested ones, and reports the differences."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp

from fsdp_jax._tree import PyTree, matches
from fsdp_jax.checkpoint._leaf_names import Leaf

Strict = Literal[
    "assume_ok_unexpected",
    "log_unexpected",
    "log_all",
    "raise_unexpected",
    "raise_all",
    "return_unexpected",
    "return_all",
    "ignore_all",
]
Cast = Literal["never", "floats", "as_stored"]

# Mode -> (action on requested leaves that are not stored, action on stored leaves that
# are not requested).
_ON_UNEXPECTED_AND_MISSING = {
    "assume_ok_unexpected": ("raise", "ignore"),
    "log_unexpected": ("log", "ignore"),
    "log_all": ("log", "log"),
    "raise_unexpected": ("raise", "ignore"),
    "raise_all": ("raise", "raise"),
    "return_unexpected": ("return", "ignore"),
    "return_all": ("return", "return"),
    "ignore_all": ("ignore", "ignore"),
}


class Loaded(NamedTuple):
    """Result of `load` if `strict` begins with `return`.

    The words are Megatron's, as seen from the checkpoint: *missing* is the reverse of
    its meaning in `torch.nn.Module.load_state_dict`.

    Attributes:
      state: Loaded state.
      missing: Names of stored leaves that were not requested.
      unexpected: Names of requested leaves that are not stored.
    """

    state: PyTree
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Options:
    """Strictness of a load.

    Attributes:
      strict: One of Megatron's eight modes.
      allow_shape_mismatch: Patterns of leaves that may be truncated or padded with
        zeros.
      cast: Allowed casts between floats, see `load`.
      impls: Implementations of stored PRNG keys, by name.

    Source: Megatron-LM dist_checkpointing/validation.py::StrictHandling
    """

    strict: Strict = "raise_all"
    allow_shape_mismatch: Sequence[str] = ()
    cast: Cast = "never"
    impls: Mapping[str, str] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Match:
    """Leaves to read, and differences to return.

    Attributes:
      read: Leaves that are both stored and requested.
      missing: Missing names as in `Loaded`; empty unless the mode returns them.
      unexpected: Unexpected names as in `Loaded`; empty unless the mode returns them.
    """

    read: dict[str, Leaf]
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]


def match(
    where: str,
    stored: dict[str, jax.ShapeDtypeStruct],
    wanted: dict[str, Leaf],
    options: Options,
    stored_objects: Collection[str] = (),
    wanted_objects: Collection[str] = (),
) -> Match:
    """Compares stored with requested leaves, before anything is read.

    Args:
      where: Step, for messages.
      stored: Shape and dtype of every stored leaf.
      wanted: Leaves of the abstract state.
      options: Allowed differences.
      stored_objects: Names of the stored extras.
      wanted_objects: Names of the requested extras.

    Raises:
      ValueError: If there are differences that `options` do not allow; lists all of
        them.
    """
    if options.strict not in _ON_UNEXPECTED_AND_MISSING:
        known = ", ".join(_ON_UNEXPECTED_AND_MISSING)
        raise ValueError(f"strict={options.strict!r}: it is one of {known}.")
    if options.cast not in get_args(Cast):
        known = ", ".join(map(repr, get_args(Cast)))
        raise ValueError(f"cast={options.cast!r}: it is one of {known}.")
    on_unexpected, on_missing = _ON_UNEXPECTED_AND_MISSING[options.strict]
    unexpected = _only_in((*wanted, *wanted_objects), {*stored, *stored_objects})
    missing = _only_in((*stored, *sorted(stored_objects)), {*wanted, *wanted_objects})
    read = {name: leaf for name, leaf in wanted.items() if name in stored}
    problems = _unfilled(wanted, unexpected, on_unexpected)
    if on_missing == "raise":
        problems += [f"only in the checkpoint: {name}" for name in missing]
    for name, leaf in read.items():
        problems += _misfits(name, stored[name], leaf, options)
    problems += _unused(options.allow_shape_mismatch, read)
    if problems:
        raise ValueError(_does_not_fit(where, problems))
    if on_unexpected == "log":
        _log(where, "left as given, not in the checkpoint", unexpected)
    if on_missing == "log":
        _log(where, "not read, only in the checkpoint", missing)
    if options.cast == "as_stored":
        read = {name: _in_dtype(leaf, stored[name]) for name, leaf in read.items()}
    return Match(
        read,
        missing if on_missing == "return" else (),
        unexpected if on_unexpected == "return" else (),
    )


def may_differ(name: str, patterns: Iterable[str]) -> bool:
    """Returns whether a pattern matches the last components of the name.

    So `embed.embedding` matches the parameter and its moments in the optimizer.
    """
    parts = name.split(".")
    tails = [".".join(parts[start:]) for start in range(len(parts))]
    return any(matches(pattern, tail) == tail for pattern in patterns for tail in tails)


def _only_in(names: Iterable[str], others: Collection[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name for name in names if name not in others))


def _unfilled(
    wanted: dict[str, Leaf], unexpected: tuple[str, ...], on_unexpected: str
) -> list[str]:
    """Lists the leaves that are not stored and have no value to keep."""
    if on_unexpected == "raise":
        return [f"not in the checkpoint: {name}" for name in unexpected]
    return [
        f"not in the checkpoint, and `like` has no value for it: {name}"
        for name in unexpected
        if name in wanted and wanted[name].is_abstract
    ]


def _misfits(
    name: str, have: jax.ShapeDtypeStruct, leaf: Leaf, options: Options
) -> list[str]:
    want = leaf.abstract
    same_shape = have.shape == want.shape or (
        len(have.shape) == len(want.shape)
        and may_differ(name, options.allow_shape_mismatch)
    )
    floats = options.cast != "never" and _are_floats(have, want)
    same_dtype = have.dtype == want.dtype or floats
    given = have.dtype if floats and options.cast == "as_stored" else want.dtype
    if same_dtype and (narrow := jax.dtypes.canonicalize_dtype(given)) != given:
        return [
            f"{name}: stored {have.dtype}, and jax makes {given} to {narrow}: set "
            "jax_enable_x64" + _or_cast(given)
        ]
    if not same_shape or not same_dtype:
        stored = f"{have.dtype}{list(have.shape)}"
        return [f"{name}: stored {stored}, wanted {want.dtype}{list(want.shape)}"]
    kind = options.impls.get(name)
    if kind and leaf.impl and kind != leaf.impl:  # Plain words have no implementation.
        return [f"{name}: stored keys of {kind}, wanted keys of {leaf.impl}"]
    if getattr(leaf.value, "sharding", None) is None:
        return [f"{name}: `like` does not say its sharding"]
    return []


def _or_cast(dtype: Any) -> str:
    is_float = jnp.issubdtype(dtype, jnp.floating)
    return ', or want float32 with cast="floats"' if is_float else ""


def _are_floats(*leaves: Any) -> bool:
    return all(jnp.issubdtype(leaf.dtype, jnp.floating) for leaf in leaves)


def _in_dtype(leaf: Leaf, stored: jax.ShapeDtypeStruct) -> Leaf:
    shape, sharding = leaf.value.shape, leaf.value.sharding
    value = jax.ShapeDtypeStruct(shape, stored.dtype, sharding=sharding)
    return dataclasses.replace(leaf, value=value)


def _unused(patterns: Sequence[str], read: dict[str, Any]) -> list[str]:
    return [
        f"allow_shape_mismatch: no leaf is called {pattern!r}"
        for pattern in patterns
        if not any(may_differ(name, [pattern]) for name in read)
    ]


def _does_not_fit(where: str, problems: list[str]) -> str:
    return (
        f"'{where}' does not fit in {len(problems)} place(s):\n  "
        + "\n  ".join(sorted(problems))
        + "\nLoad it with the model, precision and optimizer it was saved with."
    )


def _log(where: str, what: str, names: tuple[str, ...]) -> None:
    if names:
        logging.getLogger("fsdp_jax").warning(
            "'%s': %d leaf/leaves %s: %s", where, len(names), what, ", ".join(names)
        )
