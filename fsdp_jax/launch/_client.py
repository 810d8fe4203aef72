"""Client connection of a process to the coordinator of its job."""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from typing import Any, NoReturn

from fsdp_jax.launch._handshake import Handshake
from fsdp_jax.launch._progress import await_move, position
from fsdp_jax.launch._protocol import (
    GREETING,
    LONGEST_SECS,
    Message,
    decode,
    encode,
    sign,
)
from fsdp_jax.launch._timeouts import Timeouts

# Timeout of the greeting, once the coordinator has accepted the connection.
_GREETING_SECS = 10
# Minimum interval between heartbeats: steps may be shorter, and need not all be sent.
_SHORTEST_BEAT_SECS = 0.05
# Time for the program to exit by itself after an error that ends the job.
_GRACE_SECS = 1.0
# Longest reason sent: the coordinator does not read messages beyond its limit.
_LONGEST_TEXT = 2**16
# Longest form of an error of this process beside the reason of another.
_LONGEST_SHOWN = 200


class Client:
    """Client of the coordinator: reports progress, and exits when the job has ended.

    Made by `attend`. One thread sends heartbeats, another waits for messages. When the
    coordinator ends the job, the process prints the reason and exits with status 1,
    even if its program is blocked.
    """

    def __init__(
        self, handshake: Handshake, connection: socket.socket, welcome: Message
    ):
        """Starts the two threads.

        Args:
          handshake: Handshake message of this process.
          connection: Socket connected to the coordinator.
          welcome: Answer of the coordinator.
        """
        self.service: int = welcome["service"]
        self._handshake = handshake
        self._coordinator = "the coordinator of the job, process 0 or its launcher,"
        self._connection = connection
        self._beat_secs = welcome["beat_secs"]
        self._lock = threading.Lock()
        self._failed = False
        self._not_printed = ""
        self._over = threading.Event()
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()
        threading.Thread(target=self._beat, daemon=True).start()

    def fail(self, text: str, *, is_printed: bool = True) -> None:
        """Ends the job: all other processes print `text` and exit.

        If the failure of this process is the effect of another's, this process prints
        the reason of the other one and exits.

        Args:
          text: Error of this process.
          is_printed: Whether the error was printed here.
        """
        self._failed = True
        if not is_printed:
            self._not_printed = " ".join(text.split())[:_LONGEST_SHOWN]
        self._part({"failed": text[:_LONGEST_TEXT]})
        self._listener.join(_GRACE_SECS)

    def leave(self) -> None:
        """Reports that this program has ended."""
        self._part({"left": True})

    def _part(self, word: Message) -> None:
        if not self._over.is_set():
            self._over.set()
            self._send(word)

    def _send(self, message: Message) -> None:
        try:
            with self._lock:
                self._connection.sendall(encode(message))
        except OSError:
            pass  # The coordinator is gone; the listener thread ends the process.

    def _beat(self) -> None:
        while not self._over.wait(_SHORTEST_BEAT_SECS):
            await_move(self._beat_secs)
            at = position()
            secs = time.monotonic() - at.began
            self._send({"phase": at.phase, "step": at.step, "secs": secs})

    def _listen(self) -> None:
        try:
            news = _read(self._connection)
        except (OSError, ValueError):
            news = {}
        if not news and not self._over.is_set():
            # At once: jax's service has gone with process 0 too, and jax ends this
            # process when the relay passes that on.
            self._exit(self._gone())
        with self._lock:
            self._connection.close()
        # A program that has ended waits for the others within jax, so it still gets
        # their failures. The coordinator may exit before it, which is then not an
        # error.
        ended = self._over.wait(_GRACE_SECS)
        if "end" in news or not ended or self._failed and not news:
            self._exit(news.get("end", self._gone()))

    def _gone(self) -> str:
        return f"{self._coordinator} has gone without a word (was it killed?)."

    def _exit(self, why: str) -> NoReturn:
        sys.stdout.flush()
        own = f" (its own error then: {self._not_printed})" if self._not_printed else ""
        line = f"fsdp_jax: {self._handshake} stops: {why}{own}"
        print(line, file=sys.stderr, flush=True)
        # sys.exit would end this thread only, not a main thread that is blocked.
        os._exit(1)


def attend(
    host: str, port: int, handshake: Handshake, timeouts: Timeouts, token: str = ""
) -> Client:
    """Connects to the coordinator, and waits until all processes have.

    Args:
      host: Host of the coordinator.
      port: Port of the coordinator.
      handshake: Handshake message of this process.
      timeouts: Timeouts of the job.
      token: Secret of the job.

    Raises:
      ValueError: If there is no coordinator, or it refuses to start the job.
    """
    connection = _connect(host, port, time.monotonic() + timeouts.start_secs)
    try:
        return Client(
            handshake, connection, _report(connection, handshake, timeouts, token)
        )
    except BaseException:
        connection.close()
        raise


def _report(
    connection: socket.socket, handshake: Handshake, timeouts: Timeouts, token: str
) -> Message:
    """Sends the handshake, and returns the answer once all processes have connected."""
    nonce, start_secs = _check_greeting(connection)
    connection.sendall(encode(sign(handshake.to_message(), nonce, token)))
    # Longer than the coordinator's own timeout, whose message names missing processes.
    own = min(timeouts.start_secs, LONGEST_SECS)
    most = max(own, start_secs) + _GREETING_SECS
    connection.settimeout(most)
    try:
        answer = _read(connection)
    except TimeoutError as error:
        raise ValueError(
            f"The coordinator did not answer for {most:g} s. Is it stopped, or its "
            "machine gone?"
        ) from error
    if "refused" in answer:
        raise ValueError(answer["refused"])
    if "service" not in answer:
        raise ValueError("The coordinator ended before all processes had come.")
    connection.settimeout(None)
    return answer


def _connect(host: str, port: int, end: float) -> socket.socket:
    while True:
        try:
            return socket.create_connection((host, port), timeout=_GREETING_SECS)
        except OSError as error:  # not listening yet, or its name does not resolve yet
            if time.monotonic() > end:
                raise ValueError(
                    f"There is no coordinator at {host}:{port} ({error}). Process 0 "
                    "starts it; do all processes have the same address?"
                ) from error
            time.sleep(0.1)


def _check_greeting(connection: socket.socket) -> tuple[str, float]:
    """Returns the random text in the coordinator's greeting, and its `start_secs`."""
    try:
        greeting: Any = _read(connection)
    except (OSError, ValueError):
        greeting = {}
    nonce = greeting.pop("nonce", None)
    start_secs = greeting.pop("start_secs", None)
    is_number = isinstance(start_secs, int | float) and 0 <= start_secs <= LONGEST_SECS
    if greeting != GREETING or not isinstance(nonce, str) or not is_number:
        host, port = connection.getpeername()[:2]
        raise ValueError(
            f"What listens at {host}:{port} is not a coordinator of this version of "
            "fsdp_jax: another program has the port. Choose another, the same for all "
            "processes."
        )
    return nonce, start_secs


def _read(connection: socket.socket) -> Message:
    """Reads one message and no byte beyond it."""
    line = b""
    while not line.endswith(b"\n"):
        # Byte by byte: a buffered read could take bytes of the next message, which is
        # read by another caller.
        byte = connection.recv(1)
        if not byte:
            return {}
        line += byte
    return decode(line)
