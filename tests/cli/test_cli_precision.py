"""`fsdp-jax train` in few bits: in collectives and optimizers, in float16.

Each option changes what is planned or kept, and none changes what is learned by much.
"""

from __future__ import annotations

import json
from pathlib import Path

import jax
import pytest

import fsdp_jax as fsdp
from fsdp_jax.cli import main
from fsdp_jax.cli._train_config import config_of


@pytest.fixture(scope="module")
def model(tmp_path_factory, write_llama) -> Path:
    """Large enough for what leaves small arrays alone."""
    folder = tmp_path_factory.mktemp("model") / "llama"
    return write_llama(folder, hidden_size=64, intermediate_size=128)


@pytest.fixture(scope="module")
def train(model, text, tmp_path_factory):
    """Trains two steps; its folder, the metrics of each, and what was said."""

    def run(*options: str, save: Path | None = None, steps: int = 2):
        folder = save or tmp_path_factory.mktemp("run")
        metrics = folder / f"{steps}.jsonl"
        start = ["--hf", str(model)] if save is None else ["--resume", str(save / "s")]
        status = main(
            ["train", *start, "--data", str(text), "--steps", str(steps)]
            + ["--batch", "8", "--seq", "16", "--lr", "1e-2", *options]
            + ["--save", str(folder / "s"), "--metrics", str(metrics)]
        )
        assert status == 0
        return folder, [json.loads(line) for line in metrics.read_text().splitlines()]

    return run


@pytest.fixture(scope="module")
def losses(train) -> list[float]:
    """Those of float32."""
    return [step["loss"] for step in train()[1]]


def dtypes_of(folder: Path) -> dict[str, str]:
    return {
        n: x.dtype.name for n, x in fsdp.checkpoint.load_shapes(folder / "s").items()
    }


def test_a_config_shards_as_its_options_say():
    def sharding(offload=None, **options):
        config = config_of({"tokenizer": "bytes", **options})
        return config.precision.sharding(fsdp.FSDPConfig(), offload)

    assert sharding() == fsdp.FSDPConfig()
    gathers = [
        sharding(param_gather=g).mp_policy.param_gather for g in ("float8", "mxfp8")
    ]
    assert gathers == [fsdp.sharding.Float8Gather(), fsdp.sharding.MXFP8Gather()]
    assert sharding("optimizer").offload == fsdp.OffloadPolicy()
    assert sharding("all").offload == fsdp.OffloadPolicy(params=True)
    streamed = fsdp.OffloadPolicy(params=True, stream_params=True)
    assert sharding("stream").offload == streamed


def test_a_run_keeps_first_layers_in_bfloat16_and_goes_on_with_them(train):
    options = ["--param-dtype", "bfloat16", "--products", "float8"]
    folder, some = train(*options, "--num-layers-at-start-in-bf16", "1")
    _, none = train(*options)
    assert some[0]["loss"] != none[0]["loss"]
    assert some[0]["loss"] == pytest.approx(none[0]["loss"], rel=0.01)
    again = train("--save-every", "1", save=folder, steps=3)[1]
    assert [step["step"] for step in again] == [3]


def test_layers_communicated_in_a_byte_learn_nearly_the_same(train, losses, capsys):
    _, metrics = train("--param-gather", "mxfp8")
    assert "quantized to be gathered: 3 as mxfp8_e4m3fn" in capsys.readouterr().err
    found = [step["loss"] for step in metrics]
    assert found != losses and found == pytest.approx(losses, rel=0.01)


@pytest.mark.parametrize(
    "options, dtype",
    [(("8", "--offload", "stream"), "uint8"), (("16",), "float16")],
    ids=["8", "16"],
)
def test_narrow_moments_are_kept_so_and_a_run_goes_on_with_them(
    train, losses, options, dtype
):
    folder, metrics = train("--optimizer-bits", *options)
    assert metrics[1]["loss"] == pytest.approx(losses[1], rel=0.01)
    codes = {n: d for n, d in dtypes_of(folder).items() if "opt_state.codes" in n}
    assert codes and set(codes.values()) == {dtype}
    again = train("--save-every", "1", save=folder, steps=3)[1]
    assert [step["step"] for step in again] == [3]


def test_what_is_stored_on_the_host_changes_no_bit(train, losses, monkeypatch):
    kinds = set()

    def init(*arguments, **options):
        state = given(*arguments, **options)
        kinds.update(x.sharding.memory_kind for x in jax.tree.leaves(state))
        return state

    given = fsdp.init_state
    monkeypatch.setattr(fsdp, "init_state", init)
    _, metrics = train("--offload", "optimizer")
    assert [step["loss"] for step in metrics] == losses
    assert "pinned_host" in kinds


def test_float16_has_a_loss_scale_that_finds_its_size(train, losses):
    folder, metrics = train("--param-dtype", "float16", "--loss-scale", "1e9")
    assert [step["loss_scale"] for step in metrics] == [1e9, 5e8]
    assert all("grad_norm" not in step for step in metrics)  # both were skipped
    assert metrics[0]["loss"] == pytest.approx(losses[0], rel=0.01)
    assert "loss_scale.scale" in dtypes_of(folder)


@pytest.mark.parametrize(
    "options, reason",
    [
        (["--loss-scale", "8"], "is for --param-dtype float16, and this is float32"),
        (["--param-dtype", "float16", "--loss-scale", "0"], "--loss-scale 0.0: a fin"),
        (["--expert-products", "float8"], "--expert-products float8 is for --param-dt"),
        (
            ["--param-dtype", "bfloat16", "--expert-products", "float8"],
            "expert_products=float8: without effect",
        ),
        (
            ["--num-layers-at-start-in-bf16", "1"],
            "--num-layers-at-start-in-bf16 1 is for --products float8 or mxfp8",
        ),
        (
            ["--param-dtype", "bfloat16", "--products", "float8"]
            + ["--num-layers-at-end-in-bf16", "9"],
            "num_layers_at_end_in_bf16=9",
        ),
    ],
)
def test_what_makes_no_sense_is_refused(options, reason, model, text, tmp_path, capsys):
    command = ["train", "--hf", str(model), "--data", str(text), "--steps", "1"]
    assert main([*command, "--save", str(tmp_path / "save"), *options]) == 2
    assert reason in capsys.readouterr().err


@pytest.mark.parametrize(
    "option, reason",
    [
        (["--optimizer-bits", "8"], "--optimizer-bits 8 (saved with 32)"),
        (["--param-dtype", "float16"], "float16 (saved with float32, and float16 al"),
    ],
)
def test_a_run_goes_on_with_the_state_it_had(
    trained, text, tmp_path, capsys, option, reason
):
    command = ["train", "--resume", str(trained.save), "--data", str(text)]
    command += ["--steps", "6", "--save", str(tmp_path / "save"), *option]
    assert main(command) == 2
    assert reason in capsys.readouterr().err
