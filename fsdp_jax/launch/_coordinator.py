"""Coordinator of a job: starts its processes together, and reports how it ends.

It runs in process 0, or in `fsdp-jax launch`. All processes keep a connection to it
while they run, so that the death of one is detected at once, and not only when a
collective times out. jax's own service detects dead processes too, after 100 s, and
reports their indices only.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import ipaddress
import queue
import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable

from fsdp_jax.launch._coordinator_state import CoordinatorState
from fsdp_jax.launch._handshake import Handshake
from fsdp_jax.launch._protocol import (
    GREETING,
    LONGEST_SECS,
    MAX_BYTES,
    Message,
    check_report,
    check_signature,
    decode,
    encode,
)
from fsdp_jax.launch._timeouts import Timeouts

# Time for which the coordinator of a job that does not start answers late processes.
_LINGER_SECS = 5.0
_POLL_SECS = 0.1
# Time for a connection to send its handshake, and most connections that have not sent
# one: of more, the oldest is closed, since a process sends its handshake at once.
_HANDSHAKE_SECS = 10.0
_MAX_UNIDENTIFIED = 128
# If more than this passes between two checks, the coordinator itself was stopped,
# perhaps with its machine: the silence of others then means nothing.
_SUSPENDED_SECS = 2.0


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
        token: str = "",
    ):
        """Binds the port and starts the server.

        Args:
          num_processes: Number of processes of the job.
          host: Host name or address that the processes connect to, where the server
            listens: at all addresses if it is not one of this machine, or another name
            of a loopback address.
          port: Port to listen on; 0 for any free one.
          timeouts: Timeouts of the job.
          report: Callback for messages about a waiting job.
          token: Secret that all processes of the job know.

        Raises:
          ValueError: If the port is taken.
        """
        self._token = token
        self._report = report
        # Connections without a handshake, the oldest first.
        self._unidentified: dict[asyncio.StreamWriter, None] = {}
        timeouts = timeouts or Timeouts()
        self._start_secs = min(timeouts.start_secs, LONGEST_SECS)
        self._state = CoordinatorState(
            num_processes, timeouts, report, time.monotonic()
        )
        self._exits: queue.SimpleQueue[tuple[int, str, bool]] = queue.SimpleQueue()
        self._closed = threading.Event()
        self._socket = _listening(host, port)
        self.port: int = self._socket.getsockname()[1]
        self._thread = threading.Thread(
            target=lambda: asyncio.run(self._serve()), daemon=True
        )
        self._thread.start()

    @property
    def blamed(self) -> frozenset[int]:
        """Ranks of the processes that are the reason why the job ended."""
        return self._state.blamed

    @property
    def positions(self) -> list[tuple[int, int | None, str]]:
        """Rank, training step and phase that each connected process last reported."""
        return [(m.handshake.rank, m.step, m.phase) for m in list(self._state.members)]

    @property
    def has_trained(self) -> bool:
        """Whether any process has reported a training step."""
        return any(member.has_trained for member in list(self._state.members))

    def announce(self, rank: int, how: str, *, is_abort: bool = False) -> None:
        """Ends the job because a process was seen to end with an error.

        Args:
          rank: Index of the process.
          how: Description of its end, such as `was ended by SIGKILL`.
          is_abort: Whether SIGABRT ended it, perhaps as an effect of another's failure.
        """
        self._exits.put((rank, how, is_abort))

    def linger(self) -> None:
        """Waits up to 5 s for all processes to be told why the job does not start."""
        end = time.monotonic() + _LINGER_SECS
        while not self._state.all_connected and time.monotonic() < end:
            time.sleep(_POLL_SECS)
        time.sleep(_POLL_SECS)  # for the last message to leave

    def close(self) -> None:
        """Stops the server and closes all connections."""
        self._closed.set()
        self._thread.join()

    async def _serve(self) -> None:
        serve = asyncio.start_server(self._attend, sock=self._socket, limit=MAX_BYTES)
        server = await serve
        checked = time.monotonic()
        while not self._closed.is_set():
            self._handle_exits()
            now = time.monotonic()
            if now - checked > _SUSPENDED_SECS:
                self._state.add_suspension(now - checked)
            checked = now
            self._state.check_timeouts(now)
            await asyncio.sleep(_POLL_SECS)
        self._handle_exits()  # who is blamed may be asked after the end
        server.close()

    def _handle_exits(self) -> None:
        while not self._exits.empty():
            rank, how, is_abort = self._exits.get()
            self._state.handle_exit(rank, how, time.monotonic(), is_abort=is_abort)

    async def _attend(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Serves one connection, from greeting to end."""
        with contextlib.suppress(OSError, ValueError), contextlib.closing(writer):

            def send(message: Message) -> None:
                writer.write(encode(message))

            handshake = await self._await_handshake(reader, writer, send)
            if handshake is None:
                return
            member = self._state.admit(handshake, send, time.monotonic())
            if member is None:
                return
            try:
                while line := await reader.readline():
                    report = check_report(decode(line))
                    self._state.handle_message(member, report, time.monotonic())
            finally:
                self._state.handle_disconnect(member, time.monotonic())

    async def _await_handshake(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        send: Callable[[Message], None],
    ) -> Handshake | None:
        """Returns the handshake of a connection; None if it does not know the token.

        Raises:
          TimeoutError: If none comes in time.
          ValueError: If what comes is not a handshake.
        """
        if len(self._unidentified) >= _MAX_UNIDENTIFIED:
            next(iter(self._unidentified)).transport.abort()
            self._unidentified.pop(next(iter(self._unidentified)))
        self._unidentified[writer] = None
        try:
            nonce = secrets.token_hex(16)
            send({**GREETING, "nonce": nonce, "start_secs": self._start_secs})
            line = await asyncio.wait_for(reader.readline(), _HANDSHAKE_SECS)
        finally:
            self._unidentified.pop(writer, None)
        message = decode(line)
        known = check_signature(message, nonce, self._token)
        handshake = Handshake.from_message(message["handshake"])
        if known is None:
            text = (
                f"{handshake} does not know the token of the job: FSDP_JAX_TOKEN must "
                "be the same in all processes."
            )
            send({"refused": text})
            self._report(text)
            return None
        return handshake


