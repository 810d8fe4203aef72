"""Rows of a tensor that holds query, key and value in one, or of three for one leaf.

The rows of such a tensor may be those of all queries, of all keys and of all values,
or of each head in turn, and no name says which: each row is in doubt.
"""

import dataclasses
import re
from collections.abc import Mapping

from bridge.pytorch._doubts import contradicted
from bridge.pytorch._match import Match, matches
from bridge.pytorch._pair import Row
from bridge.pytorch._torch_layers import TorchLayer
from bridge.pytorch._tree_layers import TreeLayer
from bridge.rules._rules import Rule

Shape = tuple[int, ...]
Shapes = Mapping[str, Shape]

_FUSED = re.compile(r"(w?qkv|qkv_proj|c_attn|in_proj|query_key_value|to_qkv)", re.I)
_PARTS = (
    *(("q", "k", "v"), ("query", "key", "value"), ("q_proj", "k_proj", "v_proj")),
    *(("wq", "wk", "wv"), ("Wq", "Wk", "Wv"), ("to_q", "to_k", "to_v")),
)
_DOUBT = "rows of query, then of key, then of value, and not of each head in turn?"


@dataclasses.dataclass(frozen=True)
class _Projection:
    """One tensor of query, key and value, or three; names in the module of these."""

    names: tuple[str, ...]
    shape: Shape

    def within(self, path: str) -> str | tuple[str, ...]:
        """Returns the full names in the module of `path`."""
        module = path.rpartition(".")[0]
        first, *others = (".".join(filter(None, (module, n))) for n in self.names)
        return (first, *others) if others else first


def fused_rows(tensors: Shapes, leaves: Shapes) -> list[Row]:
    """Returns a row for each weight and bias that is fused in one of two models.

    Args:
      tensors: Shapes, by name, of tensors without a rule.
      leaves: Shapes, by path, of leaves without a rule.
    """
    theirs, ours = _projections(tensors), _projections(leaves)
    found = matches(
        [TorchLayer(path, None, {"": p.shape}) for path, p in theirs.items()],
        [TreeLayer(path, None, {"": p.shape}, "names") for path, p in ours.items()],
    )
    rows = [
        _row(match, theirs[match.theirs.path.format(layer=0)], ours[match.ours.path])
        for match in found
    ]
    return [contradicted(row, tensors, leaves) for row in rows if row is not None]


def _projections(shapes: Shapes) -> dict[str, _Projection]:
    """Returns projections by `module.weight` or `module.bias`."""
    found = {}
    for name, shape in shapes.items():
        path, _, leaf = name.rpartition(".")
        parent, _, module = path.rpartition(".")
        if leaf not in ("weight", "kernel", "bias"):
            continue
        end = "bias" if leaf == "bias" else "weight"
        whole = f"{parent}.{end}" if parent else end
        if _FUSED.fullmatch(module):
            found[whole] = _Projection((f"{module}.{leaf}",), shape)
        for parts in _PARTS:
            names = tuple(f"{part}.{leaf}" for part in parts)
            siblings = [f"{parent}.{n}" if parent else n for n in names]
            if name == siblings[0] and all(shapes.get(n) == shape for n in siblings):
                found[whole] = _Projection(names, shape)
    return found


def _row(match: Match, theirs: _Projection, ours: _Projection) -> Row | None:
    """Returns the row of one tensor and three leaves, or of three and one."""
    if {len(theirs.names), len(ours.names)} != {1, 3}:
        return None
    layout, options = "out in -> out in", {}
    if len(theirs.shape) == 1:
        layout = "out -> out"
    elif ours.names[0].endswith(".kernel"):
        layout = "out in -> in out"
        options = {"dim": 1} if len(theirs.names) > 1 else {}
    sides = theirs.within(match.theirs.path), ours.within(match.ours.path)
    doubts = (*match.doubts, _DOUBT)
    return Row(Rule, "bridge.Rule", (*sides, layout), options, doubts)
