"""Training stops and goes on: the same batches, the same losses, on any mesh."""

import dataclasses
import json
from pathlib import Path

import jax
import numpy as np
import pytest
from flax import nnx
from helpers.errors import facts
from tiny_configs import hf_fields

import bridge
import fsdp_jax as fsdp
from bridge.models import Decoder, DecoderConfig, RopeConfig
from fsdp_jax.cli import main
from fsdp_jax.cli._context_parallel import check_context
from fsdp_jax.cli._data import make_batches
from fsdp_jax.cli._data_config import DataConfig
from fsdp_jax.cli._decoder import plan_decoder
from fsdp_jax.cli._decoder_loss import next_token_loss
from fsdp_jax.cli._optimizer import OptimizerConfig
from fsdp_jax.cli._tokens import read_tokens
from fsdp_jax.data import HostShard

# Two meshes add up the same float32 numbers in different orders; measured: 1e-7. A
# batch that is another one makes 1e-2.
ANOTHER_MESH = 1e-5
ALONE = HostShard(0, 1)


def losses(metrics: Path) -> dict[int, float]:
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    return {line["step"]: line["loss"] for line in lines}


def resume(trained, text: Path, folder: Path, *options: str) -> dict[int, float]:
    metrics = folder / "resumed.jsonl"
    status = main(
        ["train", "--resume", str(trained.save), "--resume-step", "2", "--steps", "4"]
        + ["--data", str(text), "--save", str(folder / "save")]
        + ["--metrics", str(metrics), *options]
    )
    assert status == 0
    return losses(metrics)


