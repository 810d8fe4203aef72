"""Layers of a JAX model: leaves grouped by module, with their classes.

flax.nnx and equinox modules have classes. linen variables and other pytrees have only
names: a `scale` belongs to a norm, a `kernel` of two dims to a `Dense`.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import jax
from flax import nnx

from bridge.pytorch._target import Target

Shape = tuple[int, ...]

_ATTENTION = tuple(f"{name}.kernel" for name in ("query", "key", "value", "out"))


@dataclasses.dataclass(frozen=True)
class TreeLayer:
    """Leaves of one module.

    Args:
      path: Path of the module; empty for the model itself.
      kind: Name of the class in flax; None if unknown.
      shapes: Shape of each leaf by its name within the module.
      by: Origin of `kind`: a class of `"nnx"` or `"equinox"`, or `"names"`.
      options: Keyword arguments for the adapter.
    """

    path: str
    kind: str | None
    shapes: dict[str, Shape]
    by: str
    options: dict[str, Any] = dataclasses.field(default_factory=dict)


def tree_layers(model: Any, target: Target) -> list[TreeLayer]:
    """Groups the leaves of a model or pytree by module.

    Args:
      model: Model or pytree.
      target: Weights of `model`.
    """
    shapes = {name: tuple(leaf.shape) for name, leaf in target.leaves.items()}
    layers = []
    for path, module in sorted(_modules(model), key=lambda found: len(found[0])):
        start = f"{path}." if path else ""
        own = {
            k.removeprefix(start): s for k, s in shapes.items() if k.startswith(start)
        }
        shapes = {k: s for k, s in shapes.items() if not k.startswith(start)}
        if own:  # empty for a submodule: shorter paths come first and take its leaves
            layers.append(_of_module(path, module, own))
    return layers + _by_names(shapes)


def _modules(model: Any) -> list[tuple[str, Any]]:
    """Returns the known flax.nnx and equinox modules, with their paths."""
    if isinstance(model, nnx.Module):
        return [
            (".".join(map(str, path)), module)
            for path, module in nnx.iter_modules(model)
            if _is_known(module)
        ]
    found = jax.tree_util.tree_flatten_with_path(model, is_leaf=_is_known)[0]
    return [
        (jax.tree_util.keystr(path, simple=True, separator="."), module)
        for path, module in found
        if _is_known(module)
    ]


_CLASSES = {
    "flax.nnx.": {
        *("Linear", "Conv", "ConvTranspose", "Embed", "LayerNorm", "GroupNorm"),
        *("RMSNorm", "BatchNorm", "MultiHeadAttention", "OptimizedLSTMCell"),
        *("LSTMCell", "GRUCell"),
    },
    "equinox.nn.": {
        *("Linear", "Conv1d", "Conv2d", "Conv3d", "ConvTranspose1d"),
        *("ConvTranspose2d", "ConvTranspose3d", "Embedding", "LayerNorm"),
        *("GroupNorm", "RMSNorm"),
    },
}


def _is_known(module: Any) -> bool:
    cls = type(module)
    return any(
        cls.__module__.startswith(package) and cls.__name__ in names
        for package, names in _CLASSES.items()
    )


def _of_module(path: str, module: Any, shapes: dict[str, Shape]) -> TreeLayer:
    kind = type(module).__name__
    if type(module).__module__.startswith("equinox."):
        kind = {"Embedding": "Embed"}.get(kind, kind.rstrip("123d"))
        return TreeLayer(path, kind, shapes, "equinox")
    options = {}
    if kind == "ConvTranspose":
        options["transpose_kernel"] = module.transpose_kernel
    return TreeLayer(path, kind, shapes, "nnx", options)


def _by_names(shapes: dict[str, Shape]) -> list[TreeLayer]:
    groups: dict[str, dict[str, Shape]] = {}
    for leaf, shape in shapes.items():
        path, _, name = leaf.rpartition(".")
        groups.setdefault(path, {})[name] = shape
    for path in {p.rpartition(".")[0] for p in groups}:
        _join_attention(path, groups)
    for path in [p for p in groups if p.startswith("batch_stats.")]:
        params = path.replace("batch_stats.", "params.", 1)
        statistics = groups.pop(path)
        groups.setdefault(params, {}).update(statistics)
    return [
        TreeLayer(path, kind_of_names(names), names, "names")
        for path, names in groups.items()
    ]


def _join_attention(path: str, groups: dict[str, dict[str, Shape]]) -> None:
    children = {
        f"{child}.{name}": shape
        for child in ("query", "key", "value", "out")
        for name, shape in groups.get(f"{path}.{child}", {}).items()
    }
    if all(len(children.get(name, ())) == 3 for name in _ATTENTION):
        for child in ("query", "key", "value", "out"):
            groups.pop(f"{path}.{child}")
        groups[path] = groups.get(path, {}) | children


def projections(layers: Sequence[TreeLayer]) -> list[TreeLayer]:
    """Returns layers with the four projections of each attention as layers.

    A model whose attention is no module of PyTorch's has a linear layer for each.

    Args:
      layers: Layers of a model or pytree.
    """
    return [one for layer in layers for one in _projections(layer)]


def _projections(layer: TreeLayer) -> Iterator[TreeLayer]:
    if layer.kind != "MultiHeadAttention":
        yield layer
        return
    groups: dict[str, dict[str, Shape]] = {}
    for leaf, shape in layer.shapes.items():
        child, _, name = leaf.rpartition(".")
        groups.setdefault(child, {})[name] = shape
    for child, shapes in groups.items():
        path = ".".join(filter(None, (layer.path, child)))
        yield TreeLayer(path, kind_of_names(shapes), shapes, "names")


def kind_of_names(shapes: dict[str, Shape]) -> str | None:
    """Returns the kind of a layer that its leaves tell; None if they do not."""
    if "query.kernel" in shapes:
        return "MultiHeadAttention"
    if {"mean", "var"} <= set(shapes):
        return "BatchNorm"
    if "embedding" in shapes:
        return "Embed"
    if "scale" in shapes:
        return "Norm"
    if "kernel" in shapes:
        # With more dims it may be a convolution, transposed or not, or a
        # `DenseGeneral`.
        return "Linear" if len(shapes["kernel"]) == 2 else "Kernel"
    return None
