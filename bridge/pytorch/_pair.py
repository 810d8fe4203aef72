"""Selection of the adapter that maps a PyTorch layer to a JAX layer."""

import dataclasses
import json
from collections.abc import Callable, Mapping
from typing import Any

from bridge import adapt
from bridge.pytorch._torch_layers import TorchLayer
from bridge.pytorch._tree_layers import TreeLayer
from bridge.rules._rules import Rule

_CONVS = {f"Conv{n}d" for n in (1, 2, 3)}
_TRANSPOSED = {f"ConvTranspose{n}d" for n in (1, 2, 3)}
_BATCH_NORMS = {"BatchNorm", "SyncBatchNorm", *[f"BatchNorm{n}d" for n in (1, 2, 3)]}
_COUNTERPARTS = {
    "Linear": {"Linear"},
    "Conv": _CONVS,
    "ConvTranspose": _TRANSPOSED,
    "Kernel": _CONVS | _TRANSPOSED,
    "Embed": {"Embedding"},
    "LayerNorm": {"LayerNorm"},
    "GroupNorm": {"GroupNorm"},
    "RMSNorm": {"RMSNorm"},
    "Norm": {"LayerNorm", "GroupNorm", "RMSNorm"},
    "BatchNorm": _BATCH_NORMS,
    "MultiHeadAttention": {"MultiheadAttention"},
    "OptimizedLSTMCell": {"LSTM", "LSTMCell"},
    "LSTMCell": {"LSTM", "LSTMCell"},
    "GRUCell": {"GRU", "GRUCell"},
}
_NORMS = {"LayerNorm", "GroupNorm", "RMSNorm", "Norm"}
_MATRICES = {"Linear", "Conv", "ConvTranspose", "Kernel", "Embed"}


@dataclasses.dataclass(frozen=True)
class Row:
    """Rule or adapter as it would be written in code, with doubts about it.

    Args:
      make: `Rule`, or a function of `bridge.adapt`.
      name: Name of `make` in code.
      args: Positional arguments: names, several of a side as a tuple, and patterns.
      options: Keyword arguments.
      doubts: Reasons to review the row; empty if it is certain.
    """

    make: Callable[..., Any]
    name: str
    args: tuple[str | tuple[str, ...], ...]
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    doubts: tuple[str, ...] = ()

    @property
    def rule(self) -> Rule | adapt.Adapter:
        """Rule or adapter of this row."""
        return self.make(*self.args, **self.options)

    def __str__(self) -> str:
        """Formats the row as code, with doubts in a comment."""
        given = [_literal(arg) for arg in self.args]
        given += [f"{name}={_literal(value)}" for name, value in self.options.items()]
        comment = f"  # in doubt: {'; '.join(self.doubts)}" if self.doubts else ""
        return f"{self.name}({', '.join(given)}),{comment}"


def pair(theirs: TorchLayer, ours: TreeLayer) -> Row | None:
    """Proposes the row for two layers of the same name.

    Args:
      theirs: Layer of the PyTorch model.
      ours: Layer of the JAX model.

    Returns:
      Proposed row, with a doubt for whatever the two sides do not determine; None if
      there is no adapter for the layer.
    """
    if ours.kind is None or (ours.kind == "Kernel" and _is_linear(theirs)):
        return None
    name, options = _adapter(theirs, ours)
    module, prefix = adapt, "adapt."
    if ours.by == "equinox":
        module, prefix = adapt.equinox, "adapt.equinox."
    doubts = tuple(_doubts(theirs, ours))
    paths = theirs.path, ours.path
    return Row(getattr(module, name), prefix + name, paths, options, doubts)


def _is_linear(theirs: TorchLayer) -> bool:
    """Whether a layer has a matrix: a kernel of more dims is then no convolution's."""
    return len(theirs.shapes.get("weight", ())) == 2


def _adapter(theirs: TorchLayer, ours: TreeLayer) -> tuple[str, dict[str, Any]]:
    """Returns the name of the adapter for a JAX layer, and non-default options."""
    no_bias = {} if _both_have("bias", theirs, ours) else {"bias": False}
    kind = ours.kind
    if kind == "Kernel":
        kind = "ConvTranspose" if theirs.kind in _TRANSPOSED else "Conv"
    if kind == "Linear":
        return "linear", no_bias
    if kind in ("Conv", "ConvTranspose"):
        ndim = len(theirs.shapes.get("weight", ())) - 2
        options = {"ndim": min(3, max(1, ndim)), **ours.options, **no_bias}
        return ("conv" if kind == "Conv" else "conv_transpose"), options
    if kind == "Embed":
        return "embedding", {}
    if kind in _NORMS:
        return "norm", no_bias
    if kind == "BatchNorm":
        return "batch_norm", _of_batch_norm(ours)
    if kind == "MultiHeadAttention":
        biased = "in_proj_bias" in theirs.shapes and "query.bias" in ours.shapes
        options = {} if biased else {"bias": False}
        fused = "q_proj_weight" not in theirs.shapes
        return "attention", options | ({} if fused else {"fused": False})
    return _recurrent(theirs, ours)


def _of_batch_norm(ours: TreeLayer) -> dict[str, Any]:
    options: dict[str, Any] = {}
    if ours.path.startswith("params."):
        options["stats"] = ours.path.replace("params.", "batch_stats.", 1)
    return options if "scale" in ours.shapes else options | {"affine": False}


def _recurrent(theirs: TorchLayer, ours: TreeLayer) -> tuple[str, dict[str, Any]]:
    # "ih" is lossless: it raises an error if the other bias is not zero.
    options: dict[str, Any] = {"bias": "ih"}
    if ours.kind == "LSTMCell":
        options["cell"] = "nnx.LSTMCell"
    if "weight_hh" in theirs.shapes:
        options["suffix"] = ""
    return ("gru" if ours.kind == "GRUCell" else "lstm"), options


def _doubts(theirs: TorchLayer, ours: TreeLayer) -> list[str]:
    kind = ours.kind or ""
    doubts = []
    if theirs.kind is not None and theirs.kind not in _COUNTERPARTS[kind]:
        doubts.append(f"{theirs.kind} in PyTorch, {kind} in the tree")
    weight = theirs.shapes.get("weight", ())
    unsure = theirs.kind is None or ours.by == "names"
    if theirs.kind is None and kind == "Kernel":
        doubts.append("no class says what it is")
    elif unsure and kind in _MATRICES and len(set(weight[:2])) == 1:
        side = "PyTorch" if theirs.kind is None else "the tree"
        doubts.append(f"square, {weight}, and of no known class in {side}")
    if kind == "Kernel" and theirs.kind in _TRANSPOSED:
        doubts.append("nothing says whether it has `transpose_kernel`")
    if kind.endswith("Cell") and any("bias" in name for name in theirs.shapes):
        doubts.append('two biases become one: "ih" if the other is zero, or "sum"')
    return doubts


def _both_have(name: str, theirs: TorchLayer, ours: TreeLayer) -> bool:
    return name in theirs.shapes and name in ours.shapes


def _literal(value: Any) -> str:
    if isinstance(value, tuple):
        return f"({', '.join(map(_literal, value))})"
    return json.dumps(value) if isinstance(value, str) else repr(value)
