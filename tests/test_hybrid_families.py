"""Families with layers of several kinds train over tp, ep and pp as on one device."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from helpers.compare import host, worst
from helpers.errors import facts
from jax.sharding import PartitionSpec
from tiny_configs import VARIANTS, hf_fields

import bridge
import fsdp_jax as fsdp
from bridge.models import (
    Decoder,
    DecoderConfig,
    DecoderLayer,
    SharedBlock,
    correction_bias_paths,
    dot_product_attention,
    expert_parallel_rules,
    tensor_parallel_rules,
    token_expert_paths,
)
from fsdp_jax import ops

# ||a - b|| / ||b|| of each parameter in float64, but for the float32 softmax of jax's
# attention.
CLOSE = 1e-5
# The same sums in float64, in another order for the gradients of parameters.
EXACT = 1e-9
TX = optax.sgd(0.1)
ROWS, SEQ = 4, 12


@dataclasses.dataclass(frozen=True)
class Case:
    """A tiny config, how two devices share it, and what it has besides."""

    variant: str
    mesh: dict[str, Any]
    fields: dict[str, Any] = dataclasses.field(default_factory=dict)
    stack: str | None = None
    prefetch: int = 1


# Two periods of two layers, one for each stage.
ALTERNATING = {"num_hidden_layers": 4, "layer_types": ["conv", "full_attention"] * 2}
EVEN = {"vocab_size": 132}
CASES = {
    "short convolutions over pp": Case("lfm2", {"pp": 2}, ALTERNATING, "layers"),
    "short convolutions over tp": Case("lfm2", {"tp": 2}, ALTERNATING | EVEN),
    "delta nets over tp": Case("qwen3_next", {"tp": 2}, EVEN, prefetch=0),
    "delta nets over ep": Case("qwen3_next", {"ep": 2}),
    "Mamba over tp": Case("granitemoehybrid-dense", {"tp": 2}, EVEN),
    "Mamba over dp": Case("granitemoehybrid", {"dp_shard": 2}),
    "attention beside Mamba over tp": Case("falcon_h1", {"tp": 2}, EVEN),
    "attention beside Mamba over pp": Case("falcon_h1", {"pp": 2}, stack="layers"),
    "Mamba alone over pp": Case("mamba2", {"pp": 2}, stack="layers"),
    "Mamba 1 over tp": Case("jamba-dense", {"tp": 2}, EVEN),
    "Mamba 1 beside experts over ep": Case("jamba", {"ep": 2}),
    "Mamba 1 over pp": Case("mamba", {"pp": 2}, stack="layers"),
    "keys of earlier layers over tp": Case(
        "gemma4-small", {"tp": 2}, EVEN | {"vocab_size_per_layer_input": 132}
    ),
    "keys of earlier layers over dp": Case("gemma4-small", {"dp_shard": 2}),
    "streams over tp": Case("gemma3n", {"tp": 2}, EVEN),
    "latent experts over ep": Case("nemotron_h", {"ep": 2}),
    "entries of several tokens over tp": Case("deepseek_v4", {"tp": 2}, EVEN),
    "experts of tokens over ep": Case("deepseek_v4", {"ep": 2}),
    "independent streams over tp": Case("hy_v4", {"tp": 2}, EVEN),
    "gated norms over tp": Case("axk2", {"tp": 2}, EVEN),
    "independent streams over ep": Case("hy_v4", {"ep": 2}),
    "entries and experts of tokens over pp": Case(
        "deepseek_v4",
        {"pp": 2},
        {
            "layer_types": [
                "compressed_sparse_attention",
                "heavily_compressed_attention",
            ]
            * 2,
            "mlp_layer_types": ["hash_moe"] * 4,
        },
        "layers",
    ),
    "experts beside a dense branch over ep": Case(
        "longcat_flash", {"ep": 2}, {"zero_expert_num": 4}
    ),
    "experts beside a dense branch over tp": Case("longcat_flash", {"tp": 2}, EVEN),
    "experts beside a dense branch over pp": Case(
        "longcat_flash", {"pp": 2}, stack="layers"
    ),
    "lightning attention over tp": Case("minimax", {"tp": 2}, EVEN),
    "lightning attention over pp": Case("minimax", {"pp": 2}, stack="layers"),
    "decays of each dim over tp": Case("kimi_linear", {"tp": 2}, EVEN),
    "heads by type of layer over tp": Case("mimo_v2_flash", {"tp": 2}, EVEN),
    "gated recurrences over tp": Case("recurrent_gemma", {"tp": 2}, EVEN),
    "gated recurrences over pp": Case(
        "recurrent_gemma",
        {"pp": 2},
        {"block_types": ["recurrent", "attention"]},
        stack="layers",
    ),
    "heads that subtract over tp": Case("diffllama", {"tp": 2}, EVEN),
    "heads that subtract over pp": Case(
        "diffllama", {"pp": 2}, {"num_hidden_layers": 4}, "layers"
    ),
    "biases of keys over tp": Case("doge", {"tp": 2}, EVEN),
    "gated latents beside bounded decays over tp": Case(
        "bailing_hybrid", {"tp": 2}, EVEN
    ),
    "query heads by type of layer over tp": Case("laguna", {"tp": 2}, EVEN),
    "norms inside over tp": Case("bitnet", {"tp": 2}, EVEN),
    "a tied head with a bias over tp": Case("modernbert", {"tp": 2}, EVEN),
    "biased norms of heads over tp": Case("persimmon", {"tp": 2}, EVEN),
    "sines over pp": Case("xglm", {"pp": 2}, stack="layers"),
    "experts beside shared ones over ep": Case("aria", {"ep": 2}),
    "experts beside shared ones over tp": Case("aria", {"tp": 2}, EVEN),
    "norms by kind of layer over tp": Case("olmo_hybrid", {"tp": 2}, EVEN),
    "experts behind dense layers over ep": Case("cohere2_moe", {"ep": 2}),
    "shared blocks over tp": Case("zamba2", {"tp": 2}, EVEN),
    "shared blocks over dp": Case("zamba2-small", {"dp_shard": 2}),
    "shared blocks over pp": Case(
        "zamba2-small", {"pp": 2}, {"layers_block_type": ["hybrid"] * 4}, "layers"
    ),
    "heads of Mamba 1 over tp": Case("zamba", {"tp": 2}, EVEN),
    "heads of Mamba 1 over dp": Case("zamba-biased", {"dp_shard": 2}),
    "experts of attention over tp": Case("jetmoe", {"tp": 2}, EVEN),
    "experts of attention over ep": Case("jetmoe", {"ep": 2}),
    "norms of sums over tp": Case("openai-gpt", {"tp": 2}, EVEN),
    # Whose layers all read one constant, whether heads turn.
    "norms of turned heads over pp": Case("nanochat", {"pp": 2}, stack="layers"),
}


def make(config: DecoderConfig, prefetch: int, key) -> Decoder:
    return Decoder(
        config,
        rngs=nnx.Rngs(key),
        param_dtype=jnp.float64,
        scan=functools.partial(fsdp.scan, prefetch=prefetch),
        attention=ops.split_heads(dot_product_attention),
        dispatch=ops.expert_parallel_dispatch,
        constrain=ops.sequence_parallel,
    )


def loss(model: Decoder, tokens):
    logits = model(tokens[:, :-1])
    return ops.vocab_parallel_cross_entropy(logits, tokens[:, 1:]).mean()


def plan_of(config: DecoderConfig, case: Case, mesh: Any) -> fsdp.Plan:
    return fsdp.fully_shard(
        functools.partial(make, config, case.prefetch),
        mesh,
        [DecoderLayer, *([SharedBlock] * (config.shared_blocks is not None))],
        fsdp.FSDPConfig(
            frozen=correction_bias_paths(config) + token_expert_paths(config),
            tensor_parallel=tensor_parallel_rules(config, mesh.shape["tp"]),
            expert_parallel=expert_parallel_rules(config),
            pipeline=fsdp.PipelineConfig(stack=case.stack),
        ),
    )


def random_like(like: Any) -> Any:
    leaves, structure = jax.tree.flatten_with_path(like)
    keys = jax.random.split(jax.random.key(1), len(leaves))
    values = [
        jax.device_put(random_weight(path, key, leaf), leaf.sharding)
        for key, (path, leaf) in zip(keys, leaves, strict=True)
    ]
    return jax.tree.unflatten(structure, values)


def random_weight(path: Any, key: jax.Array, like: Any) -> jax.Array:
    if "token_experts" in jax.tree_util.keystr(path):  # one of the first experts
        return jax.random.randint(key, like.shape, 0, 4).astype(like.dtype)
    return 0.2 * jax.random.normal(key, like.shape, like.dtype) + 0.1


def trained(config: DecoderConfig, case: Case, mesh):
    plan = plan_of(config, case, mesh)
    state = fsdp.init_state(plan, TX, random_like(plan.params))
    step = fsdp.make_train_step(plan, loss, TX, num_microbatches=2)
    tokens = np.random.default_rng(0).integers(0, 128, (ROWS, SEQ + 1))
    state, metrics = step(state, jnp.asarray(tokens))
    return host(fsdp.sharding.unpack(state.params)), float(metrics["loss"])


@pytest.mark.long
@pytest.mark.parametrize("name", CASES)
def test_a_step_of_two_devices_is_that_of_one(name):
    case = CASES[name]
    with jax.enable_x64(True):
        config = bridge.from_hf_config(hf_fields(case.variant, **case.fields))
        mesh = fsdp.make_mesh(**case.mesh, devices=jax.devices()[:2])
        got, got_loss = trained(config, case, mesh)
        alone = fsdp.make_mesh(devices=jax.devices()[:1])
        want, want_loss = trained(config, case, alone)
    assert worst(got, want) < CLOSE
    assert abs(got_loss - want_loss) < CLOSE


@pytest.mark.parametrize(
    "variant, mixer",
    [
        ("qwen3_next", "delta_net"),
        ("granitemoehybrid", "mamba"),
        ("jamba-dense", "mamba1"),
        ("zamba", "mamba1"),
        ("recurrent_gemma", "rg_lru"),
        ("lfm2", "short_conv"),
    ],
)
def test_a_mixer_over_cp_has_the_outputs_and_gradients_of_whole_rows(variant, mixer):
    with jax.enable_x64(True):
        config = bridge.from_hf_config(hf_fields(variant))
        kind = next(kind for kind in config.layer_kinds if kind.mixer == mixer)
        rngs = nnx.Rngs(0)
        layer = DecoderLayer(config, kind=kind, rngs=rngs, param_dtype=jnp.float64)
        graph, params = nnx.split(getattr(layer, mixer))
        random = np.random.default_rng(0)
        x, scale = random.normal(size=(2, 2, 16, config.hidden_size))
        ends = np.array([[5], [11]])  # Texts that end within chunks of two ranks.
        segments = (np.arange(16) >= ends).astype(np.int32)

        def mixed(params, x, segments):
            mix = nnx.merge(graph, params)
            return ops.all_gather_recurrence(mix, x, segments)

        auto = (jax.sharding.AxisType.Auto,)
        mesh = jax.make_mesh((4,), ("cp",), auto, devices=jax.devices()[:4])
        split = PartitionSpec(None, "cp")
        over_cp = jax.shard_map(
            mixed,
            mesh=mesh,
            in_specs=(PartitionSpec(), split, split),
            out_specs=split,
            check_vma=False,
        )

        def split_loss(params, x):
            parts = ops.zigzag({"x": x, "segments": segments}, 4)
            out = ops.inverse_zigzag(over_cp(params, parts["x"], parts["segments"]), 4)
            return (out * scale).sum(), out

        def whole_loss(params, x):
            out = mixed(params, x, segments)
            return (out * scale).sum(), out

        def found(loss):
            grad = jax.jit(jax.grad(loss, (0, 1), has_aux=True))
            return jax.tree.leaves(jax.device_get(grad(params, x)))

        for got, want in zip(found(split_loss), found(whole_loss), strict=True):
            np.testing.assert_allclose(got, want, rtol=EXACT, atol=EXACT)


@pytest.mark.parametrize(
    "variant, ranks, sizes",
    [
        ("lfm2", 5, ["hidden_size 48"]),
        ("qwen3_next", 4, ["num_key_heads 2"]),
        ("granitemoehybrid", 3, ["mamba.num_heads 4"]),
        ("mamba", 5, ["mamba1.num_channels 96"]),
        ("zamba", 4, ["mamba1.num_heads 2"]),
        ("recurrent_gemma", 3, ["rg_lru.num_heads 4"]),
    ],
)
def test_heads_that_ranks_do_not_divide_are_refused_by_name(variant, ranks, sizes):
    config = bridge.from_hf_config(hf_fields(variant))
    with pytest.raises(ValueError, match=facts(f"{ranks} ranks", *sizes)):
        tensor_parallel_rules(config, ranks)


HYBRIDS = [
    *("lfm2", "qwen3_next", "granitemoehybrid", "falcon_h1", "mamba2", "mamba"),
    *("jamba", "minimax", "recurrent_gemma", "zamba"),
]


@pytest.mark.parametrize("variant", HYBRIDS)
def test_of_a_mixer_ranks_share_all_matrices_but_what_heads_share(variant):
    config = bridge.from_hf_config(hf_fields(variant))
    rules = tensor_parallel_rules(config, 2)
    model = nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0)))
    paths = [
        ".".join(map(str, path)) for path, _ in nnx.to_flat_state(nnx.state(model))
    ]
    of_mixers = [p for p in paths if any(f".{m}." in p for m in MIXERS)]
    whole = {p for p in of_mixers if p not in rules}
    assert of_mixers
    shared = ("norm", ".b_", ".c_", "o_proj.bias")
    assert all(any(part in p for part in shared) for p in whole)


MIXERS = {
    kind.mixer
    for name in VARIANTS
    for kind in bridge.from_hf_config(hf_fields(name)).layer_kinds
} - {"attention", "attention_mamba", None}
