"""Changes of weights through a socket, by tensor and range, with checksums.

The stream: the length of a JSON header, 8 bytes little-endian; the header, with name,
dtype, shape, number of ranges and of elements, and checksum before and after of each
tensor that changed; for each tensor its ranges, pairs of uint32 (elements since the end
of the range before, elements of this one), the new elements, and the SHA-256 of both.
The receiver then returns the SHA-256 of all these digests, or zeros if it refuses.
"""

from __future__ import annotations

import hashlib
import json
import socket
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Int64, UInt32

from bridge.formats._safetensors import DTYPE_NAMES
from bridge.handover._changes import TensorChanges
from bridge.handover._send import Sent
from bridge.handover.receiver import CHANGES_FORMAT, read_exactly

_MAX_GAP = (1 << 32) - 1


def send_changes(
    connection: socket.socket,
    changes: Sequence[TensorChanges],
    *,
    metadata: Mapping[str, Any] | None = None,
) -> Sent:
    """Sends changes to a rollout engine, which `receive_changes` takes.

    In a job of several processes the first one sends, as it has the changes of all.

    Args:
      connection: Connected stream socket, whose timeout applies.
      changes: Changes from `changed_weights`.
      metadata: JSON values for the receiver, such as the step.

    Returns:
      What the receiver has applied and confirmed.

    Raises:
      ValueError: If the receiver has other weights than those of the snapshot, and has
        changed nothing: send all with `send_weights`.
      OSError: If the connection fails, or ends before the receiver has confirmed.
    """
    ranges = [ranges_of(change.positions) for change in changes]
    tensors = [
        [change.name, DTYPE_NAMES[change.values.dtype], list(change.shape)]
        + [len(runs), len(change.values)]
        + [f"{change.before:016x}", f"{change.after:016x}"]
        for change, runs in zip(changes, ranges, strict=True)
    ]
    header = {"format": CHANGES_FORMAT, "metadata": dict(metadata or {})}
    text = json.dumps({**header, "tensors": tensors}).encode()
    connection.sendall(len(text).to_bytes(8, "little") + text)
    digests, sent = hashlib.sha256(), 0
    for change, runs in zip(changes, ranges, strict=True):
        data = runs.astype("<u4").tobytes() + change.values.tobytes()
        digest = hashlib.sha256(data).digest()
        connection.sendall(data)
        connection.sendall(digest)
        digests.update(digest)
        sent += len(data)
    wanted = digests.digest()
    found = bytes(read_exactly(connection, 32, "the receiver's confirmation"))
    if not any(found):
        raise ValueError(
            f"The receiver has other weights than the snapshot, and refuses changes of "
            f"{len(changes)} tensors. Send all with send_weights."
        )
    if found != wanted:
        raise ValueError(
            f"The receiver confirms SHA-256 {found.hex()} of {len(changes)} tensors, "
            f"and {wanted.hex()} was sent."
        )
    return Sent(len(changes), sent, wanted.hex())


def ranges_of(positions: Int64[np.ndarray, " changed"]) -> UInt32[np.ndarray, "runs 2"]:
    """Returns ranges of positions that follow each other.

    Args:
      positions: Ascending positions.

    Returns:
      For each range the elements between it and the one before, and its own. A gap
      that 32 bits do not hold is several, with empty ranges between.
    """
    first = np.flatnonzero(np.diff(positions, prepend=-2) != 1)
    lengths = np.diff(first, append=len(positions))
    starts = positions[first]
    gaps = starts - np.concatenate([[0], starts[:-1] + lengths[:-1]]).astype(np.int64)
    while len(large := np.flatnonzero(gaps > _MAX_GAP)):
        lengths = np.insert(lengths, large, 0)
        gaps[large] -= _MAX_GAP
        gaps = np.insert(gaps, large, _MAX_GAP)
    return np.stack([gaps, lengths], axis=1).astype(np.uint32)
