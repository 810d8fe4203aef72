"""Losses after pretraining equal their equations, written out in float64 by numpy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.errors import facts

import fsdp_jax as fsdp

RNG = np.random.default_rng(0)
CHOSEN, REJECTED, CHOSEN_REF, REJECTED_REF = RNG.normal(-20, 4, (4, 6))
TOLERANCE = 2e-6  # Of float32 numbers of size 20, of which differences are taken.


def log_sigmoid(x):
    return -np.log1p(np.exp(-x))


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_dpo_is_the_likelihood_of_the_preferences(smoothing):
    beta = 0.3
    margin = beta * (CHOSEN - CHOSEN_REF - REJECTED + REJECTED_REF)
    want = -(1 - smoothing) * log_sigmoid(margin) - smoothing * log_sigmoid(-margin)
    found = fsdp.rl.dpo_loss(
        *map(jnp.float32, (CHOSEN, REJECTED, CHOSEN_REF, REJECTED_REF)),
        beta=beta,
        label_smoothing=smoothing,
    )
    np.testing.assert_allclose(found.loss, want, rtol=10 * TOLERANCE)
    difference = found.chosen_rewards - found.rejected_rewards
    np.testing.assert_allclose(difference, margin, atol=20 * TOLERANCE)


def test_no_gradient_flows_through_the_rewards_of_dpo():
    def rewards(chosen):
        found = fsdp.rl.dpo_loss(chosen, chosen - 1, chosen * 0, chosen * 0)
        return found.chosen_rewards.sum() + found.rejected_rewards.sum()

    assert not jax.grad(rewards)(jnp.float32(CHOSEN)).any()


@pytest.mark.parametrize(
    "options, named", [({"beta": 0.0}, "beta=0.0"), ({"label_smoothing": 0.5}, "0.5")]
)
def test_numbers_that_make_no_dpo_are_refused(options, named):
    x = jnp.zeros(1)
    with pytest.raises(ValueError, match=facts("dpo_loss", named)):
        fsdp.rl.dpo_loss(x, x, x, x, **options)


def test_a_reward_model_is_trained_by_the_margin():
    want = -log_sigmoid(CHOSEN - REJECTED - 0.5)
    found = fsdp.rl.reward_loss(jnp.float32(CHOSEN), jnp.float32(REJECTED), 0.5)
    np.testing.assert_allclose(found, want, rtol=10 * TOLERANCE)


def test_tokens_outside_of_an_answer_do_not_count():
    log_probs = jnp.array([[-1.0, jnp.nan, -2.0], [-3.0, -4.0, jnp.inf]])
    mask = jnp.array([[True, False, True], [False, True, False]])
    np.testing.assert_array_equal(
        fsdp.rl.sequence_log_probs(log_probs, mask), [-3.0, -4.0]
    )
    grads = jax.grad(lambda x: fsdp.rl.sequence_log_probs(x, mask).sum())(log_probs)
    np.testing.assert_array_equal(grads, mask.astype(float))


@pytest.mark.parametrize("scale", [True, False])
def test_advantages_are_those_of_each_group(scale):
    groups = CHOSEN.reshape(2, 3)
    want = groups - groups.mean(1, keepdims=True)
    if scale:
        want /= groups.std(1, keepdims=True, ddof=1) + 1e-4
    found = fsdp.rl.group_advantages(jnp.float32(CHOSEN), 3, scale=scale)
    np.testing.assert_allclose(found, want.ravel(), rtol=1e-5)


@pytest.mark.parametrize("size", [1, 4])
def test_answers_that_are_no_groups_are_refused(size):
    with pytest.raises(ValueError, match=facts(6, f"group_size={size}")):
        fsdp.rl.group_advantages(jnp.float32(CHOSEN), size)


def test_the_loss_of_grpo_clips_each_side_by_its_own_bound():
    log_probs, old, reference = RNG.normal(-2, 0.5, (3, 2, 40))
    advantages = np.array([1.5, -0.5])
    ratio = np.exp(log_probs - old)
    clipped = np.clip(ratio, 0.9, 1.3)
    gains = advantages[:, None]
    log_ratio = reference - log_probs
    want = -np.minimum(ratio * gains, clipped * gains)
    assert (clipped != ratio).mean() > 0.5  # So that a missing clip would be seen.
    arrays = map(jnp.float32, (log_probs, old, advantages))
    found = fsdp.rl.policy_loss(*arrays, clip=(0.1, 0.3))
    np.testing.assert_allclose(found, want, rtol=1e-5)
    arrays = map(jnp.float32, (log_probs, old, advantages, reference))
    found = fsdp.rl.policy_loss(*arrays, clip=(0.1, 0.3), beta=0.04)
    want += 0.04 * (np.exp(log_ratio) - log_ratio - 1)
    np.testing.assert_allclose(found, want, rtol=1e-5, atol=1e-6)


def test_a_divergence_needs_its_reference():
    x = jnp.zeros((1, 2))
    with pytest.raises(ValueError, match=facts("beta=0.1")):
        fsdp.rl.policy_loss(x, x, jnp.zeros(1), beta=0.1)
    with pytest.raises(ValueError, match=facts("beta=0.0", "reference_log_probs")):
        fsdp.rl.policy_loss(x, x, jnp.zeros(1), x)


def test_advantages_of_tokens_weigh_each_token():
    log_probs, old, advantages = jnp.float32(RNG.normal(-2, 0.5, (3, 2, 5)))
    found = fsdp.rl.policy_loss(log_probs, old, advantages)
    each = [
        fsdp.rl.policy_loss(log_probs[:, i : i + 1], old[:, i : i + 1], column)
        for i, column in enumerate(advantages.T)
    ]
    np.testing.assert_array_equal(found, jnp.concatenate(each, axis=1))


@pytest.mark.parametrize("padding", [-np.inf, -1000.0, np.nan])
def test_what_is_masked_gives_neither_loss_nor_gradient(padding):
    log_probs = jnp.full((1, 3), -1.0)
    old = log_probs.at[0, 0].set(padding)
    reference = log_probs.at[0, 0].set(-padding)
    mask = jnp.array([[False, True, True]])

    def loss(log_probs, **masks):
        losses = fsdp.rl.policy_loss(
            log_probs, old, jnp.ones(1), reference, beta=0.1, **masks
        )
        return fsdp.ops.masked_mean(losses, mask)

    assert loss(log_probs, mask=mask) == -1
    grads = jax.grad(loss)(log_probs, mask=mask)
    np.testing.assert_array_equal(grads, [[0, -0.5, -0.5]])
    assert not np.isfinite(jax.grad(loss)(log_probs)).all()  # the reason for `mask`


PAIRS, ROWS = jnp.zeros(3), jnp.zeros((2, 3))
MISFITS = {
    "dpo_loss": lambda: fsdp.rl.dpo_loss(PAIRS, PAIRS, PAIRS[:, None], PAIRS),
    "reward_loss": lambda: fsdp.rl.reward_loss(PAIRS[:, None], PAIRS),
    "reward_loss of one": lambda: fsdp.rl.reward_loss(PAIRS, PAIRS, PAIRS[:1]),
    "sequence_log_probs": lambda: fsdp.rl.sequence_log_probs(ROWS, ROWS[:1] > 0),
    "policy_loss": lambda: fsdp.rl.policy_loss(ROWS, ROWS, ROWS[:, :1]),
    "policy_loss of old": lambda: fsdp.rl.policy_loss(ROWS, ROWS[:1], ROWS[:, 0]),
    "policy_loss of a mask": lambda: fsdp.rl.policy_loss(
        ROWS, ROWS, ROWS[:, 0], mask=ROWS[:, :1] > 0
    ),
}


@pytest.mark.parametrize("name", MISFITS)
def test_shapes_that_numpy_would_repeat_are_refused(name):
    shapes = {"dpo": "(3, 1)", "rew": "(3,)", "seq": "(1, 3)", "pol": "(2, 3)"}
    with pytest.raises(ValueError, match=facts(name.split()[0], shapes[name[:3]])):
        MISFITS[name]()


def test_rewards_are_a_number_for_each_answer():
    found = fsdp.rl.group_advantages([1.0, 3.0], 2, scale=False)  # pyright: ignore
    np.testing.assert_array_equal(found, [-1, 1])
    with pytest.raises(ValueError, match=facts("group_advantages", "(2, 2)")):
        fsdp.rl.group_advantages(jnp.zeros((2, 2)), 2)


def test_a_side_may_be_without_a_bound():
    log_probs = jnp.array([[3.0, -3.0]])
    found = fsdp.rl.policy_loss(
        log_probs, 0 * log_probs, jnp.ones(1), clip=(0.2, np.inf)
    )
    np.testing.assert_allclose(found, -jnp.exp(log_probs))


@pytest.mark.parametrize(
    "options, named",
    [
        ({"clip": 0.2}, "clip=0.2"),
        ({"clip": (0.2,)}, "clip=(0.2,)"),
        ({"clip": (1.2, 0.2)}, "clip=(1.2, 0.2)"),
        ({"clip": (0.2, -0.1)}, "-0.1"),
        ({"clip": (np.nan, 0.2)}, "nan"),
        ({"beta": -0.1}, "beta=-0.1"),
        ({"beta": np.nan}, "beta=nan"),
    ],
)
def test_options_that_make_no_policy_loss_are_refused(options, named):
    with pytest.raises(ValueError, match=facts("policy_loss", named)):
        fsdp.rl.policy_loss(ROWS, ROWS, ROWS[:, 0], **options)
