"""Writes a timeline as a trace that Perfetto and chrome://tracing open."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fsdp_jax.hlo._collectives import Collective
from fsdp_jax.planner._timeline import Timeline

LANES = ("compute", "exposed", "links")
"""Names of the rows of the trace, from the top."""


def save_trace(timeline: Timeline, path: str | Path, *, title: str) -> None:
    """Writes a timeline in Chrome's trace event format, times in microseconds.

    Args:
      timeline: Replayed step.
      path: Output file, by convention `.json`.
      title: Name of the process in the trace.
    """
    events = [*_names(title), *_events(timeline)]
    Path(path).write_text(json.dumps({"traceEvents": events}) + "\n")


def _names(title: str) -> Iterator[dict[str, Any]]:
    yield _metadata("process_name", 0, {"name": title})
    for lane, name in enumerate(LANES):
        yield _metadata("thread_name", lane, {"name": name})
        yield _metadata("thread_sort_index", lane, {"sort_index": lane})


def _metadata(kind: str, lane: int, args: dict[str, Any]) -> dict[str, Any]:
    return {"ph": "M", "pid": 0, "tid": lane, "name": kind, "args": args}


def _events(timeline: Timeline) -> Iterator[dict[str, Any]]:
    for span in timeline.compute:
        yield _event(0, f"{span.name} {span.unit}".strip(), span.start, span.end)
    for sent in timeline.sent:
        name = _name(sent.collective)
        if sent.exposed:
            yield _event(1, f"waits: {name}", sent.end - sent.exposed, sent.end)
        moved = sum(shape.bytes for shape in sent.collective.received)
        details = {"bytes received": moved, "scope": sent.collective.op_name}
        yield _event(2, name, sent.start, sent.end, details)


def _name(collective: Collective) -> str:
    return f"{collective.op} {collective.unit or ''}".strip()


def _event(
    lane: int, name: str, start: float, end: float, args: dict[str, Any] | None = None
) -> dict[str, Any]:
    found = {"ph": "X", "pid": 0, "tid": lane, "name": name}
    found |= {"ts": start * 1e6, "dur": (end - start) * 1e6}
    return found | ({"args": args} if args else {})
