"""The relay between a process and jax's service passes on all, and the end late."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

import fsdp_jax
from fsdp_jax.launch import _relay
from fsdp_jax.launch._protocol import split_address

FILE = Path(fsdp_jax.__file__).parent / "launch" / "_relay.py"
LATE_SECS = 0.6
# A parent that starts a relay, which it says the port of, and ends when it is told.
PARENT = """
import importlib.util, sys
spec = importlib.util.spec_from_file_location("relay", sys.argv[1])
relay = importlib.util.module_from_spec(spec)
spec.loader.exec_module(relay)
address, child = relay.start_relay("127.0.0.1", int(sys.argv[2]))
child.returncode = 0
print(address.partition(":")[2], child.pid, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def service():
    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.settimeout(20)
        yield listening


@pytest.fixture
def port(service, monkeypatch, tmp_path):
    """The port of a relay to the service, which is late by LATE_SECS."""
    text = FILE.read_text()
    assert "_LATE_SECS = 10.0" in text
    file = tmp_path / "relay.py"
    file.write_text(text.replace("_LATE_SECS = 10.0", f"_LATE_SECS = {LATE_SECS}"))
    monkeypatch.setattr(_relay, "__file__", str(file))
    address, child = _relay.start_relay(*service.getsockname())
    with child:
        yield split_address(address)[1]
        child.kill()


def connected(service, port):
    """Both ends of a connection through the relay."""
    process = socket.create_connection(("127.0.0.1", port), timeout=20)
    accepted, _ = service.accept()
    accepted.settimeout(20)
    return process, accepted


def test_bytes_pass_both_ways_and_the_end_of_the_process_at_once(service, port):
    process, accepted = connected(service, port)
    sent = os.urandom(300_000)
    with process, accepted:
        process.sendall(b"ping")
        assert accepted.recv(100) == b"ping"
        accepted.sendall(sent)
        got = b""
        while len(got) < len(sent):
            got += process.recv(2**16)
        assert got == sent
        began = time.monotonic()
        process.close()
        assert accepted.recv(1) == b""
        assert time.monotonic() - began < LATE_SECS


def test_the_end_of_the_service_is_passed_on_late(service, port):
    process, accepted = connected(service, port)
    with process:
        began = time.monotonic()
        accepted.close()
        assert process.recv(1) == b""
        assert time.monotonic() - began >= LATE_SECS


def test_a_service_that_begins_later_is_awaited(monkeypatch):
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        address, child = _relay.start_relay(*held.getsockname())
        host, port = split_address(address)
        with child, socket.create_connection((host, port), timeout=20) as process:
            process.sendall(b"early")
            time.sleep(0.2)
            held.listen()
            held.settimeout(20)
            accepted, _ = held.accept()
            with accepted:
                assert accepted.recv(100) == b"early"
            child.kill()


def test_a_relay_ends_with_its_process(service):
    program = [sys.executable, "-I", "-S", "-c", PARENT, str(FILE)]
    with subprocess.Popen(
        [*program, str(service.getsockname()[1])],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as parent:
        assert parent.stdout is not None
        port, pid = map(int, parent.stdout.readline().split())
        process, accepted = connected(service, port)
        with process, accepted:
            parent.kill()
            assert accepted.recv(1) == b""  # long before this process closes its end
    with pytest.raises(ProcessLookupError):
        for _ in range(200):
            os.kill(pid, 0)
            time.sleep(0.05)


@pytest.mark.parametrize(
    ("variables", "proxied"),
    [
        ({}, False),
        ({"no_proxy": "a"}, False),
        ({"http_proxy": ""}, False),
        ({"http_proxy": "http://p:1"}, True),
        ({"https_proxy": "http://p:1", "no_proxy": "localhost,10.0.0.1"}, True),
        ({"http_proxy": "http://p:1", "no_proxy": "localhost, 127.0.0.1"}, False),
        ({"grpc_proxy": "http://p:1", "no_grpc_proxy": ".0.0.1"}, False),
    ],
)
def test_a_relay_behind_a_proxy_is_not_used(variables, proxied):
    assert _relay.is_proxied(variables) == proxied
