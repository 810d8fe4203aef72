"""Megatron's configs say what ours say, or are refused; routers are compared."""

import dataclasses
import json
from typing import Any

import jax
import pytest
from helpers.errors import facts
from megatron_variants import GOLDENS, WITH, WITHOUT, twin_config, twin_fields

import bridge
from bridge.megatron import (
    TWINS,
    from_args,
    from_transformer_config,
    open_megatron,
    to_args,
    to_gpt_model,
    to_transformer_config,
)
from bridge.models import DecoderConfig

# What no field of Megatron's says, and no logit knows.
UNSAID = ("max_window_layers",)


def megatron_fields(config: DecoderConfig, **sizes: Any) -> dict[str, Any]:
    return to_gpt_model(config) | to_transformer_config(config, **sizes)


def said(config: DecoderConfig) -> dict[str, Any]:
    """What no field says, given beside them."""
    names = ("vocab_size", "bos_token_id", "eos_token_id", "pad_token_id")
    return {name: getattr(config, name) for name in names}


def hf_without(config: DecoderConfig) -> dict[str, Any]:
    fields = bridge.to_hf_config(config)
    return {name: value for name, value in fields.items() if name not in UNSAID}


# There and back


@pytest.mark.parametrize("variant", WITH)
def test_a_config_comes_back_through_megatrons_fields(variant):
    config = twin_config(variant)
    fields = json.loads(json.dumps(megatron_fields(config)))
    again = from_transformer_config(
        fields, model_type=config.model_type, **said(config)
    )
    assert hf_without(again) == hf_without(config)


@pytest.mark.parametrize("variant", WITH)
def test_a_config_comes_back_through_a_runs_settings(variant):
    config = twin_config(variant)
    if config.attention_multiplier is not None:
        with pytest.raises(ValueError, match=facts("attention_multiplier = 0.3")):
            to_args(config)
        return
    again = from_args(to_args(config), model_type=config.model_type, **said(config))
    assert hf_without(again) == hf_without(config)


@pytest.mark.parametrize("variant", WITH)
def test_without_a_family_one_is_found_that_says_the_same(variant):
    config = twin_config(variant)
    fields = megatron_fields(config)
    found = from_transformer_config(fields, **said(config))
    assert megatron_fields(found) == fields
    assert TWINS.index(found.model_type) <= TWINS.index(config.model_type)


def test_the_families_with_a_twin_are_all_of_those():
    assert {twin_config(variant).model_type for variant in WITH} == set(TWINS)


@pytest.mark.parametrize("golden_of", GOLDENS.values(), ids=GOLDENS)
def test_settings_that_megatron_saved_are_the_hugging_face_twins(golden, golden_of):
    name, kind, twin = golden_of
    config = bridge.from_hf_config(golden(twin) / "hf")
    args = open_megatron(golden(name) / kind).args
    assert len(args) > 600
    assert from_args(args, **said(config)) == config


@pytest.mark.parametrize("golden_of", GOLDENS.values(), ids=GOLDENS)
def test_settings_that_we_write_are_those_that_megatron_saved(golden, golden_of):
    name, kind, twin = golden_of
    config = bridge.from_hf_config(golden(twin) / "hf")
    saved = open_megatron(golden(name) / kind).args
    multiple = saved["make_vocab_size_divisible_by"]
    ours = to_args(config, make_vocab_size_divisible_by=multiple)
    differ = {
        key: (value, saved[key])
        for key, value in ours.items()
        if key in saved and saved[key] != value
    }
    assert differ.keys() <= {"moe_router_dtype"}  # a run's own choice of precision
    assert len(ours.keys() & saved.keys()) >= 40


# Fields, one by one


def test_a_dense_config_by_hand():
    fields = {
        "num_layers": 2,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_query_groups": 2,
        "ffn_hidden_size": 96,
        "normalization": "RMSNorm",
        "layernorm_epsilon": 1e-6,
        "add_bias_linear": False,
        "gated_linear_unit": True,
        "activation_func": jax.nn.silu,
        "params_dtype": "torch.bfloat16",
        "bf16": True,
        "position_embedding_type": "rope",
        "rotary_base": 500000,
        "max_sequence_length": 512,
        "vocab_size": 131,
    }
    config = from_transformer_config(fields)
    assert config == bridge.from_hf_config(
        {
            "model_type": "llama",
            "vocab_size": 131,
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 512,
            "rope_theta": 500000,
            "bos_token_id": None,
            "eos_token_id": None,
            "dtype": "bfloat16",
        }
    )


