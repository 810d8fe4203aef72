"""Optimizer state with fewer bits than the update, dequantized for it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float

from fsdp_jax._tree import PyTree, leaf_name


class QuantizedState(NamedTuple):
    """State of an optimizer with fewer bits, as three trees of its own structure.

    Attributes:
      codes: Each quantized array in its own shape, as `uint8` codes or narrow floats;
        None for all others.
      scales: Scales of the quantized arrays, float32 `[..., blocks]`: one for each
        block of the last dim; None for all others.
      rest: All arrays that are not quantized; None for the others.
    """

    codes: PyTree
    scales: PyTree
    rest: PyTree


class Codec(Protocol):
    """Quantization of one array of a state."""

    def encode(self, x: Array) -> tuple[Array, Array]:
        """Returns codes in the shape of a float32 array, and scales of its blocks."""
        ...

    def decode(self, codes: Array, scales: Array) -> Array:
        """Returns the float32 array of codes and scales."""
        ...


@dataclasses.dataclass(frozen=True)
class StateForm:
    """Selection of the arrays of a state that are quantized, and their codecs.

    Attributes:
      codec: Takes the fields of an array in the state, such as `0.mu`, without the
        path of its parameter; None leaves it.
      min_elements: Number of elements below which an array is left in float32.
      asked: Call or option that asked for this form, for errors.
    """

    codec: Callable[[str], Codec | None]
    min_elements: int
    asked: str


def with_quantized_state(
    tx: optax.GradientTransformation, form: StateForm
) -> optax.GradientTransformation:
    """Stores the arrays of a state that have the shape of a parameter as codes.

    Args:
      tx: Optax transformation.
      form: Form of its state.

    Raises:
      ValueError: From its `init`, if no array of the state is quantized.
    """

    def init(params: PyTree) -> QuantizedState:
        state = tx.init(params)
        shapes = {tuple(leaf.shape) for leaf in jax.tree.leaves(params)}
        codecs = [
            form.codec(fields) if _may_be_quantized(leaf, shapes, form) else None
            for fields, leaf in _by_fields(state, params)
        ]
        if not any(codecs):
            most = max((leaf.size for leaf in jax.tree.leaves(params)), default=0)
            raise ValueError(
                f"{form.asked} finds nothing to quantize in this optimizer's state: no "
                "float32 array that it names has the shape of a parameter and at least "
                f"{form.min_elements} elements; the largest parameter has {most}. "
                "Leave it out, as train does without --optimizer-bits."
            )
        return _encode(state, codecs)

    def update(updates: PyTree, state: Any, params: PyTree | None = None):
        codecs = [
            None if code is None else form.codec(fields)
            for fields, code in _by_fields(state.codes, updates)
        ]
        updates, inner = tx.update(updates, _decode(state, codecs), params)
        return updates, _encode(inner, codecs)

    return optax.GradientTransformation(init, update)


def normalized(
    x: Float[Array, "*shape"], block: int
) -> tuple[Float[Array, "*shape"], Float[Array, ...]]:
    """Divides each block by its largest magnitude.

    Args:
      x: Array.
      block: Number of elements of the last dim that share a scale.

    Returns:
      The quotients, from -1 to 1, and the magnitudes, `[..., blocks]`.
    """
    blocks = _blocks(x, block)
    scales = jnp.abs(blocks).max(-1)
    # A block of zeros has scale 0 and is divided by 1.
    unit = blocks / jnp.where(scales == 0, 1, scales)[..., None]
    return _joined(unit, x.shape[-1]), scales


def scaled(
    unit: Float[Array, "*shape"], scales: Float[Array, ...], block: int
) -> Float[Array, "*shape"]:
    """Multiplies each block by its scale: the inverse of `normalized`.

    Args:
      unit: Quotients.
      scales: Largest magnitude of each block.
      block: Number of elements of the last dim that share a scale.
    """
    return _joined(_blocks(unit, block) * scales[..., None], unit.shape[-1])


def _encode(state: PyTree, codecs: list[Codec | None]) -> QuantizedState:
    leaves, treedef = jax.tree.flatten(state, is_leaf=_is_none)
    triples = [
        (None, None, leaf) if codec is None else (*codec.encode(leaf), None)
        for leaf, codec in zip(leaves, codecs, strict=True)
    ]
    parts = zip(*triples, strict=True)
    return QuantizedState(*(treedef.unflatten(part) for part in parts))


def _decode(state: QuantizedState, codecs: list[Codec | None]) -> PyTree:
    parts = [jax.tree.leaves(part, is_leaf=_is_none) for part in state]
    treedef = jax.tree.structure(state.codes, is_leaf=_is_none)
    return treedef.unflatten(
        leaf if codec is None else codec.decode(codes, scales)
        for codes, scales, leaf, codec in zip(*parts, codecs, strict=True)
    )


def _may_be_quantized(leaf: Any, shapes: set[tuple[int, ...]], form: StateForm) -> bool:
    if leaf is None or leaf.ndim == 0 or leaf.dtype != jnp.float32:
        return False
    return math.prod(leaf.shape) >= form.min_elements and tuple(leaf.shape) in shapes


def _blocks(x: Array, block: int) -> Array:
    """Reshapes the last dim to `[blocks, block]`, the last block padded with zeros."""
    size = min(block, x.shape[-1])
    widths = [(0, 0)] * (x.ndim - 1) + [(0, -x.shape[-1] % size)]
    return jnp.pad(x, widths).reshape(*x.shape[:-1], -1, size)


def _joined(blocks: Array, size: int) -> Array:
    """Joins blocks to a last dim of `size` elements: the inverse of `_blocks`."""
    return blocks.reshape(*blocks.shape[:-2], -1)[..., :size]


def _by_fields(state: PyTree, params: PyTree) -> list[tuple[str, Any]]:
    """Returns the leaves of a state with their paths, up to that of a parameter.

    A parameter may have the name of a field: `mu.nu` is the first moment of `nu`.
    """
    names = {name for name, _ in _named(params)}

    def fields_of(name: str) -> str:
        parts = name.split(".")
        ends = (i for i in range(len(parts)) if ".".join(parts[i:]) in names)
        return ".".join(parts[: next(ends, len(parts))])

    return [(fields_of(name), leaf) for name, leaf in _named(state)]


def _named(tree: PyTree) -> list[tuple[str, Any]]:
    paths, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=_is_none)
    return [(leaf_name(path), leaf) for path, leaf in paths]


def _is_none(node: Any) -> bool:
    return node is None
