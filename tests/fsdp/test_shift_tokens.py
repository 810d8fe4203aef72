"""Rows shifted by tokens: over `cp` as whole, packed as alone; what MTP makes of it."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers.compare import host, worst
from helpers.errors import facts
from helpers.hlo import collectives
from jax.sharding import PartitionSpec as P

import fsdp_jax as fsdp
from fsdp_jax import ops

RANKS, BATCH, SEQ = 4, 2, 48  # Chunks of six tokens.
# Documents that end within chunks, at their ends, and on other ranks; one is a token.
LENGTHS = [[5, 1, 18, 12, 12], [7, 23, 6, 11, 1]]
DOCUMENTS = np.stack([np.repeat(np.arange(1, 6), n) for n in LENGTHS]).astype(np.int32)
OFFSETS = (1, 3, 6, -1, -5)
FILL = -7


def shifted(row, offset, fill=FILL):
    """A row shifted as the words say: element by element."""
    moved = np.full_like(row, fill)
    for place in range(len(row)):
        if 0 <= place + offset < len(row):
            moved[place] = row[place + offset]
    return moved


def alone(x, offset, segments):
    """Each document shifted in a row of its own, and packed again."""
    made = np.empty_like(x)
    for row, ids in enumerate(segments):
        for one in np.unique(ids):
            made[row, ids == one] = shifted(x[row, ids == one], offset)
    return made


def elements(dtype, *dims):
    random = np.random.default_rng(0)
    return random.integers(0, 100, (BATCH, SEQ, *dims)).astype(dtype)


def over_ranks(fn, *rows, ranks=RANKS):
    """What `fn` makes of rows that are split over ranks, put together again."""
    mesh = fsdp.make_mesh(cp=ranks, devices=jax.devices()[:ranks])
    split = P(None, "cp")
    run = jax.jit(jax.shard_map(fn, mesh=mesh, in_specs=split, out_specs=split))
    out = run(*ops.zigzag(rows, ranks))
    return np.asarray(ops.inverse_zigzag(out, ranks))


def shift(x, segments=None, **options):
    return ops.shift_tokens(x, segment_ids=segments, fill=FILL, **options)


@pytest.mark.parametrize("offset", OFFSETS)
@pytest.mark.parametrize("ranks", [1, 2, RANKS])
def test_rows_split_over_cp_are_shifted_as_whole_ones(ranks, offset):
    fn = functools.partial(shift, offset=offset)
    for x in (elements(np.int32), elements(np.float32, 3)):
        want = np.stack([shifted(row, offset) for row in x])
        np.testing.assert_array_equal(over_ranks(fn, x, ranks=ranks), want)
        np.testing.assert_array_equal(fn(jnp.asarray(x)), want)


@pytest.mark.parametrize("offset", OFFSETS)
def test_packed_documents_are_shifted_as_those_that_are_alone(offset):
    fn = functools.partial(shift, offset=offset)
    x = elements(np.int32)
    want = alone(x, offset, DOCUMENTS)
    np.testing.assert_array_equal(over_ranks(fn, x, DOCUMENTS), want)
    np.testing.assert_array_equal(fn(jnp.asarray(x), jnp.asarray(DOCUMENTS)), want)
    # So documents do something.
    assert (over_ranks(fn, x) != want).any()


def test_shifts_of_one_are_one_shift_of_their_sum():
    x, twice = elements(np.int32), lambda x, ids: shift(shift(x, ids), ids)
    want = alone(x, 2, DOCUMENTS)
    np.testing.assert_array_equal(over_ranks(twice, x, DOCUMENTS), want)


def test_parts_that_are_shifted_without_their_neighbours_are_wrong():
    fn = functools.partial(shift, axis="none such")
    x = elements(np.int32)
    wrong = over_ranks(fn, x) != np.stack([shifted(row, 1) for row in x])
    # At each border between chunks but the one whose chunks the last rank has both.
    assert wrong.sum() == BATCH * (2 * RANKS - 2)


def test_what_is_communicated_are_borders():
    mesh = fsdp.make_mesh(cp=RANKS, devices=jax.devices()[:RANKS])
    split = P(None, "cp")
    fn = jax.shard_map(
        functools.partial(ops.shift_tokens, offset=2),
        mesh=mesh,
        in_specs=split,
        out_specs=split,
    )
    text = str(jax.jit(fn).lower(elements(np.int32)).compile().as_text())
    borders = BATCH * 2 * RANKS * 2  # Two tokens of each of the two chunks of a rank.
    found = {(one.op, one.size) for one in collectives(text)}
    assert found == {("all-gather", borders)}


def test_an_offset_longer_than_a_chunk_is_refused():
    fn = functools.partial(shift, offset=7)
    with pytest.raises(
        ValueError, match=facts("offset=7", "cp=4", "6 tokens", "zigzag")
    ):
        over_ranks(fn, elements(np.int32))


# Multi-token prediction

VOCAB, EMBED, DEPTHS, ROWS = 31, 8, 2, 8
TX = optax.adam(1e-2)


def make_weights(key):
    def draw(*shape):
        return 0.5 * jax.random.normal(jax.random.fold_in(key, len(shape)), shape)

    return {
        "embed": draw(VOCAB, EMBED),
        "attention": draw(3, EMBED, EMBED),
        "depths": draw(DEPTHS, 2, EMBED, EMBED),
    }


def mtp_loss(weights, batch, shift=ops.shift_tokens):
    """Sum and number of the losses of the next token and of those behind it."""
    tokens, segments = batch["tokens"], batch["segments"]
    heads = [(weights["embed"][tokens] @ w)[:, :, None] for w in weights["attention"]]
    x = ops.ring_attention(*heads, scale=1.0, segment_ids=segments)[:, :, 0]
    total, count = 0.0, 0.0
    for depth in range(DEPTHS + 1):
        if depth:
            later = shift(tokens, depth, segment_ids=segments)
            now, ahead = weights["depths"][depth - 1]
            x = jnp.tanh(x @ now + weights["embed"][later] @ ahead)
        # Targets of documents' last tokens are none.
        targets = shift(tokens, depth + 1, segment_ids=segments, fill=-1)
        losses = optax.softmax_cross_entropy_with_integer_labels(
            x @ weights["embed"].T, jnp.maximum(targets, 0)
        )
        total += jnp.where(targets >= 0, losses, 0.0).sum()
        count += (targets >= 0).sum().astype(jnp.float32)
    return total, count


def rows():
    random = np.random.default_rng(1)
    tokens = random.integers(0, VOCAB, (ROWS, SEQ)).astype(np.int32)
    return {"tokens": tokens, "segments": np.tile(DOCUMENTS, (ROWS // BATCH, 1))}


def step_of(loss, **mesh):
    config = fsdp.FSDPConfig(context_parallel={"*": 1})
    plan = fsdp.fully_shard(make_weights, fsdp.make_mesh(**mesh), config=config)
    return plan, fsdp.make_train_step(plan, loss, TX, calculate_per_token_loss=True)


def trained(loss=mtp_loss, **mesh):
    """Parameters after three steps and the last loss."""
    plan, step = step_of(loss, **mesh)
    state = fsdp.init_state(plan, TX, fsdp.init_params(plan, jax.random.key(0)))
    metrics = {}
    for _ in range(3):
        state, metrics = step(state, ops.zigzag(rows(), plan.mesh.shape["cp"]))
    return host(fsdp.unshard(state.params)), float(metrics["loss"])


@pytest.fixture(scope="module")
def one_device():
    return trained(devices=jax.devices()[:1])


def test_steps_of_multi_token_prediction_over_cp_are_those_of_one_device(one_device):
    got, loss = trained(cp=4)
    want, want_loss = one_device
    assert worst(got, want) < 1e-5
    assert abs(loss - want_loss) < 1e-5


def test_the_audit_of_a_step_lets_borders_pass():
    plan, step = step_of(mtp_loss, cp=4)
    fsdp.audit_step(plan, step.lower(fsdp.abstract_state(plan, TX), rows()))


def test_steps_that_shift_each_rank_by_itself_are_not(one_device):
    by_itself = functools.partial(ops.shift_tokens, axis="none such")
    got, _ = trained(functools.partial(mtp_loss, shift=by_itself), cp=4)
    assert worst(got, one_device[0]) > 1e-3
