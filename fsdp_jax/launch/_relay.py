"""Relay between a process and jax's service, which passes the service's end on late.

jax aborts a process within milliseconds when its connection to the service in process 0
closes, with lines of XLA's log that do not say what happened. This package knows
the reason and says it in one line, but from Python, which may come too late. So each
process but 0 reaches the service through a child process, which holds the connection
for some seconds more.

The child runs this file alone: it imports nothing else of the package.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping

_HOST = "127.0.0.1"
# gRPC's variables.
_PROXIES = ("grpc_proxy", "https_proxy", "http_proxy")
# Time by which the end of the service is passed on late.
_LATE_SECS = 10.0
_RETRY_SECS = 0.05
_LOOK_SECS = 0.5


def is_proxied(variables: Mapping[str, str]) -> bool:
    """Returns whether gRPC would look for a relay behind a proxy.

    Args:
      variables: Environment variables.
    """
    if not any(variables.get(name) for name in _PROXIES):
        return False
    exempt = variables.get("no_grpc_proxy") or variables.get("no_proxy") or ""
    names = [name.strip() for name in exempt.split(",")]
    return not any(name and _HOST.endswith(name) for name in names)


def start_relay(host: str, port: int) -> tuple[str, subprocess.Popen[bytes]]:
    """Starts a relay, which ends with this process.

    Args:
      host: Host of the service.
      port: Port of the service.

    Returns:
      Address of the relay, and its process.
    """
    with socket.create_server((_HOST, 0)) as listening:
        file = listening.fileno()
        program = [sys.executable, "-I", "-S", __file__]
        child = subprocess.Popen(
            [*program, str(os.getpid()), str(file), host, str(port)],
            pass_fds=[file],
            process_group=0,  # no signal to the group of this process ends it earlier
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        return f"{_HOST}:{listening.getsockname()[1]}", child


async def relay(parent: int, listening: socket.socket, host: str, port: int) -> None:
    """Relays all connections until the parent process has ended.

    Args:
      parent: Process id of the parent.
      listening: Socket that the parent connects to.
      host: Host of the service.
      port: Port of the service.
    """

    async def attend(
        reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        service = await _connect(host, port)
        ways = [_copy(reader, service[1]), _copy(service[0], writer)]
        tasks = [asyncio.create_task(way) for way in ways]
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if not reader.at_eof():  # The service ended, not the process.
            await asyncio.sleep(_LATE_SECS)
        service[1].close()
        writer.close()

    server = await asyncio.start_server(attend, sock=listening)
    while os.getppid() == parent:
        await asyncio.sleep(_LOOK_SECS)
    server.close()  # A `with` block would wait for the service to end connections.


async def _connect(
    host: str, port: int
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    while True:
        try:
            return await asyncio.open_connection(host, port)
        except OSError:  # The service has not begun to listen.
            await asyncio.sleep(_RETRY_SECS)


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(2**16):
        writer.write(data)
        await writer.drain()


def _main(parent: str, file: str, host: str, port: str) -> None:
    # A scheduler signals all processes, and the parent decides when it ends.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    listening = socket.socket(fileno=int(file))
    asyncio.run(relay(int(parent), listening, host, int(port)))


if __name__ == "__main__":
    _main(*sys.argv[1:])
