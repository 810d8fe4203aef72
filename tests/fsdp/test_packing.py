"""Rows of documents: every token once, no document sees another, few rows."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers.errors import facts
from hypothesis import given, settings
from hypothesis import strategies as st

from bridge.models import Decoder, DecoderConfig
from fsdp_jax.cli._decoder_loss import document_loss
from fsdp_jax.cli._routing import Routing
from fsdp_jax.data._documents import document_rows, join_documents
from fsdp_jax.data._packing import best_fit_decreasing

# Sums of float32 in another order; measured: 2e-7. A document that sees its neighbour
# changes the loss by 1e-3 and more.
SAME = 1e-6
SEQ = 16
CONFIG = DecoderConfig(
    vocab_size=32,
    hidden_size=16,
    intermediate_size=16,
    num_hidden_layers=2,
    num_attention_heads=2,
)
# Learned positions, which restart in each document.
LEARNED = DecoderConfig(
    vocab_size=32,
    hidden_size=16,
    intermediate_size=16,
    num_hidden_layers=1,
    num_attention_heads=2,
    rope=None,
    max_position_embeddings=SEQ,
)


@given(st.lists(st.integers(1, 20), max_size=30))
@settings(max_examples=50, deadline=None)
def test_every_document_is_in_one_row_that_it_fits(lengths):
    rows = best_fit_decreasing(lengths, 20)
    assert sorted(i for row in rows for i in row) == list(range(len(lengths)))
    sums = [sum(lengths[i] for i in row) for row in rows]
    assert all(0 < total <= 20 for total in sums)
    # No two rows could be one.
    assert all(a + b > 20 for n, a in enumerate(sums) for b in sums[:n])


def test_a_document_goes_to_the_fullest_row_that_it_fits():
    assert best_fit_decreasing([5, 3, 7, 2, 3], 10) == [[2, 1], [0, 4, 3]]


def test_a_document_longer_than_a_row_is_refused():
    with pytest.raises(ValueError, match=facts("1", "2", "4", "5")):
        best_fit_decreasing([3, 5], 4)


def documents():
    rng = np.random.default_rng(0)
    made = []
    for length in (9, 5, 4, 12, 3, 7):
        ids = rng.integers(1, 32, length).tolist()
        made.append((ids, [index >= 2 for index in range(length)]))
    return join_documents(made)


def batch_of(packed: bool) -> dict[str, jax.Array]:
    rows = document_rows(documents(), SEQ, packed=packed)
    each = [rows[index] for index in range(len(rows))]
    return jax.tree.map(lambda *x: jnp.stack([jnp.asarray(v) for v in x]), *each)


def loss_and_grads(config: DecoderConfig, batch):
    graph, params = nnx.split(Decoder(config, rngs=nnx.Rngs(0)))
    loss = document_loss(fused=False, routing=Routing())

    @jax.jit
    @jax.value_and_grad
    def mean(params):
        (total, count), _ = loss(nnx.merge(graph, params), batch)
        return total / count

    return mean(params)


@pytest.mark.parametrize("config", [CONFIG, LEARNED], ids=["rotary", "learned"])
def test_packed_rows_give_the_loss_and_gradients_of_unpacked_ones(config):
    packed, unpacked = batch_of(True), batch_of(False)
    assert len(packed["tokens"]) == 3 and len(unpacked["tokens"]) == 6
    loss, grads = loss_and_grads(config, packed)
    wanted, wanted_grads = loss_and_grads(config, unpacked)
    assert float(loss) == pytest.approx(float(wanted), rel=SAME)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=SAME), grads, wanted_grads
    )
    seen = {**packed, "segment_ids": jnp.ones_like(packed["segment_ids"])}
    leaky, _ = loss_and_grads(config, seen)
    assert abs(float(leaky) - float(wanted)) > 1e-4  # So segments do something.


@pytest.mark.parametrize("packed", [True, False])
def test_a_document_without_tokens_is_refused(packed):
    given = join_documents([([5, 6], [True, True]), ([], []), ([], [])], [4, 7, 9])
    with pytest.raises(ValueError, match=facts("2 of 3", "document 7")):
        document_rows(given, 5, packed=packed)


def test_a_row_has_each_document_with_its_own_segment_and_positions():
    row = document_rows(
        join_documents([([5, 6, 7], [False, False, True]), ([8, 9], [True, True])]),
        5,
        packed=True,
    )[0]
    assert {name: values.tolist() for name, values in row.items()} == {
        "tokens": [5, 6, 8, 0, 0],
        "targets": [6, 7, 9, 0, 0],
        "segment_ids": [1, 1, 2, 0, 0],
        "positions": [0, 1, 0, 0, 0],
        "weights": [0.0, 1.0, 1.0, 0.0, 0.0],
    }
