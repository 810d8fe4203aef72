"""The receiving end of `send_weights` and `send_changes`, for a rollout engine.

This file needs the standard library and torch alone. Where this package and jax are
not installed, as beside vLLM or SGLang, copy it.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import socket
from collections.abc import Callable, Iterator, Mapping
from typing import Any

FORMAT = "bridge-weights-1"
"""Name and version of the stream of `send_weights`."""

CHANGES_FORMAT = "bridge-weight-changes-1"
"""Name and version of the stream of `send_changes`."""

# A header is some 100 bytes a tensor; more than this is another protocol.
_MAX_HEADER = 1 << 28
_DIGEST = 32
# The numbers of bridge/handover/_checksum.py, as signed integers.
_POSITION, _BITS = -7046029254386353131, -3335678366873096957
_FIRST, _SECOND = -4658895280553007687, -7723592293110705685
_MAX_ELEMENTS = 1 << 20
_TORCH_DTYPES = {
    "F64": ("float64", 8),
    "F32": ("float32", 4),
    "F16": ("float16", 2),
    "BF16": ("bfloat16", 2),
    "F8_E4M3": ("float8_e4m3fn", 1),
    "F8_E5M2": ("float8_e5m2", 1),
    "I64": ("int64", 8),
    "I32": ("int32", 4),
    "I16": ("int16", 2),
    "I8": ("int8", 1),
    "U8": ("uint8", 1),
    "BOOL": ("bool", 1),
}


@dataclasses.dataclass(frozen=True, eq=False)
class ReceivedWeights:
    """Weights that arrive while they are iterated over, once.

    Attributes:
      connection: Socket that they come from.
      metadata: JSON values of the sender.
      tensors: Name, dtype and shape of each tensor, in the order in which they come.
    """

    connection: socket.socket
    metadata: dict[str, Any]
    tensors: list[tuple[str, str, tuple[int, ...]]]

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        """Yields name and `torch.Tensor` of each tensor whose checksum is right.

        After the last one the sender gets its confirmation. What was yielded before an
        error is right, but not all: an engine that loads tensors as they come then has
        a mixture. `dict(weights)` has all or raises, in the memory of all.

        Raises:
          ValueError: If a tensor is not what was sent.
          ConnectionError: If the sender has gone.
        """
        import torch

        digests = hashlib.sha256()
        for name, dtype, shape in self.tensors:
            kind, itemsize = _TORCH_DTYPES[dtype]
            data = read_exactly(self.connection, math.prod(shape) * itemsize, name)
            digests.update(_checked(self.connection, name, data))
            flat = torch.empty(0, dtype=getattr(torch, kind))
            if data:
                flat = torch.frombuffer(data, dtype=getattr(torch, kind))
            yield name, flat.reshape(shape)
        self.connection.sendall(digests.digest())


def receive_weights(connection: socket.socket) -> ReceivedWeights:
    """Receives what `send_weights` sends.

    ```
    weights = receive_weights(connection)
    model.load_weights(weights)  # vLLM
    ```

    Args:
      connection: Connected stream socket, whose timeout applies.

    Returns:
      Weights, which arrive as they are iterated over.

    Raises:
      ValueError: If the stream is none of `send_weights`.
      ConnectionError: If the sender has gone.
    """
    return ReceivedWeights(connection, *_read_header(connection, FORMAT, _parse))


def receive_changes(connection: socket.socket) -> ReceivedChanges:
    """Receives what `send_changes` sends, to the end; `apply` confirms it.

    ```
    receive_changes(connection).apply(dict(model.named_parameters()))
    ```

    Args:
      connection: Connected stream socket, whose timeout applies.

    Returns:
      Changes, in memory.

    Raises:
      ValueError: If the stream is none of `send_changes`, or was changed on the way.
      ConnectionError: If the sender has gone.
    """
    metadata, headers = _read_header(connection, CHANGES_FORMAT, _parse_changes)
    digests, tensors = hashlib.sha256(), []
    for header in headers:
        size = 8 * header.runs + header.count * _TORCH_DTYPES[header.dtype][1]
        data = read_exactly(connection, size, header.name)
        digests.update(_checked(connection, header.name, data))
        tensors.append((header, data))
    return ReceivedChanges(connection, metadata, tensors, digests.digest())


@dataclasses.dataclass(frozen=True)
class ChangeHeader:
    """Header of the changes of a tensor.

    Attributes:
      name: HF name.
      dtype: Dtype, as safetensors names it.
      shape: Shape of the tensor.
      runs: Number of ranges of changed elements.
      count: Number of changed elements.
      before: Checksum of the tensor before.
      after: Checksum of the tensor with the changes.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    runs: int
    count: int
    before: int
    after: int


