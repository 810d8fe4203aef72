"""Fused kernels in a layer-wise optimizer: matrices whose columns are several kernels.

Muon orthogonalizes queries, keys and values each for itself. The parts of a stack are
split before an update and joined after it, and so is its state, which a checkpoint
stores by the fused parameter.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float

from fsdp_jax._tree import PyTree, leaf_name

Stack = Float[Array, "matrices rows cols"]


@dataclasses.dataclass(frozen=True)
class FusedMatrix:
    """Kernel whose columns are those of several matrices, such as a fused qkv.

    Args:
      sizes: Number of columns of each matrix, in one group.
      num_groups: Number of groups, each of which has columns of all matrices: 1 for all
        queries, then all keys, then all values; the number of key heads where each key
        and value is behind the queries that share it, as in Megatron.
      num_row_dims: Number of leading dims of a kernel that are rows.

    Examples:
      >>> import fsdp_jax as fsdp
      >>> fsdp.optim.FusedMatrix(sizes=(64, 16, 16)).num_cols
      96

    Source: Megatron-LM `muon.py::TensorParallelMuon` (`split_qkv`).
    """

    sizes: tuple[int, ...]
    num_groups: int = 1
    num_row_dims: int = 1

    @property
    def num_cols(self) -> int:
        """Number of columns of the kernel."""
        return self.num_groups * sum(self.sizes)

    def split(self, stack: Stack) -> list[Stack]:
        """Returns the matrices of each part."""
        *lead, _ = stack.shape
        grouped = stack.reshape(*lead, self.num_groups, sum(self.sizes))
        ends = [sum(self.sizes[: i + 1]) for i in range(len(self.sizes) - 1)]
        return [part.reshape(*lead, -1) for part in jnp.split(grouped, ends, axis=-1)]

    def join(self, parts: list[Stack]) -> Stack:
        """Returns the stack of the parts: the inverse of `split`."""
        *lead, _ = parts[0].shape
        grouped = [
            part.reshape(*lead, self.num_groups, size)
            for part, size in zip(parts, self.sizes, strict=True)
        ]
        return jnp.concatenate(grouped, axis=-1).reshape(*lead, -1)


def by_part(
    tx: optax.GradientTransformation, fused: Mapping[str, FusedMatrix]
) -> optax.GradientTransformation:
    """Returns `tx` for stacks of which some are fused; its state is that of `tx`.

    Args:
      tx: Transformation of a dict of stacks.
      fused: Parts of each fused stack, by name.
    """
    if not fused:
        return tx

    def split(stacks: Any) -> dict[str, Stack]:
        parts = {}
        for name, stack in stacks.items():
            if name not in fused:
                parts[name] = stack
                continue
            for number, part in enumerate(fused[name].split(stack)):
                parts[_part_name(name, number)] = part
        return parts

    def join(parts: Any, names: Any) -> dict[str, Stack]:
        return {
            name: fused[name].join(_parts_of(parts, name, fused[name]))
            if name in fused
            else parts[name]
            for name in names
        }

    def update(updates, state, params=None):
        parts = split(updates)
        old = None if params is None else split(params)
        given = _split_state(tx, fused, parts, state)
        out, new = tx.update(parts, given, old)
        return join(out, updates), _join_state(fused, new, state)

    return optax.GradientTransformation(tx.init, update)


def _split_state(
    tx: optax.GradientTransformation,
    fused: Mapping[str, FusedMatrix],
    parts: Mapping[str, Stack],
    state: PyTree,
) -> PyTree:
    """Returns the state of `tx` for the parts, of its state for the fused stacks."""
    leaves = _by_path(state)
    for path, leaf in list(leaves.items()):
        name = path[-1] if path else ""
        if name in fused and leaf.shape[-1:] == (fused[name].num_cols,):
            for number, part in enumerate(fused[name].split(leaf)):
                leaves[(*path[:-1], _part_name(name, number))] = part
    wanted, treedef = jax.tree_util.tree_flatten_with_path(
        jax.eval_shape(tx.init, dict(parts))
    )
    return treedef.unflatten(leaves[_path(path)] for path, _ in wanted)


def _join_state(fused: Mapping[str, FusedMatrix], new: PyTree, state: PyTree) -> PyTree:
    leaves = _by_path(new)
    pairs, treedef = jax.tree_util.tree_flatten_with_path(state)
    joined = []
    for where, _ in pairs:
        *above, name = _path(where)
        if name in fused and (*above, name) not in leaves:
            parts = {
                path[-1]: leaf
                for path, leaf in leaves.items()
                if path[:-1] == (*above,)
            }
            joined.append(fused[name].join(_parts_of(parts, name, fused[name])))
        else:
            joined.append(leaves[(*above, name)])
    return treedef.unflatten(joined)


def _parts_of(parts: Mapping[str, Stack], name: str, fused: FusedMatrix) -> list[Stack]:
    return [parts[_part_name(name, number)] for number in range(len(fused.sizes))]


def _part_name(name: str, number: int) -> str:
    return f"{name}, part {number}"


def _by_path(tree: PyTree) -> dict[tuple[str, ...], Any]:
    pairs, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {_path(path): leaf for path, leaf in pairs}


def _path(path: tuple[Any, ...]) -> tuple[str, ...]:
    return tuple(leaf_name((key,)) for key in path)
