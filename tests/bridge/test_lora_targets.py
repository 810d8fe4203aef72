"""`lora_targets`: the matrices with factors, and how many of their dims are inputs."""

import dataclasses

import pytest
from helpers.errors import facts
from tiny_configs import hf_fields

import bridge
from bridge.models import DecoderConfig

CONFIG = DecoderConfig(
    vocab_size=64,
    hidden_size=16,
    intermediate_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=4,
)


# GPT-2 stores its matrices as (in, out), Llama as (out, in); here both are (in, out).
@pytest.mark.parametrize("model_type", ["llama", "gpt2"])
def test_an_output_of_attention_has_two_input_dims_however_it_is_stored(model_type):
    config = dataclasses.replace(CONFIG, model_type=model_type)
    targets = bridge.lora_targets(config, ["all-linear"])
    num_in = {leaf.split(".")[-2]: count for leaf, count in targets.items()}
    assert num_in.pop("o_proj") == 2  # Heads, and dims of a head.
    assert {"up_proj", "down_proj"} <= num_in.keys()
    assert set(num_in.values()) == {1}


@pytest.mark.parametrize("variant", ["mamba2", "nemotron_h", "deepseek_v3"])
def test_a_refusal_names_the_modules_that_may_have_factors(variant):
    config = bridge.from_hf_config(hf_fields(variant))
    with pytest.raises(ValueError, match=facts("no_proj", "lm_head")) as refused:
        bridge.lora_targets(config, ["no_proj"])
    named = str(refused.value).rpartition(" are ")[2].rstrip(".").split(", ")
    assert bridge.lora_targets(config, named) and "norm" not in named
