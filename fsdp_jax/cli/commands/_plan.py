"""`fsdp-jax plan`: estimates memory and time of training on GPUs, without any."""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated

import jax
import jax.numpy as jnp
import optax
import tyro
from jax.sharding import Mesh

import fsdp_jax as fsdp
from bridge.models import DecoderConfig, tensor_parallel_rules
from fsdp_jax.cli._context_parallel import abstract_rows, check_context, check_rows
from fsdp_jax.cli._decoder import loss_of, plan_decoder
from fsdp_jax.cli._errors import check_absent
from fsdp_jax.cli._model_source import open_hf, read_config
from fsdp_jax.cli._optimizer import OptimizerBits, OptimizerConfig
from fsdp_jax.cli._options import Devices, Group, IgnoreField, Repeated, Unset
from fsdp_jax.cli._precision import OffloadTo, ParamDtype, ParamGather, Precision
from fsdp_jax.cli._routing import Routing
from fsdp_jax.cli._schedule_search import search_strategy
from fsdp_jax.cli._sharding_options import Strategy
from fsdp_jax.cli._speeds import Speeds
from fsdp_jax.cli._user_model import UserModel, check_effect, open_user_model
from fsdp_jax.cli._xla_log import without_xla_lines
from fsdp_jax.planner import (
    GPU,
    CpuCount,
    Search,
    StepEstimate,
    Sweep,
    count_on_cpu,
    estimate_step,
    gpu_devices,
)
from fsdp_jax.training._compiler_options import Options, options_of

_LONG_ROWS = 8192
"""Tokens from which on a sweep tries to split rows."""
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
      gpu: GPU: a100, h100, h100-500w, h200, b200, b300, gb200 or gb300.
      gpus: Number of GPUs; more than 8 come in nodes of 8.
      mesh: Sizes of the mesh's axes, as in dp_outer=4,dp_shard=-1; default all on
        dp_shard.
      batch: Rows of a global batch; default one a microbatch and GPU, of cp x tp x pp
        GPUs together. Of --model its arrays, as x=float32[64,128],y=int32[64], or a
        function that makes them, as package.module:make_batch.
      seq: Tokens that a row predicts.
      microbatches: Microbatches a step.
      param_dtype: Dtype that weights are gathered and computed in.
      param_gather: Format in which the matrices of layers are communicated.
      optimizer_bits: Bits of an element of AdamW's moments.
      offload: State kept in host memory: the optimizer's, or the float32 weights too
        (all).
      fused_loss: Computes logits by chunks of the vocabulary: less memory, more work.
      capacity_factor: Capacity of an expert as a multiple of its even share of a rank's
        tokens; default all tokens of all ranks on ep.
      json: Writes everything to this file.
      html: Writes the tables into this file, for a browser.
      picture: Draws memory and time into this file, .png or .svg; of a sweep, of all
        that it compares.
      trace: Writes the timeline into this file, for Perfetto or chrome://tracing.
      sweep: Tries other meshes and strategies too, and recommends one; cp where rows
        have 8,192 tokens or more.
      search: Tries other schedules of the same step: layers of an iteration, layers
        gathered ahead, what is saved and what stays gathered, how much is communicated
        at once. Says what the best one gains.
      search_minutes: Minutes that a search may take.
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
    optimizer_bits: OptimizerBits = 32
    offload: Unset[OffloadTo] = None
    fused_loss: bool = False
    capacity_factor: Unset[float] = None
    json: Unset[Path] = None
    html: Unset[Path] = None
    picture: Unset[Path] = None
    trace: Unset[Path] = None
    sweep: bool = False
    search: bool = False
    search_minutes: float = 4.0
    strategy: Annotated[Strategy, Group] = Strategy(remat="nothing", unroll=2)
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
        if not self.search_minutes > 0:
            raise ValueError(f"--search-minutes {self.search_minutes:g}: above 0.")
        for option, file in self._files().items():
            check_absent(file, option)
        with without_xla_lines():
            self._plan(config, gpu, sizes)

    def _plan(
        self, config: DecoderConfig | UserModel, gpu: GPU, sizes: dict[str, int]
    ) -> None:
        try:
            gpu_devices(gpu, self.gpus)
        except ValueError as error:
            # A count by the CPU's compiler has no times to draw or compare.
            asked = self.sweep or self.search or self.picture or self.trace
            if "fsdp-jax[plan]" not in str(error) or asked:
                raise
            found = _count_on_cpu(self, config, sizes)
            self._show(found, {"--json": found.save_json, "--html": found.save_html})
            return
        if self.sweep:
            sweep = _sweep(self, config, gpu)
            of_all = {"--html": sweep.save_html, "--picture": sweep.save_picture}
            best = next(iter(sweep.estimates.values()))
            self._show(sweep, _writers(best) | of_all)
        elif self.search:
            search = _search(self, config, gpu, sizes)
            of_all = {"--html": search.save_html, "--json": search.save_json}
            assert search.best.estimate is not None
            self._show(search, _writers(search.best.estimate) | of_all)
        else:
            estimate = _estimate(self, config, gpu, sizes)
            self._show(estimate, _writers(estimate))

    def _files(self) -> dict[str, Path]:
        """The files to write, by option."""
        names = ("json", "html", "picture", "trace")
        named = {f"--{name}": getattr(self, name) for name in names}
        return {option: file for option, file in named.items() if file is not None}

    def _show(self, found: object, writers: Mapping[str, Callable[[Path], None]]):
        """Prints what was found, and writes the files that were asked for."""
        print(found)
        for option, file in self._files().items():
            writers[option](file)


