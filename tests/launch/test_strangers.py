"""Whatever a stranger sends to the coordinator's port, the job starts and runs on."""

from __future__ import annotations

import json
import math
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager

import pytest
from coordinator_fuzz import fuzz
from helpers.errors import facts

from fsdp_jax.launch import _coordinator
from fsdp_jax.launch._client import Client, attend
from fsdp_jax.launch._coordinator import Coordinator
from fsdp_jax.launch._handshake import Handshake
from fsdp_jax.launch._protocol import (
    Message,
    check_report,
    check_signature,
    decode,
    encode,
    sign,
)
from fsdp_jax.launch._timeouts import Timeouts

TOKEN = "the secret of the job"
PATIENCE = Timeouts(start_secs=20)


def handshake(rank: int, **fields) -> Handshake:
    return Handshake(rank, 2, "here", 100 + rank, 5000 * (rank == 0), fields)


def connect(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), timeout=5)


@contextmanager
def coordinator() -> Iterator[Coordinator]:
    with closing(Coordinator(2, token=TOKEN, report=lambda text: None)) as opened:
        yield opened


def start(port: int) -> list[Client]:
    """Both processes of the job come, one after the other has connected."""
    with ThreadPoolExecutor(2) as pool:
        return list(
            pool.map(
                lambda rank: attend(
                    "127.0.0.1", port, handshake(rank), PATIENCE, TOKEN
                ),
                (0, 1),
            )
        )


def greeting_of(connection: socket.socket) -> Message:
    return json.loads(connection.makefile("rb").readline())


def impostor(port: int, **changes) -> Message:
    """What a stranger is told that handshakes a rank without the token."""
    with connect(port) as connection:
        nonce = greeting_of(connection)["nonce"]
        message = handshake(1).to_message() | changes
        connection.sendall(encode(sign(message, nonce, "a guess")))
        return json.loads(connection.makefile("rb").readline() or b"{}")


def test_a_claim_without_the_token_is_refused_and_the_job_starts():
    with coordinator() as opened:
        told = impostor(opened.port)
        with pytest.raises(ValueError, match=facts("process 1", "FSDP_JAX_TOKEN")):
            raise ValueError(told["refused"])
        with pytest.raises(ValueError, match=facts("process 0", "FSDP_JAX_TOKEN")):
            attend("127.0.0.1", opened.port, handshake(0), PATIENCE, "another")
        members = start(opened.port)
        assert impostor(opened.port)["refused"]  # nor later
        for member in members:
            member.leave()


def test_a_proof_is_of_use_for_one_connection_alone():
    message = handshake(1).to_message()
    signed = sign(message, "nonce", TOKEN)
    assert check_signature(signed, "nonce", TOKEN) == message
    assert check_signature(signed, "another", TOKEN) is None
    assert (
        check_signature(signed | {"handshake": message | {"rank": 0}}, "nonce", TOKEN)
        is None
    )
    assert TOKEN not in json.dumps(signed)


MISTYPED = [
    {"rank": []},
    {"rank": "x"},
    {"rank": True},
    {"rank": 2**70},
    {"num_processes": None},
    {"facts": 7},
    {"facts": {"lr": 1}},
    {"facts": {"lr": "x" * 2000}},
    {"service": -1},
    {"service": 2**16},
    {"pid": 1.5},
    {"host": {}},
    {"more": 1},
]


@pytest.mark.parametrize("changes", MISTYPED, ids=str)
def test_a_claim_with_a_mistyped_field_is_none(changes):
    with pytest.raises(ValueError):
        Handshake.from_message(handshake(1).to_message() | changes)


VALUES = [None, True, -1, 2**70, 0.5, math.nan, math.inf, "x", [], [1], {}, {"a": 1}]
FIELDS = ["phase", "step", "secs", "failed", "left", "handshake", "proof"]


