"""`fsdp-jax plan`: estimates memory and time of training on GPUs, without any."""

from __future__ import annotations

import dataclasses
import math
import sys
from pathlib import Path
from typing import Annotated

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

import fsdp_jax as fsdp
from bridge.models import DecoderConfig, tensor_parallel_rules
from fsdp_jax._report import format_bytes
from fsdp_jax.cli._context_parallel import abstract_rows, check_context, check_rows
from fsdp_jax.cli._decoder import loss_of, plan_decoder
from fsdp_jax.cli._errors import check_absent
from fsdp_jax.cli._model_source import open_hf, read_config
from fsdp_jax.cli._optimizer import OptimizerBits, OptimizerConfig
from fsdp_jax.cli._options import Devices, Group, IgnoreField, Unset
from fsdp_jax.cli._precision import OffloadTo, ParamGather, Precision
from fsdp_jax.cli._routing import Routing
from fsdp_jax.cli._sharding_options import Strategy
from fsdp_jax.cli._train_config import ParamDtype
from fsdp_jax.planner import (
    GPU,
    StepEstimate,
    count_on_cpu,
    estimate_step,
    find_gpu,
    gpu_devices,
    sent_grid,
)

_LONG_ROWS = 8192
"""Tokens from which on a sweep tries to split rows."""
_AXES = ("pp", "dp_outer", "dp_shard", "ep", "cp", "tp")
_NO_PLUGIN = (
    "XLA's compiler for GPUs is not installed (pip install 'fsdp-jax[plan]'), so this "
    "is what the compiler for CPUs says: memory, and how often what is communicated. "
    "It widens bfloat16 and hides nothing; no time is estimated."
)


@dataclasses.dataclass(frozen=True)
class Speeds:
    """Figures of the cost model, instead of those of the GPU.

    Attributes:
      tflops: Speed of 16-bit matrix products, TFLOP/s.
      memory_gbs: Bandwidth of the GPU's memory, GB/s.
      link_gbs: Bandwidth to the other GPUs of a node, GB/s a GPU.
      network_gbs: Bandwidth to other nodes, GB/s a GPU.
      latency_us: Latency of each collective, microseconds.
    """

    tflops: Unset[float] = None
    memory_gbs: Unset[float] = None
    link_gbs: Unset[float] = None
    network_gbs: Unset[float] = None
    latency_us: Unset[float] = None

    def apply(self, gpu: str) -> GPU:
        """Returns the GPU of that name, with these figures."""
        scaled = {
            "flops": (self.tflops, 1e12),
            "memory_bandwidth": (self.memory_gbs, 1e9),
            "link_bandwidth": (self.link_gbs, 1e9),
            "network_bandwidth": (self.network_gbs, 1e9),
            "latency": (self.latency_us, 1e-6),
        }
        costs = {k: v * unit for k, (v, unit) in scaled.items() if v is not None}
        return find_gpu(gpu, **costs)


