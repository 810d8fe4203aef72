"""A primitive for a scan over layers that are split over pipeline stages.

The schedule of a step decides which stage runs which layers for which microbatch. So in
the trace of a loss the scan is one equation, which is never executed and at which
`split_loss` splits the loss.
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
from jax.interpreters import ad, batching
from jaxtyping import Array

from fsdp_jax._scopes import FSDP_STACK
from fsdp_jax._tree import PyTree

STACK = core.Primitive(FSDP_STACK)
STACK.multiple_results = True


class Role(enum.IntEnum):
    """The role of an operand of the scan."""

    SHARDS = 0
    OTHERS = 1
    CARRY = 2
    XS = 3
    CONSTS = 4


RunChunk = Callable[..., tuple[PyTree, PyTree]]
"""`(shards, others, carry, xs, consts, is_real) -> (carry, ys)`: runs some layers.

`is_real`, `bool[layers]`, is False for layers that only pad the stack; None if none do.
"""


@dataclasses.dataclass(frozen=True, eq=False)
class Stack:
    """The static parameters of one scan in a loss.

    Attributes:
      run: Function that runs some of the layers.
      treedef: Structure of the five operands.
      leaves: Leaves of the operands that are not arrays; None in the place of an array.
      roles: Role of each array among the operands.
      shapes: Shapes and dtypes of the result `(carry, ys)`, flat.
      num_layers: Number of layers of all stages.
    """

    run: RunChunk
    treedef: Any
    leaves: tuple[Any, ...]
    roles: tuple[Role, ...]
    shapes: tuple[jax.ShapeDtypeStruct, ...]
    num_layers: int

    def run_chunk(self, operands: Iterable[Array], is_real: Any) -> Any:
        """Runs a chunk of layers on its own slices of the operands: `(carry, ys)`."""
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
    """Traces `run` over the layers of all stages as one equation.

    Args:
      run: Function that runs some of the layers.
      shards: Shards of this stage's layers.
      others: Leaves of the stack that are not shards, with a leading dim of all layers.
      carry: Tree passed from layer to layer.
      xs: Trees with a leading dim of all layers.
      consts: Trees passed to every layer as they are.
      num_layers: Number of layers of all stages.

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
    # One layer is enough to know the shapes of the carry and of a `y`.
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
    # `jaxpr`, the program of one layer, is not run; the checks of a loss interpret it,
    # see `_rank_dependence`.
    out = STACK.bind(*arrays, stack=stack, jaxpr=program)
    return out_tree.unflatten(out)


@STACK.def_abstract_eval
def _shapes_of(*_: Any, stack: Stack, jaxpr: Any) -> list[Any]:
    del jaxpr
    return [ShapedArray(s.shape, s.dtype) for s in stack.shapes]


def _refuse(*_: Any, **__: Any) -> Any:
    """Refuses a transform around the scan, of which no stage runs the layers."""
    raise ValueError(
        "fsdp.scan of the stack that pp splits is within jax.vmap, jax.grad or "
        "jax.jvp. Call it in the loss itself, in no transform; a batch of inputs is "
        "one array."
    )


batching.primitive_batchers[STACK] = _refuse
ad.primitive_jvps[STACK] = _refuse


def unless_padding(unit: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps `unit` to skip padding layers, with `is_real` after its carry."""

    def layer(weights, carry, is_real, *args, **static):
        def run(carry):
            return unit(weights, carry, *args, **static)

        def skip(carry):
            # Both branches of `cond` return the same shapes: the `y` of padding is 0.
            _, y = jax.eval_shape(run, carry)
            return carry, jax.tree.map(lambda y: jnp.zeros(y.shape, y.dtype), y)

        return jax.lax.cond(is_real, run, skip, carry)

    return layer


def _role(role: Role, leaf: Any) -> Role:
    """Returns an operand's role; the dropout keys of LoRA factors are not shards."""
    is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    return Role.OTHERS if is_key and role == Role.SHARDS else role


def _is_sliced(role: Role) -> bool:
    return role in (Role.SHARDS, Role.OTHERS, Role.XS)


def _is_array(leaf: Any) -> bool:
    return isinstance(leaf, (jax.Array, np.ndarray))
