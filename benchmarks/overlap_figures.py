"""What `overlap.py` says of a compiled step and of its replay."""

import math

from fsdp_jax.hlo._collectives import axes_of
from fsdp_jax.planner._timeline import floor_seconds


def times(scheduled, cost, gpus):
    timeline = scheduled.timeline
    return {
        "step_ms": milliseconds(timeline.seconds),
        "compute_ms": milliseconds(timeline.compute_seconds),
        "wire_ms": milliseconds(timeline.communication_seconds),
        "exposed_ms": milliseconds(timeline.exposed_seconds),
        "exposed_of_step": round(timeline.exposed_seconds / timeline.seconds, 4),
        "floor_ms": milliseconds(floor_seconds(scheduled.schedule, cost, gpus)),
    }


def by_axes(timeline, mesh, per_node):
    """Seconds of communication over each set of mesh axes, and the exposed ones."""
    found = {}
    for sent in timeline.sent:
        axes = named_axes(sent.collective.groups, mesh, per_node)
        wire, exposed = found.get(axes, (0.0, 0.0))
        found[axes] = wire + sent.end - sent.start, exposed + sent.exposed
    return {
        axes: {"wire_ms": milliseconds(wire), "exposed_ms": milliseconds(exposed)}
        for axes, (wire, exposed) in found.items()
    }


def named_axes(groups, mesh, per_node):
    """Names the axes of groups, and for parts of an axis if they leave a node."""
    axes = axes_of(groups, mesh) or ("none",)
    name, whole = " x ".join(axes), math.prod(mesh.shape.get(a, 1) for a in axes)
    if all(len(group) == whole for group in groups):
        return name
    in_node = all(len({i // per_node for i in group}) == 1 for group in groups)
    return f"{name} {'in' if in_node else 'between'} nodes"


def temporaries(compiled):
    return round(compiled.memory_analysis().temp_size_in_bytes / 1e9, 3)


def milliseconds(seconds):
    return round(seconds * 1e3, 2)
