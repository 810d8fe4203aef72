"""`--remat` says what layers save, and saves no more where it can compute it again."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import optax
import pytest
from helpers.operations import counts_of

import fsdp_jax as fsdp
from bridge.models import DecoderConfig, MoEConfig
from bridge.models._fused_attention import RESIDUALS
from bridge.models._moe import EXPERT_PRODUCT
from fsdp_jax.cli._decoder import plan_decoder
from fsdp_jax.cli._decoder_loss import fused_next_token_loss
from fsdp_jax.cli._remat import Remat
from fsdp_jax.cli._routing import Routing
from fsdp_jax.cli._schedule_search import settings_of, with_settings
from fsdp_jax.cli._sharding_options import Strategy
from fsdp_jax.cli.commands._plan import Plan
from fsdp_jax.cli.commands._train import Train
from fsdp_jax.ops.moe._routes import RECEIVED

CONFIG = DecoderConfig(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=32,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=2,
    moe=MoEConfig(num_experts=8, num_experts_per_tok=2, intermediate_size=16),
)

DROPLESS = Routing()


def step_of(remat: Remat, routing: Routing = DROPLESS, *, padded: bool = False):
    """The trace of a step with experts over four ranks."""
    mesh = fsdp.make_mesh(ep=4)
    config = Strategy(remat=remat).applied(fsdp.FSDPConfig(), mesh, padded=padded)
    plan, tx = plan_decoder(CONFIG, mesh, config, routing), optax.sgd(0.1)
    step = fsdp.make_train_step(plan, fused_next_token_loss, tx)
    batch = jax.ShapeDtypeStruct((8, 17), jnp.int32)
    return step.jitted.trace(fsdp.abstract_state(plan, tx), batch).jaxpr.jaxpr


def test_tokens_that_were_sent_and_products_of_experts_are_saved_with_dots():
    def counted(remat, primitive):
        return sum(counts_of(step_of(remat), primitive))

    for primitive in ("all_to_all", "ragged_dot_general"):
        counts = {r: counted(r, primitive) for r in ("all", "dots", "nothing")}
        assert counts["dots"] == counts["all"] < counts["nothing"], primitive


@pytest.mark.parametrize("capacity", [None, 1.0], ids=["dropless", "capacity"])
def test_tokens_that_were_sent_in_float8_are_saved_with_dots(capacity):
    routing = Routing(capacity_factor=capacity, dispatch_dtype="float8")
    counts = {
        remat: sum(counts_of(step_of(remat, routing), "all_to_all"))
        for remat in ("all", "dots", "nothing")
    }
    assert counts["dots"] == counts["all"] < counts["nothing"]


@pytest.mark.parametrize("dtype", ["param_dtype", "float8"])
def test_with_dots_a_token_is_sent_to_each_node_once(dtype):
    routing = Routing(capacity_factor=1.0, dispatch_dtype=dtype, ranks_per_node=2)
    all_, dots, nothing = (
        # Of two dims: rows of tokens, and not the counts of them.
        sum(counts_of(step_of(remat, routing), "all_to_all", 2))
        for remat in ("all", "dots", "nothing")
    )
    assert dots == all_ + 1  # The copies within a node are made again,
    assert nothing == all_ + 2  # and here the token is sent to it again too.


def test_rows_that_are_padded_are_not_saved_with_dots():
    steps = {
        "dots": step_of("dots"),
        "padded": step_of("dots", padded=True),
        "nothing": step_of("nothing"),
    }
    for primitive in ("all_to_all", "ragged_dot_general"):
        counts = {name: sum(counts_of(s, primitive)) for name, s in steps.items()}
        assert counts["dots"] < counts["padded"] == counts["nothing"], primitive
    dots = {name: sum(counts_of(s, "dot_general")) for name, s in steps.items()}
    assert dots["dots"] <= dots["padded"] < dots["nothing"]  # one of what is sent again


def test_rows_of_experts_are_padded_over_ep_without_a_capacity():
    over_ep = fsdp.make_mesh(ep=2)
    assert Routing().pads(over_ep) and not Routing().pads(fsdp.make_mesh())
    assert not Routing(capacity_factor=1.0).pads(over_ep)


def test_dots_are_the_default_unless_weights_stay_gathered():
    assert Strategy().saved == "dots"
    assert Strategy(reshard=False).saved == "all"
    assert Strategy(remat="nothing").saved == "nothing"
    assert (Strategy().num_ahead, Strategy(reshard=False).num_ahead) == (1, 0)


def test_a_search_tries_weights_that_stay_gathered_with_all_saved():
    options = fsdp.training.compiler_options()
    start = settings_of(Strategy(), options)
    assert start["remat"] == "dots" and start["prefetch"] == 1
    changed, _ = with_settings(Strategy(), options, start | {"reshard": False})
    changed.check()
    config = changed.applied(fsdp.FSDPConfig(), fsdp.make_mesh())
    assert config.remat_policy is None and not config.reshard_after_forward


def test_a_plan_is_of_the_step_that_is_trained():
    ((planned,), (trained,)) = (
        [field.default for field in dataclasses.fields(of) if field.name == "strategy"]
        for of in (Plan, Train)
    )
    assert planned == trained


def test_the_names_to_save_are_those_that_the_documentation_says():
    page = Path(__file__).parents[2] / "docs/pages/how-to/tune-performance.md"
    for name in (RESIDUALS, EXPERT_PRODUCT, RECEIVED):
        assert f"`{name}`" in page.read_text()