@pytest.mark.parametrize(
    "variant, expected",
    [
        ("llama", {"activation_func": "silu", "add_bias_linear": False}),
        ("llama-biased", {"add_bias_linear": True, "add_qkv_bias": False}),
        ("qwen2", {"add_bias_linear": False, "add_qkv_bias": True}),
        ("llama-linear-rope", {"seq_len_interpolation_factor": 4.0}),
        ("llama-llama3-rope", {"rope_scaling": True, "rope_scaling_factor": 8.0}),
        ("qwen2-yarn", {"position_embedding_type": "yarn", "yarn_beta_fast": 32.0}),
        ("mistral", {"window_size": (8, 0), "window_attn_skip_freq": None}),
        ("qwen2-sliding", {"window_attn_skip_freq": [0, 1, 1]}),
        ("gpt2", {"normalization": "LayerNorm", "activation_func": "fast_gelu"}),
        ("gpt2", {"position_embedding_type": "learned_absolute"}),
        ("smollm3", {"no_rope_freq": [0, 0, 0, 1]}),
        ("granite", {"softmax_scale": 0.3}),
        ("gpt_oss", {"softmax_type": "learnable", "activation_func": "quick_gelu"}),
        ("gpt_oss", {"glu_linear_offset": 1.0, "activation_func_clamp_value": 7.0}),
        ("qwen3_moe", {"moe_layer_freq": [1, 0, 1], "qk_layernorm": True}),
        ("qwen2_moe", {"moe_shared_expert_gate": True, "moe_aux_loss_coeff": 0.001}),
        ("deepseek_v2-lite", {"rope_type": "rope", "rotary_scaling_factor": 1.0}),
        ("deepseek_v3", {"position_embedding_type": "rope", "rope_type": "yarn"}),
        ("deepseek_v3", {"q_lora_rank": 20, "qk_head_dim": 10, "mscale": 0.707}),
    ],
)
def test_what_a_field_is_called(variant, expected):
    fields = megatron_fields(twin_config(variant))
    assert {name: fields[name] for name in expected} == expected


def test_a_rope_of_transformers_5_is_not_lost():
    """Upstream's converter looks for `rope_theta`, which is not there any more."""
    fields = {
        **twin_fields("llama"),
        "rope_parameters": {"rope_theta": 500000.0, "rope_type": "default"},
    }
    assert to_gpt_model(bridge.from_hf_config(fields))["rotary_base"] == 500000.0


def test_a_llama3_rope_is_not_taken_for_a_linear_one():
    """Upstream's takes any factor for a linear stretch."""
    fields = to_gpt_model(twin_config("llama-llama3-rope"))
    assert fields["seq_len_interpolation_factor"] is None


@pytest.mark.parametrize(
    "changes, expected",
    [
        ({"moe_layer_freq": 2}, (1,)),
        ({"moe_layer_freq": [0, 1, 1]}, (0,)),
        ({"moe_layer_freq": 1}, ()),
    ],
)
def test_frequencies_are_read_as_megatron_counts(changes, expected):
    fields = megatron_fields(twin_config("qwen3_moe")) | changes
    assert from_transformer_config(fields).dense_layers == expected


def test_dense_layers_of_a_biased_model_are_biased_too():
    fields = megatron_fields(twin_config("qwen3_moe")) | {"add_bias_linear": True}
    with pytest.raises(ValueError, match=facts("mlp_bias = True", "False")):
        from_transformer_config(fields, model_type="qwen3_moe")
    with pytest.raises(ValueError, match=facts("add_bias_linear = True")):
        from_transformer_config(
            megatron_fields(twin_config("qwen2_moe")) | {"add_bias_linear": True}
        )


def test_every_so_many_layers_see_all_and_do_not_turn():
    fields = megatron_fields(twin_config("smollm3"))
    fields |= {"window_size": [8, 0], "window_attn_skip_freq": 2, "no_rope_freq": 4}
    config = from_transformer_config(fields)
    assert config.windows == (9, None, 9, None)
    assert config.no_rope_layers == (3,)


def test_a_yaml_files_functions_and_dtypes_are_read():
    config = twin_config("qwen3", dtype="bfloat16")
    fields = megatron_fields(config) | {
        "_target_": "megatron.bridge.models.qwen.Qwen3ModelProvider",
        "activation_func": {"_target_": "torch.nn.functional.silu", "_call_": False},
        "params_dtype": {"_target_": "torch.bfloat16", "_call_": False},
    }
    assert from_transformer_config(fields, **said(config)) == config


