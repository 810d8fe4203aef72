"""A weight that its unit makes of several parameters: codes and scales, factors."""

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
    """How a weight is made of what is stored of it.

    Attributes:
      name: Of the weight.
      shape: Of the weight in its unit.
      dtype: In which it computes.
      form: How it is stored: codes and scales, or, if None, as it is.
      num_in: Dims that are inputs; None if it has no factors.
      out_first: Whether they come last.
      scale: Of the product of the factors.
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
        """Which dims of the weight are inputs."""
        assert self.num_in is not None
        start = len(self.shape) - self.num_in if self.out_first else 0
        return tuple(range(start, start + self.num_in))

    @property
    def out_dims(self) -> tuple[int, ...]:
        """Which dims of the weight are outputs."""
        inputs = self.in_dims
        return tuple(dim for dim in range(len(self.shape)) if dim not in inputs)

    @property
    def num_stored(self) -> int:
        """Parameters that hold the base."""
        return 1 if self.form is None else 2

    def make(
        self, parts: Sequence[Array], key: Key[Array, ""] | None = None
    ) -> Array | Factored:
        """The weight of its whole parts: the base's, then the factors.

        Args:
          parts: As they are stored, without stacked dims.
          key: For dropout; None for none.
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
    """Stands in a model's tree where a weight would be that is made of several parts.

    Attributes:
      parts: A `Shard` each, all of one unit.
      key: For dropout, one for each copy of the unit; None without.
      recipe: How they make the weight.
    """

    parts: tuple[Any, ...]
    key: Any
    recipe: Recipe

    @property
    def row(self) -> Any:
        """The plan of its first part, whose unit is that of all."""
        return self.parts[0].row

    @property
    def num_stacked(self) -> int:
        """Stack dims that are left."""
        return self.parts[0].num_stacked

    @property
    def is_slice(self) -> bool:
        """Whether all stack dims have been sliced away."""
        return self.parts[0].is_slice


def take_parts(
    compute: Callable[..., Any], shards: Sequence[Any]
) -> tuple[Callable[..., Any], list[Any], list[Any]]:
    """A function of weights as one of what these are made of.

    Args:
      compute: `compute(weights, *args)`, a weight for each of `shards`.
      shards: `Shard`s and `Derived` ones.

    Returns:
      `computed(parts, keys, *args)`, where parts are whole; the shards of the parts;
      and the keys.
    """
    recipes = [s.recipe if isinstance(s, Derived) else None for s in shards]
    counts = [len(s.parts) if isinstance(s, Derived) else 1 for s in shards]
    keys = [s.key if isinstance(s, Derived) else None for s in shards]
    flat = [
        part for s in shards for part in (s.parts if isinstance(s, Derived) else (s,))
    ]

    def computed(parts, keys, *args):
        given = iter(parts)
        weights = []
        for recipe, count, key in zip(recipes, counts, keys, strict=True):
            own = [next(given) for _ in range(count)]
            weights.append(recipe.make(own, key) if recipe else own[0])
        return call_with_factors(compute, weights, *args)

    return computed, flat, keys
