"""`fsdp-jax plan`: estimates memory and time of training on GPUs, without any."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated

import jax
import tyro

from bridge.models import DecoderConfig
from fsdp_jax.cli._attention_table import plan_table
from fsdp_jax.cli._errors import check_absent
from fsdp_jax.cli._model_source import open_hf, read_config
from fsdp_jax.cli._optimizer import OptimizerBits
from fsdp_jax.cli._options import Group, IgnoreField, Repeated, Unset
from fsdp_jax.cli._plan_sweep import sweep_meshes
from fsdp_jax.cli._precision import (
    ExpertProducts,
    OffloadTo,
    ParamDtype,
    ParamGather,
    Products,
)
from fsdp_jax.cli._routing import DispatchDtype
from fsdp_jax.cli._schedule_search import search_strategy
from fsdp_jax.cli._sharding_options import Strategy
from fsdp_jax.cli._speeds import Speeds
from fsdp_jax.cli._step_spec import Sizes, StepSpec
from fsdp_jax.cli._user_model import UserModel, check_effect, open_user_model
from fsdp_jax.cli._xla_log import without_xla_lines
from fsdp_jax.planner import GPU, Search, StepEstimate, gpu_devices
from fsdp_jax.planner._plot import new_figure
from fsdp_jax.training._compiler_options import Options

_SEARCH_MINUTES = 4.0
_AXES = ("pp", "dp_outer", "dp_shard", "ep", "cp", "tp")
_NO_PLUGIN = (
    "XLA's compiler for GPUs is not installed (pip install 'fsdp-jax[plan]'), so this "
    "is what the compiler for CPUs says: memory, and how often what is communicated. "
    "It widens bfloat16 and hides nothing; no time is estimated."
)


@dataclasses.dataclass(frozen=True)
class Plan:
    """Estimate a model's training step on GPUs, without any.

    Prints memory, communication and modelled time. Nothing is loaded but the config.

    Attributes:
      hf: Model: a directory with config.json, or a hub id.
      config: Model: a config.json, or a directory that has one, without weights.
      model: Model of your own: the function of a PRNG key that makes it, as
        package.module:make_model, imported from the current directory too.
      loss: Loss of --model, a function of the model and a batch, as
        package.module:loss_fn.
      unit: Unit of --model; may be repeated: a class or method as
        package.module:Block, a path pattern as layers.*, or either after stacked:.
      ignore_field: Field of config.json to ignore although it is refused; may be
        repeated. For fields that change no number.
      gpu: GPU: a100, a100-40gb, h20, h800, h100, h100-500w, h200, b200, b300, gb200
        or gb300.
      gpus: Number of GPUs; more than a node has (--gpus-per-node) come in whole nodes.
      mesh: Sizes of the mesh's axes, as in dp_outer=4,dp_shard=-1; default all on
        dp_shard.
      batch: Rows of a global batch; default one a microbatch and GPU, of cp x tp x pp
        GPUs together. Of --model its arrays, as x=float32[64,128],y=int32[64], or a
        function that makes them, as package.module:make_batch.
      seq: Tokens that a row predicts.
      microbatches: Microbatches a step.
      param_dtype: Dtype that weights are gathered and computed in.
      param_gather: Format in which the matrices of layers are communicated.
      products: Format of the operands of projections of attention and MLPs.
      expert_products: Format of the operands of grouped products of experts.
      num_layers_at_start_in_bf16: Number of first layers that keep bfloat16 beside
        other --products.
      num_layers_at_end_in_bf16: Number of last layers that keep it.
      optimizer_bits: Bits of an element of AdamW's moments.
      offload: State kept in host memory: the optimizer's, or the float32 weights too
        (all), those of layers copied one layer at a time (stream).
      fused_loss: Computes logits by chunks of the vocabulary, and again for backward:
        less memory, more work.
      capacity_factor: Capacity of an expert as a multiple of its even share of a rank's
        tokens; default all tokens of all ranks on ep.
      dispatch_dtype: Dtype in which tokens are sent to their experts.
      ranks_per_node: Ranks on ep that a node has, each token being sent once to a node;
        with --capacity-factor. Default: once to each expert.
      nodes_per_token: Maximum number of nodes that a token is sent to; default all.
      json: Writes everything to this file; of a sweep, on the step that it recommends.
      html: Writes the tables into this file, for a browser.
      picture: Draws memory and time into this file, .png or .svg; of a sweep, of all
        that it compares.
      trace: Writes the timeline into this file, for Perfetto or chrome://tracing.
      sweep: Tries other meshes and strategies too, and recommends one; cp where rows
        have 8,192 tokens or more.
      search: Tries other schedules of the same step: layers of an iteration, layers
        gathered ahead, what is saved and what stays gathered, how much is communicated
        at once. Says what the best one gains.
      search_minutes: Minutes that a search may take; default 4.
      strategy: Sharding and memory of a step.
      speeds: Figures of the cost model.
    """

    hf: Unset[str] = None
    config: Unset[Path] = None
    model: Unset[str] = None
    loss: Unset[str] = None
    unit: Annotated[Repeated, tyro.conf.arg(metavar="UNIT")] = ()
    ignore_field: IgnoreField = ()
    gpu: str = "h200"
    gpus: int = 8
    mesh: Unset[str] = None
    batch: Unset[int | str] = None
    seq: int = 4096
    microbatches: int = 1
    param_dtype: ParamDtype = "bfloat16"
    param_gather: ParamGather = "param_dtype"
    products: Products = "param_dtype"
    expert_products: ExpertProducts = "param_dtype"
    num_layers_at_start_in_bf16: int = 0
    num_layers_at_end_in_bf16: int = 0
    optimizer_bits: OptimizerBits = 32
    offload: Unset[OffloadTo] = None
    fused_loss: bool = True
    capacity_factor: Unset[float] = None
    dispatch_dtype: DispatchDtype = "param_dtype"
    ranks_per_node: Unset[int] = None
    nodes_per_token: Unset[int] = None
    json: Unset[Path] = None
    html: Unset[Path] = None
    picture: Unset[Path] = None
    trace: Unset[Path] = None
    sweep: bool = False
    search: bool = False
    search_minutes: Unset[float] = None
    strategy: Annotated[Strategy, Group] = Strategy()
    speeds: Annotated[Speeds, Group] = Speeds()

    def run(self) -> None:
        """Prints the estimate, or without the GPU compiler a count by that for CPUs."""
        # Lowering starts a backend: that of the CPU, as no GPU is asked for anything.
        jax.config.update("jax_platforms", "cpu")
        gpu = self.speeds.apply(self.gpu)
        config = _open_model(self)
        sizes = _mesh_sizes(self.mesh)
        chosen = (self.mesh, self.strategy.zero, self.strategy.outer)
        self.strategy.check(None if self.sweep else sizes)
        if self.sweep and chosen != (None, 3, None):
            raise ValueError(
                "plan --sweep tries meshes and strategies of its own: leave out "
                "--mesh, --zero and --outer, or --sweep."
            )
        if self.sweep and self.search:
            raise ValueError(
                "plan --sweep compares meshes, and --search schedules on one mesh: "
                "sweep first, and search with the --mesh and --zero that it recommends."
            )
        if (minutes := self.search_minutes) is not None:
            if not self.search:
                raise ValueError(f"--search-minutes {minutes:g}: give --search too.")
            if not minutes > 0:
                raise ValueError(f"--search-minutes {minutes:g}: above 0.")
        if isinstance(self.batch, int) and self.batch < 1:
            raise ValueError(f"--batch {self.batch}: at least 1 row.")
        if self.seq < 1:
            raise ValueError(f"--seq {self.seq}: at least 1 token.")
        self._check_experts(config)
        self._check_files()
        with without_xla_lines():
            self._plan(self._step(config), gpu, sizes)

    def _check_experts(self, config: DecoderConfig | UserModel) -> None:
        """Refuses options of experts for a model that has none."""
        given = []
        if self.capacity_factor is not None:
            given.append(f"--capacity-factor {self.capacity_factor}")
        if self.dispatch_dtype != "param_dtype":
            given.append(f"--dispatch-dtype {self.dispatch_dtype}")
        for name in ("ranks_per_node", "nodes_per_token"):
            if (number := getattr(self, name)) is not None:
                given.append(f"--{name.replace('_', '-')} {number}")
        if given and _is_dense(config):
            raise ValueError(
                f"{', '.join(given)}: without effect, as the model has no experts. "
                "Leave it out."
            )

    def _step(self, model: DecoderConfig | UserModel) -> StepSpec:
        # A model of the user's own has its batch, which --batch described, and saves
        # what FSDPConfig() saves.
        is_own = isinstance(model, UserModel)
        strategy = self.strategy
        if is_own and strategy.remat is None:
            strategy = dataclasses.replace(strategy, remat="all")
        return StepSpec(
            model=model,
            gpus=self.gpus,
            rows=None if is_own or self.batch is None else int(self.batch),
            seq=self.seq,
            microbatches=self.microbatches,
            param_dtype=self.param_dtype,
            param_gather=self.param_gather,
            products=self.products,
            expert_products=self.expert_products,
            num_layers_at_start_in_bf16=self.num_layers_at_start_in_bf16,
            num_layers_at_end_in_bf16=self.num_layers_at_end_in_bf16,
            optimizer_bits=self.optimizer_bits,
            offload=self.offload,
            fused_loss=self.fused_loss,
            capacity_factor=self.capacity_factor,
            dispatch_dtype=self.dispatch_dtype,
            ranks_per_node=self.ranks_per_node,
            nodes_per_token=self.nodes_per_token,
            strategy=strategy,
        )

    def _plan(self, step: StepSpec, gpu: GPU, sizes: Sizes) -> None:
        try:
            gpu_devices(gpu, self.gpus)
        except ValueError as error:
            # A count by the CPU's compiler has no times to draw or compare.
            asked = self.sweep or self.search or self.picture or self.trace
            if "fsdp-jax[plan]" not in str(error) or asked:
                raise
            print(f"fsdp-jax: {_NO_PLUGIN}", file=sys.stderr)
            found = step.count_on_cpu(sizes)
            self._show(found, {"--json": found.save_json, "--html": found.save_html})
            return
        if self.sweep:
            sweep = sweep_meshes(step, gpu)
            of_all = {"--html": sweep.save_html, "--picture": sweep.save_picture}
            best = next(iter(sweep.estimates.values()))
            self._show(sweep, _writers(best) | of_all)
        elif self.search:
            minutes = self.search_minutes or _SEARCH_MINUTES
            search = _search(step, gpu, sizes, 60 * minutes)
            of_all = {"--html": search.save_html, "--json": search.save_json}
            assert search.best.estimate is not None
            self._show(search, _writers(search.best.estimate) | of_all)
        else:
            estimate = step.estimate(gpu, sizes)
            self._show(estimate, _writers(estimate))
            if isinstance(step.model, DecoderConfig):
                form, wanted = self.strategy.cp_algorithm, self.strategy.attention
                print(f"\n{plan_table(step.model, estimate.plan, form, wanted)}")

    def _check_files(self) -> None:
        """Refuses what cannot be written, before anything is compiled."""
        for option, file in self._files().items():
            check_absent(file, option)
        if self.picture is not None:
            new_figure(self.picture, 1, 1)

    def _files(self) -> dict[str, Path]:
        """The files to write, by option."""
        names = ("json", "html", "picture", "trace")
        named = {f"--{name}": getattr(self, name) for name in names}
        return {option: file for option, file in named.items() if file is not None}

    def _show(self, found: object, writers: Mapping[str, Callable[[Path], None]]):
        """Prints what was found, and writes the files that were asked for."""
        print(found)
        for option, file in self._files().items():
            file.parent.mkdir(parents=True, exist_ok=True)
            writers[option](file)


def _writers(estimate: StepEstimate) -> dict[str, Callable[[Path], None]]:
    return {
        "--json": estimate.save_json,
        "--html": estimate.save_html,
        "--picture": estimate.save_picture,
        "--trace": estimate.save_trace,
    }


def _open_model(options: Plan) -> DecoderConfig | UserModel:
    named = (options.hf, options.config, options.model)
    if sum(name is not None for name in named) != 1:
        raise ValueError(
            "plan takes the model from --hf MODEL, --config FILE or --model "
            "package.module:make_model: one."
        )
    check_effect(options)
    if options.model is not None:
        return open_user_model(options.model, options.loss, options.batch, options.unit)
    if options.hf is not None:
        return open_hf(options.hf, ignore_fields=options.ignore_field).config
    assert options.config is not None
    return read_config(options.config, options.ignore_field)


def _is_dense(model: DecoderConfig | UserModel) -> bool:
    return isinstance(model, DecoderConfig) and model.moe is None


def _mesh_sizes(text: str | None) -> Sizes:
    """Parses sizes such as `dp_outer=4,dp_shard=-1`."""
    if text is None:
        return {}
    sizes = {}
    for part in text.split(","):
        axis, _, size = part.partition("=")
        if axis not in _AXES or not size.lstrip("-").isdigit():
            raise ValueError(
                f"--mesh {text}: '{part}' is no size of {', '.join(_AXES)}. "
                "Write it as in --mesh dp_shard=-1,tp=8."
            )
        if axis in sizes:
            raise ValueError(
                f"--mesh {text}: '{axis}' has two sizes, {sizes[axis]} and {size}. "
                "Give each axis one."
            )
        sizes[axis] = int(size)
    return sizes


def _search(step: StepSpec, gpu: GPU, sizes: Sizes, seconds: float) -> Search:
    def estimate(strategy: Strategy, xla_options: Options) -> StepEstimate:
        strategy.check(sizes)
        changed = dataclasses.replace(step, strategy=strategy)
        return changed.estimate(gpu, sizes, xla_options=xla_options)

    xla_options = step.xla_options(gpu, sizes)
    return search_strategy(estimate, step.strategy, xla_options, seconds)