def test_settings_under_their_old_names_are_read():
    config = twin_config("llama")
    args = to_args(config)
    args["norm_epsilon"] = args.pop("layernorm_epsilon")
    args["apply_layernorm_1p"] = args.pop("layernorm_zero_centered_gamma")
    assert from_args(args, **said(config)) == config


def test_groups_of_queries_count_only_where_they_are_turned_on():
    args = to_args(twin_config("llama")) | {"group_query_attention": False}
    assert from_args({**args, "num_query_groups": 1}).num_key_value_heads == 4


def test_fused_gelu_is_the_one_by_tanh():
    args = to_args(twin_config("gpt2"))
    assert args["bias_gelu_fusion"]
    assert from_args(args).hidden_act == "gelu_new"
    assert from_args({**args, "bias_gelu_fusion": False}).hidden_act == "gelu"


# What cannot be said


@pytest.mark.parametrize("variant", WITHOUT)
def test_a_model_that_megatron_has_not_is_refused_with_the_reason(variant):
    for write in (to_transformer_config, to_gpt_model, to_args):
        with pytest.raises(ValueError, match=facts(WITHOUT[variant])):
            write(twin_config(variant))


@pytest.mark.parametrize(
    "variant, changes, match",
    [
        ("deepseek_v3", {"norm_eps": 1e-3}, ["norm_eps = 0.001", "1e-06"]),
        ("deepseek_v3", {"attention_bias": True}, ["attention_bias = True"]),
        (
            "llama",
            {"attention_out_bias": True},
            ["attention_out_bias = True", "mlp_bias = False"],
        ),
        (
            "llama",
            {"mlp_bias": True},
            ["attention_out_bias = False", "mlp_bias = True"],
        ),
        (
            "gpt_oss",
            {"moe.expert_bias": False},
            ["moe.expert_bias = False", "moe.router_bias = True"],
        ),
        (
            "gpt_oss",
            {"moe.shared_intermediate_size": 8, "moe.swiglu_limit": 7.0},
            ["moe.expert_bias = True"],
        ),
        ("gpt2", {"norm_bias": False}, ["norm_bias = False", "norm = 'layer'"]),
        ("llama", {"query_pre_attn_scalar": 7.0}, ["query_pre_attn_scalar = 7.0"]),
        ("gpt_oss", {"moe.swiglu_alpha": 1.5}, ["moe.swiglu_alpha = 1.5", "1.702"]),
        ("deepseek_v3", {"rope.truncate": False}, ["rope.truncate = False"]),
        ("qwen2-yarn", {"rope.attention_factor": 1.3}, ["rope.attention_factor = 1.3"]),
        ("llama", {"rope.clockwise": True}, ["rope.clockwise = True"]),
        ("deepseek_v3", {"rope.mscale": None}, ["rope.mscale", "mscale_all_dim"]),
        ("deepseek_v3", {"rope.interleaved": False}, ["rope.interleaved = False", "1"]),
        (
            "llama-llama3-rope",
            {"rope.low_freq_factor": 2.0},
            ["rope.low_freq_factor = 2.0", "1.0"],
        ),
        ("deepseek_v3", {"moe.norm_topk_prob": False}, ["moe.norm_topk_prob = False"]),
        ("mixtral", {"moe.num_experts_per_tok": 1}, ["moe.norm_topk_prob = True"]),
        ("mixtral", {"moe.correction_bias": True}, ["moe.correction_bias = True"]),
        ("mixtral", {"moe.num_zero_experts": 2}, ["moe.num_zero_experts = 2"]),
        (
            "deepseek_v3",
            {"moe.shared_average": True},
            ["moe.shared_average = True"],
        ),
        ("deepseek_v3", {"mla.scale_latents": True}, ["mla.scale_latents = True"]),
        (
            "deepseek_v3",
            {"moe.num_experts_per_tok": 3},
            ["moe.group_scoring = 'top2_sum'", "3 / 2 = 1"],
        ),
    ],
)
def test_a_field_that_megatron_lacks_is_named(variant, changes, match):
    with pytest.raises(ValueError, match=facts(*match)):
        to_transformer_config(changed(twin_config(variant), changes))


