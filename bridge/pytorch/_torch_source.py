"""Sources of PyTorch tensors in memory: modules and state dicts.

torch is imported only to read torch tensors, or to create them.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from bridge._box import as_index, complete
from bridge.formats._rank_shards import RankShards
from bridge.formats._source import Source
from bridge.formats._tensor_source import TensorSource
from bridge.formats._torch_tensors import LazyTensor

_BITS = {1: "uint8", 2: "uint16", 4: "uint32"}


@dataclasses.dataclass(frozen=True, eq=False)
class HeldTensor:
    """Tensor of a source in memory.

    Args:
      value: A `torch.Tensor`, or a numpy or jax array.
    """

    value: Any

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the tensor."""
        return tuple(self.value.shape)

    @property
    def dtype(self) -> np.dtype:
        """Dtype of the tensor, as a numpy or ml_dtypes dtype."""
        return jnp.dtype(str(self.value.dtype).removeprefix("torch."))

    def read(self, slices: tuple[slice, ...] = ()) -> np.ndarray:
        """Returns the tensor, or the region selected by `slices`, as a view."""
        array = to_numpy(self.value, self.dtype)
        return array[as_index(complete(slices, array.shape))]


def hold(name: str, tensors: Mapping[str, Any]) -> Source:
    """Returns a source of tensors in memory.

    Args:
      name: Name of the source, for messages.
      tensors: `torch.Tensor`s or arrays by name.

    Raises:
      ValueError: If a value is not a dense tensor with data, or a name is not a
        string. All are listed.
    """
    wrong = [
        f"  {key}: {problem}"
        for key, value in tensors.items()
        if (problem := _problem(key, value))
    ]
    if wrong:
        raise ValueError(
            f"{name} holds values that are not tensors:\n" + "\n".join(wrong)
        )
    return TensorSource(name, {key: HeldTensor(v) for key, v in tensors.items()})


def is_module(source: Any) -> bool:
    """Returns whether an object is an `nn.Module`, without importing torch."""
    return any(
        (base.__module__, base.__name__) == ("torch.nn.modules.module", "Module")
        for base in type(source).__mro__
    )


def tied_in(source: Source) -> dict[str, str]:
    """Returns the names of tied tensors.

    Tied tensors share memory, or the storage of a file; equal values do not suffice.

    Returns:
      First name of the same tensor, for each tied name other than the first.
    """
    if not isinstance(source, TensorSource):
        return {}
    first: dict[Any, str] = {}
    return {
        key: owner
        for key, tensor in source.tensors.items()
        if (owner := first.setdefault(_memory(tensor, key), key)) != key
    }


def to_numpy(tensor: Any, dtype: np.dtype) -> np.ndarray:
    """Returns a tensor as a numpy array; a view if it is on the host."""
    if not hasattr(tensor, "detach"):
        return np.asarray(tensor)
    tensor = tensor.detach().cpu().resolve_conj().resolve_neg()
    if dtype.isbuiltin == 1:
        return tensor.numpy()
    import torch  # already loaded: `tensor` is one of torch

    # torch does not convert bfloat16 or float8 to numpy, but converts their bits.
    return tensor.view(getattr(torch, _BITS[dtype.itemsize])).numpy().view(dtype)


def to_tensor(array: np.ndarray) -> Any:
    """Returns a `torch.Tensor` that shares the memory of a C-ordered array."""
    import torch  # optional: only needed to create tensors

    array = np.asarray(array, order="C")
    if array.dtype.isbuiltin == 1:
        return torch.from_numpy(array)
    bits = torch.from_numpy(array.view(_BITS[array.dtype.itemsize]))
    return bits.view(getattr(torch, array.dtype.name))


def _problem(key: Any, value: Any) -> str | None:
    if not isinstance(key, str):
        return "its name is not a string"
    if not hasattr(value, "shape") or not hasattr(value, "dtype"):
        return f"a {type(value).__name__}; give the state dict itself"
    if getattr(value, "is_meta", False):
        return "it has no data (device 'meta')"
    if str(getattr(value, "layout", "torch.strided")) != "torch.strided":
        return f"its layout is {value.layout}; make it dense first"
    return None


def _memory(tensor: LazyTensor | HeldTensor | RankShards, key: str) -> Any:
    """Returns a key that is equal for tensors that are the same region of memory."""
    if 0 in tensor.shape:
        return key
    if isinstance(tensor, RankShards):
        return tensor.shape, tuple(_memory(part, "") for part in tensor.copies[0])
    if isinstance(tensor, LazyTensor):
        views = tensor.is_conjugate, tensor.is_negative
        place = id(tensor.archive), tensor.member, tensor.offset, tensor.strides, views
    elif hasattr(tensor.value, "data_ptr"):
        views = tensor.value.is_conj(), tensor.value.is_neg()
        place = (
            tensor.value.data_ptr(),
            tensor.value.stride(),
            tensor.value.device,
            views,
        )
    elif isinstance(tensor.value, np.ndarray):
        place = tensor.value.ctypes.data, tensor.value.strides
    else:
        place = id(tensor.value)
    return place, tensor.shape, tensor.dtype
