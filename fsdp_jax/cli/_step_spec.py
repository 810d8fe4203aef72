"""The training step that `fsdp-jax plan` estimates, on any mesh."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

import fsdp_jax as fsdp
from bridge.models import DecoderConfig
from fsdp_jax.cli._context_parallel import abstract_rows, check_rows
from fsdp_jax.cli._decoder import plan_decoder
from fsdp_jax.cli._decoder_loss import loss_of
from fsdp_jax.cli._optimizer import OptimizerBits, OptimizerConfig
from fsdp_jax.cli._options import Devices
from fsdp_jax.cli._precision import (
    ExpertProducts,
    OffloadTo,
    ParamDtype,
    ParamGather,
    Precision,
    Products,
)
from fsdp_jax.cli._routing import DispatchDtype, Routing
from fsdp_jax.cli._sharding_options import Strategy, check_batch_parts
from fsdp_jax.cli._user_model import UserModel
from fsdp_jax.planner import (
    GPU,
    CpuCount,
    StepEstimate,
    count_on_cpu,
    estimate_step,
    gpu_devices,
)
from fsdp_jax.training._compiler_options import Options, compiler_options

Sizes = dict[str, int]
"""Sizes of the mesh's axes, by name."""


@dataclasses.dataclass(frozen=True)
class StepSpec:
    """A training step, of which the mesh is not chosen yet.

    Attributes:
      model: Config of a decoder, or the user's own model.
      gpus: Number of GPUs.
      rows: Rows of a global batch of a decoder; None for one a microbatch and GPU, of
        cp x tp x pp GPUs together.
      seq: Tokens that a row predicts.
      microbatches: Microbatches a step.
      param_dtype: Dtype that weights are gathered and computed in.
      param_gather: Format in which the matrices of layers are communicated.
      products: Format of the operands of projections of attention and MLPs.
      expert_products: Format of the operands of grouped products of experts.
      num_layers_at_start_in_bf16: Number of first layers that keep bfloat16 for these.
      num_layers_at_end_in_bf16: Number of last layers likewise.
      optimizer_bits: Bits of an element of AdamW's moments.
      offload: State kept in host memory.
      fused_loss: Whether logits are computed by chunks of the vocabulary.
      capacity_factor: Capacity of an expert, as `Routing` takes it.
      dispatch_dtype: Dtype in which tokens are sent to their experts.
      ranks_per_node: Ranks on ep in a node, as `Routing` takes it.
      nodes_per_token: Nodes that a token is sent to at most, likewise.
      strategy: Sharding and memory of the step.
    """

    model: DecoderConfig | UserModel
    gpus: int
    rows: int | None
    seq: int
    microbatches: int
    param_dtype: ParamDtype
    param_gather: ParamGather
    products: Products
    expert_products: ExpertProducts
    num_layers_at_start_in_bf16: int
    num_layers_at_end_in_bf16: int
    optimizer_bits: OptimizerBits
    offload: OffloadTo | None
    fused_loss: bool
    capacity_factor: float | None
    dispatch_dtype: DispatchDtype
    ranks_per_node: int | None
    nodes_per_token: int | None
    strategy: Strategy

    def estimate(
        self,
        gpu: GPU,
        sizes: Sizes,
        *,
        guide: bool = True,
        xla_options: Options | None = None,
    ) -> StepEstimate:
        """Compiles the step for GPUs, and estimates its memory and time.

        Args:
          gpu: GPU to compile for.
          sizes: Sizes of the mesh's axes.
          guide: Whether the compiler is told the costs of the cost model.
          xla_options: Options of the compiler; None for `xla_options()`.
        """
        plan, loss, batch = self._on(self.gpu_mesh(gpu, sizes))
        options = self._options(plan) if xla_options is None else xla_options
        is_own = isinstance(self.model, UserModel)
        rows = jax.tree.leaves(batch)[0].shape[0]
        return estimate_step(
            plan,
            loss,
            self._optimizer,
            batch,
            gpu=gpu,
            tokens=None if is_own else rows * self.seq,
            guide=guide,
            options=options,
            num_microbatches=self.microbatches,
        )

    def xla_options(self, gpu: GPU, sizes: Sizes) -> Options:
        """Returns the options of the compiler of a train step."""
        plan, _, _ = self._on(self.gpu_mesh(gpu, sizes))
        return self._options(plan)

    def _options(self, plan: fsdp.Plan) -> Options:
        return compiler_options(plan=plan, batch_parts=self.strategy.batch_parts)

    def count_on_cpu(self, sizes: Sizes) -> CpuCount:
        """Compiles the step for simulated CPUs: memory and communication alone."""
        devices = Devices(cpu_devices=self.gpus).pick()
        plan, loss, batch = self._on(fsdp.make_mesh(**sizes, devices=devices))
        return count_on_cpu(
            plan, loss, self._optimizer, batch, num_microbatches=self.microbatches
        )

    def gpu_mesh(self, gpu: GPU, sizes: Sizes) -> Mesh:
        """Returns a mesh of GPUs that need not be there."""
        return fsdp.make_mesh(**sizes, devices=gpu_devices(gpu, self.gpus))

    @property
    def _optimizer(self) -> optax.GradientTransformation:
        return OptimizerConfig(optimizer_bits=self.optimizer_bits).make()

    def _on(self, mesh: Mesh):
        """Returns the plan on `mesh`, the loss, and an abstract batch."""
        if isinstance(self.model, UserModel):
            sharding = self._sharding(mesh, padded=False)
            return self.model.plan(mesh, sharding), self.model.loss, self.model.batch
        cp, tp, stages = (mesh.shape[axis] for axis in ("cp", "tp", "pp"))
        check_rows(self.seq, tp, cp)
        routing = Routing(
            capacity_factor=self.capacity_factor,
            router_dtype="model",
            dispatch_dtype=self.dispatch_dtype,
            ranks_per_node=self.ranks_per_node,
            nodes_per_token=self.nodes_per_token,
        )
        if wrong := routing.problems():
            raise ValueError("; ".join(wrong) + ".")
        plan = plan_decoder(
            self.model,
            mesh,
            self._sharding(mesh, padded=routing.pads(mesh)),
            routing,
            prefetch=self.strategy.num_ahead,
            unroll=self.strategy.unroll,
            cp_form=self.strategy.cp_algorithm,
            attention=self.strategy.attention,
            products=self.products,
            expert_products=self.expert_products,
            num_layers_at_start_in_bf16=self.num_layers_at_start_in_bf16,
            num_layers_at_end_in_bf16=self.num_layers_at_end_in_bf16,
            batch_parts=self.strategy.batch_parts,
        )
        rows = self.rows
        if rows is None:
            rows = self.gpus // (cp * tp * stages) * self.microbatches
        parts = self.strategy.batch_parts
        check_batch_parts(parts, rows, self.microbatches, mesh)
        return plan, loss_of(fused=self.fused_loss), abstract_rows(rows, self.seq, cp)

    def _sharding(self, mesh: Mesh, *, padded: bool) -> fsdp.FSDPConfig:
        dtype = jnp.dtype(self.param_dtype)
        policy = fsdp.MixedPrecisionPolicy(param_dtype=dtype, grad_comm_dtype=dtype)
        sharding = fsdp.FSDPConfig(mp_policy=policy, prefetch=self.strategy.num_ahead)
        sharding = self.strategy.applied(sharding, mesh, padded=padded)
        precision = Precision(
            self.param_dtype,
            self.param_gather,
            self.products,
            self.expert_products,
            self.num_layers_at_start_in_bf16,
            self.num_layers_at_end_in_bf16,
        )
        if wrong := precision.problems():
            raise ValueError("; ".join(wrong) + ".")
        return precision.sharding(sharding, self.offload)
