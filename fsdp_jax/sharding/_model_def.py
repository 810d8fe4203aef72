"""Uniform view of a model of any framework: parameters, other arrays, and the merge.

A flax.nnx module, a linen variable dict, an equinox module and a dict of arrays differ
in how they are split into arrays and structure. `describe` splits them once,
abstractly; the rest of the library sees two trees of leaves and a function that merges
them.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from flax.linen.fp8_ops import OVERWRITE_WITH_GRADIENT

from fsdp_jax._tree import PyTree, leaf_name, named_leaves
from fsdp_jax.sharding._attributes import trace_model
from fsdp_jax.sharding._variables import Variables, recorded_variables, state_names

MakeModel = Callable[[jax.Array], Any]
"""Function of a PRNG key that returns a model."""


@dataclasses.dataclass(frozen=True)
class Instance:
    """One object of a unit's class inside the model.

    Attributes:
      path: Dotted path of the object, `""` for the model itself.
      num_stacked: Number of leading dims that its leaves have beyond those its
        constructor gave them (`nnx.vmap` over the constructor gives one); None if
        unknown, because it was not constructed while the model was made.
    """

    path: str
    num_stacked: int | None


@dataclasses.dataclass(frozen=True)
class ModelDef:
    """A model without its arrays.

    Attributes:
      params: Trainable leaves as `jax.ShapeDtypeStruct`: an `nnx.State` of `nnx.Param`,
        or the user's own tree with None in place of everything else.
      state: All other arrays (dropout keys, BatchNorm statistics, integers), likewise.
      instances: Unit class -> its objects in the model.
      merge: `merge(params, state) -> model`, on arrays, tracers or `Shard`s.
      split: `split(model) -> (params, state)`, the inverse of `merge`.
      names: Names of the parameters; empty if they are their paths in `params`.
      frozen: Names of parameters that are not trained.
      factors: Names of LoRA factors, which are gathered in the dtype they are stored
        in.
      codes: Names of codes and scales, which are stored and gathered without a cast.
      overwrite_with_gradient: Names of parameters whose gradient is their next value
        (flax's `_overwrite_with_gradient`).
      made: Name of a linen parameter -> shapes in which its module has seen it.
      adapted: Composition of `params` from the user's own, with LoRA; None without.
    """

    params: PyTree
    state: PyTree
    instances: dict[type, tuple[Instance, ...]]
    merge: Callable[[PyTree, PyTree], Any]
    split: Callable[[Any], tuple[PyTree, PyTree]]
    names: tuple[str, ...] = ()
    frozen: frozenset[str] = frozenset()
    factors: frozenset[str] = frozenset()
    codes: frozenset[str] = frozenset()
    overwrite_with_gradient: frozenset[str] = frozenset()
    made: Mapping[str, frozenset[tuple[int, ...]]] = dataclasses.field(
        default_factory=dict
    )
    adapted: Any = None

    @property
    def is_random(self) -> bool:
        """True if its LoRA factors have dropout."""
        return self.adapted is not None and self.adapted.is_random

    @property
    def decoded(self) -> dict[str, int]:
        """Name of each parameter of codes -> bytes of its dequantized weight."""
        return {} if self.adapted is None else self.adapted.decoded

    @property
    def named_params(self) -> list[tuple[str, Any]]:
        """The parameters with their names."""
        named = named_leaves(self.params)
        if not self.names:
            return named
        return [(n, leaf) for n, (_, leaf) in zip(self.names, named, strict=True)]


def describe(make_model: MakeModel, classes: Sequence[type] = ()) -> ModelDef:
    """Traces `make_model` without allocating memory and splits the result.

    Args:
      make_model: Function of a PRNG key that returns the model.
      classes: Unit classes whose objects in the model are recorded.

    Raises:
      ValueError: If the model has no floating-point array, or it is ambiguous which
        arrays are parameters.
    """
    with _recorded_shapes(classes) as recorded:
        model, parts = _abstract(make_model)
    is_graph = parts is not None
    definition = (
        _describe_nnx(*parts)
        if is_graph
        else _describe_pytree(model, _variables(make_model, model))
    )
    if not jax.tree.leaves(definition.params):
        raise ValueError(
            f"make_model returned a {type(model).__name__} without any trainable "
            "floating-point array. Return the model itself, or its tree of weights."
        )
    find = _nnx_objects if is_graph else _pytree_objects
    instances = {
        cls: tuple(
            Instance(path, _num_stacked(obj, recorded.get(cls, {})))
            for path, obj in find(model, cls)
        )
        for cls in classes
    }
    return dataclasses.replace(definition, instances=instances)


NnxParts = tuple[Any, PyTree, PyTree]
"""Result of `nnx.split(model, nnx.Param, ...)`."""


def _abstract(make_model: MakeModel) -> tuple[Any, NnxParts | None]:
    """Returns the abstract model and, for an nnx module, its parts.

    An nnx module is split inside the trace, where its arrays are tracers: nnx takes a
    `jax.ShapeDtypeStruct` for a static value.
    """
    static: list[Any] = []

    def arrays_only(key):
        model = trace_model(make_model, key)
        if isinstance(model, nnx.Module):
            # Not flattened as a pytree, which would count a shared Variable twice.
            graphdef, *states = nnx.split(model, nnx.Param, ...)
            static.append(graphdef)
            return states
        leaves, treedef = jax.tree.flatten(model)
        fixed = [None if _is_array(leaf) else leaf for leaf in leaves]
        static.append((treedef, fixed))
        return [leaf if _is_array(leaf) else None for leaf in leaves]

    key = jax.eval_shape(lambda: jax.random.key(0))
    arrays = jax.eval_shape(arrays_only, key)
    if isinstance(static[-1], nnx.GraphDef):
        params, state = arrays
        return nnx.merge(static[-1], params, state), (static[-1], params, state)
    treedef, fixed = static[-1]
    leaves = [f if a is None else a for a, f in zip(arrays, fixed, strict=True)]
    return treedef.unflatten(leaves), None


def _variables(make_model: MakeModel, model: PyTree) -> Variables:
    """Traces `make_model` again and records the variables that linen makes in it.

    Skipped if the model has no mapping, in which linen keeps all variables.
    """

    def is_mapping(node):
        return isinstance(node, Mapping)

    with recorded_variables() as variables:
        if any(map(is_mapping, jax.tree.leaves(model, is_leaf=is_mapping))):
            _abstract(make_model)
    return variables


def _describe_nnx(graphdef: Any, params: PyTree, state: PyTree) -> ModelDef:
    integers = [
        name
        for name, leaf in named_leaves(params)
        if not jnp.issubdtype(leaf.dtype, jnp.inexact)
    ]
    if integers:
        raise ValueError(
            f"nnx.Param {', '.join(integers)} holds no floating-point numbers, so it "
            "has no gradient. Make it an nnx.Variable of another kind."
        )

    def merge(params, state):
        # copy=True: the loss may write to a Variable (a dropout counter). Without it,
        # that would be the caller's own Variable, written inside a trace.
        return nnx.merge(graphdef, params, state, copy=True)

    def split(model):
        _, params, state = nnx.split(model, nnx.Param, ...)
        return params, state

    return ModelDef(params, state, {}, merge, split)


def _describe_pytree(model: PyTree, variables: Variables) -> ModelDef:
    not_trained = state_names(model, variables)
    named, treedef = jax.tree_util.tree_flatten_with_path(model)
    leaves = [leaf for _, leaf in named]
    is_param = [
        _is_array(x)
        and jnp.issubdtype(x.dtype, jnp.inexact)
        and leaf_name(path) not in not_trained
        for path, x in named
    ]
    is_state = [_is_array(x) and not p for x, p in zip(leaves, is_param, strict=True)]

    def keep(tree_leaves, mask):
        return treedef.unflatten(
            x if m else None for x, m in zip(tree_leaves, mask, strict=True)
        )

    def merge(params, state):
        given = zip(
            leaves,
            treedef.flatten_up_to(params),
            treedef.flatten_up_to(state),
            strict=True,
        )
        return treedef.unflatten(
            p if p is not None else s if s is not None else leaf for leaf, p, s in given
        )

    def split(model):
        new = treedef.flatten_up_to(model)
        return keep(new, is_param), keep(new, is_state)

    params, state = split(model)
    return ModelDef(
        params,
        state,
        {},
        merge,
        split,
        overwrite_with_gradient=_overwritten(params),
        made=_made_shapes(params, variables),
    )


def _overwritten(params: PyTree) -> frozenset[str]:
    """Returns the parameters in a collection that gradients overwrite: flax's name."""
    names = [name for name, _ in named_leaves(params)]
    return frozenset(n for n in names if OVERWRITE_WITH_GRADIENT in n.split("."))


def _made_shapes(params: PyTree, variables: Variables) -> dict[str, frozenset]:
    """Returns the shapes in which linen modules made each parameter, by its name."""
    return {
        name: frozenset().union(*variables.find(name, tuple(leaf.shape)).values())
        for name, leaf in named_leaves(params)
    }


def _is_array(leaf: Any) -> bool:
    return isinstance(leaf, (jax.Array, np.ndarray, jax.ShapeDtypeStruct))


def _nnx_objects(model: nnx.Module, cls: type) -> Iterator[tuple[str, Any]]:
    for path, module in nnx.iter_modules(model):
        if isinstance(module, cls):
            yield ".".join(map(str, path)), module


def _pytree_objects(model: PyTree, cls: type) -> Iterator[tuple[str, Any]]:
    def below(prefix: str, node: Any, *, root: bool) -> Iterator[tuple[str, Any]]:
        found = named_leaves(node, lambda n: isinstance(n, cls) and n is not node)
        if root and isinstance(node, cls):
            yield prefix, node
        for name, leaf in found:
            if isinstance(leaf, cls):
                path = f"{prefix}.{name}" if prefix else name
                yield path, leaf
                yield from below(path, leaf, root=False)

    yield from below("", model, root=True)


Shapes = dict[str, set[tuple[int, ...]]]


@contextlib.contextmanager
def _recorded_shapes(classes: Sequence[type]) -> Iterator[dict[type, Shapes]]:
    """Records the shapes that the constructor of each class gives its leaves.

    Under `vmap` a constructor sees one slice, so the dims that the final shape has
    beyond it are those over which the object is stacked. The finished tree does not
    show them: a stack of 8 norms of 512 has the shape of one 8 x 512 matrix.
    """
    recorded: dict[type, Shapes] = {cls: {} for cls in classes}
    with contextlib.ExitStack() as stack:
        for cls in classes:
            stack.enter_context(_after_init(cls, recorded[cls]))
        yield recorded


@contextlib.contextmanager
def _after_init(cls: type, shapes: Shapes) -> Iterator[None]:
    own = "__init__" in vars(cls)
    original = cls.__init__

    def __init__(self, *args, **kwargs):
        original(self, *args, **kwargs)
        for name, leaf in _array_leaves(self):
            shapes.setdefault(name, set()).add(tuple(leaf.shape))

    cls.__init__ = __init__
    try:
        yield
    finally:
        # An inherited __init__ is restored by deleting the class's own.
        if own:
            cls.__init__ = original
        else:
            del cls.__init__


def _array_leaves(obj: Any) -> list[tuple[str, Any]]:
    tree = nnx.state(obj) if isinstance(obj, nnx.Module) else obj
    return [(name, leaf) for name, leaf in named_leaves(tree) if _is_array(leaf)]


def _num_stacked(obj: Any, shapes: Shapes) -> int | None:
    """Returns the number of leading dims of every leaf beyond its constructor's."""
    possible: set[int] | None = None
    for name, leaf in _array_leaves(obj):
        extra = {
            len(leaf.shape) - len(made)
            for made in shapes.get(name, ())
            if tuple(leaf.shape[len(leaf.shape) - len(made) :]) == made
        }
        if extra:
            possible = extra if possible is None else possible & extra
    return min(possible) if possible else None
