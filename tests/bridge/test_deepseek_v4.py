"""DeepSeek-V4: the names of its releases, and what of it is refused."""

import dataclasses
import itertools
import json
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch
from bridge_helpers import (
    abstract_model,
    assert_same_bytes,
    assert_same_leaves,
    load_model,
    logits_of,
    tensors_of,
)
from flax import nnx
from helpers.errors import facts
from safetensors.numpy import save_file
from tiny_configs import hf_fields
from tiny_models import HFModel, hf_logits, make_model
from transformers import AutoModelForCausalLM

import bridge
from bridge.formats._safetensors import encode_header
from bridge.formats.quantized._decode import decode_quantized
from bridge.megatron import to_transformer_config
from bridge.models import (
    DecoderConfig,
    constant_paths,
    correction_bias_paths,
    tensor_parallel_rules,
    token_expert_paths,
)

pytestmark = pytest.mark.torch

RELATIVE = 2e-5  # as test_logits has it
# Names outside of layers, by those that transformers writes; it writes none of a
# release's own there, and another name for the norm of keys.
RELEASED = {
    "model.embed_tokens.": "embed.",
    "model.hc_head.hc_": "hc_head_",
    ".attn.norm.": ".attn.kv_norm.",
    "model.": "",
}
OLD_FIELDS = {
    "compress_ratios": [0, 4, 128, 4, 0],  # the last of a layer for further tokens
    "num_hash_layers": 2,
    "qk_rope_head_dim": 8,
    "compress_rate_hca": 8,
    "rope_theta": 10000.0,
    "compress_rope_theta": 160000.0,
    "rope_scaling": {
        "type": "yarn",
        "factor": 8.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "original_max_position_embeddings": 32,
    },
}
NEW_FIELDS = (
    *("layer_types", "mlp_layer_types", "compress_rates", "rope_parameters"),
    "partial_rotary_factor",
)


@pytest.fixture(scope="module")
def v4(tmp_path_factory) -> HFModel:
    return make_model(tmp_path_factory.mktemp("v4"), "deepseek_v4")


def config_of(**changes) -> DecoderConfig:
    config = bridge.from_hf_config(hf_fields("deepseek_v4"))
    return dataclasses.replace(config, **changes)


def relative_error(ours, theirs) -> float:
    return float(np.abs(np.asarray(ours) - theirs).max() / np.abs(theirs).max())


def released_name(key: str) -> str:
    for written, released in RELEASED.items():
        key = key.replace(written, released)
    return key


def written_with_names_of_releases(path: Path, hf: HFModel) -> None:
    path.mkdir()
    tensors = {released_name(key): t for key, t in tensors_of(hf.path).items()}
    # The code of the release has these as int32.
    tables = {key: t.astype(np.int32) for key, t in tensors.items() if "tid2eid" in key}
    tensors |= tables | {"mtp.0.norm.weight": np.zeros(48, np.float32)}
    save_file(tensors, path / "model.safetensors")
    (path / "config.json").write_text((hf.path / "config.json").read_text())


def test_names_of_the_releases_are_read(tmp_path, v4: HFModel):
    written_with_names_of_releases(tmp_path / "released", v4)
    names = set(tensors_of(tmp_path / "released"))
    assert {"embed.weight", "hc_head_fn", "layers.0.attn.kv_norm.weight"} <= names
    with pytest.warns(UserWarning, match=facts("mtp.0.norm.weight")):
        model = load_model(tmp_path / "released")
    assert relative_error(logits_of(model, v4.tokens), v4.logits) <= RELATIVE


def test_names_in_memory_are_read(tmp_path, v4: HFModel):
    model = AutoModelForCausalLM.from_pretrained(v4.path)
    model.save_pretrained(tmp_path, save_original_format=False)
    ours = load_model(tmp_path)
    assert relative_error(logits_of(ours, v4.tokens), v4.logits) <= RELATIVE


def test_fields_of_the_releases_are_read():
    fields = hf_fields("deepseek_v4")
    old = {k: v for k, v in fields.items() if k not in NEW_FIELDS} | OLD_FIELDS
    assert bridge.from_hf_config(old) == config_of()
    named = bridge.from_hf_config(old | {"model_type": "deepseek_ref"})
    assert named == config_of()


