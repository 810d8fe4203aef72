"""`train --objective reward`: a score head on the final state of the last token."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers.tiny_tokenizer import write_tokenizer

import bridge
import fsdp_jax as fsdp
from bridge.hf._score_head import without_head
from fsdp_jax.cli import main
from fsdp_jax.cli._decoder import plan_decoder
from fsdp_jax.cli._tokenizer import open_codec

PAIRS = [
    {
        "prompt": f"{n} plus {n} is",
        "chosen": f" {2 * n}.",
        "rejected": f" {2 * n + 1}, or so.",
    }
    for n in range(8)
]
EOS = 256
SEQ, STEPS = 32, 3
# Sums of float32 in another order.
ANOTHER_ORDER = 2e-5


def write(file: Path, records) -> Path:
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    return file


@pytest.fixture(scope="module")
def pairs(tmp_path_factory) -> Path:
    return write(tmp_path_factory.mktemp("pairs") / "pairs.jsonl", PAIRS)


@pytest.fixture(scope="module")
def model(tmp_path_factory, write_llama) -> Path:
    folder = tmp_path_factory.mktemp("reward") / "model"
    write_llama(folder, vocab_size=264, eos_token_id=EOS)
    write_tokenizer(folder, ["</s>"])
    return folder


def train(model: Path, pairs: Path, save: Path, *options: str) -> int:
    argv = ["train", "--hf", str(model), "--data", str(pairs), "--save", str(save)]
    common = ["--seq", str(SEQ), "--batch", str(len(PAIRS)), "--lr", "1e-2"]
    lines = ["--metrics", str(save.with_suffix(".jsonl"))]
    return main([*argv, "--objective", "reward", *common, *lines, *options])


def metrics(save: Path) -> list[dict[str, float]]:
    return [json.loads(x) for x in save.with_suffix(".jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def run(model, pairs, tmp_path_factory) -> Path:
    """Three steps on all pairs at once, each of which is saved."""
    save = tmp_path_factory.mktemp("run") / "save"
    assert train(model, pairs, save, "--steps", str(STEPS), "--save-every", "1") == 0
    return save


@pytest.fixture(scope="module")
def weights(run) -> nnx.State:
    """Weights before the last step, on one device."""
    config = fsdp.checkpoint.load_metadata(run)["config"]
    mesh = fsdp.make_mesh(devices=jax.devices()[:1])
    plan = plan_decoder(bridge.from_hf_config(config), mesh, scored=True)
    return fsdp.checkpoint.load_params(run, plan.params, step=STEPS - 1)


def documents(model: Path) -> list[list[int]]:
    """Tokens of the answers behind their prompts, a chosen one first."""
    codec = open_codec("model", model / "tokenizer.json", 264)
    return [
        [*codec.encode(pair["prompt"] + pair[name]), EOS]
        for pair in PAIRS
        for name in ("chosen", "rejected")
    ]


def check_rewards(rewards: np.ndarray, told: dict[str, float], tolerance: float):
    """Compares a step with the rewards of all answers, by Bradley and Terry."""
    chosen, rejected = np.asarray(rewards, np.float64).reshape(-1, 2).T
    expected = {
        "loss": np.log1p(np.exp(rejected - chosen)).mean(),
        "chosen_rewards": chosen.mean(),
        "rejected_rewards": rejected.mean(),
        "reward_margin": (chosen - rejected).mean(),
        "reward_accuracy": (chosen > rejected).mean(),
    }
    found = {name: told[name] for name in expected}
    assert found == pytest.approx(expected, rel=tolerance, abs=tolerance)


def test_the_sharded_loss_is_the_formula_on_one_device(run, weights, model):
    config = bridge.from_hf_config(model)
    graph, _ = nnx.split(
        nnx.eval_shape(
            lambda: bridge.models.Decoder(
                without_head(config), rngs=nnx.Rngs(jax.random.key(0))
            )
        )
    )
    body = {name: tree for name, tree in weights.raw_mapping.items() if name != "score"}
    decoder: Any = nnx.merge(graph, nnx.State(body))
    kernel = np.asarray(weights["score"]["kernel"][...])

    def reward(ids: list[int]) -> float:
        states, _ = decoder.final_states(jnp.asarray([ids]))
        return (np.asarray(states[0, -1]) @ kernel).item()

    rewards = np.asarray([reward(ids) for ids in documents(model)])
    told = metrics(run)
    check_rewards(rewards, told[STEPS - 1], ANOTHER_ORDER)
    assert told[0]["loss"] > told[2]["loss"]


@pytest.mark.torch
def test_an_export_has_the_rewards_in_transformers(run, model, tmp_path, capsys):
    import torch
    import transformers

    out = tmp_path / "out"
    assert main(["export", str(run), str(out), "--step", str(STEPS - 1)]) == 0
    assert "pad_token_id is None" in capsys.readouterr().err
    theirs, loaded = transformers.AutoModelForSequenceClassification.from_pretrained(
        out, pad_token_id=0, dtype=torch.float32, output_loading_info=True
    )
    assert type(theirs).__name__ == "LlamaForSequenceClassification"
    assert not any(loaded.values())
    rows = documents(model)
    longest = max(map(len, rows))
    ids = torch.tensor([ids + [0] * (longest - len(ids)) for ids in rows])
    with torch.no_grad():
        rewards = theirs(ids, attention_mask=(ids != 0).long()).logits[:, 0].numpy()
    check_rewards(rewards, metrics(run)[STEPS - 1], 1e-5)


@pytest.mark.parametrize("axes", [["--dp-outer", "2"], ["--tp", "2"]])
def test_a_resumed_run_goes_on_with_its_score_head(axes, run, pairs, tmp_path):
    save = tmp_path / "again"
    argv = ["train", "--resume", str(run), "--resume-step", "2", "--save", str(save)]
    lines = ["--metrics", str(save.with_suffix(".jsonl")), *axes]
    assert main([*argv, "--data", str(pairs), "--steps", str(STEPS), *lines]) == 0
    (again,) = metrics(save)
    assert again["loss"] == pytest.approx(
        metrics(run)[STEPS - 1]["loss"], rel=ANOTHER_ORDER
    )


def test_all_tokens_of_both_answers_are_shown(model, pairs, capsys):
    argv = ["data", str(model), "--data", str(pairs), "--objective", "reward"]
    assert main([*argv, "--seq", str(SEQ), "--show", "1"]) == 0
    shown = capsys.readouterr().out
    assert "8 pairs" in shown and "8 pairs of rows of 32 tokens" in shown
    pair = next(x for x in PAIRS if x["prompt"] in shown)
    for name in ("chosen", "rejected"):
        # The reward is read at the token in brackets.
        assert f"{name}\n{pair['prompt']}{pair[name]}[</s>]" in shown


def test_an_answer_fits_a_row_to_its_last_token(model, pairs, tmp_path, capsys):
    longest = max(map(len, documents(model)))
    argv = ["data", str(model), "--data", str(pairs), "--objective", "reward"]
    assert main([*argv, "--seq", str(longest), "--show", "0"]) == 0
    assert "truncated" not in capsys.readouterr().out
    assert main([*argv, "--seq", str(longest - 1), "--show", "0"]) == 0
    assert "longer than --seq" in capsys.readouterr().out


@pytest.mark.parametrize(
    "options, named",
    [
        (["--cp", "2"], ["cp=2"]),
        (["--eval-data", "PAIRS"], ["--eval-data"]),
        (["--rows", "pad"], ["--rows pad"]),
        (["--sample", "1 plus"], ["--sample"]),
        (["--no-fused-loss"], ["--no-fused-loss"]),
        (["--dpo-beta", "0.1"], ["--dpo-beta 0.1"]),
        (["--label-smoothing", "0.1"], ["--label-smoothing 0.1"]),
        (["--z-loss", "1e-4"], ["--z-loss"]),
        (["--lora-rank", "2"], ["--lora-rank 2"]),
        (["--ema", "0.9"], ["--ema 0.9"]),
        (["--train-on", "all"], ["--train-on all"]),
    ],
)
def test_what_a_reward_model_has_not_is_refused(
    options, named, model, pairs, tmp_path, capsys
):
    given = [str(pairs) if x == "PAIRS" else x for x in options]
    assert train(model, pairs, tmp_path / "save", "--steps", "1", *given) == 2
    told = capsys.readouterr().err
    assert all(name in told for name in ("--objective reward", *named))
    assert not (tmp_path / "save").exists()


@pytest.mark.parametrize(
    "record, named",
    [
        ({"text": "a"}, ["text", "chosen", "rejected", "--objective", "reward"]),
        ({"chosen": "a", "rejected": "a"}, ["chosen", "rejected", "equal"]),
    ],
)
def test_records_that_are_no_pairs_are_named(record, named, model, tmp_path, capsys):
    file = write(tmp_path / "bad.jsonl", [PAIRS[0], record])
    assert train(model, file, tmp_path / "save", "--steps", "1") == 2
    told = capsys.readouterr().err
    assert all(name in told for name in (*named, "line 2", str(file)))


@pytest.mark.parametrize(
    "command",
    [
        ["export", "RUN", "OUT", "--megatron", "torch_dist"],
        ["generate", "RUN", "--prompt", "1"],
        ["inspect", "RUN"],
    ],
)
def test_other_commands_refuse_a_reward_model(command, run, tmp_path, capsys):
    places = {"RUN": run, "OUT": tmp_path / "out"}
    assert main([str(places.get(word, word)) for word in command]) == 2
    told = capsys.readouterr().err
    way_out = "--megatron" if command[0] == "export" else "--resume"
    assert all(fact in told for fact in ("reward model", str(run), way_out))
    assert not (tmp_path / "out").exists()
