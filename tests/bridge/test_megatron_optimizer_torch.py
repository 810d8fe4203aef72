"""torch reads the optimizer state that is written for it."""

import argparse

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from helpers.errors import facts
from torch.distributed.checkpoint import FileSystemReader

from bridge.megatron import open_megatron, plain_args, write_megatron

pytestmark = pytest.mark.torch

BUCKETS = {"data_parallel_size": 2, "ddp_bucket_size": 1500}


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


@pytest.fixture(scope="module", params=["dense", "experts"])
def run(request, golden):
    return open_megatron(golden("optimizer_formats") / request.param / "torch_dist")


def write(path, run, **options):
    args = {**plain_args(run.args)[0], "make_vocab_size_divisible_by": 1, **BUCKETS}
    write_megatron(path, run.source, args, optimizer=run.optimizer, **options)
    return path / "release"


def load(directory, state):
    reader = FileSystemReader(directory)
    with pytest.warns(UserWarning, match=facts("torch.distributed", "load")):
        dcp.load(state, storage_reader=reader, no_dist=True)


def test_torch_loads_fsdp_dtensor_into_a_nested_state(run, tmp_path):
    out = write(tmp_path / "out", run, format="fsdp_dtensor")
    metadata = FileSystemReader(out).read_metadata()
    assert set(metadata.planner_data) == set(metadata.state_dict_metadata)
    name = "decoder.layers.1.self_attention.linear_proj.weight"
    module = f"module.module.module.{name}"
    shape = run.source.shape(name)
    state = {
        "model": {f"module.{name}": torch.zeros(shape)},
        "optimizer": {
            "state": {
                module: {
                    "exp_avg": torch.zeros(shape),
                    "exp_avg_sq": torch.zeros(shape),
                    "step": torch.zeros(()),
                }
            },
            "param_to_group_meta": {module: {"lr": 0.0, "betas": (), "step": 0}},
        },
        "iteration": -1,
    }
    load(out, state)
    optimizer = run.optimizer
    found = state["optimizer"]["state"][module]
    assert (
        bits(state["model"][f"module.{name}"]) == optimizer.master.read(name).tobytes()
    )
    assert bits(found["exp_avg"]) == optimizer.exp_avg.read(name).tobytes()
    assert bits(found["exp_avg_sq"]) == optimizer.exp_avg_sq.read(name).tobytes()
    assert found["step"] == 2
    meta = state["optimizer"]["param_to_group_meta"][module]
    assert meta == {"lr": 0.01, "betas": (0.9, 0.999), "step": 2}
    assert state["iteration"] == 0


def test_torch_loads_flat_buckets(run, tmp_path):
    out = write(tmp_path / "out", run, optimizer_format="dp_reshardable", pp=2)
    entries = FileSystemReader(out).read_metadata().state_dict_metadata
    state = {
        key: torch.full(tuple(entry.size), torch.nan)
        for key, entry in entries.items()
        if ".bucket_idx_" in key
    }
    assert len(state) >= 6
    load(out, state)
    assert all(torch.isfinite(tensor).all() for tensor in state.values())
    total = sum(t.double().sum() for k, t in state.items() if k.endswith(".exp_avg"))
    moments = run.optimizer.exp_avg
    expected = sum(moments.read(key).astype(np.float64).sum() for key in moments.keys())
    np.testing.assert_allclose(float(total), expected, rtol=1e-12)


@pytest.mark.parametrize("format", ["plain", "distributed"])
def test_torch_loads_legacy_optimizers_without_running_pickles(run, tmp_path, format):
    out = write(tmp_path / "out", run, format="legacy", optimizer_format=format, tp=2)
    files = sorted(out.rglob("*.pt"))
    assert len(files) == (2 if format == "plain" else 4)
    for file in files:
        with torch.serialization.safe_globals([argparse.Namespace]):
            state = torch.load(file, weights_only=True, mmap=True)
        if file.name == "distrib_optim.pt":
            first = state[0] if isinstance(state, list) else state
            (buffer,) = first[0].values()
            assert tuple(first[0])[0] == (torch.bfloat16, torch.float32)
            assert buffer["param"].shape == (buffer["numel_unpadded"],)
        elif format == "plain":
            trees = state["optimizer"]
            for tree in trees if isinstance(trees, list) else [trees]:
                moments = tree["optimizer"]["state"]
                assert sorted(moments) == list(range(len(moments)))
                assert {float(each["step"]) for each in moments.values()} == {2.0}
                # torch's Adam adds to each in place.
                steps = {each["step"].data_ptr() for each in moments.values()}
                assert len(steps) == len(moments)
                masters = sum(tree["fp32_from_fp16_params"], [])
                for number, master in enumerate(masters):
                    assert moments[number]["exp_avg"].shape == master.shape
