"""Floating-point arrays of a tree that are not parameters: linen's and equinox's state.

An array does not show whether it is a parameter. So the variables that linen's modules
create while the model is made are recorded with their collections; equinox has classes
for its state.
"""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
from flax import linen as nn
from flax.linen.fp8_ops import OVERWRITE_WITH_GRADIENT

from fsdp_jax._tree import PyTree, leaf_name, named_leaves

Shape = tuple[int, ...]

TRAINED = ("params", OVERWRITE_WITH_GRADIENT)
"""Linen collections whose arrays are changed by their gradients."""

NOT_TRAINED = ("batch_stats", "cache", "intermediates", "perturbations")
"""Collections of linen's own modules whose arrays are not changed by gradients."""


retraced = jax.make_user_context(None)
"""Context with a value, under which `jax.jit` traces anew what it traced without it.

A function traced earlier would not call its modules again, so that nothing could
intercept them.
"""


@dataclasses.dataclass(frozen=True)
class Variables:
    """Variables that linen's modules created while a model was made.

    Attributes:
      shapes: Path within the outermost module -> collection -> shapes that the variable
        has had: one slice within a scan, the stack after it.
    """

    shapes: dict[str, dict[str, set[Shape]]]

    def find(self, name: str, shape: Shape) -> dict[str, set[Shape]]:
        """Returns the shapes, by collection, of the variable that a leaf of a tree is.

        Args:
          name: Dotted path of the leaf. The tree may contain the variables anywhere, so
            the longest end of the path that names a variable is used.
          shape: Shape of the leaf, which may be a stack of the variable.
        """
        parts = name.split(".")
        for start in range(len(parts)):
            made = self.shapes.get(".".join(parts[start:]), {})
            found = {
                collection: shapes
                for collection, shapes in made.items()
                if any(shape[len(shape) - len(s) :] == s for s in shapes)
            }
            if found:
                named = [c for c in found if start and c == parts[start - 1]]
                return {c: found[c] for c in named} or found
        return {}


@contextlib.contextmanager
def recorded_variables() -> Iterator[Variables]:
    """Records the variables of all linen modules that are called while it is open."""
    found = Variables({})

    def note(next_fun, args, kwargs, context: nn.module.InterceptorContext):
        out = next_fun(*args, **kwargs)
        module = context.module
        for collection, tree in module.variables.items() if module.scope else ():
            # The variables of submodules were recorded when these were called.
            own = tree if not module.path else _without_mappings(tree)
            for name, leaf in named_leaves(own):
                path = ".".join((*module.path, name))
                shapes = found.shapes.setdefault(path, {}).setdefault(collection, set())
                shapes.add(tuple(getattr(leaf, "shape", ())))
        return out

    with retraced(object()), nn.intercept_methods(note):
        yield found


def state_names(model: PyTree, variables: Variables) -> frozenset[str]:
    """Returns the names of arrays that no optimizer updates, in a model not of nnx.

    Raises:
      ValueError: If it is ambiguous whether arrays are parameters; all in one message.
    """
    beside, in_equinox = _beside_params(model), _in_equinox_state(model)
    named = [(leaf_name(path), leaf) for path, leaf in _flat(model)]
    arrays = {name: leaf for name, leaf in named if hasattr(leaf, "shape")}
    trained = {
        name: False
        if name in in_equinox
        else _is_trained(name, tuple(leaf.shape), variables, beside)
        for name, leaf in arrays.items()
    }
    unclear = [n for n, x in arrays.items() if trained[n] is None and _is_inexact(x)]
    if unclear:
        raise ValueError(
            f"Nothing tells whether {', '.join(unclear[:5])} ({len(unclear)} array(s)) "
            "are trained: collections beside the key 'params' of linen are not "
            "trained, but no linen module's init was called in make_model. Call it "
            "there, or put trained arrays under 'params' or under other keys."
        )
    return frozenset(
        name for name, is_trained in trained.items() if is_trained is False
    )


def _is_trained(
    name: str, shape: Shape, variables: Variables, beside: Sequence[str]
) -> bool | None:
    """Returns whether an array is a parameter; None if that is ambiguous."""
    made = variables.find(name, shape).keys()
    if made:
        is_param = {collection in TRAINED for collection in made}
        return is_param.pop() if len(is_param) == 1 else None
    above = [path for path in beside if name == path or name.startswith(f"{path}.")]
    if not above:
        return True
    return False if above[0].rpartition(".")[2] in NOT_TRAINED else None


def _flat(tree: PyTree, is_leaf: Any = None) -> list[tuple[tuple[Any, ...], Any]]:
    """Returns the leaves of a tree with their paths."""
    return jax.tree_util.tree_flatten_with_path(tree, is_leaf)[0]


def _is_inexact(leaf: Any) -> bool:
    dtype = getattr(leaf, "dtype", None)
    return dtype is not None and jax.numpy.issubdtype(dtype, jax.numpy.inexact)


def _without_mappings(tree: Mapping[str, Any]) -> dict[str, Any]:
    return {k: x for k, x in tree.items() if not isinstance(x, Mapping)}


def _beside_params(model: PyTree) -> list[str]:
    """Returns the paths beside a key `params`, without linen's trained collections."""

    def has_params(node):
        return isinstance(node, Mapping) and "params" in node

    return [
        f"{name}.{key}" if name else key
        for name, node in named_leaves(model, has_params)
        if has_params(node)
        for key in node
        if key not in TRAINED
    ]


def _in_equinox_state(model: PyTree) -> set[str]:
    """Returns the names of arrays in `equinox.nn.State` and in its initial values."""
    classes = equinox_classes("State", "StateIndex")
    return {
        leaf_name((*path, *rest))
        for path, node in _flat(model, lambda node: isinstance(node, classes))
        if isinstance(node, classes)
        for rest, _ in _flat(node)
    }


def equinox_classes(*names: str) -> tuple[type, ...]:
    """Returns classes of `equinox.nn`; none if nothing has imported equinox."""
    module = sys.modules.get("equinox")
    return tuple(getattr(module.nn, name) for name in names) if module else ()
