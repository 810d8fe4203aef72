"""The next token is drawn as transformers draws it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from helpers.errors import facts
from transformers import (
    LogitsProcessorList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from bridge.models import Sampling, sample

pytestmark = pytest.mark.torch

VOCAB, DRAWS = 12, 4096


def logits() -> np.ndarray:
    return 2 * np.random.default_rng(0).normal(size=VOCAB).astype(np.float32)


def drawn(sampling: Sampling) -> np.ndarray:
    keys = jax.random.split(jax.random.key(1), DRAWS)
    rows = jnp.broadcast_to(jnp.asarray(logits()), (DRAWS, VOCAB))
    ids = jax.jit(sample, static_argnums=2)(rows, keys, sampling)
    return np.bincount(np.asarray(ids), minlength=VOCAB) / DRAWS


def transformers_probabilities(sampling: Sampling) -> np.ndarray:
    steps = LogitsProcessorList([TemperatureLogitsWarper(sampling.temperature)])
    if sampling.top_k is not None:
        steps.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p is not None:
        steps.append(TopPLogitsWarper(sampling.top_p))
    scores = steps(torch.zeros(1, 1, dtype=torch.long), torch.tensor(logits())[None])
    return torch.softmax(scores, -1)[0].numpy()


CASES = [
    Sampling(temperature=1.0),
    Sampling(temperature=0.5),
    Sampling(temperature=1.0, top_k=3),
    Sampling(temperature=1.3, top_p=0.7),
    Sampling(temperature=1.3, top_k=5, top_p=0.8),
    Sampling(temperature=1.0, top_k=100, top_p=1.0),
]


@pytest.mark.parametrize("sampling", CASES, ids=str)
def test_tokens_are_drawn_as_transformers_draws_them(sampling):
    want = transformers_probabilities(sampling)
    found = drawn(sampling)
    assert set(np.flatnonzero(found)) <= set(np.flatnonzero(want))
    # Four standard deviations of a share of 4,096 draws; a neighbour's misses it.
    allowed = 4 * np.sqrt(want * (1 - want) / DRAWS) + 1e-9
    assert (abs(found - want) <= allowed).all()


def test_another_temperature_would_be_noticed():
    want = transformers_probabilities(Sampling(temperature=0.8))
    found = drawn(Sampling(temperature=1.0))
    assert (abs(found - want) > 4 * np.sqrt(want * (1 - want) / DRAWS)).any()


def test_at_temperature_0_the_likeliest_is_taken_whatever_the_key():
    assert drawn(Sampling())[logits().argmax()] == 1


def test_a_row_draws_the_same_in_any_batch():
    rows = jnp.asarray(np.random.default_rng(1).normal(size=(8, VOCAB)))
    keys = jax.random.split(jax.random.key(2), 8)
    sampling = Sampling(temperature=1.0, top_p=0.9)
    together = sample(rows, keys, sampling)
    alone = [sample(rows[i : i + 1], keys[i : i + 1], sampling)[0] for i in range(8)]
    np.testing.assert_array_equal(together, alone)


def test_what_is_out_of_range_or_does_nothing_is_refused_together():
    with pytest.raises(ValueError) as error:
        Sampling(temperature=-1.0, top_k=0, top_p=1.5)
    says = str(error.value)
    assert "temperature=-1.0" in says and "top_k=0" in says and "top_p=1.5" in says
    with pytest.raises(ValueError, match=facts("temperature=1e-38", "1e-30", "2.5")):
        Sampling(temperature=1e-38, top_k=2.5)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match=facts("temperature=0", "top_k")):
        Sampling(top_k=3)