def _writers(estimate: StepEstimate) -> dict[str, Callable[[Path], None]]:
    return {
        "--json": estimate.save_json,
        "--html": estimate.save_html,
        "--picture": estimate.save_picture,
        "--trace": estimate.save_trace,
    }


def _precision_of(options: Plan) -> Precision:
    return Precision(param_gather=options.param_gather)


def _optimizer_of(options: Plan) -> optax.GradientTransformation:
    return OptimizerConfig(optimizer_bits=options.optimizer_bits).make()


def _open_model(options: Plan) -> DecoderConfig | UserModel:
    named = (options.hf, options.config, options.model)
    if sum(name is not None for name in named) != 1:
        raise ValueError(
            "plan takes the model from --hf MODEL, --config FILE or --model "
            "package.module:make_model: one."
        )
    check_effect(options)
    if options.model is not None:
        return open_user_model(
            *(options.model, options.loss, options.batch, options.unit)
        )
    if options.hf is not None:
        return open_hf(options.hf, ignore_fields=options.ignore_field).config
    assert options.config is not None
    return read_config(options.config, options.ignore_field)


def _mesh_sizes(text: str | None) -> dict[str, int]:
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
        sizes[axis] = int(size)
    return sizes


def _estimate(
    options: Plan,
    config: DecoderConfig | UserModel,
    gpu: GPU,
    sizes: dict[str, int],
    *,
    guide: bool = True,
    xla_options: Options | None = None,
) -> StepEstimate:
    mesh = fsdp.make_mesh(**sizes, devices=gpu_devices(gpu, options.gpus))
    plan, loss, batch = _step_of(options, config, mesh)
    is_own = isinstance(config, UserModel)
    rows = jax.tree.leaves(batch)[0].shape[0]
    return estimate_step(
        *(plan, loss, _optimizer_of(options), batch),
        gpu=gpu,
        tokens=None if is_own else rows * options.seq,
        guide=guide,
        options=xla_options,
        num_microbatches=options.microbatches,
    )


