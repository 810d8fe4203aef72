"""Mesh axes that a model's own annotations name for the dims of its parameters."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import jax
from flax import linen, nnx

from fsdp_jax._tree import PyTree, leaf_name
from fsdp_jax.sharding._model_def import MakeModel, describe

Axes = tuple[str | tuple[str, ...] | None, ...]
"""Name of each dim of a parameter; several names, or None, where so annotated."""


def annotated_axes(params: PyTree) -> dict[str, Axes]:
    """Returns the names of the dims of annotated parameters, by parameter.

    Those of `nnx.with_partitioning` and `nnx.Param(..., out_sharding=...)`, and of
    linen's `nn.with_partitioning` and `nn.with_logical_partitioning`.

    Args:
      params: Parameters of a model, concrete or abstract.
    """

    def is_annotated(node):
        return isinstance(node, (nnx.Variable, linen.Partitioned))

    flat, _ = jax.tree_util.tree_flatten_with_path(params, is_leaf=is_annotated)
    found = {}
    for path, node in flat:
        axes = _axes_of(node)
        if any(axis is not None for axis in axes):
            # A box is a level of the tree, a Variable is not.
            suffix = ".value" if isinstance(node, linen.Partitioned) else ""
            found[leaf_name(path) + suffix] = axes
    return found


def annotated_dims(make_model: MakeModel, axes: Collection[str]) -> dict[str, int]:
    """Reads from a model's annotations which dims to split over `tp`.

    A model that names a mesh axis or a logical axis for each dim of its weights says
    what tensor parallelism may split. Without this function its annotations are
    ignored, and `print(plan)` says so.

    Args:
      make_model: Function of a PRNG key that returns the model; it is traced.
      axes: Names that stand for `tp`, such as `{"model"}` or `{"mlp", "heads"}`.

    Returns:
      Rules for `FSDPConfig(tensor_parallel=...)`: name of a parameter -> its dim,
      counted from the last one.

    Raises:
      ValueError: If no dim is annotated with one of `axes`, or a parameter has several
        such dims.

    Examples:
      >>> def make_annotated(key):
      ...     init = nnx.with_partitioning(nnx.initializers.ones, (None, "model"))
      ...     return nnx.Linear(8, 16, kernel_init=init, rngs=nnx.Rngs(key))
      >>> fsdp.sharding.annotated_dims(make_annotated, {"model"})
      {'kernel': -1}
    """
    named = annotated_axes(describe(make_model).params)
    found, several = {}, []
    for name, dims in named.items():
        hits = [i - len(dims) for i, dim in enumerate(dims) if _names(dim) & {*axes}]
        if len(hits) > 1:
            several.append(f"{name} {dims}")
        if hits:
            found[name] = hits[0]
    asked = f"annotated_dims({sorted(axes)})"
    if several:
        raise ValueError(
            f"{asked}: more than one dim of {'; '.join(several)} is to be split over "
            "tp. Name the axes of one dim a parameter."
        )
    if not found:
        known = ", ".join(_all_names(named)) or "no axis"
        raise ValueError(f"{asked}: no dim is annotated so. The model names {known}.")
    return found


def ignored_line(params: PyTree, tensor_parallel: Mapping[str, int]) -> list[str]:
    """Returns the line of a plan that says which annotations are ignored; or none.

    Args:
      params: Abstract parameters.
      tensor_parallel: Rules of the config; with any, annotations count as read.
    """
    named = annotated_axes(params)
    if not named or tensor_parallel:
        return []
    axes = ", ".join(_all_names(named))
    return [
        f"ignored: the model's own annotations ({axes}) of {len(named)} "
        "parameter(s); fsdp.sharding.annotated_dims makes tensor_parallel rules of them"
    ]


def _axes_of(node: Any) -> Axes:
    if isinstance(node, linen.Partitioned):
        return tuple(node.names)
    held = node.get_metadata() if isinstance(node, nnx.Variable) else {}
    spec = held.get("out_sharding", held.get("sharding_names"))
    spec = getattr(spec, "spec", spec)  # Of a NamedSharding.
    return tuple(spec) if spec is not None else ()


def _names(dim: str | tuple[str, ...] | None) -> set[str]:
    return {dim} if isinstance(dim, str) else set(dim or ())


def _all_names(named: Mapping[str, Axes]) -> list[str]:
    return sorted({one for dims in named.values() for d in dims for one in _names(d)})
