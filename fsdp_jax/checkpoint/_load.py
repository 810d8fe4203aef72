"""Reading one step into a mould."""

from __future__ import annotations

import os
from typing import Any

import jax
import orbax.checkpoint as ocp

from fsdp_jax._tree import PyTree
from fsdp_jax.checkpoint._keys import flatten, unflatten
from fsdp_jax.checkpoint._steps import manager, resolve_step


def load(
    path: str | os.PathLike[str], mould: PyTree, *, step: int | None = None
) -> PyTree:
    """Reads a step onto any mesh: each device only the bytes of its own shards.

    Args:
      path: The directory that `save` wrote to.
      mould: What to fill, e.g. `abstract_state(plan, tx)`: shapes, dtypes, shardings.
      step: Which step; None for the newest.

    Returns:
      Arrays in the structure, dtypes and shardings of `mould`.

    Raises:
      ValueError: If the step does not hold exactly the mould's leaves, in their shapes
        and dtypes; all offenders in one message, before anything is read.
    """
    return unflatten(mould, _read(path, flatten(mould), step, within=""))


def load_params(
    path: str | os.PathLike[str], mould: PyTree, *, step: int | None = None
) -> PyTree:
    """Reads the parameters of a saved `TrainState` and nothing else.

    For export, evaluation and a fresh start of the optimizer; Adam's moments, twice as
    large as the parameters, are not read.

    Args:
      path: The directory that `save` wrote to.
      mould: `plan.params` of any mesh.
      step: Which step; None for the newest.

    Raises:
      ValueError: As for `load`.
    """
    wanted = {f"params.{name}": leaf for name, leaf in flatten(mould).items()}
    leaves = _read(path, wanted, step, within="params.")
    return unflatten(mould, {n.removeprefix("params."): x for n, x in leaves.items()})


def load_shapes(
    path: str | os.PathLike[str], *, step: int | None = None
) -> dict[str, jax.ShapeDtypeStruct]:
    """Shape and dtype of every leaf of a step, by dotted name; reads no array.

    Args:
      path: The directory that `save` wrote to.
      step: Which step; None for the newest.

    Raises:
      ValueError: If there is no such step.
    """
    step = resolve_step(path, step)
    with manager(path, create=False) as steps:
        return {
            name: jax.ShapeDtypeStruct(tuple(leaf.shape), leaf.dtype)
            for name, leaf in steps.item_metadata(step)["state"].items()
        }


def load_metadata(
    path: str | os.PathLike[str], *, step: int | None = None
) -> dict[str, Any]:
    """The `metadata` that `save` was given for a step; None for the newest."""
    step = resolve_step(path, step)
    with manager(path, create=False) as steps:
        return dict(steps.metadata(step).custom_metadata)


def _read(
    path: str | os.PathLike[str],
    wanted: dict[str, Any],
    step: int | None,
    *,
    within: str,
) -> dict[str, Any]:
    """Restores `wanted`, which must be all that is stored under the prefix `within`."""
    step = resolve_step(path, step)
    with manager(path, create=False) as steps:
        stored = {
            name: leaf
            for name, leaf in steps.item_metadata(step)["state"].items()
            if name.startswith(within)
        }
        _check(f"{path}/{step}", stored, wanted)
        arguments = ocp.args.PyTreeRestore(
            item=wanted,
            restore_args=ocp.checkpoint_utils.construct_restore_args(wanted),
            partial_restore=True,
        )
        return steps.restore(step, args=ocp.args.Composite(state=arguments))["state"]


def _check(where: str, stored: dict[str, Any], wanted: dict[str, Any]) -> None:
    problems = [f"missing in the checkpoint: {n}" for n in wanted if n not in stored]
    problems += [
        f"unexpected in the checkpoint: {n}" for n in stored if n not in wanted
    ]
    for name in wanted.keys() & stored.keys():
        have, want = stored[name], wanted[name]
        if tuple(have.shape) != tuple(want.shape) or have.dtype != want.dtype:
            problems.append(
                f"{name}: stored {have.dtype}{list(have.shape)}, "
                f"wanted {want.dtype}{list(want.shape)}"
            )
    if problems:
        raise ValueError(
            f"'{where}' does not fit in {len(problems)} place(s):\n  "
            + "\n  ".join(sorted(problems))
            + "\nLoad it with the model, precision and optimizer it was saved with."
        )