def _sharding_of(options: Plan, mesh: Mesh) -> fsdp.FSDPConfig:
    dtype = jnp.dtype(options.param_dtype)
    policy = fsdp.MixedPrecisionPolicy(param_dtype=dtype, grad_comm_dtype=dtype)
    sharding = fsdp.FSDPConfig(mp_policy=policy, prefetch=options.strategy.prefetch)
    sharding = options.strategy.applied(sharding, mesh)
    return _precision_of(options).sharding(sharding, options.offload)


def _step_of(options: Plan, config: DecoderConfig | UserModel, mesh: Mesh):
    """Returns the plan on `mesh`, the loss, and an abstract batch."""
    sharding = _sharding_of(options, mesh)
    if isinstance(config, UserModel):
        return config.plan(mesh, sharding), config.loss, config.batch
    cp, tp = mesh.shape["cp"], mesh.shape["tp"]
    check_rows(options.seq, tp, cp)
    plan = plan_decoder(
        config,
        mesh,
        sharding,
        Routing(capacity_factor=options.capacity_factor, router_dtype="model"),
        prefetch=options.strategy.prefetch,
        unroll=options.strategy.unroll,
        cp_form=options.strategy.cp_algorithm,
    )
    stages = mesh.shape["pp"]
    rows = options.gpus // (cp * tp * stages) * options.microbatches
    if options.batch is not None:
        rows = int(options.batch)
    abstract_batch = abstract_rows(rows, options.seq, cp)
    return plan, loss_of(fused=options.fused_loss), abstract_batch


def _count_on_cpu(
    options: Plan, config: DecoderConfig | UserModel, sizes: dict[str, int]
) -> CpuCount:
    print(f"fsdp-jax: {_NO_PLUGIN}", file=sys.stderr)
    devices = Devices(cpu_devices=options.gpus).pick()
    mesh = fsdp.make_mesh(**sizes, devices=devices)
    plan, loss, tokens = _step_of(options, config, mesh)
    tx = _optimizer_of(options)
    return count_on_cpu(plan, loss, tx, tokens, num_microbatches=options.microbatches)


def _search(
    options: Plan, config: DecoderConfig | UserModel, gpu: GPU, sizes: dict[str, int]
) -> Search:
    mesh = fsdp.make_mesh(**sizes, devices=gpu_devices(gpu, options.gpus))

    def estimate(strategy: Strategy, xla_options: Options) -> StepEstimate:
        strategy.check(sizes)
        changed = dataclasses.replace(options, strategy=strategy)
        return _estimate(
            *(changed, config, gpu, sizes), guide=False, xla_options=xla_options
        )

    seconds = 60 * options.search_minutes
    return search_strategy(estimate, options.strategy, options_of(mesh), seconds)


def _sweep(options: Plan, config: DecoderConfig | UserModel, gpu: GPU) -> Sweep:
    found: dict[str, StepEstimate] = {}
    rows = options.gpus * options.microbatches  # The same for all.
    if isinstance(config, UserModel):
        rows = config.rows
    elif options.batch is None:
        options = dataclasses.replace(options, batch=rows)
    else:
        rows = int(options.batch)
    for name, changed, sizes in _candidates(options, config, gpu):
        ranks = options.gpus // (sizes.get("cp", 1) * sizes.get("tp", 1))
        if rows % (ranks * options.microbatches):
            # Rows that are fewer than ranks, as long ones are, cp or tp can share.
            print(
                f"fsdp-jax: leaving out {name}: {rows} rows do not divide "
                f"over {ranks} ranks x {options.microbatches} microbatch(es)",
                file=sys.stderr,
            )
            continue
        print(f"fsdp-jax: compiling {name}", file=sys.stderr)
        found[name] = _estimate(changed, config, gpu, sizes, guide=False)
    if not found:
        raise ValueError(
            f"--batch {options.batch}: the ranks of no mesh divide {rows} rows. Use a "
            f"multiple of {options.microbatches}, or more rows."
        )
    return Sweep(found)


