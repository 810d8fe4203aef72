"""Coordinator of a job: starts its processes together, and reports how it ends.

It runs in process 0, or in `fsdp-jax launch`. All processes keep a connection to it
while they run, so that the death of one is detected at once, and not only when a
collective times out. jax's own service detects dead processes too, after 100 s, and
reports their indices only.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import socket
import sys
import threading
import time
from collections.abc import Callable

from fsdp_jax.launch._coordinator_state import CoordinatorState
from fsdp_jax.launch._handshake import Handshake
from fsdp_jax.launch._protocol import GREETING, MAX_BYTES, Message, decode, encode
from fsdp_jax.launch._timeouts import Timeouts

# Time for which the coordinator of a job that does not start answers late processes.
_LINGER_SECS = 5.0
_LOOK_SECS = 0.1
# If more than this passes between two checks, the coordinator itself was stopped,
# perhaps with its machine: the silence of others then means nothing.
_STOPPED_SECS = 2.0


def say(text: str) -> None:
    """Prints a message about the job to stderr."""
    print(f"fsdp_jax: {text}", file=sys.stderr, flush=True)


class Coordinator:
    """Coordinator server for the processes of one job, in a thread of its own.

    Attributes:
      port: Port that it listens on.
    """

    def __init__(
        self,
        num_processes: int,
        host: str = "127.0.0.1",
        port: int = 0,
        timeouts: Timeouts | None = None,
        report: Callable[[str], None] = say,
    ):
        """Binds the port and starts the server.

        Args:
          num_processes: Number of processes of the job.
          host: Host name that the processes connect to; a loopback address restricts
            the server to it.
          port: Port to listen on; 0 for any free one.
          timeouts: Timeouts of the job.
          report: Callback for messages about a waiting job.

        Raises:
          ValueError: If the port is taken.
        """
        timeouts = timeouts or Timeouts()
        self._roll = CoordinatorState(num_processes, timeouts, report, time.monotonic())
        self._news: queue.SimpleQueue[tuple[int, str]] = queue.SimpleQueue()
        self._closed = threading.Event()
        self._socket = _listening(host, port)
        self.port: int = self._socket.getsockname()[1]
        self._thread = threading.Thread(
            target=lambda: asyncio.run(self._serve()), daemon=True
        )
        self._thread.start()

    def announce(self, rank: int, how: str) -> None:
        """Ends the job because a process was seen to end with an error.

        Args:
          rank: Index of the process.
          how: Description of its end, such as `was ended by SIGKILL`.
        """
        self._news.put((rank, how))

    def linger(self) -> None:
        """Waits up to 5 s for all processes to be told why the job does not start."""
        end = time.monotonic() + _LINGER_SECS
        while not self._roll.all_have_come and time.monotonic() < end:
            time.sleep(_LOOK_SECS)
        time.sleep(_LOOK_SECS)  # for the last message to leave

    def close(self) -> None:
        """Stops the server and closes all connections."""
        self._closed.set()
        self._thread.join()

    async def _serve(self) -> None:
        serve = asyncio.start_server(self._attend, sock=self._socket, limit=MAX_BYTES)
        server = await serve
        looked = time.monotonic()
        while not self._closed.is_set():
            while not self._news.empty():
                self._roll.ended(*self._news.get(), time.monotonic())
            now = time.monotonic()
            if now - looked > _STOPPED_SECS:
                self._roll.forgive(now - looked)
            looked = now
            self._roll.look(now)
            await asyncio.sleep(_LOOK_SECS)
        server.close()

    async def _attend(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Serves one connection, from greeting to end."""
        with contextlib.suppress(OSError, ValueError), contextlib.closing(writer):
            writer.write(encode(GREETING))
            handshake = Handshake.from_message(decode(await reader.readline()))

            def send(message: Message) -> None:
                writer.write(encode(message))

            member = self._roll.admit(handshake, send, time.monotonic())
            if member is None:
                return
            try:
                while line := await reader.readline():
                    self._roll.take(member, decode(line), time.monotonic())
            finally:
                self._roll.part(member, time.monotonic())


def _listening(host: str, port: int) -> socket.socket:
    """Returns a socket on all interfaces, or on loopback only for a loopback `host`."""
    alone = host == "localhost" or host.startswith("127.")
    dual = not alone and socket.has_dualstack_ipv6()
    try:
        return socket.create_server(
            ("127.0.0.1" if alone else "", port),
            family=socket.AF_INET6 if dual else socket.AF_INET,
            dualstack_ipv6=dual,
        )
    except OSError as error:
        raise ValueError(
            f"Port {port} of the coordinator, {host}, cannot be used: "
            f"{error.strerror}. Choose another port, the same for all processes."
        ) from error