def _listening(host: str, port: int) -> socket.socket:
    """Returns a socket that listens at the addresses of a host, see `Coordinator`."""
    try:
        address = _own_address(host, port)
        if address is not None:
            version = ipaddress.ip_address(address.partition("%")[0]).version
            family = socket.AF_INET6 if version == 6 else socket.AF_INET
            return socket.create_server((address, port), family=family)
        dual = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if dual else socket.AF_INET
        return socket.create_server(("", port), family=family, dualstack_ipv6=dual)
    except OSError as error:
        raise ValueError(
            f"Port {port} of the coordinator, {host}, cannot be used: "
            f"{error.strerror}. Choose another port, the same for all processes."
        ) from error


def _own_address(host: str, port: int) -> str | None:
    """Returns the address to listen at; None for all of the machine.

    Systems often give their own host name a loopback address, at which other machines
    would not reach it; and a name may be that of a proxy, which is no own address.
    """
    if host == "localhost":
        return "127.0.0.1"
    with contextlib.suppress(ValueError):
        ipaddress.ip_address(host)  # An address, and no name, is taken as it is.
        return host if _is_own(host) else None
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError:
        return None
    address = str(found[0][4][0])
    is_loopback = ipaddress.ip_address(address.partition("%")[0]).is_loopback
    return address if not is_loopback and _is_own(address) else None


def _is_own(address: str) -> bool:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family) as held:
        try:
            held.bind((address, 0))
        except OSError as error:
            return error.errno != errno.EADDRNOTAVAIL
    return True
