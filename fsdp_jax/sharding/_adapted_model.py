"""Model definition with LoRA factors beside some weights and a frozen base."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Key

from fsdp_jax._tree import PyTree, matches, named_leaves, unmatched
from fsdp_jax.lora._blockwise_quantization import code_shape, num_blocks, quantize
from fsdp_jax.lora._composed_weight import Derived, Recipe
from fsdp_jax.lora._config import LoRAConfig, LoRATarget
from fsdp_jax.lora._low_rank import Factored
from fsdp_jax.sharding._model_def import ModelDef
from fsdp_jax.sharding._precision import MixedPrecisionPolicy

A_LEAF, B_LEAF = "lora_a", "lora_b"


@dataclasses.dataclass(frozen=True)
class Weight:
    """A weight of the user's model and the parameters that store it.

    Attributes:
      shape: Shape of the weight, stacked dims included.
      num_stacked: Number of leading stacked dims.
      recipe: Composition of the weight from its parameters, run in its unit.
      rank: Rank of its factors; 0 if it has none.
      is_trained: True if the weight itself is trained (`modules_to_save`).
    """

    shape: tuple[int, ...]
    num_stacked: int
    recipe: Recipe
    rank: int
    is_trained: bool

    @property
    def stacked(self) -> tuple[int, ...]:
        """Leading dims of the shape that are the stack of its unit."""
        return self.shape[: self.num_stacked]

    @property
    def is_plain(self) -> bool:
        """True if it is stored unquantized and has no factors."""
        return self.recipe.form is None and not self.rank

    def factors(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Returns its abstract factors, in the model's dtype but at least float32."""
        dtype = jnp.promote_types(self.recipe.dtype, jnp.float32)
        sizes = self.recipe.shape
        ins = tuple(sizes[dim] for dim in self.recipe.in_dims)
        outs = tuple(sizes[dim] for dim in self.recipe.out_dims)
        shapes = {A_LEAF: (*ins, self.rank), B_LEAF: (self.rank, *outs)}
        return {
            name: jax.ShapeDtypeStruct(self.stacked + shape, dtype)
            for name, shape in shapes.items()
        }

    def codes(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Returns its abstract codes and scales."""
        form = self.recipe.form
        assert form is not None
        shape, dtype = code_shape(self.recipe.shape, form)
        scales = (num_blocks(self.recipe.shape),)
        return {
            "codes": jax.ShapeDtypeStruct(self.stacked + shape, dtype),
            "scales": jax.ShapeDtypeStruct(self.stacked + scales, jnp.float32),
        }

    def drawn(self, key: Key[Array, ""]) -> dict[str, Array]:
        """Draws initial factors, whose product is zero.

        Source: huggingface/peft `LoraLayer.reset_lora_parameters`: Kaiming's uniform
          distribution with a = sqrt(5).
        """
        a, b = self.factors()[A_LEAF], self.factors()[B_LEAF]
        bound = 1 / math.sqrt(math.prod(a.shape[self.num_stacked : -1]))
        drawn = jax.random.uniform(key, a.shape, a.dtype, -bound, bound)
        return {A_LEAF: drawn, B_LEAF: jnp.zeros(b.shape, b.dtype)}

    def quantized(self, weight: Array) -> dict[str, Array]:
        """Quantizes the weight and returns its codes and scales."""
        form = self.recipe.form
        assert form is not None
        codes, scales = self._each(lambda weight: quantize(weight, form))(weight)
        return {"codes": codes, "scales": scales}

    def total(self, parts: Sequence[Array], dtype: Any = None) -> Array:
        """Composes the weight from its parts, stacked dims included.

        Args:
          parts: Stored base (the weight, or codes and scales), then the factors.
          dtype: Dtype of the result; None for the weight's compute dtype.
        """

        def make(*parts):
            made = self.recipe.make(parts)
            if not isinstance(made, Factored):
                return made.astype(dtype or made.dtype)
            base = made.base.astype(dtype or made.base.dtype)
            return dataclasses.replace(made, base=base).total()

        return self._each(make)(*parts)

    def _each(self, fn: Any) -> Any:
        # Codes and scales are those of one unit's weight: blocks do not span the stack.
        for _ in range(self.num_stacked):
            fn = jax.vmap(fn)
        return fn


def with_lora(
    model: ModelDef,
    lora: LoRAConfig,
    owners: Mapping[str, tuple[str, int]],
    root: str,
    policy: MixedPrecisionPolicy,
) -> ModelDef:
    """Returns the model with LoRA factors beside its weights.

    Its parameters are `{"base": ..., "lora": {path: {"lora_a", "lora_b"}}}`, where
    "base" is the user's own tree. A quantized weight is None in that tree, and its
    codes and scales are in `{"quantized": {path: {"codes", "scales"}}}`.

    Args:
      model: Definition of the user's model.
      lora: Targets, ranks and base format.
      owners: Path of a parameter -> `(unit, number of stacked dims)`.
      root: Name of the unit of parameters that belong to no unit.
      policy: Mixed-precision policy, from which the weights' compute dtypes follow.

    Raises:
      ValueError: If a pattern matches nothing, or a weight cannot be read as a matrix
        of inputs and outputs; all offenders in one message.
    """
    leaves = dict(named_leaves(model.params))
    _check(lora, leaves, owners, root)
    weights = {
        name: _weight(lora, name, leaf, *owners[name], root, policy)
        for name, leaf in leaves.items()
    }
    adapted = Adapted(model, weights, lora.dropout > 0)
    factors = {name: w.factors() for name, w in weights.items() if w.rank}
    codes = {name: w.codes() for name, w in weights.items() if w.recipe.form}
    names = adapted.tree({n: n for n in weights}, _paths(factors), _paths(codes))
    coded = frozenset(jax.tree.leaves(names.get("quantized", {})))
    return dataclasses.replace(
        model,
        params=adapted.tree(leaves, factors, codes),
        merge=adapted.merge,
        names=tuple(jax.tree.leaves(names)),
        frozen=coded | {n for n, w in weights.items() if not w.is_trained},
        factors=frozenset(jax.tree.leaves(names["lora"])),
        codes=coded,
        adapted=adapted,
    )


def _paths(parts: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, str]]:
    """Returns the tree with each leaf replaced by its dotted path."""
    return {
        name: {part: f"{name}.{part}" for part in own} for name, own in parts.items()
    }


@dataclasses.dataclass(frozen=True)
class Adapted:
    """The user's model with the stored form of its weights.

    Attributes:
      model: Definition of the user's model.
      weights: Path -> weight, in the order of the model's leaves.
      is_random: True if the factors have dropout.
    """

    model: ModelDef
    weights: Mapping[str, Weight]
    is_random: bool

    @property
    def decoded(self) -> dict[str, int]:
        """Name of each parameter of codes -> bytes of its dequantized weight."""
        return {
            f"{name}.codes": math.prod(w.recipe.shape) * w.recipe.dtype.itemsize
            for name, w in self.weights.items()
            if w.recipe.form
        }

    def tree(self, base: Mapping, factors: Mapping, codes: Mapping) -> dict[str, Any]:
        """Builds the tree of parameters from the leaves of its parts, keyed by path."""
        stored = [
            None if weight.recipe.form else base[name]
            for name, weight in self.weights.items()
        ]
        treedef = jax.tree.structure(self.model.params)
        tree = {"base": treedef.unflatten(stored), "lora": dict(factors)}
        return tree | ({"quantized": dict(codes)} if codes else {})

    def parts(self, params: PyTree) -> dict[str, list[Any]]:
        """Returns path of a weight -> the parameters that store it."""
        treedef = jax.tree.structure(self.model.params)
        base = treedef.flatten_up_to(params["base"])
        found = {}
        for (name, weight), leaf in zip(self.weights.items(), base, strict=True):
            own = [leaf]
            if weight.recipe.form:
                own = [params["quantized"][name][part] for part in ("codes", "scales")]
            if weight.rank:
                own += [params["lora"][name][part] for part in (A_LEAF, B_LEAF)]
            found[name] = own
        return found

    def merge(self, params: PyTree, state: PyTree, key: Any = None) -> Any:
        """Builds the user's model with composed weights, or `Derived` for shards."""
        leaves = []
        for number, (name, parts) in enumerate(self.parts(params).items()):
            weight = self.weights[name]
            if weight.is_plain:
                leaves.append(parts[0])
            elif isinstance(parts[0], jax.Array):
                leaves.append(weight.total(parts))
            else:
                dropout = _dropout_key(weight, key, number)
                leaves.append(Derived(tuple(parts), dropout, weight.recipe))
        treedef = jax.tree.structure(self.model.params)
        return self.model.merge(treedef.unflatten(leaves), state)

    def complete(
        self, base: PyTree, key: Key[Array, ""], factors: PyTree | None = None
    ) -> PyTree:
        """Builds the parameters from the user's own ones and drawn factors.

        `key` draws the factors, unless `factors` are given.
        """
        leaves = dict(zip(self.weights, jax.tree.leaves(base), strict=True))
        drawn = {
            name: weight.drawn(jax.random.fold_in(key, number))
            for number, (name, weight) in enumerate(self.weights.items())
            if weight.rank
        }
        codes = {
            name: weight.quantized(leaves[name])
            for name, weight in self.weights.items()
            if weight.recipe.form
        }
        return self.tree(leaves, drawn if factors is None else factors, codes)


def _dropout_key(weight: Weight, key: Any, number: int) -> Any:
    """Returns a dropout key for each copy of its unit; None without dropout."""
    if key is None or not (weight.rank and weight.recipe.dropout):
        return None
    key = jax.random.fold_in(key, number)
    return jax.random.split(key, weight.stacked) if weight.stacked else key


def _weight(
    lora: LoRAConfig,
    name: str,
    leaf: Any,
    unit: str,
    num_stacked: int,
    root: str,
    policy: MixedPrecisionPolicy,
) -> Weight:
    target = _target(lora, name)
    shape = tuple(leaf.shape)
    is_trained = any(matches(pattern, name) for pattern in lora.modules_to_save)
    is_matrix = len(shape) - num_stacked >= 2
    # Codes have one real scale: the weights of other dtypes stay as they are.
    is_real = jnp.issubdtype(leaf.dtype, jnp.floating)
    is_coded = unit != root and is_matrix and is_real and not is_trained
    recipe = Recipe(
        name=name,
        shape=shape[num_stacked:],
        dtype=policy.resolve(name, leaf.dtype).param,
        form=lora.base if is_coded else None,
        num_in=(target.num_in or 1) if target else None,
        out_first=bool(target and target.out_first),
        scale=lora.scale_of(target) if target else 1.0,
        dropout=lora.dropout,
    )
    rank = lora.rank_of(target) if target else 0
    return Weight(shape, num_stacked, recipe, rank, is_trained)


def _target(lora: LoRAConfig, name: str) -> LoRATarget | None:
    """Returns the first target whose pattern matches the path of the weight."""
    for target in lora.all_targets:
        if matches(target.pattern, name):
            return target
    return None


def _check(
    lora: LoRAConfig,
    leaves: Mapping[str, Any],
    owners: Mapping[str, tuple[str, int]],
    root: str,
) -> None:
    patterns = [target.pattern for target in lora.all_targets]
    unused = unmatched([*patterns, *lora.modules_to_save], leaves)
    wrong = [f"{pattern!r} matches no parameter" for pattern in unused]
    for name, leaf in leaves.items():
        if (target := _target(lora, name)) is None:
            continue
        unit, num_stacked = owners[name]
        ndim = len(leaf.shape) - num_stacked
        if (target.num_in or 1) >= ndim:
            wrong.append(
                f"'{name}' has {ndim} dim(s) in its unit, of which "
                f"{target.num_in or 1} would be inputs and none outputs"
            )
        elif ndim > 2 and target.num_in is None:
            wrong.append(
                f"'{name}' has {ndim} dims in its unit: say with "
                "fsdp.lora.LoRATarget(..., num_in=...) how many are inputs"
            )
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            wrong.append(f"'{name}' is {leaf.dtype}, and its factors would be real")
        if any(matches(pattern, name) for pattern in lora.modules_to_save):
            wrong.append(f"'{name}' is a target, and in modules_to_save")
        if lora.dropout and unit == root:
            wrong.append(f"'{name}' is in no unit, where dropout={lora.dropout} acts")
    if wrong:
        raise ValueError(
            f"LoRA does not fit the model: {'; '.join(wrong)}. Parameter paths begin: "
            f"{', '.join(list(leaves)[:5])}."
        )
