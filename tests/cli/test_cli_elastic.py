"""`fsdp-jax train` in a generation with fewer replicas: the same batches and losses."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import jax
import pytest
from helpers.errors import facts

import fsdp_jax as fsdp
from fsdp_jax.cli import main
from fsdp_jax.cli._elastic import num_microbatches, with_replicas
from fsdp_jax.cli._train_config import config_of
from fsdp_jax.cli._train_options import MeshOptions
from fsdp_jax.launch import Generation


def losses(path: Path) -> dict[int, float]:
    lines = map(json.loads, path.read_text().splitlines())
    return {line["step"]: line["loss"] for line in lines}


def test_a_smaller_generation_goes_on_with_the_same_losses(
    llama, text, tmp_path, monkeypatch
):
    def train(generation: Generation, devices: int) -> dict[int, float]:
        for name, value in generation.variables().items():
            monkeypatch.setenv(name, value)
        paths = {"hf": llama, "data": text, "save": tmp_path / "run"}
        paths |= {"metrics": tmp_path / "metrics"}
        words = [f"--{name}={path}" for name, path in paths.items()]
        words += ["--steps=4", "--save-every=2", "--batch=8", "--seq=16"]
        words += ["--dp-outer=4", f"--devices={devices}"]
        assert main(["train", *words]) == 0
        return losses(tmp_path / "metrics")

    # A device a replica: on simulated devices XLA:CPU aborts where the reductions over
    # `dp_shard` of two replicas run at once.
    whole = train(Generation(0, 4, 4), 4)
    shutil.rmtree(tmp_path / "run" / "4")
    again = train(Generation(1, 2, 4), 2)
    assert list(again) == [1, 2, 3, 4]
    # float32 sums over other devices and microbatches.
    assert again == pytest.approx(whole, rel=1e-5)
    stored = fsdp.checkpoint.load_metadata(tmp_path / "run")["train"]
    assert stored["microbatches"] == 1  # that of the complete job


def test_microbatches_make_up_for_replicas_that_are_missing():
    config = config_of({"batch": 24, "seq": 8, "microbatches": 2, "tokenizer": "bytes"})
    mesh = fsdp.make_mesh(dp_outer=2, dp_shard=2, devices=jax.devices()[:4])
    assert num_microbatches(config, mesh, None) == 2
    assert num_microbatches(config, mesh, Generation(0, 2, 2)) == 2
    assert num_microbatches(config, mesh, Generation(1, 2, 4)) == 6  # 4 leave a rest


@pytest.mark.parametrize("replicas", [2, 4])
def test_another_batch_than_the_launchers_is_refused(replicas):
    config = config_of({"batch": 64, "seq": 8, "tokenizer": "bytes"})
    mesh = fsdp.make_mesh(dp_outer=replicas, devices=jax.devices()[:replicas])
    with pytest.raises(ValueError, match=facts("--batch 64", "--global-batch 96")):
        num_microbatches(config, mesh, Generation(0, replicas, 4, global_batch=96))


def test_the_mesh_of_the_command_is_that_of_the_complete_job():
    mesh = MeshOptions(dp_outer=4, tp=2)
    assert with_replicas(mesh, None) == mesh
    assert with_replicas(mesh, Generation(1, 3, 4)) == MeshOptions(dp_outer=3, tp=2)
    with pytest.raises(ValueError, match=facts("--dp-outer 1", "--dp-outer 4")):
        with_replicas(MeshOptions(), Generation(0, 4, 4))
