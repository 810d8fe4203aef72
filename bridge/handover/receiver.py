"""The receiving end of `send_weights`, for the environment of a rollout engine.

This file needs the standard library and torch alone. Where this package and jax are
not installed, as beside vLLM or SGLang, copy it.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import socket
from collections.abc import Iterator
from typing import Any

FORMAT = "bridge-weights-1"
"""Name and version of the stream."""

# A header is some 100 bytes a tensor; more than this is another protocol.
_MAX_HEADER = 1 << 28
_DIGEST = 32
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
            digest = hashlib.sha256(data).digest()
            if read_exactly(self.connection, _DIGEST, name) != digest:
                raise ValueError(
                    f"'{name}' of {len(data)} bytes has SHA-256 {digest.hex()}, which "
                    "is not that of the sender. Ask for the weights again."
                )
            digests.update(digest)
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
    size = int.from_bytes(read_exactly(connection, 8, "the header"), "little")
    if size > _MAX_HEADER:
        raise ValueError(f"A header of {size} bytes is none of {FORMAT}.")
    header = read_exactly(connection, size, "the header")
    try:
        found, metadata, tensors = _parse(header)
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f"The header is none of {FORMAT}: {error!r}.") from error
    if found != FORMAT:
        raise ValueError(f"The sender has the format {found!r}, and this is {FORMAT}.")
    if unknown := sorted({kind for _, kind, _ in tensors} - _TORCH_DTYPES.keys()):
        raise ValueError(f"torch has no dtype for {', '.join(unknown)}.")
    return ReceivedWeights(connection, metadata, tensors)


def _parse(text: bytearray) -> tuple[str, dict[str, Any], list[Any]]:
    header = json.loads(text)
    tensors = [
        (str(n), str(kind), tuple(shape)) for n, kind, shape in header["tensors"]
    ]
    sizes = [size for _, _, shape in tensors for size in shape]
    if not all(type(size) is int and size >= 0 for size in sizes):
        raise ValueError("a shape is no list of sizes")
    return header["format"], dict(header["metadata"]), tensors


def read_exactly(connection: socket.socket, size: int, what: str) -> bytearray:
    """Reads bytes from a socket.

    Args:
      connection: Socket.
      size: Number of bytes.
      what: What they are, for the message.

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
