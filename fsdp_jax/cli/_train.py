"""`fsdp-jax train`: from a Hugging Face model, or a checkpoint, to checkpoints."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import optax
import tyro
from jax.sharding import Mesh

import bridge
import fsdp_jax as fsdp
from fsdp_jax._batch import check_batch
from fsdp_jax.cli._callback import Callback, load_callback
from fsdp_jax.cli._data import make_batches
from fsdp_jax.cli._errors import check_absent, check_creatable
from fsdp_jax.cli._model import check_rows, computed_in, plan_decoder
from fsdp_jax.cli._options import Devices, Unset
from fsdp_jax.cli._origin import Origin, open_any, open_run
from fsdp_jax.cli._profile import Profile, Window
from fsdp_jax.cli._recipe import ParamDtype, Recipe, Tokenizer, make_recipe
from fsdp_jax.cli._run import Run, run_steps
from fsdp_jax.cli._tokens import Tokens, check_files, fingerprint, read_tokens


@dataclasses.dataclass(frozen=True)
class Train:
    """Train a Hugging Face model, fully sharded, on text files.

    Prints one JSON line of metrics a step. With --resume, what is not given is as it
    was when the checkpoint was saved, on whatever mesh.

    Attributes:
      data: Text files.
      steps: The step to train to, counted from the start of the run.
      save: Directory for the checkpoints, one folder a step.
      hf: The model to start from: a directory with config.json and safetensors files,
        a hub id, a Megatron checkpoint, or one of ours, of which the parameters are
        taken.
      resume: Goes on from a checkpoint instead: a directory given to --save before.
      resume_step: The step to go on from; default the newest.
      save_every: Saves every so many steps; 0 only at the end.
      metrics: Writes the metrics to this new file instead of stdout.
      callback: Calls module:function with the metrics of each step, a dict of numbers,
        after its line is written; in the first process alone.
      batch: Rows of a global batch; default 8.
      seq: Tokens that a row predicts; default 256.
      lr: AdamW's learning rate; default 3e-4.
      weight_decay: AdamW's weight decay; default 0.1.
      seed: Order of the data; default 0.
      accumulate: Microbatches a step; default 1.
      param_dtype: What weights are gathered and computed in; they are kept and updated
        in float32. Default float32.
      tokenizer: The bytes themselves, or the model's tokenizer.json; default the
        latter where there is one.
      dp_shard: Devices that split the model; -1 for all that the others leave.
      dp_outer: Copies of the sharded model (HSDP).
      ep: Devices that split experts; a dense model is split over them too.
      tp: Devices that split each matrix, and the tokens between: those of a node.
      fused_loss: Makes logits a chunk of the vocabulary at a time: memory for work.
      profiling: Whether to trace some steps, and which.
      where: On which devices.
    """

    data: tuple[Path, ...]
    steps: int
    save: Path
    hf: Unset[str] = None
    resume: Unset[Path] = None
    resume_step: Unset[int] = None
    save_every: int = 0
    metrics: Unset[Path] = None
    callback: Unset[str] = None
    batch: Unset[int] = None
    seq: Unset[int] = None
    lr: Unset[float] = None
    weight_decay: Unset[float] = None
    seed: Unset[int] = None
    accumulate: Unset[int] = None
    param_dtype: Unset[ParamDtype] = None
    tokenizer: Unset[Tokenizer] = None
    dp_shard: int = -1
    dp_outer: int = 1
    ep: int = 1
    tp: int = 1
    fused_loss: bool = False
    profiling: Annotated[Profile, tyro.conf.arg(name="")] = Profile()
    where: Annotated[Devices, tyro.conf.arg(name="")] = Devices()

    def run(self) -> None:
        """Checks everything that can be checked, then loads the weights and trains."""
        _check_paths(self)
        callback = _load_callback(self)
        mesh = _make_mesh(self)  # before anything else starts jax's backend
        origin = _open(self)
        start = _first_step(self, origin)
        _check_steps(self, start)
        window = self.profiling.window(start, self.steps)
        recipe = _make_recipe(self, origin)
        check_rows(recipe.seq, self.tp)
        plan = plan_decoder(origin.config, mesh, computed_in(recipe.param_dtype))
        rows = jax.ShapeDtypeStruct((recipe.batch, recipe.seq + 1), jnp.int32)
        check_batch(plan, rows, recipe.accumulate)
        tokens = _read_tokens(self, origin, recipe)
        metadata = _make_metadata(origin, recipe, tokens)
        batches = make_batches(tokens, recipe)
        if "data" in origin.metadata:
            batches.set_state(origin.metadata["data"])
        _announce(plan, recipe, tokens)
        tx = optax.adamw(recipe.lr, weight_decay=recipe.weight_decay)
        state = _start(self, origin, plan, tx)
        run = _make_run(self, origin, metadata, callback, window)
        run_steps(run, plan, tx, state, batches)


def _check_paths(train: Train) -> None:
    check_files(train.data)
    if train.hf is None and train.resume is None:
        raise ValueError("train starts from --hf MODEL, or goes on from --resume CKPT.")
    if train.resume is None and train.resume_step is not None:
        raise ValueError(
            f"--resume-step {train.resume_step} says where in a checkpoint to go on: "
            "give --resume too."
        )
    check_creatable(train.save, "--save")
    if train.metrics is not None:
        check_absent(train.metrics, "--metrics")
    train.profiling.check()


def _load_callback(train: Train) -> Callback | None:
    return None if train.callback is None else load_callback(train.callback)


def _open(train: Train) -> Origin:
    if train.resume is not None:
        return open_run(train.resume, train.resume_step, train.hf)
    assert train.hf is not None
    return dataclasses.replace(open_any(train.hf), metadata={})


def _first_step(train: Train, origin: Origin) -> int:
    return 0 if train.resume is None else origin.step


def _check_steps(train: Train, start: int) -> None:
    if train.save_every < 0:
        raise ValueError(
            f"--save-every {train.save_every}: at least 1, or 0 for never."
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


def _make_recipe(train: Train, origin: Origin) -> Recipe:
    given = {f.name: getattr(train, f.name) for f in dataclasses.fields(Recipe)}
    default = "bytes" if origin.tokenizer_file is None else "model"
    return make_recipe(given, origin.metadata.get("recipe", {}), default)


def _make_mesh(train: Train) -> Mesh:
    return fsdp.make_mesh(
        dp_outer=train.dp_outer,
        dp_shard=train.dp_shard,
        ep=train.ep,
        tp=train.tp,
        devices=train.where.pick(),
    )


def _read_tokens(train: Train, origin: Origin, recipe: Recipe) -> Tokens:
    return read_tokens(
        train.data, recipe.tokenizer, origin.tokenizer_file, origin.config.vocab_size
    )


def _make_metadata(origin: Origin, recipe: Recipe, tokens: Tokens) -> dict[str, Any]:
    """What every step is saved with; a resumed run must find the data unchanged."""
    sha256 = fingerprint(tokens)
    if origin.metadata.get("data_sha256", sha256) != sha256:
        raise ValueError(
            f"--data gives other tokens than those that step {origin.step} of "
            f"'{origin.checkpoint}' was trained on. Give the same files in the same "
            "order."
        )
    return {
        "config": bridge.to_hf_config(origin.config),
        "recipe": dataclasses.asdict(recipe),
        "data_sha256": sha256,
    }


def _announce(plan: fsdp.Plan, recipe: Recipe, tokens: Tokens) -> None:
    print(plan, file=sys.stderr)
    print(
        f"data: {len(tokens):,} tokens (--tokenizer {recipe.tokenizer}), "
        f"{recipe.batch} x {recipe.seq} a step",
        file=sys.stderr,
    )


def _start(
    train: Train, origin: Origin, plan: fsdp.Plan, tx: optax.GradientTransformation
) -> fsdp.TrainState:
    if train.resume is None:
        return fsdp.init(plan, tx, origin.load_params(plan.params))
    mould = fsdp.abstract_state(plan, tx)
    return fsdp.load(train.resume, mould, step=origin.step)


def _make_run(
    train: Train,
    origin: Origin,
    metadata: dict[str, Any],
    callback: Callback | None,
    window: Window | None,
) -> Run:
    return Run(
        start=_first_step(train, origin),
        steps=train.steps,
        save=train.save,
        save_every=train.save_every,
        metrics=train.metrics,
        accumulate=metadata["recipe"]["accumulate"],
        metadata=metadata,
        callback=callback,
        window=window,
        fused_loss=train.fused_loss,
    )
