"""A tied model whose file holds another output projection is not tied in silence."""

from __future__ import annotations

import dataclasses

import ml_dtypes
import numpy as np
import pytest
from bridge_helpers import like_of, random_tensors, write_llama
from helpers.errors import facts

import bridge
from bridge.hf import _tied_head

HEAD, TABLE = "lm_head.weight", "model.embed_tokens.weight"
NAMES = (f"'{HEAD}'", f"'{TABLE}'", "tie_word_embeddings")


def tied(path, head):
    tensors = random_tensors(np.float32)
    tensors[HEAD] = head(tensors[TABLE])
    return write_llama(path, tensors=tensors, tie_word_embeddings=True)


def one_changed(table):
    head = table.copy()
    head[-1, -1] += 1
    return head


@pytest.mark.parametrize("read", [bridge.lazy_hf, bridge.plan])
@pytest.mark.parametrize("rows", [1, 1000])
@pytest.mark.parametrize("head", [np.negative, one_changed, lambda table: table[:-1]])
def test_another_head_is_refused_wherever_it_differs(
    tmp_path, monkeypatch, read, rows, head
):
    monkeypatch.setattr(_tied_head, "_ELEMENTS", rows * 48)
    with pytest.raises(ValueError, match=facts(*NAMES)):
        read(tied(tmp_path, head))


def test_the_same_config_untied_reads_the_head_that_is_stored(tmp_path):
    path = tied(tmp_path, np.negative)
    config = bridge.from_hf_config(path)
    with pytest.raises(ValueError, match=facts(*NAMES)):
        bridge.load_hf(path, like_of(config))
    config = dataclasses.replace(config, tie_word_embeddings=False)
    params = bridge.load_hf(path, like_of(config), config=config)
    kernel = np.asarray(params["lm_head"]["kernel"][...])
    np.testing.assert_array_equal(
        kernel, np.negative(random_tensors(np.float32)[TABLE]).T
    )


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_a_head_of_the_same_values_is_the_embedding(tmp_path, dtype):
    tensors = random_tensors(ml_dtypes.bfloat16)
    tensors[HEAD] = tensors[TABLE].astype(dtype)
    path = write_llama(tmp_path, tensors=tensors, tie_word_embeddings=True)
    params = bridge.load_hf(path, like_of(bridge.from_hf_config(path)))
    assert "lm_head" not in params
