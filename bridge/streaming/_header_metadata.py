"""Texts in the headers of edited safetensors files, by the new names of their tensors.

torchao describes a weight `X.weight`, of which `X._weight_qdata` and others are stored,
in an entry of its name, and lists the names of all in another.
"""

import json
from collections.abc import Mapping

from bridge.formats._source import SafetensorsSource, Source

_LIST = "tensor_names"


def edit_metadata(source: Source, names: Mapping[str, str]) -> dict[str, str]:
    """Returns the texts of the headers of a checkpoint by the names after an edit.

    Args:
      source: Checkpoint before the edit.
      names: New name of each tensor that is kept, by its old name.

    Raises:
      ValueError: If tensors of one weight would get names of several weights.
    """
    metadata = source.metadata() if isinstance(source, SafetensorsSource) else {}
    modules: dict[str, list[str]] = {}
    for key in source.keys() if metadata else ():
        modules.setdefault(key.rpartition(".")[0], []).append(key)
    edited, wrong = {}, []
    for name in metadata:
        held = modules.get(name.rpartition(".")[0], [])
        parts = [key for key in held if _ending(name, key) is not None]
        owners = {_owner(name, key, names[key]) for key in parts if key in names}
        if len(owners) > 1 or None in owners:
            new = ", ".join(names[key] for key in parts if key in names)
            wrong.append(f"  {name}: {new}")
        elif owners or not parts:
            edited[name] = next(iter(owners), name) or name
    if wrong:
        raise ValueError(
            "These edits take weights of several tensors apart, whose names must "
            "end as before and begin alike:\n" + "\n".join(wrong)
        )
    texts = {new: metadata[old] for old, new in edited.items()}
    if _LIST in texts:
        texts[_LIST] = _edit_list(texts[_LIST], {**names, **edited})
    return texts


def _ending(name: str, key: str) -> str | None:
    """Returns the end of a name of a tensor of the weight `name`, else None."""
    module, _, leaf = name.rpartition(".")
    if key == name:
        return f".{leaf}"
    return key[len(module) :] if key.startswith(f"{module}._{leaf}_") else None


def _owner(name: str, old: str, new: str) -> str | None:
    """Returns the new name of a weight, None if that of its tensor ends otherwise.

    Args:
      name: Old name of the weight.
      old: Old name of the tensor.
      new: New name of the tensor.
    """
    if old == name:
        return new
    ending = _ending(name, old)
    if ending is None or not new.endswith(ending):
        return None
    return new.removesuffix(ending) + "." + name.rpartition(".")[2]


def _edit_list(text: str, names: Mapping[str, str]) -> str:
    """Returns a list of names with the new ones, without those that are left out."""
    try:
        listed = json.loads(text)
    except (ValueError, RecursionError):
        return text
    if not isinstance(listed, list) or not all(isinstance(n, str) for n in listed):
        return text
    return json.dumps([names[name] for name in listed if name in names])