@pytest.mark.parametrize(
    "changes, said",
    [
        ({"compress_ratios": [0, 4, 4, 4]}, ["layer_types", "compress_ratios"]),
        ({"compress_ratios": [0, 4, 16, 4]}, ["compress_ratios", "16"]),
        ({"num_hash_layers": 1}, ["mlp_layer_types", "num_hash_layers = 1"]),
        ({"compress_rates": {"full": 4}}, ["compress_rates", "full"]),
        ({"rope_scaling": {"type": "yarn"}}, ["rope_scaling", "rope_parameters"]),
        ({"n_shared_experts": 2}, ["n_shared_experts = 2"]),
        ({"scoring_func": "softmax"}, ["scoring_func = 'softmax'"]),
        ({"index_head_dim": 6}, ["index_head_dim 6", "8"]),
        ({"o_groups": 3}, ["o_groups 3", "num_attention_heads 4"]),
        ({"num_key_value_heads": 2}, ["num_key_value_heads 2"]),
        ({"hc_mult": 1}, ["num_streams 1"]),
        ({"sliding_window": None}, ["sliding_window"]),
    ],
)
def test_fields_that_contradict_are_refused(changes, said):
    with pytest.raises(ValueError, match=facts(*said)):
        bridge.from_hf_config(hf_fields("deepseek_v4", **changes))


@pytest.mark.parametrize(
    "changes, said",
    [
        ({"compressed_attention": None}, ["compressed_sparse_attention"]),
        ({"qk_norm": "head"}, ["compressed_attention", "qk_norm"]),
        (
            {"layer_types": ("full_attention",) * 4},
            ["layer_types", "sliding_attention"],
        ),
        ({"laurel_rank": 4, "norm_placement": "both"}, ["hyper_connections"]),
        ({"hash_layers": (1, 0)}, ["hash_layers", "[1, 0]"]),
        ({"hash_layers": (9,)}, ["hash_layers", "[9]", "4"]),
        ({"hash_layers": (0,), "dense_layers": (0,)}, ["hash_layers", "[0]"]),
    ],
)
def test_parts_that_do_not_fit_are_refused(changes, said):
    with pytest.raises(ValueError, match=facts(*said)):
        config_of(**changes)


def test_experts_by_token_may_be_of_any_layers(tmp_path):
    types = ["moe", "hash_moe", "moe", "hash_moe"]
    hf = make_model(tmp_path / "in", "deepseek_v4", mlp_layer_types=types)
    model = load_model(hf.path)
    assert model.config.hash_layers == (1, 3)
    assert relative_error(logits_of(model, hf.tokens), hf.logits) <= RELATIVE
    bridge.save_hf(tmp_path / "out", nnx.state(model, nnx.Param), model.config)
    assert_same_bytes(tensors_of(tmp_path / "out"), tensors_of(hf.path))


def test_a_narrower_export_keeps_the_experts_of_tokens(tmp_path, v4: HFModel):
    model, out = load_model(v4.path), tmp_path / "out"
    params = nnx.state(model, nnx.Param)
    bridge.save_hf(out, params, model.config, dtype=jnp.bfloat16)
    tables = {k: t for k, t in tensors_of(out).items() if "tid2eid" in k}
    want = tensors_of(v4.path)
    assert len(tables) == 2
    assert_same_bytes(tables, {key: want[key] for key in tables})
    assert AutoModelForCausalLM.from_pretrained(out).dtype == torch.bfloat16


def test_rows_shorter_than_a_window_have_no_entries(v4: HFModel):
    theirs = AutoModelForCausalLM.from_pretrained(v4.path).eval()
    model = load_model(v4.path)
    for length in (1, 3, 7, 8):
        tokens = v4.tokens[:, :length]
        ours, want = logits_of(model, tokens), hf_logits(theirs, tokens)
        assert relative_error(ours, want) <= RELATIVE


def test_texts_of_a_packed_row_read_as_if_each_were_alone(v4: HFModel):
    """Windows begin with each text, whose last tokens may fill none."""
    model, ends = load_model(v4.path), (0, 3, 18, 40)
    lengths = np.diff(ends)
    segments = np.repeat([np.repeat([5, 2, 7], lengths)], 2, axis=0)
    packed = logits_of(model, v4.tokens, segment_ids=segments)
    alone = [logits_of(model, v4.tokens[:, a:b]) for a, b in itertools.pairwise(ends)]
    assert relative_error(packed, np.concatenate(alone, axis=1)) <= RELATIVE
    one = np.ones_like(segments)
    whole = logits_of(model, v4.tokens, segment_ids=one)
    assert relative_error(whole, v4.logits) <= RELATIVE
    wrong = logits_of(model, v4.tokens)
    assert relative_error(packed, wrong) > 100 * RELATIVE


