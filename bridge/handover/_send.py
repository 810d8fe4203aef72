"""Weights through a socket, tensor by tensor, with checksums.

The stream: the length of a JSON header, 8 bytes little-endian; the header, with the
name, dtype and shape of each tensor; the bytes of each tensor, C-ordered and
little-endian, and behind them their SHA-256. The receiver then returns the SHA-256 of
all these digests.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import socket
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
import numpy as np
from jaxtyping import DTypeLike

from bridge.formats._safetensors import DTYPE_NAMES
from bridge.handover._named_tensors import prepare
from bridge.handover.receiver import FORMAT, read_exactly
from bridge.models import DecoderConfig
from bridge.streaming._export import tensors_of
from bridge.streaming._files import Entries
from bridge.streaming._processes import agreeing


@dataclasses.dataclass(frozen=True)
class Sent:
    """Confirmation of a receiver.

    Attributes:
      tensors: Number of tensors.
      bytes: Bytes of the tensors.
      sha256: Digest of the digests of all tensors, hexadecimal.
    """

    tensors: int
    bytes: int
    sha256: str


def send_weights(
    connection: socket.socket | None,
    params: Any,
    config: DecoderConfig,
    *,
    dtype: DTypeLike | None = None,
    metadata: Mapping[str, Any] | None = None,
) -> Sent | None:
    """Sends the weights of a sharded tree to a rollout engine, by their HF names.

    One tensor is gathered while the one before it is sent. `receive_weights` is the
    other end; it needs neither jax nor this package.

    Args:
      connection: Connected stream socket, whose timeout applies; None in all processes
        of a job but the first, all of which must call this alike.
      params: Pytree of arrays, sharded in any way, as `bridge.load_hf` returns it.
      config: Config of the model.
      dtype: Floating dtype to send; None for those of the leaves.
      metadata: JSON values for the receiver, such as the step.

    Returns:
      What the receiver has confirmed; None without a connection.

    Raises:
      ValueError: If tree and config do not fit; nothing is then sent. Or if the
        receiver confirms other bytes.
      OSError: If the connection fails, or ends before the receiver has confirmed.
    """
    with agreeing():
        entries, pieces, leaves = prepare(params, config, dtype)
        if (connection is None) != (jax.process_index() > 0):
            raise ValueError(
                f"send_weights in process {jax.process_index()}: the first process of "
                "a job has the connection, and the others pass None."
            )
        if connection is not None:
            connection.sendall(_header(entries, metadata or {}))
    stream = _Stream(connection)
    try:
        for _, tensor in tensors_of(entries, pieces, leaves):
            with agreeing():
                stream.put(tensor)
        with agreeing():
            return stream.finish()
    finally:
        stream.thread.shutdown()


def _header(entries: Entries, metadata: Mapping[str, Any]) -> bytes:
    tensors = [
        [name, DTYPE_NAMES[dtype], list(shape)]
        for name, (shape, dtype) in entries.items()
    ]
    header = {"format": FORMAT, "metadata": dict(metadata), "tensors": tensors}
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text


class _Stream:
    """Sends in a background thread, one tensor behind.

    Args:
      connection: Socket; None to discard all data.
    """

    def __init__(self, connection: socket.socket | None):
        self.thread = ThreadPoolExecutor(1)
        self._connection = connection
        self._digests = hashlib.sha256()
        self._tensors = self._bytes = 0
        self._pending: list[Future[None]] = []

    def put(self, tensor: np.ndarray) -> None:
        """Waits for the previous tensor, then starts to send this one."""
        self._wait()
        if self._connection is not None:
            self._pending.append(self.thread.submit(self._send, tensor))

    def finish(self) -> Sent | None:
        """Waits until the receiver has confirmed all tensors."""
        self._wait()
        if self._connection is None:
            return None
        wanted = self._digests.digest()
        found = bytes(read_exactly(self._connection, 32, "the receiver's confirmation"))
        if found != wanted:
            raise ValueError(
                f"The receiver confirms SHA-256 {found.hex()} of {self._tensors} "
                f"tensors, and {wanted.hex()} was sent."
            )
        return Sent(self._tensors, self._bytes, wanted.hex())

    def _send(self, tensor: np.ndarray) -> None:
        assert self._connection is not None
        data = tensor.reshape(-1).view(np.uint8).data
        digest = hashlib.sha256(data).digest()
        self._connection.sendall(data)
        self._connection.sendall(digest)
        self._digests.update(digest)
        self._tensors, self._bytes = self._tensors + 1, self._bytes + data.nbytes

    def _wait(self) -> None:
        while self._pending:
            self._pending.pop().result()
