"""Random messages of strangers at the coordinator's port: no job may be lost by them.

    python benchmarks/coordinator_fuzz.py [--messages 10000] [--jobs 20] [--out FILE]

Each job has a coordinator with a token and two processes. Strangers, who do not know
the token, send messages before the processes have come and after the job has started:
valid ones with fields exchanged, removed, mistyped or enlarged, bytes flipped, lines
cut and joined, nesting, and random bytes. A job is lost if it does not start, or if a
process is told an end, before both have left. It exits with 1 if one is.

The messages are those of fsdp_jax's own protocol; jax's service is another port.
"""

from __future__ import annotations

import argparse
import copy
import json
import random
import socket
import string
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from typing import Any

import result

from fsdp_jax.launch._client import Client, attend
from fsdp_jax.launch._coordinator import Coordinator
from fsdp_jax.launch._handshake import Handshake
from fsdp_jax.launch._protocol import GREETING, encode, sign
from fsdp_jax.launch._timeouts import Timeouts

_TIMEOUTS = Timeouts(start_secs=30)


def fuzz(messages: int, jobs: int, seed: int = 0) -> dict[str, int]:
    """Sends random messages to the coordinators of jobs, one job after the other.

    Returns:
      Numbers of messages and jobs, and of those lost.
    """
    rng = random.Random(seed)
    sent = lost = 0
    for _ in range(jobs):
        count = messages // jobs
        lost += not _survives(rng, count)
        sent += count
    return {"messages": sent, "jobs": jobs, "jobs_lost": lost}


def _survives(rng: random.Random, messages: int) -> bool:
    """Returns whether a job starts and goes on while strangers send messages."""
    token = f"{rng.getrandbits(128):032x}"
    with closing(Coordinator(2, token=token, report=lambda text: None)) as opened:
        _shout(rng, opened.port, messages // 2)
        try:
            with ThreadPoolExecutor(2) as pool:
                members = list(
                    pool.map(lambda rank: _attend(opened.port, rank, token), (0, 1))
                )
        except ValueError as error:
            print(error, file=sys.stderr)
            return False
        _shout(rng, opened.port, messages - messages // 2)
        time.sleep(0.2)  # for an end of the job to be told
        going_on = all(member._listener.is_alive() for member in members)
        for member in members:
            member.leave()
        return going_on


def _attend(port: int, rank: int, token: str) -> Client:
    return attend("127.0.0.1", port, _handshake(rank), _TIMEOUTS, token)


def _handshake(rank: int) -> Handshake:
    return Handshake(rank, 2, "here", 100 + rank, 5000 * (rank == 0), {})


def _shout(rng: random.Random, port: int, messages: int) -> None:
    """Sends messages over connections of a few messages each."""
    while messages > 0:
        count = min(messages, rng.choice((1, 1, 1, 2, 5, 20)))
        with suppress(OSError), socket.create_connection(("127.0.0.1", port)) as one:
            one.settimeout(5)
            nonce = json.loads(one.makefile("rb").readline()).get("nonce", "")
            for _ in range(count):
                one.sendall(random_message(rng, nonce))
            if rng.random() < 0.5:  # Else it goes without a word.
                one.shutdown(socket.SHUT_WR)
                one.recv(4096)
        messages -= count


def random_message(rng: random.Random, nonce: str) -> bytes:
    """Returns the bytes of one message that nobody with the token would send."""
    base = copy.deepcopy(rng.choice(_messages(rng, nonce)))
    for _ in range(rng.choice((0, 1, 1, 2, 4))):
        base = _changed(rng, base)
    try:
        line = encode(base)
    except (RecursionError, ValueError):
        line = b"[" * 10_000 + b"\n"
    return rng.choice(_SPOILT)(rng, line) if rng.random() < 0.4 else line


def _messages(rng: random.Random, nonce: str) -> list[Any]:
    claim = _handshake(rng.choice((0, 1, 1, 2, -1))).to_message()
    return [
        sign(claim, nonce, "a guess"),
        sign(claim, "another nonce", ""),
        claim,
        {**GREETING, "nonce": nonce},
        {"phase": "training", "step": rng.randrange(100), "secs": rng.random()},
        {"failed": "a stranger says so"},
        {"left": True},
        {"refused": "a stranger says so"},
        {"end": "a stranger says so"},
        {"service": 1, "beat_secs": 1},
    ]


def _changed(rng: random.Random, value: Any) -> Any:
    """Returns a message with one field changed, at any depth."""
    if not isinstance(value, dict) or not value:
        return rng.choice(_VALUES)
    name = rng.choice(list(value))
    what = rng.randrange(5)
    if what == 0:
        del value[name]
    elif what == 1:
        value[rng.choice(_NAMES)] = rng.choice(_VALUES)
    elif what == 2:
        other = rng.choice(list(value))
        value[name], value[other] = value[other], value[name]
    else:
        value[name] = _changed(rng, value[name])
    return value


_NAMES = ["rank", "proof", "handshake", "facts", "step", "left", "failed", "", "\0"]
_VALUES = [
    *(None, True, False, 0, -1, 2**31, 2**70, 1.5, 1e308, float("nan"), float("inf")),
    *("", "0", "x" * 5000, "\ud800", "\0", [], [[]], {}, {"a": {"b": []}}),
    [0] * 1000,
]


def _flipped(rng: random.Random, line: bytes) -> bytes:
    changed = bytearray(line)
    for _ in range(rng.choice((1, 2, 8))):
        changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
    return bytes(changed)


_SPOILT: list[Callable[[random.Random, bytes], bytes]] = [
    _flipped,
    lambda rng, line: line[: rng.randrange(len(line))],
    lambda rng, line: line.strip() + line,
    lambda rng, line: line * rng.choice((2, 10)),
    lambda rng, line: b"[" * rng.choice((10, 1000, 50_000)) + line,
    lambda rng, line: rng.randbytes(rng.choice((1, 100, 10_000))) + b"\n",
    lambda rng, line: b"GET /" + rng.choice(string.ascii_letters).encode() + b"\r\n",
    lambda rng, line: b"x" * rng.choice((2**16, 2**20 + 1, 2**21)),
]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--messages", type=int, default=10_000)
    parser.add_argument("--jobs", type=int, default=20)
    result.add_arguments(parser)
    options = parser.parse_args()
    conditions = result.begin(options, ("jax", "fsdp-jax"))
    start = time.monotonic()
    found = fuzz(options.messages, options.jobs)
    seconds = round(time.monotonic() - start, 1)
    result.write(options, conditions, {**found, "seconds": seconds})
    return 1 if found["jobs_lost"] else 0


if __name__ == "__main__":
    sys.exit(main())
