"""`fsdp-jax train`: trains a model on text and saves checkpoints."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

from jax.sharding import Mesh

import fsdp_jax as fsdp
from fsdp_jax.checkpoint._paths import as_path, is_local
from fsdp_jax.cli._callback import Callback, load_callback
from fsdp_jax.cli._chain import link_in
from fsdp_jax.cli._data_config import options_of_kind, refuse_document_options
from fsdp_jax.cli._decoder_loss import document_loss, training_loss
from fsdp_jax.cli._document_data import DocumentData
from fsdp_jax.cli._elastic import num_microbatches, with_replicas
from fsdp_jax.cli._errors import check_absent, check_creatable
from fsdp_jax.cli._held_out import HeldOut, hold_out
from fsdp_jax.cli._log import say
from fsdp_jax.cli._model_source import (
    Origin,
    files_to_carry,
)
from fsdp_jax.cli._options import Devices, Group
from fsdp_jax.cli._preference_loss import (
    check_preferences,
    preference_loss,
    reward_model_loss,
)
from fsdp_jax.cli._profile import Profile, Window
from fsdp_jax.cli._records import check_kinds, has_records
from fsdp_jax.cli._reference_model import add_reference
from fsdp_jax.cli._replay import ReplayOptions
from fsdp_jax.cli._reward_model import start_origin
from fsdp_jax.cli._run import Run
from fsdp_jax.cli._run_file import options_by_section
from fsdp_jax.cli._run_marker import (
    Command,
    digest_of,
    has_written,
    is_begun,
)
from fsdp_jax.cli._run_options import EvalOptions, LogOptions, SaveOptions
from fsdp_jax.cli._samples import make_samples
from fsdp_jax.cli._sharding_options import Strategy
from fsdp_jax.cli._step_metadata import make_metadata
from fsdp_jax.cli._tokens import check_files
from fsdp_jax.cli._train_config import (
    TrainConfig,
    option_values,
)
from fsdp_jax.cli._train_loop import run_steps
from fsdp_jax.cli._train_options import (
    BatchOptions,
    ExpertOptions,
    LoRAOptions,
    MeshOptions,
    OptimizerOptions,
    PrecisionOptions,
    StartOptions,
)
from fsdp_jax.cli._train_plan import plan_run
from fsdp_jax.cli._train_start import (
    check_ranges,
    check_steps,
    open_start,
    options_at_start,
    start_state,
)
from fsdp_jax.cli._training_data import (
    TrainingData,
    batches_of,
    describe,
    move_to,
    name_rows,
    read_data,
)


@dataclasses.dataclass(frozen=True)
class Train:
    """Train a Hugging Face model, fully sharded, on text or on JSON Lines.

    Text files are cut into rows. Each line of a .jsonl file is a document: `text`,
    `messages` in the model's chat template, or `prompt` and `completion`; of the last
    two the completions are trained. With --objective dpo and reward each is a pair:
    `chosen`, `rejected` and `prompt`.

    Writes the metrics of each step to stdout: one JSON object a line, or a line of text
    on a terminal.

    fsdp-jax train RUN.yaml [--set SECTION.OPTION=VALUE] takes options from a file;
    others on the command line replace them. `fsdp-jax schema` describes such files. The
    file of a run, with all its options, is SAVE/run.yaml; --resume RUN without --save
    goes on in that directory with these options. With another --save, options of the
    numbers that are not given are those of that run, on any mesh.

    Each of several processes reads its own rows of the data. With the model's tokenizer
    the first one tokenizes, and writes the ids to --save for the others.

    On SIGTERM the current step is saved and the exit status is 143. The same command
    again, after that or after a crash, resumes from the newest complete step in --save,
    and --metrics becomes what an uninterrupted run would have written.

    Attributes:
      data: Text files, or records: files of JSON (.jsonl, .json), Parquet or Arrow, and
        Hugging Face data sets, a folder or hub id, as NAME[@REVISION][:CONFIG][:SPLIT].
      steps: Last step, counted from the start of the run.
      save: Directory for the checkpoints, one folder a step.
      start: Origin of the weights.
      batches: Batches of the data.
      optimizer: Optimizer.
      precision: Dtypes.
      experts: Routing of models with experts.
      lora: Low-rank factors.
      mesh: Device mesh.
      strategy: Sharding and memory of a step.
      checkpoints: Steps to save and to keep.
      evaluation: Held-out data.
      logs: Destination of the metrics.
      profiling: Steps to trace.
      replay: Checks against silent corruption.
      where: Devices.
    """

    data: tuple[Path, ...]
    steps: int
    save: Path
    start: Annotated[StartOptions, Group] = StartOptions()
    batches: Annotated[BatchOptions, Group] = BatchOptions()
    optimizer: Annotated[OptimizerOptions, Group] = OptimizerOptions()
    precision: Annotated[PrecisionOptions, Group] = PrecisionOptions()
    experts: Annotated[ExpertOptions, Group] = ExpertOptions()
    lora: Annotated[LoRAOptions, Group] = LoRAOptions()
    mesh: Annotated[MeshOptions, Group] = MeshOptions()
    strategy: Annotated[Strategy, Group] = Strategy()
    checkpoints: Annotated[SaveOptions, Group] = SaveOptions()
    evaluation: Annotated[EvalOptions, Group] = EvalOptions()
    logs: Annotated[LogOptions, Group] = LogOptions()
    profiling: Annotated[Profile, Group] = Profile()
    replay: Annotated[ReplayOptions, Group] = ReplayOptions()
    where: Annotated[Devices, Group] = Devices()

    def run(self) -> None:
        """Checks everything that can be checked, then loads the weights and trains."""
        begun = _check(self)
        callback = _load_callback(self)
        sizes = with_replicas(self.mesh, fsdp.launch.generation())
        mesh = sizes.make(self.where.pick())  # before jax's backend starts
        self.replay.check_devices(mesh)
        origin, resumed = open_start(self.start, self.save, begun=begun)
        start = 0 if resumed is None else resumed.step
        if begun and start == self.steps:
            say(f"step {start} is in {self.save} already")
            return
        check_steps(self.steps, start, self.save)
        window = _window(self, begun, start)
        stored = {} if resumed is None else resumed.metadata
        command = _command(self)
        config = options_at_start(command.options, origin, stored, self.steps)
        _check_pairs(self, config)
        plan = _make_plan(self, config, origin, mesh)
        data = read_data(self.data, origin, config.data, _share(self))
        metadata = make_metadata(origin, config, data, resumed, self.start.hf)
        batches = batches_of(data, config.data, fsdp.host_shard(mesh))
        _say_inputs(plan, data, config, self.steps)
        run = dataclasses.replace(
            _make_run(self, config, origin),
            microbatches=num_microbatches(config, mesh, fsdp.launch.generation()),
            start=start,
            metadata=metadata,
            callback=callback,
            window=window,
            name_rows=functools.partial(name_rows, data, config.data),
            make_plan=functools.partial(_make_plan, self, config, origin),
            before=link_in(stored),
            goes_on=begun or _is_in_place(self),
            command=command,
        )
        tx = config.make_optimizer(origin.config)
        seed, scored = config.data.seed, config.data.objective == "reward"
        started = start_origin(origin, scored=scored, mesh=mesh, seed=seed)
        make_state = functools.partial(
            start_state, started, resumed, plan, tx, run.loss_scale, seed
        )
        if isinstance(data, DocumentData) and config.data.objective == "dpo":
            fused = self.precision.fused_loss
            data, run, make_state = add_reference(
                *(plan, data, run, resumed, make_state),
                command=digest_of(command),
                fused=fused,
            )
            batches = batches_of(data, config.data, fsdp.host_shard(mesh))
        move_to(batches, stored, config.data)
        run_steps(run, plan, tx, make_state, batches)


def _say_inputs(
    plan: fsdp.Plan, data: TrainingData, config: TrainConfig, steps: int
) -> None:
    say(plan)
    for line in describe(data, config.data):
        say(f"data: {line}")
    if (warmup := config.optimizer.warmup) >= steps:
        say(f"learning rate: still rising in step {steps}, by --warmup {warmup}")


def _check_pairs(train: Train, config: TrainConfig) -> None:
    if not config.data.has_pairs:
        return
    groups = (train.mesh, train.start, train.batches, train.evaluation)
    fused, objective = train.precision.fused_loss, config.data.objective
    check_preferences(train.save, *groups, objective=objective, fused=fused)


def _make_plan(
    train: Train, config: TrainConfig, origin: Origin, mesh: Mesh
) -> fsdp.Plan:
    plan = plan_run(
        config,
        origin,
        mesh,
        strategy=train.strategy,
        offload=train.precision.offload,
        documents=has_records(train.data[0]),
    )
    if train.optimizer.no_decay is not None and config.adapter is None:
        config.optimizer.check_no_decay([param.name for param in plan.param_plans])
    return plan


def _make_run(train: Train, config: TrainConfig, origin: Origin) -> Run:
    documents, values = has_records(train.data[0]), config.values()
    return Run(
        start=0,
        steps=train.steps,
        save=as_path(train.save),
        checkpoints=train.checkpoints,
        logs=train.logs,
        options=options_by_section(
            train,
            options_of_kind(values, documents=documents, pairs=config.data.has_pairs),
        ),
        metadata={},
        files=files_to_carry(origin),
        data=config.data,
        loss_fn=_make_loss(train, config),
        per_token=documents and not config.data.has_pairs,
        held_out=_hold_out(train, origin, config),
        samples=make_samples(train.evaluation, origin, config.data, train.steps),
        batch_parts=train.strategy.batch_parts,
        routing=config.routing,
        loss_scale=config.precision.scale(),
        replay=train.replay,
    )


def _make_loss(train: Train, config: TrainConfig) -> Callable[..., Any]:
    if config.data.objective == "reward":
        return reward_model_loss(config.routing)
    make = document_loss if has_records(train.data[0]) else training_loss
    make = preference_loss if config.data.objective == "dpo" else make
    fused = train.precision.fused_loss
    return make(fused=fused, routing=config.routing, terms=config.loss)


def _check(train: Train) -> bool:
    """Checks all that needs no model.

    Returns:
      Whether an earlier start of the same command began the run.
    """
    check_files(train.data)
    check_kinds(train.data)
    if not has_records(train.data[0]):
        refuse_document_options(_command(train).options)
    train.start.check()
    train.strategy.check(dataclasses.asdict(train.mesh))
    evaluates, every = train.evaluation.eval_data, train.evaluation.eval_every
    train.checkpoints.check(eval_every=(every or 0) if evaluates else None)
    train.evaluation.check(train.data, train.mesh)
    train.logs.check()
    train.profiling.check()
    train.replay.check()
    if train.start.resume is None:  # which needs what it was saved with
        check_ranges(_command(train).options, train.steps)
    check_creatable(train.save, "--save")
    begun = is_begun(train.save, _command(train), in_place=_is_in_place(train))
    metrics = train.logs.metrics
    if metrics is not None and not begun:
        if not (_is_in_place(train) and has_written(train.save, metrics)):
            check_absent(metrics, "--metrics")
    return begun


def _hold_out(train: Train, origin: Origin, config: TrainConfig) -> HeldOut | None:
    options = train.evaluation
    if not options.eval_data:
        return None
    rows = dataclasses.replace(config.data, data_weights="")
    share = _share(train)
    inside = None if share is None else share / "held-out"
    data = read_data(options.eval_data, origin, rows, inside)
    for line in describe(data, rows):
        say(f"held-out data: {line}")
    every = options.eval_every or train.steps
    return hold_out(data, rows, every=every, fused=train.precision.fused_loss)


def _share(train: Train) -> Path | None:
    """Returns where processes share tokens; None if each reads all for itself."""
    return train.save if is_local(as_path(train.save)) else None


def _is_in_place(train: Train) -> bool:
    """Returns whether a run is resumed in its own directory."""
    resume = train.start.resume
    return resume is not None and resume.resolve() == train.save.resolve()


def _command(train: Train) -> Command:
    start = train.start
    paths = (start.hf or start.config, start.resume, train.logs.metrics)
    hf, resume, metrics = (None if path is None else str(path) for path in paths)
    groups = (train.batches, train.optimizer, train.precision)
    typed = option_values(*groups, train.experts, train.lora)
    return Command(hf, resume, start.resume_step, metrics, typed)


def _load_callback(train: Train) -> Callback | None:
    callback = train.logs.callback
    return None if callback is None else load_callback(callback)


def _window(train: Train, begun: bool, start: int) -> Window | None:
    """Returns the steps to trace; None if there are none, or all are traced."""
    first = train.profiling.profile_from
    if begun and first is not None and first <= start:
        return None
    return train.profiling.window(start, train.steps)