@dataclasses.dataclass(frozen=True)
class Plan:
    """Estimate a model's training step on GPUs, without any.

    Prints memory, communication and modelled time. Nothing is loaded but the config.

    Attributes:
      hf: Model: a directory with config.json, or a hub id.
      config: Model: a config.json, or a directory that has one, without weights.
      ignore_field: Field of config.json to ignore although it is refused; may be
        repeated. For fields that change no number.
      gpu: GPU: a100, h100, h100-500w, h200, b200, b300, gb200 or gb300.
      gpus: Number of GPUs; more than 8 are whole nodes of 8.
      mesh: Sizes of the mesh's axes, as in dp_outer=4,dp_shard=-1; default all on
        dp_shard.
      batch: Rows of a global batch; default one a microbatch and GPU, of cp x tp x pp
        GPUs together.
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
      picture: Draws memory and time into this file, .png or .svg.
      trace: Writes the timeline into this file, for Perfetto or chrome://tracing.
      sweep: Tries other meshes and strategies too, and recommends one; cp where rows
        have 8,192 tokens or more.
      strategy: Sharding and memory of a step.
      speeds: Figures of the cost model.
    """

    hf: Unset[str] = None
    config: Unset[Path] = None
    ignore_field: IgnoreField = ()
    gpu: str = "h200"
    gpus: int = 8
    mesh: Unset[str] = None
    batch: Unset[int] = None
    seq: int = 4096
    microbatches: int = 1
    param_dtype: ParamDtype = "bfloat16"
    param_gather: ParamGather = "param_dtype"
    optimizer_bits: OptimizerBits = 32
    offload: Unset[OffloadTo] = None
    fused_loss: bool = False
    capacity_factor: Unset[float] = None
    json: Unset[Path] = None
    picture: Unset[Path] = None
    trace: Unset[Path] = None
    sweep: bool = False
    strategy: Annotated[Strategy, Group] = Strategy(remat="nothing", unroll=2)
    speeds: Annotated[Speeds, Group] = Speeds()

    def run(self) -> None:
        """Prints the estimate, or without the GPU compiler a count by that for CPUs."""
        # Lowering starts a backend: that of the CPU, as no GPU is asked for anything.
        jax.config.update("jax_platforms", "cpu")
        gpu = self.speeds.apply(self.gpu)
        config = _read_config(self)
        sizes = _mesh_sizes(self.mesh)
        chosen = (self.mesh, self.strategy.zero, self.strategy.outer)
        self.strategy.check(None if self.sweep else sizes)
        if self.sweep and chosen != (None, 3, None):
            raise ValueError(
                "plan --sweep tries meshes and strategies of its own: leave out "
                "--mesh, --zero and --outer, or --sweep."
            )
        for option, file in self._files().items():
            check_absent(file, option)
        try:
            gpu_devices(gpu, self.gpus)
        except ValueError as error:
            # A count by the CPU's compiler has no times to write, draw or compare.
            asked = self.sweep or self._files()
            if "fsdp-jax[plan]" not in str(error) or asked:
                raise
            _print_cpu(self, config, sizes)
            return
        if self.sweep:
            _sweep(self, config, gpu)
            return
        estimate = _estimate(self, config, gpu, sizes)
        print(estimate)
        self._save(estimate)

    def _files(self) -> dict[str, Path]:
        """The files to write, by option."""
        named = {"--json": self.json, "--picture": self.picture, "--trace": self.trace}
        return {option: file for option, file in named.items() if file is not None}

    def _save(self, estimate: StepEstimate) -> None:
        save = {
            "--json": estimate.save_json,
            "--picture": estimate.save_picture,
            "--trace": estimate.save_trace,
        }
        for option, file in self._files().items():
            save[option](file)


def _precision_of(options: Plan) -> Precision:
    return Precision(options.param_gather, None)


def _optimizer_of(options: Plan) -> optax.GradientTransformation:
    return OptimizerConfig(optimizer_bits=options.optimizer_bits).make()


def _read_config(options: Plan) -> DecoderConfig:
    if (options.hf is None) == (options.config is None):
        raise ValueError("plan takes the model from --hf MODEL or --config FILE: one.")
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
    config: DecoderConfig,
    gpu: GPU,
    sizes: dict[str, int],
    *,
    guide: bool = True,
) -> StepEstimate:
    mesh = fsdp.make_mesh(**sizes, devices=gpu_devices(gpu, options.gpus))
    plan, loss, batch = _step_of(options, config, mesh)
    rows = jax.tree.leaves(batch)[0].shape[0]
    return estimate_step(
        *(plan, loss, _optimizer_of(options), batch),
        gpu=gpu,
        tokens=rows * options.seq,
        guide=guide,
        num_microbatches=options.microbatches,
    )


def _step_of(options: Plan, config: DecoderConfig, mesh: Mesh):
    """Returns the plan on `mesh`, the loss, and an abstract batch."""
    cp, tp = mesh.shape["cp"], mesh.shape["tp"]
    check_rows(options.seq, tp, cp)
    dtype = jnp.dtype(options.param_dtype)
    policy = fsdp.MixedPrecisionPolicy(param_dtype=dtype, grad_comm_dtype=dtype)
    sharding = options.strategy.applied(fsdp.FSDPConfig(mp_policy=policy), mesh)
    plan = plan_decoder(
        config,
        mesh,
        _precision_of(options).sharding(sharding, options.offload),
        Routing(capacity_factor=options.capacity_factor, router_dtype="model"),
        prefetch=options.strategy.prefetch,
        unroll=options.strategy.unroll,
        cp_form=options.strategy.cp_algorithm,
    )
    stages = mesh.shape["pp"]
    rows = options.gpus // (cp * tp * stages) * options.microbatches
    if options.batch is not None:
        rows = options.batch
    abstract_batch = abstract_rows(rows, options.seq, cp)
    return plan, loss_of(fused=options.fused_loss), abstract_batch


