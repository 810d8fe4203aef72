"""Start of a multi-process job, and its end if a process fails."""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import importlib.metadata
import os
import platform
import re
import socket
import subprocess
import sys
import traceback
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Any

import jax

from fsdp_jax.launch._client import Client, attend
from fsdp_jax.launch._cluster import JobPlace, check_token, find_place
from fsdp_jax.launch._coordinator import Coordinator
from fsdp_jax.launch._exit_status import Exit, is_failure, status_of
from fsdp_jax.launch._handshake import Handshake, as_facts
from fsdp_jax.launch._relay import is_proxied, start_relay
from fsdp_jax.launch._timeouts import Timeouts

# A process waits for the others at its exit, where jax gives up after 300 s. That a job
# does not end is found by the coordinator, which knows what the others do.
_SHUTDOWN_SECS = 7 * 24 * 3600

_PACKAGES = ("jax", "jaxlib", "fsdp-jax")
# Errors of XLA's runtime that the end of another process may cause.
_RUNTIME_ERROR = re.compile(
    "(UNKNOWN|INTERNAL|UNAVAILABLE|ABORTED|CANCELLED|DEADLINE_EXCEEDED"
    "|FAILED_PRECONDITION): "
)


@dataclasses.dataclass(frozen=True)
class Job:
    """Index of this process and size of its job.

    Attributes:
      process_id: Index of this process.
      num_processes: Number of processes.
    """

    process_id: int = 0
    num_processes: int = 1


@dataclasses.dataclass
class _Process:
    """Global state of this process in a job, global because jax's own state is."""

    job: Job | None = None
    client: Client | None = None
    relay: subprocess.Popen[bytes] | None = None
    failed: bool = False
    exit: Exit = dataclasses.field(default_factory=Exit)


_process = _Process()


def initialize(
    coordinator_address: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    local_device_ids: int | Sequence[int] | None = None,
    *,
    config: Any = None,
    timeouts: Timeouts | None = None,
) -> Job:
    """Joins this process to its job, before anything else uses jax.

    Without arguments the job is detected from variables of `fsdp-jax launch` or
    torchrun (`MASTER_ADDR`, `MASTER_PORT`, `WORLD_SIZE`, `RANK`, `LOCAL_RANK`), or else
    by jax's own detection: SLURM, Open MPI, Kubernetes with a Job or JobSet. A program
    started by none of them runs alone, so that one script works for one process and for
    many. Where `jax.distributed` is initialized already, as by Ray Train, this only
    returns the job. For SLURM, JobSet and Ray there are `fsdp_jax/launch/examples/`.

    Only processes that know the job's token, the environment variable `FSDP_JAX_TOKEN`,
    are let in. `fsdp-jax launch` makes one for each job; for other launchers set it to
    the same secret in all processes. It may be left out where only this machine reaches
    the coordinator: if its address is `localhost` or a loopback address. The
    coordinator listens at the address it is given, if that is one of the machine's own
    and no loopback address behind another name; otherwise at all addresses.

    The processes first compare their configuration, and start only if it agrees. From
    then on all exit, with the reason, when one fails, dies or sends no heartbeat, and
    the position of each is printed when none makes progress (see `report_progress`).

    Args:
      coordinator_address: `host:port` of process 0, the same for all; None to detect
        it. jax needs another free port besides.
      num_processes: Number of processes of the job; None to detect it.
      process_id: Index of this process, from 0; None to detect it.
      local_device_ids: GPUs of this process among those of its machine; None for that
        of its local rank, if the launcher sets it, or else all.
      config: Values that must be equal in all processes: a dataclass, or a mapping of
        JSON values; None for none. Versions of Python, jax, jaxlib and this package are
        always compared.
      timeouts: Timeouts of the job; None for the defaults. Those of process 0 apply, or
        of `fsdp-jax launch`.

    Returns:
      The index of this process and the number of processes.

    Raises:
      ValueError: In every process, if the job cannot start: sizes, ids, configs or
        versions that differ between processes, a taken port, or missing processes; or
        no token where others reach the coordinator.
      RuntimeError: If a job's process calls it again with arguments, or jax has
        started.

    Examples:
      >>> fsdp.initialize()  # started without a launcher
      Job(process_id=0, num_processes=1)
    """
    arguments = (coordinator_address, num_processes, process_id, local_device_ids)
    if _process.job is not None:
        if (*arguments, config, timeouts) != (None,) * 6:
            raise RuntimeError("initialize was called before in this process.")
        return _process.job
    if jax.distributed.is_initialized():
        return Job(jax.process_index(), jax.process_count())
    place = find_place(*arguments)
    if place is None:
        return Job()
    check_token(place)
    _join(place, as_facts({} if config is None else config), timeouts or Timeouts())
    _process.job = Job(place.process_id, place.num_processes)
    return _process.job