def test_parts_of_rows_are_refused():
    with pytest.raises(ValueError, match=facts("compressed_attention", "cp=1")):
        abstract_model(config_of(), positions=lambda tokens: tokens)


def test_a_router_that_does_not_choose_is_not_run_without_experts(v4: HFModel):
    layer = load_model(v4.path).layers[0]
    layer = jax.tree.map(lambda leaf: leaf[0], layer)
    with pytest.raises(ValueError, match=facts("hash_layers")):
        layer.mlp(jnp.zeros((1, 3, 48)))


def test_a_table_in_a_dtype_that_mixes_experts_up_is_refused():
    config = config_of()
    assert config.moe is not None
    wide = dataclasses.replace(
        config, moe=dataclasses.replace(config.moe, num_experts=300)
    )
    model = abstract_model(wide)
    halved = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, jnp.bfloat16), model
    )
    tokens = jax.ShapeDtypeStruct((1, 4), jnp.int32)
    with pytest.raises(
        ValueError, match=facts("token_experts.table", "bfloat16", "256", "300")
    ):
        jax.eval_shape(logits_of, halved, tokens)


def test_what_no_gradient_trains_is_named():
    config = config_of()
    frozen = constant_paths(config) + correction_bias_paths(config)
    assert token_expert_paths(config) == ("token_experts.table",)
    assert set(token_expert_paths(config)) < set(frozen)
    params = nnx.state(abstract_model(config), nnx.Param)
    names = {
        re.sub(r"[\[\]'.]+", ".", jax.tree_util.keystr(path)).strip(".")
        for path, _ in jax.tree_util.tree_flatten_with_path(params)[0]
    }
    names = {name.removesuffix(".value") for name in names}
    assert set(frozen) <= names
    indexers = {name for name in names if ".indexer." in name}
    assert indexers == {name for name in frozen if ".indexer." in name}


def test_groups_of_heads_are_split_whole():
    rules = tensor_parallel_rules(config_of(), 2)
    assert {rules[path] for path in rules if path.endswith("o_a_proj.kernel")} == {-4}
    with pytest.raises(ValueError, match=facts("o_groups 2", "4")):
        tensor_parallel_rules(config_of(), 4)


def test_megatron_has_no_such_model():
    said = ["hyper_connections", "compressed_attention", "hash_layers"]
    with pytest.raises(ValueError, match=facts(*said)):
        to_transformer_config(config_of())


def test_chosen_experts_are_those_of_tokens_and_can_be_replayed(v4: HFModel):
    model, tokens = load_model(v4.path), jnp.asarray(v4.tokens)
    chosen = model.chosen_experts(tokens)
    table = tensors_of(v4.path)["model.layers.1.ffn.gate.tid2eid"]
    np.testing.assert_array_equal(chosen[1], table[v4.tokens])
    states, stats = model.final_states(tokens, experts=chosen)
    assert stats is not None and stats.tokens_per_expert.shape == (4, 2, 8)
    assert relative_error(model.logits(states), v4.logits) <= RELATIVE


def test_a_checkpoint_is_converted_without_loading_it(tmp_path, v4: HFModel):
    written_with_names_of_releases(tmp_path / "released", v4)
    with pytest.warns(UserWarning, match=facts("mtp.0.norm.weight")):
        tree, config = bridge.lazy_hf(tmp_path / "released")
    bridge.save_hf(tmp_path / "out", tree, config)
    assert_same_bytes(tensors_of(tmp_path / "out"), tensors_of(v4.path))


E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
E8M0 = np.dtype(ml_dtypes.float8_e8m0fnu)
BF16 = np.dtype(ml_dtypes.bfloat16)
# Of the values 0 to 6 of E2M1, by their four bits.
FP4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], "f4")
QUANTIZED = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "scale_fmt": "ue8m0",
    "activation_scheme": "dynamic",
    "weight_block_size": [16, 16],
}
IN_FP8 = ("wq_a.weight", "wq_b.weight", "wkv.weight", "wo_a.weight", "wo_b.weight")


