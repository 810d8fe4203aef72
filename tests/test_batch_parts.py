"""A layer that runs parts of a batch side by side computes what it computes at once."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers.compare import worst
from helpers.errors import facts

import fsdp_jax as fsdp
from bridge.models import Decoder, DecoderConfig, MoEConfig, RopeConfig
from bridge.models._attention import attend, causal_mask
from bridge.models._batch_parts import join_rows, split_rows
from fsdp_jax.cli._decoder import plan_decoder
from fsdp_jax.cli._decoder_loss import next_token_loss
from fsdp_jax.cli._sharding_options import check_batch_parts
from fsdp_jax.sharding._memory_summary import unit_bytes
from fsdp_jax.training._compiler_options import compiler_options

ROWS, SEQ, VOCAB = 3, 8, 32
# Sums over rows in another order, in float64.
ROUNDING = 1e-12


def config(**fields) -> DecoderConfig:
    return DecoderConfig(
        vocab_size=VOCAB,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        rope=RopeConfig(rope_theta=1e4),
        **fields,
    )


EXPERTS = MoEConfig(num_experts=4, num_experts_per_tok=2, intermediate_size=8)


def float64_attention(query, key, value, *, scale, segment_ids, window, **others):
    """Attention in the dtype of its arguments; jax's has a float32 softmax."""
    mask = causal_mask(query.shape[1], segment_ids, window)
    return attend(query, key, value, scale, mask, **others)


def tokens(rows: int) -> np.ndarray:
    shape = (rows, SEQ + 1)
    return np.random.default_rng(0).integers(0, VOCAB, shape).astype(np.int32)


@pytest.mark.parametrize("rows, parts, sizes", [(5, 2, [3, 2]), (2, 4, [1, 1])])
def test_the_parts_of_a_batch_have_all_of_its_rows_in_order(rows, parts, sizes):
    tree = {"x": np.arange(2 * rows).reshape(rows, 2), "shared": np.ones((1, 3))}
    found = split_rows({**tree, "window": 7}, rows, parts)
    assert [len(part["x"]) for part in found] == sizes
    assert all(part["window"] == 7 for part in found)
    assert all(part["shared"] is tree["shared"] for part in found)
    joined = join_rows([part["x"] for part in found])
    np.testing.assert_array_equal(joined, tree["x"])


@pytest.mark.parametrize("moe", [None, EXPERTS], ids=["dense", "experts"])
def test_logits_statistics_and_gradients_do_not_depend_on_the_parts(moe):
    segments = np.repeat([[0, 0, 0, 1, 1, 2, 2, 2]], ROWS, axis=0)
    segments[1] = 0
    batch = tokens(ROWS)[:, :-1]

    def of(parts: int, segments: np.ndarray):
        decoder = Decoder(
            config(moe=moe),
            rngs=nnx.Rngs(0),
            param_dtype=jnp.float64,
            attention=float64_attention,
            batch_parts=parts,
        )
        graph, params = nnx.split(decoder, nnx.Param)

        @jax.jit
        def loss(params):
            model = nnx.merge(graph, params)
            logits, stats = model.with_router_stats(batch, None, segments)
            # No expert drops a token, so that their number has no relative error.
            return jnp.square(logits).sum(), (logits, stats and stats[:3])

        return jax.value_and_grad(loss, has_aux=True)(params)

    with jax.enable_x64(True):
        whole = of(1, segments)
        assert worst(of(2, segments), whole) < ROUNDING
        # A control: a row that gets another one's segments is seen.
        assert worst(of(2, segments[::-1][[1, 0, 2]]), whole) > 1e-4


def test_a_step_over_tp_does_not_depend_on_the_parts():
    mesh = fsdp.make_mesh(tp=2, devices=jax.devices()[:4])
    batch = tokens(4)

    def of(parts: int):
        plan = plan_decoder(config(), mesh, batch_parts=parts)
        params = fsdp.init_params(plan, jax.random.key(0))
        return fsdp.value_and_grad(plan, next_token_loss)(params, batch)

    # Sums in float32, in another order.
    assert worst(of(2), of(1)) < 1e-5


def test_no_part_is_without_rows_and_no_option_without_effect():
    with pytest.raises(ValueError, match=facts("batch_parts=0", "1")):
        Decoder(config(), rngs=nnx.Rngs(0), batch_parts=0)
    tp, flat = (fsdp.make_mesh(**sizes) for sizes in ({"tp": 2}, {}))
    check_batch_parts(2, 8, 1, tp)
    with pytest.raises(ValueError, match=facts("--batch-parts 2", "4", "--batch 8")):
        check_batch_parts(2, 4, 1, tp)
    with pytest.raises(ValueError, match=facts("--batch-parts 2", "tp=1", "ep=1")):
        check_batch_parts(2, 64, 1, flat)


def test_xla_may_combine_the_gradients_of_a_unit_and_no_more():
    plan = functools.partial(plan_decoder, config())
    mesh = fsdp.make_mesh(dp_outer=2, tp=2)
    planned = plan(mesh)
    unit = unit_bytes(mesh, planned.param_plans)
    # Two ranks of dp_shard share what each of them computes.
    assert unit.scattered == unit.gradients // 2
    options = compiler_options(plan=planned)
    name = "xla_gpu_reduce_scatter_combine_threshold_bytes"
    assert options[name] == unit.scattered
