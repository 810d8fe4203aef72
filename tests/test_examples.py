"""The examples run, at a size that a test can afford, and do what they are for."""

import dataclasses
import json
import re
import shutil
import socket
import threading
from pathlib import Path

import continue_megatron
import dpo
import elastic_replicas
import jax
import jax.numpy as jnp
import numpy as np
import own_equinox_model
import own_nnx_model
import pretrain
import pytest
import rl_loop
import sft_lora
from flax import nnx
from helpers.tiny_tokenizer import write_tokenizer

import bridge
from bridge.megatron import Adam, AdamSettings
from bridge.models import Decoder, DecoderConfig
from fsdp_jax.launch import Generation

EXAMPLES = Path(__file__).parents[1] / "examples"
CONFIG = DecoderConfig(
    vocab_size=264,
    hidden_size=16,
    intermediate_size=32,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=2,
)


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("examples") / "model"
    state = nnx.state(Decoder(CONFIG, rngs=nnx.Rngs(jax.random.key(0))))
    bridge.save_hf(folder, state, CONFIG)
    write_tokenizer(folder, ["</s>"])
    return folder


def test_every_example_is_short_and_is_run_here():
    source = Path(__file__).read_text()
    run = set(re.findall(r"^import (\w+)$", source, flags=re.MULTILINE))
    files = sorted(EXAMPLES.glob("*.py"))
    assert {file.stem for file in files} <= run
    for file in files:
        assert 60 <= len(file.read_text().splitlines()) <= 175, file.name


def test_pretraining_goes_on_on_another_mesh_with_the_batches_that_come(tmp_path):
    np.save(tmp_path / "tokens.npy", np.arange(2000) * 7 % 50)
    sizes = {"batch": 8, "seq": 8, "width": 16, "layers": 1, "vocab": 64}
    options = pretrain.Options(
        tmp_path / "tokens.npy", tmp_path / "run", steps=4, save_every=2, **sizes
    )
    whole = pretrain.train(options)
    shutil.rmtree(options.save / "4")
    later = pretrain.train(dataclasses.replace(options, replicas=2))
    assert later.keys() == {3, 4}
    for number, loss in later.items():
        # bfloat16 products, summed on other devices.
        assert loss == pytest.approx(whole[number], rel=2e-2)


def test_fewer_replicas_go_on_with_the_same_losses(tmp_path, monkeypatch):
    rows = np.random.default_rng(0).normal(size=(64, 8)).astype(np.float32)
    np.save(tmp_path / "rows.npy", rows)

    def train(name: str, steps: int, replicas: int) -> dict[int, float]:
        for variable, value in Generation(1, replicas, 4).variables().items():
            monkeypatch.setenv(variable, value)
        folder = tmp_path / name
        options = elastic_replicas.Options(
            tmp_path / "rows.npy",
            folder / "run",
            folder / "local",
            steps=steps,
            batch=16,
            layers=1,
        )
        return elastic_replicas.train(options)

    whole = train("whole", 4, replicas=4)
    train("elastic", 2, replicas=4)
    later = train("elastic", 4, replicas=2)
    assert later.keys() == {3, 4}  # Step 2 is on the local disk alone.
    # float32 sums over other devices and microbatches.
    assert later == pytest.approx({n: whole[n] for n in later}, rel=1e-5)


def test_an_equinox_model_learns(tmp_path, capsys):
    sizes = {"batch": 64, "width": 32, "layers": 1}
    options = own_equinox_model.Options(tmp_path / "run", steps=30, **sizes)
    accuracy = own_equinox_model.train(options)
    assert np.mean(accuracy[-5:]) > np.mean(accuracy[:5]) + 0.25
    assert "blocks" in capsys.readouterr().out  # The plan was printed.


def test_dpo_prefers_what_was_chosen(model, tmp_path, capsys):
    pairs = [
        {"prompt": f"{n}? ", "chosen": f"{n}!", "rejected": "no no"} for n in range(9)
    ]
    file = tmp_path / "pairs.jsonl"
    file.write_text("\n".join(map(json.dumps, pairs)))
    options = dpo.Options(
        model, file, tmp_path / "tuned", steps=4, batch=8, seq=12, lr=1e-3
    )
    metrics = dpo.train(options)
    # Before the first update policy and reference are the same.
    np.testing.assert_allclose(metrics[0]["loss"], np.log(2), rtol=1e-6)
    losses = [each["loss"] for each in metrics]
    assert losses == sorted(losses, reverse=True)
    assert metrics[-1]["margin"] > 0
    assert len(capsys.readouterr().out.splitlines()) == 4
    assert bridge.from_hf_config(tmp_path / "tuned") == CONFIG


