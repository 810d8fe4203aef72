"""Audit of a loss: whether it trains on a mesh what it trains on one device."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from types import MappingProxyType

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Key

from fsdp_jax._tree import PyTree, named_leaves
from fsdp_jax.sharding._ambient_mesh import check_plan
from fsdp_jax.sharding._config import PipelineConfig
from fsdp_jax.sharding._fully_shard import fully_shard
from fsdp_jax.sharding._mesh import BATCH_AXES, make_mesh
from fsdp_jax.sharding._plan import Plan
from fsdp_jax.step._loss_arguments import LossFn, takes_key
from fsdp_jax.training._state import init_params, init_state, unshard
from fsdp_jax.training._train_step import value_and_grad

_RTOL, _RTOL_NARROW = 1e-3, 5e-2
"""Differences by the order of sums are 1e-5 in float32, and 1e-2 in bfloat16."""

_SMALL, _SMALL_NARROW = 1e-3, 2e-2
"""A gradient is judged by this part of the norm of all, where its own is less: what
would be zero in exact arithmetic, as of a bias before a norm, is rounding, which in
bfloat16 was measured to be 1e-4 of the norm of all."""

_ROUNDINGS = 4
"""What is written is rounded to the dtype of its array: by half an eps on both sides,
and again where a model computes in it."""

_LISTED = 10


@dataclasses.dataclass(frozen=True)
class AuditedLoss:
    """A loss that is on a mesh what it is on one device.

    Attributes:
      loss: Loss on the mesh.
      loss_on_one_device: Loss of the same rows on one device.
      grad_differences: For each trained parameter the norm of the difference of its
        gradients, as a part of the norm of the gradient.
      state_differences: For each array that is no parameter and no key the norm of the
        difference of what the loss has written, as a part of the norm of its change.
    """

    loss: float
    loss_on_one_device: float
    grad_differences: Mapping[str, float]
    state_differences: Mapping[str, float]

    def __str__(self) -> str:
        """Returns the losses and the largest difference."""
        line = (
            f"as on one device: loss {self.loss:.6g} for {self.loss_on_one_device:.6g},"
            f" gradients within {_largest(self.grad_differences, 'norms')}"
        )
        if self.state_differences:
            line += (
                f", model state within {_largest(self.state_differences, 'changes')}"
            )
        return line


def _largest(differences: Mapping[str, float], whole: str) -> str:
    name, largest = max(differences.items(), key=lambda item: item[1])
    return f"{largest:.1e} of their {whole} ('{name}' differs most)"


def audit_loss(
    plan: Plan,
    loss_fn: LossFn,
    batch: PyTree,
    *,
    params: PyTree | None = None,
    key: Key[Array, ""] | None = None,
    has_aux: bool = False,
    calculate_per_token_loss: bool = False,
    rtol: float | None = None,
) -> AuditedLoss:
    """Checks that a loss on the plan's mesh does what it does on one device.

    A loss sees the rows of one data rank, and the step averages over ranks. So a
    function of all rows that is no mean over them (a contrastive loss, a load-balancing
    loss, a variance, a weighted mean) trains another model on each mesh, and nothing
    fails. Nor does anything where a model writes what is no mean, such as a counter
    that is no `Tally`. This runs the loss once on the mesh and once on its first
    device, and compares loss, gradients, and the arrays that are not parameters. It
    needs memory for the unsharded model and all rows: use a small config of the model,
    and simulated CPU devices where there are no GPUs.

    Args:
      plan: Plan on a mesh of several devices.
      loss_fn: Loss, as for `value_and_grad`. Dropout masks differ from mesh to mesh:
        pass a loss that draws none.
      batch: Rows for all devices, with leading dim `rows`.
      params: Parameters, as for `value_and_grad`; None to initialize them.
      key: PRNG key of the model and of the loss; default `jax.random.key(0)`.
      has_aux: Whether `loss_fn` returns `(loss, aux)`; `aux` is not compared.
      calculate_per_token_loss: Whether `loss_fn` returns `(sum, count)`.
      rtol: Largest difference of the losses, and of the gradients of a parameter and
        the changes of an array by their norm. None for 1e-3, or 5e-2 if the plan
        computes or communicates in 16 bits or fewer.

    Returns:
      Both losses and the differences of gradients and model state; print it for one
      line.

    Raises:
      ValueError: If they differ; it names the parameters and arrays. If the mesh has
        one device, or is of several processes.

    Examples:
      >>> audited = fsdp.audit.audit_loss(plan, loss_fn, batch)
      >>> max(audited.grad_differences.values()) < 1e-3
      True
    """
    check_plan(plan, "audit_loss")
    if plan.mesh.size == 1:
        raise ValueError(
            "audit_loss compares a mesh with one device, and the plan's mesh has 1 "
            "device. Simulate more: jax.config.update('jax_num_cpu_devices', 8) before "
            "any computation."
        )
    if (processes := jax.process_count()) > 1:
        raise ValueError(
            "audit_loss runs the model on one device of this process, and the mesh is "
            f"of {processes} processes. Run it in one, on simulated devices."
        )
    key = jax.random.key(0) if key is None else key
    if params is None:
        params = init_params(plan, key)
    run = _Run(loss_fn, batch, key, has_aux, calculate_per_token_loss)
    alone = _on_one_device(plan)
    values = jax.tree.map(np.asarray, unshard(params))
    found = _compared(
        run(plan, params),
        run(alone, jax.tree.map(_placed, values, alone.params)),
        _SMALL_NARROW if _is_narrow(plan) else _SMALL,
    )
    if rtol is None:
        rtol = _RTOL_NARROW if _is_narrow(plan) else _RTOL
    if wrong := _wrong(found, rtol):
        message = _message(found, wrong, rtol, plan, batch)
        if plan.has_keys or takes_key(loss_fn):
            message += (
                " Random numbers of model or loss differ from mesh to mesh: pass a "
                "loss that draws none, as with dropout's deterministic=True."
            )
        raise ValueError(message)
    return found


@dataclasses.dataclass(frozen=True)
class _Result:
    """What one run has computed.

    Attributes:
      loss: Loss.
      grads: Gradients.
      changes: By name, how arrays that are no parameters and no keys have changed.
    """

    loss: float
    grads: PyTree
    changes: Mapping[str, _Change]


@dataclasses.dataclass(frozen=True)
class _Change:
    """How an array has changed.

    Attributes:
      difference: New value minus old, as a vector; of integers if the array holds them.
      rounding: Norm of what its dtype may have rounded.
    """

    difference: np.ndarray
    rounding: float


@dataclasses.dataclass(frozen=True)
class _Run:
    """One run of the loss and its gradients, on any mesh."""

    loss_fn: LossFn
    batch: PyTree
    key: Key[Array, ""]
    has_aux: bool
    calculate_per_token_loss: bool

    def __call__(self, plan: Plan, params: PyTree) -> _Result:
        compute = value_and_grad(
            plan,
            self.loss_fn,
            self.has_aux,
            calculate_per_token_loss=self.calculate_per_token_loss,
        )
        # For its `model_state`, such as the statistics of a BatchNorm.
        state = init_state(plan, optax.identity(), params, key=self.key)
        (loss, _, written), grads = compute(
            params, self.batch, key=self.key, model_state=state.model_state
        )
        changes = dict(_changes(state.model_state, written))
        return _Result(float(loss), jax.tree.map(np.asarray, unshard(grads)), changes)


def _changes(before: PyTree, after: PyTree) -> Iterator[tuple[str, _Change]]:
    pairs = zip(named_leaves(before), jax.tree.leaves(after), strict=True)
    for (name, old), new in pairs:
        if not jnp.issubdtype(old.dtype, jax.dtypes.prng_key):
            is_float = jnp.issubdtype(old.dtype, jnp.inexact)
            unit = _ROUNDINGS * float(jnp.finfo(old.dtype).eps) if is_float else 0.0
            rounding = unit * float(np.linalg.norm(_wide(new)))
            yield name, _Change(_wide(new) - _wide(old), rounding)


def _on_one_device(plan: Plan) -> Plan:
    """Returns the plan of the same model and dtypes on the first device of the mesh."""
    config = dataclasses.replace(
        plan.config,
        outer_dp_sharding_strategy=0,
        placements=None,
        offload=None,
        pipeline=PipelineConfig(),
    )
    mesh = make_mesh(devices=[plan.mesh.devices.flat[0]])
    return fully_shard(plan.make_model, mesh, units=plan.unit_specs, config=config)


def _placed(value: np.ndarray, like: jax.ShapeDtypeStruct) -> Array:
    return jax.device_put(value, like.sharding)


def _is_narrow(plan: Plan) -> bool:
    """Returns whether the plan computes or communicates in 16 bits or fewer."""
    dtypes = {
        jnp.dtype(dtype)
        for param in plan.param_plans
        for dtype in (param.precision.param, param.precision.grad_comm)
    }
    is_rounded = plan.config.mp_policy.param_gather is not None
    return is_rounded or any(dtype.itemsize < 4 for dtype in dtypes)


def _compared(found: _Result, wanted: _Result, small: float) -> AuditedLoss:
    grads = {
        name: (_wide(one), _wide(other))
        for (name, one), other in zip(
            named_leaves(found.grads), jax.tree.leaves(wanted.grads), strict=True
        )
        if jnp.issubdtype(one.dtype, jnp.inexact)
    }
    # Each by its own norm if it counts, since a large count would hide statistics.
    counts, statistics, rounding = {}, {}, {}
    for name, change in found.changes.items():
        other = wanted.changes[name]
        is_count = np.issubdtype(change.difference.dtype, np.integer)
        pair = change.difference, other.difference
        (counts if is_count else statistics)[name] = pair
        rounding[name] = max(change.rounding, other.rounding)
    state = dict(_differences(statistics, small, rounding))
    state |= dict(_differences(counts, 0.0))
    return AuditedLoss(found.loss, wanted.loss, dict(_differences(grads, small)), state)


def _differences(
    pairs: Mapping[str, tuple[np.ndarray, np.ndarray]],
    small: float,
    rounding: Mapping[str, float] = MappingProxyType({}),
) -> Iterator[tuple[str, float]]:
    """Yields each name, and how far its arrays are apart as a part of the second.

    Args:
      pairs: Both arrays, by name.
      small: Part of the norm of all that an array's own norm counts as at least.
      rounding: Norm that is no difference yet, by name; of others zero.
    """
    of_all = math.hypot(*(float(np.linalg.norm(other)) for _, other in pairs.values()))
    for name, (one, other) in pairs.items():
        norm = max(float(np.linalg.norm(other)), small * of_all)
        apart = float(np.linalg.norm(one - other))
        apart = 0.0 if apart <= rounding.get(name, 0.0) else apart
        of_nothing = math.inf if apart else 0.0
        yield name, apart / norm if norm else of_nothing


def _wide(array: jax.typing.ArrayLike) -> np.ndarray:
    """Returns a vector of the widest dtype of its kind; bools are integers."""
    array = np.asarray(array)
    if not jnp.issubdtype(array.dtype, jnp.inexact):
        return array.astype(np.int64).reshape(-1)
    is_complex = jnp.issubdtype(array.dtype, jnp.complexfloating)
    return array.astype(np.complex128 if is_complex else np.float64).reshape(-1)


def _wrong(found: AuditedLoss, rtol: float) -> list[str]:
    """Returns what differs, the largest difference first."""
    wrong = [
        f"the gradient of '{name}' by {part:.2g} of its norm"
        for name, part in _beyond(found.grad_differences, rtol)
    ]
    wrong += [
        f"what the loss writes to '{name}' by {part:.2g} of its change"
        for name, part in _beyond(found.state_differences, rtol)
    ]
    loss, wanted = found.loss, found.loss_on_one_device
    if not abs(loss - wanted) <= rtol * abs(wanted):
        wrong.insert(0, f"loss {loss:.6g} for {wanted:.6g}")
    return wrong


def _beyond(differences: Mapping[str, float], rtol: float) -> list[tuple[str, float]]:
    """Returns the differences above `rtol`, the largest first."""
    by_size = sorted(differences.items(), key=lambda item: -item[1])
    # Not `>`, for which NaN would pass.
    return [(name, part) for name, part in by_size if not part <= rtol]


def _message(
    found: AuditedLoss, wrong: list[str], rtol: float, plan: Plan, batch: PyTree
) -> str:
    ranks = math.prod(plan.mesh.shape[axis] for axis in BATCH_AXES)
    rows = len(jax.tree.leaves(batch)[0])
    listed = "".join(f"\n  {line}" for line in wrong[:_LISTED])
    if len(wrong) > _LISTED:
        listed += f"\n  and {len(wrong) - _LISTED} more"
    states = _beyond(found.state_differences, rtol)
    reasons = [
        f"The loss on {plan.mesh.size} devices is not that of one device:{listed}\n"
        f"Each of {ranks} data ranks computes it for {rows // ranks} of {rows} rows."
    ]
    if len(wrong) > len(states):
        reasons.append(_reason_of_loss(found, ranks))
    if states:
        reasons.append(
            "What ranks write to arrays that are not parameters is averaged, and of "
            "integers the largest is taken: count in a fsdp_jax.step.Tally, an nnx "
            "variable that ranks add to, or write what is alike on all ranks, by "
            f"jax.lax.psum, pmean or pmax over {BATCH_AXES}."
        )
    return " ".join(reasons)


def _reason_of_loss(found: AuditedLoss, ranks: int) -> str:
    if math.isclose(found.loss * ranks, found.loss_on_one_device, rel_tol=1e-3):
        return (
            f"The average of theirs is the loss, and this one is {ranks} times as "
            "large on one device, as a sum over rows is: divide it by their number."
        )
    return (
        "The average of theirs is the loss: it has to be the mean over its rows. "
        "Gather what needs all rows with jax.lax.all_gather, or average it with "
        f"jax.lax.pmean, over {BATCH_AXES}; for a weighted mean return (sum, count) "
        "with calculate_per_token_loss=True."
    )
