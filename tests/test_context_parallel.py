"""Decoders whose rows are split over `cp` train as they do on one device."""

import dataclasses
import functools
from typing import Any

import jax
import numpy as np
import optax
import pytest
from flax import nnx
from helpers.compare import host, worst
from helpers.errors import facts
from tiny_configs import hf_fields

import bridge
import fsdp_jax as fsdp
from bridge.models import (
    Decoder,
    DecoderConfig,
    DecoderLayer,
    dot_product_attention,
    expert_parallel_rules,
    plain_recurrence,
    positions_in_order,
    tensor_parallel_rules,
)
from fsdp_jax import ops

TX = optax.adamw(1e-2, eps=1e-3)
ROWS, SEQ, VOCAB, STEPS = 8, 32, 96, 3
# ||a - b|| / ||b|| of each parameter in float32, after three steps.
PARAMETERS = 2e-5
FORMS = {
    "ring": ops.ring_attention,
    "all-gather": ops.all_gather_attention,
    "ulysses": ops.ulysses_attention(dot_product_attention),
}


@dataclasses.dataclass(frozen=True)
class Case:
    """A family, how eight devices share it, and which attention it has."""

    family: str
    mesh: dict[str, int]
    form: str = "ring"
    num_microbatches: int = 1
    prefetch: int = 0
    marks: tuple[Any, ...] = ()
    within: float = PARAMETERS


LONG = (pytest.mark.long,)
CASES = {
    "dp 4 x cp 2": Case("llama", {"cp": 2}, prefetch=1),
    "cp 4 x tp 2": Case("llama", {"cp": 4, "tp": 2}),
    "dp 2 x cp 2 x tp 2": Case("llama", {"cp": 2, "tp": 2}, "all-gather"),
    "cp 2 x ep 4": Case("mixtral", {"cp": 2, "ep": 4}, "ulysses"),
    "dp 2 x pp 2 x cp 2": Case("llama", {"pp": 2, "cp": 2}, "ulysses", 2),
    "pp 2 x cp 2 x tp 2": Case(
        "llama", {"pp": 2, "cp": 2, "tp": 2}, "all-gather", 2, 1, marks=LONG
    ),
    "hsdp 2 x cp 4": Case("llama", {"dp_outer": 2, "cp": 4}, "ulysses", 2, marks=LONG),
    # Layers with and without a window, and scores that are bent.
    "dp 2 x cp 4": Case("gemma2", {"cp": 4}, marks=LONG),
    # Layers whose state passes from rank to rank, and texts that end on any.
    "convolutions, cp 2": Case("lfm2", {"cp": 2}, "all-gather"),
    # Its recurrences and routers in float32 round more: with all else in float64, these
    # steps differ by 2e-6, and in float32 by 7e-5.
    "delta nets, cp 4 x ep 2": Case(
        "qwen3_next", {"cp": 4, "ep": 2}, "all-gather", marks=LONG, within=2e-4
    ),
    "attention beside Mamba, cp 2": Case("falcon_h1", {"cp": 2}, marks=LONG),
    "distances, cp 2": Case("mpt", {"cp": 2}, marks=LONG),
    "chunks, cp 2": Case("llama4", {"cp": 2}, marks=LONG),
    "dp 2 x cp 2 x ep 2": Case("mixtral", {"cp": 2, "ep": 2}, marks=LONG),
}


@functools.cache
def config_of(family: str) -> DecoderConfig:
    # Far from zero, so that it matters who is attended to.
    fields: dict[str, Any] = {"vocab_size": VOCAB, "initializer_range": 0.3}
    if family == "mixtral":
        fields["num_local_experts"] = 4
    if family == "lfm2":
        fields["layer_types"] = ["conv", "full_attention"]
    return bridge.from_hf_config(hf_fields(family, num_hidden_layers=2, **fields))


def plan_of(case: Case, mesh=None, **options: Any) -> fsdp.Plan:
    mesh = mesh or fsdp.make_mesh(**case.mesh)
    config = config_of(case.family)
    options = {
        "attention": ops.split_heads(FORMS[case.form]),
        "positions": ops.zigzag_positions,
        "recurrence": ops.all_gather_recurrence,
    } | options

    def make(key):
        return Decoder(
            config,
            rngs=nnx.Rngs(key),
            scan=functools.partial(fsdp.scan, prefetch=case.prefetch),
            dispatch=ops.expert_parallel_dispatch,
            constrain=ops.sequence_parallel,
            **options,
        )

    sharding = fsdp.FSDPConfig(
        tensor_parallel=tensor_parallel_rules(config, mesh.shape["tp"]),
        expert_parallel=expert_parallel_rules(config),
        context_parallel={"*": 1},
    )
    return fsdp.fully_shard(make, mesh, [DecoderLayer], sharding)


def loss(model: Decoder, batch):
    logits, stats = model.with_router_stats(
        batch["tokens"], segment_ids=batch["segments"]
    )
    losses = ops.vocab_parallel_cross_entropy(logits, batch["targets"])
    if stats is None:
        return losses.mean()
    balance = ops.load_balancing_loss(*stats[:2], over="sequence").sum()
    return losses.mean() + 0.1 * balance