def in_fp8(random, shape) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """A weight, its scales of blocks, and what they stand for."""
    weight = random.normal(size=shape).astype(E4M3)
    grid = tuple(-(-size // 16) for size in shape)
    scales = np.exp2(random.integers(-6, 0, grid)).astype("f4")
    wide = scales.repeat(16, 0).repeat(16, 1)[: shape[0], : shape[1]]
    return weight, scales.astype(E8M0), (weight.astype("f4") * wide).astype(BF16)


def in_fp4(random, shape) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The same of experts: two values a byte, the first in its lower bits."""
    codes = random.integers(0, 16, shape)
    packed = (codes[:, 0::2] | codes[:, 1::2] << 4).astype(np.uint8).view(np.int8)
    scales = np.exp2(random.integers(-6, 0, (shape[0], shape[1] // 32))).astype("f4")
    wanted = FP4[codes] * scales.repeat(32, 1)
    return packed, scales.astype(E8M0), wanted.astype(BF16)


def test_weights_of_the_releases_are_decoded(tmp_path):
    sizes = {"hidden_size": 64, "moe_intermediate_size": 32}
    hf = make_model(tmp_path / "in", "deepseek_v4", dtype=torch.bfloat16, **sizes)
    stored, wanted, random = {}, {}, np.random.default_rng(0)
    for key, tensor in tensors_of(hf.path).items():
        pack = in_fp4 if ".experts." in key else in_fp8
        if ".experts." in key or key.endswith(IN_FP8):
            weight, scale, wanted[key] = pack(random, tensor.shape)
            stored |= {key: weight, key.removesuffix("weight") + "scale": scale}
        else:
            stored[key] = wanted[key] = tensor
    fields = json.loads((hf.path / "config.json").read_text())
    more = {"quantization_config": QUANTIZED, "expert_dtype": "fp4"}
    quantized = written(tmp_path / "quantized", stored, fields | more)
    plain = written(tmp_path / "plain", wanted, fields)
    got, want = (load_model(path, jnp.bfloat16) for path in (quantized, plain))
    assert_same_leaves(nnx.state(got, nnx.Param), nnx.state(want, nnx.Param))


def written(path: Path, tensors: dict[str, np.ndarray], fields: dict) -> Path:
    path.mkdir()
    entries = {key: (array.shape, array.dtype) for key, array in tensors.items()}
    data = b"".join(array.tobytes() for array in tensors.values())
    (path / "model.safetensors").write_bytes(encode_header(entries) + data)
    (path / "config.json").write_text(json.dumps(fields))
    return path


@pytest.mark.parametrize(
    "scale, said",
    [
        (np.ones((4, 3), E8M0), ["w.scale", "(4, 3)", "(4, 2)"]),
        (np.ones((4, 2), "f4"), ["w.scale", "float32"]),
    ],
)
def test_scales_that_do_not_fit_packed_values_are_named(tmp_path, scale, said):
    tensors = {"w.weight": np.zeros((4, 32), np.int8), "w.scale": scale}
    source = bridge.open_checkpoint(written(tmp_path / "in", tensors, {}))
    with pytest.raises(ValueError, match=facts(*said)):
        decode_quantized(source, QUANTIZED)


def test_a_box_of_packed_values_is_the_part_of_the_whole(tmp_path):
    weight, scale, want = in_fp4(np.random.default_rng(1), (6, 96))
    path = written(tmp_path / "in", {"w.weight": weight, "w.scale": scale}, {})
    source = decode_quantized(bridge.open_checkpoint(path), QUANTIZED)
    assert source.keys() == ("w.weight",) and source.shape("w.weight") == (6, 96)
    for box in ((slice(1, 4), slice(5, 70)), (slice(0, 6), slice(33, 34)), ()):
        np.testing.assert_array_equal(source.read("w.weight", box), want[box])


def test_a_table_of_integers_goes_through_a_rule_and_back():
    rule = bridge.Rule("table", "ids", "rows columns -> rows columns", integers="int64")
    state = {"table": torch.tensor([[1, 383], [0, 255]])}
    like = {"ids": jax.ShapeDtypeStruct((2, 2), jnp.float32)}
    tree = bridge.from_torch(state, like, [rule])
    np.testing.assert_array_equal(tree["ids"], state["table"].numpy())
    back = bridge.to_torch(tree, [rule])
    assert back["table"].dtype == torch.int64
    assert torch.equal(back["table"], state["table"])
    plain = dataclasses.replace(rule, integers=None)
    with pytest.raises(ValueError, match=facts("table", "int64", "float32")):
        bridge.from_torch(state, like, [plain])
