"""The safetensors format: dtype names, and validating header reader and writer.

A file is `u64 little-endian n | n bytes of JSON | data`. The safetensors package is
not used because its numpy API has no float8 and silently saves a transposed view as
the wrong bytes (https://github.com/safetensors/safetensors/issues/825).

Source: https://github.com/huggingface/safetensors#format
"""

import dataclasses
import json
import math
import reprlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from bridge.formats._json import parse_json
from bridge.formats._other_formats import describe_content
from bridge.formats._regular_file import check_regular_file

DTYPES: dict[str, np.dtype] = {
    "BOOL": np.dtype(np.bool_),
    "U8": np.dtype(np.uint8),
    "I8": np.dtype(np.int8),
    "U16": np.dtype("<u2"),
    "I16": np.dtype("<i2"),
    "U32": np.dtype("<u4"),
    "I32": np.dtype("<i4"),
    "U64": np.dtype("<u8"),
    "I64": np.dtype("<i8"),
    "F16": np.dtype("<f2"),
    "F32": np.dtype("<f4"),
    "F64": np.dtype("<f8"),
    "C64": np.dtype("<c8"),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
}
DTYPE_NAMES: dict[np.dtype, str] = {dtype: name for name, dtype in DTYPES.items()}

# Limit of the safetensors package.
_MAX_HEADER_BYTES = 100_000_000
# numpy's limits on the number of dims and on the bytes of an array.
_MAX_DIMS = 64
_MAX_BYTES = 2**63 - 1
# Data aligned to a cache line can be passed to a device without a copy.
_ALIGNMENT_BYTES = 64


