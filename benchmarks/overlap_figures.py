"""What `overlap.py` says of a compiled step and of its replay."""

from fsdp_jax.hlo._collectives import axes_of


def times(timeline):
    return {
        "step_ms": milliseconds(timeline.seconds),
        "compute_ms": milliseconds(timeline.compute_seconds),
        "wire_ms": milliseconds(timeline.communication_seconds),
        "exposed_ms": milliseconds(timeline.exposed_seconds),
        "exposed_of_step": round(timeline.exposed_seconds / timeline.seconds, 4),
        "floor_ms": milliseconds(floor(timeline)),
    }


def by_axes(timeline, mesh):
    """Seconds of communication over each set of mesh axes, and the exposed ones."""
    found = {}
    for sent in timeline.sent:
        axes = " x ".join(axes_of(sent.collective.groups, mesh) or ("none",))
        wire, exposed = found.get(axes, (0.0, 0.0))
        found[axes] = wire + sent.end - sent.start, exposed + sent.exposed
    return {
        axes: {"wire_ms": milliseconds(wire), "exposed_ms": milliseconds(exposed)}
        for axes, (wire, exposed) in found.items()
    }


def temporaries(compiled):
    return round(compiled.memory_analysis().temp_size_in_bytes / 1e9, 3)


def floor(timeline):
    """The step if the shorter of wire and computation were hidden, each way."""
    work = {"forward": 0.0, "backward": 0.0, "optimizer": 0.0}
    wire = dict.fromkeys(work, 0.0)
    for span in timeline.compute:
        work[span.name] += span.end - span.start
    for sent in timeline.sent:
        way = "backward" if "transpose(" in sent.collective.op_name else "forward"
        wire[way] += sent.end - sent.start
    return sum(max(work[way], wire[way]) for way in work)


def milliseconds(seconds):
    return round(seconds * 1e3, 2)
