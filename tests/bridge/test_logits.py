"""The imported model is the model: its logits are those of transformers."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from bridge_helpers import (
    abstract_model,
    assert_same_bytes,
    load_model,
    logits_of,
    tensors_of,
)
from flax import nnx
from tiny_configs import VARIANTS
from tiny_models import HFModel, hf_logits, make_model
from transformers import AutoModelForCausalLM

import bridge
from bridge.models import (
    Decoder,
    DecoderConfig,
    DecoderLayer,
    RopeConfig,
    dot_product_attention,
)
from bridge.models._attention_experts import ExpertAttention
from bridge.models._gated_norm import GatedNorm
from bridge.models._latent_attention import LatentAttention
from bridge.models._mamba1 import Mamba1
from bridge.models._mlp import MLP
from bridge.models._shared_attention import SharedAttention
from bridge.models._shared_block import BlockAdapters

pytestmark = [pytest.mark.torch, pytest.mark.each_case]

# The largest difference over the largest logit. Two float32 programs that sum in
# different orders; measured here: below 5e-6 for all variants.
RELATIVE = 2e-5


@dataclasses.dataclass(frozen=True)
class Carried:
    """A model of transformers, what we made of it, and what we wrote of that."""

    hf: HFModel
    model: Decoder
    out: Path


@pytest.fixture(scope="module", params=VARIANTS)
def carried(request, tmp_path_factory) -> Carried:
    path = tmp_path_factory.mktemp(request.param)
    hf = make_model(path / "in", request.param)
    model = load_model(hf.path)
    bridge.save_hf(path / "out", nnx.state(model, nnx.Param), model.config)
    return Carried(hf, model, path / "out")


@pytest.fixture(scope="session")
def llama(tmp_path_factory) -> HFModel:
    return make_model(tmp_path_factory.mktemp("llama"), "llama")


def relative_error(ours, theirs) -> float:
    return float(np.abs(np.asarray(ours) - theirs).max() / np.abs(theirs).max())


def test_logits_equal_those_of_transformers(carried: Carried):
    assert carried.hf.logits.std() >= 1
    ours = logits_of(carried.model, carried.hf.tokens)
    assert relative_error(ours, carried.hf.logits) <= RELATIVE


def test_tensors_come_back_bit_by_bit(carried: Carried):
    theirs = tensors_of(carried.hf.path)
    held = {
        PUBLISHED.get((carried.model.config.model_type, name), name): t
        for name, t in theirs.items()
        if not name.endswith(FOLLOWS)
    }
    assert_same_bytes(tensors_of(carried.out), held)


# Tensors of MiniMax's files that transformers computes anew where there are none.
FOLLOWS = ("slope_rate", "query_decay", "key_decay", "diagonal_decay")


def test_transformers_computes_the_same_from_what_we_write(carried: Carried):
    again = AutoModelForCausalLM.from_pretrained(carried.out).eval()
    np.testing.assert_array_equal(
        hf_logits(again, carried.hf.tokens), carried.hf.logits
    )


def test_configs_come_back_as_they_were(carried: Carried):
    config = carried.model.config
    assert bridge.from_hf_config(bridge.to_hf_config(config)) == config
    # transformers has filled in its defaults on the way, which we take for absent.
    saved = AutoModelForCausalLM.from_pretrained(carried.out).config.to_dict()
    assert bridge.from_hf_config(saved) == config


# Names that transformers writes of norms, which published files name otherwise.
PUBLISHED = {
    (
        "olmo_hybrid",
        "model.layers.2.feedforward_layer_norm.weight",
    ): "model.layers.2.post_attention_layernorm.weight",
}
# transformers names the gates of Hy 4's MLPs as the released files name attention's.
PUBLISHED |= {
    ("hy_v4", f"model.layers.{at}.linear_gate.weight"): (
        f"model.layers.{at}.gate_proj.weight"
    )
    for at in ("0.mlp", *(f"{layer}.mlp.shared_experts" for layer in (1, 2, 3)))
}

# Changes of one field that keep all shapes: each must be seen in the logits.
WRONG: dict[str, tuple[str, dict[str, Any]]] = {
    "theta": ("llama-llama3-rope", {"rope.rope_theta": 10000.0}),
    "llama3 rope": ("llama-llama3-rope", {"rope": RopeConfig(500000.0)}),
    "linear rope": ("llama-linear-rope", {"rope": RopeConfig()}),
    "yarn": ("qwen2-yarn", {"rope.factor": 4.0}),
    "yarn's border": ("gpt_oss", {"rope.truncate": True}),
    "long factors": ("phi3-longrope-long", {"rope.long_factor": (2.5, 3.0, 9.0)}),
    "short factors": ("phi3-longrope-short", {"rope.short_factor": (1.5, 1.1, 1.2)}),
    "partial rope": ("glm4", {"rope.partial_rotary_factor": 0.25}),
    "pairs": ("glm4", {"rope.interleaved": False}),
    "pairs of all dims": ("cohere", {"rope.interleaved": False}),
    "latent pairs": ("deepseek_v3", {"rope.interleaved": False}),
    "latent scale": ("deepseek_v2", {"rope.mscale_all_dim": 0.8}),
    "window": ("mistral", {"sliding_window": 10}),
    "layer types": ("gemma2", {"layer_types": None}),
    "the sliding layers' rope": ("gemma3", {"sliding_rope": None}),
    "turning in all layers": ("smollm3", {"no_rope_layers": ()}),
    "score cap": ("gemma2", {"attn_logit_softcapping": 3.0}),
    "logit cap": ("gemma2", {"final_logit_softcapping": 40.0}),
    "score scale": ("gemma3", {"query_pre_attn_scalar": 16}),
    "norm": ("gemma3", {"norm": "rms_wide"}),
    "layer norm": ("gpt2", {"norm": "rms_wide"}),
    "epsilon": ("deepseek_v2", {"norm_eps": 1e-6}),
    "norm of all heads": ("olmo2", {"norm_eps": 1e-2}),
    "side by side": ("cohere-qk-norm", {"logit_scale": 0.82}),
    "embedding scale": ("gemma2", {"scale_embeddings": False}),
    "embedding multiplier": ("granite", {"embedding_multiplier": 5.0}),
    "residual multiplier": ("granite", {"residual_multiplier": 0.3}),
    "attention multiplier": ("granite", {"attention_multiplier": 0.25}),
    "logits scaling": ("granite", {"logits_scaling": 0.8}),
    "activation": ("gpt2", {"hidden_act": "silu"}),
    "clip": ("olmoe", {"clip_qkv": None}),
    "renormalised": ("mixtral", {"moe.norm_topk_prob": False}),
    "not renormalised": ("qwen2_moe", {"moe.norm_topk_prob": True}),
    "scoring": ("gpt_oss", {"moe.scoring": "softmax"}),
    "limit": ("gpt_oss", {"moe.swiglu_limit": 1.0}),
    "group score": ("deepseek_v3", {"moe.group_scoring": "max"}),
    "groups": ("deepseek_v2-groups", {"moe.topk_group": 4}),
    "scaling": ("deepseek_v2", {"moe.routed_scaling_factor": 1.0}),
    "scale less one": ("gemma", {"norm": "rms_wide"}),
    "layer norm less one": ("nemotron", {"norm": "layer"}),
    "epsilon of a norm without a scale": ("olmo", {"norm_eps": 0.1}),
    "squared": ("arcee", {"hidden_act": "relu"}),
    "rectified": ("opt", {"hidden_act": "gelu"}),
    "two norms side by side": ("gpt_neox", {"norm_placement": "pre"}),
    "a norm in series": ("gpt_neox-in-series", {"norm_placement": "parallel_two"}),
    "a sixth of a head turned": ("stablelm", {"rope.partial_rotary_factor": 0.17}),
    "turned dims": ("gptj", {"rope.partial_rotary_factor": 0.5}),
    "pairs of a part": ("gptj", {"rope.interleaved": False}),
    "pairs of whole heads": ("ernie4_5", {"rope.interleaved": False}),
    "half turned": ("phi", {"rope.partial_rotary_factor": 1.0}),
    "activation without a gate": ("starcoder2", {"hidden_act": "relu"}),
    "full layers that turn": ("cohere2", {"no_rope_layers": ()}),
    "all layers of full ones that do not": ("exaone4-full", {"no_rope_layers": (0, 1)}),
    "the longest text": ("internlm3", {"rope.factor": 2.0}),
    "alpha": ("hunyuan", {"rope.alpha": 10.0}),
    "norms of turned heads": ("hunyuan", {"qk_norm_after_rope": False}),
    "weights of a softmax": ("hunyuan_moe", {"moe.norm_topk_prob": False}),
    "scores of granite": ("granitemoe", {"attention_multiplier": 0.2}),
    "groups of two": ("glm4_moe", {"moe.topk_group": 2}),
    "corrected softmax": ("ernie4_5_moe", {"moe.norm_topk_prob": False}),
    "sigmoids": ("minimax_m2", {"moe.scoring": "softmax"}),
    "blocks of keys": ("minimax_m3", {"block_indexer.num_blocks": 3}),
    "local blocks": ("minimax_m3", {"block_indexer.num_local_blocks": 0}),
    "clamps of a dense MLP": ("minimax_m3-clamped", {"swiglu_limit": 7.0}),
    "base": ("falcon", {"rope.rope_theta": 500.0}),
    "norms of heads beside convolutions": ("lfm2", {"qk_norm_after_rope": True}),
    "scales of gated attention": ("qwen3_next", {"norm": "rms_wide"}),
    "epsilon of a delta net": ("qwen3_next", {"norm_eps": 1e-6}),
    "time steps": ("granitemoehybrid", {"mamba.min_time_step": 0.5}),
    "largest time step": ("granitemoehybrid-dense", {"mamba.max_time_step": 0.5}),
    "scaling of latent experts": ("nemotron_h", {"moe.routed_scaling_factor": 1.0}),
    "heads that do not turn": ("nemotron_h-dense", {"rope": RopeConfig()}),
    "activation of an MLP beside a mixer": ("nemotron_h-dense", {"hidden_act": "relu"}),
    "growing queries": ("ministral3", {"query_scale.beta": 0.4}),
    "slopes": ("bloom", {"alibi_bias_max": 4.0}),
    "distances": ("mpt", {"alibi_bias_max": 4.0}),
    "chunks": ("llama4", {"attention_chunk_size": 24}),
    "weights of inputs": ("llama4", {"moe.weighted_inputs": False}),
    "corrected logits": ("kolibri1", {"moe.corrected_logits": False}),
    "clip of what three projections give": ("dbrx", {"clip_qkv": None}),
    "turning where no layer slides": ("flint", {"no_rope_layers": ()}),
    "frequencies of full layers": ("lfm3", {"rope.partial_rotary_factor": 1.0}),
    "pairs of four parts": ("codegen", {"rope.interleaved": False}),
    "norms of turned heads alone": (
        "llama4",
        {"qk_norm_after_rope": False, "qk_norm": None},
    ),
    "mixing": ("phimoe", {"moe.sparsemixer_jitter": 0.01}),
    "mscale": ("phimoe", {"rope.short_mscale": 1.0}),
    "side by side with Mamba": ("falcon_h1", {"multipliers.attention_out": 1.0}),
    "factors of projections": (
        "falcon_h1",
        {"multipliers.mamba_projections": (0.7, 0.5, 0.6, 0.8, 1.0)},
    ),
    "norm before the gate": ("falcon_h1-normed", {"mamba.norm": "after_gate"}),
    "norm of a mixer alone": ("mamba2", {"mamba.norm": "before_gate"}),
    "time steps of a mixer alone": ("mamba2", {"mamba.min_time_step": 0.5}),
    "factor of layers": ("minicpm3", {"residual_multiplier": 0.5}),
    "factor of embeddings beside latents": ("minicpm3", {"embedding_multiplier": 2.9}),
    "halves turned of latents": ("minicpm3", {"rope.interleaved": True}),
    "weights of experts beside Mamba": ("jamba", {"moe.norm_topk_prob": True}),
    "turned part of wide heads": ("gemma4", {"rope.partial_rotary_factor": 0.5}),
    "rope of wide heads": ("gemma4", {"rope": RopeConfig(1e6)}),
    "normed values": ("gemma4", {"value_norm": False}),
    "scores without a scale": ("gemma4", {"attention_multiplier": 0.9}),
    "weights beside a dense MLP": ("gemma4-experts", {"moe.norm_topk_prob": False}),
    "scaling of experts beside convolutions": (
        "lfm2_moe",
        {"moe.routed_scaling_factor": 1.0},
    ),
    "active stream": ("gemma3n", {"altup.active": 0}),
    "cut of gates": ("gemma3n", {"gate_sparsity": 0.7}),
    "window of shared keys": ("gemma4-small", {"sliding_window": 10}),
    "selected keys": ("deepseek_v32", {"indexer.num_selected": 11}),
    "halves turned of an indexer": ("deepseek_v32", {"indexer.interleaved": True}),
    "pairs turned of an indexer": ("glm_moe_dsa", {"indexer.interleaved": False}),
    "selected entries": ("deepseek_v4", {"compressed_attention.index_num_selected": 3}),
    "window beside entries": ("deepseek_v4", {"sliding_window": 10}),
    "rope of layers with entries": ("deepseek_v4", {"rope.factor": 4.0}),
    "rope of layers without": ("deepseek_v4", {"sliding_rope.rope_theta": 500.0}),
    "iterations": ("deepseek_v4", {"hyper_connections.sinkhorn_iters": 1}),
    "epsilon of streams": ("deepseek_v4", {"hyper_connections.eps": 0.1}),
    "scales of latent vectors": ("longcat_flash", {"mla.scale_latents": False}),
    "factor of a stream": ("minimax", {"residual_factors.mlp_stream": 1.0}),
    "factor of a stream of lightning layers": (
        "minimax",
        {"lightning.stream_factor": 1.5},
    ),
    "norms in the stream": ("minimax", {"norm_placement": "pre"}),
    "gate of a delta net": ("kimi_linear", {"delta_net.gate_activation": "silu"}),
    "mean of experts and a shared MLP": ("cohere2_moe", {"moe.shared_average": False}),
    "layers that turn": ("cohere2_moe", {"no_rope_layers": ()}),
    "shares of sigmoids": ("cohere2_moe-sigmoid", {"moe.norm_topk_prob": False}),
    "what a delta net learns": ("olmo_hybrid", {"delta_net.beta_factor": 1.0}),
    "epsilon of a delta net alone": ("olmo_hybrid", {"delta_net.norm_eps": None}),
    "scale of values": ("mimo_v2_flash", {"multipliers.value": 1.0}),
    "part of a head of sliding layers": (
        "mimo_v2_flash",
        {"sliding_rope.partial_rotary_factor": 0.334},
    ),
    "roots of scores": ("deepseek_v4", {"moe.scoring": "sigmoid"}),
    "bound of a shared MLP": ("deepseek_v4", {"moe.swiglu_limit": None}),
    "base beside biases": ("seed_oss", {"rope.rope_theta": 500.0}),
    "types of layers": ("ministral", {"layer_types": ("sliding_attention",) * 2}),
    "pairs beside biases": ("helium", {"rope.interleaved": False}),
    "first of four layers": ("cwm", {"layer_types": ("sliding_attention",) * 3}),
    "embedding scale beside two norms": ("vaultgemma", {"scale_embeddings": False}),
    "latent pairs of a dense model": ("youtu", {"rope.interleaved": False}),
    "a llama3 rope by other names": ("exaone", {"rope": RopeConfig(500000.0)}),
    "factor of logits": ("hyperclovax", {"logit_scale": 1 / 0.7}),
    "scores without norms behind": ("hyperclovax-pre", {"attention_multiplier": 0.2}),
    "base by another name": ("iquestcoder", {"rope.rope_theta": 500.0}),
    "rectified beside biases": ("jais2", {"hidden_act": "relu"}),
    "base of sliding layers": ("granite_swa", {"sliding_rope": None}),
    "a rope in all layers": ("granite_swa", {"no_rope_layers": ()}),
    "scores of granite's windows": ("granitemoe_swa", {"attention_multiplier": 0.2}),
    "scaling of experts alone": ("solar_open", {"moe.routed_scaling_factor": 1.0}),
    "base of heads in one tensor": ("sarvam_moe", {"rope.rope_theta": 500.0}),
    "scaling beside queries": ("sarvam_mla", {"moe.routed_scaling_factor": 1.0}),
    "ropes by type": ("mellum", {"sliding_rope": None}),
    "turning in full layers": ("exaone_moe", {"no_rope_layers": ()}),
    "base beside norms behind": ("flex_olmo", {"rope.rope_theta": 500.0}),
    "sigmoids beside norms": ("hy_v3", {"moe.scoring": "softmax"}),
    "scaling of four norms": ("afmoe", {"moe.routed_scaling_factor": 1.0}),
    "embeddings of four norms": ("afmoe", {"scale_embeddings": False}),
    "turned the other way": ("nanochat", {"rope.clockwise": False}),
    "logit cap beside unscaled norms": ("nanochat", {"final_logit_softcapping": 15.0}),
    "scores that are not scaled": ("gpt_neo", {"attention_multiplier": 12**-0.5}),
    "window of local layers": ("gpt_neo", {"sliding_window": 8}),
    "epsilon in a mixer": ("falcon_mamba", {"mamba1.norm_eps": 1e-6}),
    "window beside recurrences": ("recurrent_gemma", {"sliding_window": 8}),
    "half turned beside recurrences": (
        "recurrent_gemma",
        {"rope.partial_rotary_factor": 1.0},
    ),
    "logit cap beside recurrences": (
        "recurrent_gemma",
        {"final_logit_softcapping": 20.0},
    ),
    "epsilon of differences": ("diffllama", {"norm_eps": 1e-2}),
    "window of biased keys": ("doge", {"sliding_window": 8}),
    "half turned behind norms": ("persimmon", {"rope.partial_rotary_factor": 1.0}),
    "squared activation": ("persimmon", {"hidden_act": "relu"}),
    "activation between norms": ("bitnet", {"hidden_act": "relu"}),
    "epsilon of inner norms": ("bitnet", {"norm_eps": 1e-6}),
    "activation before the head": ("modernbert", {"head_transform.hidden_act": "relu"}),
    "window behind a full layer": ("modernbert", {"sliding_window": 8}),
    "base of full layers alone": ("modernbert", {"rope.rope_theta": 1e4}),
    "growing queries of latents": ("mistral4", {"query_scale.beta": 0.2}),
    "groups of a softmax": ("mistral4", {"moe.group_scoring": "max"}),
    "pairs beside growing queries": ("mistral4", {"rope.interleaved": False}),
    "turning where a type has no rope": ("cohere_compass", {"no_rope_layers": ()}),
    "halves of heads behind one norm": ("cohere_compass", {"rope.interleaved": True}),
    "rope of sliding layers beside another": (
        "cohere_compass-turned",
        {"sliding_rope": None},
    ),
    "turning in full layers beside delta nets": ("lara_mini", {"no_rope_layers": ()}),
    "window beside delta nets": ("lara_mini", {"sliding_window": 8}),
    "bound of decays": ("bailing_hybrid", {"delta_net.decay_bound": -3.0}),
    "pairs of gated latents": ("bailing_hybrid", {"rope.interleaved": False}),
    "activation of gates": ("laguna", {"attention_gate_activation": "sigmoid"}),
    "scaling of experts beside gates": ("laguna", {"moe.routed_scaling_factor": 1.0}),
    "pairs beside gated queries": ("axk2", {"rope.interleaved": False}),
    "selected keys beside gated queries": ("axk2", {"indexer.num_selected": 12}),
    "factor of independent streams": (
        "hy_v4",
        {"hyper_connections.expand_factor": 2.0},
    ),
    "epsilon of independent streams": ("hy_v4", {"hyper_connections.eps": 0.1}),
    "first dims of an indexer": ("hy_v4", {"indexer.rotates_last": False}),
    "epsilon of an indexer": ("hy_v4", {"indexer.norm_eps": 0.5}),
    "number of selected keys beside sinks": ("hy_v4", {"indexer.num_selected": 12}),
    "bound of experts beside streams": ("hy_v4", {"moe.swiglu_limit": None}),
    "rope of texts beside images": ("mllama", {"rope": RopeConfig(500000.0)}),
    "rows of sines": ("xglm", {"position_offset": 1}),
    "scaled embeddings beside sines": ("xglm", {"embedding_multiplier": 6.5}),
    "scaled embeddings beside rows": ("biogpt", {"embedding_multiplier": 6.5}),
    "softmax beside shared experts": ("aria", {"moe.scoring": "softmax"}),
    "half turned beside Mamba": ("bamba", {"rope.partial_rotary_factor": 1.0}),
    "scores of shared blocks": ("zamba2", {"query_pre_attn_scalar": 24.0}),
    "base of shared blocks": ("zamba2", {"rope.rope_theta": 500.0}),
    "activation of shared blocks": ("zamba2-small", {"hidden_act": "gelu"}),
    "time steps behind shared blocks": ("zamba2", {"mamba.min_time_step": 0.0}),
    "epsilon behind shared blocks": ("zamba2-small", {"mamba.norm_eps": None}),
    "norms of what is added": ("openai-gpt", {"norm_placement": "pre"}),
    "activation between norms of sums": ("openai-gpt-untied", {"hidden_act": "silu"}),
    "epsilon of sums": ("openai-gpt-untied", {"norm_eps": 1e-5}),
    "epsilon of layers alone": ("jetmoe", {"norm_eps": 0.1}),
    "epsilon behind the layers": ("jetmoe", {"final_norm_eps": None}),
    "base beside experts of attention": ("jetmoe", {"rope.rope_theta": 500.0}),
    "weights of experts beside those of attention": (
        "jetmoe",
        {"moe.norm_topk_prob": False},
    ),
    "scores of a shared block": ("zamba", {"query_pre_attn_scalar": 24.0}),
    "activation of a shared block": ("zamba-biased", {"hidden_act": "gelu"}),
    "epsilon of a shared block": ("zamba-biased", {"norm_eps": 1e-5}),
}


@pytest.mark.parametrize("variant, changes", WRONG.values(), ids=WRONG)
def test_a_wrong_constant_misses_by_a_hundredfold(tmp_path, variant, changes):
    hf = make_model(tmp_path, variant)
    wrong = change(bridge.from_hf_config(tmp_path), changes)
    graph, like = nnx.split(abstract_model(wrong))
    model = nnx.merge(graph, bridge.load_hf(tmp_path, like))
    assert relative_error(logits_of(model, hf.tokens), hf.logits) > 100 * RELATIVE


def without_norms_of_time_steps(model: Decoder) -> None:
    for _, module in nnx.iter_modules(model):
        if isinstance(module, Mamba1):
            module.step_norm = None


def without_norms_of_states(model: Decoder) -> None:
    for _, module in nnx.iter_modules(model):
        if isinstance(module, Mamba1):
            module.b_norm = module.c_norm = None


def without_embedding_norm(model: Decoder) -> None:
    model.embed_norm = None


def without_gates_of_heads(model: Decoder) -> None:
    for _, module in nnx.iter_modules(model):
        if isinstance(module, LatentAttention):
            module.q_gate = None


def without_gates_of_norms(model: Decoder) -> None:
    for _, module in nnx.iter_modules(model):
        if isinstance(module, GatedNorm):
            module.gate_up.kernel = nnx.Param(
                jnp.zeros_like(module.gate_up.kernel[...])
            )


def with_ungated_queries(model: Decoder) -> None:
    for _, module in nnx.iter_modules(model):
        if isinstance(module, LatentAttention):
            kernel = module.q_gate_proj.kernel[...]
            gates = kernel.at[..., module.qk_head_dim :].set(0)
            module.q_gate_proj.kernel = nnx.Param(gates)


def with_weights_of_all_experts_of_attention(model: Decoder) -> None:
    for _, module in nnx.iter_modules(model):
        if isinstance(module, ExpertAttention):
            module.router.config = dataclasses.replace(
                module.router.config, norm_topk_prob=False
            )


def without_head_transform(model: Decoder) -> None:
    model.head_transform = None


def without_head_bias(model: Decoder) -> None:
    model.lm_head = None


def without_learned_activation(model: Decoder) -> None:
    for _, module in nnx.iter_modules(model):
        if isinstance(module, MLP):  # The plain activation that is the most like it.
            module.xielu, module.activation = None, "relu2"


def without_inputs_of_layers(model: Decoder) -> None:
    model.per_layer_inputs = None


def without_learned_residual(model: Decoder) -> None:
    for _, module in nnx.iter_modules(model):
        if isinstance(module, DecoderLayer):
            module.laurel = None


class FirstShared(SharedAttention):
    """Attention that keeps the keys and values of the first layer, not of the last."""

    def attend_shared(self, x, tables, segment_ids, window, before):
        out, used = super().attend_shared(x, tables, segment_ids, window, before)
        is_first = ~jnp.any(before.key)
        return out, jax.tree.map(lambda b, u: jnp.where(is_first, u, b), before, used)


def with_keys_of_the_first_layer(model: Decoder) -> None:
    for _, module in nnx.iter_modules(model):
        if isinstance(module, SharedAttention):
            module.__class__ = FirstShared


def with_one_block_twice(model: Decoder) -> None:
    assert model.shared_blocks is not None
    model.shared_blocks[1] = model.shared_blocks[0]


def without_adapters_of_attention(model: Decoder) -> None:
    for _, module in nnx.iter_modules(model):
        if isinstance(module, BlockAdapters):
            module.q_adapter = None


def without_adapters_of_mlps(model: Decoder) -> None:
    for _, module in nnx.iter_modules(model):
        if isinstance(module, BlockAdapters):
            module.mlp_adapter = None


# Parts that have weights, so that no config without them loads the same file.
LEFT_OUT: dict[str, tuple[str, Callable[[Decoder], None]]] = {
    "gates of norms": ("axk2", without_gates_of_norms),
    "gates of queries": ("axk2", with_ungated_queries),
    "gates of latent attention": ("bailing_hybrid", without_gates_of_heads),
    "gates of each dim of latent attention": ("hy_v4", without_gates_of_heads),
    "weights of attention": ("jetmoe", with_weights_of_all_experts_of_attention),
    "transform before the head": ("modernbert", without_head_transform),
    "bias of a tied head": ("modernbert", without_head_bias),
    "normed embeddings": ("bloom", without_embedding_norm),
    "learned activation": ("apertus", without_learned_activation),
    "norms of time steps": ("jamba", without_norms_of_time_steps),
    "learned residual": ("gemma3n", without_learned_residual),
    "inputs of layers": ("gemma4-small", without_inputs_of_layers),
    "keys of the last layer": ("gemma4-small", with_keys_of_the_first_layer),
    "norms of states": ("jamba", without_norms_of_states),
    "blocks in turn": ("zamba2", with_one_block_twice),
    "adapters of queries": ("zamba2", without_adapters_of_attention),
    "adapters of an MLP": ("zamba2-small", without_adapters_of_mlps),
}


@pytest.mark.parametrize("variant, leave_out", LEFT_OUT.values(), ids=LEFT_OUT)
def test_a_model_without_a_part_misses_by_a_hundredfold(tmp_path, variant, leave_out):
    hf = make_model(tmp_path, variant)
    model = load_model(tmp_path)
    leave_out(model)
    assert relative_error(logits_of(model, hf.tokens), hf.logits) > 100 * RELATIVE


def change(config: DecoderConfig, changes: dict[str, Any]) -> DecoderConfig:
    for name, value in changes.items():
        part, _, rest = name.rpartition(".")
        if part:
            value = dataclasses.replace(getattr(config, part), **{rest: value})
        config = dataclasses.replace(config, **{part or rest: value})
    return config


@pytest.mark.parametrize("variant", ["mixtral", "qwen3_moe", "deepseek_v3"])
def test_experts_held_as_one_tensor_are_read_as_well(tmp_path, variant):
    hf = make_model(tmp_path / "split", variant)
    model = AutoModelForCausalLM.from_pretrained(hf.path)
    model.save_pretrained(tmp_path / "fused", save_original_format=False)
    assert set(tensors_of(tmp_path / "fused")) != set(tensors_of(hf.path))
    ours = load_model(tmp_path / "fused")
    assert relative_error(logits_of(ours, hf.tokens), hf.logits) <= RELATIVE


def test_a_gpt2_without_prefix_is_read_as_well(tmp_path):
    from safetensors.numpy import save_file

    hf = make_model(tmp_path, "gpt2")
    tensors = {
        key.removeprefix("transformer."): t for key, t in tensors_of(tmp_path).items()
    }
    tensors["h.0.attn.bias"] = np.tril(np.ones((1, 1, 40, 40), np.float32))
    save_file(tensors, tmp_path / "model.safetensors")
    ours = logits_of(load_model(tmp_path), hf.tokens)
    assert relative_error(ours, hf.logits) <= RELATIVE


def test_packed_texts_read_as_if_each_were_alone(llama: HFModel):
    model = load_model(llama.path)
    segments = np.repeat([[0] * 15 + [1] * 25], 2, axis=0)
    packed = logits_of(model, llama.tokens, segment_ids=segments)
    alone = [
        logits_of(model, llama.tokens[:, :15]),
        logits_of(model, llama.tokens[:, 15:]),
    ]
    assert relative_error(packed, np.concatenate(alone, axis=1)) <= RELATIVE


@pytest.mark.parametrize("variant", ["gemma2", "gpt_oss", "deepseek_v2-lite"])
def test_packed_texts_of_unusual_attention_read_as_if_each_were_alone(
    tmp_path, variant
):
    hf = make_model(tmp_path, variant)
    model = load_model(tmp_path)
    segments = np.repeat([[0] * 15 + [1] * 25], 2, axis=0)
    packed = logits_of(model, hf.tokens, segment_ids=segments)
    alone = logits_of(model, hf.tokens[:, 15:])
    assert relative_error(packed[:, 15:], np.asarray(alone)) <= RELATIVE


def test_chunks_of_a_packed_row_begin_with_each_text(tmp_path):
    hf = make_model(tmp_path, "llama4")  # chunks of 16 positions
    model = load_model(tmp_path)
    segments = np.repeat([[0] * 15 + [1] * 25], 2, axis=0)
    positions = np.repeat([[*range(15), *range(25)]], 2, axis=0)
    packed = logits_of(model, hf.tokens, positions=positions, segment_ids=segments)
    alone = logits_of(model, hf.tokens[:, 15:])
    assert relative_error(packed[:, 15:], np.asarray(alone)) <= RELATIVE


def test_positions_shift_and_stretch_as_in_transformers(llama: HFModel):
    model = load_model(llama.path)
    positions = np.arange(40)[None].repeat(2, axis=0)
    shifted = logits_of(model, llama.tokens, positions=positions + 7)
    assert relative_error(shifted, llama.logits) <= 1e-4
    stretched = logits_of(model, llama.tokens, positions=positions * 2)
    assert relative_error(stretched, llama.logits) > 1e-2


def test_heads_paired_the_wrong_way_miss_by_a_hundredfold(llama: HFModel):
    def modulo(query, key, value, **kwargs):  # query i with key i % n_kv
        n_rep = query.shape[2] // key.shape[2]
        key, value = (jnp.tile(x, (1, 1, n_rep, 1)) for x in (key, value))
        return dot_product_attention(query, key, value, **kwargs)

    model = load_model(llama.path, attention=modulo)
    assert relative_error(logits_of(model, llama.tokens), llama.logits) > 100 * RELATIVE


# bfloat16 rounds to 1 part in 256, some twenty roundings deep.
BF16 = 0.05


@pytest.mark.parametrize(
    "variant, fields",
    [
        ("llama", {}),
        ("gemma2", {}),
        ("olmo2", {}),
        ("gpt2", {}),
        # Without experts: a rounding may choose others.
        ("deepseek_v2", {"first_k_dense_replace": 3}),
    ],
)
def test_bf16_weights_compute_in_bf16_and_stay_close(tmp_path, variant, fields):
    hf = make_model(tmp_path, variant, dtype=torch.bfloat16, **fields)
    logits = logits_of(load_model(tmp_path, jnp.bfloat16), hf.tokens)
    assert logits.dtype == jnp.bfloat16
    assert relative_error(logits.astype(jnp.float32), hf.logits) < BF16


def test_compute_follows_the_weights_that_are_passed(llama: HFModel):
    model = load_model(llama.path)
    halved = jax.tree.map(lambda w: w.astype(jnp.bfloat16), model)
    assert logits_of(halved, llama.tokens).dtype == jnp.bfloat16


class Negated(DecoderLayer):
    """Its weights are stored negated, and put right at entry."""

    def __call__(self, *args):
        return DecoderLayer.__call__(jax.tree.map(jnp.negative, self), *args)


def test_a_layers_weights_are_only_used_inside_its_own_call(llama: HFModel):
    model = load_model(llama.path)  # FSDP swaps the class to gather at entry
    model.layers = jax.tree.map(jnp.negative, model.layers)
    model.layers.__class__ = Negated
    assert relative_error(logits_of(model, llama.tokens), llama.logits) <= RELATIVE


def test_the_stream_behind_every_layer_is_that_of_transformers(tmp_path):
    hf = make_model(tmp_path, "qwen3_moe")
    with torch.no_grad():
        theirs = AutoModelForCausalLM.from_pretrained(tmp_path)(
            torch.from_numpy(hf.tokens), output_hidden_states=True
        ).hidden_states
    ours = load_model(tmp_path).hidden_states(jnp.asarray(hf.tokens))
    assert len(ours) == len(theirs) == 4
    for mine, want in zip(ours, theirs, strict=True):
        assert relative_error(mine, want.numpy()) <= RELATIVE


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_transformers_loads_what_we_export_in_files(tmp_path, dtype):
    hf = make_model(tmp_path / "in", "llama", dtype=getattr(torch, dtype), head_dim=16)
    model = load_model(hf.path, getattr(jnp, dtype))
    bridge.save_hf(
        tmp_path / "out", nnx.state(model), model.config, max_shard_bytes=50_000
    )
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    assert again.dtype == getattr(torch, dtype)
    np.testing.assert_array_equal(hf_logits(again, hf.tokens), hf.logits)


@pytest.mark.parametrize("variant", ["phi", "phimoe"])
def test_a_tied_head_has_its_own_bias(tmp_path, variant):
    hf = make_model(tmp_path / "hf", variant, tie_word_embeddings=True)
    model = load_model(hf.path)
    assert model.config.tie_word_embeddings and model.config.head_bias
    assert relative_error(logits_of(model, hf.tokens), hf.logits) <= RELATIVE
