"""Weights composed by their unit from several parameters: codes and scales, factors."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Key

from fsdp_jax.lora._blockwise_quantization import dequantize
from fsdp_jax.lora._config import BaseFormat
from fsdp_jax.lora._low_rank import Factored, call_with_factors


@dataclasses.dataclass(frozen=True)
class Recipe:
    """Composition of a weight from the parameters that store it.

    Attributes:
      name: Path of the weight.
      shape: Shape of the weight in its unit.
      dtype: Compute dtype.
      form: Quantized format in which it is stored; None: unquantized.
      num_in: Number of dims that are inputs; None if it has no factors.
      out_first: True if the output dims come before the input dims.
      scale: Factor of the product of the LoRA factors.
      dropout: Share of the inputs of the first factor that are zero.
    """

    name: str
    shape: tuple[int, ...]
    dtype: jnp.dtype
    form: BaseFormat | None
    num_in: int | None
    out_first: bool = False
    scale: float = 1.0
    dropout: float = 0.0

    @property
    def in_dims(self) -> tuple[int, ...]:
        """Input dims of the weight."""
        assert self.num_in is not None
        start = len(self.shape) - self.num_in if self.out_first else 0
        return tuple(range(start, start + self.num_in))

    @property
    def out_dims(self) -> tuple[int, ...]:
        """Output dims of the weight."""
        inputs = self.in_dims
        return tuple(dim for dim in range(len(self.shape)) if dim not in inputs)

    @property
    def num_stored(self) -> int:
        """Number of parameters that store the base."""
        return 1 if self.form is None else 2

    def make(
        self, parts: Sequence[Array], key: Key[Array, ""] | None = None
    ) -> Array | Factored:
        """Composes the weight from its unsharded parts.

        Args:
          parts: Parameters as stored, without stacked dims: the base's, then the
            factors.
          key: PRNG key for dropout; None for no dropout.
        """
        if self.form is None:
            base = parts[0]
        else:
            base = dequantize(parts[0], parts[1], self.shape, self.form)
            base = base.astype(self.dtype)
        if self.num_in is None:
            return base
        a, b = parts[self.num_stored :]
        dropout = 0.0 if key is None else self.dropout
        dims = self.in_dims, self.out_dims
        return Factored(self.name, base, a * self.scale, b, *dims, dropout, key)


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=("parts", "key"),
    meta_fields=("recipe",),
)
@dataclasses.dataclass(frozen=True)
class Derived:
    """Stands in a model's tree for a weight that is composed of several parameters.

    Attributes:
      parts: `Shard` of each parameter, all of one unit.
      key: PRNG key for dropout, one for each copy of the unit; None without dropout.
      recipe: Composition of the weight from the parts.
    """

    parts: tuple[Any, ...]
    key: Any
    recipe: Recipe

    @property
    def param(self) -> Any:
        """Plan of the first part, whose unit is that of all parts."""
        return self.parts[0].param

    @property
    def num_stacked(self) -> int:
        """Number of stacked dims that are left."""
        return self.parts[0].num_stacked

    @property
    def is_slice(self) -> bool:
        """True if all stacked dims have been sliced away."""
        return self.parts[0].is_slice


def take_parts(
    compute: Callable[..., Any], shards: Sequence[Any]
) -> tuple[Callable[..., Any], list[Any], list[Any]]:
    """Turns a function of weights into one of the parameters that compose them.

    Args:
      compute: Function `compute(weights, *args)`, with a weight for each of `shards`.
      shards: List of `Shard` and `Derived`.

    Returns:
      `computed(parts, keys, *args)`, whose parts are unsharded; the shards of the
      parts; and the keys.
    """
    recipes = [s.recipe if isinstance(s, Derived) else None for s in shards]
    counts = [len(s.parts) if isinstance(s, Derived) else 1 for s in shards]
    keys = [s.key if isinstance(s, Derived) else None for s in shards]
    flat = [
        part for s in shards for part in (s.parts if isinstance(s, Derived) else (s,))
    ]

    def computed(parts, keys, *args, **static):
        given = iter(parts)
        weights = []
        for recipe, count, key in zip(recipes, counts, keys, strict=True):
            own = [next(given) for _ in range(count)]
            weights.append(recipe.make(own, key) if recipe else own[0])
        run = functools.partial(compute, **static)
        return call_with_factors(run, weights, *args)

    return computed, flat, keys
