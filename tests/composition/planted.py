"""Faults put into the library, to see how soon compositions find them.

Each changes one function where it is used, for as long as a context is open.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
from flax import linen
from jax import lax

from fsdp_jax.optim import _layer_wise
from fsdp_jax.pipeline import _layer_permute
from fsdp_jax.sharding import _config, _fully_shard, _model_def
from fsdp_jax.step import (
    _aux_outputs,
    _collectives,
    _loss,
    _loss_arguments,
    _loss_check,
    _module_units,
    _prefetch,
    _prefetch_stack,
    _unit_order,
)
from fsdp_jax.training import _gradients, _microbatch_grads, _update

Change = Callable[[Any], Any]
"""From a function, or a table, to one with a fault."""

Fault = tuple[tuple[Any, str, Change], ...]
"""Where it is, and what is done to each function there."""


@contextlib.contextmanager
def planted(fault: Fault) -> Iterator[None]:
    """Has a fault in the library while it is open."""
    with contextlib.ExitStack() as stack:
        for owner, attribute, change in fault:
            faulty = change(getattr(owner, attribute))
            stack.enter_context(mock.patch.object(owner, attribute, faulty))
        yield


@contextlib.contextmanager
def watched(faults: Mapping[str, Fault]) -> Iterator[set[str]]:
    """Yields the names of faults whose functions have been called while it is open.

    Those that are not called by a run would not change it.
    """
    called: set[str] = set()

    def recording(name, original):
        def run(*args, **kwargs):
            called.add(name)
            return original(*args, **kwargs)

        return run

    with contextlib.ExitStack() as stack:
        for name, fault in faults.items():
            for owner, attribute, _ in fault:
                watching = recording(name, getattr(owner, attribute))
                stack.enter_context(mock.patch.object(owner, attribute, watching))
        yield called


def _instead(faulty: Callable[..., Any]) -> Change:
    return lambda original: faulty


def _own_piece(original):
    def reduce(row, grad, axes):
        dim = _collectives._split_dim(row, grad)
        size = grad.shape[dim] // lax.axis_size(axes)
        start = lax.axis_index(axes) * size
        return lax.dynamic_slice_in_dim(grad, start, size, dim)

    return reduce


def _turned(original):
    def gather(row, value, axes):
        return jnp.flip(original(row, value, axes), _collectives._split_dim(row, value))

    return gather


def _trains_all(original):
    def plan_param(*args):
        *before, config, model = args
        return original(*before, dataclasses.replace(config, frozen=()), model)

    return plan_param


def _in_main_dtype(original):
    def resolve(self, name, dtype):
        found = original(self, name, dtype)
        return dataclasses.replace(found, param=found.main_params)

    return resolve


def _without_sow(original):
    @contextlib.contextmanager
    def gathering():
        lost = mock.patch.object(linen.Module, "sow", lambda *_, **__: False)
        with original(), lost:
            yield

    return gathering


@contextlib.contextmanager
def _no_sync(axes):
    del axes
    yield


def _one_mean(original):
    return lambda mesh, axes: (
        1 if axes == _gradients.DATA_AXES else original(mesh, axes)
    )


def _always_once(original):
    def trace(loss, shards, *args, **kwargs):
        run, _ = original(loss, shards, *args, **kwargs)
        return run, {shard.param.name for shard in shards}

    return trace


def _gathered_once(original):
    return lambda plan, gathers: original(plan, dict.fromkeys(gathers, 1))


def _summed_means(aux, axes):
    reduced = {k: [lax.psum(x, axes) for x in aux[k]] for k in ("means", "sums")}
    return {**reduced, "rows": aux["rows"]}


def _first_rows(original):
    def split(batch, num_microbatches):
        cut = original(batch, num_microbatches)
        return jax.tree.map(lambda x: jnp.broadcast_to(x[:1], x.shape), cut)

    return split


def _rows_by_microbatch(rows):
    return jax.tree.map(lambda x: x.swapaxes(0, 1).reshape(-1, *x.shape[2:]), rows)


def _at_first(original):
    return lambda tree, *_: original(tree, 0)


def _put_first(original):
    return lambda stacked, slices, _: original(stacked, slices, 0)


def _unchecked(**none: Any) -> Change:
    """A check of how shards are used that does not see some misuses."""
    return lambda check: lambda uses: check(dataclasses.replace(uses, **none))


def _in_float32(original):
    def sum_and_count(loss):
        total, count = original(loss)
        return total, jnp.asarray(count, jnp.float32)

    return sum_and_count


def _turned_over(original):
    """A stack of matrices of one shape, the last one first."""
    return lambda deal, stack: original(deal, jnp.flip(stack, 0))


PLANTED: Mapping[str, Fault] = {
    "no sum over replicas": (
        (_collectives, "_all_reduce", _instead(lambda row, grad, axes: grad)),
    ),
    "a rank's own piece of a gradient": (
        (_collectives, "_reduce_scatter", _own_piece),
    ),
    "pieces gathered in another order": ((_collectives, "all_gather", _turned),),
    "earlier microbatches doubled": (
        (_collectives, "accumulated", _instead(lambda row, grad, new: grad + 2 * new)),
    ),
    "earlier microbatches lost": (
        (_microbatch_grads, "accumulated", _instead(lambda row, grad, new: new)),
    ),
    "the first microbatch again": ((_gradients, "split_microbatches", _first_rows),),
    "late axes not reduced": (
        (
            _microbatch_grads,
            "reduce_deferred",
            lambda f: lambda row, g, axes: f(row, 0.5 * g, axes),
        ),
    ),
    "a gradient divided by no ranks": ((_gradients, "num_devices", _one_mean),),
    "a gradient divided by no tokens": (
        (_gradients, "_all_divided", _instead(lambda rows, grads, count: list(grads))),
    ),
    "the loss of one rank": ((_gradients, "_sum", _instead(lambda x, axes: x)),),
    "statistics of the rank's own rows": (
        (_loss, "sync_batch_norms", _instead(lambda model, axes: model)),
        (_loss, "sync_linen_batch_norms", _instead(_no_sync)),
    ),
    "statistics that stay as they were": (
        (
            _gradients,
            "reduce_state",
            _instead(lambda plan, before, after, axes: before),
        ),
    ),
    "sown values lost": ((_loss, "gather_at_units", _without_sow),),
    "frozen parameters trained": ((_fully_shard, "_plan_param", _trains_all),),
    "a cast undone": ((_config.MixedPrecisionPolicy, "resolve", _in_main_dtype),),
    "a rule that meets earlier microbatches": (
        (_microbatch_grads, "trace_gradients", _always_once),
    ),
    "a stack gathered twice, finished twice": (
        (_microbatch_grads, "_finished_in_backward", _gathered_once),
        (_microbatch_grads, "trace_gradients", _always_once),
    ),
    "means that are sums": ((_gradients, "reduce_aux", _instead(_summed_means)),),
    "rows by microbatch": (
        (_aux_outputs, "join_microbatches", _instead(_rows_by_microbatch)),
    ),
    "the first layer gathered ahead": ((_prefetch_stack, "unit_at", _at_first),),
    "gradients put at the first layer": ((_prefetch, "_put", _put_first),),
    "momentum forgotten": (
        (
            _update,
            "in_dtypes_of",
            _instead(lambda like, tree: jax.tree.map(jnp.zeros_like, tree)),
        ),
    ),
    "weights of another unit": (
        # All gathers of one shape look like the same one.
        (
            _unit_order,
            "_key",
            _instead(lambda eqn, _: (eqn.primitive.name, str(eqn.params))),
        ),
    ),
    "elements moved outside of their unit": (
        (_loss_check, "_refuse_misuse", _unchecked(rearranged=set())),
        (_loss_check, "_refuse_changed_gradients", _instead(lambda grads: None)),
    ),
    "a cast outside of the unit undone": (
        (_loss_check, "_refuse_misuse", _unchecked(cast={})),
    ),
    "a penalty on a piece of a weight": (
        (_loss_check, "_refuse_misuse", _unchecked(misread=set())),
    ),
    "a derivative by a piece of a weight": (
        (_loss_check, "_refuse_inner_derivatives", _instead(lambda facts: None)),
        (_loss_check, "_refuse_changed_gradients", _instead(lambda grads: None)),
        (_loss_check, "_refuse_misuse", _instead(lambda uses: None)),
    ),
    "a bound key overridden": (
        (_loss_arguments, "_binds_key", _instead(lambda fn: False)),
    ),
    "tokens counted in float32": ((_loss, "_sum_and_count", _in_float32),),
    "what an nnx unit writes lost": (
        (_module_units, "object_pairs", _instead(lambda outer, inner: [])),
    ),
    "constants and statistics trained": (
        (_model_def, "state_names", _instead(lambda *_: frozenset())),
    ),
    "updates of another matrix": ((_layer_wise, "_unstacked", _turned_over),),
    "layers of virtual stages in the order stored": (
        (_layer_permute, "_exchange", _instead(lambda row, stages, tree, _: tree)),
    ),
}
"""What is wrong -> the fault."""
