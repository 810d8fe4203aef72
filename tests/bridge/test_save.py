"""Saving writes back the same bytes, and all of a checkpoint or nothing."""

import dataclasses
import json
import os
import types

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from bridge_helpers import (
    HF_CONFIG,
    assert_same_bytes,
    like_of,
    random_tensors,
    tensors_of,
)
from helpers.errors import facts
from jax.sharding import NamedSharding, PartitionSpec
from safetensors import numpy as reference

import bridge
from bridge._box import Range
from bridge._tree import named_leaves
from bridge.streaming import _export
from bridge.streaming._gather import _from_device
from bridge.streaming._shards import each

CONFIG = bridge.from_hf_config(HF_CONFIG)


@pytest.fixture(scope="module")
def params(llama):
    return bridge.load_hf(llama, like_of(CONFIG))


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_a_round_trip_returns_every_tensor_bit_by_bit(
    tmp_path, llama, llama_bf16, dtype
):
    path = llama if dtype == np.float32 else llama_bf16
    params = bridge.load_hf(path, like_of(CONFIG, dtype))
    bridge.save_hf(tmp_path / "out", params, CONFIG)
    assert_same_bytes(tensors_of(tmp_path / "out"), random_tensors(dtype))
    # Read by someone else's reader as well, for ours could share the mistake.
    theirs = reference.load_file(tmp_path / "out" / "model.safetensors")
    assert_same_bytes(theirs, random_tensors(dtype))


@pytest.mark.parametrize("exists", [True, False])
def test_a_link_leads_to_what_is_saved(tmp_path, params, exists):
    (tmp_path / "disk").mkdir()
    target, link = tmp_path / "disk/out", tmp_path / "link"
    if exists:
        target.mkdir()
    link.symlink_to(target)
    bridge.save_hf(link, params, CONFIG)
    assert link.is_symlink() and [p.name for p in tmp_path.iterdir() if p != link] == [
        "disk"
    ]
    assert_same_bytes(tensors_of(target), random_tensors(np.float32))


def test_a_link_to_itself_is_refused(tmp_path, params):
    (tmp_path / "link").symlink_to(tmp_path / "link")
    with pytest.raises(ValueError, match=facts(tmp_path / "link")):
        bridge.save_hf(tmp_path / "link", params, CONFIG)


@pytest.mark.parametrize("kind", ["working directory", "mount point"])
def test_an_empty_directory_that_cannot_be_replaced_is_refused_at_once(
    tmp_path, params, monkeypatch, kind
):
    if kind == "working directory":
        monkeypatch.chdir(tmp_path)
    else:
        monkeypatch.setattr(type(tmp_path), "is_mount", lambda _: True)
    with pytest.raises(ValueError, match=facts(tmp_path / "checkpoint")):
        bridge.save_hf(tmp_path, params, CONFIG)
    assert not [*tmp_path.iterdir()]


def test_sharded_params_are_gathered_right(tmp_path, params):
    mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))

    def shard(leaf):
        dims = [dim for dim, size in enumerate(leaf.shape) if size % 8 == 0]
        spec = [None] * leaf.ndim
        spec[dims[-1]] = "x"
        return jax.device_put(leaf, NamedSharding(mesh, PartitionSpec(*spec)))

    bridge.save_hf(tmp_path / "out", jax.tree.map(shard, params), CONFIG)
    assert_same_bytes(tensors_of(tmp_path / "out"), random_tensors(np.float32))


def test_host_arrays_are_saved_as_well(tmp_path, params):
    host = jax.tree.map(np.asarray, params)
    bridge.save_hf(tmp_path / "out", host, CONFIG)
    assert_same_bytes(tensors_of(tmp_path / "out"), random_tensors(np.float32))


def test_large_models_are_split_into_files_with_an_index(tmp_path, params):
    out, limit = tmp_path / "out", 40_000
    bridge.save_hf(out, params, CONFIG, max_shard_bytes=limit)
    index = json.loads((out / "model.safetensors.index.json").read_text())
    files = sorted(set(index["weight_map"].values()))
    count = len(files)
    assert count > 3 and files[0] == f"model-00001-of-{count:05}.safetensors"
    assert index["metadata"]["total_size"] == sum(
        t.nbytes for t in random_tensors(np.float32).values()
    )
    for file in files:
        held = reference.load_file(out / file)
        assert sum(t.nbytes for t in held.values()) <= limit
    assert_same_bytes(tensors_of(out), random_tensors(np.float32))


