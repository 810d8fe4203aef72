"""A scan over a stack that is split over pipeline stages: where a loss is cut.

Which stage runs which layers for which microbatch is a step's to decide. So in the
trace of a loss the whole scan is one equation, which nothing ever executes.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import ShapedArray
from jax.extend import core
from jaxtyping import Array

from fsdp_jax._tree import PyTree

STACK = core.Primitive("fsdp_stack")
STACK.multiple_results = True


class Role(enum.IntEnum):
    """What an operand of the scan is to it."""

    SHARDS = 0
    OTHERS = 1
    CARRY = 2
    XS = 3
    CONSTS = 4


RunChunk = Callable[..., tuple[PyTree, PyTree]]
"""`(shards, others, carry, xs, consts, is_real) -> (carry, ys)` of some layers.

`is_real`, `bool[layers]`, is False for layers that only pad the stack, or None.
"""


@dataclasses.dataclass(frozen=True, eq=False)
class Stack:
    """One scan in a loss: what it runs, and what it is given.

    Attributes:
      run: Runs some of the layers.
      treedef: Of the five operands.
      leaves: What of these is no array, and None where an array is.
      roles: Of each operand that is an array.
      shapes: Of the result, `(carry, ys)`, flat.
      num_layers: Of the stack.
    """

    run: RunChunk
    treedef: Any
    leaves: tuple[Any, ...]
    roles: tuple[Role, ...]
    shapes: tuple[jax.ShapeDtypeStruct, ...]
    num_layers: int

    def run_chunk(self, operands: Iterable[Array], is_real: Any) -> Any:
        """`(carry, ys)` of a chunk, of operands that are the chunk's."""
        given = iter(operands)
        leaves = [next(given) if leaf is None else leaf for leaf in self.leaves]
        return self.run(*self.treedef.unflatten(leaves), is_real)


def scan_stages(
    run: RunChunk,
    shards: PyTree,
    others: PyTree,
    carry: PyTree,
    xs: PyTree,
    consts: PyTree,
    *,
    num_layers: int,
) -> tuple[PyTree, PyTree]:
    """Stands for `run` over the layers of all stages.

    Args:
      run: Runs some of the layers.
      shards: Of this stage's layers.
      others: What else of the stack is no shard, of all layers.
      carry: What goes from layer to layer.
      xs: Trees with a leading dim of all layers.
      consts: Trees that every layer sees whole.
      num_layers: Of all stages.

    Returns:
      The last carry, and the `y`s of all layers.

    Raises:
      ValueError: If `xs` or `others` have another number of layers.
    """
    operands = (shards, others, carry, xs, consts)
    roles = [
        _role(role, leaf)
        for role, tree in zip(Role, operands, strict=True)
        for leaf in jax.tree.leaves(tree)
        if _is_array(leaf)
    ]
    leaves, treedef = jax.tree.flatten(operands)
    arrays = [jnp.asarray(leaf) for leaf in leaves if _is_array(leaf)]
    static = tuple(None if _is_array(leaf) else leaf for leaf in leaves)
    wrong = [
        str(x.shape)
        for role, x in zip(roles, arrays, strict=True)
        if role in (Role.OTHERS, Role.XS) and x.shape[:1] != (num_layers,)
    ]
    if wrong:
        raise ValueError(
            f"fsdp.scan over {num_layers} layers was given slices of shapes "
            f"{', '.join(wrong)}: their first dim is that of the layers."
        )
    stack = Stack(run, treedef, static, tuple(roles), (), num_layers)
    one = [
        jax.ShapeDtypeStruct((1, *x.shape[1:]), x.dtype) if _is_sliced(role) else x
        for role, x in zip(roles, arrays, strict=True)
    ]
    program, (carried, ys) = jax.make_jaxpr(
        lambda *one: stack.run_chunk(one, None), return_shape=True
    )(*one)
    ys = jax.tree.map(
        lambda y: jax.ShapeDtypeStruct((num_layers, *y.shape[1:]), y.dtype), ys
    )
    shapes, out_tree = jax.tree.flatten((carried, ys))
    stack = dataclasses.replace(stack, shapes=tuple(shapes))
    # The program of one layer is there to be read, see `_rank_dependence`.
    out = STACK.bind(*arrays, stack=stack, jaxpr=program)
    return out_tree.unflatten(out)


@STACK.def_abstract_eval
def _shapes_of(*_: Any, stack: Stack, jaxpr: Any) -> list[Any]:
    del jaxpr
    return [ShapedArray(s.shape, s.dtype) for s in stack.shapes]


def unless_padding(unit: Callable[..., Any]) -> Callable[..., Any]:
    """The unit, with whether it is a layer behind its carry; else it does nothing."""

    def layer(weights, carry, is_real, *args):
        def run(carry):
            return unit(weights, carry, *args)

        def skip(carry):
            _, y = jax.eval_shape(run, carry)
            return carry, jax.tree.map(lambda y: jnp.zeros(y.shape, y.dtype), y)

        return jax.lax.cond(is_real, run, skip, carry)

    return layer


def _role(role: Role, leaf: Any) -> Role:
    """The operand's; keys of adapters' dropout come beside their factors' shards."""
    is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    return Role.OTHERS if is_key and role == Role.SHARDS else role


def _is_sliced(role: Role) -> bool:
    return role in (Role.SHARDS, Role.OTHERS, Role.XS)


def _is_array(leaf: Any) -> bool:
    return isinstance(leaf, (jax.Array, np.ndarray))
