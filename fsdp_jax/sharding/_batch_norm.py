"""BatchNorm over the rows of all ranks, where each rank has but its own.

Its statistics are means, so they are averaged over the data axes where they are made,
and its backward follows. The classes of flax and equinox have an argument for that.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax
from flax import linen, nnx

from fsdp_jax.sharding._mesh import AXES
from fsdp_jax.sharding._variables import equinox_classes, retraced

Axes = tuple[str, ...]

SCOPE = "sync_batch_norm"
"""Named scope in which statistics of flax's are averaged over ranks."""

SYNC_SCOPES = (SCOPE, "eqx.nn.BatchNorm")
"""The same, with equinox's own; the planner reads them in programs."""


def sync_batch_norms(model: Any, axes: Axes) -> Any:
    """The model with the statistics of its BatchNorms averaged over mesh axes.

    Args:
      model: An nnx module, changed in place (hand in a copy), or a pytree, perhaps with
        equinox modules.
      axes: Data axes of the mesh. A BatchNorm that names mesh axes itself keeps these.
    """
    if not axes:
        return model
    if not isinstance(model, nnx.Module):
        return _sync_equinox(model, axes)
    for _, module in list(nnx.iter_modules(model)):
        if isinstance(module, nnx.BatchNorm) and not _names_mesh(module):
            module.axis_name = _names(module) + axes  # pyright: ignore
            module.__class__ = _synced_class(type(module), axes)
    return model


@contextmanager
def sync_linen_batch_norms(axes: Axes) -> Iterator[None]:
    """While open, linen's BatchNorms average their statistics over mesh axes."""

    def intercept(next_fun, args, kwargs, context: linen.module.InterceptorContext):
        module = context.module
        is_local = isinstance(module, linen.BatchNorm) and not _names_mesh(module)
        if not axes or not is_local or context.method_name == "setup":
            return next_fun(*args, **kwargs)
        _refuse_mask(module, args, kwargs, axes)
        own = module.axis_name
        # A bound module is flax's own copy, and frozen to the user alone.
        object.__setattr__(module, "axis_name", _names(module) + axes)
        try:
            with jax.named_scope(SCOPE):
                return next_fun(*args, **kwargs)
        finally:
            object.__setattr__(module, "axis_name", own)

    with retraced((SCOPE, axes)), linen.intercept_methods(intercept):
        yield


def _names(norm: Any) -> Axes:
    """Axes over which a BatchNorm takes its means already, those of `vmap` mostly."""
    own = norm.axis_name
    if own is None:
        return ()
    return tuple(own) if isinstance(own, list | tuple) else (own,)


def _names_mesh(norm: Any) -> bool:
    """Whether it names axes of the mesh itself, and is to keep to these."""
    return bool(set(_names(norm)) & set(AXES))


@functools.cache
def _synced_class(cls: type, axes: Axes) -> type:
    """The subclass of an nnx BatchNorm class that averages over `axes`."""

    def __call__(self, *args, **kwargs):
        _refuse_mask(self, args, kwargs, axes)
        with jax.named_scope(SCOPE):
            return cls.__call__(self, *args, **kwargs)

    namespace = {
        "__call__": __call__,
        "__module__": cls.__module__,
        "__qualname__": cls.__qualname__,
        "__doc__": cls.__doc__,
    }
    return type(cls)(cls.__name__, (cls,), namespace)


def _refuse_mask(module: Any, args: tuple, kwargs: dict[str, Any], axes: Axes) -> None:
    """A mean of the ranks' masked means is not that of all rows that are not masked."""
    told = args[1] if len(args) > 1 else kwargs.get("use_running_average")
    is_running = module.use_running_average if told is None else told
    if kwargs.get("mask") is None or is_running:
        return
    raise ValueError(
        f"{type(module).__name__}(mask=...) averages over {', '.join(axes)} the means "
        "that each rank has of its own rows, however many of these the mask leaves. "
        "Use FSDPConfig(sync_batch_norm=False), where each rank has its own "
        "statistics, or rows that need no mask."
    )


def _sync_equinox(model: Any, axes: Axes) -> Any:
    classes = equinox_classes("BatchNorm")

    def sync(node):
        if not isinstance(node, classes) or _names_mesh(node):
            return node
        synced = copy.copy(node)
        object.__setattr__(synced, "axis_name", _names(node) + axes)
        return synced

    if not classes:
        return model
    return jax.tree.map(sync, model, is_leaf=lambda node: isinstance(node, classes))
