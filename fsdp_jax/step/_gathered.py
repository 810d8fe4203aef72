"""Gathered weights, with the float8 bits that they were gathered in."""

from __future__ import annotations

import contextvars
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from jaxtyping import Array, Float, UInt8

from fsdp_jax.sharding._float8_gather import power_of_two


class Float8Weight(NamedTuple):
    """A weight in float8_e4m3fn, with one scale.

    Attributes:
      bits: Bits of the elements, in the dims of the weight.
      scale: Factor of the elements, a power of two.
    """

    bits: UInt8[Array, ...]
    scale: Float[Array, ""]


class Gathered(NamedTuple):
    """An unsharded weight.

    Attributes:
      weight: The weight in its compute dtype.
      bits: Bits in which `Float8Gather` communicated it, in the dims of the weight;
        None for all other weights.
      exponent: Scale of the bits, E8M0; None likewise.
    """

    weight: Float[Array, ...]
    bits: UInt8[Array, ...] | None = None
    exponent: UInt8[Array, ""] | None = None


_of_unit: contextvars.ContextVar[Sequence[Gathered]] = contextvars.ContextVar(
    "of_unit", default=()
)


def gathered_float8(weight: Float[Array, ...]) -> Float8Weight | None:
    """Returns the float8 numbers that a weight of the running unit was gathered as.

    A product in float8 multiplies these, and need not round the weight again: it would
    get the same numbers, after reading the weight twice and writing it once.

    Args:
      weight: Weight as the unit was given it: not a slice, transpose, cast or LoRA
        composition of one, and not one that an inner `jax.checkpoint`, `jax.jit` or
        loop was given.

    Returns:
      The numbers; None for any other array, outside of units, and if no `Float8Gather`
      communicated the weight.

    Examples:
      >>> from functools import partial
      >>> from bridge.models import Decoder, float8_product
      >>> product = partial(float8_product, rounded=fsdp.step.gathered_float8)
      >>> make_model = lambda key: Decoder(config, rngs=nnx.Rngs(key), product=product)

    Source: TorchAO `fsdp_utils.py::WeightWithDynamicFloat8CastTensor`, whose gathered
      weights are in float8 too.
    """
    # By identity, as a model passes its parameters on as they are.
    found = (each for each in _of_unit.get() if each.weight is weight)
    gathered = next(found, None)
    if gathered is None or gathered.bits is None or gathered.exponent is None:
        return None
    return Float8Weight(gathered.bits, power_of_two(gathered.exponent))


def of_gathered(compute: Callable[..., Any]) -> Callable[..., Any]:
    """Makes a function of `Gathered` weights from one of weights.

    Args:
      compute: Function `compute(weights, *args, **static)`; in it `gathered_float8`
        finds these weights.
    """

    def computed(gathered: Sequence[Gathered], *args: Any, **static: Any) -> Any:
        token = _of_unit.set(gathered)
        try:
            return compute([each.weight for each in gathered], *args, **static)
        finally:
            _of_unit.reset(token)

    return computed
