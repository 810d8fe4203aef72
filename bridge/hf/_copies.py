"""Tensors that files hold several times, of weights that layers share."""

from collections.abc import Mapping

from bridge.formats._source import Source
from bridge.hf._tied_head import equal_tensors


def check_copies(source: Source, copies: Mapping[str, str]) -> None:
    """Checks that copies of tensors have the values of those that are read.

    transformers does not tie two tensors if their values differ, whatever the config
    says.

    Args:
      source: The checkpoint.
      copies: What the names of copies begin with, and those that are read.

    Raises:
      ValueError: If the checkpoint holds a tensor and a copy of other values.
    """
    held = set(source.keys())
    pairs = [
        (key, read + key.removeprefix(prefix))
        for prefix, read in copies.items()
        for key in sorted(held)
        if key.startswith(prefix)
    ]
    others = [
        f"  '{key}' beside '{read}'"
        for key, read in pairs
        if read in held and not equal_tensors(source, key, read)
    ]
    if others:
        raise ValueError(
            f"'{source.name}' holds {len(others)} tensors beside those of the layers "
            "that they share weights with, with other values or another shape. "
            "transformers shares none of them then; write the file anew from a model "
            "whose layers share them:\n" + "\n".join(others)
        )
