"""Layers of a PyTorch model: tensors grouped by module, with their classes.

A module gives the classes of its layers. A state dict has only names, of which some
identify a class: `in_proj_weight`, `weight_ih_l0`, `running_mean`.
"""

import dataclasses
from typing import Any

from bridge.formats._source import Source
from bridge.pytorch._torch_source import is_module

Shape = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class TorchLayer:
    """Tensors of one module.

    Args:
      path: Path of the module; empty for the model itself.
      kind: Name of the class in `torch.nn`; None if unknown.
      shapes: Shape of each tensor by its name within the module.
    """

    path: str
    kind: str | None
    shapes: dict[str, Shape]


def torch_layers(model: Any, source: Source) -> list[TorchLayer]:
    """Groups the tensors of a source by module.

    Args:
      model: Argument that the source was opened from; an `nn.Module` gives classes.
      source: Source of the tensors.
    """
    groups: dict[str, dict[str, Shape]] = {}
    for key in source.keys():
        path, _, name = key.rpartition(".")
        groups.setdefault(path, {})[name] = source.shape(key)
    for path in [p for p, names in groups.items() if "in_proj_bias" in names] + [
        p for p, names in groups.items() if "in_proj_weight" in names
    ]:
        output = groups.pop(f"{path}.out_proj", {})
        groups[path] |= {f"out_proj.{name}": shape for name, shape in output.items()}
    classes = _classes(model)
    return [
        TorchLayer(path, classes.get(path) or _by_names(shapes), shapes)
        for path, shapes in groups.items()
    ]


def _classes(model: Any) -> dict[str, str]:
    if not is_module(model):
        return {}
    return {
        path: type(module).__name__
        for path, module in model.named_modules()
        # A class from elsewhere may store its weight in another order.
        if type(module).__module__.startswith("torch.nn.")
    }


def _by_names(shapes: dict[str, Shape]) -> str | None:
    if "in_proj_weight" in shapes or "q_proj_weight" in shapes:
        return "MultiheadAttention"
    if "running_mean" in shapes:
        return "BatchNorm"
    for ending, suffix in (("_l0", ""), ("", "Cell")):
        if f"weight_hh{ending}" in shapes:
            gates, hidden = shapes[f"weight_hh{ending}"]
            # Rows are gates: four in an LSTM, three in a GRU, one in a plain RNN.
            return {4: "LSTM", 3: "GRU", 1: "RNN"}.get(gates // hidden, "RNN") + suffix
    return None
