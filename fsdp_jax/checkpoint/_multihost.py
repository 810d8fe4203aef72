"""What one process knows, told to all: a failure, or what it is about to do.

Through the key-value store of `jax.distributed`, not by a collective: that would wait
for a process that failed, without end and without a word.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import jax
from jax._src import distributed

from fsdp_jax.launch import report_progress

# How long a process may be behind the others: it may still write while they are done.
TIMEOUT_SECS = 1200.0
# Every process passes the same points in the same order; so the number names the point.
_points = itertools.count()
# The last that was exchanged: what this process gave there is still stored.
_last_exchanged: list[str] = []


class OtherProcessError(RuntimeError):
    """Another process of the job failed; the message is its own."""


class LostProcessError(OtherProcessError):
    """Another process of the job does not answer."""


def reserve() -> str:
    """The name of the next point. Main thread only: so it is the same everywhere."""
    return f"fsdp_jax/checkpoint/{next(_points)}"


def publish(point: str, value: Any) -> None:
    """Gives a value, in types of JSON, to all processes; does not wait for any."""
    key = f"{point}/{jax.process_index()}"
    _client().key_value_set(key, json.dumps(value))


def collect(point: str, timeout_secs: float = TIMEOUT_SECS) -> list[Any]:
    """What each process published at a point, in order; waits until all have.

    Raises:
      LostProcessError: If one has not after that time; it names all of these.
    """
    end = time.monotonic() + timeout_secs
    values: list[str | None] = []
    for rank in range(jax.process_count()):
        values.append(_value_by(f"{point}/{rank}", end))
    silent = [rank for rank, value in enumerate(values) if value is None]
    if silent:
        raise LostProcessError(
            f"{len(silent)} of {len(values)} processes did not answer within "
            f"{timeout_secs:g} s: {', '.join(map(str, silent))}. They hang or are gone."
        )
    return [json.loads(value) for value in values if value is not None]


def exchange(value: Any, timeout_secs: float = TIMEOUT_SECS) -> list[Any]:
    """Gives a value to all processes; what each gave, in order.

    Args:
      value: In types of JSON.
      timeout_secs: As for `collect`.

    Raises:
      LostProcessError: As for `collect`.
    """
    if jax.process_count() == 1:
        return [value]
    point = reserve()
    publish(point, value)
    told = collect(point, timeout_secs)
    for before in _last_exchanged:  # which all have read, since all are here
        _client().key_value_delete(f"{before}/{jax.process_index()}")
    _last_exchanged[:] = [point]
    return told


def gather(what: str, function: Callable[[], Any], timeout_secs: float) -> list[Any]:
    """Calls a function in every process; if it fails in one, that is raised in all.

    Args:
      what: What is done, for the message.
      function: Returns what is given to the others, in types of JSON.
      timeout_secs: As for `collect`.

    Returns:
      What it returned in each process, in order.

    Raises:
      OtherProcessError: Where it went well, if it failed elsewhere.
      LostProcessError: As for `collect`.
    """
    report_progress(what)
    try:
        value = function()
    except Exception as error:
        if jax.process_count() > 1:
            exchange([describe(error), None], timeout_secs)
        raise
    told = exchange([None, value], timeout_secs)
    raise_others(what, [failure for failure, _ in told])
    return [result for _, result in told]


@contextmanager
def together(what: str, timeout_secs: float = TIMEOUT_SECS) -> Iterator[None]:
    """Runs the body in every process; if it fails in one, it fails in all.

    Args:
      what: What is done, for the message.
      timeout_secs: As for `collect`.

    Raises:
      OtherProcessError: Where it went well, if it failed elsewhere.
      LostProcessError: As for `collect`.
    """
    report_progress(what)
    try:
        yield
    except Exception as error:
        if jax.process_count() > 1:
            exchange(describe(error), timeout_secs)
        raise
    raise_others(what, exchange(None, timeout_secs))


def raise_others(what: str, failures: list[str | None]) -> None:
    """Raises what other processes report, if any do."""
    failed = {rank: said for rank, said in enumerate(failures) if said is not None}
    if failed:
        raise OtherProcessError(
            f"{what} failed in {len(failed)} of {len(failures)} processes:\n  "
            + "\n  ".join(f"process {rank}: {said}" for rank, said in failed.items())
        )


def check_same(what: str, value: Any) -> None:
    """Raises a `ValueError` in every process unless all are given the same value.

    Args:
      what: What it is, for the message.
      value: In types of JSON.
    """
    raise_unless_same(what, exchange(digest_of(value)))


def digest_of(value: Any) -> str:
    """Equal for what is equal.

    Args:
      value: In types of JSON.
    """
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def raise_unless_same(what: str, digests: list[str]) -> None:
    """Raises a `ValueError` unless the digests of all processes are one.

    Args:
      what: What it is, for the message.
      digests: In the order of the processes.
    """
    if len(set(digests)) > 1:
        groups = [
            [rank for rank, other in enumerate(digests) if other == one]
            for one in dict.fromkeys(digests)
        ]
        raise ValueError(
            f"{what} differs between processes: alike are "
            + "; ".join(", ".join(map(str, ranks)) for ranks in groups)
            + ". All must call with the same."
        )


def describe(error: Exception) -> str:
    """An error in a line, as another process shows it."""
    return f"{type(error).__name__}: {error}"


def _value_by(key: str, end: float) -> str | None:
    """What is published under a key until then; a moment is allowed even after it."""
    millis = max(100, int(1000 * (end - time.monotonic())))
    try:
        return _client().blocking_key_value_get(key, millis)
    except jax.errors.JaxRuntimeError as error:
        if "DEADLINE_EXCEEDED" not in str(error):
            raise
        return None


def _client() -> Any:
    return distributed.global_state.client
