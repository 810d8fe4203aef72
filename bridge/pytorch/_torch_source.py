"""PyTorch's tensors as sources: modules and state dicts, in memory.

torch is imported only where there are tensors of it already, or to make some.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from bridge._box import as_index, complete
from bridge.formats._source import Source
from bridge.formats._torch_tensors import LazyTensor
from bridge.formats._torch_zip import TensorSource

_BITS = {1: "uint8", 2: "uint16", 4: "uint32"}


@dataclasses.dataclass(frozen=True, eq=False)
class HeldTensor:
    """A `torch.Tensor`, or an array of numpy or jax, as a source holds it.

    Args:
      value: The tensor.
    """

    value: Any

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape."""
        return tuple(self.value.shape)

    @property
    def dtype(self) -> np.dtype:
        """Its dtype, as numpy or ml_dtypes name it."""
        return jnp.dtype(str(self.value.dtype).removeprefix("torch."))

    def read(self, slices: tuple[slice, ...] = ()) -> np.ndarray:
        """Returns the tensor, or the box of it that `slices` says; a view if it can."""
        array = to_numpy(self.value, self.dtype)
        return array[as_index(complete(slices, array.shape))]


def hold(name: str, tensors: Mapping[str, Any]) -> Source:
    """Makes a source of tensors in memory.

    Args:
      name: What they are, for messages.
      tensors: `torch.Tensor`s, or arrays, by name.

    Raises:
      ValueError: If a value is no tensor with data, or a name no string; all of them
        are listed.
    """
    wrong = [
        f"  {key}: {problem}"
        for key, value in tensors.items()
        if (problem := _problem(key, value))
    ]
    if wrong:
        raise ValueError(f"{name} holds what is no tensor:\n" + "\n".join(wrong))
    return TensorSource(name, {key: HeldTensor(v) for key, v in tensors.items()})


def is_module(source: Any) -> bool:
    """Says whether something is an `nn.Module`, without importing torch."""
    return any(
        (base.__module__, base.__name__) == ("torch.nn.modules.module", "Module")
        for base in type(source).__mro__
    )


def tied_in(source: Source) -> dict[str, str]:
    """Returns the names of tensors that are another one again.

    They share memory, or the storage of a file; equal values are not enough.

    Returns:
      For each name, the first of its tensor.
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
    """Returns the values of a tensor; its own memory if it lies on the host."""
    if not hasattr(tensor, "detach"):
        return np.asarray(tensor)
    tensor = tensor.detach().cpu()
    if dtype.isbuiltin == 1:
        return tensor.numpy()
    import torch  # there is a tensor of it

    # numpy has no bfloat16 or float8 of its own, but their bits.
    return tensor.view(getattr(torch, _BITS[dtype.itemsize])).numpy().view(dtype)


def to_tensor(array: np.ndarray) -> Any:
    """Returns a `torch.Tensor` that keeps its values in the memory of an array."""
    import torch  # here alone tensors are made

    array = np.asarray(array, order="C")
    if array.dtype.isbuiltin == 1:
        return torch.from_numpy(array)
    bits = torch.from_numpy(array.view(_BITS[array.dtype.itemsize]))
    return bits.view(getattr(torch, array.dtype.name))


def _problem(key: Any, value: Any) -> str | None:
    if not isinstance(key, str):
        return "its name is no string"
    if not hasattr(value, "shape") or not hasattr(value, "dtype"):
        return f"a {type(value).__name__}; give the state dict itself"
    if getattr(value, "is_meta", False):
        return "it has no data (device 'meta')"
    if str(getattr(value, "layout", "torch.strided")) != "torch.strided":
        return f"its layout is {value.layout}; make it dense first"
    return None


def _memory(tensor: LazyTensor | HeldTensor, key: str) -> Any:
    """Returns what two tensors share if they are the same numbers in one place."""
    if 0 in tensor.shape:
        return key
    if isinstance(tensor, LazyTensor):
        place = id(tensor.archive), tensor.member, tensor.offset, tensor.strides
    elif hasattr(tensor.value, "data_ptr"):
        place = tensor.value.data_ptr(), tensor.value.stride(), tensor.value.device
    elif isinstance(tensor.value, np.ndarray):
        place = tensor.value.ctypes.data, tensor.value.strides
    else:
        place = id(tensor.value)
    return place, tensor.shape, tensor.dtype
