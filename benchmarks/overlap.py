"""How much of a step's communication computation hides: FSDP written in three ways.

    python benchmarks/overlap.py [--gpus 8] [--dump DIR] [--out FILE]
    python benchmarks/overlap.py --decoder llama-3-70b [--dump DIR] [--out FILE]

Llama-3 8B, sequence 4,096, full recompute, compiled for H200s with no GPU, and replayed
on a stated cost model: with annotations alone, with a gather in a plain scan, and with
`fsdp.scan(prefetch=1)`; the same block, loss, optimizer and compiler options. Up to 8
GPUs take one sequence each, in 1 and in 4 microbatches; more take two each, sharded
over all of them, and over the 8 of a node (HSDP). With `--decoder`, a whole model of
`bridge`, on a mesh with `tp`, `ep` or `cp`. JSON goes to stdout.

Needs what `pip install 'fsdp-jax[plan]'` installs.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import optax
import result
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec
from overlap_decoders import DECODERS, measure_decoder
from overlap_figures import temporaries, times

import fsdp_jax as fsdp
from bridge.models import dot_product_attention
from fsdp_jax.planner._compile import compile_scheduled, gpu_devices
from fsdp_jax.planner._gpu import GPUS

WIDTH, MLP, HEADS, KV_HEADS, HEAD_DIM = 4096, 14336, 32, 8, 128
LAYERS, VOCAB, VOCAB_CHUNKS = 32, 128256, 8
SEQ = 4096
TX = optax.adamw(3e-4, weight_decay=0.1)
DATA = ("dp_outer", "dp_shard")
WIRE = jnp.bfloat16
FORMS = ("annotations", "plain_scan", "fsdp_jax")


def make_params(key):
    """Weights of all layers stacked; the head's, by pieces of the vocabulary."""
    del key

    def weights(*shape):
        return jnp.zeros(shape, jnp.float32)

    return {
        "embed": weights(VOCAB, WIDTH),
        "layers": {
            "q": weights(LAYERS, WIDTH, HEADS * HEAD_DIM),
            "k": weights(LAYERS, WIDTH, KV_HEADS * HEAD_DIM),
            "v": weights(LAYERS, WIDTH, KV_HEADS * HEAD_DIM),
            "o": weights(LAYERS, HEADS * HEAD_DIM, WIDTH),
            "gate": weights(LAYERS, WIDTH, MLP),
            "up": weights(LAYERS, WIDTH, MLP),
            "down": weights(LAYERS, MLP, WIDTH),
            "norm_1": weights(LAYERS, WIDTH),
            "norm_2": weights(LAYERS, WIDTH),
        },
        "norm": weights(WIDTH),
        "head": weights(VOCAB_CHUNKS, WIDTH, VOCAB // VOCAB_CHUNKS),
    }


def norm(x, scale):
    y = x.astype(jnp.float32)
    y *= lax.rsqrt(jnp.mean(y * y, -1, keepdims=True) + 1e-5)
    return y.astype(x.dtype) * scale.astype(x.dtype)


def attend(q, k, v):
    return dot_product_attention(q, k, v, scale=HEAD_DIM**-0.5)


def block(w, x, attend=attend):
    rows, seq, _ = x.shape
    h = norm(x, w["norm_1"])
    q, k, v = (
        (h @ w[name]).reshape(rows, seq, -1, HEAD_DIM) for name in ("q", "k", "v")
    )
    attended = attend(q, k, v)
    x = x + attended.reshape(rows, seq, -1) @ w["o"]
    h = norm(x, w["norm_2"])
    x = x + (jax.nn.silu(h @ w["gate"]) * (h @ w["up"])) @ w["down"]
    return x, None


def head(w, chunk, x, labels):
    """Of one piece of the vocabulary: log-sum-exp, and the logits of labels in it."""
    logits = (x @ w).astype(jnp.float32)
    label = labels - chunk * w.shape[-1]
    inside = (label >= 0) & (label < w.shape[-1])
    picked = jnp.take_along_axis(logits, jnp.where(inside, label, 0)[..., None], -1)
    own = jnp.where(inside, picked[..., 0], 0.0)
    return chunk + 1, (jax.nn.logsumexp(logits, -1), own)


def cross_entropy(parts):
    log_sums, own = parts
    return jnp.mean(jax.nn.logsumexp(log_sums, 0) - own.sum(0))


def recomputed(body):
    return jax.checkpoint(body, policy=jax.checkpoint_policies.nothing_saveable)


def annotated(mesh):
    """What JAX users write today: shardings of parameters, batch and residual."""

    def constrain(x, *spec):
        return lax.with_sharding_constraint(
            x, NamedSharding(mesh, PartitionSpec(*spec))
        )

    # A fused kernel is not for the partitioner to split: each rank runs its rows.
    rows = PartitionSpec(DATA)
    attend_locally = jax.shard_map(
        attend, mesh=mesh, in_specs=rows, out_specs=rows, check_vma=False
    )

    def loss(params, tokens):
        x, labels = tokens[:, :-1], tokens[:, 1:]
        embed = params["embed"].astype(WIRE)
        x = constrain(constrain(embed, DATA)[x], DATA)

        @recomputed
        def layer(x, w):
            w = jax.tree.map(lambda leaf: leaf.astype(WIRE), w)
            return constrain(
                block(w, constrain(x, DATA), attend_locally)[0], DATA
            ), None

        x, _ = lax.scan(layer, x, params["layers"])
        x = constrain(norm(x, params["norm"]), DATA)

        @recomputed
        def piece(chunk, w):
            return head(w.astype(WIRE), chunk, x, labels)

        _, parts = lax.scan(piece, 0, params["head"])
        return cross_entropy(parts)

    return jax.value_and_grad(loss)


def plain(mesh, specs):
    """Gathers in the body of a plain scan, within shard_map."""
    num_ranks = mesh.size
    data = tuple(axis for axis in DATA if mesh.shape[axis] > 1)

    def gather(w, spec, stacked):
        w = w.astype(WIRE)
        if "dp_shard" not in spec:
            return w
        return lax.all_gather(
            w, "dp_shard", axis=spec.index("dp_shard") - stacked, tiled=True
        )

    def loss(params, tokens):
        x, labels = tokens[:, :-1], tokens[:, 1:]
        x = gather(params["embed"], specs["embed"], 0)[x]

        @recomputed
        def layer(x, w):
            own = specs["layers"]
            return block({k: gather(w[k], own[k], 1) for k in w}, x)

        x, _ = lax.scan(layer, x, params["layers"])
        x = norm(x, gather(params["norm"], specs["norm"], 0))

        @recomputed
        def piece(chunk, w):
            return head(gather(w, specs["head"], 1), chunk, x, labels)

        _, parts = lax.scan(piece, 0, params["head"])
        return cross_entropy(parts) / num_ranks

    def finish(grad, spec):
        left = tuple(axis for axis in data if axis not in spec)
        return lax.psum(grad, left) if left else grad

    def local(params, tokens):
        value, grads = jax.value_and_grad(loss)(params, tokens)
        return lax.psum(value, data), jax.tree.map(finish, grads, specs)

    return jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(specs, PartitionSpec(DATA)),
        out_specs=(PartitionSpec(), specs),
        check_vma=False,
    )


