"""Stand-ins for the models of published runs: the same products, as an FSDP step.

A decoder whose linear layers are in bfloat16 or in 8-bit floats, and whose activations
are saved by name. It is compiled for the GPUs of a published run, never run.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Literal

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from published_losses import LOSSES
from published_products import linear8

import fsdp_jax as fsdp
from bridge.models import FlashKernel, dot_product_attention
from fsdp_jax.planner._compile import gpu_devices
from fsdp_jax.planner._gpu import GPUS

TX = optax.adamw(3e-4, weight_decay=0.1)


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Sizes of a decoder.

    Attributes:
      width: Width of the residual stream.
      layers: Number of layers.
      heads: Query heads.
      kv_heads: Key and value heads.
      mlp: Width of the MLP.
      vocab: Rows of the embedding.
      gated: Whether the MLP is gated (SwiGLU, RMSNorm, rotary embedding, as in Llama)
        or not (GELU, LayerNorm, learned positions, as in MPT).
      tied: Whether the head is the embedding.
    """

    width: int
    layers: int
    heads: int
    kv_heads: int
    mlp: int
    vocab: int
    gated: bool = True
    tied: bool = False

    @property
    def head_dim(self) -> int:
        """Width of a head."""
        return self.width // self.heads


def _mpt(width: int, layers: int, heads: int) -> Sizes:
    return Sizes(width, layers, heads, heads, 4 * width, 50432, gated=False, tied=True)


# Llama: config.json of the models, Code Llama's for the 34B; MPT: llm-foundry
# scripts/train/yamls/pretrain; Fuji: axlearn/experiments/text/gpt/fuji.py.
SIZES = {
    "llama2-7b": Sizes(4096, 32, 32, 32, 11008, 32000),
    "llama2-13b": Sizes(5120, 40, 40, 40, 13824, 32000),
    "llama2-34b": Sizes(8192, 48, 64, 8, 22016, 32000),
    "llama2-70b": Sizes(8192, 80, 64, 8, 28672, 32000),
    "fuji-7b-v2": Sizes(4096, 32, 32, 32, 11008, 32768, tied=True),
    "fuji-70b-v2": Sizes(8192, 80, 64, 8, 28672, 32768),
    "llama3-8b": Sizes(4096, 32, 32, 8, 14336, 128256),
    "llama3-70b": Sizes(8192, 80, 64, 8, 28672, 128256),
    "mpt-760m": _mpt(1536, 24, 12),
    "mpt-1b": _mpt(2048, 24, 16),
    "mpt-3b": _mpt(2560, 32, 20),
    "mpt-7b": _mpt(4096, 32, 32),
    "mpt-13b": _mpt(5120, 40, 40),
    "mpt-30b": _mpt(7168, 48, 56),
    "mpt-70b": _mpt(8192, 80, 64),
}

# The dim that tensor parallelism splits: a product's columns, then the next one's rows.
COLUMNS = {f"layers.{name}": -1 for name in ("q", "k", "v", "gate", "up")}
COLUMNS |= {"embed": 0, "head": -1}
ROWS = {"layers.o": -2, "layers.down": -2}
PRODUCTS = ("q", "k", "v", "o", "gate", "up", "down")
REMAT_POLICIES = {
    "full": (),
    # MaxText, layers/decoders.py: remat policies by the names of projections.
    "save_qkv_proj": ("q", "k", "v"),
    "save_dot_with_context_except_mlp": ("q", "k", "v", "context", "o"),
    "minimal_flash": (*PRODUCTS, "context"),
    # MaxText's "custom" policy of NVIDIA's recipes of Llama 2, configure.sh.
    "save_dot_except_mlpwi": ("q", "k", "v", "o", "down"),
    # The same of 8-bit runs; and axlearn, common/attention.py: projections of attention
    # but not what its flash kernel returns.
    "save_dot_except_mlp": ("q", "k", "v", "o"),
    # torchtitan, models/llama/parallelize_llama.py: attention and every other product.
    "selective (op)": ("q", "v", "gate", "down", "context"),
    # PyTorch without recomputation keeps what its operations were given, in bfloat16;
    # JAX without a policy would keep float32 of norms and activations too. What is
    # between the products is computed again, fused with what needs it.
    "none": (*PRODUCTS, "context"),
    # Whole blocks, the first of the model, are computed again, and of others nothing
    # but what a compiler fuses; products in 8-bit floats keep what they multiplied.
    "blocks": tuple(f"kept.{name}" for name in (*PRODUCTS, "context", "float8")),
}
"""Names of what is kept for backward."""


def keeps_attention(primitive, *_, **__) -> bool:
    """Policy that keeps all that attention returns, which has no names of its own.

    Its backward pass needs the sums of its softmax beside the "context".
    """
    return "dot_product_attention_fwd" in primitive.name


