"""One rank's part of a distributed tensor (DTensor), as torch pickles it.

Source: pytorch torch/distributed/tensor/_api.py::DTensor,
torch/_utils.py::_rebuild_wrapper_subclass
"""

import dataclasses
import reprlib
from typing import Any

from bridge.formats._unpickle import Stub


@dataclasses.dataclass(frozen=True)
class LocalShard:
    """One rank's part of a distributed tensor.

    Args:
      local: Lazy tensor of the rank's values.
      shape: Shape of the distributed tensor.
      dim: Dim that is split over the ranks; None if each rank has all of it.
    """

    local: Any = dataclasses.field(repr=False)
    shape: tuple[int, ...]
    dim: int | None


def local_shard(args: tuple[Any, ...], state: Any) -> LocalShard:
    """Interprets the pickle of a DTensor.

    Args:
      args: Arguments of `_rebuild_wrapper_subclass`: the class, the dtype, the shape of
        the distributed tensor and more.
      state: Attributes of the DTensor, or a pair of those in its dict and its slots.

    Raises:
      ValueError: If the tensor is split over several dims of the mesh, or in a form
        whose order of ranks is not the order of the values.
    """
    of_class, _, shape = args[:3]
    if not all(isinstance(size, int) for size in shape):
        raise ValueError(f"{reprlib.repr(shape)} is not the shape of a tensor")
    pair = state if isinstance(state, tuple) else (state,)
    attributes = {key: value for part in pair for key, value in (part or {}).items()}
    local = attributes.get("_local_tensor")
    if not of_class.name.endswith(".DTensor") or local is None:
        raise ValueError(f"tensors of the type {of_class.name} are not read")
    placements = [_placement(stub) for stub in attributes["_spec"].state["placements"]]
    dims = [dim for dim in placements if dim is not None]
    if len(dims) > 1 or (dims and placements[-1] is None):
        raise ValueError(
            f"a tensor of shape {tuple(shape)} is split as {placements} over its mesh; "
            "only a split over the last dim of the mesh is read"
        )
    return LocalShard(local, tuple(shape), dims[0] if dims else None)


def _placement(stub: Stub) -> int | None:
    kind = stub.name.rpartition(".")[2]
    if kind == "Replicate":
        return None
    if kind != "Shard":
        raise ValueError(f"a tensor is placed as {kind}, which is not read")
    return int(stub.state["dim"] if stub.state else stub.args[0])
