"""torch reads what is written for it, and what it writes is read."""

import argparse
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from helpers.errors import facts
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter

from bridge.megatron import open_megatron, plain_args, trim_vocab, write_megatron

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
    with pytest.warns(UserWarning, match=facts("torch.distributed", "load")):
        dcp.load(state, storage_reader=FileSystemReader(directory), no_dist=True)
    return state


def save_all(directory: Path, state: dict[str, Any]) -> None:
    with pytest.warns(UserWarning, match=facts("torch.distributed", "save")):
        dcp.save(state, storage_writer=FileSystemWriter(directory), no_dist=True)


@pytest.fixture(scope="module", params=["qwen3", "mixtral"])
def opened(request, golden):
    return open_megatron(golden(request.param) / "torch_dist")


def test_torch_loads_what_is_written_as_torch_dist(opened, tmp_path):
    write_megatron(tmp_path / "out", opened.source, plain_args(opened.args)[0])
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
    write_megatron(
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
    write_megatron(
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


def load_rank(file: Path) -> dict[str, Any]:
    with torch.serialization.safe_globals([argparse.Namespace]):
        return torch.load(file, weights_only=True)


def rank_tensors(file: Path) -> dict[tuple[str, str], torch.Tensor]:
    """A rank's parameters by model chunk and name, in their order."""
    return {
        (chunk, name): tensor
        for chunk, model in load_rank(file).items()
        if chunk.startswith("model")
        for name, tensor in model.items()
    }


def add_optimizer(
    run: Path,
    states: dict[str, Path],
    *,
    mixed: bool,
    apart: bool,
    swapped: bool = False,
) -> None:
    """Adds to each rank's file what Megatron's own optimizer would have put there."""
    for file in run.rglob("model_optim_rng.pt"):
        rank = file.relative_to(run)
        local = {kind: rank_tensors(path / rank) for kind, path in states.items()}
        names = list(rank_tensors(file))
        chained = []
        for of_experts in (False, True):
            # Without expert parallelism one optimizer has them all.
            ours = [
                n for n in names if (apart and ".mlp.experts." in n[1]) == of_experts
            ]
            if not ours:
                continue
            groups, masters, order = [], [], []
            for decays in (True, False):
                found = [n for n in ours if (local["exp_avg"][n].dim() > 1) == decays]
                if swapped and not decays:
                    found[0], found[1] = found[1], found[0]
                numbers = list(range(len(order), len(order) + len(found)))
                masters.append([local["master"][n] for n in found])
                order += found
                settings = {"lr": 0.1, "betas": (0.9, 0.95), "step": 3}
                kind = {"wd_mult": float(decays), "is_expert_parallel": of_experts}
                groups.append({"params": numbers, **kind, **settings})
            state = {
                number: {kind: local[kind][n] for kind in ("exp_avg", "exp_avg_sq")}
                | {"step": torch.tensor(3.0)}
                for number, n in enumerate(order)
            }
            tree = {"state": state, "param_groups": groups}
            if mixed:
                tree = {"optimizer": tree, "fp32_from_fp16_params": masters}
            chained.append(tree)
        whole = load_rank(file)
        whole["optimizer"] = chained[0] if len(chained) == 1 else chained
        torch.save(whole, file)


SPLITS = [("qwen3", 2, 2, 1, 1), ("qwen3", 1, 2, 1, 2), ("mixtral", 1, 2, 2, 1)]
SPLITS += [("mixtral", 2, 1, 2, 1), ("mixtral", 1, 1, 1, 1)]


def write_trained(golden, tmp_path: Path, split, **changed) -> dict[str, Any]:
    """Writes a legacy run with an optimizer; returns each kind of state's source."""
    name, tp, pp, ep, vpp = split
    found = open_megatron(golden(name) / "torch_dist")
    assert found.optimizer is not None
    master = found.optimizer.master or found.source
    sources = {
        "exp_avg": found.optimizer.exp_avg,
        "exp_avg_sq": found.optimizer.exp_avg_sq,
        "master": master,
    }
    sizes = {"tp": tp, "pp": pp, "ep": ep, "vpp": vpp, "format": "legacy"}
    args, _ = plain_args(found.args)
    for kind, source in (*sources.items(), ("run", found.source)):
        write_megatron(tmp_path / kind, source, args, **sizes)
    states = {kind: tmp_path / kind for kind in sources}
    mixed = found.optimizer.master is not None
    add_optimizer(tmp_path / "run", states, mixed=mixed, apart=ep > 1, **changed)
    return sources if mixed else {**sources, "master": None}


@pytest.mark.parametrize("split", SPLITS, ids=str)
def test_moments_of_legacy_files_are_found_weight_by_weight(golden, tmp_path, split):
    sources = write_trained(golden, tmp_path, split)
    found = open_megatron(tmp_path / "run")
    assert found.left_out == ()
    assert found.optimizer is not None
    assert found.optimizer.step == 3
    assert found.optimizer.param_groups[0]["betas"] == (0.9, 0.95)
    for kind, expected in sources.items():
        source = getattr(found.optimizer, kind)
        if expected is None:
            assert source is None
            continue
        # More tensor-parallel ranks pad the vocabulary with more rows.
        source, expected = trim_vocab(source, 331), trim_vocab(expected, 331)
        assert set(source.keys()) == set(expected.keys())
        for key in expected.keys():
            assert source.read(key).tobytes() == expected.read(key).tobytes(), key


def test_legacy_moments_in_another_order_are_never_returned(golden, tmp_path):
    """Two norms of one shape change places: their master weights tell."""
    write_trained(golden, tmp_path, SPLITS[0], swapped=True)
    optimizer = open_megatron(tmp_path / "run").optimizer
    assert optimizer is not None
    with pytest.raises(
        ValueError, match=facts("0.16", "--dist-ckpt-optim-fully-reshardable")
    ):
        for key in optimizer.exp_avg.keys():
            optimizer.exp_avg.read(key)


@pytest.mark.parametrize(
    "change, reason",
    [
        (lambda tree: tree["param_groups"][0].update(lr_mult=0.5), "of their own"),
        (lambda tree: tree["param_groups"][0]["params"].pop(), "parameters, the model"),
        (lambda tree: tree["param_groups"].pop(), "have no group"),
        (lambda tree: tree.update(state={}), "state is in other files"),
        (lambda tree: tree["state"].pop(0), "not understood: 0"),
        (
            lambda tree: tree["state"][0].update(exp_avg=torch.zeros(3)),
            "exp_avg of .* is not of shape",
        ),
    ],
)
def test_a_legacy_optimizer_that_is_not_understood_is_said_with_the_reason(
    golden, tmp_path, change, reason
):
    write_trained(golden, tmp_path, ("qwen3", 1, 1, 1, 1))
    (file,) = (tmp_path / "run").rglob("model_optim_rng.pt")
    whole = load_rank(file)
    change(whole["optimizer"]["optimizer"])
    torch.save(whole, file)
    found = open_megatron(tmp_path / "run")
    assert found.optimizer is None
    assert re.search(reason, found.left_out[0])
    found.source.read("decoder.final_layernorm.weight")  # the weights remain
