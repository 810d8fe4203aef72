"""Liveness of values in memory, from the trace of a step."""