def fail(error: BaseException) -> None:
    """Ends the job for an error that this program catches before it exits.

    Uncaught errors end the job without this call.
    """
    _fail(error, is_printed=True)


def _fail(error: BaseException, *, is_printed: bool) -> None:
    if _process.client is not None:
        _process.failed = True
        text = "".join(traceback.format_exception_only(error)).rstrip()
        _process.client.fail(text, is_printed=is_printed)


def _join(place: JobPlace, facts: dict[str, str], timeouts: Timeouts) -> None:
    hosts = place.process_id == 0 and not place.hosted
    coordinator = (
        Coordinator(
            place.num_processes, place.host, place.port, timeouts, token=place.token
        )
        if hosts
        else None
    )
    with _reserved_port(place) as service:
        handshake = Handshake(
            rank=place.process_id,
            num_processes=place.num_processes,
            host=socket.gethostname(),
            pid=os.getpid(),
            service=service,
            facts=_versions() | facts,
        )
        try:
            client = attend(place.host, place.port, handshake, timeouts, place.token)
        except ValueError:
            if coordinator is not None:
                coordinator.linger()
            raise
        _process.client = client
        _tell_of_the_end()
        _start_jax(place, client.service)


def _start_jax(place: JobPlace, service: int) -> None:
    host = f"[{place.host}]" if ":" in place.host else place.host
    address = f"{host}:{service}"
    if place.process_id > 0 and not is_proxied(os.environ):
        address, _process.relay = start_relay(place.host, service)
    jax.distributed.initialize(
        address,
        place.num_processes,
        place.process_id,
        local_device_ids=place.local_device_ids,
        cluster_detection_method="deactivate",
        shutdown_timeout_seconds=_SHUTDOWN_SECS,
    )


@contextlib.contextmanager
def _reserved_port(place: JobPlace) -> Iterator[int]:
    """Yields a port reserved for jax's service in process 0; 0 in other processes.

    The socket is bound and does not listen. The service can bind the port too, by
    SO_REUSEPORT, which programs of other users cannot.
    """
    if place.process_id != 0:
        yield 0
        return
    family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET
    with socket.socket(family) as held:
        if family == socket.AF_INET6:
            held.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        held.bind(("", 0))
        yield held.getsockname()[1]


def _versions() -> dict[str, str]:
    versions = {name: importlib.metadata.version(name) for name in _PACKAGES}
    return versions | {"python": ".".join(platform.python_version_tuple()[:2])}


def _tell_of_the_end() -> None:
    """Registers hooks that report the end of this program to the others."""
    before = sys.excepthook

    def tell(
        kind: type[BaseException],
        error: BaseException,
        trace: TracebackType | None,
    ) -> None:
        # A collective fails at once where another process is killed: the reason is then
        # all that is printed.
        is_printed = not _RUNTIME_ERROR.match(str(error))
        if is_printed:
            before(kind, error, trace)
        _fail(error, is_printed=is_printed)
        if not is_printed:
            before(kind, error, trace)

    sys.excepthook = tell
    _process.exit.watch()
    # atexit runs in reverse order: this hook runs before jax's own, which waits for the
    # other processes to end.
    atexit.register(_leave)


def _leave() -> None:
    error = _process.exit.uncaught()
    status = status_of(error)
    if error is not None and is_failure(status) and not _process.failed:
        _fail(error, is_printed=True)
    if _process.failed:
        # Skips jax's exit hook, which would wait for processes that wait for this one.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status or 1)
    if _process.client is not None:
        _process.client.leave()