@pytest.mark.parametrize("value", VALUES, ids=str)
def test_a_message_is_one_of_three_kinds_or_an_error(value):
    right = {"phase": "training", "step": 3, "secs": 0.5}
    changed = [base | {field: value} for base in (right, {}) for field in FIELDS]
    for message in (*changed, {"handshake": {}, "proof": value}):
        try:
            report = check_report(message)
        except ValueError:
            continue
        kinds = ({"phase", "step", "secs"}, {"failed"}, {"left"})
        assert set(report) in kinds
        secs = report.get("secs", 0)
        assert math.isfinite(secs) and secs >= 0
    with pytest.raises(ValueError):
        check_signature({"handshake": value}, "nonce", TOKEN)


NONSENSE = [
    b"\n",
    b"GET / HTTP/1.1\r\n\r\n",
    b"{}\n",
    b"[1]\n",
    b"\xff\xff\n",
    b"[" * 100_000 + b"\n",
    b'{"a":' * 100_000 + b"\n",
    b"x" * 2_000_000,
    b'{"handshake": {"rank": []}, "proof": ""}\n',
    b'{"handshake": [], "proof": {}}\n',
    b'{"failed": "x"}\n',
    b'{"left": true}\n',
]


def test_nonsense_before_and_after_the_start_ends_no_job():
    with coordinator() as opened, ExitStack() as held:
        for nonsense in NONSENSE:
            shout(opened.port, nonsense)
        members = start(opened.port)
        for nonsense in NONSENSE:
            shout(opened.port, nonsense)
        # The members still report, and nobody was told an end.
        for member in members:
            held.callback(member.leave)
        time.sleep(0.2)
        assert all(not member._over.is_set() for member in members)
        assert all(member._listener.is_alive() for member in members)


def shout(port: int, text: bytes) -> None:
    with connect(port) as connection:
        try:
            connection.sendall(text)
        except OSError:
            pass  # The coordinator has closed the connection: that is its right.


def test_a_message_too_deep_is_a_value_error():
    with pytest.raises(ValueError):
        decode(b"[" * 100_000)


def test_idle_connections_are_closed_for_those_that_come_after(monkeypatch):
    monkeypatch.setattr(_coordinator, "_MAX_UNIDENTIFIED", 8)
    with coordinator() as opened, ExitStack() as held:
        idle = [held.enter_context(connect(opened.port)) for _ in range(40)]
        members = start(opened.port)
        assert len(opened._unidentified) <= 8
        for member in members:
            member.leave()
        closed = sum(is_closed(one) for one in idle)
        assert closed >= 40 - 8


def is_closed(connection: socket.socket) -> bool:
    connection.settimeout(0.2)
    try:
        return not connection.recv(4096) or not connection.recv(4096)
    except TimeoutError:
        return False
    except OSError:
        return True


def test_a_connection_that_sends_no_claim_in_time_is_closed(monkeypatch):
    monkeypatch.setattr(_coordinator, "_HANDSHAKE_SECS", 0.2)
    with coordinator() as opened, connect(opened.port) as slow:
        slow.sendall(b"{")
        time.sleep(0.6)
        assert is_closed(slow)
        for member in start(opened.port):
            member.leave()


@pytest.mark.parametrize(
    "host, expected",
    [
        ("localhost", {"127.0.0.1"}),
        ("127.0.0.1", {"127.0.0.1"}),
        ("127.0.0.2", {"127.0.0.2"}),
        ("::1", {"::1"}),
        ("192.0.2.1", {"::", "0.0.0.0"}),  # of no machine: of a proxy, perhaps
        ("no-such-host.invalid", {"::", "0.0.0.0"}),
    ],
)
def test_the_coordinator_listens_where_it_is_told(host, expected):
    if host == "::1" and not socket.has_dualstack_ipv6():
        expected = {"::", "0.0.0.0"}
    with closing(_coordinator._listening(host, 0)) as listening:
        assert listening.getsockname()[0] in expected


def test_random_messages_of_strangers_lose_no_job():
    found = fuzz(messages=300, jobs=2, seed=1)  # 10,000 in benchmarks
    assert found == {"messages": 300, "jobs": 2, "jobs_lost": 0}
