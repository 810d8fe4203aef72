"""Exchanges failures and small values between processes.

Uses the key-value store of `jax.distributed`, not a collective, which would wait
forever for a process that failed.
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

from fsdp_jax._compat import DISTRIBUTED_STATE
from fsdp_jax.launch import report_progress

# Default timeout: a process may still be writing when the others are done.
TIMEOUT_SECS = 1200.0
# All processes pass the same exchange points in the same order: a counter names them.
_points = itertools.count()
# Last point of `exchange`, whose value is still in the key-value store.
_last_exchanged: list[str] = []


class OtherProcessError(RuntimeError):
    """Another process of the job failed; the message is that process's."""


class LostProcessError(OtherProcessError):
    """Another process of the job does not answer."""


def reserve() -> str:
    """Returns the name of the next exchange point.

    Call it on the main thread only, so that all processes get the same names.
    """
    return f"fsdp_jax/checkpoint/{next(_points)}"


def publish(point: str, value: Any) -> None:
    """Publishes a value in JSON types to all processes, without waiting for any."""
    key = f"{point}/{jax.process_index()}"
    _client().key_value_set(key, json.dumps(value))


def collect(point: str, timeout_secs: float = TIMEOUT_SECS) -> list[Any]:
    """Returns the values that all processes published at a point, in rank order.

    Waits until all have published.

    Args:
      point: Name from `reserve`.
      timeout_secs: Seconds to wait for all processes together.

    Raises:
      LostProcessError: If processes have not published by then; lists all of them.
    """
    end = time.monotonic() + timeout_secs
    values: list[str | None] = []
    for rank in range(jax.process_count()):
        values.append(_value_by(f"{point}/{rank}", end))
    silent = [rank for rank, value in enumerate(values) if value is None]
    if silent:
        raise LostProcessError(
            f"{len(silent)} of {len(values)} processes did not answer within "
            f"{timeout_secs:g} s: {', '.join(map(str, silent))}. They hang or have "
            "exited."
        )
    return [json.loads(value) for value in values if value is not None]


def exchange(value: Any, timeout_secs: float = TIMEOUT_SECS) -> list[Any]:
    """Publishes a value, and returns the values of all processes in rank order.

    Args:
      value: Value in JSON types.
      timeout_secs: Seconds to wait, as for `collect`.

    Raises:
      LostProcessError: If processes do not publish in time.
    """
    if jax.process_count() == 1:
        return [value]
    point = reserve()
    publish(point, value)
    told = collect(point, timeout_secs)
    for before in _last_exchanged:  # All have read it, since all have reached `point`.
        _client().key_value_delete(f"{before}/{jax.process_index()}")
    _last_exchanged[:] = [point]
    return told


def gather(what: str, function: Callable[[], Any], timeout_secs: float) -> list[Any]:
    """Calls a function in every process; a failure in one is raised in all.

    Args:
      what: Description of the work, for messages.
      function: Function that returns a value in JSON types.
      timeout_secs: Seconds to wait, as for `collect`.

    Returns:
      Value of each process, in rank order.

    Raises:
      OtherProcessError: If the function failed in other processes only.
      LostProcessError: If processes do not answer in time.
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
    """Runs the body in every process; a failure in one is raised in all.

    Args:
      what: Description of the work, for messages.
      timeout_secs: Seconds to wait, as for `collect`.

    Raises:
      OtherProcessError: If the body failed in other processes only.
      LostProcessError: If processes do not answer in time.
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
    """Raises an `OtherProcessError` if any process reports a failure.

    Args:
      what: Description of the work, for the message.
      failures: Failure of each process, in rank order; None for none.
    """
    failed = {rank: said for rank, said in enumerate(failures) if said is not None}
    if failed:
        raise OtherProcessError(
            f"{what} failed in {len(failed)} of {len(failures)} processes:\n  "
            + "\n  ".join(f"process {rank}: {said}" for rank, said in failed.items())
        )


def check_same(what: str, value: Any) -> None:
    """Raises a `ValueError` in every process unless all pass the same value.

    Args:
      what: Description of the value, for the message.
      value: Value in JSON types.
    """
    raise_unless_same(what, exchange(digest_of(value)))


def digest_of(value: Any) -> str:
    """Returns a digest that is equal for equal values.

    Args:
      value: Value in JSON types.
    """
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def raise_unless_same(what: str, digests: list[str]) -> None:
    """Raises a `ValueError` unless the digests of all processes are equal.

    Args:
      what: Description of the value, for the message.
      digests: Digests in rank order.
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
    """Formats an error as one line, for other processes."""
    return f"{type(error).__name__}: {error}"


def _value_by(key: str, end: float) -> str | None:
    """Waits for a value until `end`, at least 100 ms; None on timeout."""
    millis = max(100, int(1000 * (end - time.monotonic())))
    try:
        return _client().blocking_key_value_get(key, millis)
    except jax.errors.JaxRuntimeError as error:
        if "DEADLINE_EXCEEDED" not in str(error):
            raise
        return None


def _client() -> Any:
    return DISTRIBUTED_STATE.get().client
