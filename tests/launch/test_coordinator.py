"""Over real sockets: what each process of a job that cannot start is told, and when."""

from __future__ import annotations

import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager

import pytest
from helpers.errors import facts

from fsdp_jax.launch._client import attend
from fsdp_jax.launch._coordinator import Coordinator
from fsdp_jax.launch._handshake import Handshake
from fsdp_jax.launch._protocol import GREETING, encode, split_address
from fsdp_jax.launch._timeouts import Timeouts

QUICK = Timeouts(start_secs=1, silent_secs=1, report_secs=1, stall_secs=1)
UNUSED = Timeouts(start_secs=20)


def handshake(rank: int, size: int = 2, **facts: str) -> Handshake:
    return Handshake(rank, size, "here", 100 + rank, 5000 * (rank == 0), facts)


@contextmanager
def coordinator(num_processes: int = 2, **options):
    with closing(Coordinator(num_processes, **options)) as opened:
        yield opened


def outcomes(
    port: int, handshakes: list[Handshake], timeouts: Timeouts = UNUSED, token: str = ""
) -> list[str]:
    """What becomes of each that attends: an error, or `ValueError: ...`."""

    def one(handshake: Handshake) -> str:
        try:
            client = attend("127.0.0.1", port, handshake, timeouts, token)
            client.leave()  # or it would end this process with the coordinator
            return f"service {client.service}"
        except ValueError as error:
            return f"ValueError: {error}"

    with ThreadPoolExecutor(len(handshakes)) as pool:
        return list(pool.map(one, handshakes))


def test_all_are_told_where_jax_meets():
    with coordinator() as opened:
        found = outcomes(opened.port, [handshake(1), handshake(0)])
    assert found == ["service 5000"] * 2


@pytest.mark.parametrize(
    "handshakes, says",
    [
        (
            [handshake(0), handshake(1, size=3)],
            "has 3 processes; the coordinator was told 2",
        ),
        ([handshake(0), handshake(0)], "process 0 came 2 times"),
        ([handshake(0), handshake(5)], "process 5 (here, pid 105) is none of 0 to 1"),
        (
            [handshake(0, lr="1"), handshake(1, lr="2")],
            "lr differs: 1 in process 0; 2 in",
        ),
    ],
    ids=["another size", "twice the same", "out of range", "another config"],
)
def test_who_does_not_agree_is_one_error_in_all_within_seconds(handshakes, says):
    began = time.monotonic()
    with coordinator() as opened:
        found = outcomes(opened.port, handshakes)
    assert len(set(found)) == 1 and says in found[0]
    assert time.monotonic() - began < 5


def test_a_process_that_does_not_come_is_named():
    with coordinator(3, timeouts=QUICK, report=lambda text: None) as opened:
        found = outcomes(opened.port, [handshake(0, 3), handshake(2, 3)], QUICK)
    assert all("process 1 of 3 had not come" in each for each in found)


def test_a_taken_port_is_an_error_of_the_coordinator():
    with coordinator() as opened:
        with pytest.raises(ValueError, match=facts(opened.port, "127.0.0.1")):
            Coordinator(2, port=opened.port)


@contextmanager
def stranger(says: bytes):
    """Another program that listens, and says something."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            connection, _ = server.accept()
            with connection:
                connection.sendall(says)

        thread = threading.Thread(target=serve)
        thread.start()
        yield server.getsockname()[1]
        thread.join()


@pytest.mark.parametrize(
    "says",
    [
        b"HTTP/1.1 400 Bad Request\r\n\r\n",
        b"",
        b"[]\n",
        encode({**GREETING, "version": 0}),
    ],
    ids=["http", "nothing", "no object", "another version"],
)
def test_another_program_at_the_port_is_an_error_of_the_others(says):
    with (
        stranger(says) as port,
        pytest.raises(ValueError, match=facts(f"127.0.0.1:{port}", "fsdp_jax")),
    ):
        attend("127.0.0.1", port, handshake(1), UNUSED)


def test_an_address_where_nobody_listens_is_an_error():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with pytest.raises(ValueError, match=facts(f"127.0.0.1:{port}", "Errno")):
        attend("127.0.0.1", port, handshake(1), QUICK)


def test_who_sends_nonsense_does_not_disturb_the_others():
    with coordinator() as opened:
        for nonsense in (b"GET / HTTP/1.1\r\n\r\n", b"{}\n", b"[1]\n", b"\xff\xff\n"):
            with socket.create_connection(("127.0.0.1", opened.port)) as other:
                other.sendall(nonsense)
        assert (
            outcomes(opened.port, [handshake(0), handshake(1)]) == ["service 5000"] * 2
        )


@pytest.mark.parametrize(
    "address, parts",
    [("a.b:1", ("a.b", 1)), ("[fe80::1]:80", ("fe80::1", 80))],
)
def test_an_address_is_host_and_port(address, parts):
    assert split_address(address) == parts


@pytest.mark.parametrize("address", ["host", "host:", ":80", "host:x", "host:99999"])
def test_what_is_no_address_is_refused(address):
    with pytest.raises(ValueError, match=facts(repr(address), "host:port")):
        split_address(address)
