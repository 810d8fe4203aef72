"""JAX to PyTorch: the rules of `from_torch`, followed backwards."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from bridge._bind import (
    Rules,
    bind,
    derived_of,
    entries_of,
    ignored_by,
    structs_of,
    ties_of,
)
from bridge._box import as_index
from bridge._derived import derive, underive
from bridge._mould import read_mould
from bridge._piece import Piece
from bridge._source import Source
from bridge._torch_files import open_torch
from bridge._torch_source import to_tensor


def to_torch(
    tree: Any,
    rules: Rules,
    like: Any = None,
    *,
    sizes: Mapping[str, int] | None = None,
    ignore: Sequence[str] = (),
) -> dict[str, Any]:
    """Returns a state dict with the weights of a model in JAX.

    What `from_torch` did with the same rules is undone to the bit, but for casts, and
    for biases that were added on request. Weights are gathered on the host.

    Args:
      tree: A model or tree, as for `from_torch`, of arrays.
      rules: The same rules.
      like: What the state dict should resemble: a source as for `from_torch`. From it
        come the dtypes, the names of tied tensors, and the tensors that the rules
        leave aside (`num_batches_tracked`). None keeps the dtypes of the leaves.
      sizes: As for `from_torch`.
      ignore: As for `from_torch`.

    Returns:
      A `torch.Tensor` on the host for each name, in the order of `like`, else of the
      rules; names of tied tensors share one.

    Raises:
      ValueError: If tree, rules and `like` do not fit; everything that does not is
        listed.
    """
    leaves = read_mould(tree).leaves
    derived, entries = derived_of(rules), entries_of(rules, sizes or {})
    model = None if like is None else open_torch(like)
    adapted = None if model is None else derive(model, derived, check_zeros=False)
    kept, tied = [], {}
    if model is not None and adapted is not None:
        kept = ignored_by(rules, ignore, adapted.keys())
        tied = ties_of(model, rules)
    mapping = bind(entries, structs_of(leaves), adapted, (*kept, *tied))
    host = {name: np.asarray(jax.device_get(leaf)) for name, leaf in leaves.items()}
    made = _undo(mapping.by_source(), host, adapted)
    arrays = underive(made, derived)
    if model is None:
        return {key: to_tensor(array) for key, array in arrays.items()}
    arrays |= {key: model.read(key) for key in kept}
    tensors = {key: to_tensor(array) for key, array in arrays.items()}
    return {key: tensors[tied.get(key, key)] for key in model.keys()}


def _undo(
    pieces: Mapping[str, list[Piece]],
    leaves: Mapping[str, np.ndarray],
    like: Source | None,
) -> dict[str, np.ndarray]:
    dtypes = {key: {leaves[p.destination].dtype for p in pieces[key]} for key in pieces}
    mixed = [key for key, found in dtypes.items() if len(found) > 1]
    if like is None and mixed:
        raise ValueError(
            f"{', '.join(mixed)}: made of leaves of several dtypes, and none is "
            "chosen in silence. Give `like`, whose dtypes hold."
        )
    arrays = {}
    for key, parts in pieces.items():
        dtype = max(dtypes[key], key=str) if like is None else like.dtype(key)
        arrays[key] = np.empty(parts[0].source_shape, dtype)
        for piece in parts:
            section = leaves[piece.destination][as_index(piece.destination_box)]
            arrays[key][as_index(piece.source_box)] = piece.to_source(section)
    return arrays
