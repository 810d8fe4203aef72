"""Parallel sizes are fields that fit the model, or are refused."""

import pytest
from helpers.errors import facts
from megatron_variants import twin_config

from bridge.megatron import to_gpt_model, to_transformer_config


def test_parallel_sizes_are_fields():
    fields = to_transformer_config(
        twin_config("qwen3_moe", num_hidden_layers=8),
        tensor_parallel=2,
        pipeline_parallel=2,
        virtual_pipeline=4,
        expert_parallel=4,
        expert_tensor_parallel=1,
        context_parallel=3,
        flags={"moe_grouped_gemm": True},
    )
    assert fields["moe_grouped_gemm"] is True
    assert {k: v for k, v in fields.items() if "parallel" in k} == {
        "tensor_model_parallel_size": 2,
        "pipeline_model_parallel_size": 2,
        "virtual_pipeline_model_parallel_size": 4,
        "context_parallel_size": 3,
        "expert_model_parallel_size": 4,
        "expert_tensor_parallel_size": 1,
        "sequence_parallel": True,
    }


@pytest.mark.parametrize(
    "variant, sizes, match",
    [
        ("qwen3", {"tensor_parallel": 3}, ["num_attention_heads 4", "3"]),
        ("llama-wide-heads", {"tensor_parallel": 3}, ["num_key_value_heads 2", "3"]),
        ("qwen3", {"pipeline_parallel": 2}, ["num_hidden_layers 3", "2"]),
        (
            "qwen3",
            {"pipeline_parallel": 3, "virtual_pipeline": 2},
            ["num_hidden_layers 3", "6"],
        ),
        ("qwen3", {"virtual_pipeline": 3}, ["virtual_pipeline = 3"]),
        ("qwen3", {"expert_parallel": 2}, ["expert = 2", "0 experts"]),
        ("mixtral", {"expert_parallel": 2}, ["moe.num_experts 5", "2"]),
        ("qwen3_moe", {"expert_tensor_parallel": 5}, ["moe.intermediate_size 24", "5"]),
        (
            "qwen3",
            {"sequence_parallel": True},
            ["sequence = True", "tensor", "1"],
        ),
        ("qwen3", {"tensor_parallel": 0}, ["tensor = 0"]),
        ("qwen3", {"flags": {"qk_layernorm": False}}, ["flags", "qk_layernorm"]),
    ],
)
def test_sizes_that_do_not_fit_the_model_are_refused(variant, sizes, match):
    with pytest.raises(ValueError, match=facts(*match)):
        to_transformer_config(twin_config(variant), **sizes)


def test_the_vocabulary_is_padded_for_the_ranks():
    config = twin_config("llama")
    assert to_gpt_model(config)["vocab_size"] == 256
    rows = to_gpt_model(config, tensor_parallel=4, make_vocab_size_divisible_by=10)
    assert rows["vocab_size"] == 160