@dataclasses.dataclass(frozen=True)
class Program:
    """One program: rows of the CSV with equal fields share it.

    Attributes:
      model: Key of `SIZES`.
      gpu: Key of `GPUS`.
      gpus: Number of GPUs.
      outer: Replicas of HSDP.
      seq: Tokens of a row.
      rows: Rows a GPU and microbatch.
      microbatches: Microbatches a step.
      zero: Strategy: 3 shards weights, 2 keeps them between forward and backward.
      remat: Key of `REMAT_POLICIES`.
      float8: Scales of the layers' products in 8-bit floats: "current", of the tensors
        at hand, or "delayed", of earlier steps; "" for products in bfloat16.
      grads: Dtype in which gradients are communicated.
      tp: Ranks of tensor parallelism, with tokens split between the products.
      loss: "fused" by XLA, or "eager": PyTorch's cross entropy without a compiler, each
        of whose operations leaves its result in memory.
      recomputed: Layers that are computed again in backward if `remat` is "blocks".
      cp: Ranks of context parallelism: a ring, each part of a row by a flash kernel.
    """

    model: str
    gpu: str
    gpus: int
    outer: int
    seq: int
    rows: int
    microbatches: int
    zero: int
    remat: str
    float8: str
    grads: str
    tp: int = 1
    loss: Literal["fused", "eager"] = "fused"
    recomputed: int = 0
    cp: int = 1

    @property
    def name(self) -> str:
        """Name of the file of its schedule."""
        remat = self.remat.replace(" ", "_").replace("(", "").replace(")", "")
        remat += str(self.recomputed or "")
        numbers = f"{self.gpus}x{self.rows}x{self.seq}_outer{self.outer}"
        form = f"fp8_{self.float8}" if self.float8 else "bf16"
        rest = f"micro{self.microbatches}_zero{self.zero}_{remat}_{form}_{self.grads}"
        tp = f"_tp{self.tp}" if self.tp > 1 else ""
        cp = f"_cp{self.cp}" if self.cp > 1 else ""
        loss = "_eager_loss" if self.loss == "eager" else ""
        return f"{self.model}_{self.gpu}_{numbers}_{rest}{tp}{cp}{loss}"

    @property
    def axes(self) -> dict[str, int]:
        """Sizes of the mesh's axes; `dp_shard` takes what they leave."""
        return {"dp_outer": self.outer, "tp": self.tp, "cp": self.cp}

    def _policy(self, sizes: Sizes):
        """Returns what is kept; on attention the larger of two stacks decides."""
        policies, names = jax.checkpoint_policies, REMAT_POLICIES[self.remat]
        is_kept = "context" in names
        if self.remat == "blocks":
            is_kept = 2 * self.recomputed < sizes.layers
        if not is_kept:
            return policies.save_only_these_names(*names)
        # Its result would be kept twice.
        others = (name for name in names if not name.endswith("context"))
        named = policies.save_only_these_names(*others)
        return policies.save_from_both_policies(named, keeps_attention)

    def lower(self):
        """Returns the plan and the lowered step."""
        sizes = SIZES[self.model]
        config = fsdp.FSDPConfig(
            zero_dp_strategy=self.zero,
            mp_policy=fsdp.MixedPrecisionPolicy(
                param_dtype=jnp.bfloat16, grad_comm_dtype=jnp.dtype(self.grads)
            ),
            remat_policy=self._policy(sizes),
            context_parallel={"*": 1} if self.cp > 1 else {},
            tensor_parallel=COLUMNS | ROWS if self.tp > 1 else {},
        )
        devices = gpu_devices(GPUS[self.gpu], self.gpus)
        mesh = fsdp.make_mesh(**self.axes, devices=devices)
        stacks = ("layers", "kept") if self.recomputed else ("layers",)
        plan = fsdp.fully_shard(
            functools.partial(make_params, sizes, self.seq, self.recomputed),
            mesh,
            [fsdp.Stacked(stack) for stack in stacks],
            config,
        )
        step = fsdp.make_train_step(
            plan,
            functools.partial(loss, sizes, self.float8, LOSSES[self.loss]),
            TX,
            num_microbatches=self.microbatches,
        )
        rows = self.rows * (self.gpus // (self.tp * self.cp)) * self.microbatches
        tokens = jax.ShapeDtypeStruct((rows, self.seq + 1), jnp.int32)
        if self.cp > 1:
            part = jax.ShapeDtypeStruct((rows, self.seq), jnp.int32)
            tokens = {"inputs": part, "labels": part}
        return plan, step.lower(fsdp.abstract_state(plan, TX), tokens)


attention = fsdp.ops.split_heads(dot_product_attention)
ring = fsdp.ops.split_heads(
    functools.partial(fsdp.ops.ring_attention, kernel=FlashKernel())
)


def make_params(sizes, seq, recomputed, key):
    """Weights, those of layers stacked; those of the first in a stack of their own."""
    del key
    params = {
        "embed": _weights(sizes.vocab, sizes.width),
        "norm": _weights(sizes.width),
        "layers": _stack(sizes, recomputed or sizes.layers),
    }
    if recomputed:
        params["kept"] = _stack(sizes, sizes.layers - recomputed)
    if not sizes.tied:
        params["head"] = _weights(sizes.width, sizes.vocab)
    if not sizes.gated:
        params["positions"] = _weights(seq, sizes.width)
    return params


def _stack(sizes, layers):
    width, mlp = sizes.width, sizes.mlp
    heads, kv_heads = (n * sizes.head_dim for n in (sizes.heads, sizes.kv_heads))
    stack = {
        "q": _weights(layers, width, heads),
        "k": _weights(layers, width, kv_heads),
        "v": _weights(layers, width, kv_heads),
        "o": _weights(layers, heads, width),
        "up": _weights(layers, width, mlp),
        "down": _weights(layers, mlp, width),
        "norm_1": _weights(layers, width),
        "norm_2": _weights(layers, width),
    }
    if sizes.gated:
        stack["gate"] = _weights(layers, width, mlp)
    return stack


def _weights(*shape):
    return jnp.zeros(shape, jnp.float32)


def norm(x, scale, *, centered):
    y = x.astype(jnp.float32)
    if centered:
        y -= jnp.mean(y, -1, keepdims=True)
    y *= lax.rsqrt(jnp.mean(y * y, -1, keepdims=True) + 1e-5)
    return (y * scale.astype(jnp.float32)).astype(x.dtype)


def rotate(x):
    """Rotary embedding of heads [rows, seq, heads, head_dim]."""
    half = x.shape[-1] // 2
    powers = jnp.arange(half, dtype=jnp.float32) / half
    angles = jnp.arange(x.shape[1], dtype=jnp.float32)[:, None] * 500000.0**-powers
    cos, sin = jnp.cos(angles)[:, None], jnp.sin(angles)[:, None]
    a, b = x[..., :half].astype(jnp.float32), x[..., half:].astype(jnp.float32)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1).astype(x.dtype)


