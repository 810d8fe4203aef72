"""Wire protocol of a job's processes: one JSON object per line, over TCP.

The coordinator greets each connection, so that a process detects within seconds that
another program listens at the address.
"""

from __future__ import annotations

import json
from typing import Any

Message = dict[str, Any]

GREETING: Message = {"coordinator": "fsdp_jax", "version": 1}
MAX_BYTES = 2**20


def encode(message: Message) -> bytes:
    """Encodes a message."""
    return json.dumps(message).encode() + b"\n"


def decode(line: bytes) -> Message:
    """Decodes a message.

    Raises:
      ValueError: If it is not a JSON object.
    """
    message = json.loads(line)
    if not isinstance(message, dict):
        raise ValueError(f"a message is a JSON object, not {line[:80]!r}")
    return message


def split_address(address: str) -> tuple[str, int]:
    """Returns host and port of `host:port` or `[host]:port`.

    Raises:
      ValueError: If `address` has neither form.
    """
    host, colon, port = address.rpartition(":")
    if not (host and colon and port.isdecimal() and int(port) < 2**16):
        raise ValueError(
            f"'{address}' is no address of a coordinator: write it as host:port."
        )
    return host.removeprefix("[").removesuffix("]"), int(port)
