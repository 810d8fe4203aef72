"""Loads one step into an abstract state."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from fsdp_jax._tree import PyTree, as_patterns
from fsdp_jax.checkpoint._leaf_names import IMPLS, Leaf, flatten, layout, unflatten
from fsdp_jax.checkpoint._manifest import (
    Manifest,
    check_seals,
    reading,
    unreadable,
)
from fsdp_jax.checkpoint._matching import Cast, Loaded, Match, Options, Strict, match
from fsdp_jax.checkpoint._multihost import check_same, exchange, together
from fsdp_jax.checkpoint._objects import Extra, capture, read_extras, restore_extras
from fsdp_jax.checkpoint._paths import as_path
from fsdp_jax.checkpoint._read import read_arrays, reshard
from fsdp_jax.checkpoint._steps import Step, open_step, resolve_step
from fsdp_jax.checkpoint._stock_orbax import Rules, find_arrays
from fsdp_jax.checkpoint._typed_json import decode
from fsdp_jax.checkpoint._zarr import Arrays

_PARAMS = "params."
_STATE = "opt_state."
_EMA = ".ema."


def load(
    path: str | os.PathLike[str],
    like: PyTree,
    *,
    step: Step = None,
    strict: Strict = "raise_all",
    allow_shape_mismatch: Sequence[str] = (),
    cast: Cast = "never",
    extras: Mapping[str, Extra] | None = None,
    rules: Rules | None = None,
) -> Any:
    """Loads a step onto any mesh; each device reads only the bytes of its shards.

    Every byte is verified by a checksum. As in Megatron, an *unexpected* leaf is one in
    `like` that is not stored, and a *missing* leaf is one that is stored and not in
    `like`.

    Args:
      path: Directory that `save` wrote to.
      like: Abstract state with shapes, dtypes and shardings, e.g.
        `abstract_state(plan, tx)`. A leaf that is an array keeps its value if it is
        unexpected; an abstract one must be stored, whatever `strict` says.
      step: Step to load; None for the newest. `"latest-good"` loads the newest step
        whose bytes are all as written, warns about each step that it skips, and reads
        every byte twice.
      strict: Handling of leaves that do not correspond. `"raise_all"` refuses both
        sorts. `"raise_unexpected"` and `"assume_ok_unexpected"` refuse unexpected
        leaves and do not read missing ones. `"log_unexpected"` and `"log_all"` warn in
        the log `fsdp_jax`. `"return_unexpected"` and `"return_all"` return the names.
        `"ignore_all"` is silent. Modes that name only unexpected leaves ignore missing
        ones.
      allow_shape_mismatch: Patterns of leaves that may be truncated, or padded with
        zeros at the end, to the shape in `like`, e.g. for a vocabulary with other
        padding. A pattern matches the last components of a name: `"embed.embedding"` is
        the parameter and its moments.
      cast: `"floats"` casts stored floats to the float dtype in `like`; `"never"`
        refuses to; `"as_stored"` returns floats in their stored dtype. Other dtypes
        must be equal.
      extras: Objects whose state to restore, under the names passed to `save`. They are
        set last, so a load that fails leaves them unchanged. `strict` counts them as
        leaves.
      rules: Rules for a checkpoint that Orbax wrote for another program: pairs of a
        pattern and a replacement, which `re.sub` applies in order to the name of each
        stored array, such as `params.params.decoder.norm.scale`. An array whose name
        becomes empty is left out. Such a checkpoint has no checksums of its values.
        None for a checkpoint of fsdp_jax.

    Returns:
      Arrays in the structure, dtypes and shardings of `like`; a `Loaded` with these
      and the names if `strict` begins with `return`.

    Raises:
      ValueError: If names, shapes or dtypes of the step differ from `like` in ways
        that are not allowed; lists all such leaves, before anything is read.
      DamagedCheckpointError: If the step is not as it was written.

    Examples:
      >>> fsdp.save(path, fsdp.init_state(plan, tx, params))
      >>> smaller_mesh = fsdp.make_mesh(devices=jax.devices()[:2])
      >>> plan = fsdp.fully_shard(make_model, smaller_mesh, [fsdp.Stacked("layers")])
      >>> state = fsdp.load(path, fsdp.abstract_state(plan, tx))
      >>> state.params["head"].sharding.num_devices
      2

    Source: Megatron-LM dist_checkpointing/serialization.py::load
    """
    path = as_path(path)
    option = "allow_shape_mismatch"
    patterns = as_patterns("load", option, allow_shape_mismatch)
    options = Options(strict, patterns, cast)
    wanted = flatten(like)
    if rules is None:
        values, found = _read(path, wanted, step, "", options, extras or {})
    else:
        _refuse_extras(extras)
        values, found = _read_stock(path, wanted, step, rules, options)
    state = unflatten(like, values)
    if not strict.startswith("return"):
        return state
    return Loaded(state, found.missing, found.unexpected)


def load_params(
    path: str | os.PathLike[str],
    like: PyTree,
    *,
    step: Step = None,
    cast: Cast = "never",
) -> PyTree:
    """Loads only the parameters of a saved `TrainState`.

    For export, evaluation or a new optimizer; Adam's moments, twice as large as the
    parameters, are not read.

    Args:
      path: Directory that `save` wrote to.
      like: Abstract parameters, `plan.params` of any mesh.
      step: Step to load, as in `load`.
      cast: Casts of floats, as in `load`.

    Returns:
      Arrays in the structure, dtypes and shardings of `like`.

    Raises:
      ValueError: If the stored parameters do not fit `like`, as in `load`.
      DamagedCheckpointError: If the step is not as it was written.
    """
    path = as_path(path)
    wanted = {_PARAMS + name: leaf for name, leaf in flatten(like).items()}
    values, _ = _read(path, wanted, step, _PARAMS, Options(cast=cast), {})
    return unflatten(like, {n.removeprefix(_PARAMS): x for n, x in values.items()})


def load_average(
    path: str | os.PathLike[str],
    like: PyTree,
    *,
    step: Step = None,
    cast: Cast = "never",
) -> PyTree:
    """Loads the average of the parameters that `fsdp_jax.optim.ema_of_params` made.

    Parameters that were not trained have no average, and are loaded themselves.

    Args:
      path: Directory that `save` wrote to.
      like: Abstract parameters, `plan.params` of any mesh.
      step: Step to load, as in `load`.
      cast: Casts of floats, as in `load`; the average is in float32 or wider.

    Returns:
      Arrays in the structure, dtypes and shardings of `like`.

    Raises:
      ValueError: If the step has no average, or it does not fit `like`, as in `load`.
      DamagedCheckpointError: If the step is not as it was written.
    """
    path = as_path(path)
    step = _agreed_step(path, step)
    stored = load_shapes(path, step=step)
    heads = {n.partition(_EMA)[0] for n in stored if n.startswith(_STATE) and _EMA in n}
    if len(heads) != 1:
        raise ValueError(
            f"Step {step} of '{path}' has {len(heads)} averages of its parameters, not "
            "1. Train with one fsdp_jax.optim.ema_of_params in the optimizer."
        )
    prefix = heads.pop() + _EMA
    leaves = flatten(like)
    averaged = {n: f"{prefix}{n}" for n in leaves if f"{prefix}{n}" in stored}
    names = {n: averaged.get(n, f"{_PARAMS}{n}") for n in leaves}
    wanted = {names[n]: leaf for n, leaf in leaves.items()}
    # The other parts of the state are not asked for.
    options = Options(strict="assume_ok_unexpected", cast=cast)
    values, _ = _read(path, wanted, step, "", options, {})
    return unflatten(like, {n: values[names[n]] for n in leaves})


def load_shapes(
    path: str | os.PathLike[str], *, step: Step = None
) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns shape and dtype of every leaf of a step by name, without reading arrays.

    Args:
      path: Directory that `save` wrote to.
      step: Step to read, as in `load`.

    Raises:
      ValueError: If there is no such step.
      DamagedCheckpointError: If the step is not as it was written.
    """
    _, manifest = open_step(path, step)
    return manifest.leaves


