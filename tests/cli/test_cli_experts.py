"""Models with experts are trained from the command line, split over `ep`."""

import json
import re

import jax
import pytest
from flax import nnx
from helpers.errors import facts
from tiny_configs import hf_fields

import bridge
import fsdp_jax as fsdp
from bridge.models import Decoder
from fsdp_jax.cli import main
from fsdp_jax.cli._routing import Routing
from fsdp_jax.ops.moe._nodes import nodes_of

SIZES = {"vocab_size": 256, "num_hidden_layers": 2}


@pytest.fixture(scope="module")
def deepseek(tmp_path_factory) -> str:
    """Dense and sparse layers, shared experts, groups, and biases in the router."""
    fields = hf_fields("deepseek_v3", **SIZES, first_k_dense_replace=1)
    config = bridge.from_hf_config({**fields, "aux_loss_alpha": 0.01})
    model = Decoder(config, rngs=nnx.Rngs(jax.random.key(0)))
    path = tmp_path_factory.mktemp("deepseek") / "model"
    bridge.save_hf(path, nnx.state(model, nnx.Param), config)
    return str(path)


def train(model, text, out, *options) -> list[dict[str, float]]:
    argv = ["train", "--hf", model, "--data", str(text), "--save", str(out / "save")]
    argv += ["--steps", "2", "--batch", "8", "--seq", "16", "--lr", "1e-2"]
    assert main([*argv, "--metrics", str(out / "run.jsonl"), *options]) == 0
    lines = (out / "run.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def test_experts_on_four_devices_train_as_on_one(deepseek, text, tmp_path):
    options = ["--expert-bias-rate", "1e-3", "--router-z-loss-coef", "1e-3"]
    options += ["--aux-loss-over", "global"]
    four, one = (
        train(deepseek, text, tmp_path / name, *options, *more)
        for name, more in {"four": ["--ep", "4"], "one": ["--devices", "1"]}.items()
    )
    for a, b in zip(four, one, strict=True):
        for name in ("loss", "cross_entropy", "aux_loss", "z_loss", "grad_norm"):
            assert a[name] == pytest.approx(b[name], rel=2e-4), name
        assert a["max_expert_load"] == pytest.approx(b["max_expert_load"], rel=0.05)
        assert a["dropped_choices"] == 0
        balance = 0.01 * a["aux_loss"] + 1e-3 * a["z_loss"]
        assert a["loss"] == pytest.approx(a["cross_entropy"] + balance, rel=1e-5)


def test_a_capacity_drops_tokens_and_says_how_many(deepseek, text, tmp_path):
    (first, _) = train(
        deepseek, text, tmp_path, "--ep", "2", "--capacity-factor", "0.5"
    )
    assert first["dropped_choices"] > 0


def test_tokens_are_sent_in_float8_on_any_number_of_devices(deepseek, text, tmp_path):
    options = ["--dispatch-dtype", "float8"]
    four, one, plain = (
        train(deepseek, text, tmp_path / name, *more)[0]
        for name, more in {
            "four": ["--ep", "4", *options],
            "one": ["--devices", "1", *options],
            "plain": ["--devices", "1"],
        }.items()
    )
    for name in ("loss", "grad_norm"):
        assert four[name] == pytest.approx(one[name], rel=2e-4), name
        # One device computes the same to the bit, so it is the rounding that differs.
        assert one[name] != plain[name], name
        assert one[name] == pytest.approx(plain[name], rel=0.05), name


@pytest.mark.parametrize(
    "routing, message",
    [
        (Routing(dispatch_dtype="float8"), ["--dispatch-dtype float8"]),
        (Routing(capacity_factor=1.0), ["--capacity-factor 1.0"]),
        (Routing(ranks_per_node=8), ["--ranks-per-node 8"]),
        (
            Routing(router_z_loss_coef=0.1, aux_loss_coef=0.1),
            ["--aux-loss-coef 0.1, --router-z-loss-coef 0.1"],
        ),
        (Routing(expert_bias_rate=1e-3), ["--expert-bias-rate 0.001"]),
    ],
)
def test_options_of_experts_are_refused_for_a_dense_model(routing, message):
    with pytest.raises(ValueError, match=facts(*message)):
        routing.check(bridge.from_hf_config(hf_fields("llama")))


def test_a_bias_that_is_not_there_cannot_follow_the_load():
    with pytest.raises(
        ValueError, match=facts("--expert-bias-rate 0.001", "olmoe", "--aux-loss-coef")
    ):
        Routing(expert_bias_rate=1e-3).check(bridge.from_hf_config(hf_fields("olmoe")))


def test_one_copy_a_node_trains_as_one_for_each_expert(
    deepseek, text, tmp_path, monkeypatch
):
    """Two nodes of two ranks."""
    found = []
    monkeypatch.setattr(
        "fsdp_jax.ops.moe._dispatch.nodes_of",
        lambda *args: found.append(nodes_of(*args)) or found[-1],
    )
    nodes = ["--ranks-per-node", "2", "--nodes-per-token", "2"]
    options = ["--ep", "4", "--capacity-factor", "0.5"]
    direct, by_node = (
        train(deepseek, text, tmp_path / name, *options, *more)
        for name, more in {"direct": [], "by node": nodes}.items()
    )
    for a, b in zip(direct, by_node, strict=True):
        assert a["dropped_choices"] == b["dropped_choices"] > 0
        for name in ("loss", "grad_norm"):  # Sums of a token's outputs in other orders.
            assert a[name] == pytest.approx(b[name], rel=1e-5), name
    assert {nodes and nodes.count for nodes in found} == {None, 2}


@pytest.mark.parametrize(
    "routing, message",
    [
        (Routing(ranks_per_node=8), ["--ranks-per-node 8", "--capacity-factor"]),
        (Routing(nodes_per_token=4), ["--nodes-per-token 4", "--ranks-per-node"]),
        (
            Routing(capacity_factor=1.0, ranks_per_node=0, nodes_per_token=-1),
            ["--ranks-per-node 0", "--nodes-per-token -1"],
        ),
    ],
)
def test_nodes_that_have_no_effect_or_no_ranks_are_refused(routing, message):
    assert re.search(facts(*message), "; ".join(routing.problems()))
    if routing.capacity_factor is None:
        with pytest.raises(ValueError, match=facts(*message)):
            _ = routing.dispatch


def test_nodes_that_hold_a_part_of_the_ranks_are_refused(deepseek, text, tmp_path):
    argv = ["train", "--hf", deepseek, "--data", str(text), "--save", str(tmp_path)]
    argv += ["--steps", "1", "--batch", "8", "--seq", "16", "--ep", "4"]
    routing = Routing(capacity_factor=1.0, ranks_per_node=3)
    with pytest.raises(ValueError, match=facts("--ranks-per-node 3", "4", "ep")):
        routing.check_mesh(fsdp.make_mesh(ep=4))
    routing.check_mesh(fsdp.make_mesh(ep=2))  # All on one node.
    assert main([*argv, "--capacity-factor", "1", "--ranks-per-node", "3"]) == 2


@pytest.mark.plan
@pytest.mark.parametrize("option", ["--nodes-per-token 1", "--ranks-per-node 3"])
def test_a_plan_refuses_the_same_nodes(deepseek, capsys, option):
    argv = ["plan", "--hf", deepseek, "--gpus", "8", "--mesh", "ep=4", "--seq", "16"]
    assert main([*argv, "--capacity-factor", "1", *option.split()]) == 2
    assert re.search(facts(option, "--ranks-per-node"), capsys.readouterr().err)
