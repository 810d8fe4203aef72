"""Attention to the blocks of keys that an indexer selects."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers.errors import facts
from tiny_configs import hf_fields

import bridge
from bridge.models import Decoder
from bridge.models._block_indexer import blocks_of_slots, blocks_of_texts
from bridge.models._position_tables import PositionTables

SIZE, CHOSEN, LOCAL = 4, 2, 1
# Two float32 programs that sum in other orders.
TOLERANCE = 2e-5


def decoder(**changes) -> Decoder:
    config = bridge.from_hf_config(hf_fields("minimax_m3"))
    return Decoder(dataclasses.replace(config, **changes), rngs=nnx.Rngs(0))


def tokens(length: int, seed: int = 0) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).integers(3, 131, (1, length)))


def selected_by_loops(scores: np.ndarray) -> np.ndarray:
    """Returns the keys that each query of one text and head selects."""
    found = np.zeros(scores.shape, bool)
    for query in range(len(scores)):
        starts = range(0, query + 1, SIZE)
        best = {
            start: scores[query, start : min(start + SIZE, query + 1)].max()
            for start in starts
        }
        best[query - query % SIZE] = np.inf
        for start in sorted(best, key=best.__getitem__)[-CHOSEN:]:
            found[query, start : start + SIZE] = True
    return found & np.tri(len(scores), dtype=bool)


def test_the_blocks_of_the_largest_products_are_selected():
    model = decoder()
    indexer = jax.tree.map(lambda x: x[0], model.layers[1].self_attn.indexer)
    x = jax.random.normal(jax.random.key(1), (1, 23, 48))
    nothing = PositionTables(*[None] * len(PositionTables._fields))  # turns no head
    keys = indexer.keys(x, nothing)
    blocks = blocks_of_texts((1, 23), None, SIZE, LOCAL)
    mask = jnp.tri(23, dtype=bool)[None]
    found = indexer.select(x, keys, nothing, blocks, mask)
    query = indexer.q_norm(indexer.q_proj(x))
    scores = np.asarray(jnp.einsum("bqhd,bkd->bhqk", query, keys))[0]
    want = np.stack([selected_by_loops(head) for head in scores])
    np.testing.assert_array_equal(np.asarray(found[0]), want)
    # Of each query as many keys as its blocks have, and none behind it.
    assert want.sum(-1).max() == CHOSEN * SIZE and not want[:, :, -1][:, :-1].any()


def test_texts_of_a_packed_row_are_as_if_alone():
    model, texts = decoder(), [tokens(19), tokens(13, seed=1)]
    ids = jnp.repeat(jnp.arange(2), jnp.asarray([19, 13]))[None]
    positions = jnp.concatenate([jnp.arange(19), jnp.arange(13)])[None]
    packed = model(jnp.concatenate(texts, axis=1), positions, ids)
    alone = jnp.concatenate([model(text) for text in texts], axis=1)
    largest = np.abs(alone).max()
    assert np.abs(packed - alone).max() <= TOLERANCE * largest
    shifted = model(jnp.concatenate([tokens(2, seed=2), texts[0]], axis=1))[:, 2:]
    assert np.abs(shifted - alone[:, :19]).max() > 100 * TOLERANCE * largest


def test_blocks_of_a_cache_are_those_of_the_row():
    slots = jnp.broadcast_to(jnp.arange(11), (2, 11))
    rows = blocks_of_texts((2, 11), None, SIZE, 2)
    cache = blocks_of_slots(slots, 11, SIZE, 2)
    for ours, theirs in zip(rows, cache, strict=True):
        np.testing.assert_array_equal(ours, theirs)
    np.testing.assert_array_equal(rows.of_keys[0], np.arange(11) // SIZE * SIZE)


def test_rows_whose_blocks_are_all_selected_run_no_indexer():
    sparse, full = decoder(), decoder(layer_types=("full_attention",) * 3)

    def num_choices(model: Decoder, length: int) -> int:
        return str(jax.make_jaxpr(model)(tokens(length))).count("top_k")

    assert num_choices(sparse, SIZE * CHOSEN) == num_choices(full, SIZE * CHOSEN)
    assert num_choices(sparse, SIZE * CHOSEN + 1) > num_choices(full, SIZE * CHOSEN)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"block_indexer": None}, ("block_sparse_attention", "block_indexer")),
        ({"num_key_value_heads": 1}, ("num_key_value_heads 1", "num_heads 2")),
        ({"swiglu_limit": None}, ("swiglu_limit", "swiglu_alpha")),
    ],
)
def test_sizes_that_contradict_one_another_are_refused(changes, says):
    config = bridge.from_hf_config(hf_fields("minimax_m3"))
    with pytest.raises(ValueError, match=facts(*says)):
        dataclasses.replace(config, **changes)


PUBLISHED = {
    "use_sparse_attention": True,
    "sparse_index_dim": 12,
    "sparse_num_index_heads": 2,
    "sparse_topk_blocks": 2,
    "sparse_block_size": 4,
    "sparse_disable_index_value": [0, 1, 1],
    "sparse_score_type": "max",
    "sparse_init_block": 0,
    "sparse_local_block": 1,
    "sparse_attention_freq": [0, 1, 1],
}
OF_TRANSFORMERS = (
    *("index_n_heads", "index_head_dim", "index_block_size", "index_topk_blocks"),
    *("layer_types", "mlp_layer_types"),
)


def published(**changes) -> dict:
    fields = hf_fields("minimax_m3", hidden_act="swigluoai", moe_layer_freq=[0, 1, 1])
    fields = {k: v for k, v in fields.items() if k not in OF_TRANSFORMERS}
    return fields | {"sparse_attention_config": PUBLISHED | changes}


def test_published_files_say_the_same_in_fields_of_their_own():
    ours = bridge.from_hf_config(published())
    assert ours == bridge.from_hf_config(hf_fields("minimax_m3"))
    text = {k: v for k, v in published().items() if k != "model_type"}
    whole = {"model_type": "minimax_m3_vl", "text_config": text}
    assert bridge.from_hf_config(whole) == ours


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"sparse_score_type": "mean"}, ("sparse_score_type", "'mean'", "'max'")),
        ({"sparse_init_block": 1}, ("sparse_init_block", "1", "0")),
        ({"sparse_attention_freq": [0, 1]}, ("sparse_attention_freq", "3")),
        ({"sparse_disable_index_value": [1, 0, 1]}, ("layer 1", "index")),
        ({"sparse_window": 3}, ("sparse_window",)),
    ],
)
def test_what_published_files_say_otherwise_is_refused(changes, says):
    with pytest.raises(ValueError, match=facts(*says)):
        bridge.from_hf_config(published(**changes))


def test_the_part_of_a_head_that_turns_is_not_guessed():
    fields = {
        k: v for k, v in published().items() if k not in ("partial_rotary_factor",)
    }
    says = ("rotary_dim = 8", "head_dim 16", "partial_rotary_factor")
    with pytest.raises(ValueError, match=facts(*says)):
        bridge.from_hf_config(fields)
