"""`fsdp_dtensor` is what torch and Megatron-FSDP's loader ask for, in every entry.

The loader builds a nested state dict from its module and optimizer, and gives it to
torch, which fills what it finds and by default leaves the rest as it is.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from helpers.errors import facts
from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard, empty
from torch.testing._internal.distributed.fake_pg import FakeStore

from bridge.megatron import open_megatron, plain_args, write_megatron

pytestmark = pytest.mark.torch

RANKS = 3  # divides none of the goldens' rows
GATED = ".linear_fc1.weight"
# State of Megatron's `OptimizerParamScheduler`.
SCHEDULER = {
    "max_lr": 0.01,
    "lr_warmup_steps": 4,
    "num_steps": 14,
    "lr_decay_style": "cosine",
    "lr_decay_steps": 40,
    "min_lr": 0.001,
    "start_wd": 0.1,
    "end_wd": 0.1,
    "wd_incr_style": "constant",
    "wd_incr_steps": 40,
}


@pytest.fixture(scope="module", params=["dense", "experts"])
def run(request, golden):
    return open_megatron(golden("optimizer_formats") / request.param / "torch_dist")


@pytest.fixture(scope="module")
def written(run, tmp_path_factory):
    path = tmp_path_factory.mktemp("written") / "out"
    args = {**plain_args(run.args)[0], "make_vocab_size_divisible_by": 1}
    options = {"optimizer": run.optimizer, "scheduler": SCHEDULER, "iteration": 7}
    write_megatron(path, run.source, args, format="fsdp_dtensor", **options)
    return path / "iter_0000007"


@pytest.fixture(params=range(RANKS))
def mesh(request) -> Iterator[DeviceMesh]:
    """The mesh as one rank of several sees it; nothing is communicated."""
    dist.init_process_group(
        "fake", rank=request.param, world_size=RANKS, store=FakeStore()
    )
    yield init_device_mesh("cpu", (RANKS,))
    dist.destroy_process_group()


def load(directory, state: dict[str, Any]) -> None:
    """Loads all that `state` asks for: what is absent is an error."""
    planner = DefaultLoadPlanner(allow_partial_load=False)
    reader = FileSystemReader(directory)
    with pytest.warns(UserWarning, match=facts("torch.distributed", "load")):
        dcp.load(state, storage_reader=reader, planner=planner, no_dist=True)


def tensors_of(run) -> dict[str, np.ndarray]:
    """Every tensor of the run, by the key under which Megatron-FSDP looks for it."""
    adam, found = run.optimizer, {}
    for name in run.source.keys():
        module = in_module(name)
        for suffix, half in halves(module):
            key = module + suffix
            found[f"model.module.{key}"] = half(adam.master.read(name))
            state = f"optimizer.state.module.module.module.{key}"
            found[f"{state}.exp_avg"] = half(adam.exp_avg.read(name))
            found[f"{state}.exp_avg_sq"] = half(adam.exp_avg_sq.read(name))
            found[f"{state}.step"] = np.float32(adam.step)
    return found


def in_module(name: str) -> str:
    """Names of the goldens' modules: layers of `--transformer-impl local`."""
    name = name.replace(
        "self_attention.linear_qkv.layer_norm_", "input_layernorm."
    ).replace("mlp.linear_fc1.layer_norm_", "pre_mlp_layernorm.")
    return name.replace(".experts.", ".experts.local_experts.")


def halves(module: str):
    if not module.endswith((GATED, ".linear_fc1.bias")):
        return [("", lambda array: array)]
    return [
        ("_w", lambda array: array[: len(array) // 2]),
        ("_v", lambda array: array[len(array) // 2 :]),
    ]


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def test_torch_reads_every_tensor_into_a_plain_one(run, written):
    expected = tensors_of(run)
    state = {key: torch.full(array.shape, torch.nan) for key, array in expected.items()}
    metadata = FileSystemReader(written).read_metadata().state_dict_metadata
    assert set(state) == {
        key
        for key, entry in metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    load(written, state)
    for key, array in expected.items():
        assert bits(state[key]) == array.tobytes(), key


@pytest.mark.parametrize("placement", [Shard(0), Shard(1), Replicate()], ids=str)
def test_each_rank_reads_its_shard_into_a_dtensor(run, written, mesh, placement):
    expected = tensors_of(run)
    dim = getattr(placement, "dim", 0)
    expected = {key: array for key, array in expected.items() if array.ndim > dim}
    state = {
        key: empty(array.shape, device_mesh=mesh, placements=[placement])
        for key, array in expected.items()
    }
    for tensor in state.values():
        tensor.to_local().fill_(torch.nan)
    load(written, state)
    for key, array in expected.items():
        shard = array
        if placement != Replicate():
            size = -(-array.shape[dim] // RANKS)
            start = size * mesh.get_rank()
            shard = array[(slice(None),) * dim + (slice(start, start + size),)]
        local = state[key].to_local()
        assert local.shape == shard.shape
        assert bits(local) == np.ascontiguousarray(shard).tobytes(), key


def test_torch_reads_the_settings_that_the_loader_asks_for(run, written):
    weight = "module.module.module.decoder.layers.1.self_attention.linear_proj.weight"
    norm = "module.module.module.decoder.final_layernorm.weight"
    (group,) = torch.optim.AdamW([torch.zeros(1)]).param_groups
    asked = {key: None for key in group if key != "params"}
    asked |= dict.fromkeys(("step", "wd_mult", "lr_mult", "is_expert_parallel"))
    asked |= dict.fromkeys(("max_lr", "min_lr"))
    state = {
        "args": None,
        "iteration": None,
        "checkpoint_version": None,
        "num_floating_point_operations_so_far": None,
        "opt_param_scheduler": dict.fromkeys(SCHEDULER),
        "optimizer": {"param_to_group_meta": {weight: dict(asked), norm: dict(asked)}},
    }
    load(written, state)
    assert state["opt_param_scheduler"] == SCHEDULER
    assert (state["iteration"], state["checkpoint_version"]) == (7, 3.0)
    assert state["args"].num_layers == run.args["num_layers"]
    found = state["optimizer"]["param_to_group_meta"]
    groups = {
        group["wd_mult"]: group
        for group in run.optimizer.param_groups
        if not group["is_expert_parallel"]
    }
    for name, wd_mult in ((weight, 1.0), (norm, 0.0)):
        ours = {key: found[name][key] for key in asked if key in groups[wd_mult]}
        assert len(ours) >= 6
        assert ours == {key: groups[wd_mult][key] for key in ours}
        assert found[name]["step"] == run.optimizer.step


def test_the_schedule_that_torch_writes_is_read(run, written, tmp_path):
    state = {
        "model": {"module.output_layer.weight": torch.ones(8, 4)},
        "opt_param_scheduler": SCHEDULER,
    }
    with pytest.warns(UserWarning, match=facts("torch.distributed", "save")):
        dcp.save(state, checkpoint_id=tmp_path, no_dist=True)
    for directory in (tmp_path, written):
        found = open_megatron(directory)
        assert dict(found.scheduler) == SCHEDULER
        assert not any("opt_param_scheduler" in line for line in found.left_out)
