"""The training step of a plan: gather, compute, reduce and update in one program."""

from __future__ import annotations

import dataclasses
import itertools
import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal, get_args

import jax
import optax

from fsdp_jax._tree import PyTree
from fsdp_jax.data._batch import check_batch, place_batch
from fsdp_jax.launch._progress import TRAIN_STEP, report_progress
from fsdp_jax.sharding._ambient_mesh import check_plan, in_own_mesh, own_mesh
from fsdp_jax.sharding._padded import unpack
from fsdp_jax.sharding._plan import Plan
from fsdp_jax.step._loss import LossForm
from fsdp_jax.step._loss_arguments import LossFn, takes_key
from fsdp_jax.step._model_state import check_call
from fsdp_jax.training._call_check import ParamsWatch, StateWatch, is_traced
from fsdp_jax.training._compiler_options import options_for
from fsdp_jax.training._cpu_sync import settle
from fsdp_jax.training._grad_check import raise_if_not_finite
from fsdp_jax.training._gradients import global_grads
from fsdp_jax.training._loss_scale import LossScale
from fsdp_jax.training._memory_check import MemoryWatch
from fsdp_jax.training._stage_check import StageWatch
from fsdp_jax.training._state import TrainState, abstract_state
from fsdp_jax.training._step_function import StepOptions, step_function
from fsdp_jax.training._update import make_update

OnNonfinite = Literal["raise", "skip"]
"""What a step does where a gradient is not finite."""


def value_and_grad(
    plan: Plan,
    loss_fn: LossFn,
    has_aux: bool = False,
    num_microbatches: int = 1,
    *,
    calculate_per_token_loss: bool = False,
) -> Callable[..., Any]:
    """Makes the sharded `jax.value_and_grad`, for custom training loops.

    Args:
      plan: Plan from `fully_shard`.
      loss_fn: `loss_fn(model, batch) -> loss`, the mean over the rows of `batch`; it
        sees unsharded weights and this device's rows. If it has an argument `key`, it
        gets a different key for each data rank and microbatch.
      has_aux: Whether `loss_fn` returns `(loss, aux)`. Floating-point scalars of `aux`
        are averaged over ranks and microbatches, integer ones summed, booleans counted
        (how many ranks and microbatches say so), and arrays are concatenated along
        their first dim, as rows of the batch.
      num_microbatches: Number of microbatches per call; gradients are their mean.
      calculate_per_token_loss: Whether `loss_fn` returns `(sum, count)` instead of the
        loss. The loss then is the sum of all sums over the sum of all counts, so that
        each token weighs the same however many its rank and microbatch have. The name
        is Megatron's; without it, each rank and microbatch weighs the same.

    Returns:
      `fn(params, batch, *, key=None, model_state=None) -> ((loss, aux), grads)`,
      jitted; `aux` is None without `has_aux`. Gradients match `plan.grads`: None for
      frozen parameters (see `trainable` and `apply_updates`), and for the state of
      flax's fp8 products its next values, which `make_train_step` writes back. The loss
      is the mean over the global batch. With `model_state`, which a model with dropout
      or BatchNorm needs, the result is `((loss, aux, model_state), grads)`.

    Raises:
      ValueError: From the call, if the batch does not divide into ranks and
        microbatches, or randomness is needed and no `key` is given.

    Examples:
      >>> loss_and_grads = fsdp.value_and_grad(plan, loss_fn)
      >>> (loss, aux), grads = loss_and_grads(params, batch)
      >>> grads["head"].sharding == params["head"].sharding
      True
    """
    check_plan(plan, "value_and_grad")
    form = LossForm(has_aux, calculate_per_token_loss)
    packed = global_grads(plan, loss_fn, form, num_microbatches)
    needs_key = takes_key(loss_fn) or plan.has_keys
    shardings = jax.tree.map(lambda leaf: leaf.sharding, plan.grads)

    def logical(*args):
        value, grads = packed(*args)
        return value, unpack(grads)

    compute = jax.jit(logical, out_shardings=(None, shardings))
    watch, stages = ParamsWatch(plan), StageWatch(plan)

    def fn(params, batch, *, key=None, model_state=None):
        watch.look(params)
        check_call(plan, needs_key, key, model_state)
        check_batch(plan, batch, num_microbatches)
        key = jax.random.key(0) if key is None else key
        given = plan.model_state if model_state is None else model_state
        batch = place_batch(plan, batch)
        with own_mesh(plan.mesh):
            stages.look(compute, params, batch, key, given)
            outputs = settle(plan.mesh, compute(params, batch, key, given))
        (value, new_state, _), grads = outputs
        return value if model_state is None else (*value, new_state), grads

    return fn


