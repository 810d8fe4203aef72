"""The trainer saves to an object store, and goes on from it."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers.stores import found_by_tensorstore

import fsdp_jax as fsdp
from fsdp_jax.cli import main

RUN = "s3://bucket/runs/1"


def test_a_run_in_an_object_store_goes_on_and_is_verified(llama, text, capsys):
    train = ["train", "--data", str(text)]
    command = [*train, "--hf", str(llama), "--seq", "16"]
    with found_by_tensorstore() as store:
        assert main([*command, "--steps", "1", "--save", RUN]) == 0
        assert fsdp.latest_step(RUN) == 1
        # Begun by this command: it is done, and goes on to a later step.
        assert main([*command, "--steps", "1", "--save", RUN]) == 0
        assert main([*train, "--resume", RUN, "--steps", "2", "--save", RUN]) == 0
        assert main(["verify", RUN]) == 0
        assert "step 2: " in capsys.readouterr().out
        store.fault = lambda method, key: "403"
        assert main(["verify", RUN]) == 2
        assert main([*command, "--steps", "1", "--save", "s3://bucket/runs/2"]) == 2
        said = capsys.readouterr().err
        assert "PERMISSION_DENIED" in said and "s3://bucket/runs/2" in said
    assert not Path("s3:").exists()


@pytest.mark.parametrize(
    "options", [["--data", RUN], ["--metrics", RUN], ["--local-checkpoints", RUN]]
)
def test_only_checkpoints_may_be_in_an_object_store(options, llama, text, capsys):
    command = ["train", "--hf", str(llama), "--data", str(text), "--save", "run"]
    assert main([*command, "--steps", "1", *options]) == 2
    assert " is a URL " in capsys.readouterr().err
