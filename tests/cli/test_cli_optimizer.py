"""Optimizers, schedules and losses by option: each is what its name says elsewhere."""

from __future__ import annotations

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from helpers.errors import facts

import bridge
import fsdp_jax as fsdp
from bridge.models import Decoder, DecoderConfig
from fsdp_jax._tree import named_leaves
from fsdp_jax.cli import main
from fsdp_jax.cli._decoder import plan_decoder
from fsdp_jax.cli._optimizer import OptimizerConfig
from fsdp_jax.cli._train_config import config_of, stored_config

CONFIG = DecoderConfig(
    vocab_size=8,
    hidden_size=8,
    intermediate_size=8,
    num_hidden_layers=2,
    num_attention_heads=2,
)
# float32, of one program and another.
RTOL = 1e-5
KEYS = jax.random.split(jax.random.key(0), 4)
PARAMS = {
    "norm": {"scale": jnp.ones(4)},
    "proj": {"kernel": jax.random.normal(KEYS[0], (2, 4, 3, 2))},
}
GRADS = {
    "norm": {"scale": jax.random.normal(KEYS[1], (4,))},
    "proj": {"kernel": jax.random.normal(KEYS[2], (2, 4, 3, 2))},
}


def updates(tx: optax.GradientTransformation, steps: int = 3):
    params, state = PARAMS, tx.init(PARAMS)
    for _ in range(steps):
        changes, state = tx.update(GRADS, state, params)
        params = optax.apply_updates(params, changes)
    return params


def test_each_option_names_one_field_of_a_config():
    config = config_of({"tokenizer": "bytes"})
    parts = [x for x in vars(config).values() if dataclasses.is_dataclass(x)]
    names = [name for part in parts for name in vars(part)]
    assert len(names) == len(set(names))
    assert {*names, "microbatches"} == set(config.values())
    assert config_of(config.values()) == config
    assert stored_config(dataclasses.asdict(config)) == config


@pytest.mark.torch
@pytest.mark.parametrize("shape", ["constant", "linear", "cosine", "wsd"])
def test_a_schedule_is_that_of_transformers(shape):
    import torch
    import transformers

    lr, warmup, steps = 0.5, 4, 20
    made = {
        "constant": lambda o: transformers.get_constant_schedule_with_warmup(o, warmup),
        "linear": lambda o: transformers.get_linear_schedule_with_warmup(
            o, warmup, steps
        ),
        "cosine": lambda o: transformers.get_cosine_schedule_with_warmup(
            o, warmup, steps
        ),
        "wsd": lambda o: transformers.get_wsd_schedule(
            o, warmup, 5, num_training_steps=steps, decay_type="linear"
        ),
    }
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=lr)
    theirs = made[shape](optimizer)
    wanted = []
    for _ in range(steps + 1):  # After its end transformers' cosine rises again.
        wanted += theirs.get_last_lr()
        optimizer.step()
        theirs.step()
    options = {} if shape == "constant" else {"lr_steps": steps}
    options |= {"lr_decay": 0.25} if shape == "wsd" else {}
    schedule = OptimizerConfig(
        lr=lr, lr_schedule=shape, warmup=warmup, **options
    ).schedule()
    found = [float(schedule(step)) for step in range(steps + 1)]
    np.testing.assert_allclose(found, wanted, atol=1e-6)


def test_a_schedule_ends_where_it_is_told_to():
    for shape in ("linear", "cosine", "wsd"):
        schedule = OptimizerConfig(
            lr=2.0, lr_schedule=shape, lr_steps=10, lr_end=0.25
        ).schedule()
        assert [float(schedule(step)) for step in (0, 10, 99)] == [2.0, 0.5, 0.5]


MASK = {"norm": {"scale": False}, "proj": {"kernel": True}}


