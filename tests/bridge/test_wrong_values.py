"""Values of a wrong type or size are refused by name, not by an internal error."""

import numpy as np
import pytest
from helpers.errors import facts
from tiny_configs import hf_fields

import bridge
from bridge._box import Range
from bridge._reorder import copy
from bridge.formats._safetensors import encode_header
from bridge.megatron import from_transformer_config, to_transformer_config
from bridge.megatron._tiling import Tile, tile
from bridge.models import DecoderConfig, DeltaNetConfig

F32 = np.dtype(np.float32)
FIELDS = {
    "heads of text": ("llama", "num_attention_heads", "x", "'x'"),
    "heads of a list": ("llama", "num_attention_heads", [1, 2], "(1, 2)"),
    "ropes that are true": ("deepseek_v4", "rope_parameters", True, "rope_parameters"),
    "a bound of text": ("bailing_hybrid", "kda_lower_bound", "x", "'x'"),
    "more dims than any": ("gpt_neox", "rotary_pct", 1e308, "1e+308"),
    "more dims than a head": ("gpt_neox", "rotary_pct", 1.5, "1.5"),
}


@pytest.mark.parametrize("variant, name, value, fact", FIELDS.values(), ids=FIELDS)
def test_a_field_of_a_file_is_refused_by_name(variant, name, value, fact):
    with pytest.raises(ValueError, match=facts(fact)):
        bridge.from_hf_config(hf_fields(variant, **{name: value}))


@pytest.mark.parametrize("heads", ["x", (1, 2), 2.0])
def test_heads_of_a_config_that_are_no_number_are_refused(heads):
    with pytest.raises(ValueError, match=facts("num_attention_heads", repr(heads))):
        DecoderConfig(64, 16, 32, num_hidden_layers=2, num_attention_heads=heads)


def test_a_bound_of_decays_that_is_no_number_is_refused():
    with pytest.raises(ValueError, match=facts("decay_bound", "'x'")):
        DeltaNetConfig(1, 1, 4, 4, decay_bound="x")  # pyright: ignore


def test_every_zeroth_layer_of_megatron_is_refused():
    config = bridge.from_hf_config(hf_fields("qwen3_moe"))
    fields = to_transformer_config(config) | {"moe_layer_freq": 0}
    with pytest.raises(ValueError, match=facts("moe_layer_freq = 0")):
        from_transformer_config(fields, vocab_size=config.vocab_size)


def test_a_dtype_that_safetensors_has_none_of_is_named():
    entries = {"a": ((2,), np.dtype(np.complex128)), "b": ((2,), F32)}
    with pytest.raises(ValueError, match=facts("'a'", "complex128")) as error:
        encode_header(entries)
    assert "'b'" not in str(error.value)


def test_a_tensor_with_the_name_of_metadata_is_refused():
    with pytest.raises(ValueError, match=facts("'__metadata__'")):
        encode_header({"__metadata__": ((2,), F32), "a": ((2,), F32)})


def test_numbers_of_sixteen_bytes_are_copied():
    source = np.arange(6).reshape(2, 3) * (1 + 2j)
    copied = np.empty((3, 2), np.complex128).T
    copy(copied, source)
    np.testing.assert_array_equal(copied, source)


def test_parts_cut_out_of_one_another_too_often_are_refused():
    count = 2000
    tiles = [
        Tile((Range(n, n + 1), Range(n, count)), n)
        if half == 0
        else Tile((Range(n + 1, count), Range(n, n + 1)), n)
        for n in range(count)
        for half in range(2)
        if half == 0 or n + 1 < count
    ]
    box = (Range(0, count), Range(0, count))
    with pytest.raises(ValueError, match=facts("3,999 parts")):
        tile(box, tiles)