def load_metadata(path: str | os.PathLike[str], *, step: Step = None) -> dict[str, Any]:
    """Returns the `metadata` passed to `save`, in its original types.

    Args:
      path: Directory that `save` wrote to.
      step: Step to read, as in `load`.

    Raises:
      ValueError: If there is no such step.
      DamagedCheckpointError: If the step is not as it was written.
    """
    directory, manifest = open_step(path, step)
    with reading(directory, "metadata"):
        return decode(manifest.metadata)


def _read(
    path: str | os.PathLike[str],
    wanted: dict[str, Leaf],
    step: Step,
    within: str,
    options: Options,
    extras: Mapping[str, Extra],
) -> tuple[dict[str, jax.Array], Match]:
    """Reads the wanted leaves among those stored under the prefix `within`."""
    step = _agreed_step(path, step)
    with together("Loading"):
        directory, manifest = open_step(path, step)
        check_seals(directory, manifest, jax.process_index(), jax.process_count())
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
    # Before `reshard`, a collective that must be the same program in all processes.
    check_same("the layout of what is loaded", layout(found.read))
    with together("Loading"):
        abstract = {name: leaf.value for name, leaf in found.read.items()}
        values = _restore(directory, abstract, manifest.leaves, manifest.max_bytes)
    values = _resharded(values, abstract, found, stored)
    with together("Loading"):
        restore_extras(extras, captured, objects, values)
    return values, found