@pytest.mark.parametrize(
    "config, plain",
    [
        (
            OptimizerConfig(lr=0.1, clip=0.5),
            optax.chain(
                optax.clip_by_global_norm(0.5),
                optax.adamw(0.1, weight_decay=0.1, mask=MASK),
            ),
        ),
        (
            OptimizerConfig("lion", lr=0.1),
            optax.lion(0.1, weight_decay=0.1, mask=MASK),
        ),
        (
            OptimizerConfig("adafactor", lr=0.1, weight_decay=0.0),
            optax.adafactor(0.1),
        ),
    ],
    ids=["adamw", "lion", "adafactor"],
)
def test_an_optimizer_is_what_optax_has_under_its_name(config, plain):
    ours, theirs = updates(config.make()), updates(plain)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=RTOL), ours, theirs)


def test_muon_orthogonalizes_each_matrix_of_a_stack():
    config = OptimizerConfig("muon", lr=1.0, weight_decay=0.0)
    matrices = {"proj.kernel": 1}  # [layers, in, heads, dim]
    tx = config.make(matrices)
    changes, _ = tx.update(GRADS, tx.init(PARAMS), PARAMS)
    stack = np.asarray(changes["proj"]["kernel"]).reshape(2, 4, 6)
    values = np.linalg.svd(stack, compute_uv=False)
    # Five iterations of Newton-Schulz bring every singular value near 1, here times
    # the factor 0.2 * sqrt(6) for the size of AdamW's updates.
    assert np.all(abs(values / (0.2 * np.sqrt(6)) - 1) < 0.4)
    given = np.linalg.svd(np.reshape(GRADS["proj"]["kernel"], (2, 4, 6)))[1]
    assert np.any(given.max(-1) / given.min(-1) > 2.5)  # The gradients were not.


def test_muon_without_matrices_is_refused():
    with pytest.raises(ValueError, match=facts("--optimizer muon", "adamw")):
        OptimizerConfig("muon").make()


@pytest.mark.parametrize(
    "options, wanted",
    [
        ({"lr_schedule": "cosine"}, ["--lr-schedule cosine", "--lr-steps"]),
        ({"lr_end": 0.5}, ["--lr-end 0.5", "--lr-schedule constant"]),
        ({"optimizer": "lion", "eps": 1e-6}, ["--eps 1e-06", "--optimizer lion"]),
        (
            {"lr_schedule": "cosine", "lr_steps": 5, "warmup": 5},
            ["--lr-steps 5", "--warmup 5"],
        ),
        (
            {"optimizer": "muon", "optimizer_bits": 8},
            ["--optimizer-bits 8", "--optimizer muon"],
        ),
        ({"optimizer": "muon", "lora_rank": 4}, ["--optimizer muon", "--lora-rank"]),
        ({"ema": 1.0}, ["--ema 1.0"]),
        ({"ema": 0.5, "lora_rank": 4}, ["--ema", "--lora-rank"]),
        ({"label_smoothing": 1.0, "z_loss": -1.0}, ["--label-smoothing", "--z-loss"]),
    ],
)
def test_options_without_effect_or_out_of_range_are_refused(options, wanted):
    with pytest.raises(ValueError, match=facts(*wanted)):
        config_of({"tokenizer": "bytes", **options})


def losses(path) -> list[float]:
    return [json.loads(line)["loss"] for line in path.read_text().splitlines()]


def test_a_run_with_muon_and_a_schedule_resumes_to_the_bit(
    llama, text, tmp_path, capsys
):
    def train(name: str, *argv: str) -> list[float]:
        metrics = tmp_path / f"{name}.jsonl"
        where = ["--save", str(tmp_path / name), "--metrics", str(metrics)]
        status = main(["train", "--data", str(text), *where, *argv])
        assert status == 0, capsys.readouterr().err
        return losses(metrics)

    start = ["--hf", str(llama), "--seq", "16", "--save-every", "1", "--steps", "3"]
    start += ["--optimizer", "muon", "--lr-schedule", "cosine", "--warmup", "1"]
    start += ["--clip", "1", "--label-smoothing", "0.1", "--z-loss", "1e-3"]
    whole = train("whole", *start)
    resume = ["--resume", str(tmp_path / "whole"), "--resume-step", "2", "--steps", "3"]
    assert train("again", *resume) == whole[2:]
    shapes = fsdp.checkpoint.load_shapes(tmp_path / "whole")
    muon = [n for n in shapes if "opt_state" in n and "q_proj" in n]
    assert len(muon) == 1  # Muon has one moment, Adam has two.
    config = fsdp.checkpoint.load_metadata(tmp_path / "whole")["train"]["optimizer"]
    assert (config["optimizer"], config["lr_steps"]) == ("muon", 3)


