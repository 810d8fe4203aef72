"""What routers report makes the losses of transformers, of the same logits."""

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from bridge.models._router_stats import RouterStats, router_stats
from fsdp_jax.ops import load_balancing_loss

pytestmark = pytest.mark.torch

LAYERS, ROWS, SEQ, EXPERTS, CHOSEN = 3, 4, 7, 8, 2


def logits():
    shape = (LAYERS, ROWS, SEQ, EXPERTS)
    return np.random.default_rng(0).normal(size=shape).astype(np.float32) * 2


def stats_of(logits, **options) -> RouterStats:
    experts = np.argsort(-logits, axis=-1)[..., :CHOSEN]
    none = jnp.zeros(logits.shape[:-1], jnp.int32)
    each = [
        router_stats(jnp.asarray(a), jnp.asarray(e), d, **options)
        for a, e, d in zip(logits, experts, none, strict=True)
    ]
    return RouterStats(*map(jnp.stack, zip(*each, strict=True)))


def test_the_load_balancing_loss_is_that_of_transformers():
    given = tuple(torch.tensor(layer).reshape(-1, EXPERTS) for layer in logits())
    want = load_balancing_loss_func(given, EXPERTS, CHOSEN)
    stats = stats_of(logits(), sigmoid=False)
    loss = load_balancing_loss(*stats[:2], joint_layers=True)
    np.testing.assert_allclose(CHOSEN * loss, want, rtol=1e-6)
    np.testing.assert_array_equal(stats.tokens_per_expert.sum(-1), SEQ * CHOSEN)


def test_the_z_loss_is_the_mean_square_of_what_the_softmax_divides_by():
    want = torch.logsumexp(torch.tensor(logits()), -1).square().mean(-1)
    stats = stats_of(logits(), sigmoid=False)
    np.testing.assert_allclose(stats.z_loss, want, rtol=1e-6)


def test_sigmoids_are_divided_by_their_sum():
    scores = torch.sigmoid(torch.tensor(logits()))
    want = (scores / scores.sum(-1, keepdim=True)).sum(-2)
    stats = stats_of(logits(), sigmoid=True)
    np.testing.assert_allclose(stats.scores_per_expert, want, rtol=1e-5)
    np.testing.assert_allclose(stats.scores_per_expert.sum(-1), SEQ, rtol=1e-5)
