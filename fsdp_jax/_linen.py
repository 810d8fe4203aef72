"""Units of linen modules: submodules whose parameters lie under a unit's path."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from flax import linen as nn

from fsdp_jax._shard import partition, shards_of
from fsdp_jax._unit import call_unit


@contextmanager
def gather_at_units(units: Sequence[str]) -> Iterator[None]:
    """While open, a linen submodule at one of `units` gathers its weights when called.

    Args:
      units: Paths such as `params.Block_0`, as in the variables.
    """

    def intercept(next_fun, args, kwargs, context: nn.module.InterceptorContext):
        module = context.module
        path = ".".join(("params", *module.path)) if module.scope else None
        if context.method_name != "__call__" or path not in units:
            return next_fun(*args, **kwargs)
        shards = shards_of(module.variables)
        # A lifted scan calls its wrapper, with the whole stack, under the same path.
        if not shards or not all(shard.is_slice for shard in shards):
            return next_fun(*args, **kwargs)
        start = f"{path}."
        within = [u.removeprefix(start) for u in units if u.startswith(start)]
        return _call(module, args, kwargs, [f"params.{unit}" for unit in within])

    with nn.intercept_methods(intercept):
        yield


def _call(module: nn.Module, args: tuple, kwargs: dict, within: Sequence[str]) -> Any:
    """Applies `module` as a pure function of its weights and everything else.

    Units within it are named by their paths from it: it runs detached from the model.
    """
    assert module.scope is not None
    shards, others, merge = partition(module.variables)
    rngs = {name: module.make_rng(name) for name in module.scope.rngs}
    mutable = [c for c in module.variables if module.is_mutable_collection(c)]
    detached = module.clone(parent=None, name=None)

    def compute(whole, others, rngs, args, kwargs):
        variables = merge(whole, others)
        with gather_at_units(within):
            return detached.apply(
                variables, *args, rngs=rngs, mutable=mutable, **kwargs
            )

    out, written = call_unit(compute, shards, others, rngs, args, kwargs)
    for collection, tree in written.items():
        for name, value in tree.items():
            module.put_variable(collection, name, value)
    return out
