"""`fsdp-jax train`: from a Hugging Face model, or a checkpoint, to checkpoints."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated, Any

import tyro
from jax.sharding import Mesh

import bridge
import fsdp_jax as fsdp
from bridge.models import DecoderConfig
from fsdp_jax.cli._adam import settings_of_import
from fsdp_jax.cli._callback import Callback, load_callback
from fsdp_jax.cli._context_parallel import abstract_rows, check_rows
from fsdp_jax.cli._data import make_batches
from fsdp_jax.cli._decoder import computed_in, plan_decoder
from fsdp_jax.cli._errors import check_absent, check_creatable
from fsdp_jax.cli._log import say
from fsdp_jax.cli._lora import BaseDType
from fsdp_jax.cli._model_source import (
    Checkpoint,
    Origin,
    files_to_carry,
    open_any,
    open_run,
    start_state,
    tokenizer_file,
)
from fsdp_jax.cli._options import Devices, IgnoreField, Unset
from fsdp_jax.cli._precision import OffloadTo, OptimizerBits, ParamGather
from fsdp_jax.cli._profile import Profile
from fsdp_jax.cli._routing import (
    Over,
    RouterDtype,
    default_aux_loss_coef,
)
from fsdp_jax.cli._run_marker import Command, is_begun, mark_begun, newest_good_step
from fsdp_jax.cli._sharding_options import Strategy
from fsdp_jax.cli._tokens import (
    Tokens,
    check_files,
    fingerprint,
    read_in_first,
    read_tokens,
)
from fsdp_jax.cli._train_config import ParamDtype, Recipe, Tokenizer, make_recipe
from fsdp_jax.cli._train_loop import Run, run_steps
from fsdp_jax.data._batch import check_batch

_TOKENS = "fsdp-jax-tokens.npy"


@dataclasses.dataclass(frozen=True)
class Train:
    """Train a Hugging Face model, fully sharded, on text files.

    Prints one JSON line of metrics a step. With --resume, what is not given is as it
    was when the checkpoint was saved, on whatever mesh.

    Of several processes each reads its own rows of the data. With the model's
    tokenizer the first one tokenizes, and leaves the ids in --save for the others.

    SIGTERM ends it with status 143 when the step it came in is saved. The same command
    again, after that or after a crash, goes on from the newest step in --save that is
    whole; what it adds to --metrics is what a run that never stopped would.

    Attributes:
      data: Text files.
      steps: The step to train to, counted from the start of the run.
      save: Directory for the checkpoints, one folder a step.
      hf: The model to start from: a directory with config.json and safetensors files,
        a hub id, a Megatron checkpoint, or one of ours, of which the parameters are
        taken.
      ignore_field: Field of config.json to ignore although it is refused; may be
        repeated. For fields that change no number.
      resume: Goes on from a checkpoint instead: a directory given to --save before.
      resume_step: The step to go on from; default the newest.
      save_every: Saves every so many steps, in the background; 0 only at the end.
      keep: Keeps the newest so many checkpoints; 0 all.
      metrics: Writes the metrics to this new file instead of stdout.
      callback: Calls module:function with the metrics of each step, a dict of numbers,
        after its line is written; in the first process alone.
      batch: Rows of a global batch; default 8.
      seq: Tokens that a row predicts; default 256.
      lr: AdamW's learning rate; default 3e-4.
      weight_decay: AdamW's weight decay; default 0.1.
      b1: Decay of AdamW's first moments; default 0.9.
      b2: Decay of AdamW's second moments; default 0.999.
      eps: What AdamW adds to the root of the second moments; default 1e-8.
      clip_grad: Norm to which gradients are clipped; default 0: not.
      no_decay: Parameters that are not decayed, by patterns of their names with commas
        between, such as "*.bias,norm.scale"; default none.
      seed: Order of the data; default 0.
      microbatches: Microbatches a step; default 1.
      param_dtype: What weights are gathered and computed in; they are kept and updated
        in float32. Default float32.
      param_gather: What the matrices of layers travel in, a byte an element, to be
        decoded to --param-dtype where they arrive; default --param-dtype itself.
      loss_scale: What the loss is multiplied by at first, so that gradients do not
        vanish in float16; it follows what overflows. Default 65536 with --param-dtype
        float16, none otherwise.
      optimizer_bits: Of an element of AdamW's moments; default 32.
      offload: What rests in the host's memory: the optimizer's state, or the weights
        in float32 too; default nothing.
      aux_loss_coef: Weight of the load-balancing loss of a model with experts; default
        what its config says.
      aux_loss_over: Whose use of experts it balances: that of each rank's batch, as
        transformers' loss, of the batches of all ranks (global), or of each sequence,
        layer by layer, as DeepSeek's. Default batch.
      z_loss_coef: Weight of the routers' z-loss; default 0.
      expert_bias_rate: How far routers' biases follow the load each step, as 1e-3, if
        the model's have any; default 0: they stay.
      capacity_factor: An expert takes this many times its even share of a rank's tokens
        and drops the rest, which is reported; default none is dropped.
      router_dtype: In which routers multiply: float32, the default, or that of the
        model.
      lora_rank: Trains factors of this rank beside the weights, which stay as they are.
      lora_alpha: Scales the product of the factors by this over their rank; default
        the rank.
      lora_targets: Modules with factors, by PEFT's names with commas between; default
        all-linear: those of all layers.
      base_dtype: How the frozen model is kept: a floating dtype also computes so, nf4
        and int8 are decoded to --param-dtype a layer at a time; default
        --param-dtype.
      tokenizer: The bytes themselves, or the model's tokenizer.json; default the
        latter where there is one.
      dp_shard: Devices that split the model; -1 for all that the others leave.
      dp_outer: Copies of the sharded model (HSDP).
      ep: Devices that split experts; a dense model is split over them too.
      cp: Devices that split the tokens of each row, for long ones.
      tp: Devices that split each matrix, and the tokens between: those of a node.
      pp: Devices that each have a part of the layers, through which the microbatches of
        --microbatches pass.
      fused_loss: Makes logits a chunk of the vocabulary at a time: memory for work.
      strategy: What the step shards, keeps, and runs when.
      profiling: Whether to trace some steps, and which.
      where: On which devices.
    """

    data: tuple[Path, ...]
    steps: int
    save: Path
    hf: Unset[str] = None
    ignore_field: IgnoreField = ()
    resume: Unset[Path] = None
    resume_step: Unset[int] = None
    save_every: int = 0
    keep: int = 0
    metrics: Unset[Path] = None
    callback: Unset[str] = None
    batch: Unset[int] = None
    seq: Unset[int] = None
    lr: Unset[float] = None
    weight_decay: Unset[float] = None
    b1: Unset[float] = None
    b2: Unset[float] = None
    eps: Unset[float] = None
    clip_grad: Unset[float] = None
    no_decay: Unset[str] = None
    seed: Unset[int] = None
    microbatches: Unset[int] = None
    param_dtype: Unset[ParamDtype] = None
    param_gather: Unset[ParamGather] = None
    loss_scale: Unset[float] = None
    optimizer_bits: Unset[OptimizerBits] = None
    offload: Unset[OffloadTo] = None
    aux_loss_coef: Unset[float] = None
    aux_loss_over: Unset[Over] = None
    z_loss_coef: Unset[float] = None
    expert_bias_rate: Unset[float] = None
    capacity_factor: Unset[float] = None
    router_dtype: Unset[RouterDtype] = None
    lora_rank: Unset[int] = None
    lora_alpha: Unset[float] = None
    lora_targets: Unset[str] = None
    base_dtype: Unset[BaseDType] = None
    tokenizer: Unset[Tokenizer] = None
    dp_shard: int = -1
    dp_outer: int = 1
    ep: int = 1
    cp: int = 1
    tp: int = 1
    pp: int = 1
    fused_loss: bool = False
    strategy: Annotated[Strategy, tyro.conf.arg(name="")] = Strategy()
    profiling: Annotated[Profile, tyro.conf.arg(name="")] = Profile()
    where: Annotated[Devices, tyro.conf.arg(name="")] = Devices()

    def run(self) -> None:
        """Checks everything that can be checked, then loads the weights and trains."""
        begun = _check_paths(self)
        callback = _load_callback(self)
        mesh = _make_mesh(self)  # before anything else starts jax's backend
        shard = fsdp.host_shard(mesh)
        origin, resumed = _open(self, begun)
        start = 0 if resumed is None else resumed.step
        if begun and start == self.steps:
            say(f"step {start} is in {self.save} already")
            return
        _check_steps(self, start)
        traced = _has_traced(self, begun, start)
        window = None if traced else self.profiling.window(start, self.steps)
        stored = {} if resumed is None else resumed.metadata
        recipe = _make_recipe(self, origin, stored)
        check_rows(recipe.seq, self.tp, self.cp)
        recipe.routing.check(origin.config)
        plan = plan_decoder(
            origin.config,
            mesh,
            self.strategy.applied(_sharding(self, recipe, origin), mesh),
            recipe.routing,
            prefetch=self.strategy.prefetch,
            unroll=self.strategy.unroll,
            cp_form=self.strategy.cp_form,
        )
        rows = abstract_rows(recipe.batch, recipe.seq, self.cp)
        check_batch(plan, rows, recipe.microbatches)
        tokens = _read_tokens(self, origin, recipe)
        metadata = _make_metadata(origin.config, recipe, tokens, resumed)
        batches = make_batches(tokens, recipe, shard)
        if "data" in stored:
            batches.set_state(stored["data"])
        _announce(plan, recipe, tokens)
        tx = recipe.precision.adamw(recipe.lr, recipe.weight_decay, recipe.adam)
        loss_scale = recipe.precision.scale()
        state = start_state(origin, resumed, plan, tx, loss_scale)
        mark_begun(self.save, _command(self))
        run = _make_run(self, start, metadata, files_to_carry(origin))
        run = dataclasses.replace(
            run,
            callback=callback,
            window=window,
            routing=recipe.routing,
            loss_scale=loss_scale,
        )
        run_steps(run, plan, tx, state, batches)


def _sharding(train: Train, recipe: Recipe, origin: Origin) -> fsdp.FSDPConfig:
    if recipe.adapter is None:
        config = computed_in(recipe.param_dtype)
    else:
        config = recipe.adapter.sharding(origin.config, recipe.param_dtype)
    return recipe.precision.sharding(config, train.offload)


def _check_paths(train: Train) -> bool:
    """Whether an earlier start of the same command began the run."""
    check_files(train.data)
    if train.hf is None and train.resume is None:
        raise ValueError("train starts from --hf MODEL, or goes on from --resume CKPT.")
    if train.resume is None and train.resume_step is not None:
        raise ValueError(
            f"--resume-step {train.resume_step} says where in a checkpoint to go on: "
            "give --resume too."
        )
    check_creatable(train.save, "--save")
    begun = is_begun(train.save, _command(train), in_place=_is_in_place(train))
    if train.metrics is not None and not begun:
        check_absent(train.metrics, "--metrics")
    train.profiling.check()
    return begun


def _is_in_place(train: Train) -> bool:
    """Whether a run is to be resumed where it is."""
    return train.resume is not None and train.resume.resolve() == train.save.resolve()


def _command(train: Train) -> Command:
    given = {f.name: getattr(train, f.name) for f in dataclasses.fields(Recipe)}
    paths = (train.hf, train.resume, train.metrics)
    hf, resume, metrics = (None if path is None else str(path) for path in paths)
    typed = {name: value for name, value in given.items() if value is not None}
    return Command(hf, resume, train.resume_step, metrics, typed)


def _load_callback(train: Train) -> Callback | None:
    return None if train.callback is None else load_callback(train.callback)


def _open(train: Train, begun: bool) -> tuple[Origin, Checkpoint | None]:
    """The model, and the step to go on from, if it is no new run."""
    if begun and (newest := newest_good_step(train.save)) is not None:
        resumed = open_run(train.save, newest)
        return resumed, resumed
    if train.resume is not None:
        resumed = open_run(
            train.resume, train.resume_step, train.hf, train.ignore_field
        )
        return resumed, resumed
    assert train.hf is not None
    return open_any(train.hf, ignore_fields=train.ignore_field), None


def _has_traced(train: Train, begun: bool, start: int) -> bool:
    """Whether an earlier start has made the steps that are to be traced."""
    first = train.profiling.profile_from
    return begun and first is not None and first <= start


def _check_steps(train: Train, start: int) -> None:
    if train.save_every < 0 or train.keep < 0:
        raise ValueError(
            f"--save-every {train.save_every}, --keep {train.keep}: each at least 1, "
            "or 0 for saving at the end alone, and for keeping all."
        )
    if train.steps <= start:
        raise ValueError(
            f"--steps {train.steps} is the step to train to, and the run starts from "
            f"step {start}. Use more than {start}."
        )
    newest = fsdp.latest_step(train.save)
    if newest is not None and newest > start:
        raise ValueError(
            f"--save '{train.save}' holds step {newest} already, and this run starts "
            f"from step {start}: two runs would mix. Save to another directory."
        )


def _make_recipe(train: Train, origin: Origin, stored: dict[str, Any]) -> Recipe:
    defaults = {
        "tokenizer": "bytes" if tokenizer_file(origin) is None else "model",
        "aux_loss_coef": default_aux_loss_coef(origin.config),
    }
    typed = _command(train).recipe
    if "optimizer" in stored and "recipe" not in stored:
        defaults |= settings_of_import(stored, typed)
    return make_recipe(typed, stored.get("recipe", {}), defaults)


def _make_mesh(train: Train) -> Mesh:
    return fsdp.make_mesh(
        dp_outer=train.dp_outer,
        dp_shard=train.dp_shard,
        ep=train.ep,
        cp=train.cp,
        tp=train.tp,
        pp=train.pp,
        devices=train.where.pick(),
    )


def _read_tokens(train: Train, origin: Origin, recipe: Recipe) -> Tokens:
    def read() -> Tokens:
        vocab_size = origin.config.vocab_size
        file = tokenizer_file(origin)
        return read_tokens(train.data, recipe.tokenizer, file, vocab_size)

    if recipe.tokenizer == "bytes":
        return read()
    return read_in_first(train.save / _TOKENS, read)


def _make_metadata(
    config: DecoderConfig, recipe: Recipe, tokens: Tokens, resumed: Checkpoint | None
) -> dict[str, Any]:
    """What every step is saved with; a resumed run must find the data unchanged."""
    sha256 = fingerprint(tokens)
    if resumed is not None and resumed.metadata.get("data_sha256", sha256) != sha256:
        raise ValueError(
            f"--data gives other tokens than those that step {resumed.step} of "
            f"'{resumed.path}' was trained on. Give the same files in the same order."
        )
    return {
        "config": bridge.to_hf_config(config),
        "recipe": dataclasses.asdict(recipe),
        "data_sha256": sha256,
    }


def _announce(plan: fsdp.Plan, recipe: Recipe, tokens: Tokens) -> None:
    say(plan)
    say(
        f"data: {len(tokens):,} tokens (--tokenizer {recipe.tokenizer}), "
        f"{recipe.batch} x {recipe.seq} a step"
    )


def _make_run(
    train: Train, start: int, metadata: dict[str, Any], files: dict[str, list[Path]]
) -> Run:
    return Run(
        start=start,
        steps=train.steps,
        save=train.save,
        save_every=train.save_every,
        keep=train.keep,
        metrics=train.metrics,
        microbatches=metadata["recipe"]["microbatches"],
        fused_loss=train.fused_loss,
        metadata=metadata,
        files=files,
    )
