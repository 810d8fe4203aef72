"""torch reads what is written for it, and what it writes is read."""

import argparse
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter

from bridge.megatron import open_megatron, plain_args, save_megatron

pytestmark = pytest.mark.torch


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def load_all(directory: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a distributed checkpoint, as torch loads it."""
    metadata = FileSystemReader(directory).read_metadata().state_dict_metadata
    state = {
        key: torch.empty(tuple(entry.size), dtype=entry.properties.dtype)
        for key, entry in metadata.items()
        if hasattr(entry, "size")
    }
    with pytest.warns(UserWarning, match="intent is to load in a single process"):
        dcp.load(state, storage_reader=FileSystemReader(directory), no_dist=True)
    return state


def save_all(directory: Path, state: dict[str, Any]) -> None:
    with pytest.warns(UserWarning, match="intent is to save in a single process"):
        dcp.save(state, storage_writer=FileSystemWriter(directory), no_dist=True)


@pytest.fixture(scope="module", params=["qwen3", "mixtral"])
def opened(request, golden):
    return open_megatron(golden(request.param) / "torch_dist")


def test_torch_loads_what_is_written_as_torch_dist(opened, tmp_path):
    save_megatron(tmp_path / "out", opened.source, plain_args(opened.args)[0])
    state = load_all(tmp_path / "out/release")
    for key in opened.source.keys():
        parts = key.split(".")
        position = [int(part) for part in parts if part.isdigit()]
        on_disk = ".".join(part for part in parts if not part.isdigit())
        on_disk = on_disk.replace("experts.linear", "experts.experts.linear")
        on_disk = on_disk.replace("pre_mlp_layernorm.", "mlp.linear_fc1.layer_norm_")
        tensor = state[on_disk][tuple(position)]
        assert bits(tensor) == opened.source.read(key).tobytes(), key


def test_torch_loads_common_state_without_running_pickles(opened, tmp_path):
    save_megatron(
        tmp_path / "out", opened.source, plain_args(opened.args)[0], iteration=7
    )
    with torch.serialization.safe_globals([argparse.Namespace]):
        common = torch.load(tmp_path / "out/iter_0000007/common.pt", weights_only=True)
    assert common["iteration"] == 7
    assert common["args"].num_layers == 4
    assert isinstance(common["args"].params_dtype, torch.dtype)


def test_torch_loads_legacy_files_without_running_pickles(opened, tmp_path):
    experts = bool(opened.args["num_experts"])
    args, _ = plain_args(opened.args)
    save_megatron(
        tmp_path / "out", opened.source, args, format="legacy", pp=2, ep=1 + experts
    )
    found = 0
    for file in (tmp_path / "out").rglob("model_optim_rng.pt"):
        with torch.serialization.safe_globals([argparse.Namespace]):
            state = torch.load(file, weights_only=True, mmap=True)
        assert state["args"].pipeline_model_parallel_size == 2
        stage = int(file.parent.name.split("_")[3])
        for key, tensor in state["model"].items():
            norm = "self_attention.linear_qkv.layer_norm_weight"
            key = key.replace("input_layernorm.weight", norm)
            key = key.replace(".layers.0.", f".layers.{2 * stage}.")
            key = key.replace(".layers.1.", f".layers.{2 * stage + 1}.")
            if key in opened.source.keys():
                found += 1
                assert bits(tensor) == opened.source.read(key).tobytes()
    assert found > 20


def test_what_torch_writes_as_fsdp_dtensor_is_read(tmp_path):
    random = np.random.default_rng(0)

    def tensor(*shape: int) -> torch.Tensor:
        return torch.from_numpy(random.normal(size=shape).astype(np.float32))

    layer = "module.decoder.layers.0"
    gate, up, norm = tensor(5, 4), tensor(5, 4), tensor(4).bfloat16()
    name = "module.module.module.decoder.layers.0.self_attention.linear_proj.weight"
    state = {
        "model": {
            f"{layer}.mlp.linear_fc1.weight_w": gate,
            f"{layer}.mlp.linear_fc1.weight_v": up,
            f"{layer}.mlp.linear_fc1.layer_norm_weight": norm,
        },
        "optimizer": {"state": {name: {"exp_avg": gate, "exp_avg_sq": up}}},
        "iteration": 11,
        "args": argparse.Namespace(consumed_train_samples=88, num_layers=1),
    }
    save_all(tmp_path, state)
    found = open_megatron(tmp_path)
    assert (found.format, found.iteration, found.consumed_samples) == ("dcp", 11, 88)
    fc1 = found.source.read("decoder.layers.0.mlp.linear_fc1.weight")
    assert fc1.tobytes() == bits(torch.cat([gate, up]))
    key = "decoder.layers.0.mlp.linear_fc1.layer_norm_weight"
    assert found.source.read(key).tobytes() == bits(norm)
    assert found.optimizer is not None
    weight = "decoder.layers.0.self_attention.linear_proj.weight"
    assert found.optimizer.exp_avg.read(weight).tobytes() == bits(gate)
    assert found.optimizer.exp_avg_sq.read(weight).tobytes() == bits(up)


@pytest.mark.parametrize(
    "dtype", [torch.float8_e4m3fn, torch.bfloat16, torch.int64, torch.uint16]
)
def test_chunks_of_every_width_are_read(tmp_path, dtype):
    values = torch.arange(24).reshape(4, 6).to(dtype)
    save_all(tmp_path, {"w": values})
    source = open_megatron(tmp_path).source
    assert source.read("w").tobytes() == bits(values)
    box = source.read("w", (slice(1, 3), slice(2, 5)))
    assert np.ascontiguousarray(box).tobytes() == bits(values[1:3, 2:5])