@dataclasses.dataclass(frozen=True, eq=False)
class ReceivedChanges:
    """Changes that have arrived and are not applied yet.

    Attributes:
      connection: Socket that they came from.
      metadata: JSON values of the sender.
      tensors: Header and bytes of each tensor.
      digest: SHA-256 of the SHA-256 of all tensors, which confirms them.
    """

    connection: socket.socket
    metadata: dict[str, Any]
    tensors: list[tuple[ChangeHeader, bytearray]]
    digest: bytes

    def apply(self, weights: Mapping[str, Any]) -> None:
        """Changes tensors in place, if all are those that the sender started from.

        The sender gets its confirmation, or a refusal if nothing was changed.

        Args:
          weights: Tensors of the engine by their HF names, in the dtype that is sent,
            on any device.

        Raises:
          ValueError: If a tensor is missing, or is not that of the sender's snapshot:
            nothing is changed. Or if one is wrong afterwards.
        """
        if wrong := [
            x for header, _ in self.tensors if (x := _misfit(header, weights))
        ]:
            self.connection.sendall(bytes(_DIGEST))
            raise ValueError(
                "These changes are for other weights; nothing was changed: "
                f"{'; '.join(wrong)}. Ask for all weights (send_weights)."
            )
        for header, data in self.tensors:
            _apply(header, data, weights[header.name])
        after = {header.name: header.after for header, _ in self.tensors}
        if bad := [n for n, x in after.items() if checksum_of(weights[n]) != x]:
            raise ValueError(
                f"After the changes {', '.join(bad)} have other checksums than in the "
                "trainer. Ask for all weights (send_weights)."
            )
        self.connection.sendall(self.digest)


def _misfit(header: ChangeHeader, weights: Mapping[str, Any]) -> str | None:
    """Returns why the changes of a tensor cannot be applied; None if they can."""
    name, tensor = header.name, weights.get(header.name)
    if tensor is None:
        return f"{name} is missing"
    kind = f"torch.{_TORCH_DTYPES[header.dtype][0]}"
    if (str(tensor.dtype), tuple(tensor.shape)) != (kind, header.shape):
        return (
            f"{name} is {tensor.dtype} {tuple(tensor.shape)}, not {kind} {header.shape}"
        )
    if (found := checksum_of(tensor)) != header.before:
        return f"{name} has checksum {found:016x}, not {header.before:016x}"
    return None


def _apply(header: ChangeHeader, data: bytearray, tensor: Any) -> None:
    import torch

    runs = torch.frombuffer(data, dtype=torch.int32, count=2 * header.runs)
    gaps, lengths = (runs.reshape(-1, 2).long() & 0xFFFFFFFF).unbind(1)
    starts = (gaps + lengths).cumsum(0) - lengths
    before = lengths.cumsum(0) - lengths
    positions = torch.arange(header.count) + (starts - before).repeat_interleave(
        lengths
    )
    kind = _integers(tensor)
    values = torch.frombuffer(data, dtype=kind, offset=8 * header.runs)
    with torch.no_grad():
        flat = tensor.detach().reshape(-1)  # a copy, if the tensor is not contiguous
        flat.view(kind)[positions.to(flat.device)] = values.to(flat.device)
        if flat.data_ptr() != tensor.data_ptr():
            tensor.copy_(flat.reshape(tensor.shape))


