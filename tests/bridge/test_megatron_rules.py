"""Megatron's tensors are our leaves, bit for bit, whoever wrote them."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from bridge_helpers import (
    abstract_model,
    assert_same_bytes,
    assert_same_leaves,
    like_of,
    logits_of,
    tensors_of,
)
from flax import nnx
from helpers.errors import facts
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding, PartitionSpec
from megatron_oracle import by_hand
from megatron_variants import GOLDENS, WITH, WITHOUT, twin_config

import bridge
from bridge._tree import named_leaves
from bridge.formats._source import Source
from bridge.megatron import (
    decoder_source,
    megatron_tensors,
    open_megatron,
    weight_mapping,
)
from bridge.megatron.read._regrouped import Regrouped
from bridge.streaming._load import load


@pytest.fixture(params=GOLDENS.values(), ids=GOLDENS)
def pair(request, golden):
    """What Megatron wrote, and its Hugging Face twin."""
    name, kind, twin = request.param
    return golden(name) / kind, golden(twin)


# What Megatron wrote


def test_all_leaves_are_those_of_the_hugging_face_twin(pair):
    megatron, twin = pair
    config = bridge.from_hf_config(twin / "hf")
    like = like_of(config, jnp.dtype(config.dtype))
    ours = bridge.load_megatron(megatron, like)
    assert_same_leaves(ours, bridge.load_hf(twin / "hf", like))
    assert {leaf.dtype.name for leaf in jax.tree.leaves(ours)} == {config.dtype}


def test_logits_are_those_that_megatron_computed(pair):
    megatron, twin = pair
    golden = tensors_of(twin / "golden.safetensors")
    config = bridge.megatron.from_args(open_megatron(megatron).args)
    graph, like = nnx.split(abstract_model(config, jnp.float32))
    model = nnx.merge(graph, bridge.load_megatron(megatron, like))
    logits = np.asarray(logits_of(model, golden["input_ids"]))
    theirs = golden["logits_megatron"]
    assert np.abs(logits - theirs).max() <= 1e-5 * np.abs(theirs).max()


def test_query_heads_in_another_order_give_other_logits(golden):
    """The control: groups of queries that met the wrong key would be seen."""
    path, twin = golden("mixtral") / "torch_dist", golden("mixtral")
    config = bridge.megatron.from_args(open_megatron(path).args)
    graph, like = nnx.split(abstract_model(config, jnp.float32))
    weights = bridge.load_megatron(path, like)
    swapped = jax.tree.map_with_path(
        lambda path, x: x[:, :, ::-1] if "q_proj" in jax.tree_util.keystr(path) else x,
        weights,
    )
    golden_ = tensors_of(twin / "golden.safetensors")
    logits = logits_of(nnx.merge(graph, swapped), golden_["input_ids"])
    assert np.abs(np.asarray(logits) - golden_["logits_megatron"]).max() > 0.1


def test_shards_on_eight_devices_are_the_whole(golden):
    path = golden("mixtral") / "torch_dist"
    config = bridge.megatron.from_args(open_megatron(path).args)
    kinds = (jax.sharding.AxisType.Auto,) * 2
    mesh = jax.make_mesh((2, 4), ("two", "four"), axis_types=kinds)
    like = like_of(config)
    sharded = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(
            leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, _spec(leaf.shape))
        ),
        like,
    )
    loaded = bridge.load_megatron(path, sharded)
    query = loaded["layers"]["self_attn"]["q_proj"]["kernel"]
    assert query.sharding.spec == PartitionSpec(None, None, "four", "two")
    assert_same_leaves(loaded, bridge.load_megatron(path, like))
    again = megatron_tensors(loaded, config)
    written = decoder_source(open_megatron(path).source, config)
    for key in again.keys():
        np.testing.assert_array_equal(
            again.read(key).reshape(-1), written.read(key).reshape(-1)
        )


def _spec(shape: tuple[int, ...]) -> PartitionSpec:
    """Shards the last dims that can be: of a projection the heads, and their dims."""
    axes, left = [], {"two": 2, "four": 4}
    for size in reversed(shape):
        fitting = [axis for axis, n in left.items() if size % n == 0]
        axes.append(fitting[0] if fitting else None)
        left = {axis: n for axis, n in left.items() if axis not in fitting[:1]}
    return PartitionSpec(*reversed(axes))


# Every family


def random_params(config, dtype=np.float32):
    random = np.random.default_rng(0)
    return jax.tree.map(
        lambda leaf: random.normal(size=leaf.shape).astype(leaf.dtype),
        like_of(config, dtype),
    )


@pytest.mark.each_case
@pytest.mark.parametrize("variant", WITH)
def test_any_familys_tensors_are_megatrons_and_come_back(variant, tmp_path):
    config = twin_config(variant)
    params = random_params(config)
    source = megatron_tensors(params, config)
    tensors = {key: source.read(key) for key in source.keys()}
    bridge.save_hf(tmp_path / "hf", params, config)
    assert_same_bytes(tensors, by_hand(tensors_of(tmp_path / "hf"), config))
    again = load(
        decoder_source(source, config), weight_mapping(config), like_of(config)
    )
    assert_same_leaves(again, params)


@pytest.mark.parametrize("variant", WITHOUT)
def test_a_family_without_a_twin_is_refused_before_anything_is_done(variant, tmp_path):
    config = twin_config(variant)
    for run in (
        lambda: megatron_tensors({}, config),
        lambda: bridge.save_megatron(tmp_path / "out", {}, config),
    ):
        with pytest.raises(ValueError, match=facts(WITHOUT[variant])):
            run()
    assert not any(tmp_path.iterdir())


FILES: dict[str, dict[str, Any]] = {
    "qwen3": {"tensor_parallel": 2, "pipeline_parallel": 3},
    "qwen2-yarn": {"tensor_parallel": 2},
    "mixtral": {"pipeline_parallel": 3},
    "qwen2_moe-mixed": {"pipeline_parallel": 2, "virtual_pipeline": 2},
    "qwen3_moe": {"tensor_parallel": 2, "expert_parallel": 4},
    "gpt_oss": {"expert_parallel": 2},
    "gpt2": {"tensor_parallel": 4},
    "deepseek_v3": {"tensor_parallel": 2, "expert_parallel": 2},
}


@pytest.mark.parametrize("format", ["torch_dist", "legacy"])
@pytest.mark.parametrize("variant", FILES)
def test_what_we_write_is_the_same_model_again(variant, format, tmp_path):
    config = twin_config(variant)
    params = random_params(config)
    sizes: dict[str, Any] = FILES[variant] if format == "legacy" else {}
    bridge.save_megatron(tmp_path / "run", params, config, format=format, **sizes)
    again = bridge.load_megatron(tmp_path / "run", like_of(config))
    assert_same_leaves(again, params)


def test_settings_in_the_file_are_the_config(tmp_path):
    config = twin_config("qwen3", dtype="float32")
    params = random_params(config, jnp.bfloat16)  # which is what the file says
    bridge.save_megatron(
        tmp_path / "run", params, config, make_vocab_size_divisible_by=50
    )
    args = open_megatron(tmp_path / "run").args
    assert (args["vocab_size"], args["padded_vocab_size"]) == (131, 150)
    found = bridge.megatron.from_args(args, model_type="qwen3")
    tokens = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    expected = dataclasses.replace(config, dtype="bfloat16")
    assert dataclasses.replace(found, **tokens) == expected


def test_the_vocabularys_padding_is_zeros_in_the_file_and_nowhere_else(tmp_path):
    config = twin_config("llama")
    params = random_params(config)
    bridge.save_megatron(tmp_path / "run", params, config)
    source = open_megatron(tmp_path / "run").source
    for key in ("embedding.word_embeddings.weight", "output_layer.weight"):
        rows = source.read(key)
        assert rows.shape == (256, 48)
        assert rows[:131].any(axis=1).all() and not rows[131:].any()


# What is read, and what is refused


class Counted:
    """A source in memory that counts the numbers read."""

    name = "memory"

    def __init__(self, tensors):
        self.tensors, self.count = tensors, 0

    def keys(self):
        return tuple(self.tensors)

    def shape(self, key):
        return self.tensors[key].shape

    def dtype(self, key):
        return self.tensors[key].dtype

    def read(self, key, slices=()):
        part = self.tensors[key][slices]
        self.count += part.size
        return part


def counted(tensors: dict[str, np.ndarray]) -> Counted:
    source: Source = Counted(tensors)
    assert isinstance(source, Counted)
    return source


@settings(deadline=None, max_examples=100)
@given(st.data())
def test_a_box_of_factors_is_read_to_the_number(data):
    factors = tuple(data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))
    rest = tuple(data.draw(st.lists(st.integers(1, 3), max_size=2)))
    values = np.arange(np.prod((*factors, *rest))).reshape(-1, *rest)
    source = counted({"w": values})
    seen = Regrouped(source, {"w": (*factors, *rest)})
    assert seen.shape("w") == (*factors, *rest)
    ends = [
        sorted(data.draw(st.tuples(st.integers(0, n), st.integers(0, n))))
        for n in (*factors, *rest)
    ]
    index = tuple(slice(*pair) for pair in ends)
    box = seen.read("w", index)
    np.testing.assert_array_equal(box, values.reshape(*factors, *rest)[index])
    assert source.count == box.size


def test_a_shard_of_heads_reads_its_own_rows_alone(bytes_read, tmp_path):
    config = twin_config("llama-wide-heads")
    params = random_params(config)
    bridge.save_megatron(tmp_path / "run", params, config)
    source = decoder_source(open_megatron(tmp_path / "run").source, config)
    key = "decoder.layers.1.self_attention.linear_qkv.weight"
    source.read(key, (slice(0, 1),))  # opens the archive of the tensor
    bytes_read.clear()
    group = source.read(key, (slice(1, 2), slice(0, 3)))
    assert group.shape == (1, 3, 32, 48)
    assert group.nbytes <= sum(bytes_read) < 1.2 * group.nbytes


def test_threads_that_read_one_tensor_verify_its_checksum_once(bytes_read, tmp_path):
    config = twin_config("llama", vocab_size=64_000)  # 12 MB: several bands
    params = random_params(config)
    bridge.save_megatron(tmp_path / "run", params, config)
    bytes_read.clear()
    bridge.load_megatron(tmp_path / "run", like_of(config))
    weights = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    assert weights <= sum(bytes_read) <= 2.1 * weights


def test_a_checkpoint_of_another_model_is_refused_with_all_that_differs(
    golden, bytes_read
):
    path = golden("qwen3") / "torch_dist"
    right = bridge.megatron.from_args(open_megatron(path).args)
    other = dataclasses.replace(
        right, intermediate_size=80, tie_word_embeddings=False, num_key_value_heads=4
    )
    bytes_read.clear()
    with pytest.raises(ValueError) as error:
        bridge.load_megatron(path, like_of(other), config=other)
    for part in (
        "output_layer.weight",
        "layers.{0-3}.mlp.linear_fc1.weight: (144, 48), the config says (160, 48)",
        "layers.{0-3}.self_attention.linear_qkv.weight: (128, 48)",
    ):
        assert part in str(error.value)
    assert sum(bytes_read) < 2e6  # the metadata


def test_a_tree_of_several_dtypes_in_one_tensor_is_refused():
    config = twin_config("llama")
    leaves = named_leaves(random_params(config))
    name = "layers.self_attn.k_proj.kernel"
    leaves[name] = leaves[name].astype(jnp.bfloat16)
    with pytest.raises(
        ValueError,
        match=facts("decoder.layers.0.self_attention.linear_qkv.weight", "dtype"),
    ):
        megatron_tensors(_nested(leaves), config)


@pytest.mark.parametrize("variant, fits", [("deepseek_v3", True), ("llama", False)])
def test_layers_that_predict_further_tokens_are_left_out_where_files_have_them(
    variant, fits
):
    config = twin_config(variant)
    passthrough = {
        **dict(config.passthrough),
        **({"num_nextn_predict_layers": 1} if fits else {}),
    }
    config = dataclasses.replace(config, passthrough=tuple(passthrough.items()))
    params = random_params(config)
    tensors = megatron_tensors(params, config)
    held = {key: tensors.read(key) for key in tensors.keys()}
    further = {"mtp.layers.0.eh_proj.weight": np.ones((48, 96), np.float32)}
    source = decoder_source(counted(held | further), config)
    if fits:
        again = load(source, weight_mapping(config), like_of(config))
        assert_same_leaves(again, params)
    else:
        with pytest.raises(
            ValueError, match=facts("(1)", "mtp.layers.0.eh_proj.weight")
        ):
            load(source, weight_mapping(config), like_of(config))


def _nested(leaves):
    tree = {}
    for name, leaf in leaves.items():
        *path, last = name.split(".")
        inner = tree
        for part in path:
            inner = inner.setdefault(part, {})
        inner[last] = leaf
    return tree


def test_sizes_that_do_not_divide_the_model_are_refused_together(tmp_path):
    config = twin_config("qwen3_moe")
    with pytest.raises(ValueError) as error:
        bridge.save_megatron(
            tmp_path / "run",
            random_params(config),
            config,
            format="legacy",
            tensor_parallel=3,
            pipeline_parallel=2,
            expert_parallel=5,
        )
    for part in ("num_attention_heads 4", "num_hidden_layers 3", "moe.num_experts 8"):
        assert part in str(error.value)
    assert not any(tmp_path.iterdir())
