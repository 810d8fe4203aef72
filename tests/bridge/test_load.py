"""Loading fills any like, reads each byte once, and refuses what does not fit."""

import dataclasses
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from bridge_helpers import (
    HF_CONFIG,
    assert_same_leaves,
    like_of,
    random_tensors,
    write_llama,
)
from flax import nnx
from helpers.errors import facts
from jax.sharding import NamedSharding, PartitionSpec

import bridge
from bridge._box import Range, shape_of
from bridge._tree import named_leaves
from bridge.formats._safetensors import encode_header
from bridge.hf._config import find_family
from bridge.streaming import _bands
from bridge.streaming._fill import start_piece
from bridge.streaming._load import load
from bridge.streaming._shards import single
from bridge.streaming._workers import workers

CONFIG = bridge.from_hf_config(HF_CONFIG)
# Dims that 8 devices divide, one way of sharding each.
SPECS = {
    "rows of the file": {
        "k_proj": (None, None, None, "x"),
        "up_proj": (None, None, "x"),
    },
    "whole heads": {"q_proj": (None, None, "x"), "o_proj": (None, "x")},
    "inside heads": {"q_proj": (None, None, None, "x"), "o_proj": (None, None, "x")},
    "columns of the file": {"q_proj": (None, "x"), "down_proj": (None, "x")},
    "the embedding": {"embed_tokens": (None, "x"), "lm_head": ("x",), "norm": ("x",)},
    "nothing": {},
}


def mesh():
    return jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))


def sharded(like, specs):
    """Gives each leaf whose path holds a key of `specs` that spec."""

    def shard(path, leaf):
        name = jax.tree_util.keystr(path)
        spec = next((s for key, s in specs.items() if f"'{key}'" in name), ())
        sharding = NamedSharding(mesh(), PartitionSpec(*spec))
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    return jax.tree.map_with_path(shard, like)


def test_every_leaf_is_its_tensor_as_the_names_say(llama):
    leaves = named_leaves(bridge.load_hf(llama, like_of(CONFIG)))
    tensors = random_tensors(np.float32)
    query = tensors["model.layers.2.self_attn.q_proj.weight"]
    kernel = leaves["layers.self_attn.q_proj.kernel"]
    np.testing.assert_array_equal(kernel[2, 5, 3, 1], query[3 * 16 + 1, 5])
    np.testing.assert_array_equal(kernel[2].reshape(48, 128), query.T)
    out = tensors["model.layers.1.self_attn.o_proj.weight"]
    kernel = leaves["layers.self_attn.o_proj.kernel"]
    np.testing.assert_array_equal(kernel[1].reshape(128, 48), out.T)
    np.testing.assert_array_equal(leaves["lm_head.kernel"], tensors["lm_head.weight"].T)


@pytest.mark.parametrize("specs", SPECS.values(), ids=SPECS)
def test_a_sharded_abstract_tree_is_filled_as_an_unsharded_one(
    llama, bytes_read, specs
):
    whole = bridge.load_hf(llama, like_of(CONFIG))
    bytes_read.clear()
    like = sharded(like_of(CONFIG), specs)
    params = bridge.load_hf(llama, like)
    assert_same_leaves(params, whole)
    assert jax.tree.all(
        jax.tree.map(lambda p, m: p.sharding == m.sharding, params, like)
    )
    # However it is cut, eight shards read no byte twice.
    assert sum(bytes_read) == sum(t.nbytes for t in random_tensors(np.float32).values())


def test_a_sharded_stack_of_layers_is_filled_as_an_unsharded_one(llama):
    devices = np.array(jax.devices()[:3])
    sharding = NamedSharding(jax.sharding.Mesh(devices, ("x",)), PartitionSpec("x"))
    like = like_of(CONFIG)
    cut = jax.tree.map(
        lambda m: jax.ShapeDtypeStruct(
            m.shape, m.dtype, sharding=sharding if m.shape[0] == 3 else None
        ),
        like,
    )
    assert_same_leaves(bridge.load_hf(llama, cut), bridge.load_hf(llama, like))


