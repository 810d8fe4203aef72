"""Stand-ins for the models of published runs: the same products, as an FSDP step.

A decoder whose linear layers are in bfloat16, or in 8-bit floats with scales of the
current tensors, and whose activations are saved by name. It is compiled for the GPUs of
a published run, never run.
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

import fsdp_jax as fsdp
from bridge.models import dot_product_attention
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
      gated: Whether the MLP is gated (SwiGLU, RMSNorm, rotary embedding, a head of its
        own, as in Llama) or not (GELU, LayerNorm, learned positions, a tied head, as in
        MPT).
    """

    width: int
    layers: int
    heads: int
    kv_heads: int
    mlp: int
    vocab: int
    gated: bool = True

    @property
    def head_dim(self) -> int:
        """Width of a head."""
        return self.width // self.heads


def _mpt(width: int, layers: int, heads: int) -> Sizes:
    return Sizes(width, layers, heads, heads, 4 * width, 50432, gated=False)


# Llama: config.json of the models; MPT: llm-foundry scripts/train/yamls/pretrain.
SIZES = {
    "llama2-7b": Sizes(4096, 32, 32, 32, 11008, 32000),
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
SAVED = {
    "full": (),
    # MaxText, layers/decoders.py: remat policies by the names of projections.
    "save_qkv_proj": ("q", "k", "v"),
    "save_dot_with_context_except_mlp": ("q", "k", "v", "context", "o"),
    "minimal_flash": (*PRODUCTS, "context"),
    # torchtitan, models/llama/parallelize_llama.py: attention and every other product.
    "selective (op)": ("q", "v", "gate", "down", "context"),
}
"""Names of what is kept for backward; "none" recomputes nothing."""


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
      remat: Key of `SAVED`, or "none".
      float8: Scales of the layers' products in 8-bit floats: "current", of the tensors
        at hand, or "delayed", of earlier steps; "" for products in bfloat16.
      grads: Dtype in which gradients are communicated.
      tp: Ranks of tensor parallelism, with tokens split between the products.
      loss: "fused" by XLA, or "eager": PyTorch's cross entropy without a compiler, each
        of whose operations leaves its result in memory.
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

    @property
    def name(self) -> str:
        """Name of the file of its schedule."""
        remat = self.remat.replace(" ", "_").replace("(", "").replace(")", "")
        numbers = f"{self.gpus}x{self.rows}x{self.seq}_outer{self.outer}"
        form = f"fp8_{self.float8}" if self.float8 else "bf16"
        rest = f"micro{self.microbatches}_zero{self.zero}_{remat}_{form}_{self.grads}"
        tp = f"_tp{self.tp}" if self.tp > 1 else ""
        loss = "_eager_loss" if self.loss == "eager" else ""
        return f"{self.model}_{self.gpu}_{numbers}_{rest}{tp}{loss}"

    def lower(self):
        """Returns the plan and the lowered step."""
        sizes = SIZES[self.model]
        policy = jax.checkpoint_policies.save_only_these_names(
            *SAVED.get(self.remat, ())
        )
        config = fsdp.FSDPConfig(
            zero_dp_strategy=self.zero,
            mp_policy=fsdp.MixedPrecisionPolicy(
                param_dtype=jnp.bfloat16, grad_comm_dtype=jnp.dtype(self.grads)
            ),
            remat_policy=None if self.remat == "none" else policy,
            tensor_parallel=COLUMNS | ROWS if self.tp > 1 else {},
        )
        devices = gpu_devices(GPUS[self.gpu], self.gpus)
        mesh = fsdp.make_mesh(dp_outer=self.outer, tp=self.tp, devices=devices)
        plan = fsdp.fully_shard(
            functools.partial(make_params, sizes, self.seq),
            mesh,
            [fsdp.Stacked("layers")],
            config,
        )
        step = fsdp.make_train_step(
            plan,
            functools.partial(loss, sizes, self.float8, LOSSES[self.loss]),
            TX,
            num_microbatches=self.microbatches,
        )
        rows = self.rows * (self.gpus // self.tp) * self.microbatches
        tokens = jax.ShapeDtypeStruct(
            (rows, self.seq + 1), jnp.int32, sharding=plan.batch_sharding
        )
        return plan, step.lower(fsdp.abstract_state(plan, TX), tokens)


attention = fsdp.ops.split_heads(dot_product_attention)


def make_params(sizes, seq, key):
    """Weights, those of layers stacked."""
    del key

    def weights(*shape):
        return jnp.zeros(shape, jnp.float32)

    width, layers, mlp = sizes.width, sizes.layers, sizes.mlp
    heads, kv_heads = (n * sizes.head_dim for n in (sizes.heads, sizes.kv_heads))
    stack = {
        "q": weights(layers, width, heads),
        "k": weights(layers, width, kv_heads),
        "v": weights(layers, width, kv_heads),
        "o": weights(layers, heads, width),
        "up": weights(layers, width, mlp),
        "down": weights(layers, mlp, width),
        "norm_1": weights(layers, width),
        "norm_2": weights(layers, width),
    }
    params = {"embed": weights(sizes.vocab, width), "norm": weights(width)}
    if sizes.gated:
        stack["gate"] = weights(layers, width, mlp)
        params["head"] = weights(width, sizes.vocab)
    else:
        params["positions"] = weights(seq, width)
    return params | {"layers": stack}


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


def to_float8(scaling, x, dtype):
    """Values in 8-bit floats, and what to multiply them by.

    Delayed scales are known before: finding the next ones is part of the kernel that
    casts, and moves no more bytes, so that a constant stands for them.
    """
    scale = jnp.float32(1)
    if scaling == "current":
        most = float(jnp.finfo(dtype).max)
        scale = jnp.max(jnp.abs(x)).astype(jnp.float32) / most + 1e-9
    return (x.astype(jnp.float32) / scale).astype(dtype), scale


def product8(a, b, dims):
    (a, scale_a), (b, scale_b) = a, b
    found = lax.dot_general(a, b, (dims, ((), ())), preferred_element_type=jnp.float32)
    return (found * (scale_a * scale_b)).astype(jnp.bfloat16)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def linear8(scaling, x, w):
    """`x @ w` for a matrix `x`, in 8-bit floats."""
    return _forward8(scaling, x, w)[0]


def _forward8(scaling, x, w):
    x8 = to_float8(scaling, x, jnp.float8_e4m3fn)
    w8 = to_float8(scaling, w, jnp.float8_e4m3fn)
    return product8(x8, w8, ((1,), (0,))), (x8, w8)


def _backward8(scaling, saved, g):
    x8, w8 = saved
    g8 = to_float8(scaling, g, jnp.float8_e5m2)
    return product8(g8, w8, ((1,), (1,))), product8(x8, g8, ((0,), (0,)))


linear8.defvjp(_forward8, _backward8)


def block(sizes, float8, weights, x):
    rows, seq, _ = x.shape
    centered = not sizes.gated

    def linear(name, h):
        if float8:
            found = linear8(float8, h.reshape(rows * seq, -1), weights[name])
            return checkpoint_name(found.reshape(rows, seq, -1), name)
        return checkpoint_name(h @ weights[name], name)

    place = fsdp.ops.sequence_parallel
    h = place(norm(x, weights["norm_1"], centered=centered), "input")
    q, k, v = (linear(name, h).reshape(rows, seq, -1, sizes.head_dim) for name in "qkv")
    if sizes.gated:
        q, k = rotate(q), rotate(k)
    attended = attention(q, k, v, scale=sizes.head_dim**-0.5)
    attended = checkpoint_name(attended, "context").reshape(rows, seq, -1)
    x = x + place(linear("o", attended), "output")
    h = place(norm(x, weights["norm_2"], centered=centered), "input")
    if sizes.gated:
        h = jax.nn.silu(linear("gate", h)) * linear("up", h)
    else:
        h = jax.nn.gelu(linear("up", h), approximate=False)
    return x + place(linear("down", h), "output"), None


def cross_entropy(logits, labels):
    """Mean cross entropy, fused as XLA likes."""
    logits = logits.astype(jnp.float32)
    picked = jnp.take_along_axis(logits, labels[..., None], -1)[..., 0]
    return jnp.mean(jax.nn.logsumexp(logits, -1) - picked)


@jax.custom_vjp
def eager_cross_entropy(logits, labels):
    """Mean cross entropy by `torch.nn.functional.cross_entropy(logits.float(), ...)`.

    Without a compiler the copy in float32, the logarithms of probabilities, and the
    gradient of each of both are arrays in memory. The logits and their copy are freed
    before backward; but of the hole that they leave, of one and a half such arrays,
    PyTorch's allocator can give only one of the two gradients, and reserves new memory
    for the other. The half that is wasted is as large as the logits, which are kept
    here in its place: what is published is the memory that was reserved.
    """
    return _eager_forward(logits, labels)[0]


def _eager_forward(logits, labels):
    # Barriers, as XLA would fuse one kernel of all.
    wide = lax.optimization_barrier(logits.astype(jnp.float32))
    log_probs = lax.optimization_barrier(jax.nn.log_softmax(wide))
    picked = jnp.take_along_axis(log_probs, labels[..., None], -1)
    return -jnp.mean(picked), (logits, log_probs, labels)


def _eager_backward(saved, g):
    logits, log_probs, labels = saved
    columns = lax.broadcasted_iota(labels.dtype, log_probs.shape, log_probs.ndim - 1)
    is_label = columns == labels[..., None]
    of_log_probs = jnp.where(is_label, -g / labels.size, 0.0)
    of_log_probs = lax.optimization_barrier(of_log_probs)
    total = jnp.sum(of_log_probs, -1, keepdims=True)
    of_wide = lax.optimization_barrier(of_log_probs - jnp.exp(log_probs) * total)
    of_wide = _beside(of_wide, of_log_probs, log_probs, logits)
    return of_wide.astype(jnp.bfloat16), None


def _beside(made, *arrays):
    """Returns `made`, which XLA cannot write over any of the arrays.

    An element of each is read, at a place that an element of `made` decides.
    """
    start = (0,) * made.ndim
    first = lax.dynamic_slice(made, start, (1,) * made.ndim)
    place = (jnp.int32(first.ravel()[0] > 1), *start[1:])
    read = [lax.dynamic_slice(a, place, first.shape).astype(made.dtype) for a in arrays]
    return lax.dynamic_update_slice(made, first + 0.0 * sum(read), start)


eager_cross_entropy.defvjp(_eager_forward, _eager_backward)

LOSSES = {"fused": cross_entropy, "eager": eager_cross_entropy}


def loss(sizes, float8, of_logits, params, tokens):
    inputs, labels = tokens[:, :-1], tokens[:, 1:]
    place = fsdp.ops.sequence_parallel
    x = place(params["embed"][inputs], "embeddings")
    if not sizes.gated:
        x = x + params["positions"][None]
    run = functools.partial(block, sizes, float8)
    x, _ = fsdp.scan(run, params["layers"], x, prefetch=1, unroll=2)
    x = place(norm(x, params["norm"], centered=not sizes.gated), "input")
    head = params["head"] if sizes.gated else params["embed"].T
    return of_logits(place(x @ head, "logits"), labels)