def changed(config: DecoderConfig, changes: dict[str, Any]) -> DecoderConfig:
    for name, value in changes.items():
        part, _, field = name.rpartition(".")
        inner = getattr(config, part) if part else config
        new = dataclasses.replace(inner, **{field: value})
        config = dataclasses.replace(config, **{part: new}) if part else new
    return config


def test_every_field_that_is_not_modelled_is_named_in_one_error():
    wrong = {
        "qk_l2_norm": True,
        "use_mup": True,
        "moe_expert_capacity_factor": 1.25,
        "moe_a_new_thing": 3,
        "rotary_of_another_kind": "spiral",
        "attention_output_gate": True,
        "normalization": "L2Norm",
        "activation_func": "relu",
        "position_embedding_type": "mrope",
        "softmax_type": "off-by-one",
        "window_size": (8, 8),
        "params_dtype": "float16",
        "bf16": True,
    }
    fields = megatron_fields(twin_config("qwen3_moe")) | wrong
    del fields["hidden_size"]
    with pytest.raises(ValueError) as error:
        from_transformer_config(fields)
    for name in (*(wrong.keys() - {"bf16"}), "hidden_size is missing"):
        assert name in str(error.value), name


@pytest.mark.parametrize(
    "name, value",
    [
        ("fp8", "hybrid"),
        ("recompute_granularity", "full"),
        ("moe_token_dispatcher_type", "alltoall"),
        ("moe_grouped_gemm", True),
        ("attention_backend", "flash"),
        ("overlap_p2p_comm", True),
        ("moe_router_dtype", "fp64"),
        ("attention_dropout", 0.1),
        ("qk_clip", True),
    ],
)
def test_how_it_was_run_is_nobodys_business(name, value):
    config = twin_config("mixtral")
    fields = megatron_fields(config) | {name: value}
    assert from_transformer_config(fields, **said(config)) == config


@pytest.mark.parametrize(
    "changes, match",
    [
        (
            {"vocab_size": None, "padded_vocab_size": 256},
            ["padded_vocab_size = 256", "vocab_size"],
        ),
        ({"squared_relu": True}, ["squared_relu = True"]),
        (
            {"moe_router_load_balancing_type": "sinkhorn"},
            ["moe_router_load_balancing_type = 'sinkhorn'"],
        ),
        ({"moe_router_group_topk": 1}, ["moe_router_group_topk = 1", "4"]),
        ({"qk_layernorm": False}, ["qk_layernorm = False"]),
        (
            {"original_max_position_embeddings": None},
            ["original_max_position_embeddings", "4096"],
        ),
        ({"rotary_interleaved": True}, ["rotary_interleaved = True"]),
        (
            {"position_embedding_type": "learned_absolute"},
            ["position_embedding_type = 'learned_absolute'"],
        ),
        ({"mscale_all_dim": 0.0}, ["mscale = 0.707", "mscale_all_dim = 0.0"]),
    ],
)
def test_settings_that_are_unclear_are_refused(changes, match):
    args = to_args(twin_config("deepseek_v3")) | changes
    with pytest.raises(ValueError, match=facts(*match)):
        from_args(args)


def test_layers_that_predict_further_tokens_are_left_out_where_files_have_them():
    config = twin_config("deepseek_v3")
    found = from_args(to_args(config) | {"mtp_num_layers": 2}, **said(config))
    assert dict(found.passthrough)["num_nextn_predict_layers"] == 2
    args = to_args(twin_config("llama")) | {"mtp_num_layers": 2}
    with pytest.raises(ValueError, match=facts("mtp_num_layers = 2")):
        from_args(args, model_type="llama")


def test_what_a_run_does_not_know_can_be_given():
    config = twin_config("deepseek_v3")
    args = to_args(config)
    length = args.pop("original_max_position_embeddings")
    del args["vocab_size"]
    found = from_args(args, original_max_position_embeddings=length, **said(config))
    assert found == config


def test_a_family_that_cannot_be_so_is_refused_by_what_differs():
    fields = megatron_fields(twin_config("qwen3"))
    with pytest.raises(ValueError, match=facts("qk_norm = 'head'", "None")):
        from_transformer_config(fields, model_type="llama")
    with pytest.raises(ValueError, match=facts("moe = None")):
        from_transformer_config(fields, model_type="mixtral")


def test_where_no_family_fits_each_ones_reason_is_given():
    fields = megatron_fields(twin_config("qwen3")) | {"softmax_scale": 0.3}
    with pytest.raises(ValueError) as error:
        from_transformer_config(fields)
    for name in TWINS:
        assert f"{name}: " in str(error.value)