@dataclasses.dataclass(frozen=True)
class TensorInfo:
    """Location of one tensor.

    Args:
      file: Path of the file that stores the tensor.
      shape: Shape of the tensor.
      dtype: Dtype of the tensor.
      offset: Position of its first byte, from the start of the file.
    """

    file: Path
    shape: tuple[int, ...]
    dtype: np.dtype
    offset: int

    @property
    def nbytes(self) -> int:
        """Size of the tensor in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


def read_header(file: Path) -> dict[str, TensorInfo]:
    """Reads and validates the header of one file, but no data.

    Args:
      file: Path of a `.safetensors` file.

    Returns:
      Location of each tensor by name, in the header's order.

    Raises:
      ValueError: If the file is not safetensors, is truncated, or its tensors do not
        cover the data exactly once. All invalid tensors are listed.
    """
    header, data_start, data_bytes = _read_json(file)
    tensors, spans, wrong = {}, [], _wrong_metadata(header.pop("__metadata__", {}))
    for name, entry in header.items():
        try:
            info, end = _parse_entry(file, entry, data_start)
        except ValueError as error:
            wrong.append(f"  {name!r}: {error}")
            continue
        tensors[name] = info
        spans.append((info.offset - data_start, end, name))
    # Skipped if a tensor cannot be parsed: its bytes would be reported as a gap.
    wrong = wrong or _misplaced(spans, data_bytes)
    if wrong:
        raise ValueError(f"'{file}' is damaged:\n" + "\n".join(wrong))
    return tensors


def read_metadata(file: Path) -> dict[str, str]:
    """Returns the texts that a file's header holds beside its tensors, by name.

    Args:
      file: Path of a `.safetensors` file that `read_header` accepts.
    """
    return _read_json(file)[0].get("__metadata__", {})


def encode_header(
    entries: dict[str, tuple[tuple[int, ...], np.dtype]],
    metadata: Mapping[str, str] | None = None,
) -> bytes:
    """Returns the header of a file whose tensors are written consecutively.

    Args:
      entries: Shape and dtype by name, in the order the data will be written.
      metadata: Texts by name, to write beside the tensors.

    Returns:
      Length and JSON, padded so that the data starts on a cache line.

    Raises:
      ValueError: If a dtype or a name cannot be stored; all are listed.
    """
    wrong = [
        f"  '{name}': {dtype} is none of {', '.join(DTYPES)}"
        for name, (_, dtype) in entries.items()
        if dtype not in DTYPE_NAMES
    ]
    if "__metadata__" in entries:
        wrong.append("  '__metadata__': the name of the file's texts, not of a tensor")
    if wrong:
        raise ValueError(
            "safetensors files cannot hold these tensors:\n"
            + "\n".join(wrong)
            + "\nCast them, rename them, or leave them out."
        )
    # transformers rejects files without this metadata.
    header: dict[str, Any] = {"__metadata__": {"format": "pt", **(metadata or {})}}
    offset = 0
    for name, (shape, dtype) in entries.items():
        end = offset + math.prod(shape) * dtype.itemsize
        header[name] = {
            "dtype": DTYPE_NAMES[dtype],
            "shape": list(shape),
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-(8 + len(text)) % _ALIGNMENT_BYTES)
    return len(text).to_bytes(8, "little") + text


def _read_json(file: Path) -> tuple[dict[str, Any], int, int]:
    check_regular_file(file)
    file_bytes = file.stat().st_size
    with file.open("rb") as stream:
        head = stream.read(64)
        length = int.from_bytes(head[:8], "little")
        # The brace is checked before a length that is plausible by chance allocates.
        if (
            file_bytes < 8
            or length > min(file_bytes - 8, _MAX_HEADER_BYTES)
            or head[8:9] != b"{"
        ):
            raise ValueError(
                f"'{file}' is not a safetensors file, or is cut short: it has "
                f"{file_bytes:,} bytes, its header would have {length:,} (at most "
                f"{_MAX_HEADER_BYTES:,} are accepted) and begin with {head[8:9]!r}. "
                + (describe_content(head) or "Download it again.")
            )
        stream.seek(8)
        header = parse_json(stream.read(length), f"The header of '{file}'")
    return header, 8 + length, file_bytes - 8 - length


def _wrong_metadata(metadata: Any) -> list[str]:
    if isinstance(metadata, dict) and all(
        isinstance(value, str) for value in metadata.values()
    ):
        return []
    return [f"  '__metadata__': {reprlib.repr(metadata)} is not text by name"]


def _parse_entry(file: Path, entry: Any, data_start: int) -> tuple[TensorInfo, int]:
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise ValueError("is not described by dtype, shape and data_offsets alone")
    name, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(name, str) or name not in DTYPES:
        raise ValueError(f"dtype {reprlib.repr(name)} is none of {', '.join(DTYPES)}")
    _check_shape(shape, DTYPES[name])
    if not _are_sizes(offsets) or len(offsets) != 2:
        raise ValueError(
            f"data_offsets {reprlib.repr(offsets)} are not two byte positions"
        )
    start, end = offsets
    info = TensorInfo(file, tuple(shape), DTYPES[name], data_start + start)
    if end - start != info.nbytes:
        raise ValueError(
            f"{name} of shape {info.shape} needs {info.nbytes:,} bytes, "
            f"but data_offsets {offsets} hold {end - start:,}"
        )
    return info, end


def _check_shape(shape: Any, dtype: np.dtype) -> None:
    if not _are_sizes(shape):
        raise ValueError(f"shape {reprlib.repr(shape)} is not a list of sizes")
    if len(shape) > _MAX_DIMS:
        raise ValueError(f"{len(shape):,} dims are more than {_MAX_DIMS}")
    # Sizes of 0 count as 1: the array would be empty, but numpy's strides overflow.
    if math.prod(size or 1 for size in shape) * dtype.itemsize > _MAX_BYTES:
        raise ValueError(f"shape {reprlib.repr(shape)} is larger than any file")


def _are_sizes(values: Any) -> bool:
    return isinstance(values, list) and all(
        isinstance(v, int) and not isinstance(v, bool) and 0 <= v <= _MAX_BYTES
        for v in values
    )


def _misplaced(spans: list[tuple[int, int, str]], data_bytes: int) -> list[str]:
    """Describes overlaps, gaps and trailing bytes, which the format forbids."""
    wrong, expected = [], 0
    for start, end, name in sorted(spans):
        if end > data_bytes:
            wrong.append(
                f"  {name!r}: bytes {start:,} to {end:,} lie past the end of the data "
                f"({data_bytes:,} bytes); the file may be cut short"
            )
        elif start != expected:
            kind = (
                "overlaps the tensor before it" if start < expected else "follows a gap"
            )
            wrong.append(f"  {name!r}: starts at {start:,}, not {expected:,}: {kind}")
        expected = end
    if not wrong and expected != data_bytes:
        wrong.append(
            f"  {data_bytes - expected:,} bytes at the end belong to no tensor"
        )
    return wrong
