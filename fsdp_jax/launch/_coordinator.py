"""The coordinator: where the processes of a job meet, and hear how it ends.

It stands in process 0, or in `fsdp-jax launch`. All processes keep a connection to it
as long as they run, so that the death of one is known at once, and not only when a
collective has waited for it in vain. jax's own service knows of the dead too, after
100 s, and says their numbers alone.
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

from fsdp_jax.launch._coordinator_state import Roll
from fsdp_jax.launch._handshake import Claim
from fsdp_jax.launch._protocol import GREETING, MAX_BYTES, Message, decode, encode
from fsdp_jax.launch._timeouts import Patience

# How long the coordinator of a job that does not start answers those who come late.
_LINGER_SECS = 5.0
_LOOK_SECS = 0.1
# After longer than this between two looks the coordinator itself was stopped, with its
# machine perhaps, and knows nothing of the others.
_STOPPED_SECS = 2.0


def say(text: str) -> None:
    """Prints for whoever watches the job."""
    print(f"fsdp_jax: {text}", file=sys.stderr, flush=True)


class Meeting:
    """Listens for the processes of one job, in a thread of its own.

    Attributes:
      port: Where it listens.
    """

    def __init__(
        self,
        num_processes: int,
        host: str = "127.0.0.1",
        port: int = 0,
        patience: Patience | None = None,
        report: Callable[[str], None] = say,
    ):
        """Binds the port, and answers from now on.

        Args:
          num_processes: How many will come.
          host: As the processes know it; on a loopback address it listens there alone.
          port: Where; 0 for any that is free.
          patience: How long to wait.
          report: Called with what is to be shown, of a job that waits.

        Raises:
          ValueError: If the port is taken.
        """
        patience = patience or Patience()
        self._roll = Roll(num_processes, patience, report, time.monotonic())
        self._news: queue.SimpleQueue[tuple[int, str]] = queue.SimpleQueue()
        self._closed = threading.Event()
        self._socket = _listening(host, port)
        self.port: int = self._socket.getsockname()[1]
        self._thread = threading.Thread(
            target=lambda: asyncio.run(self._serve()), daemon=True
        )
        self._thread.start()

    def announce(self, rank: int, how: str) -> None:
        """Ends the job, for whoever started a process saw it end badly.

        Args:
          rank: Of the process.
          how: Said of it, such as `was ended by SIGKILL`.
        """
        self._news.put((rank, how))

    def linger(self) -> None:
        """Waits until all processes know why the job does not start, some seconds."""
        end = time.monotonic() + _LINGER_SECS
        while not self._roll.all_have_come and time.monotonic() < end:
            time.sleep(_LOOK_SECS)
        time.sleep(_LOOK_SECS)  # for the last message to leave

    def close(self) -> None:
        """Stops listening, and lets go of all connections."""
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
        """One connection, from greeting to end."""
        with contextlib.suppress(OSError, ValueError), contextlib.closing(writer):
            writer.write(encode(GREETING))
            claim = Claim.from_message(decode(await reader.readline()))

            def send(message: Message) -> None:
                writer.write(encode(message))

            member = self._roll.admit(claim, send, time.monotonic())
            if member is None:
                return
            try:
                while line := await reader.readline():
                    self._roll.take(member, decode(line), time.monotonic())
            finally:
                self._roll.part(member, time.monotonic())


def _listening(host: str, port: int) -> socket.socket:
    """On all interfaces, unless the host is a loopback address."""
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