# Compared and hashed by identity, as functions are: jax.lax.scan hashes what it runs.
@dataclasses.dataclass(frozen=True, eq=False)
class TrainStep:
    """Jitted training step: `state, metrics = step(state, batch)`.

    It is a function of arrays too, for `jax.lax.scan(step, state, batches)` or a
    `jax.jit` of one's own, to which one passes `compiler_options`.

    Attributes:
      plan: Plan that it was made for.
      num_microbatches: Number of microbatches per step.
      abstract: State that it takes and returns, as `abstract_state` makes it.
      jitted: `jax.jit` function of `(state, batch)`; the state is donated.
      on_nonfinite: Option of `make_train_step`; with `"raise"` each call blocks on its
        step and checks the gradients.
      watch: Memory check of each program before it first runs.
      compiler_options: XLA options that `jitted` compiles with.
    """

    plan: Plan
    num_microbatches: int
    abstract: TrainState
    jitted: Any
    on_nonfinite: OnNonfinite | None = None
    watch: MemoryWatch = dataclasses.field(default_factory=MemoryWatch)
    compiler_options: dict[str, bool | int | str] | None = None
    _calls: Iterator[int] = dataclasses.field(
        default_factory=lambda: itertools.count(1), repr=False
    )
    _states: StateWatch = dataclasses.field(init=False, repr=False)
    _stages: StageWatch = dataclasses.field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_states", StateWatch(self.abstract))
        object.__setattr__(self, "_stages", StageWatch(self.plan))

    def __call__(self, state: TrainState, batch: PyTree) -> tuple[TrainState, PyTree]:
        """Runs one step; the old state is donated.

        Raises:
          ValueError: If the state was donated to an earlier call or is not of the
            step's plan and optimizer, or the batch does not divide into ranks and
            microbatches.
          FloatingPointError: With `on_nonfinite="raise"`, if a gradient is not finite;
            it names the parameters and the step.
        """
        if isinstance(batch, TrainState):
            raise ValueError("The batch is a TrainState: call step(state, batch).")
        check_batch(self.plan, batch, self.num_microbatches)
        self._states.look(state)
        batch = place_batch(self.plan, batch)
        if is_traced(state, batch):
            return self._traced(state, batch)
        report_progress(f"call {next(self._calls)} {TRAIN_STEP}")
        with own_mesh(self.plan.mesh):
            self.watch.look(self.jitted, state, batch)
            self._stages.look(self.jitted, state, batch)
            # `state` is deleted by donation from here on.
            new, metrics = settle(self.plan.mesh, self.jitted(state, batch))
        self._states.keep(new)
        if self.on_nonfinite == "raise":
            raise_if_not_finite(self.plan, metrics["grad_peaks"], int(new.step))
        return new, metrics

    def _traced(self, state: TrainState, batch: PyTree) -> tuple[TrainState, PyTree]:
        """Adds the step to the program that is being traced."""
        if self.on_nonfinite == "raise":
            raise ValueError(
                "make_train_step(on_nonfinite='raise') reads the gradients after each "
                "call, which a step within jax.jit or jax.lax.scan cannot. Use "
                "on_nonfinite='skip'."
            )
        if self.compiler_options:
            # jax takes options of the outermost program alone.
            logging.getLogger("fsdp_jax").warning(
                "A step within another jax.jit compiles with the options of that: pass "
                "it compiler_options=step.compiler_options."
            )
        shardings = jax.tree.map(lambda leaf: leaf.sharding, self.abstract)
        inner = jax.jit(self.jitted.__wrapped__, out_shardings=(shardings, None))
        with own_mesh(self.plan.mesh):
            return inner(state, batch)

    def lower(self, state: PyTree, batch: PyTree) -> jax.stages.Lowered:
        """Lowers the step for concrete or abstract arguments, for inspection."""
        check_batch(self.plan, batch, self.num_microbatches)
        shapes = jax.tree.map(
            lambda x, sharding: jax.ShapeDtypeStruct(
                x.shape, jax.dtypes.canonicalize_dtype(x.dtype), sharding=sharding
            ),
            batch,
            self.plan.batch_shardings(batch),
        )
        with own_mesh(self.plan.mesh):
            return self.jitted.lower(state, shapes)


