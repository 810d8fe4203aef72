"""Optimizer state in 8 bits, dequantized for the update."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, UInt8

from fsdp_jax._tree import PyTree, leaf_name


class EightBitState(NamedTuple):
    """State of an optimizer in 8 bits, as three trees of its own structure.

    Attributes:
      codes: `uint8` codes in the shape of each quantized array; None for all others.
      scales: Scales of the quantized arrays, float32 `[..., blocks]`: the largest
        magnitude of each block of the last dim; None for all others.
      rest: All arrays that are not quantized; None for the others.
    """

    codes: PyTree
    scales: PyTree
    rest: PyTree


def eight_bit(
    tx: optax.GradientTransformation,
    *,
    unsigned: tuple[str, ...] = ("nu",),
    block: int = 256,
    min_elements: int = 4096,
) -> optax.GradientTransformation:
    """Stores the float32 state of an optimizer in 8 bits an element.

    A code is one of 256 values of a dynamic exponent and fraction, over seven decades,
    times the scale of its block. Adam's moments take a quarter of their memory, 2.03
    bytes a parameter. They are quantized and dequantized elementwise, split like their
    parameters; only a block that spans several devices needs communication, for its
    largest magnitude.

    Args:
      tx: Optax transformation whose state has arrays in the shapes of parameters.
      unsigned: Fields of its state that are never negative, such as `nu` of
        `ScaleByAdamState`: they get twice as many values above zero.
      block: Number of elements of the last dim that share a scale; a shorter dim is one
        block.
      min_elements: Number of elements below which an array stays in float32, as biases
        and norms do.

    Returns:
      A transformation in place of `tx`.

    Raises:
      ValueError: If `block` or `min_elements` is less than 1; from its `init`, if no
        array of the state is quantized.

    Source: Dettmers et al. 2022, 8-bit optimizers via block-wise quantization;
      bitsandbytes `functional.py::create_dynamic_map` for the values.
    """
    if block < 1 or min_elements < 1:
        raise ValueError(f"eight_bit({block=}, {min_elements=}): each is at least 1.")
    form = _Form(unsigned, block)

    def init(params: PyTree) -> EightBitState:
        state = tx.init(params)
        shapes = {tuple(leaf.shape) for leaf in jax.tree.leaves(params)}
        held = [_may_be_held(x, shapes, min_elements) for x in _leaves(state)]
        if not any(held):
            raise ValueError(
                f"eight_bit(min_elements={min_elements}) holds nothing of this "
                "optimizer's state in 8 bits: no float32 array of it has the shape of "
                "a parameter and as many elements."
            )
        return form.encode(state, held)

    def update(updates: PyTree, state: Any, params: PyTree | None = None):
        held = [code is not None for code in _leaves(state.codes)]
        updates, inner = tx.update(updates, form.decode(state), params)
        return updates, form.encode(inner, held)

    return optax.GradientTransformation(init, update)


@dataclasses.dataclass(frozen=True)
class _Form:
    """Quantized form of a state; see `eight_bit`."""

    unsigned: tuple[str, ...]
    block: int

    def encode(self, state: PyTree, held: list[bool]) -> EightBitState:
        paths, treedef = jax.tree_util.tree_flatten_with_path(state, is_leaf=_is_none)
        triples = [
            (*_encode(leaf, self._is_unsigned(path), self.block), None)
            if is_held
            else (None, None, leaf)
            for (path, leaf), is_held in zip(paths, held, strict=True)
        ]
        parts = zip(*triples, strict=True)
        return EightBitState(*(treedef.unflatten(part) for part in parts))

    def decode(self, state: EightBitState) -> PyTree:
        codes, treedef = jax.tree_util.tree_flatten_with_path(
            state.codes, is_leaf=_is_none
        )
        others = zip(_leaves(state.scales), _leaves(state.rest), strict=True)
        return treedef.unflatten(
            leaf
            if code is None
            else _decode(code, scales, self._is_unsigned(path), self.block)
            for (path, code), (scales, leaf) in zip(codes, others, strict=True)
        )

    def _is_unsigned(self, path: tuple[Any, ...]) -> bool:
        return any(part in self.unsigned for part in leaf_name(path).split("."))


def _may_be_held(leaf: Any, shapes: set[tuple[int, ...]], min_elements: int) -> bool:
    if leaf is None or leaf.dtype != jnp.float32:
        return False
    return math.prod(leaf.shape) >= min_elements and tuple(leaf.shape) in shapes


@functools.cache
def dynamic_values(*, is_unsigned: bool) -> np.ndarray:
    """Returns the 256 values of a code, from -1 or 0 to 1, in ascending order.

    The values are 0, 1 and those of seven decades. Decade i, which ends at 10**(i - 6),
    has 2**i values of each sign, or 2**(i + 1) if all are positive: the midpoints of as
    many equal steps from 0.1 to 1 of it.
    """
    values = [0.0, 1.0]
    for decade in range(7):
        steps = np.linspace(0.1, 1, 2 ** (decade + is_unsigned) + 1, dtype=np.float32)
        middles = (steps[1:] + steps[:-1]) / 2 * np.float32(10.0 ** (decade - 6))
        values += [*middles] if is_unsigned else [*middles, *-middles]
    return np.sort(np.array(values, np.float32))


def _encode(
    x: Float[Array, "*shape"], is_unsigned: bool, block: int
) -> tuple[UInt8[Array, "*shape"], Float[Array, ...]]:
    size = x.shape[-1]
    blocks = _blocks(x, block)
    scales = jnp.abs(blocks).max(-1)
    # A block of zeros has scale 0 and is divided by 1.
    unit = blocks / jnp.where(scales == 0, 1, scales)[..., None]
    values = dynamic_values(is_unsigned=is_unsigned)
    middles = jnp.asarray((values[1:] + values[:-1]) / 2)
    # The code of the nearest value: the number of midpoints below the element.
    codes = jnp.searchsorted(middles, unit).astype(jnp.uint8)
    return codes.reshape(*x.shape[:-1], -1)[..., :size], scales


def _decode(
    codes: UInt8[Array, "*shape"],
    scales: Float[Array, ...],
    is_unsigned: bool,
    block: int,
) -> Float[Array, "*shape"]:
    values = jnp.asarray(dynamic_values(is_unsigned=is_unsigned))
    blocks = _blocks(values[codes], block) * scales[..., None]
    return blocks.reshape(*codes.shape[:-1], -1)[..., : codes.shape[-1]]


def _blocks(x: Array, block: int) -> Array:
    """Reshapes the last dim to `[blocks, block]`, the last block padded with zeros."""
    size = min(block, x.shape[-1])
    widths = [(0, 0)] * (x.ndim - 1) + [(0, -x.shape[-1] % size)]
    return jnp.pad(x, widths).reshape(*x.shape[:-1], -1, size)


def _leaves(tree: PyTree) -> list[Any]:
    return jax.tree.leaves(tree, is_leaf=_is_none)


def _is_none(node: Any) -> bool:
    return node is None
