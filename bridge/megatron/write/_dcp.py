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
from bridge.megatron.read._dcp import METADATA_NAME, StatePath

_DCP = "torch.distributed.checkpoint"


@dataclasses.dataclass(frozen=True)
class _Place:
    file: str
    offset: int
    nbytes: int


@dataclasses.dataclass(frozen=True)
class _Chunk:
    key: str
    offsets: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: np.dtype
    place: _Place


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
        self._items: dict[str, _Place] = {}
        self._paths: dict[str, StatePath] = {}
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
        place = _Place(Path(stream.name).name, offset, nbytes)
        self._chunks.append(_Chunk(key, offsets, array.shape, array.dtype, place))

    def add_item(self, key: str, value: Any) -> None:
        """Writes an object that is not a tensor: a plain value or a placeholder."""
        stream = self._open()
        offset = stream.tell()
        with TorchWriter(stream) as writer:
            nbytes = writer.finish(value)
        self._items[key] = _Place(Path(stream.name).name, offset, nbytes)

    def add_raw(self, key: str, archive: bytes) -> None:
        """Writes an object that is not a tensor, as the bytes of its archive."""
        stream = self._open()
        place = _Place(Path(stream.name).name, stream.tell(), len(archive))
        stream.write(archive)
        self._items[key] = place

    def add_entry(self, path: StatePath, value: Any) -> None:
        """Writes an entry of a nested state dict, under the key that torch gives it.

        Args:
          path: Keys that lead to the entry.
          value: Array, plain value or placeholder.
        """
        key = ".".join(map(str, path))
        self.add_path(key, path)
        if isinstance(value, np.ndarray):
            self.add(key, (0,) * value.ndim, value)
        else:
            self.add_item(key, value)

    def add_path(self, key: str, path: StatePath) -> None:
        """Writes that an entry, added by its key, is one of a nested state dict.

        Args:
          key: Key of the entry.
          path: Keys that lead to it.
        """
        self._paths[key] = path

    def finish(self) -> None:
        """Writes `.metadata`; a tensor's shape is the extent of its chunks."""
        groups: dict[str, list[_Chunk]] = {}
        for chunk in self._chunks:
            groups.setdefault(chunk.key, []).append(chunk)
        entries = {key: _tensor(group) for key, group in groups.items()}
        empty = Object(Name(f"{_DCP}.metadata.BytesStorageMetadata"), {})
        entries |= dict.fromkeys(self._items, empty)
        places = [_located(c.key, _size(c.offsets), c.place) for c in self._chunks]
        places += [_located(key, None, place) for key, place in self._items.items()]
        state = {
            "state_dict_metadata": entries,
            "planner_data": self._paths or None,
            "storage_data": Pairs(tuple(places)),
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


def _located(key: str, offset: Call | None, place: _Place) -> tuple[Object, Object]:
    index = {"fqn": key, "offset": offset, "index": None}
    state = {
        "relative_path": place.file,
        "offset": place.offset,
        "length": place.nbytes,
    }
    return (
        Object(Name(f"{_DCP}.metadata.MetadataIndex"), index),
        Object(Name(f"{_DCP}.filesystem._StorageInfo"), state),
    )


def _size(values: tuple[int, ...]) -> Call:
    return Call(Name("torch.Size"), (values,))
