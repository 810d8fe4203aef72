"""Memory that the planner's liveness sees in a function."""

import jax

from fsdp_jax.planner.liveness._lifetimes import lifetimes
from fsdp_jax.planner.liveness._trace import flatten


def fullest(fn, *args) -> int:
    """The most bytes of a function without loops that lie in memory at once."""
    program = flatten(jax.make_jaxpr(fn)(*args).jaxpr)
    found = lifetimes(program, set(program.inputs))
    live, most = set(), 0
    for made, dead in zip(found.made_at, found.dead_after, strict=True):
        live |= set(made)
        most = max(most, sum(value.bytes for value in live))
        live -= set(dead)
    return most