def checksum_of(tensor: Any) -> int:
    """Returns the checksum of a tensor, as the sender computes it from its shards.

    The sum modulo 2**64 of a number for each element, mixed of its position and its
    bits as splitmix64 mixes. It finds accidents, and is no protection against intent.

    Args:
      tensor: `torch.Tensor` on any device.
    """
    import torch

    kind, total = _integers(tensor), 0
    mask = (1 << 8 * tensor.element_size()) - 1 if kind != torch.int64 else -1
    flat = tensor.detach().reshape(-1).view(kind)
    for start in range(0, len(flat), _MAX_ELEMENTS):
        part = flat[start : start + _MAX_ELEMENTS].long() & mask
        mixed = torch.arange(start, start + len(part), device=flat.device) * _POSITION
        mixed += (part + 1) * _BITS
        mixed = (mixed ^ _shifted(mixed, 30)) * _FIRST
        mixed = (mixed ^ _shifted(mixed, 27)) * _SECOND
        total += int((mixed ^ _shifted(mixed, 31)).sum())
    return total % (1 << 64)


def _shifted(mixed: Any, bits: int) -> Any:
    """Shifts 64-bit integers right as unsigned ones, which torch has not."""
    return (mixed >> bits) & ((1 << 64 - bits) - 1)


def _integers(tensor: Any) -> Any:
    import torch

    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return kinds[tensor.element_size()]


def _read_header(
    connection: socket.socket, name: str, parse: Callable[[Any], list[Any]]
) -> tuple[dict[str, Any], list[Any]]:
    """Reads the header of a stream: its metadata, and what `parse` makes of tensors."""
    size = int.from_bytes(read_exactly(connection, 8, "the header"), "little")
    if size > _MAX_HEADER:
        raise ValueError(f"A header of {size} bytes is not one of {name}.")
    text = read_exactly(connection, size, "the header")
    try:
        header = json.loads(text)
        found, metadata = header["format"], dict(header["metadata"])
        tensors = parse(header["tensors"]) if found == name else []
        unknown = {each[1] for each in header["tensors"]} - _TORCH_DTYPES.keys()
    except (ValueError, TypeError, KeyError, IndexError) as error:
        raise ValueError(f"The header is none of {name}: {error!r}.") from error
    if found != name:
        raise ValueError(f"The sender has the format {found!r}, and this is {name}.")
    if unknown:
        raise ValueError(f"torch has no dtype for {', '.join(sorted(unknown))}.")
    return metadata, tensors


def _parse(tensors: Any) -> list[tuple[str, str, tuple[int, ...]]]:
    return [(str(n), str(kind), _sizes(shape)) for n, kind, shape in tensors]


def _parse_changes(tensors: Any) -> list[ChangeHeader]:
    return [
        ChangeHeader(
            str(name),
            str(kind),
            _sizes(shape),
            *_sizes([runs, count]),
            *(int(each, 16) for each in checksums),
        )
        for name, kind, shape, runs, count, *checksums in tensors
    ]


def _sizes(found: Any) -> tuple[int, ...]:
    if not all(type(size) is int and size >= 0 for size in found):
        raise ValueError("a shape is not a list of sizes")
    return tuple(found)


def _checked(connection: socket.socket, name: str, data: bytearray) -> bytes:
    """Reads the SHA-256 behind a tensor's bytes, and compares it with theirs."""
    digest = hashlib.sha256(data).digest()
    if read_exactly(connection, _DIGEST, name) != digest:
        raise ValueError(
            f"'{name}' of {len(data)} bytes has SHA-256 {digest.hex()}, which is not "
            "that of the sender. Ask for the weights again."
        )
    return digest


def read_exactly(connection: socket.socket, size: int, what: str) -> bytearray:
    """Reads bytes from a socket.

    Args:
      connection: Socket.
      size: Number of bytes.
      what: Word for the bytes, for the message.

    Raises:
      ConnectionError: If the other end closes the connection before.
    """
    data = bytearray(size)
    rest = memoryview(data)
    while rest:
        count = connection.recv_into(rest)
        if not count:
            raise ConnectionError(
                f"The connection was closed {len(rest)} bytes before the end of "
                f"{what}: read the output of the other process."
            )
        rest = rest[count:]
    return data
