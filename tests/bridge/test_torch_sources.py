"""What from_torch reads: files of each kind, ties, and no code that a file brings."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from helpers.errors import facts
from safetensors.torch import save_file

import bridge
from bridge import Rule

pytestmark = pytest.mark.torch

STATE = {
    "embed.weight": torch.randn(5, 3, generator=torch.Generator().manual_seed(0)),
    "norm.weight": torch.randn(3, generator=torch.Generator().manual_seed(1)),
}
RULES = [
    Rule("embed.weight", "embed", "vocab embed -> vocab embed"),
    Rule("norm.weight", "scale", "embed -> embed"),
]
MOULD = {
    "embed": jax.ShapeDtypeStruct((5, 3), jnp.float32),
    "scale": jax.ShapeDtypeStruct((3,), jnp.float32),
}


def save_sharded(folder: Path, state, names=("a.bin", "b.bin")) -> Path:
    files = dict(zip(state, names, strict=True))
    for key, name in files.items():
        torch.save({key: state[key]}, folder / name)
    index = {"metadata": {}, "weight_map": files}
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    return folder


def save_one(folder: Path, name: str) -> Path:
    save = save_file if name.endswith(".safetensors") else torch.save
    save(STATE, folder / name)
    return folder / name


WAYS = {
    ".pt": lambda folder: save_one(folder, "any.pt"),
    ".pth": lambda folder: save_one(folder, "any.pth"),
    ".safetensors": lambda folder: save_one(folder, "any.safetensors"),
    "model.safetensors": lambda folder: save_one(folder, "model.safetensors").parent,
    "pytorch_model.bin": lambda folder: save_one(folder, "pytorch_model.bin").parent,
    "index": lambda folder: save_sharded(folder, STATE),
    "path as text": lambda folder: str(save_one(folder, "any.pt")),
    "tensors": lambda folder: STATE,
    "numpy": lambda folder: {key: value.numpy() for key, value in STATE.items()},
    "parameters": lambda folder: {k: torch.nn.Parameter(v) for k, v in STATE.items()},
}


def assert_filled(tree) -> None:
    np.testing.assert_array_equal(tree["embed"], STATE["embed.weight"])
    np.testing.assert_array_equal(tree["scale"], STATE["norm.weight"])


@pytest.mark.parametrize("way", list(WAYS))
def test_the_same_weights_come_from_anywhere(tmp_path, way):
    assert_filled(bridge.from_torch(WAYS[way](tmp_path), MOULD, RULES))


def test_safetensors_are_preferred(tmp_path):
    save_one(tmp_path, "model.safetensors")
    (tmp_path / "pytorch_model.bin").write_bytes(b"not even looked at")
    assert_filled(bridge.from_torch(tmp_path, MOULD, RULES))


def test_a_file_that_would_run_code_runs_none(tmp_path):
    class Evil:
        def __reduce__(self):
            return (Path.touch, (tmp_path / "ran",))

    torch.save(STATE | {"evil": Evil()}, tmp_path / "evil.pt")
    with pytest.raises(ValueError, match=facts("evil.pt'", "'__builtin__.getattr'")):
        bridge.from_torch(tmp_path / "evil.pt", MOULD, RULES)
    assert not (tmp_path / "ran").exists()
    torch.load(tmp_path / "evil.pt", weights_only=False)
    assert (tmp_path / "ran").exists()  # it would have


def test_a_part_of_a_training_checkpoint_is_taken_by_its_prefix(tmp_path):
    checkpoint = {"model": STATE, "optimizer": {"lr": 0.1, "m": torch.ones(7)}}
    torch.save(checkpoint, tmp_path / "step.pt")
    tree = bridge.from_torch(tmp_path / "step.pt", MOULD, RULES, prefix="model.")
    assert_filled(tree)
    with pytest.raises(ValueError, match=facts("'module.'", "'model.embed.weight'")):
        bridge.from_torch(tmp_path / "step.pt", MOULD, RULES, prefix="module.")


@pytest.mark.parametrize(
    "weight_map, match",
    [
        ({"a": "../a.bin"}, ["'../a.bin'"]),
        ({"a": "absent.bin"}, ["'absent.bin'"]),
        ({"a": "b.bin", "norm.weight": "b.bin"}, ["'a'", "'b.bin'"]),
        ({"embed.weight": "a.bin", "x": "b.bin"}, ["'b.bin'", "'norm.weight'"]),
        (["a.bin"], ["'weight_map'"]),
    ],
)
def test_an_index_that_does_not_fit_its_files_is_refused(tmp_path, weight_map, match):
    save_sharded(tmp_path, STATE)
    index = tmp_path / "pytorch_model.bin.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(ValueError, match=facts(*match)):
        bridge.from_torch(tmp_path, MOULD, RULES)


class Tied(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(5, 3)
        self.norm = torch.nn.RMSNorm(3)
        self.head = torch.nn.Linear(3, 5, bias=False)
        self.head.weight = self.embed.weight


def tied(folder: Path, way: str):
    net = Tied()
    net.load_state_dict(STATE | {"head.weight": STATE["embed.weight"]})
    if way == "file":
        torch.save(net.state_dict(), folder / "tied.pt")
        return folder / "tied.pt"
    return net if way == "module" else net.state_dict()


@pytest.mark.parametrize("way", ["module", "state dict", "file"])
def test_a_tied_tensor_needs_one_rule_and_comes_back_tied(tmp_path, way):
    source = tied(tmp_path, way)
    tree = bridge.from_torch(source, MOULD, RULES)
    assert_filled(tree)
    again = bridge.to_torch(tree, RULES, like=source)
    assert list(again) == ["embed.weight", "norm.weight", "head.weight"]
    assert again["head.weight"] is again["embed.weight"]
    nested = {"embed": {"embedding": MOULD["embed"]}, "norm": {"scale": MOULD["scale"]}}
    proposal = bridge.propose_rules(source, nested)
    assert proposal.is_certain and proposal.tied == {"head.weight": "embed.weight"}
    assert "# Tied: head.weight is embed.weight" in str(proposal)
    by_head = [Rule("head.weight", "embed", "a b -> a b"), RULES[1]]
    assert_filled(bridge.from_torch(source, MOULD, by_head))


def test_a_tie_is_memory_shared_and_not_values_that_agree():
    state = STATE | {"head.weight": STATE["embed.weight"].clone()}
    with pytest.raises(ValueError, match=facts("(1)", "head.weight")):
        bridge.from_torch(state, MOULD, RULES)
    part = STATE["embed.weight"][:3]  # begins where it begins, and is not the same
    with pytest.raises(ValueError, match=facts("(1)", "part")):
        bridge.from_torch(STATE | {"part": part}, MOULD, RULES)


def test_tensors_that_lie_in_another_order_are_read_by_their_strides():
    strided = STATE["embed.weight"].T.contiguous().T
    assert not strided.is_contiguous()
    assert_filled(bridge.from_torch(STATE | {"embed.weight": strided}, MOULD, RULES))
    half = strided.bfloat16()
    bfloat = MOULD | {"embed": jax.ShapeDtypeStruct((5, 3), jnp.bfloat16)}
    tree = bridge.from_torch(STATE | {"embed.weight": half}, bfloat, RULES)
    again = bridge.to_torch(tree, RULES)["embed.weight"]
    assert torch.equal(again, half) and again.dtype == torch.bfloat16


@pytest.mark.parametrize(
    "source, match",
    [
        ({"epoch": 3}, ["epoch", "int"]),
        ({"a": {"b": torch.ones(1)}}, ["a", "dict"]),
        ({0: torch.ones(1)}, ["0"]),
        ({"a": torch.ones(1, device="meta")}, ["a", "'meta'"]),
        ({"a": torch.ones(1).to_sparse()}, ["a", "torch.sparse_coo"]),
        ([torch.ones(1)], ["list", "nn.Module"]),
    ],
)
def test_what_is_no_tensor_with_data_is_refused(source, match):
    with pytest.raises(ValueError, match=facts(*match)):
        bridge.from_torch(source, MOULD, RULES)