def test_every_step_is_one_json_line(trained):
    lines = [json.loads(line) for line in trained.metrics.read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    for line in lines:
        assert line.keys() == {
            "step",
            "loss",
            "grad_norm",
            "tokens_per_sec",
            "step_secs",
            "peak_memory_bytes",
        }
        assert all(value > 0 for value in line.values())
    assert lines[-1]["loss"] < lines[0]["loss"]


def test_the_first_loss_is_that_of_the_imported_model(trained, llama, text):
    config = bridge.from_hf_config(llama)
    plan = plan_decoder(config, fsdp.make_mesh(devices=jax.devices()[:1]))
    rows = DataConfig("bytes", batch=8, seq=16)
    tokens = read_tokens([text], "bytes", None, 256)
    batch = next(make_batches(tokens, rows, fsdp.data.HostShard(0, 1)))
    model = Decoder(config, rngs=nnx.Rngs(0))
    nnx.update(model, bridge.load_hf(llama, plan.params))
    loss = next_token_loss(model, batch)
    assert losses(trained.metrics)[1] == pytest.approx(float(loss), rel=ANOTHER_MESH)


def test_resuming_on_the_same_mesh_is_bit_exact(trained, text, tmp_path):
    whole = losses(trained.metrics)
    assert resume(trained, text, tmp_path) == {step: whole[step] for step in (3, 4)}


def test_resuming_on_another_mesh_and_strategy_sees_the_same_batches(
    trained, text, tmp_path, capsys
):
    whole = losses(trained.metrics)
    mesh = ["--devices", "4", "--dp-outer", "2", "--microbatches", "2"]
    strategy = ["--zero", "2", "--remat", "nothing", "--prefetch", "0", "--unroll", "2"]
    resumed = resume(trained, text, tmp_path, *mesh, *strategy)
    assert (
        "unsharded during a step: 50.31 KiB, all the time\n" in capsys.readouterr().err
    )
    for step in (3, 4):
        assert resumed[step] == pytest.approx(whole[step], rel=ANOTHER_MESH)


def test_weights_that_stay_gathered_train_to_the_same_losses(trained, text, tmp_path):
    whole = losses(trained.metrics)
    resumed = resume(trained, text, tmp_path, "--no-reshard")
    for step in (3, 4):
        assert resumed[step] == pytest.approx(whole[step], rel=ANOTHER_MESH)


def test_resuming_over_tp_goes_on_with_the_same_losses(trained, text, tmp_path):
    whole = losses(trained.metrics)
    resumed = resume(trained, text, tmp_path, "--tp", "2", "--fused-loss")
    for step in (3, 4):
        assert resumed[step] == pytest.approx(whole[step], rel=ANOTHER_MESH)


def test_resuming_over_cp_and_tp_goes_on_with_the_same_losses(trained, text, tmp_path):
    whole = losses(trained.metrics)
    resumed = resume(trained, text, tmp_path, "--cp", "2", "--tp", "2")
    for step in (3, 4):
        assert resumed[step] == pytest.approx(whole[step], rel=ANOTHER_MESH)


def test_resuming_in_a_pipeline_goes_on_with_the_same_losses(
    trained, text, tmp_path, capsys
):
    whole = losses(trained.metrics)
    options = ("--pp", "2", "--microbatches", "2", "--schedule", "gpipe")
    resumed = resume(trained, text, tmp_path, *options)
    assert "pipeline, gpipe: 2 stages" in capsys.readouterr().err
    for step in (3, 4):
        assert resumed[step] == pytest.approx(whole[step], rel=ANOTHER_MESH)


def test_longrope_over_cp_is_refused_by_name():
    rope = RopeConfig(
        rope_type="longrope",
        factor=2.0,
        original_max_position_embeddings=32,
        short_factor=(1.0, 1.0),
        long_factor=(2.0, 2.0),
    )
    config = DecoderConfig(
        vocab_size=8,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=4,
        rope=rope,
    )
    with pytest.raises(ValueError, match=facts("cp=2", "'longrope'", "cp=1")):
        check_context(config, 2, 1, "ring")


def test_entries_of_whole_rows_are_refused_over_cp():
    config = bridge.from_hf_config(hf_fields("deepseek_v4"))
    with pytest.raises(ValueError, match=facts("cp=2", "compressed_attention", "cp=1")):
        check_context(config, 2, 1, "ring")


@pytest.mark.parametrize(
    "options, says",
    [
        (("--cp", "4", "--seq", "12"), "cp=4 splits the tokens of a row into 8 chunks"),
        (("--cp", "8", "--cp-form", "ulysses"), "4 heads of this model do not divide"),
    ],
)
def test_rows_and_heads_that_cp_cannot_split_are_refused(
    options, says, llama, text, tmp_path, capsys
):
    argv = ["train", "--hf", str(llama), "--data", str(text), "--steps", "1"]
    assert main([*argv, "--save", str(tmp_path / "save"), *options]) == 2
    assert says in capsys.readouterr().err


def test_a_checkpoint_remembers_where_its_data_stood(trained):
    at = {
        step: fsdp.checkpoint.load_metadata(trained.save, step=step) for step in (2, 4)
    }
    assert at[2]["data"] != at[4]["data"]
    assert at[2]["train"] == at[4]["train"]
    assert bridge.from_hf_config(at[4]["config"]).vocab_size == 256


def test_an_export_holds_the_parameters_of_the_step(trained, tmp_path, capsys):
    argv = ["export", str(trained.save), str(tmp_path / "out"), "--step", "2"]
    assert main(argv) == 0
    assert "step 2 of" in capsys.readouterr().out
    config = bridge.from_hf_config(tmp_path / "out")
    plan = plan_decoder(config, fsdp.make_mesh())
    exported = bridge.load_hf(tmp_path / "out", plan.params)
    saved = fsdp.checkpoint.load_params(trained.save, plan.params, step=2)
    assert jax.tree.all(jax.tree.map(np.array_equal, exported, saved))


def test_an_export_in_bfloat16_says_so(trained, tmp_path):
    argv = ["export", str(trained.save), str(tmp_path / "out"), "--dtype", "bfloat16"]
    assert main(argv) == 0
    assert bridge.from_hf_config(tmp_path / "out").dtype == "bfloat16"


@pytest.fixture
def loss_is(monkeypatch):
    """Makes a step that computes nothing, and measures the loss it is told to."""

    def replace(loss: float):
        measured = {"loss": np.float32(loss), "grad_norm": np.float32(1), "aux": {}}

        def step(state, batch):
            return dataclasses.replace(state, step=state.step + 1), measured

        monkeypatch.setattr(fsdp, "make_train_step", lambda *_, **__: step)

    return replace


def test_metrics_go_to_stdout_and_the_plan_to_stderr(
    llama, text, tmp_path, capsys, loss_is
):
    loss_is(2.5)
    status = main(
        ["train", "--hf", str(llama), "--data", str(text), "--steps", "2"]
        + ["--seq", "16", "--save", str(tmp_path / "save"), "--param-dtype", "bfloat16"]
    )
    out, err = capsys.readouterr()
    assert status == 0
    assert [json.loads(line)["loss"] for line in out.splitlines()] == [2.5, 2.5]
    assert "layers.mlp.up_proj.kernel" in err
    assert "bfloat16" in err
    assert "--tokenizer bytes" in err


def test_a_run_resumed_with_another_batch_reads_the_rows_that_come_and_keeps_adam(
    trained, text, tmp_path, fake_step, monkeypatch, capsys
):
    seen, put = [], fsdp.global_batch
    monkeypatch.setattr(
        fsdp, "global_batch", lambda *given: seen.append(given[1]) or put(*given)
    )
    fake_step(1.0)
    save = str(tmp_path / "save")
    argv = ["train", "--resume", str(trained.save), "--resume-step", "2"]
    argv += ["--data", str(text), "--save", save, "--steps", "3", "--batch", "16"]
    assert main(argv) == 0
    assert "from 8 to 16" in capsys.readouterr().err
    tokens = read_tokens([text], "bytes", None, 256)
    whole = make_batches(tokens, DataConfig("bytes", batch=8, seq=16), ALONE)
    _, _, third, fourth = (next(whole) for _ in range(4))
    np.testing.assert_array_equal(seen[0], np.concatenate([third, fourth]))
    assert fsdp.checkpoint.load_metadata(save)["data"] == {
        "first_row": 16,
        "next_index": 1,
    }
    # The step above changes no numbers: what is saved is the state that was loaded.
    config = bridge.from_hf_config(fsdp.checkpoint.load_metadata(save)["config"])
    plan = plan_decoder(config, fsdp.make_mesh())
    like = fsdp.abstract_state(plan, OptimizerConfig().make())
    now, then = fsdp.load(save, like), fsdp.load(trained.save, like, step=2)
    jax.tree.map(np.testing.assert_array_equal, now.opt_state, then.opt_state)
    assert int(now.opt_state[1].count) == 2


def test_a_run_that_diverges_stops_and_saves_nothing(
    llama, text, tmp_path, capsys, loss_is
):
    loss_is(float("nan"))
    status = main(
        ["train", "--hf", str(llama), "--data", str(text), "--steps", "3"]
        + ["--seq", "16", "--save", str(tmp_path / "save")]
    )
    assert status == 1
    assert "Training diverged: step 1" in capsys.readouterr().err
    assert fsdp.latest_step(tmp_path / "save") is None
