"""The decoders of `overlap.py`: whole models, on meshes with more than data axes."""

from __future__ import annotations

import dataclasses
import time

import jax
import jax.numpy as jnp
from overlap_figures import by_axes, temporaries, times

import fsdp_jax as fsdp
from bridge.models import DecoderConfig, MLAConfig, MoEConfig, RopeConfig
from fsdp_jax.cli._context_parallel import abstract_rows
from fsdp_jax.cli._decoder import plan_decoder
from fsdp_jax.cli._decoder_loss import fused_next_token_loss
from fsdp_jax.cli._precision import ParamGather, Precision, Products
from fsdp_jax.cli._routing import DispatchDtype, Routing
from fsdp_jax.planner._compile import compile_scheduled, gpu_devices
from fsdp_jax.planner._gpu import GPUS
from fsdp_jax.planner._memory import predict_memory
from fsdp_jax.sharding._stages import Schedule
from fsdp_jax.training._compiler_options import compiler_options
from fsdp_jax.training._memory_check import compiled_bytes


@dataclasses.dataclass(frozen=True)
class DecoderCase:
    """A model, on how many H200s it trains, and how they share it.

    Attributes:
      config: Its sizes.
      gpus: H200s, in nodes of 8.
      mesh: Sizes of the mesh's axes; `dp_shard` takes what these leave.
      rows: Sequences for each rank of the data axes, in a microbatch.
      seq: Tokens of a sequence; `cp` splits them.
      capacity_factor: What experts have room for, see `expert_capacity_dispatch`.
      dispatch_dtype: What tokens are sent to experts in.
      ranks_per_node: Ranks on `ep` in a node that share one copy of a token; None to
        send each expert its own.
      nodes_per_token: Nodes that a token is sent to at most; None for all.
      saved: Names of what is kept for backward; all else is computed again.
      microbatches: In a step.
      zero: Its strategy.
      batch_parts: Parts of a rank's rows that a layer runs side by side, each tried.
      unroll: Layers in one iteration of a loop: what is sent last in one has nothing of
        the next beside it.
      products: Format of the operands of projections.
      param_gather: Format in which weights of layers are communicated.
    """

    config: DecoderConfig
    gpus: int
    mesh: dict[str, int]
    rows: int
    seq: int = 4096
    capacity_factor: float | None = None
    dispatch_dtype: DispatchDtype = "param_dtype"
    ranks_per_node: int | None = None
    nodes_per_token: int | None = None
    saved: tuple[str, ...] = ()
    microbatches: int = 1
    zero: int = 3
    batch_parts: tuple[int, ...] = (1,)
    unroll: int = 2
    products: Products = "param_dtype"
    param_gather: ParamGather = "param_dtype"

    def lower(self, tx, parts):
        """Its plan, its step lowered for GPUs that are not here, and its memory."""
        devices = gpu_devices(GPUS["h200"], self.gpus)
        mesh = fsdp.make_mesh(**self.mesh, devices=devices)
        policy = fsdp.MixedPrecisionPolicy(
            param_dtype=jnp.bfloat16, grad_comm_dtype=jnp.bfloat16
        )
        config = fsdp.FSDPConfig(
            zero_dp_strategy=self.zero,
            mp_policy=policy,
            remat_policy=jax.checkpoint_policies.save_only_these_names(*self.saved),
        )
        precision = Precision("bfloat16", param_gather=self.param_gather)
        config = precision.sharding(config, offload=None)
        routing = Routing(
            capacity_factor=self.capacity_factor,
            router_dtype="model",
            dispatch_dtype=self.dispatch_dtype,
            ranks_per_node=self.ranks_per_node,
            nodes_per_token=self.nodes_per_token,
        )
        how = {"prefetch": 1, "unroll": self.unroll, "batch_parts": parts}
        plan = plan_decoder(
            self.config, mesh, config, routing, products=self.products, **how
        )
        cp, shared = mesh.shape["cp"], mesh.shape["tp"] * mesh.shape["pp"]
        rows = self.rows * (self.gpus // (cp * shared)) * self.microbatches
        step = fsdp.make_train_step(
            plan, fused_next_token_loss, tx, num_microbatches=self.microbatches
        )
        batch = abstract_rows(rows, self.seq, cp)
        state = fsdp.abstract_state(plan, tx)
        traced = step.jitted.trace(state, batch).jaxpr
        memory = predict_memory(plan, state, batch, traced)
        return plan, step.lower(state, batch), memory


LLAMA_3_8B = DecoderConfig(
    vocab_size=128256,
    hidden_size=4096,
    intermediate_size=14336,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=8,
    max_position_embeddings=131072,
    norm_eps=1e-5,
    rope=RopeConfig(rope_theta=500000.0),
)

LLAMA_3_70B = DecoderConfig(
    vocab_size=128256,
    hidden_size=8192,
    intermediate_size=28672,
    num_hidden_layers=80,
    num_attention_heads=64,
    num_key_value_heads=8,
    max_position_embeddings=8192,
    norm_eps=1e-5,
    rope=RopeConfig(rope_theta=500000.0),
)

MIXTRAL_8X7B = DecoderConfig(
    vocab_size=32000,
    hidden_size=4096,
    intermediate_size=14336,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=8,
    max_position_embeddings=32768,
    norm_eps=1e-5,
    rope=RopeConfig(rope_theta=1e6),
    moe=MoEConfig(
        num_experts=8,
        num_experts_per_tok=2,
        intermediate_size=14336,
        norm_topk_prob=True,
    ),
)

DEEPSEEK_V3 = DecoderConfig(
    vocab_size=129280,
    hidden_size=7168,
    intermediate_size=18432,
    num_hidden_layers=61,
    num_attention_heads=128,
    num_key_value_heads=128,
    max_position_embeddings=4096,
    rope=RopeConfig(rope_theta=1e4, interleaved=True),
    mla=MLAConfig(
        q_lora_rank=1536,
        kv_lora_rank=512,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
    ),
    moe=MoEConfig(
        num_experts=256,
        num_experts_per_tok=8,
        intermediate_size=2048,
        shared_intermediate_size=2048,
        scoring="sigmoid",
        norm_topk_prob=True,
        routed_scaling_factor=2.5,
        correction_bias=True,
        n_group=8,
        topk_group=4,
        group_scoring="top2_sum",
    ),
    dense_layers=(0, 1, 2),
)

_FLOAT8 = DecoderCase(LLAMA_3_8B, 64, {}, rows=2, products="float8")
_MIXTRAL_8X7B = DecoderCase(
    MIXTRAL_8X7B, 64, {"ep": 8}, rows=4, capacity_factor=1.0, batch_parts=(1, 2)
)
_DEEPSEEK_V3 = DecoderCase(
    DEEPSEEK_V3,
    256,
    {"ep": 64},
    rows=4,
    capacity_factor=1.0,
    batch_parts=(1, 2),
)
# Its router chooses experts of four groups, each on one node.
_BY_NODE = {"ranks_per_node": 8, "nodes_per_token": 4}
_BY_NODE_FLOAT8 = dataclasses.replace(_DEEPSEEK_V3, dispatch_dtype="float8", **_BY_NODE)
DECODERS = {
    "llama-3-8b-cp": DecoderCase(
        LLAMA_3_8B,
        8,
        {"cp": 8},
        rows=1,
        seq=131072,
        saved=("context_attention",),
    ),
    # Products in float8, with weights gathered in bfloat16 and in the same bits.
    "llama-3-8b-float8": _FLOAT8,
    "llama-3-8b-float8-gather": dataclasses.replace(_FLOAT8, param_gather="float8"),
    "llama-3-70b": DecoderCase(LLAMA_3_70B, 64, {"tp": 8}, rows=4, batch_parts=(1, 2)),
    # Stages of 20 layers, gathered once a step: 17 billion weights.
    "llama-3-70b-pp": DecoderCase(
        LLAMA_3_70B, 64, {"pp": 4}, rows=2, microbatches=16, zero=2
    ),
    "mixtral-8x7b": _MIXTRAL_8X7B,
    "mixtral-8x7b-float8-gather": dataclasses.replace(
        _MIXTRAL_8X7B, param_gather="float8"
    ),
    # Four times the tokens, for the same communication of weights.
    "mixtral-8x7b-16": dataclasses.replace(_MIXTRAL_8X7B, rows=16),
    "deepseek-v3": _DEEPSEEK_V3,
    "deepseek-v3-float8": dataclasses.replace(_DEEPSEEK_V3, dispatch_dtype="float8"),
    "deepseek-v3-by-node": dataclasses.replace(_DEEPSEEK_V3, **_BY_NODE),
    "deepseek-v3-by-node-float8": _BY_NODE_FLOAT8,
    "deepseek-v3-by-node-float8-gather": dataclasses.replace(
        _BY_NODE_FLOAT8, param_gather="float8", unroll=4
    ),
    "mixtral-8x7b-dropless": dataclasses.replace(_MIXTRAL_8X7B, capacity_factor=None),
}
"""What `--decoder` takes."""


# For XLA of jax 0.12 to send rows between nodes: it gathers them all else, see the page
# of limits.
_ROWS_BETWEEN_NODES = {
    "xla_gpu_unsupported_enable_ragged_all_to_all_multi_host_decomposer": False,
    "xla_gpu_allow_ragged_all_to_all_nccl_send_recv_fallback": True,
}


def options_for(plan, case, parts):
    """What XLA is told: what a step of this plan tells it, and what a user has to."""
    options = compiler_options(plan=plan, batch_parts=parts)
    if case.ranks_per_node and jax.__version_info__ >= (0, 12):
        options |= _ROWS_BETWEEN_NODES
    return options


def bubble(plan, microbatches):
    """The part of the step in which a stage has no turn; it is in the computation."""
    if plan.mesh.shape["pp"] == 1:
        return {}
    return {"bubble": round(Schedule(plan.stages, microbatches).bubble, 4)}


def measure_decoder(name, tx, dump):
    """A whole model, and over which axes it waits, by parts of a batch."""
    case = DECODERS[name]
    return [measure_parts(name, case, parts, tx, dump) for parts in case.batch_parts]


def measure_parts(name, case, parts, tx, dump):
    started = time.perf_counter()
    plan, lowered, memory = case.lower(tx, parts)
    options = options_for(plan, case, parts)
    cost = GPUS["h200"].cost
    scheduled = compile_scheduled(lowered, cost, case.gpus, options)
    if dump:
        (dump / f"{name}_{parts}_{case.gpus}.hlo").write_text(
            scheduled.compiled.as_text()
        )
    return {
        "form": name,
        "gpus": case.gpus,
        "mesh": {axis: n for axis, n in plan.mesh.shape.items() if n > 1},
        "sequences_a_rank": case.rows,
        "tokens_a_sequence": case.seq,
        "microbatches": case.microbatches,
        "batch_parts": parts,
        "unroll": case.unroll,
        "products": case.products,
        "param_gather": case.param_gather,
        **bubble(plan, case.microbatches),
        **times(scheduled, cost, case.gpus),
        "over": by_axes(scheduled.timeline, plan.mesh, cost.devices_per_node),
        "temporaries_gb": temporaries(scheduled.compiled),
        "memory_gb": round(compiled_bytes(scheduled.compiled) / 1e9, 3),
        "memory_predicted_gb": round(memory.total / 1e9, 3),
        "guided": scheduled.guided,
        "compiler_options": options,
        "compile_s": round(time.perf_counter() - started, 1),
    }