def ours(params, tokens):
    """The loss as a user of this library writes it."""
    scan = functools.partial(fsdp.scan, prefetch=1, unroll=2)
    x, labels = tokens[:, :-1], tokens[:, 1:]
    x, _ = scan(block, params["layers"], params["embed"][x])
    x = norm(x, params["norm"])
    _, parts = scan(head, params["head"], jnp.int32(0), consts=(x, labels))
    return cross_entropy(parts)


def microbatched(value_and_grad, num_microbatches, num_ranks):
    """The usual loop: gradients of microbatches summed in a carried buffer."""
    if num_microbatches == 1:
        return value_and_grad

    def fn(params, tokens):
        shape = (num_ranks, num_microbatches, -1, tokens.shape[-1])
        rows = (
            tokens.reshape(shape)
            .swapaxes(0, 1)
            .reshape(num_microbatches, -1, shape[-1])
        )

        def body(carry, batch):
            value, grads = value_and_grad(params, batch)
            return jax.tree.map(jnp.add, carry, (value, grads)), None

        zeros = jax.tree.map(jnp.zeros_like, (jnp.float32(0), params))
        total, _ = lax.scan(body, zeros, rows)
        return jax.tree.map(lambda leaf: leaf / num_microbatches, total)

    return fn


def train_step(value_and_grad):
    def step(state, tokens):
        params, opt_state = state
        loss, grads = value_and_grad(params, tokens)
        updates, opt_state = TX.update(grads, opt_state, params)
        metrics = {"loss": loss, "grad_norm": optax.tree.norm(grads)}
        return (optax.apply_updates(params, updates), opt_state), metrics

    return step


def lower(form, plan, rows, num_microbatches):
    tokens = jax.ShapeDtypeStruct(
        (rows, SEQ + 1), jnp.int32, sharding=plan.batch_sharding
    )
    if form == "fsdp_jax":
        step = fsdp.make_train_step(plan, ours, TX, num_microbatches=num_microbatches)
        return step.lower(fsdp.abstract_state(plan, TX), tokens)
    value_and_grad = {
        "annotations": lambda: annotated(plan.mesh),
        "plain_scan": lambda: plain(plan.mesh, plan.specs),
    }[form]()
    step = train_step(microbatched(value_and_grad, num_microbatches, plan.mesh.size))
    like = fsdp.abstract_state(plan, TX)
    state = (like.params, like.opt_state)
    shardings = jax.tree.map(lambda leaf: leaf.sharding, state)
    jitted = jax.jit(step, donate_argnums=0, out_shardings=(shardings, None))
    return jitted.lower(state, tokens)