def test_patterns_without_decay_that_match_nothing_are_named(
    llama, text, tmp_path, capsys
):
    save = ["--save", str(tmp_path / "save"), "--no-decay", "*.scale,[,norms.*"]
    argv = ["train", "--hf", str(llama), "--data", str(text), "--steps", "1", *save]
    assert main([*argv, "--seq", "16"]) == 2
    told = capsys.readouterr().err
    assert all(name in told for name in ("--no-decay", "'['", "'norms.*'"))
    assert "'*.scale'" not in told and not (tmp_path / "save").exists()


def test_norms_and_biases_are_not_decayed_by_default():
    config = dataclasses.replace(CONFIG, attention_bias=True)
    model = nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0)))
    flags = dict(named_leaves(OptimizerConfig().is_decayed(nnx.state(model))))
    kept = {name.rpartition(".")[2] for name, flag in flags.items() if not flag}
    decayed = {name.rpartition(".")[2] for name, flag in flags.items() if flag}
    assert (kept, decayed) == ({"scale", "bias"}, {"kernel", "embedding"})


def test_an_average_of_the_weights_is_kept_and_exported(llama, text, tmp_path, capsys):
    run = str(tmp_path / "run")
    argv = ["train", "--hf", str(llama), "--data", str(text), "--seq", "16"]
    argv += ["--save", run, "--lr", "1e-2", "--save-every", "1", "--steps", "2"]
    assert main([*argv, "--ema", "0.75"]) == 0
    plan = plan_decoder(bridge.from_hf_config(llama), fsdp.make_mesh())
    average = bridge.load_hf(llama, plan.params)
    for step in (1, 2):
        weights = fsdp.checkpoint.load_params(run, plan.params, step=step)
        average = jax.tree.map(lambda a, w: 0.75 * a + 0.25 * w, average, weights)
    assert main(["export", run, str(tmp_path / "mean"), "--ema"]) == 0
    found = bridge.load_hf(tmp_path / "mean", plan.params)
    for ours, theirs in zip(*map(jax.tree.leaves, (found, average)), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-6)
    moved = jax.tree.map(lambda a, b: float(jnp.abs(a - b).max()), found, weights)
    assert min(jax.tree.leaves(moved)) > 1e-3  # So it is not the newest weights.
    capsys.readouterr()
    rest = ["--data", str(text), "--steps", "3", "--save", str(tmp_path / "rest")]
    assert main(["train", "--resume", run, *rest, "--ema", "0"]) == 2
    assert "--ema 0" in capsys.readouterr().err
    assert main(["export", str(llama), str(tmp_path / "x"), "--ema"]) == 2
    assert main(["eval", str(llama), "--data", str(text), "--ema"]) == 2
    assert "--ema" in capsys.readouterr().err


@pytest.mark.parametrize("warmup, is_said", [("1", False), ("2", True)])
def test_a_rate_that_never_reaches_its_peak_is_said(
    warmup, is_said, llama, text, tmp_path, fake_step, capsys
):
    fake_step(5, 4)
    argv = ["train", "--hf", str(llama), "--data", str(text), "--steps", "2"]
    argv += ["--batch", "8", "--seq", "16", "--save", str(tmp_path / "run")]
    assert main([*argv, "--warmup", warmup]) == 0
    assert (f"--warmup {warmup}" in capsys.readouterr().err) == is_said