def _print_cpu(options: Plan, config: DecoderConfig, sizes: dict[str, int]) -> None:
    print(f"fsdp-jax: {_NO_PLUGIN}", file=sys.stderr)
    devices = Devices(cpu_devices=options.gpus).pick()
    mesh = fsdp.make_mesh(**sizes, devices=devices)
    plan, loss, tokens = _step_of(options, config, mesh)
    tx = _optimizer_of(options)
    size, sent = count_on_cpu(
        plan, loss, tx, tokens, num_microbatches=options.microbatches
    )
    print(f"memory: {format_bytes(size)} a device, as the compiler for CPUs assigns it")
    print()
    print(sent_grid(sent, timed=False).as_text())


def _sweep(options: Plan, config: DecoderConfig, gpu: GPU) -> None:
    found: dict[str, StepEstimate] = {}
    if options.batch is None:  # The same for all, to compare them by.
        options = dataclasses.replace(
            options, batch=options.gpus * options.microbatches
        )
    for name, changed, sizes in _candidates(options, config, gpu):
        ranks = options.gpus // (sizes.get("cp", 1) * sizes.get("tp", 1))
        if options.batch and options.batch % (ranks * options.microbatches):
            # Rows that are fewer than ranks, as long ones are, cp or tp can share.
            print(
                f"fsdp-jax: leaving out {name}: {options.batch} rows do not divide "
                f"over {ranks} ranks x {options.microbatches} microbatch(es)",
                file=sys.stderr,
            )
            continue
        print(f"fsdp-jax: compiling {name}", file=sys.stderr)
        found[name] = _estimate(changed, config, gpu, sizes, guide=False)
    if not found:
        raise ValueError(
            f"--batch {options.batch}: the ranks of no mesh divide so many rows. Use a "
            f"multiple of {options.microbatches}, or more rows."
        )
    sweep = fsdp.planner.Sweep(found)
    print(sweep)
    best = next(iter(sweep.estimates.values()))
    options._save(best)


def _candidates(options: Plan, config: DecoderConfig, gpu: GPU):
    """Yields `(name, options, mesh sizes)` of the candidates of a sweep."""
    nodes = options.gpus // gpu.cost.devices_per_node
    flat = [("FSDP (ZeRO-3)", {"zero": 3}, {}), ("ZeRO-2", {"zero": 2}, {})]
    flat.append(("ZeRO-1", {"zero": 1}, {}))
    by_node = {"dp_outer": nodes}
    if nodes > 1:
        flat.append(("HSDP, a replica a node", {"zero": 3}, by_node))
        flat.append(("HFSDP, a replica a node", {"zero": 3, "outer": 1}, by_node))
    for tp in _tp_sizes(options, config, gpu):
        flat.append((f"FSDP, tp={tp}", {"zero": 3}, {"tp": tp}))
    for cp in _cp_sizes(options, config, gpu):
        flat.append((f"FSDP, cp={cp}", {"zero": 3}, {"cp": cp}))
    ep = _ep_size(options, config, gpu)
    if ep > 1:
        flat.append((f"FSDP, ep={ep}", {"zero": 3}, {"ep": ep}))
    pp = max(nodes, 2)
    if options.gpus % pp == 0 and _fills_stages(config, pp):
        # Of the same batch the ranks that are left take more rows, one at a time.
        flat.append((f"ZeRO-2, pp={pp}", {"zero": 2}, {"pp": pp}))
    for name, changes, sizes in flat:
        rounds = options.microbatches * sizes.get("pp", 1)
        strategy = dataclasses.replace(options.strategy, **changes)
        changed = dataclasses.replace(options, strategy=strategy, microbatches=rounds)
        yield name, changed, sizes


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
