"""Reading one step into a mould."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from fsdp_jax._local_path import check_local
from fsdp_jax._tree import PyTree
from fsdp_jax.checkpoint._leaf_names import IMPLS, Leaf, flatten, layout, unflatten
from fsdp_jax.checkpoint._manifest import Manifest, damaged
from fsdp_jax.checkpoint._matching import Cast, Loaded, Match, Options, Strict, match
from fsdp_jax.checkpoint._multihost import check_same, exchange, together
from fsdp_jax.checkpoint._objects import Extra, capture, read_extras, restore_extras
from fsdp_jax.checkpoint._read import read_arrays, reshard
from fsdp_jax.checkpoint._steps import Step, open_step, resolve_step
from fsdp_jax.checkpoint._typed_json import decode
from fsdp_jax.checkpoint._zarr import root_cause

_PARAMS = "params."


def load(
    path: str | os.PathLike[str],
    mould: PyTree,
    *,
    step: Step = None,
    strict: Strict = "raise_all",
    allow_shape_mismatch: Sequence[str] = (),
    cast: Cast = "never",
    extras: Mapping[str, Extra] | None = None,
) -> Any:
    """Reads a step onto any mesh: each device only the bytes of its own shards.

    Every byte is verified by a checksum on the way. In Megatron's words, *unexpected*
    is a leaf that is asked for and not stored, *missing* one that is stored and not
    asked for.

    Args:
      path: The directory that `save` wrote to.
      mould: What to fill, e.g. `abstract_state(plan, tx)`: shapes, dtypes, shardings.
        Where a leaf of it is an array, that is what an unexpected leaf keeps; one that
        is abstract must be in the checkpoint, whatever `strict` says.
      step: Which step; None for the newest. `"latest-good"`: the newest of which every
        byte is as it was written, with a warning for each that is passed over; it
        reads them twice.
      strict: What to do about leaves that do not correspond. `"raise_all"` refuses
        both sorts; `"raise_unexpected"` and `"assume_ok_unexpected"` leave what is
        missing unread; `"log_unexpected"`, `"log_all"` warn in the log `fsdp_jax`;
        `"return_unexpected"`, `"return_all"` return them; `"ignore_all"` is silent.
        Where a mode names only the unexpected, those that are missing are not read.
      allow_shape_mismatch: Patterns of leaves that are cut at their end, or filled with
        zeros, to the shape of the mould: for a vocabulary padded otherwise. A pattern
        matches the last components of a name: `"embed.embedding"` is the parameter and
        its moments.
      cast: `"floats"` reads a float as the float that the mould asks for; `"never"`
        refuses it; `"as_stored"` gives a float as it is stored, whatever the mould
        says. All else always has its own dtype.
      extras: Objects that take the state they had when `save` was given them, by the
        same names; last of all, so that a load that fails leaves them as they were.
        `strict` counts them as leaves.

    Returns:
      Arrays in the structure, dtypes and shardings of `mould`; a `Loaded` with these
      and the names where `strict` begins with `return`.

    Raises:
      ValueError: If the step does not hold the mould's leaves, in their shapes and
        dtypes, but for what is allowed; all offenders in one message, before anything
        is read.
      DamagedCheckpointError: If it is not as it was written.

    Source: Megatron-LM dist_checkpointing/serialization.py::load
    """
    check_local(path)
    options = Options(strict, allow_shape_mismatch, cast)
    values, found = _read(path, flatten(mould), step, "", options, extras or {})
    state = unflatten(mould, values)
    if not strict.startswith("return"):
        return state
    return Loaded(state, found.missing, found.unexpected)


def load_params(
    path: str | os.PathLike[str],
    mould: PyTree,
    *,
    step: Step = None,
    cast: Cast = "never",
) -> PyTree:
    """Reads the parameters of a saved `TrainState` and nothing else.

    For export, evaluation and a fresh start of the optimizer; Adam's moments, twice as
    large as the parameters, are not read.

    Args:
      path: The directory that `save` wrote to.
      mould: `plan.params` of any mesh.
      step: As for `load`.
      cast: As for `load`.

    Raises:
      ValueError: As for `load`.
      DamagedCheckpointError: As for `load`.
    """
    check_local(path)
    wanted = {_PARAMS + name: leaf for name, leaf in flatten(mould).items()}
    values, _ = _read(path, wanted, step, _PARAMS, Options(cast=cast), {})
    return unflatten(mould, {n.removeprefix(_PARAMS): x for n, x in values.items()})


def load_shapes(
    path: str | os.PathLike[str], *, step: Step = None
) -> dict[str, jax.ShapeDtypeStruct]:
    """Shape and dtype of every leaf of a step, by dotted name; reads no array.

    Args:
      path: The directory that `save` wrote to.
      step: As for `load`.

    Raises:
      ValueError: If there is no such step.
      DamagedCheckpointError: As for `load`.
    """
    _, manifest = open_step(path, step)
    return manifest.leaves


def load_metadata(path: str | os.PathLike[str], *, step: Step = None) -> dict[str, Any]:
    """The `metadata` that `save` was given for a step; tuples, bytes and all.

    Args:
      path: The directory that `save` wrote to.
      step: As for `load`.

    Raises:
      ValueError: If there is no such step.
      DamagedCheckpointError: As for `load`.
    """
    _, manifest = open_step(path, step)
    return decode(manifest.metadata)


def _read(
    path: str | os.PathLike[str],
    wanted: dict[str, Leaf],
    step: Step,
    within: str,
    options: Options,
    extras: Mapping[str, Extra],
) -> tuple[dict[str, jax.Array], Match]:
    """Reads what is wanted of what is stored under the prefix `within`."""
    step = _agreed_step(path, step)
    with together("Loading"):
        directory, manifest = open_step(path, step)
        stored = {n: x for n, x in manifest.leaves.items() if n.startswith(within)}
        captured = capture(extras)
        objects = read_extras(directory, manifest.files, extras)
        found = match(
            str(directory.parent),
            stored,
            wanted | captured.leaves,
            dataclasses.replace(options, impls=_impls(directory, manifest)),
            [name for name in objects.names if name.startswith(within)],
            [f"extras.{name}" for name in extras],
        )
    check_same("the layout of what is loaded", layout(found.read))
    with together("Loading"):
        moulds = {name: leaf.value for name, leaf in found.read.items()}
        values = _restore(directory, moulds)
    values = {
        name: _without_excess(value, found.read[name], stored[name].shape)
        for name, value in reshard(values, moulds).items()
    }
    with together("Loading"):
        restore_extras(extras, captured, objects, values)
    return values, found


def _agreed_step(path: str | os.PathLike[str], step: Step) -> int:
    """The step that the first process finds: it alone looks, and verifies."""
    with together("Loading"):
        found = resolve_step(path, step) if jax.process_index() == 0 else None
    return exchange(found)[0]


def _impls(directory: Path, manifest: Manifest) -> dict[str, str]:
    if IMPLS not in manifest.files:
        return {}
    return json.loads((directory / IMPLS).read_bytes())


def _restore(directory: Path, wanted: dict[str, Any]) -> dict[str, jax.Array]:
    if not wanted:
        return {}
    try:
        return read_arrays(directory, wanted)
    except (MemoryError, jax.errors.JaxRuntimeError):
        raise
    except Exception as error:  # TensorStore raises bare `Exception`s.
        raise damaged(directory, [root_cause(error)]) from error


def _without_excess(
    value: jax.Array, leaf: Leaf, stored_shape: tuple[int, ...]
) -> jax.Array:
    """Zeros behind the end of a padded leaf that is cut within what was stored."""
    if all(have <= want for have, want in zip(stored_shape, leaf.shape, strict=True)):
        return value

    def cut(value):
        inside = [
            jax.lax.broadcasted_iota(jnp.int32, value.shape, dim) < size
            for dim, size in enumerate(leaf.shape)
        ]
        return jnp.where(jnp.all(jnp.stack(inside), axis=0), value, 0).astype(
            value.dtype
        )

    return jax.jit(cut, out_shardings=value.sharding)(value)
