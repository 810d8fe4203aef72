"""What jax traces or compiles while something runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import jax
import jax.numpy as jnp


@contextmanager
def compilations() -> Iterator[list[str]]:
    """Collects the events of tracing and compiling; checks that it can hear them."""
    heard: list[str] = []

    def listen(event: str, duration: float, **_):
        if "compile" in event or "trace" in event:
            heard.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield heard
        events = len(heard)
        jax.jit(lambda x: x + 1.5)(jnp.ones(3))
        assert len(heard) > events
        del heard[events:]
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
