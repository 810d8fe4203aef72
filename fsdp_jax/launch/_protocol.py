"""Wire protocol of a job's processes: one JSON object per line, over TCP.

The coordinator greets each connection, so that a process detects within seconds that
another program listens at the address.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import json
import math
from typing import Any

Message = dict[str, Any]

LONGEST_SECS = 1e8
"""Longest time that a process waits for an answer: three years."""

GREETING: Message = {"coordinator": "fsdp_jax", "version": 3}
MAX_BYTES = 2**20


def encode(message: Message) -> bytes:
    """Encodes a message."""
    return json.dumps(message).encode() + b"\n"


def decode(line: bytes) -> Message:
    """Decodes a message.

    Raises:
      ValueError: If it is not a JSON object.
    """
    try:
        message = json.loads(line)
    except RecursionError as error:
        raise ValueError("a message is nested too deeply") from error
    if not isinstance(message, dict):
        raise ValueError(f"a message is a JSON object, not {line[:80]!r}")
    return message


def sign(handshake: Message, nonce: str, token: str) -> Message:
    """Returns a handshake with the proof that its sender knows the token of the job.

    Args:
      handshake: Handshake message.
      nonce: Random text of the coordinator's greeting, so that proofs differ.
      token: Secret of the job.
    """
    return {"handshake": handshake, "proof": _proof(handshake, nonce, token)}


def check_signature(message: Message, nonce: str, token: str) -> Message | None:
    """Returns the handshake in a message; None if its sender does not know the token.

    Raises:
      ValueError: If it is not a signed handshake.
    """
    handshake, proof = message.get("handshake"), message.get("proof")
    if not isinstance(handshake, dict) or not isinstance(proof, str):
        raise ValueError("no signed handshake of a process")
    known = hmac.compare_digest(
        _proof(handshake, nonce, token).encode(), proof.encode()
    )
    return handshake if known else None


def check_report(message: Message) -> Message:
    """Returns a message of a process of the job: a heartbeat, or how it ended.

    Raises:
      ValueError: If it is neither.
    """
    match message:
        case {"phase": str(), "step": int() | None, "secs": int() | float() as secs}:
            if len(message) == 3 and math.isfinite(secs) and secs >= 0:
                return message
        case {"failed": str()} | {"left": True}:
            if len(message) == 1:
                return message
    raise ValueError(f"no message of a process: {message!r:.80}")


def _proof(handshake: Message, nonce: str, token: str) -> str:
    text = f"{nonce} {json.dumps(handshake, sort_keys=True)}"
    return hmac.new(token.encode(), text.encode(), hashlib.sha256).hexdigest()


def is_loopback(host: str) -> bool:
    """Returns whether only this machine reaches a server at `host`.

    Other names of a loopback address do not count: systems often give one to their own
    host name, and the coordinator then listens at all addresses.
    """
    try:
        return ipaddress.ip_address(host.partition("%")[0]).is_loopback
    except ValueError:
        return host == "localhost"


def split_address(address: str) -> tuple[str, int]:
    """Returns host and port of `host:port` or `[host]:port`.

    Raises:
      ValueError: If `address` has neither form.
    """
    host, colon, port = address.rpartition(":")
    if not (host and colon and port.isdecimal() and int(port) < 2**16):
        raise ValueError(
            f"'{address}' is not an address of a coordinator: write it as host:port."
        )
    return host.removeprefix("[").removesuffix("]"), int(port)
