"""Streaming writer of files for `torch.load`, without torch.

Source: pytorch torch/serialization.py::_save, torch/_utils.py::_rebuild_tensor_v2
"""

import math
import zipfile
from collections.abc import Iterable
from typing import Any, BinaryIO

import numpy as np

from bridge.formats._pickle_writer import Call, External, Name, encode_pickle
from bridge.formats._torch_dtypes import DTYPE_NAMES, STORAGE_NAMES

_LOCAL_HEADER_BYTES = 30
_ZIP64_EXTRA_BYTES = 20
_ZIP64_FROM_BYTES = 2**31 - 1
# Same as torch: tensors of a memory-mapped file are then aligned.
_ALIGNMENT_BYTES = 64
_BLOCK_BYTES = 2**23


class TorchWriter:
    """Writer of one archive: tensors one at a time, then the tree that names them.

    Used as a context manager. Without a call of `finish` the archive is not readable.

    Args:
      stream: Stream to write to, from its current position on.
    """

    def __init__(self, stream: BinaryIO):
        self._sink = _Sink(stream)
        self._zip = zipfile.ZipFile(self._sink, "w")
        self._num_tensors = 0

    def __enter__(self) -> "TorchWriter":
        return self

    def __exit__(self, *exception: Any) -> None:
        # Otherwise the destructor of ZipFile would write to a closed stream.
        self._zip.close()

    def add(self, array: np.ndarray) -> Call:
        """Writes a tensor, and returns its placeholder for the tree.

        Raises:
          ValueError: If torch has no such dtype.
        """
        return self.add_parts(array.shape, array.dtype, [array])

    def add_parts(
        self, shape: tuple[int, ...], dtype: np.dtype, parts: Iterable[np.ndarray]
    ) -> Call:
        """Writes a tensor whose values come one after the other.

        Args:
          shape: Shape of the tensor.
          dtype: Dtype of the tensor and of all parts.
          parts: Arrays whose elements, in C order, are those of the tensor in C order.

        Raises:
          ValueError: If torch has no such dtype, or the parts have another dtype or
            number of elements; the file is then not usable.
        """
        if dtype not in DTYPE_NAMES:
            raise ValueError(f"torch has no dtype {dtype}.")
        key = str(self._num_tensors)
        self._num_tensors += 1
        nbytes = math.prod(shape) * dtype.itemsize
        self._write(f"data/{key}", nbytes, (_bytes(part, dtype) for part in parts))
        return _tensor(key, shape, dtype)

    def finish(self, tree: Any) -> int:
        """Writes the tree, closes the archive, and returns its length in bytes.

        Raises:
          ValueError: If the tree contains an object that is not a plain value.
        """
        members = {"data.pkl": encode_pickle(tree), "byteorder": b"little"}
        for name, data in {**members, "version": b"3\n"}.items():
            self._write(name, len(data), [data])
        self._zip.close()
        return self._sink.count

    def _write(
        self, name: str, nbytes: int, parts: Iterable[bytes | memoryview]
    ) -> None:
        info = zipfile.ZipInfo(f"archive/{name}")
        zip64 = nbytes > _ZIP64_FROM_BYTES
        before = self._sink.count + _LOCAL_HEADER_BYTES + len(info.filename)
        before += 4 + (_ZIP64_EXTRA_BYTES if zip64 else 0)
        # The extra field "FB" of torch's own writer: a tensor's bytes begin aligned.
        padding = -before % _ALIGNMENT_BYTES
        info.extra = b"FB" + padding.to_bytes(2, "little") + b"Z" * padding
        written = 0
        with self._zip.open(info, "w", force_zip64=zip64) as member:
            for part in parts:
                for start in range(0, len(part), _BLOCK_BYTES):
                    member.write(part[start : start + _BLOCK_BYTES])
                written += len(part)
        if written != nbytes:
            raise ValueError(
                f"'{name}' should have {nbytes:,} bytes, and was given {written:,}."
            )


class _Sink:
    """Counting stream without `tell`: zipfile then counts offsets from 0."""

    def __init__(self, stream: BinaryIO):
        self._stream = stream
        self.count = 0

    def write(self, data: Any) -> int:
        self._stream.write(data)
        self.count += len(data)
        return len(data)

    def flush(self) -> None:
        self._stream.flush()

    def close(self) -> None:
        """Leaves the stream open: other archives may follow in it."""


def _bytes(array: np.ndarray, dtype: np.dtype) -> memoryview:
    if array.dtype != dtype:
        raise ValueError(f"A part of a {dtype} tensor is of {array.dtype}.")
    # The recorded strides are those of C order, so views are copied.
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def _tensor(key: str, shape: tuple[int, ...], dtype: np.dtype) -> Call:
    strides = tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))
    hooks = Call(Name("collections.OrderedDict"), ())
    num_elements = math.prod(shape)
    if dtype in STORAGE_NAMES:
        kind = Name(f"torch.{STORAGE_NAMES[dtype]}")
        storage = External(("storage", kind, key, "cpu", num_elements))
        args = (storage, 0, shape, strides, False, hooks)
        return Call(Name("torch._utils._rebuild_tensor_v2"), args)
    kind = Name("torch.storage.UntypedStorage")
    storage = External(("storage", kind, key, "cpu", num_elements * dtype.itemsize))
    named = Name(f"torch.{DTYPE_NAMES[dtype]}")
    args = (storage, 0, shape, strides, False, hooks, named)
    return Call(Name("torch._utils._rebuild_tensor_v3"), args)
