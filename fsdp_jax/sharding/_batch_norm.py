"""BatchNorm statistics over the rows of all ranks, of which each rank has its own.

The statistics are means, so averaging them over the data axes where they are computed
is enough, and the backward follows by differentiation. The classes of flax and equinox
take the axis names as an argument.
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
"""Named scope in which the statistics of flax's BatchNorms are averaged over ranks."""

SYNC_SCOPES = (SCOPE, "eqx.nn.BatchNorm")
"""`SCOPE` and equinox's own scope; the planner looks for both in compiled programs."""


def sync_batch_norms(model: Any, axes: Axes) -> Any:
    """Returns the model with BatchNorm statistics averaged over mesh axes.

    Args:
      model: An nnx module, which is changed in place (pass a copy), or a pytree, which
        may contain equinox modules.
      axes: Data axes of the mesh. A BatchNorm that names mesh axes itself keeps its
        own.
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
    """Averages the statistics of linen's BatchNorms over mesh axes while open."""

    def intercept(next_fun, args, kwargs, context: linen.module.InterceptorContext):
        module = context.module
        is_local = isinstance(module, linen.BatchNorm) and not _names_mesh(module)
        if not axes or not is_local or context.method_name == "setup":
            return next_fun(*args, **kwargs)
        _refuse_mask(module, args, kwargs, axes)
        own = module.axis_name
        # Linen modules are frozen dataclasses. This one is the copy that flax bound for
        # this call, so no object of the user's changes.
        object.__setattr__(module, "axis_name", _names(module) + axes)
        try:
            with jax.named_scope(SCOPE):
                return next_fun(*args, **kwargs)
        finally:
            object.__setattr__(module, "axis_name", own)

    # A jitted function traced earlier would not call the interceptor.
    with retraced((SCOPE, axes)), linen.intercept_methods(intercept):
        yield


def _names(norm: Any) -> Axes:
    """Axes over which a BatchNorm already averages, usually those of `vmap`."""
    own = norm.axis_name
    if own is None:
        return ()
    return tuple(own) if isinstance(own, list | tuple) else (own,)


def _names_mesh(norm: Any) -> bool:
    """Returns whether the BatchNorm names mesh axes itself; it then keeps to these."""
    return bool(set(_names(norm)) & set(AXES))


# Cached, since nnx compares graph definitions by type: equal models share one class.
@functools.cache
def _synced_class(cls: type, axes: Axes) -> type:
    """Returns the subclass of an nnx BatchNorm class that averages over `axes`."""

    def __call__(self, *args, **kwargs):
        _refuse_mask(self, args, kwargs, axes)
        with jax.named_scope(SCOPE):
            return cls.__call__(self, *args, **kwargs)

    # Reprs and errors show the original's name.
    namespace = {
        "__call__": __call__,
        "__module__": cls.__module__,
        "__qualname__": cls.__qualname__,
        "__doc__": cls.__doc__,
    }
    return type(cls)(cls.__name__, (cls,), namespace)


def _refuse_mask(module: Any, args: tuple, kwargs: dict[str, Any], axes: Axes) -> None:
    """Refuses a mask: the mean of the ranks' masked means is not the masked mean."""
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
        # Equinox modules are frozen; a copy leaves the caller's as it is.
        synced = copy.copy(node)
        object.__setattr__(synced, "axis_name", _names(node) + axes)
        return synced

    if not classes:
        return model
    return jax.tree.map(sync, model, is_leaf=lambda node: isinstance(node, classes))