COST = GPUS["h200"].cost


def measure(form, plan, rows, num_microbatches, dump):
    """One form, compiled and replayed."""
    gpus = plan.mesh.size
    started = time.perf_counter()
    lowered = lower(form, plan, rows * gpus * num_microbatches, num_microbatches)
    scheduled = compile_scheduled(lowered, COST, gpus, fsdp.training.compiler_options())
    seconds = time.perf_counter() - started
    compiled = scheduled.compiled
    variant = "_hsdp" if plan.mesh.shape["dp_outer"] > 1 else ""
    variant += f"_{num_microbatches}_microbatches" if num_microbatches > 1 else ""
    if dump:
        (dump / f"{form}{variant}_{gpus}.hlo").write_text(compiled.as_text())
    return {
        "form": form + variant,
        "gpus": gpus,
        "sequences_a_gpu": rows,
        "microbatches": num_microbatches,
        **times(scheduled, COST, gpus),
        "temporaries_gb": temporaries(compiled),
        "guided": scheduled.guided,
        "compile_s": round(seconds, 1),
    }


def compare(rows):
    """Ours against the others of the same run."""
    by_form = {row["form"]: row for row in rows}
    compared = {}
    for form, mine in by_form.items():
        variant = form.removeprefix("fsdp_jax")
        if variant == form:
            continue
        compared[form] = {"exposed_of_step": mine["exposed_of_step"]}
        if plain := by_form.get("plain_scan" + variant):
            compared[form] |= {
                "compute_of_plain_scan": ratio(mine, plain, "compute_ms"),
                "temporaries_of_plain_scan": ratio(mine, plain, "temporaries_gb"),
                "faster_than_plain_scan": ratio(plain, mine, "step_ms"),
            }
        if annotations := by_form.get("annotations" + variant):
            faster = ratio(annotations, mine, "step_ms")
            compared[form]["faster_than_annotations"] = faster
    return compared


def ratio(a, b, figure):
    return round(a[figure] / b[figure], 4)


def make_plan(gpus, dp_outer):
    devices = gpu_devices(GPUS["h200"], gpus)
    config = fsdp.FSDPConfig(
        mp_policy=fsdp.MixedPrecisionPolicy(param_dtype=WIRE, grad_comm_dtype=WIRE),
        remat_policy=jax.checkpoint_policies.nothing_saveable,
    )
    return fsdp.fully_shard(
        make_params,
        fsdp.make_mesh(dp_outer=dp_outer, devices=devices),
        [fsdp.Stacked("layers"), fsdp.Stacked("head")],
        config,
    )


def measure_all(gpus, forms, microbatches, dump):
    """Forms of Llama-3 8B: in a node with microbatches, over nodes also as HSDP."""
    in_node = COST.devices_per_node
    several = [(1, number) for number in microbatches]
    runs = several if gpus <= in_node else [(1, 1), (gpus // 8, 1)]
    rows = []
    for dp_outer, num_microbatches in runs:
        plan = make_plan(gpus, dp_outer)
        sequences = 1 if gpus <= in_node else 2
        for form in forms:
            row = measure(form, plan, sequences, num_microbatches, dump)
            print(json.dumps(row), file=sys.stderr, flush=True)
            rows.append(row)
    return rows


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gpus", type=int, default=8)
    parser.add_argument("--forms", nargs="+", choices=FORMS, default=FORMS)
    parser.add_argument("--microbatches", nargs="+", type=int, default=[1, 4])
    parser.add_argument("--decoder", choices=DECODERS)
    parser.add_argument("--dump", type=Path, help="keep each module's text here")
    result.add_arguments(parser)
    args = parser.parse_args()
    packages = ("jax", "jaxlib", "jax-cuda12-plugin", "optax")
    conditions = result.begin(args, packages)
    jax.config.update("jax_platforms", "cpu")  # A GPU at hand is no part of this.
    if args.dump:
        args.dump.mkdir(parents=True, exist_ok=True)
    if args.decoder:
        rows = measure_decoder(args.decoder, TX, args.dump)
        options = rows[0]["compiler_options"]
    else:
        rows = measure_all(args.gpus, args.forms, args.microbatches, args.dump)
        options = fsdp.training.compiler_options()
    report = {
        "cost_model": dataclasses.asdict(COST),
        "compiler_options": options,
        "compared": compare(rows),
        "rows": rows,
    }
    result.write(args, conditions, report)


if __name__ == "__main__":
    main()