def test_one_device_of_eight_reads_an_eighth_of_the_bytes(llama, bytes_read):
    source = bridge.open_checkpoint(llama)
    key = "model.layers.1.mlp.down_proj.weight"  # [embed, mlp] in the file
    rule = bridge.Rule(key, "w", "embed mlp -> mlp embed")
    (piece,) = bridge.Mapping((rule,), {"embed": 48, "mlp": 80}).pieces
    box = (Range(0, 80), Range(12, 18))
    shard = np.empty(shape_of(box), np.float32)
    with workers() as pool:
        for future in start_piece(pool, source, piece, single(box, shard)):
            future.result()
    assert sum(bytes_read) == 80 * 48 * 4 / 8
    np.testing.assert_array_equal(shard, source.read(key)[12:18].T)


@pytest.mark.parametrize(
    "stored, wanted", [("bf16", jnp.float32), ("f32", jnp.bfloat16)]
)
def test_the_dtype_of_the_abstract_tree_wins(llama, llama_bf16, stored, wanted):
    path = llama if stored == "f32" else llama_bf16
    tensors = random_tensors(np.float32 if stored == "f32" else jnp.bfloat16)
    leaves = named_leaves(bridge.load_hf(path, like_of(CONFIG, wanted)))
    up = tensors["model.layers.1.mlp.up_proj.weight"].T.astype(wanted)
    assert leaves["layers.mlp.up_proj.kernel"].dtype == wanted
    np.testing.assert_array_equal(leaves["layers.mlp.up_proj.kernel"][1], up)


def test_a_leaf_without_a_sharding_is_on_the_default_device(llama):
    leaves = named_leaves(bridge.load_hf(llama, like_of(CONFIG)))
    assert {d for leaf in leaves.values() for d in leaf.devices()} == {jax.devices()[0]}


def test_an_abstract_tree_may_be_any_tree(llama):
    state = like_of(CONFIG)
    nested = nnx.to_pure_dict(state)
    params = bridge.load_hf(llama, nested)
    assert jax.tree.structure(params) == jax.tree.structure(nested)
    flat = bridge.load_hf(llama, named_leaves(state))
    assert_same_leaves(flat, named_leaves(params))


def test_progress_counts_every_byte_once(llama):
    calls = []
    bridge.load_hf(
        llama,
        like_of(CONFIG),
        progress=lambda done, total: calls.append((done, total)),
    )
    total = sum(t.nbytes for t in random_tensors(np.float32).values())
    assert calls[-1] == (total, total) and len(calls) == 30
    assert [done for done, _ in calls] == sorted({done for done, _ in calls})


def test_tied_and_stale_tensors_are_left_in_the_file(tmp_path):
    tensors = random_tensors(np.float32)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    tensors["model.layers.1.self_attn.rotary_emb.inv_freq"] = np.ones(8, np.float32)
    path = write_llama(tmp_path / "in", tensors=tensors, tie_word_embeddings=True)
    config = bridge.from_hf_config(path)
    params = bridge.load_hf(path, like_of(config))
    assert "lm_head.kernel" not in named_leaves(params)


def test_a_single_file_is_loaded_with_the_config_beside_it_or_a_given_one(
    llama, tmp_path
):
    whole = bridge.load_hf(llama, like_of(CONFIG))
    file = llama / "model.safetensors"
    assert_same_leaves(bridge.load_hf(file, like_of(CONFIG)), whole)
    alone = tmp_path / "alone.safetensors"
    alone.write_bytes(file.read_bytes())
    with pytest.raises(FileNotFoundError, match=facts("config.json")):
        bridge.load_hf(alone, like_of(CONFIG))
    params = bridge.load_hf(alone, like_of(CONFIG), config=CONFIG)
    assert_same_leaves(params, whole)


def test_missing_unexpected_and_mismatched_are_one_error_before_any_read(
    tmp_path, bytes_read
):
    tensors = random_tensors(np.float32)
    del tensors["model.norm.weight"]
    tensors["model.layers.3.mlp.up_proj.weight"] = np.ones((2, 2), np.float32)
    tensors["lm_head.weight"] = np.ones((48, 131), np.float32)
    path = write_llama(tmp_path / "in", tensors=tensors)
    like = named_leaves(like_of(dataclasses.replace(CONFIG, hidden_size=64)))
    del like["norm.scale"]
    with pytest.raises(ValueError) as error:
        bridge.load_hf(path, like)
    for line in (
        "missing in the tree (1):\n    norm.scale",
        "embed_tokens.embedding: (131, 64), the config says (131, 48)",
        "missing in the checkpoint (1):\n    model.norm.weight",
        "unexpected in the checkpoint (1):\n    model.layers.3.mlp.up_proj.weight",
        "lm_head.weight: (48, 131), the config says (131, 48)",
    ):
        assert line in str(error.value)
    assert bytes_read == []