def block(sizes, float8, attend, weights, x, *, kept=""):
    """One layer; `kept` begins the names of what may be saved."""
    rows, seq, _ = x.shape
    centered = not sizes.gated

    def linear(name, h):
        if float8:
            found = linear8(
                float8, kept + "float8", h.reshape(rows * seq, -1), weights[name]
            )
            return checkpoint_name(found.reshape(rows, seq, -1), kept + name)
        return checkpoint_name(h @ weights[name], kept + name)

    place = fsdp.ops.sequence_parallel
    h = place(norm(x, weights["norm_1"], centered=centered), "input")
    q, k, v = (linear(name, h).reshape(rows, seq, -1, sizes.head_dim) for name in "qkv")
    if sizes.gated:
        q, k = rotate(q), rotate(k)
    attended = attend(q, k, v, scale=sizes.head_dim**-0.5)
    attended = checkpoint_name(attended, kept + "context").reshape(rows, seq, -1)
    x = x + place(linear("o", attended), "output")
    h = place(norm(x, weights["norm_2"], centered=centered), "input")
    if sizes.gated:
        h = jax.nn.silu(linear("gate", h)) * linear("up", h)
    else:
        h = jax.nn.gelu(linear("up", h), approximate=False)
    return x + place(linear("down", h), "output"), None


def loss(sizes, float8, of_logits, params, tokens):
    """Mean loss; rows that `cp` splits come as inputs and labels of each rank."""
    if isinstance(tokens, dict):
        inputs, labels, attend = tokens["inputs"], tokens["labels"], ring
    else:
        inputs, labels, attend = tokens[:, :-1], tokens[:, 1:], attention
    place = fsdp.ops.sequence_parallel
    x = place(params["embed"][inputs], "embeddings")
    if not sizes.gated:
        x = x + params["positions"][None]
    run = functools.partial(block, sizes, float8, attend)
    x, _ = fsdp.scan(run, params["layers"], x, prefetch=1, unroll=2)
    if "kept" in params:
        run = functools.partial(run, kept="kept.")
        x, _ = fsdp.scan(run, params["kept"], x, prefetch=1, unroll=2)
    x = place(norm(x, params["norm"], centered=not sizes.gated), "input")
    head = params["embed"].T if sizes.tied else params["head"]
    return of_logits(place(x @ head, "logits"), labels)