def test_a_dtype_that_is_asked_for_is_cast_to_and_recorded(tmp_path, params):
    bridge.save_hf(tmp_path / "out", params, CONFIG, dtype=jnp.bfloat16)
    expected = {
        k: v.astype(ml_dtypes.bfloat16) for k, v in random_tensors(np.float32).items()
    }
    assert_same_bytes(tensors_of(tmp_path / "out"), expected)
    fields = json.loads((tmp_path / "out" / "config.json").read_text())
    assert fields["dtype"] == fields["torch_dtype"] == "bfloat16"


def test_mixed_dtypes_are_kept_widest_first(tmp_path, params):
    def halve(path, leaf):
        norm = "norm" in jax.tree_util.keystr(path)
        return leaf if norm else leaf.astype(jnp.bfloat16)

    bridge.save_hf(tmp_path / "out", jax.tree.map_with_path(halve, params), CONFIG)
    source = bridge.open_checkpoint(tmp_path / "out")
    assert source.dtype("model.norm.weight") == np.float32
    assert source.dtype("lm_head.weight") == ml_dtypes.bfloat16
    widths = [source.dtype(key).itemsize for key in source.keys()]
    assert widths == sorted(widths, reverse=True)  # so that none is misaligned
    assert bridge.from_hf_config(tmp_path / "out").dtype == "bfloat16"


def test_the_config_comes_back_as_it_was(tmp_path, params):
    config = dataclasses.replace(
        CONFIG, eos_token_id=(2, 7), max_position_embeddings=99
    )
    bridge.save_hf(tmp_path / "out", params, config)
    assert bridge.from_hf_config(tmp_path / "out") == config
    generation = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    assert (generation["bos_token_id"], generation["eos_token_id"]) == (1, [2, 7])


def test_progress_counts_every_byte_once(tmp_path, params):
    calls = []
    bridge.save_hf(
        tmp_path / "out", params, CONFIG, progress=lambda *c: calls.append(c)
    )
    total = sum(t.nbytes for t in random_tensors(np.float32).values())
    assert calls[-1] == (total, total) and len(calls) == 30


def test_a_failure_half_way_leaves_nothing(tmp_path, params):
    def fail(done, total):
        if done > total / 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        bridge.save_hf(tmp_path / "out", params, CONFIG, progress=fail)
    assert os.listdir(tmp_path) == []


def test_an_existing_checkpoint_is_never_overwritten(tmp_path, params):
    out = tmp_path / "out"
    out.mkdir()
    bridge.save_hf(out, params, CONFIG)  # an empty directory will do
    with pytest.raises(ValueError, match=facts(f"'{tmp_path / 'out'}'")):
        bridge.save_hf(out, params, CONFIG)
    with pytest.raises(ValueError, match=facts("config.json'")):
        bridge.save_hf(out / "config.json", params, CONFIG)


def test_params_that_do_not_fit_are_one_error_and_nothing_is_written(tmp_path, params):
    leaves = dict(named_leaves(params))
    leaves["norm.bias"] = leaves.pop("norm.scale")
    leaves["lm_head.kernel"] = leaves["lm_head.kernel"].T
    with pytest.raises(ValueError) as error:
        bridge.save_hf(tmp_path / "out", leaves, CONFIG)
    for line in ("norm.scale", "norm.bias", "lm_head.kernel: (131, 48), the config"):
        assert line in str(error.value)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    "dtype, match",
    [("int32", ["float32", "int32"]), ("float4_e2m1fn", ["float4_e2m1fn"])],
)
def test_a_dtype_that_cannot_be_stored_is_refused(tmp_path, params, dtype, match):
    with pytest.raises(ValueError, match=facts(*match)):
        bridge.save_hf(tmp_path / "out", params, CONFIG, dtype=dtype)
    assert os.listdir(tmp_path) == []


