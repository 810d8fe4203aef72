"""Distributed checkpoint (DCP) writer: chunks as they are added, then `.metadata`.

Source: pytorch torch/distributed/checkpoint/metadata.py::Metadata,
torch/distributed/checkpoint/filesystem.py::FileSystemWriter
"""

import dataclasses
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from bridge.formats._pickle_writer import Call, Name, Object, Pairs, encode_pickle
from bridge.formats._torch_dtypes import DTYPE_NAMES
from bridge.formats._torch_writer import TorchWriter
from bridge.megatron.read._dcp import METADATA_NAME

_DCP = "torch.distributed.checkpoint"


@dataclasses.dataclass(frozen=True)
class _Chunk:
    key: str
    offsets: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: np.dtype
    file: str
    offset: int
    nbytes: int


class DcpWriter:
    """Writer of a distributed checkpoint: appends chunks of tensors to files.

    Args:
      directory: Existing directory of the checkpoint.
      max_file_bytes: Size in bytes at which a file is closed and the next one started.
    """

    def __init__(self, directory: Path, max_file_bytes: int = 5 * 10**9):
        self._directory = directory
        self._max_file_bytes = max_file_bytes
        self._chunks: list[_Chunk] = []
        self._stream: BinaryIO | None = None
        self._num_files = 0

    def __enter__(self) -> "DcpWriter":
        return self

    def __exit__(self, *exception: Any) -> None:
        if self._stream is not None:
            self._stream.close()

    def add(self, key: str, offsets: tuple[int, ...], array: np.ndarray) -> None:
        """Writes one chunk of a tensor.

        Args:
          key: Key of the tensor.
          offsets: Start of the chunk in the tensor, one per dim of `array`.
          array: Values of the chunk.
        """
        stream = self._open()
        offset = stream.tell()
        with TorchWriter(stream) as writer:
            nbytes = writer.finish(writer.add(array))
        file = Path(stream.name).name
        self._chunks.append(
            _Chunk(key, offsets, array.shape, array.dtype, file, offset, nbytes)
        )

    def finish(self) -> None:
        """Writes `.metadata`; a tensor's shape is the extent of its chunks."""
        groups: dict[str, list[_Chunk]] = {}
        for chunk in self._chunks:
            groups.setdefault(chunk.key, []).append(chunk)
        state = {
            "state_dict_metadata": {k: _tensor(group) for k, group in groups.items()},
            "planner_data": None,
            "storage_data": Pairs(tuple(map(_place, self._chunks))),
        }
        metadata = Object(Name(f"{_DCP}.metadata.Metadata"), state)
        (self._directory / METADATA_NAME).write_bytes(encode_pickle(metadata))

    def _open(self) -> BinaryIO:
        if self._stream is None or self._stream.tell() >= self._max_file_bytes:
            if self._stream is not None:
                self._stream.close()
            file = self._directory / f"__0_{self._num_files}.distcp"
            self._stream, self._num_files = file.open("wb"), self._num_files + 1
        return self._stream


def _tensor(chunks: list[_Chunk]) -> Object:
    ends = [
        [start + size for start, size in zip(c.offsets, c.shape, strict=True)]
        for c in chunks
    ]
    layout = Call(Name("torch.serialization._get_layout"), ("torch.strided",))
    # 0 encodes torch.contiguous_format.
    memory = Call(Name(f"{_DCP}.metadata._MEM_FORMAT_ENCODING"), (0,))
    dtype = Name(f"torch.{DTYPE_NAMES[chunks[0].dtype]}")
    properties = (dtype, layout, False, memory, False)
    state = {
        "properties": Object(Name(f"{_DCP}.metadata.TensorProperties"), properties),
        "size": _size(tuple(map(max, zip(*ends, strict=True)))),
        "chunks": [
            Object(
                Name(f"{_DCP}.metadata.ChunkStorageMetadata"),
                {"offsets": _size(chunk.offsets), "sizes": _size(chunk.shape)},
            )
            for chunk in chunks
        ],
    }
    return Object(Name(f"{_DCP}.metadata.TensorStorageMetadata"), state)


def _place(chunk: _Chunk) -> tuple[Object, Object]:
    index = {"fqn": chunk.key, "offset": _size(chunk.offsets), "index": None}
    place = {
        "relative_path": chunk.file,
        "offset": chunk.offset,
        "length": chunk.nbytes,
    }
    return (
        Object(Name(f"{_DCP}.metadata.MetadataIndex"), index),
        Object(Name(f"{_DCP}.filesystem._StorageInfo"), place),
    )


def _size(values: tuple[int, ...]) -> Call:
    return Call(Name("torch.Size"), (values,))