def test_an_abstract_tree_that_cannot_be_sharded_so_is_refused_before_any_read(
    llama, bytes_read
):
    like = sharded(like_of(CONFIG), {"embed_tokens": ("x",), "lm_head": (None, "x")})
    with pytest.raises(
        ValueError, match=facts("embed_tokens.embedding", "lm_head.kernel")
    ):
        bridge.load_hf(llama, like)
    assert bytes_read == []


def test_a_leaf_of_64_bits_is_not_narrowed_in_silence():
    class Counts:
        def state_dict(self):
            return {"n": np.array([2**40 + 5, -3]), "x": np.array([1 / 3])}

    state = Counts().state_dict()
    with pytest.raises(ValueError, match=facts("n (int64)", "x (float64)")):
        bridge.from_torch(state, dict(state))
    with jax.enable_x64(True):
        found = bridge.from_torch(state, dict(state))
    assert {k: v.tolist() for k, v in found.items()} == {
        k: v.tolist() for k, v in state.items()
    }


def test_integers_are_not_cast_to_floats(tmp_path):
    tensors = random_tensors(np.float32)
    tensors["model.norm.weight"] = np.ones(48, np.int64)
    path = write_llama(tmp_path / "in", tensors=tensors)
    with pytest.raises(
        ValueError, match=facts("model.norm.weight", "int64", "float32")
    ):
        bridge.load_hf(path, like_of(CONFIG))


@pytest.mark.parametrize(
    "like, match",
    [
        ({"a.b": jnp.ones(1), "a": {"b": jnp.ones(1)}}, ["a.b"]),
        ({"a": 3}, ["a", "int"]),
    ],
)
def test_a_tree_whose_leaves_cannot_be_named_is_refused(llama, like, match):
    with pytest.raises(ValueError, match=facts(*match)):
        bridge.load_hf(llama, like)


def test_float8_is_read_and_widened(tmp_path):
    values = np.linspace(-4, 4, 6).astype(jnp.float8_e4m3fn)
    header = encode_header({"w": ((6,), values.dtype)})
    (tmp_path / "a.safetensors").write_bytes(header + values.tobytes())
    source = bridge.open_checkpoint(tmp_path / "a.safetensors")
    mapping = bridge.Mapping((bridge.Rule("w", "w", "a -> a"),), {"a": 6})
    like = {"w": jax.ShapeDtypeStruct((6,), jnp.float32)}
    np.testing.assert_array_equal(
        load(source, mapping, like)["w"], values.astype(np.float32)
    )


@dataclasses.dataclass(frozen=True)
class Failing:
    """A checkpoint whose disk fails in the middle; only what a source must have."""

    inner: bridge.Source

    name = "failing"

    def keys(self):
        return self.inner.keys()

    def shape(self, key):
        return self.inner.shape(key)

    def dtype(self, key):
        return self.inner.dtype(key)

    def read(self, key, slices=()):
        if key == "model.layers.1.mlp.up_proj.weight":
            raise OSError("the disk is gone")
        return self.inner.read(key, slices)


def test_a_failure_half_way_is_raised_and_ends_every_thread(llama):
    source = Failing(bridge.open_checkpoint(llama))
    mapping = find_family("llama").mapping(CONFIG)
    calls = []
    with pytest.raises(OSError, match=facts("disk")):
        load(source, mapping, like_of(CONFIG), progress=lambda *c: calls.append(c))
    assert 0 < len(calls) < 30
    assert not any(t.name.startswith("bridge") for t in threading.enumerate())


def test_no_read_is_larger_than_a_band(llama, bytes_read, monkeypatch):
    monkeypatch.setattr(_bands, "BAND_BYTES", 1000)
    assert_same_leaves(
        bridge.load_hf(llama, sharded(like_of(CONFIG), SPECS["columns of the file"])),
        bridge.load_hf(llama, like_of(CONFIG)),
    )
    tensors = random_tensors(np.float32)
    assert max(bytes_read) <= 1000
    assert sum(bytes_read) == 2 * sum(t.nbytes for t in tensors.values())