def _refuse_extras(extras: Mapping[str, Extra] | None) -> None:
    if extras:
        raise ValueError(
            f"extras={list(extras)}: a checkpoint that is loaded with rules= was not "
            "written by fsdp_jax, and has no extras."
        )


def _read_stock(
    path: str | os.PathLike[str],
    wanted: dict[str, Leaf],
    step: Step,
    rules: Rules,
    options: Options,
) -> tuple[dict[str, jax.Array], Match]:
    """Reads the wanted leaves of a checkpoint that Orbax wrote for another program."""
    with together("Loading"):
        stock = find_arrays(path, step, rules)
        found = match(f"{stock.directory}", stock.leaves, wanted, options)
    check_same("the layout of what is loaded", layout(found.read))
    with together("Loading"):
        abstract = {name: leaf.value for name, leaf in found.read.items()}
        values = _restore(
            stock.directory, abstract, stock.leaves, stock.max_bytes, stock.arrays
        )
    return _resharded(values, abstract, found, stock.leaves), found


def _resharded(
    values: dict[str, jax.Array],
    abstract: dict[str, jax.ShapeDtypeStruct],
    found: Match,
    stored: Mapping[str, jax.ShapeDtypeStruct],
) -> dict[str, jax.Array]:
    """Returns arrays in the shardings that were asked for, with zeros as padding."""
    return {
        name: _without_excess(value, found.read[name], stored[name].shape)
        for name, value in reshard(values, abstract).items()
    }


def _agreed_step(path: str | os.PathLike[str], step: Step) -> int:
    """Returns the step that process 0 resolves; only this process verifies it."""
    with together("Loading"):
        found = resolve_step(path, step) if jax.process_index() == 0 else None
    return exchange(found)[0]


def _impls(directory: Path, manifest: Manifest) -> dict[str, str]:
    if IMPLS not in manifest.files:
        return {}
    with reading(directory, IMPLS):
        return dict(json.loads((directory / IMPLS).read_bytes()))


def _restore(
    directory: Path,
    wanted: dict[str, Any],
    leaves: Mapping[str, jax.ShapeDtypeStruct],
    max_bytes: int,
    where: Arrays | None = None,
) -> dict[str, jax.Array]:
    if not wanted:
        return {}
    try:
        return read_arrays(directory, wanted, leaves, max_bytes, where)
    except (MemoryError, jax.errors.JaxRuntimeError):
        raise
    except Exception as error:  # TensorStore raises plain `Exception`s.
        raise unreadable(directory, error) from error


def _without_excess(
    value: jax.Array, leaf: Leaf, stored_shape: tuple[int, ...]
) -> jax.Array:
    """Zeroes the padding of a leaf whose stored value extends into the padding."""
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