def test_fine_tuning_by_factors_saves_an_adapter_that_changes_the_model(
    model, tmp_path
):
    rows = [{"prompt": f"{n}+0=", "completion": str(n)} for n in range(8)]
    file = tmp_path / "data.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)))
    options = sft_lora.Options(
        *(model, file, tmp_path / "adapter"), steps=4, seq=8, lr=2e-2, base="int8"
    )
    losses = sft_lora.train(options)
    assert losses[-1] < losses[0]
    like = nnx.eval_shape(
        lambda: nnx.state(Decoder(CONFIG, rngs=nnx.Rngs(0)), nnx.Param)
    )
    base = bridge.load_hf(model, like)
    tuned = bridge.load_hf_with_lora(model, options.save, like)
    moved = jax.tree.map(lambda a, b: bool(jnp.any(a != b)), base, tuned)
    assert moved["layers"]["mlp"]["up_proj"]["kernel"].get_value()
    assert not moved["embed_tokens"]["embedding"].get_value()


def test_a_run_of_megatron_goes_on_and_returns(model, tmp_path):
    like = nnx.eval_shape(
        lambda: nnx.state(Decoder(CONFIG, rngs=nnx.Rngs(0)), nnx.Param)
    )
    params = bridge.load_hf(model, like)
    norms = [f"layers.{name}_layernorm.scale" for name in ("input", "pre_feedforward")]
    undecayed = ("norm.scale", *norms)
    settings = AdamSettings(1e-2, 0.9, 0.95, 1e-8, 0.1, 1.0, undecayed)
    mu, nu = (jax.tree.map(lambda x, v=v: x * 0 + v, params) for v in (1e-3, 1e-5))
    begun = Adam(params, mu, nu, jnp.int32(5), settings)
    given = {"consumed_samples": 40, "flags": {"clip_grad": 1.0}}
    bridge.megatron.save_megatron_adam(tmp_path / "run", begun, CONFIG, **given)
    np.save(tmp_path / "tokens.npy", np.arange(2000) * 7 % 50)
    options = continue_megatron.Options(
        *(tmp_path / "run", tmp_path / "tokens.npy", tmp_path / "out"),
        lr=1e-2,
        steps=2,
        seq=8,
    )
    losses = continue_megatron.train(options)
    assert losses[1] < losses[0]
    end = bridge.megatron.open_megatron(options.save)
    assert (end.iteration, end.consumed_samples) == (7, 56)
    found = bridge.megatron.load_megatron_adam(options.save, like)
    assert (int(found.count), found.settings) == (7, settings)
    # Moments decay from those that came, and do not begin anew at 0.
    moments = np.asarray(found.nu["norm"]["scale"].get_value())
    assert np.all(moments >= 0.95**2 * 1e-5 * (1 - 1e-5))


def test_a_model_of_nnx_learns_and_its_best_step_is_kept(tmp_path):
    sizes = {"width": 8, "blocks": 1, "batch": 64, "replicas": 2}
    options = own_nnx_model.Options(
        tmp_path / "run", steps=20, eval_every=5, lr=2e-2, **sizes
    )
    accuracy = own_nnx_model.train(options)
    assert list(accuracy) == [5, 10, 15, 20]
    assert max(accuracy.values()) > 0.6  # One class of four at random.


@pytest.mark.torch  # The engine gets tensors of torch.
def test_a_loop_of_rl_sends_each_step_to_the_engine(model, tmp_path):
    received = []

    def engine(server: socket.socket) -> None:
        answers, weights = server.accept()[0], server.accept()[0]
        rng = np.random.default_rng(0)
        with answers, weights:
            while not received or not received[-1][0]["last"]:
                tokens = rng.integers(0, 8, (8, 6))
                mask = np.tile(np.arange(6) > 1, (8, 1))
                rewards = (tokens[:, 2:] == 7).sum(axis=1)
                columns = {"tokens": tokens, "mask": mask, "rewards": rewards}
                line = json.dumps({k: v.tolist() for k, v in columns.items()})
                answers.sendall(f"{line}\n".encode())
                arriving = bridge.handover.receive_weights(weights)
                received.append((arriving.metadata, dict(arriving)))

    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(60)
        thread = threading.Thread(target=engine, args=(server,))
        thread.start()
        address = f"127.0.0.1:{server.getsockname()[1]}"
        options = rl_loop.Options(
            *(model, address, tmp_path / "tuned"), steps=3, lr=1e-2, dtype="float32"
        )
        metrics = rl_loop.train(options)
        thread.join(60)
    assert [each["step"] for each in metrics] == [1, 2, 3]
    assert [metadata["step"] for metadata, _ in received] == [1, 2, 3]
    name = "lm_head.weight"
    first, *_, last = (weights[name].numpy() for _, weights in received)
    assert not np.array_equal(first, last)
    stored = bridge.open_checkpoint(options.save)
    np.testing.assert_array_equal(last, stored.read(name))
