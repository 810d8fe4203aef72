"""A small stack of layers with experts, as a tree of arrays."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax

import fsdp_jax as fsdp
from fsdp_jax import ops

LAYERS, EXPERTS, CHOSEN, EMBED, WIDTH = 2, 8, 3, 16, 24
ROWS, SEQ = 16, 6
RULES = {"layers.experts": 0}


def make_weights(key, dtype=None):
    router, up, down, bias, head = jax.random.split(key, 5)
    normal = functools.partial(jax.random.normal, dtype=dtype)
    return {
        "layers": {
            "norm": jnp.ones((LAYERS, EMBED), dtype),
            "router": normal(router, (LAYERS, EMBED, EXPERTS)),
            "experts": {
                "up": 0.3 * normal(up, (LAYERS, EXPERTS, EMBED, WIDTH)),
                # 3 has no dim that devices divide: padded, beside experts that are not.
                "gain": 1 + 0.1 * normal(bias, (LAYERS, EXPERTS, 3)),
                "bias": 0.1 * normal(bias, (LAYERS, EXPERTS, WIDTH)),
                "down": 0.3 * normal(down, (LAYERS, EXPERTS, WIDTH, EMBED)),
            },
        },
        "head": 0.3 * normal(head, (EMBED, EMBED)),
    }


def run_experts(w, rows, group_sizes):
    owner = jnp.repeat(
        jnp.arange(len(group_sizes)), group_sizes, total_repeat_length=len(rows)
    )
    hidden = jax.lax.ragged_dot(rows, w["up"], group_sizes)
    hidden = jnp.tanh(hidden + jnp.take(w["bias"], owner, axis=0))
    gain = jnp.take(w["gain"].sum(-1), owner)[:, None]
    return jax.lax.ragged_dot(hidden * gain, w["down"], group_sizes)


def layer_of(dispatch=ops.expert_parallel_dispatch):
    def layer(w, x):
        tokens = (x * w["norm"][None, None]).reshape(-1, EMBED)
        scores = jax.nn.softmax(tokens @ w["router"])
        weights, experts = jax.lax.top_k(scores, CHOSEN)
        run = functools.partial(run_experts, w["experts"])
        y, dropped = dispatch(run, tokens, experts, weights, EXPERTS)
        return x + y.reshape(x.shape), dropped.sum()

    return layer


def loss_of(dispatch=ops.expert_parallel_dispatch, **options):
    def loss(weights, batch):
        layer = layer_of(dispatch)
        x, dropped = fsdp.scan(layer, weights["layers"], batch["x"], **options)
        error = jnp.mean((x @ weights["head"] - batch["y"]) ** 2)
        return error, {"dropped": dropped.sum()}

    return loss


def batch(dtype: np.typing.DTypeLike = np.float64):
    random = np.random.default_rng(0)
    shape = (ROWS, SEQ, EMBED)
    return {name: random.normal(size=shape).astype(dtype) for name in "xy"}


def plan_of(mesh, **config):
    if mesh.shape["ep"] > 1:
        config.setdefault("expert_parallel", RULES)
    return fsdp.fully_shard(
        make_weights, mesh, [fsdp.Stacked("layers")], fsdp.FSDPConfig(**config)
    )


# By the norm of all gradients, so that one of them wrong makes all steps wrong.
TX = optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(1e-2, eps=1e-3))
