"""Profiles as jax's profiler writes them, made by hand."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from pathlib import Path

from jax.profiler import ProfileData


@dataclasses.dataclass(frozen=True)
class Event:
    """A kernel on a stream, from one microsecond to another, with what it says."""

    stream: str
    name: str
    start: float
    end: float
    stats: Mapping[str, str] = dataclasses.field(default_factory=dict)


def write_profile(path: Path, planes: Mapping[str, Iterable[Event]]) -> Path:
    """Writes an xplane file with these planes, as jax lays out a run's folder."""
    text = "\n".join(
        _plane(number, name, list(events))
        for number, (name, events) in enumerate(planes.items(), start=1)
    )
    folder = path / "plugins" / "profile" / "2026_11_23"
    folder.mkdir(parents=True)
    file = folder / "host.xplane.pb"
    file.write_bytes(ProfileData.text_proto_to_serialized_xspace(text))
    return file


def _plane(number: int, name: str, events: list[Event]) -> str:
    kernels = _numbers(event.name for event in events)
    stats = _numbers(stat for event in events for stat in event.stats)
    lines = []
    for at, stream in enumerate(dict.fromkeys(event.stream for event in events)):
        inner = " ".join(
            _event(event, kernels, stats) for event in events if event.stream == stream
        )
        lines.append(f'lines {{ id: {at} name: "{stream}" {inner} }}')
    listed = [
        f'{kind} {{ key: {key} value {{ id: {key} name: "{text}" }} }}'
        for kind, names in (("event_metadata", kernels), ("stat_metadata", stats))
        for text, key in names.items()
    ]
    return f'planes {{ id: {number} name: "{name}" {" ".join(lines + listed)} }}'


def _event(event: Event, kernels: Mapping[str, int], stats: Mapping[str, int]) -> str:
    said = " ".join(
        f'stats {{ metadata_id: {stats[name]} str_value: "{value}" }}'
        for name, value in event.stats.items()
    )
    # Picoseconds.
    start, length = round(event.start * 1e6), round((event.end - event.start) * 1e6)
    return (
        f"events {{ metadata_id: {kernels[event.name]} offset_ps: {start} "
        f"duration_ps: {length} {said} }}"
    )


def _numbers(names: Iterable[str]) -> dict[str, int]:
    return {name: number for number, name in enumerate(dict.fromkeys(names), start=1)}