def fused_loss(model: Decoder, batch):
    states, _ = model.final_states(batch["tokens"], segment_ids=batch["segments"])
    head = ops.pad_vocabulary(model.head_kernel())
    return ops.fused_linear_cross_entropy(
        states, head, batch["targets"], vocab_size=VOCAB, chunk=20
    ).mean()


def plain_loss(model: Decoder, batch):
    logits = model(batch["tokens"], segment_ids=batch["segments"])
    return ops.vocab_parallel_cross_entropy(logits, batch["targets"]).mean()


def replaying_loss(model: Decoder, batch):
    # Layers last in the batch, whose first dims are those of the tokens.
    experts = jax.numpy.moveaxis(batch["experts"], 2, 0)
    logits, _ = model.with_router_stats(
        batch["tokens"], segment_ids=batch["segments"], experts=experts
    )
    return ops.vocab_parallel_cross_entropy(logits, batch["targets"]).mean()


def with_experts(batch):
    random = np.random.default_rng(1)
    scores = random.normal(size=(ROWS, SEQ, 2, 4))  # Layers, experts.
    return batch | {"experts": np.argsort(scores, axis=-1)[..., :2].astype(np.int32)}


def batches() -> list[dict[str, np.ndarray]]:
    """Rows of two texts each, whose ends are on different ranks."""
    random = np.random.default_rng(0)
    rows = random.integers(0, VOCAB, (STEPS, ROWS, SEQ + 1)).astype(np.int32)
    ends = random.integers(1, SEQ, (STEPS, ROWS, 1))
    segments = (np.arange(SEQ) >= ends).astype(np.int32)
    return [
        {"tokens": row[:, :-1], "targets": row[:, 1:], "segments": texts}
        for row, texts in zip(rows, segments, strict=True)
    ]


def trained(
    plan: fsdp.Plan, num_microbatches: int = 1, loss_fn=loss, prepare=lambda b: b
):
    """Parameters after three steps, and the last loss."""
    step = fsdp.make_train_step(plan, loss_fn, TX, num_microbatches=num_microbatches)
    state = fsdp.init_state(plan, TX, fsdp.init_params(plan, jax.random.key(0)))
    metrics = {}
    for batch in batches():
        state, metrics = step(state, ops.zigzag(prepare(batch), plan.mesh.shape["cp"]))
    return host(fsdp.sharding.unpack(state.params)), float(metrics["loss"])


@functools.cache
def one_device(family: str, **options: Any):
    alone = fsdp.make_mesh(devices=jax.devices()[:1])
    plain = {"attention": dot_product_attention, "positions": positions_in_order}
    return trained(plan_of(Case(family, {}), alone, **plain), **options)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=case.marks) for name, case in CASES.items()]
)
def test_three_steps_over_cp_are_those_of_one_device(name):
    case = CASES[name]
    got, got_loss = trained(plan_of(case), num_microbatches=case.num_microbatches)
    want, want_loss = one_device(case.family)
    assert worst(got, want) < case.within
    assert abs(got_loss - want_loss) < 1e-5


def test_the_law_of_layers_with_a_state_fails_if_each_rank_begins_anew():
    case = CASES["convolutions, cp 2"]
    plan = plan_of(case, recurrence=plain_recurrence)
    assert worst(trained(plan)[0], one_device(case.family)[0]) > 10 * PARAMETERS


def test_a_fused_head_over_cp_and_tp_trains_as_logits_of_one_device_do():
    case = dataclasses.replace(CASES["dp 2 x cp 2 x tp 2"], form="ulysses")
    got, got_loss = trained(plan_of(case), loss_fn=fused_loss)
    want, want_loss = one_device("llama")
    assert worst(got, want) < PARAMETERS
    assert abs(got_loss - want_loss) < 1e-5


def test_experts_of_a_rollout_are_replayed_on_the_ranks_that_have_their_tokens():
    replay: dict[str, Any] = {"loss_fn": replaying_loss, "prepare": with_experts}
    case = CASES["cp 2 x ep 4"]
    got, got_loss = trained(plan_of(case), num_microbatches=2, **replay)
    want, want_loss = one_device("mixtral", **replay)
    assert worst(got, want) < PARAMETERS
    assert abs(got_loss - want_loss) < 1e-5
    assert abs(got_loss - one_device("mixtral", loss_fn=plain_loss)[1]) > 1e-4


def test_a_ring_in_a_stage_is_refused_as_it_would_wait_for_the_others():
    case = Case("llama", {"pp": 2, "cp": 2})
    with pytest.raises(
        ValueError,
        match=facts("cp=2", "pp=2", "--cp-form", "fsdp_jax.ops.all_gather_attention"),
    ):
        trained(plan_of(case), num_microbatches=2)


def test_heads_turned_by_places_on_the_rank_train_another_model():
    case = dataclasses.replace(CASES["dp 4 x cp 2"], form="ulysses", prefetch=0)
    got, _ = trained(plan_of(case, positions=positions_in_order))
    assert worst(got, one_device(case.family)[0]) > 100 * PARAMETERS
