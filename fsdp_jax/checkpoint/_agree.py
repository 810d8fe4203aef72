"""What one process knows, told to all: a failure, or what it is about to do.

Through the key-value store of `jax.distributed`, not by a collective: that would wait
for a process that failed, without end and without a word.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax
from jax._src import distributed

from fsdp_jax.launch import report_progress

# How long a process may be behind the others: it may still write while they are done.
_TIMEOUT_SECS = 1200
# Every process passes the same points in the same order; so the number names the point.
_points = itertools.count()


class OtherProcessError(RuntimeError):
    """Another process of the job failed; the message is its own."""


def reserve() -> str:
    """The name of the next point. Main thread only: so it is the same everywhere."""
    return f"fsdp_jax/checkpoint/{next(_points)}"


def publish(point: str, value: Any) -> None:
    """Gives a value, in types of JSON, to all processes; does not wait for any."""
    key = f"{point}/{jax.process_index()}"
    _client().key_value_set(key, json.dumps(value))


def collect(point: str) -> list[Any]:
    """What each process published at a point, in order; waits until all have."""
    values = [
        _client().blocking_key_value_get(f"{point}/{rank}", 1000 * _TIMEOUT_SECS)
        for rank in range(jax.process_count())
    ]
    return [json.loads(value) for value in values]


def exchange(value: Any) -> list[Any]:
    """Gives a value to all processes; what each gave, in order.

    Args:
      value: In types of JSON.
    """
    if jax.process_count() == 1:
        return [value]
    point = reserve()
    publish(point, value)
    return collect(point)


@contextmanager
def together(what: str) -> Iterator[None]:
    """Runs the body in every process; if it fails in one, it fails in all.

    Args:
      what: What is done, for the message.

    Raises:
      OtherProcessError: Where it went well, if it failed elsewhere.
    """
    report_progress(what)
    try:
        yield
    except Exception as error:
        if jax.process_count() > 1:
            exchange(describe(error))
        raise
    raise_others(what, exchange(None))


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
    digest = hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
    digests = exchange(digest)
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


def _client() -> Any:
    return distributed.global_state.client
