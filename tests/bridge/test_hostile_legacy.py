"""Legacy ranks that do not fit each other, or would run code, are one clear error."""

import pickle
import shutil
import zipfile
from pathlib import Path

import numpy as np
import pytest
from exploits import Touch, archive
from helpers.errors import facts

from bridge.formats._torch_writer import TorchWriter
from bridge.megatron import open_megatron, plain_args, write_megatron

VALUES = np.arange(24, dtype=np.float32).reshape(6, 4)


@pytest.fixture
def legacy(golden, tmp_path) -> Path:
    shutil.copytree(golden("mixtral") / "legacy", tmp_path / "run")
    return tmp_path / "run/iter_0000007"


def test_an_exploit_in_a_legacy_file_is_not_run(legacy, tmp_path):
    program = pickle.dumps({"model": Touch(tmp_path / "sentinel"), "args": {}})
    file = legacy / "mp_rank_00_001_001/model_optim_rng.pt"
    file.write_bytes(archive(program))
    with pytest.raises(ValueError, match=facts("'posix.mkdir'")):
        open_megatron(legacy)
    assert not (tmp_path / "sentinel").exists()


def test_missing_ranks_are_all_named(legacy):
    shutil.rmtree(legacy / "mp_rank_00_001_000")
    (legacy / "mp_rank_00_000_001/model_optim_rng.pt").unlink()
    with pytest.raises(
        ValueError,
        match=facts(
            "TP 1 x PP 2 x EP 2", "(2)", "mp_rank_00_000_001", "mp_rank_00_001_000"
        ),
    ) as error:
        open_megatron(legacy)
    assert "mp_rank_00_001_000" in str(error.value)
    assert "mp_rank_00_000_001" in str(error.value)


def test_ranks_of_another_run_are_named(legacy):
    shutil.copytree(legacy / "mp_rank_00_000_000", legacy / "mp_rank_01_000_000")
    with pytest.raises(
        ValueError, match=facts("TP 1 x PP 2 x EP 2", "(1)", "mp_rank_01_000_000")
    ):
        open_megatron(legacy)


def test_copies_that_differ_are_refused_when_read(legacy):
    """Ranks of other experts hold the same attention: one of them is changed."""
    source = open_megatron(legacy).source
    key = "decoder.layers.1.self_attention.linear_qkv.weight"
    weights = source.read(key)
    file = legacy / "mp_rank_00_000_001/model_optim_rng.pt"
    rewrite(file, weights.tobytes(), (weights + 1).tobytes())
    source = open_megatron(legacy).source
    with pytest.raises(
        ValueError, match=facts("mp_rank_00_000_000", "mp_rank_00_000_001")
    ):
        source.read(key)
    source.read("decoder.layers.0.self_attention.linear_qkv.weight")


def test_a_tied_head_that_differs_is_refused_when_read(golden, tmp_path):
    shutil.copytree(golden("qwen3") / "legacy/iter_0000007", tmp_path / "x")
    source = open_megatron(tmp_path / "x").source
    rows = source.read("embedding.word_embeddings.weight", (slice(192, 384),))
    file = tmp_path / "x/mp_rank_01_001/model_optim_rng.pt"
    rewrite(file, rows.tobytes(), (-rows).tobytes())
    source = open_megatron(tmp_path / "x").source
    source.read("embedding.word_embeddings.weight", (slice(0, 192),))
    with pytest.raises(
        ValueError,
        match=facts("embedding.word_embeddings.weight", "output_layer.weight"),
    ):
        source.read("embedding.word_embeddings.weight")


def rewrite(file: Path, old: bytes, new: bytes) -> None:
    """Replaces part of a storage of an archive, with a checksum that fits."""
    with zipfile.ZipFile(file) as before:
        members = {name: before.read(name) for name in before.namelist()}
    assert any(old in data for data in members.values())
    with zipfile.ZipFile(file, "w") as after:
        for name, data in members.items():
            after.writestr(name, data.replace(old, new))


def legacy_file(directory: Path, tree: dict) -> None:
    """Writes a run of one rank; the model is given by the names of its tensors."""
    (directory / "mp_rank_00").mkdir()
    file = directory / "mp_rank_00/model_optim_rng.pt"
    with file.open("wb") as stream, TorchWriter(stream) as writer:
        if "model" in tree:
            tree = {**tree, "model": {n: writer.add(VALUES) for n in tree["model"]}}
        writer.finish(tree)


def test_ranks_of_different_iterations_are_refused(golden, legacy):
    (tmp := legacy.parent / "later").mkdir()
    args, _ = plain_args(open_megatron(legacy).args)
    source = open_megatron(legacy).source
    split = {"format": "legacy", "pp": 2, "ep": 2}
    write_megatron(tmp / "x", source, args, iteration=9, **split)
    rank = "mp_rank_00_001_000/model_optim_rng.pt"
    shutil.copy(tmp / "x/iter_0000009" / rank, legacy / rank)
    with pytest.raises(
        ValueError, match=facts("'mp_rank_00_000_000': 7", "'mp_rank_00_001_000': 9")
    ):
        open_megatron(legacy)


def test_a_stage_without_one_of_its_layers_is_refused(tmp_path):
    model = [f"decoder.layers.{n}.mlp.linear_fc2.weight" for n in (0, 2)]
    legacy_file(tmp_path, {"args": {}, "checkpoint_version": 3.0, "model": model})
    with pytest.raises(ValueError, match=facts("stage 0", "{0, 2}")):
        open_megatron(tmp_path)


ARGS = {"num_layers": 1}
SINGLE = {"args": {}, "checkpoint_version": 3.0}
LEGACY = {
    "no args": ({"model": []}, ["`args`"]),
    "old": (
        {"args": ARGS, "checkpoint_version": 2.0},
        ["checkpoint_version 2.0", "3.0"],
    ),
    "no model": ({"args": ARGS, "checkpoint_version": 3.0}, ["[0]"]),
    "no weights": ({"args": {}, "checkpoint_version": 3.0, "model": []}, ["0 weights"]),
    "no layers": (
        {"args": ARGS, "checkpoint_version": 3.0, "model": []},
        ["args", "1", "0"],
    ),
    "before Megatron-Core": (
        {**SINGLE, "model": ["language_model.encoder.layers.0.weight"]},
        ["'language_model.encoder.layers.0.weight'", "--ckpt-format torch_dist"],
    ),
    "experts in one": (
        {**SINGLE, "model": ["decoder.layers.0.mlp.experts.weight1"]},
        ["'decoder.layers.0.mlp.experts.weight1'", "--ckpt-format torch_dist"],
    ),
    "other experts": (
        {
            "args": {
                "num_experts": 4,
                "tensor_model_parallel_size": 2,
                "expert_tensor_parallel_size": 1,
            },
            "checkpoint_version": 3.0,
            "model": [],
        },
        ["1", "2", "--ckpt-format torch_dist"],
    ),
}


@pytest.mark.parametrize("tree, match", LEGACY.values(), ids=LEGACY)
def test_a_legacy_file_that_cannot_be_understood_is_refused(tmp_path, tree, match):
    legacy_file(tmp_path, tree)
    with pytest.raises(ValueError, match=facts(*match)):
        open_megatron(tmp_path)