@in_own_mesh
def make_train_step(
    plan: Plan,
    loss_fn: LossFn,
    tx: optax.GradientTransformation,
    *,
    has_aux: bool = False,
    num_microbatches: int = 1,
    calculate_per_token_loss: bool = False,
    update_model_state: Callable[[Any], Any] | None = None,
    on_nonfinite: OnNonfinite | None = None,
    loss_scale: LossScale | None = None,
    report_grad_peaks: bool = False,
    compiler_options: Mapping[str, bool | int | str] | None = None,
    memory_limit: int | None = None,
) -> TrainStep:
    """Makes the step that updates a `TrainState` with one batch.

    Args:
      plan: Plan from `fully_shard`.
      loss_fn: Loss function, as in `value_and_grad`.
      tx: Optimizer that made the state.
      has_aux: Whether `loss_fn` returns `(loss, aux)`, as in `value_and_grad`.
      num_microbatches: Number of microbatches per step; a step with k equals one with
        the whole batch.
      calculate_per_token_loss: Whether `loss_fn` returns `(sum, count)`, as in
        `value_and_grad`.
      update_model_state: `fn(model)`, called once per step after the microbatches, with
        the state of all ranks, to change arrays that the optimizer does not: arrays
        that are not parameters, and frozen parameters such as a router's bias, from the
        tokens counted (see `Tally`). It modifies the model or returns another; changes
        to trained parameters are discarded.
      on_nonfinite: What to do if a gradient is not finite. `"raise"`: raise a
        `FloatingPointError` with the names of the parameters; each call then blocks on
        its step. `"skip"`: leave parameters, optimizer and model state unchanged, and
        count the step in `state.num_skipped`. None: update as with any gradient.
      loss_scale: Dynamic loss scale for float16: gradients are those of the loss times
        a factor, which is divided out before anything reads them and adapts by itself.
        Steps with non-finite gradients are skipped and counted, as with
        `on_nonfinite="skip"`. Make the state with `init_state(..., loss_scale=...)`.
      report_grad_peaks: Whether metrics include `grad_peaks` where neither
        `on_nonfinite` nor `loss_scale` requires them.
      compiler_options: XLA options for this program alone, as `jax.jit` takes them; {}
        for none. Default `fsdp_jax.training.compiler_options()` on GPUs, and none
        elsewhere. A name that XLA does not know raises when the step compiles.
      memory_limit: Bytes per device that the step may use. Before a program first runs,
        a `MemoryWarning` reports if it uses 95 % of them, or if XLA rematerialized to
        fit. Default the limit that the device reports; CPUs report none and are not
        checked.

    Returns:
      `step(state, batch) -> (state, metrics)`, where metrics hold `loss`, `grad_norm`
      (of the gradient before the optimizer sees it), with `loss_scale` the `loss_scale`
      of the step, with `has_aux` `aux`, and where requested `grad_peaks`: the largest
      magnitude of each gradient, for `largest_grads`.

    Raises:
      ValueError: If two options contradict each other, or the optimizer is
        `optax.MultiSteps` or needs more than gradients, parameters and `value=loss`.

    Examples:
      >>> step = fsdp.make_train_step(plan, loss_fn, tx)
      >>> state = fsdp.init_state(plan, tx, params)
      >>> state, first = step(state, batch)
      >>> state, second = step(state, batch)
      >>> bool(second["loss"] < first["loss"])
      True

    Source: Megatron `DistributedDataParallelConfig.check_for_nan_in_grad` for
      `on_nonfinite="raise"` (there each bucket's norm before the collective; here each
      parameter's, after it, alike on all hosts);
      `finalize_model_grads` for `update_model_state`.
    """
    _check_on_nonfinite(on_nonfinite, loss_scale)
    skips = on_nonfinite == "skip" or loss_scale is not None
    form = LossForm(has_aux, calculate_per_token_loss)
    with_peaks = on_nonfinite == "raise" or skips or report_grad_peaks
    compute = global_grads(plan, loss_fn, form, num_microbatches, with_peaks=with_peaks)
    abstract = abstract_state(plan, tx, loss_scale)
    shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract)
    update = make_update(plan, tx, abstract, may_skip=skips)

    options = StepOptions(has_aux, update_model_state, skips, with_peaks, loss_scale)
    xla_options = options_for(plan, compiler_options)
    jitted = jax.jit(
        step_function(plan, compute, update, abstract, options),
        # The new state reuses the buffers of the old one: only one is in memory.
        donate_argnums=0,
        # Pinned, so that the next step compiles to the same program.
        out_shardings=(shardings, None),
        compiler_options=xla_options,
    )
    watch = MemoryWatch(memory_limit)
    return TrainStep(
        plan, num_microbatches, abstract, jitted, on_nonfinite, watch, xla_options
    )


def _check_on_nonfinite(on_nonfinite: Any, loss_scale: LossScale | None) -> None:
    if on_nonfinite not in (None, *get_args(OnNonfinite)):
        raise ValueError(
            f"make_train_step(on_nonfinite={on_nonfinite!r}): it is None or one of "
            f"{', '.join(map(repr, get_args(OnNonfinite)))}."
        )
    if on_nonfinite == "raise" and loss_scale is not None:
        raise ValueError(
            "make_train_step(on_nonfinite='raise', loss_scale=...): a loss scale skips "
            "the steps at which the other raises. Set only one."
        )
