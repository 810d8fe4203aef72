"""The ambient mesh of jax, where the caller has set another than the plan's."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import jax
from jax.sharding import AbstractMesh, Mesh

_Fn = TypeVar("_Fn", bound=Callable[..., Any])


@contextmanager
def own_mesh(mesh: Mesh) -> Iterator[None]:
    """Context with `mesh` as the ambient one, if the caller has set one of other axes.

    With `jax.set_mesh` jax refuses arrays and `shard_map`s of any other mesh. A program
    may have set the mesh that its model's annotations name, which a plan does not use.

    Args:
      mesh: Mesh of the plan.
    """
    ambient = jax.sharding.get_abstract_mesh()
    is_own = (ambient.axis_names, ambient.axis_types) == (
        mesh.axis_names,
        mesh.axis_types,
    )
    if ambient.empty or is_own:
        yield
        return
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        yield


@contextmanager
def no_mesh() -> Iterator[None]:
    """Context without an ambient mesh, in which flax's annotations do nothing."""
    with jax.sharding.use_abstract_mesh(AbstractMesh((), ())):
        yield


def in_own_mesh(fn: _Fn) -> _Fn:
    """Wraps a function of a plan, its first argument, so that it runs in `own_mesh`."""

    @functools.wraps(fn)
    def wrapped(plan, *args, **kwargs):
        check_plan(plan, fn.__name__)
        with own_mesh(plan.mesh):
            return fn(plan, *args, **kwargs)

    return wrapped  # pyright: ignore[reportReturnType]  # The same signature.


def check_plan(plan: Any, function: str) -> None:
    """Raises a `ValueError` if a function of a plan is given something else.

    Args:
      plan: What it is given.
      function: Its name.
    """
    if not hasattr(plan, "mesh") or not hasattr(plan, "param_plans"):
        raise ValueError(
            f"{function}: its argument `plan` is a {type(plan).__name__}, not a Plan. "
            "Pass the plan that fsdp_jax.fully_shard returned."
        )
