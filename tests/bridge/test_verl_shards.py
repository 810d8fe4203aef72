"""Ranks' files of verl are the tensors that were sharded; nothing in them is run."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import torch
import torch.distributed as dist
from helpers.errors import facts
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

import bridge
from bridge.pytorch import open_verl

pytestmark = pytest.mark.torch

# 5 rows on 4 ranks: parts of 2, 2, 1 and 0.
SHAPES = {"embed.weight": (5, 3), "layers.0.proj.weight": (8, 2), "norm.weight": (3,)}


def full(seed: int) -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(seed)
    return {n: torch.randn(s, generator=random) for n, s in SHAPES.items()}


def part(tensor: torch.Tensor, mesh: Any, rank: int, num_shards: int, dim: int = 0):
    """One rank's DTensor, cut as torch's FSDP cuts: in even chunks, the last short."""
    chunks = list(torch.chunk(tensor, num_shards, dim))
    empty = tensor.narrow(dim, 0, 0)
    chunks += [empty] * (num_shards - len(chunks))
    local = chunks[rank % num_shards].clone()
    replicas = [Replicate()] * (mesh.ndim - 1)
    return DTensor.from_local(
        local,
        mesh,
        [*replicas, Shard(dim)],
        run_check=False,
        shape=tensor.shape,
        stride=tensor.stride(),
    )


def save(
    path: Path, sizes: tuple[int, ...], *, drift: bool = False, groups: int = 1
) -> dict[str, dict[str, torch.Tensor]]:
    """Saves a run as verl does, rank by rank; returns the unsharded state."""
    world, states = int(np.prod(sizes)), {k: full(n) for n, k in enumerate("wmv")}
    path.mkdir(exist_ok=True)
    for rank in range(world):
        dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
        try:
            mesh = init_device_mesh("cpu", sizes)
            cut = {
                kind: {n: part(t, mesh, rank, sizes[-1]) for n, t in state.items()}
                for kind, state in states.items()
            }
            # A tied weight, and a buffer, which is the same on all ranks.
            model = {**cut["w"], "head.weight": cut["w"]["embed.weight"]}
            model["rope.inv_freq"] = torch.arange(4.0) + (drift and rank == 1)
            numbers = [list(range(len(SHAPES)))[n::groups] for n in range(groups)]
            optimizer = {
                "state": {
                    number: {
                        "step": torch.tensor(6.0),
                        "exp_avg": cut["m"][name],
                        "exp_avg_sq": cut["v"][name],
                    }
                    for number, name in enumerate(SHAPES)
                },
                "param_groups": [
                    {"lr": 0.1, "betas": (0.9, 0.99), "params": n} for n in numbers
                ],
            }
            extra = {
                "lr_scheduler": {"last_epoch": 6},
                "rng": {"cpu": torch.get_rng_state()},
            }
            trees = {"model": model, "optim": optimizer, "extra_state": extra}
            for kind, tree in trees.items():
                torch.save(tree, path / f"{kind}_world_size_{world}_rank_{rank}.pt")
        finally:
            dist.destroy_process_group()
    return states


def assert_same(source: bridge.Source, expected: dict[str, torch.Tensor]) -> None:
    for name, tensor in expected.items():
        assert source.read(name).tobytes() == tensor.numpy().tobytes(), name
        box = (slice(1, 3),)
        np.testing.assert_array_equal(source.read(name, box), tensor.numpy()[box])


@pytest.mark.parametrize("sizes", [(1,), (4,), (2, 2)], ids=str)
def test_shards_are_the_tensors_that_were_sharded(tmp_path, sizes):
    states = save(tmp_path / "actor", sizes)
    found = open_verl(tmp_path / "actor")
    assert found.world_size == np.prod(sizes)
    assert set(found.source.keys()) == {*SHAPES, "head.weight", "rope.inv_freq"}
    assert_same(found.source, states["w"])
    assert_same(found.source, {"head.weight": states["w"]["embed.weight"]})
    np.testing.assert_array_equal(found.source.read("rope.inv_freq"), np.arange(4.0))
    assert found.optimizer is not None
    assert_same(found.optimizer.exp_avg, states["m"])
    assert_same(found.optimizer.exp_avg_sq, states["v"])
    assert set(found.optimizer.exp_avg.keys()) == set(SHAPES)
    assert found.optimizer.step == 6
    assert found.optimizer.param_groups == ({"lr": 0.1, "betas": (0.9, 0.99)},)
    assert [rank["lr_scheduler"]["last_epoch"] for rank in found.extra] == [
        6 for _ in range(found.world_size)
    ]


def test_buffers_that_drifted_apart_are_not_merged(tmp_path):
    save(tmp_path / "actor", (4,), drift=True)
    source = open_verl(tmp_path / "actor").source
    assert_same(source, {"norm.weight": full(0)["norm.weight"]})
    with pytest.raises(ValueError, match=facts("'rope.inv_freq'", "4 copies", "1")):
        source.read("rope.inv_freq")


def test_missing_ranks_and_second_world_sizes_are_named(tmp_path):
    save(tmp_path / "actor", (4,))
    lost = tmp_path / "actor/optim_world_size_4_rank_2.pt"
    os.rename(lost, tmp_path / "elsewhere.pt")
    with pytest.raises(ValueError, match=facts("optim_world_size_4_rank_2.pt")):
        open_verl(tmp_path / "actor")
    os.rename(
        tmp_path / "elsewhere.pt", tmp_path / "actor/model_world_size_2_rank_0.pt"
    )
    with pytest.raises(ValueError, match=facts("[2, 4]")):
        open_verl(tmp_path / "actor")
    with pytest.raises(FileNotFoundError, match=facts("absent")):
        open_verl(tmp_path / "absent")


def test_parameters_that_cannot_be_told_apart_are_refused(tmp_path):
    save(tmp_path / "actor", (2,), groups=2)
    with pytest.raises(ValueError, match=facts("[2, 1]", "3 parameters")):
        open_verl(tmp_path / "actor")


def change(file: Path, edit: Callable[[Any], Any]) -> None:
    torch.save(edit(torch.load(file, weights_only=False)), file)


def test_an_optimizer_other_than_adam_is_refused(tmp_path):
    save(tmp_path / "actor", (1,))

    def as_sgd(tree):
        states = {
            n: {"momentum_buffer": s["exp_avg"]} for n, s in tree["state"].items()
        }
        return tree | {"state": states}

    change(tmp_path / "actor/optim_world_size_1_rank_0.pt", as_sgd)
    wanted = ["actor", "['momentum_buffer']", "['exp_avg', 'exp_avg_sq', 'step']"]
    with pytest.raises(ValueError, match=facts(*wanted, "optim_world_size_")):
        open_verl(tmp_path / "actor")


@pytest.mark.parametrize("kind", ["model", "optim", "extra_state"])
def test_a_file_without_a_dict_is_named(tmp_path, kind):
    save(tmp_path / "actor", (1,))
    name = f"{kind}_world_size_1_rank_0.pt"
    torch.save([1], tmp_path / "actor" / name)
    with pytest.raises(ValueError, match=facts(tmp_path / "actor" / name, "list")):
        open_verl(tmp_path / "actor")


def test_a_dict_that_is_no_optimizer_is_named(tmp_path):
    save(tmp_path / "actor", (1,))
    torch.save({"lr": 1}, tmp_path / "actor/optim_world_size_1_rank_0.pt")
    with pytest.raises(ValueError, match=facts("['lr']", "'param_groups'", "'state'")):
        open_verl(tmp_path / "actor")


def test_a_file_that_would_run_code_is_refused(tmp_path):
    class Evil:
        def __reduce__(self):
            return os.system, (f"touch {tmp_path}/ran",)

    save(tmp_path / "actor", (1,))
    torch.save({"a": Evil()}, tmp_path / "actor/extra_state_world_size_1_rank_0.pt")
    with pytest.raises(ValueError, match=facts("system")):
        open_verl(tmp_path / "actor")
    assert not (tmp_path / "ran").exists()


def test_a_model_is_filled_from_the_shards(tmp_path):
    states = save(tmp_path / "actor", (4,))
    like = {"scale": jax.ShapeDtypeStruct((3,), np.float32)}
    ignored = ("embed.weight", "layers.**", "head.weight", "rope.**")
    rules = [bridge.Rule("norm.weight", "scale", "a -> a")]
    found = bridge.from_torch(tmp_path / "actor", like, rules, ignore=ignored)
    np.testing.assert_array_equal(found["scale"], states["w"]["norm.weight"])
