"""Attention over `cp`: each form's results and gradients are those of whole rows."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.errors import facts
from helpers.hlo import collectives
from jax.sharding import PartitionSpec as P

import fsdp_jax as fsdp
from fsdp_jax import ops
from fsdp_jax.ops.attention import _blockwise

RANKS, BATCH, SEQ, HEADS, KV_HEADS, DIM = 4, 2, 48, 8, 2, 4


def plain(q, k, v, *, scale, segment_ids, window, softcap, sinks):
    """Attention as it is written down, of whole rows."""
    k, v = (jnp.repeat(x, q.shape[2] // k.shape[2], axis=2) for x in (k, v))
    scores = scale * jnp.einsum("bqhd,bkhd->bhqk", q, k)
    if softcap is not None:
        scores = softcap * jnp.tanh(scores / softcap)
    behind = np.subtract.outer(np.arange(SEQ), np.arange(SEQ))[None]
    seen = (behind >= 0) & (behind < (SEQ if window is None else window))
    if segment_ids is not None:
        seen = seen & (segment_ids[:, :, None] == segment_ids[:, None, :])
    scores = jnp.where(seen[:, None], scores, -jnp.inf)
    if sinks is not None:
        column = jnp.broadcast_to(sinks[None, :, None, None], (*scores.shape[:3], 1))
        scores = jnp.concatenate([scores, column], -1)
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores)[..., :SEQ], v)


FORMS = {
    "ring": ops.ring_attention,
    "all-gather": ops.all_gather_attention,
    "ulysses": ops.ulysses_attention(plain),
}
# Texts that end within chunks, at their ends, and on other ranks.
SEGMENTS = np.repeat([[0, 1, 2], [0, 1, 1]], [5, 31, 12], axis=1).astype(np.int32)
CASES = {
    "grouped heads": {},
    "a window": {"window": 9},
    "all at once": {
        "segment_ids": SEGMENTS,
        "window": jnp.int32(17),
        "softcap": 2.0,
        "sinks": np.linspace(-1.0, 1.0, HEADS),
    },
}
EXACT = 1e-12  # In float64, of numbers of about 1.


@pytest.fixture(autouse=True)
def _small_blocks_in_float64(monkeypatch):
    monkeypatch.setattr(_blockwise, "BLOCK", 3)  # Two in a chunk of six.
    with jax.enable_x64(True):
        yield


def heads():
    random = np.random.default_rng(0)
    shapes = [(HEADS, DIM), (KV_HEADS, DIM), (KV_HEADS, DIM), (HEADS, DIM)]
    return [random.normal(size=(BATCH, SEQ, *shape)) for shape in shapes]


def results(attention, q, k, v, cotangent, *, window=None, softcap=None, **arrays):
    """What it returns, and the gradients of queries, keys, values and sinks."""

    def fn(q, k, v, sinks):
        segments = arrays.get("segment_ids")
        return attention(
            *(q, k, v),
            scale=0.7,
            window=window,
            softcap=softcap,
            segment_ids=segments,
            sinks=sinks,
        )

    out, pull = jax.vjp(fn, q, k, v, arrays.get("sinks"))
    return out, pull(cotangent)


def over_ranks(attention, ranks=RANKS, *, order=ops.zigzag, **case):
    """The same of rows that are split over ranks, put together again."""
    mesh = fsdp.make_mesh(cp=ranks, devices=jax.devices()[:ranks])
    given = order(heads(), ranks)
    segments = case.pop("segment_ids", None)
    rows, whole = P(None, "cp"), P()
    split = None if segments is None else order(segments, ranks)
    sinks = case.pop("sinks", None)

    @jax.jit
    @functools.partial(
        jax.shard_map,
        mesh=mesh,
        in_specs=(rows, rows, whole),
        out_specs=(rows, (rows, rows, rows, whole)),
        check_vma=False,
    )
    def run(given, segments, sinks):
        out, grads = results(
            *(attention, *given), segment_ids=segments, sinks=sinks, **case
        )
        of_sinks = grads[3] if sinks is None else jax.lax.psum(grads[3], "cp")
        return out, (*grads[:3], of_sinks)

    out, grads = run(given, split, sinks)
    back = ops.inverse_zigzag if order is ops.zigzag else lambda x, _: x
    return run, (given, split, sinks), (back((out, grads[:3]), ranks), grads[3])


@functools.cache
def whole_rows(name):
    run = jax.jit(functools.partial(results, plain, **CASES[name]))
    out, grads = run(*heads())
    return (out, grads[:3]), grads[3]


def worst(got, want):
    pairs = zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True)
    return max(float(np.abs(np.asarray(a) - np.asarray(b)).max()) for a, b in pairs)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("form", FORMS)
def test_a_form_is_attention_to_whole_rows(form, case):
    *_, got = over_ranks(FORMS[form], **CASES[case])
    assert worst(got, whole_rows(case)) < EXACT


@pytest.mark.parametrize("ranks", [1, 3])
def test_a_ring_of_any_number_of_ranks_is_attention_to_whole_rows(ranks):
    case = "all at once"
    *_, got = over_ranks(ops.ring_attention, ranks, **CASES[case])
    assert worst(got, whole_rows(case)) < EXACT


@pytest.mark.parametrize("form", FORMS)
def test_tokens_that_are_not_in_the_order_of_the_zigzag_are_attended_to_wrongly(form):
    *_, got = over_ranks(FORMS[form], order=lambda tree, ranks: tree)
    assert worst(got, whole_rows("grouped heads")) > 0.1


def test_a_ring_sends_parts_to_neighbours_and_gathers_nothing():
    run, args, _ = over_ranks(ops.ring_attention, **CASES["a window"])
    text = run.lower(*args).compile().as_text()
    assert {one.op for one in collectives(text)} == {"collective-permute"}
    assert f",{SEQ}," not in text  # No dim as long as a row.


def test_zigzag_gives_each_rank_a_chunk_of_the_beginning_and_one_of_the_end():
    batch = {"tokens": np.arange(24).reshape(2, 12), "row": jnp.arange(12)[None]}
    laid = ops.zigzag(batch, 3)
    assert laid["row"].tolist() == [[0, 1, 10, 11, 2, 3, 8, 9, 4, 5, 6, 7]]
    assert laid["tokens"][1].tolist() == [12 + x for x in laid["row"][0].tolist()]
    assert isinstance(laid["tokens"], np.ndarray)
    back = ops.inverse_zigzag(laid, 3)
    assert worst(back, batch) == 0
    assert ops.zigzag(batch, 1) is batch


def test_zigzag_positions_are_where_the_tokens_of_a_rank_stand():
    rows = np.broadcast_to(np.arange(SEQ, dtype=np.int32), (BATCH, SEQ))
    mesh = fsdp.make_mesh(cp=RANKS, devices=jax.devices()[:RANKS])
    split = P(None, "cp")
    found = jax.shard_map(
        ops.zigzag_positions, mesh=mesh, in_specs=split, out_specs=split
    )(ops.zigzag(rows, RANKS))
    assert worst(found, ops.zigzag(rows, RANKS)) == 0
    assert worst(ops.zigzag_positions(jnp.asarray(rows)), rows) == 0


def test_rows_that_do_not_divide_into_chunks_are_refused_by_name():
    batch = {"tokens": np.zeros((2, 12)), "mask": np.zeros((2, 10))}
    with pytest.raises(
        ValueError, match=facts("['mask']", "10", "['tokens']", "12", "8")
    ):
        ops.zigzag(batch, 4)


def test_heads_that_ranks_do_not_divide_are_refused():
    with pytest.raises(ValueError, match=facts("8", "3", "'cp'", "ring_attention")):
        over_ranks(FORMS["ulysses"], 3)


def test_in_bfloat16_sums_are_kept_in_float32():
    given = [x.astype(jnp.bfloat16) for x in heads()]
    mixed = ops.ring_attention(*given[:3], scale=0.7)
    assert mixed.dtype == jnp.bfloat16
    exact = [np.asarray(x, np.float64) for x in given[:3]]
    want = plain(
        *exact, scale=0.7, segment_ids=None, window=None, softcap=None, sinks=None
    )
    # Weights and results are rounded to eight bits, once; sums of all are not.
    assert worst(mixed.astype(jnp.float64), want) < 2**-6


def bytes_held(attention, ranks):
    """Bytes of temporaries, forward and backward, of a rank that has 256 tokens."""
    mesh = fsdp.make_mesh(cp=ranks, devices=jax.devices()[:ranks])
    rows = P(None, "cp")

    def local(q, k, v):
        return jax.grad(lambda *x: attention(*x, scale=1.0).sum(), (0, 1, 2))(q, k, v)

    split = jax.shard_map(
        local, mesh=mesh, in_specs=rows, out_specs=rows, check_vma=False
    )
    like = jax.ShapeDtypeStruct((1, 256 * ranks, 1, 32), jnp.float32)
    return (
        jax.jit(split)
        .lower(like, like, like)
        .compile()
        .memory_analysis()
        .temp_size_in_bytes
    )


def test_a_ring_holds_no_more_of_a_longer_row_and_a_gather_does():
    jax.config.update("jax_disable_most_optimizations", False)
    try:
        ring, gather = (
            [bytes_held(FORMS[form], ranks) for ranks in (3, 8)]
            for form in ("ring", "all-gather")
        )
    finally:
        jax.config.update("jax_disable_most_optimizations", True)
    assert ring[1] < 1.1 * ring[0]
    assert gather[1] > 1.5 * gather[0]