SIDECARS = {
    "tokenizer.json": b"{}",
    "tokenizer.model": bytes(range(256)),
    "chat_template.jinja": b"{{ messages }}",
    "additional_chat_templates/tools.jinja": b"{{ tools }}",
    "generation_config.json": b'{"temperature": 0.6}',
    "qwen.tiktoken": b"IQ== 0",
}
LEFT_BEHIND = ["model.safetensors", "config.json", "optimizer.bin", "modeling_x.py"]


@pytest.fixture
def origin(tmp_path):
    """A model's directory with files of all kinds."""
    left = dict.fromkeys(LEFT_BEHIND, b"not ours to copy")
    for name, content in (SIDECARS | left).items():
        file = tmp_path / "origin" / name
        file.parent.mkdir(exist_ok=True)
        file.write_bytes(content)
    return tmp_path / "origin"


def test_tokenizer_chat_template_and_generation_config_come_along(
    tmp_path, params, origin
):
    out = tmp_path / "out"
    bridge.save_hf(out, params, CONFIG, copy_from=origin)
    for name, content in SIDECARS.items():
        assert (out / name).read_bytes() == content
    assert bridge.from_hf_config(out) == CONFIG  # ours
    assert_same_bytes(tensors_of(out), random_tensors(np.float32))
    assert not (out / "optimizer.bin").exists()
    assert not (out / "modeling_x.py").exists()


def test_links_of_the_hub_s_cache_are_copied_as_files(tmp_path, params):
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "0123abcd"
    blobs.mkdir()
    snapshot.mkdir(parents=True)
    (blobs / "cafe").write_bytes(b"tokens")
    (snapshot / "tokenizer.json").symlink_to("../../blobs/cafe")
    bridge.save_hf(tmp_path / "out", params, CONFIG, copy_from=snapshot)
    copied = tmp_path / "out" / "tokenizer.json"
    assert copied.read_bytes() == b"tokens" and not copied.is_symlink()


@pytest.mark.parametrize("kind", ["link to a secret", "broken link", "directory"])
def test_what_is_no_file_of_the_directory_is_not_copied(tmp_path, params, origin, kind):
    (tmp_path / "secret").write_text("key")
    file = origin / "tokenizer_config.json"
    if kind == "directory":
        file.mkdir()
    else:
        file.symlink_to(tmp_path / ("secret" if "secret" in kind else "absent"))
    with pytest.raises(ValueError, match=facts("tokenizer_config.json")):
        bridge.save_hf(tmp_path / "out", params, CONFIG, copy_from=origin)
    with pytest.raises(ValueError, match=facts("none'")):
        bridge.save_hf(tmp_path / "out", params, CONFIG, copy_from=tmp_path / "none")
    assert not (tmp_path / "out").exists()


def test_a_dtype_that_no_config_says_is_refused_before_a_tensor_is_written(
    tmp_path, params
):
    calls = []
    with pytest.raises(ValueError, match=facts("'float8_e4m3fn'", "bfloat16")):
        bridge.save_hf(
            tmp_path / "out",
            params,
            CONFIG,
            dtype=ml_dtypes.float8_e4m3fn,
            progress=lambda *done: calls.append(done),
        )
    assert not calls and not any(tmp_path.iterdir())


def test_a_failed_write_is_raised_and_leaves_nothing(tmp_path, params, monkeypatch):
    def full(stream, data):
        raise OSError("no space left on device")

    monkeypatch.setattr(_export, "append", full)
    with pytest.raises(OSError, match=facts("device")):
        bridge.save_hf(tmp_path / "out", params, CONFIG)
    assert os.listdir(tmp_path) == []


def test_of_a_device_with_memory_of_its_own_only_the_layer_is_fetched():
    """As far as it can be tried where every device is the host."""
    values = np.arange(2 * 3 * 8, dtype=np.float32).reshape(2, 3, 8)
    rule = bridge.Rule("{layer}.w", "w", "a b -> b a")
    pieces = bridge.Mapping((rule,), {"layer": 4, "a": 8, "b": 3}).pieces
    box = (Range(1, 3), Range(0, 3), Range(0, 8))  # the middle two of four layers
    device = types.SimpleNamespace(platform="elsewhere")
    shard = types.SimpleNamespace(device=device, data=jnp.asarray(values))
    for layer in (1, 2):
        ((found, array),) = each(_from_device(shard, box, pieces[layer]))
        assert found == box[1:]
        np.testing.assert_array_equal(array, values[layer - 1])
