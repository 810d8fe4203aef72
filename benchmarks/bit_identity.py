"""Whether two commits train the same bits, with the same collectives.

    python benchmarks/bit_identity.py record before.json     # in one checkout
    python benchmarks/bit_identity.py record after.json      # in the other
    python benchmarks/bit_identity.py compare before.json after.json

Each case trains five steps on 8 simulated devices, and records the losses, a digest of
every leaf of the final state, and the collectives of the compiled program. A change of
structure leaves all of them equal.

`record` goes on where the file ends. It uses public names alone, so that it runs
unchanged on any commit since these have their names.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import functools
import hashlib
import json
import os
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import bridge
import fsdp_jax as fsdp
from bridge.models import (
    Decoder,
    DecoderLayer,
    dot_product_attention,
    expert_parallel_rules,
    positions_in_order,
    tensor_parallel_rules,
)
from fsdp_jax import ops

STEPS, ROWS, WIDTH, LAYERS, SEQ, VOCAB = 5, 16, 24, 4, 16, 64
TX = optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(1e-2))
STACK = fsdp.Stacked("layers")
COLLECTIVE = re.compile(
    r" = (.*?) ((?:all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute)"
    r"(?:-start)?)\(.*?(?:replica_groups|source_target_pairs)=(\S+?),? "
)
Batch = Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Case:
    """One way to train.

    Attributes:
      make_model: Model function of the plan.
      loss: Loss function.
      mesh: Sizes of mesh axes.
      units: Units of the model.
      config: Options of the plan.
      batch: Batch of every step.
      tx: Optimizer.
      num_microbatches: Microbatches per step.
    """

    make_model: Callable[..., Any]
    loss: Callable[..., Any]
    mesh: Mapping[str, Any]
    units: tuple[Any, ...]
    config: fsdp.FSDPConfig
    batch: Batch
    tx: optax.GradientTransformation = TX
    num_microbatches: int = 1


# A stack of layers as plain arrays, with odd sizes that need padding


def make_weights(key: jax.Array) -> dict[str, Any]:
    """Weights of a residual MLP; the bias and `odd` divide into no 8 parts."""
    up, down, odd = jax.random.split(key, 3)
    normal = jax.random.normal
    return {
        "layers": {
            "up": 0.3 * normal(up, (LAYERS, WIDTH, 32)),
            "down": 0.3 * normal(down, (LAYERS, 32, WIDTH)),
            "odd": 0.3 * normal(odd, (LAYERS, 13, 17)),
            "bias": jnp.zeros((LAYERS, 7)),
        },
        "head": 0.3 * normal(key, (WIDTH, 5)),
    }


def layer(w: Any, x: jax.Array) -> tuple[jax.Array, None]:
    """Runs one layer on `[rows, WIDTH]`."""
    x = x + jnp.tanh(x @ w["up"]) @ w["down"]
    y = x[:, :13] @ w["odd"]
    return x.at[:, :13].add(y[:, :13]).at[:, :7].add(w["bias"][None]), None


def squared_error(
    weights: Any, batch: Batch, scan: Any = fsdp.scan, key: Any = None, rng: Any = None
) -> jax.Array:
    """Squared error of the model; with noise where the step gives a key.

    Args:
      weights: Weights of the model.
      batch: Inputs and targets.
      scan: Runs the layers.
      key: PRNG key.
      rng: PRNG key on commits that call it so.
    """
    x, key = batch["x"], rng if key is None else key
    if key is not None:
        x = x * jax.random.bernoulli(key, 0.9, x.shape).astype(x.dtype)
    x, _ = scan(layer, weights["layers"], x)
    return ((x @ weights["head"] - batch["y"]) ** 2).mean()


def plain_loss(weights: Any, batch: Batch, scan: Any = fsdp.scan) -> jax.Array:
    """`squared_error` without an argument for keys."""
    return squared_error(weights, batch, scan)


def rows() -> Batch:
    """A batch of the MLP."""
    random = np.random.default_rng(0)
    x = random.normal(size=(ROWS, WIDTH)).astype(np.float32)
    return {"x": x, "y": random.normal(size=(ROWS, 5)).astype(np.float32)}


def mlp(
    mesh: Mapping[str, int],
    loss: Any = plain_loss,
    microbatches: int = 2,
    **config: Any,
) -> Case:
    """Returns a case of the MLP with options of its plan."""
    options = fsdp.FSDPConfig(**config)
    return Case(
        make_weights,
        loss,
        mesh,
        (STACK,),
        options,
        rows(),
        num_microbatches=microbatches,
    )


# Decoders, for the axes that split a layer


FIELDS = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
}
LLAMA = FIELDS | {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
MIXTRAL = FIELDS | {
    "architectures": ["MixtralForCausalLM"],
    "model_type": "mixtral",
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
}


def next_token(model: Any, batch: Batch) -> jax.Array:
    """Mean cross entropy over the targets."""
    logits = model(batch["tokens"])
    return ops.vocab_parallel_cross_entropy(logits, batch["targets"]).mean()


def decoder(
    fields: Mapping[str, Any],
    mesh: Mapping[str, int],
    attention: Any = dot_product_attention,
    microbatches: int = 1,
    **config: Any,
) -> Case:
    """Returns a case of a decoder whose layers the mesh splits."""
    shape = bridge.from_hf_config(dict(fields))
    over_cp = mesh.get("cp", 1) > 1

    def make(key: jax.Array) -> Decoder:
        return Decoder(
            shape,
            rngs=nnx.Rngs(key),
            scan=fsdp.scan,
            dispatch=ops.expert_parallel_dispatch,
            constrain=ops.sequence_parallel,
            attention=ops.split_heads(attention),
            positions=ops.zigzag_positions if over_cp else positions_in_order,
        )

    options = fsdp.FSDPConfig(
        tensor_parallel=tensor_parallel_rules(shape, mesh.get("tp", 1)),
        expert_parallel=expert_parallel_rules(shape),
        context_parallel={"*": 1} if over_cp else {},
        **config,
    )
    batch = texts()
    batch = ops.zigzag(batch, mesh["cp"]) if over_cp else batch
    return Case(
        make,
        next_token,
        mesh,
        (DecoderLayer,),
        options,
        batch,
        num_microbatches=microbatches,
    )


def texts() -> Batch:
    """A batch of the decoders."""
    tokens = np.random.default_rng(0).integers(0, VOCAB, (ROWS, SEQ + 1))
    tokens = tokens.astype(np.int32)
    return {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}


# Cases


BF16 = fsdp.MixedPrecisionPolicy(param_dtype=jnp.bfloat16)
NARROW = fsdp.MixedPrecisionPolicy(
    param_dtype=jnp.bfloat16,
    grad_comm_dtype=jnp.bfloat16,
    reduce_scatter_with_fp32_accumulation=True,
)
ROUNDED = fsdp.MixedPrecisionPolicy(
    param_dtype=jnp.bfloat16,
    main_params_dtype=jnp.bfloat16,
    stochastic_rounding=True,
)
FLOAT8 = fsdp.MixedPrecisionPolicy(
    param_dtype=jnp.bfloat16, param_gather=fsdp.sharding.Float8Gather(min_elements=256)
)
EIGHT_BIT = fsdp.optim.eight_bit(optax.adam(1e-2), min_elements=256)
LORA = fsdp.LoRAConfig(4, targets=["layers.up", "layers.down"])
UNROLLED = functools.partial(plain_loss, scan=functools.partial(fsdp.scan, prefetch=0))


def _with(case: Case, **changes: Any) -> Case:
    return dataclasses.replace(case, **changes)


CASES: dict[str, Callable[[], Case]] = {
    "ddp": lambda: mlp({}, zero_dp_strategy=0),
    "zero-1": lambda: mlp({}, zero_dp_strategy=1),
    "zero-2": lambda: mlp({}, zero_dp_strategy=2),
    "zero-3": lambda: mlp({}),
    "zero-3, no prefetch": lambda: mlp({}, UNROLLED, prefetch=0),
    "zero-3, kept": lambda: mlp({}, reshard_after_forward=False),
    "zero-3, one microbatch": lambda: mlp({}, microbatches=1),
    "hsdp": lambda: mlp({"dp_outer": 2}),
    "hsdp, after the loop": lambda: mlp({"dp_outer": 2}, overlap_outer=False),
    "hfsdp": lambda: mlp({"dp_outer": 2}, outer_dp_sharding_strategy=1),
    "noise": lambda: mlp({}, squared_error),
    "bfloat16": lambda: mlp({}, mp_policy=BF16),
    "wide sums": lambda: mlp({}, mp_policy=NARROW),
    "stochastic rounding": lambda: mlp({}, mp_policy=ROUNDED),
    "float8 gather": lambda: mlp({}, mp_policy=FLOAT8, microbatches=1),
    "lora": lambda: mlp({}, lora=LORA),
    "qlora": lambda: mlp({}, lora=dataclasses.replace(LORA, base="nf4")),
    "8-bit adam": lambda: _with(mlp({}), tx=EIGHT_BIT),
    "1f1b": lambda: mlp({"pp": 2}, microbatches=4),
    "interleaved": lambda: mlp(
        {"pp": 2}, microbatches=4, pipeline=fsdp.PipelineConfig(virtual_stages=2)
    ),
    "tp": lambda: decoder(LLAMA, {"tp": 2}),
    "pp x tp": lambda: decoder(LLAMA, {"pp": 2, "tp": 2}, microbatches=2),
    "ep": lambda: decoder(MIXTRAL, {"ep": 4}),
    "cp ring": lambda: decoder(LLAMA, {"cp": 2}, ops.ring_attention),
    "cp all-gather, tp": lambda: decoder(
        LLAMA, {"cp": 2, "tp": 2}, ops.all_gather_attention
    ),
    "cp ulysses, ep": lambda: decoder(
        MIXTRAL, {"cp": 2, "ep": 2}, ops.ulysses_attention(dot_product_attention)
    ),
}


def record(case: Case) -> dict[str, Any]:
    """Trains a case, and returns what has to stay equal."""
    mesh = fsdp.make_mesh(**case.mesh)
    plan = fsdp.fully_shard(case.make_model, mesh, list(case.units), case.config)
    step = fsdp.make_train_step(
        plan,
        case.loss,
        case.tx,
        num_microbatches=case.num_microbatches,
    )
    state = fsdp.init_state(plan, case.tx, fsdp.init_params(plan, jax.random.key(0)))
    specs = plan.batch_specs(dict(case.batch))
    shardings = jax.tree.map(lambda spec: jax.NamedSharding(mesh, spec), specs)
    batch = jax.device_put(dict(case.batch), shardings)
    compiled = step.lower(state, batch).compile()
    losses = []
    for _ in range(STEPS):
        state, metrics = compiled(state, batch)
        losses.append(float(metrics["loss"]).hex())
    return {
        "losses": losses,
        "state": _digests((state.params, state.opt_state)),
        "collectives": _collectives(compiled.as_text() or ""),
    }


def _digests(tree: Any) -> dict[str, str]:
    """Returns a digest of the bytes of each leaf, by its path."""
    return {
        jax.tree_util.keystr(path, simple=True, separator="."): _digest(leaf)
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }


def _digest(leaf: jax.Array) -> str:
    return hashlib.sha256(np.asarray(jax.device_get(leaf)).tobytes()).hexdigest()[:16]


def _collectives(hlo: str) -> dict[str, int]:
    """Counts the collectives by opcode, shapes and replica groups."""
    found = collections.Counter(
        f"{op} {re.sub(r'{[^}]*}', '', shape)} {groups}"
        for shape, op, groups in COLLECTIVE.findall(hlo)
    )
    return dict(sorted(found.items()))


def differences(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """Lists what differs between two records, a line each."""
    found = [
        f"{name}: in one record only" for name in sorted(one.keys() ^ other.keys())
    ]
    for name in sorted(one.keys() & other.keys()):
        for part in ("losses", "state", "collectives"):
            if one[name][part] != other[name][part]:
                found.append(f"{name}: {part} differ: {_first(part, one, other, name)}")
    return found


def _first(part: str, one: Any, other: Any, name: str) -> str:
    """Returns an example of what differs in a part."""
    a, b = one[name][part], other[name][part]
    if isinstance(a, list):
        return f"{a} and {b}"
    leaf = next(k for k in sorted(a.keys() | b.keys()) if a.get(k) != b.get(k))
    return f"{leaf}: {a.get(leaf)} and {b.get(leaf)}"


def main() -> None:
    """Records or compares."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    recording = commands.add_parser("record", help="train all cases")
    recording.add_argument("out", type=Path)
    recording.add_argument("--only", nargs="*", choices=CASES, help="cases to train")
    comparing = commands.add_parser("compare", help="compare two records")
    comparing.add_argument("records", type=Path, nargs=2)
    args = parser.parse_args()
    if args.command == "compare":
        one, other = (json.loads(path.read_text()) for path in args.records)
        found = differences(one, other)
        print("\n".join(found) or f"{len(one)} cases: equal to the bit.")
        sys.exit(bool(found))
    known = json.loads(args.out.read_text()) if args.out.is_file() else {}
    for name in args.only or CASES:
        if name not in known:
            known[name] = record(CASES[name]())
            args.out.write_text(json.dumps(known, indent=1) + "\n")
            print(f"{name}: {known[name]['losses'][-1]}", flush=True)


if __name__ == "__main__":
    main()
