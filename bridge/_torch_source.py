"""PyTorch's tensors as a source: modules, state dicts, and files without pickles run.

torch is imported only when there are tensors of it, or to make some.
"""

import dataclasses
import functools
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from bridge._box import as_index, complete
from bridge._source import Source, open_checkpoint

_UNSIGNED = {1: "uint8", 2: "uint16", 4: "uint32", 8: "uint64"}


@dataclasses.dataclass(frozen=True)
class TensorSource:
    """A mapping of tensors, or of numpy arrays, seen as a source.

    Args:
      name: What they are, for messages.
      tensors: By name.
    """

    name: str
    tensors: Mapping[str, Any]

    def keys(self) -> tuple[str, ...]:
        """Names of all tensors."""
        return tuple(self.tensors)

    def shape(self, key: str) -> tuple[int, ...]:
        """Shape of one tensor."""
        return tuple(self.tensors[key].shape)

    def dtype(self, key: str) -> np.dtype:
        """Dtype of one tensor."""
        return dtype_of(self.tensors[key])

    def read(self, key: str, slices: tuple[slice, ...] = ()) -> np.ndarray:
        """Returns a tensor, or the box of it that `slices` says; a view if it can."""
        array = to_numpy(self.tensors[key])
        return array[as_index(complete(slices, array.shape))]

    @functools.cached_property
    def tied(self) -> dict[str, str]:
        """Names of tensors that are another one again, and that other's name."""
        first: dict[Any, str] = {}
        return {
            key: owner
            for key, tensor in self.tensors.items()
            if (owner := first.setdefault(_memory(tensor, key), key)) != key
        }


def open_torch(source: Any) -> Source:
    """Opens what `from_torch` takes; reads no weights.

    Args:
      source: An `nn.Module`, a state dict of tensors or numpy arrays, the path of a
        `.safetensors` file or of a directory with them, or a `Source`.

    Raises:
      FileNotFoundError: If nothing is at the path.
      ValueError: If the path is no checkpoint, or a value no tensor with data.
    """
    if isinstance(source, str | os.PathLike):
        return open_checkpoint(Path(source))
    if is_module(source):
        source = TensorSource(f"the {type(source).__name__}", source.state_dict())
    elif isinstance(source, Mapping):
        source = TensorSource("the state dict", source)
    else:
        return source
    wrong = [
        f"  {key}: {problem}"
        for key, value in source.tensors.items()
        if (problem := _problem(key, value))
    ]
    if wrong:
        raise ValueError(f"{source.name} holds what is no tensor:\n" + "\n".join(wrong))
    return source


def is_module(source: Any) -> bool:
    """Says whether something is an `nn.Module`, without importing torch."""
    return any(
        (base.__module__, base.__name__) == ("torch.nn.modules.module", "Module")
        for base in type(source).__mro__
    )


def dtype_of(tensor: Any) -> np.dtype:
    """Returns the dtype of a tensor, or of an array, as numpy's or ml_dtypes'."""
    return jnp.dtype(str(tensor.dtype).removeprefix("torch."))


def to_numpy(tensor: Any) -> np.ndarray:
    """Returns the values of a tensor; its memory if it lies on the host."""
    if isinstance(tensor, np.ndarray):
        return tensor
    tensor, dtype = tensor.detach().cpu(), dtype_of(tensor)
    if dtype.isbuiltin == 1:
        return tensor.numpy()
    import torch  # there is a tensor of it

    # numpy has no bfloat16 or float8 of its own, but their bits.
    bits = getattr(torch, _UNSIGNED[dtype.itemsize])
    return tensor.view(bits).numpy().view(dtype)


def to_tensor(array: np.ndarray) -> Any:
    """Returns a `torch.Tensor` that owns a copy of the values."""
    import torch  # here alone tensors are made

    array = np.array(array, order="C")
    if array.dtype.isbuiltin == 1:
        return torch.from_numpy(array)
    bits = torch.from_numpy(array.view(_UNSIGNED[array.dtype.itemsize]))
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


def _memory(tensor: Any, key: str) -> Any:
    """Returns what two tensors share if they are the same numbers in memory."""
    if 0 in tensor.shape:
        return key
    array = isinstance(tensor, np.ndarray)
    start = tensor.ctypes.data if array else tensor.data_ptr()
    strides = tensor.strides if array else tensor.stride()
    return start, tuple(tensor.shape), tuple(strides), str(tensor.dtype)