def _candidates(options: Plan, config: DecoderConfig | UserModel, gpu: GPU):
    """Yields `(name, options, mesh sizes)` of the candidates of a sweep."""
    nodes = options.gpus // gpu.cost.devices_per_node
    flat = [("FSDP (ZeRO-3)", {"zero": 3}, {}), ("ZeRO-2", {"zero": 2}, {})]
    flat.append(("ZeRO-1", {"zero": 1}, {}))
    by_node = {"dp_outer": nodes}
    if nodes > 1:
        flat.append(("HSDP, a replica a node", {"zero": 3}, by_node))
        flat.append(("HFSDP, a replica a node", {"zero": 3, "outer": 1}, by_node))
    if not isinstance(config, UserModel):
        flat += _decoder_candidates(options, config, gpu)
    for name, changes, sizes in flat:
        rounds = options.microbatches * sizes.get("pp", 1)
        strategy = dataclasses.replace(options.strategy, **changes)
        changed = dataclasses.replace(options, strategy=strategy, microbatches=rounds)
        yield name, changed, sizes


def _decoder_candidates(options: Plan, config: DecoderConfig, gpu: GPU):
    """Returns the candidates that split a decoder over tp, cp, ep or pp."""
    flat: list[tuple[str, dict[str, int], dict[str, int]]] = []
    for tp in _tp_sizes(options, config, gpu):
        flat.append((f"FSDP, tp={tp}", {"zero": 3}, {"tp": tp}))
    for cp in _cp_sizes(options, config, gpu):
        flat.append((f"FSDP, cp={cp}", {"zero": 3}, {"cp": cp}))
    ep = _ep_size(options, config, gpu)
    if ep > 1:
        flat.append((f"FSDP, ep={ep}", {"zero": 3}, {"ep": ep}))
    pp = max(options.gpus // gpu.cost.devices_per_node, 2)
    if options.gpus % pp == 0 and _fills_stages(config, pp):
        # Of the same batch the ranks that are left take more rows, one at a time.
        flat.append((f"ZeRO-2, pp={pp}", {"zero": 2}, {"pp": pp}))
    return flat


def _tp_sizes(options: Plan, config: DecoderConfig, gpu: GPU) -> list[int]:
    """Returns the tp sizes to try: 2 and a node, where they split the matrices."""
    in_node = min(gpu.cost.devices_per_node, options.gpus)
    sizes = []
    for tp in sorted({2, in_node}):
        try:
            check_rows(options.seq, tp)
            tensor_parallel_rules(config, tp)
        except ValueError as error:
            print(f"fsdp-jax: leaving out tp={tp}: {error}", file=sys.stderr)
        else:
            sizes += [tp] if options.gpus % tp == 0 else []
    return sizes


def _cp_sizes(options: Plan, config: DecoderConfig, gpu: GPU) -> list[int]:
    """Returns the cp sizes to try: 2 and a node, where rows are long and divide."""
    if options.seq < _LONG_ROWS:
        return []
    in_node = min(gpu.cost.devices_per_node, options.gpus)
    sizes = []
    for cp in sorted({2, in_node} - {1}):
        try:
            check_rows(options.seq, 1, cp)
            check_context(config, cp, 1, options.strategy.cp_algorithm)
        except ValueError as error:
            print(f"fsdp-jax: leaving out cp={cp}: {error}", file=sys.stderr)
        else:
            sizes += [cp] if options.gpus % cp == 0 else []
    return sizes


def _fills_stages(config: DecoderConfig, pp: int) -> bool:
    """Returns whether there is a period of layers for each stage."""
    longest = max(config.layer_blocks, key=lambda block: block.stop - block.start)
    return longest.num_periods >= pp


def _ep_size(options: Plan, config: DecoderConfig, gpu: GPU) -> int:
    """Returns the largest ep size in a node that divides the experts; 1 for none."""
    experts = config.moe.num_experts if config.moe else 1
    return math.gcd(experts, min(gpu.cost.devices_per_node, options.gpus))
