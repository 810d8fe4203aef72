"""Losses of training after pretraining: DPO, reward models, and GRPO."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float


class PreferenceLoss(NamedTuple):
    """Losses of pairs, with the rewards that the policy implies.

    Attributes:
      loss: Loss of each pair.
      chosen_rewards: Reward of each chosen answer; no gradient flows through it.
      rejected_rewards: Reward of each rejected answer.
    """

    loss: Float[Array, " pairs"]
    chosen_rewards: Float[Array, " pairs"]
    rejected_rewards: Float[Array, " pairs"]


def sequence_log_probs(
    log_probs: Float[Array, "batch seq"], mask: Bool[Array, "batch seq"]
) -> Float[Array, " batch"]:
    """Sums the log-probabilities of the tokens of each answer.

    Args:
      log_probs: Log-probability of each token, from
        `fsdp_jax.ops.vocab_parallel_log_probs`.
      mask: Whether a token belongs to the answer.

    Returns:
      Sums in float32. Values outside the mask, NaN too, do not count.

    Raises:
      ValueError: If the shapes differ.

    Examples:
      >>> log_probs = jnp.log(jnp.array([[0.5, 0.5, 0.1]]))
      >>> mask = jnp.array([[True, True, False]])
      >>> print(jnp.exp(fsdp.rl.sequence_log_probs(log_probs, mask)))
      [0.25]
    """
    _check_shapes("sequence_log_probs", log_probs=log_probs, mask=mask)
    return jnp.where(mask, log_probs.astype(jnp.float32), 0).sum(axis=-1)


def dpo_loss(
    chosen: Float[Array, " pairs"],
    rejected: Float[Array, " pairs"],
    chosen_reference: Float[Array, " pairs"],
    rejected_reference: Float[Array, " pairs"],
    *,
    beta: float = 0.1,
    label_smoothing: float = 0.0,
) -> PreferenceLoss:
    """Computes the loss of direct preference optimization for each pair of answers.

    The reference does not change: compute its log-probabilities once, with
    `fsdp_jax.make_forward`, and keep them with the data.

    Args:
      chosen: Log-probability of each chosen answer, from `sequence_log_probs`.
      rejected: Log-probability of each rejected answer.
      chosen_reference: Log-probability of the chosen answer by the reference model.
      rejected_reference: Log-probability of the rejected answer by the reference model.
      beta: Strength of the pull to the reference model.
      label_smoothing: Probability that a pair is labelled the wrong way round.

    Returns:
      Loss and rewards of each pair.

    Raises:
      ValueError: If `beta` is not positive, or `label_smoothing` not in [0, 0.5), or
        the shapes differ.

    Examples:
      >>> same = jnp.array([-3.0])
      >>> print(fsdp.rl.dpo_loss(same, same, same, same).loss)
      [0.6931472]

    Source: Rafailov et al. 2023 (arXiv 2305.18290), equation 7; with label smoothing,
    Mitchell 2023, "A note on DPO with noisy preferences", equation 3.
    """
    wrong = []
    if not beta > 0:
        wrong.append(f"beta={beta} must be more than 0")
    if not 0 <= label_smoothing < 0.5:
        wrong.append(
            f"label_smoothing={label_smoothing} must be at least 0 and less than 0.5"
        )
    if wrong:
        raise ValueError(f"dpo_loss: {'; '.join(wrong)}.")
    _check_shapes(
        "dpo_loss",
        chosen=chosen,
        rejected=rejected,
        chosen_reference=chosen_reference,
        rejected_reference=rejected_reference,
    )
    chosen_rewards = beta * (chosen - chosen_reference)
    rejected_rewards = beta * (rejected - rejected_reference)
    margin = chosen_rewards - rejected_rewards
    likely = (1 - label_smoothing) * jax.nn.log_sigmoid(margin)
    swapped = label_smoothing * jax.nn.log_sigmoid(-margin)
    rewards = jax.lax.stop_gradient((chosen_rewards, rejected_rewards))
    return PreferenceLoss(-likely - swapped, *rewards)


def reward_loss(
    chosen: Float[Array, " pairs"],
    rejected: Float[Array, " pairs"],
    margin: Float[Array, " pairs"] | float = 0.0,
) -> Float[Array, " pairs"]:
    """Computes the loss of a reward model for each pair of answers.

    Args:
      chosen: Reward of each chosen answer.
      rejected: Reward of each rejected answer.
      margin: Least difference that a pair should have.

    Returns:
      Negative log-probability of the preference, by Bradley and Terry's model.

    Raises:
      ValueError: If the shapes differ.

    Examples:
      >>> print(fsdp.rl.reward_loss(jnp.array([1.0]), jnp.array([1.0])))
      [0.6931472]

    Source: Ouyang et al. 2022 (arXiv 2203.02155), equation 1; the margin: Touvron et
    al. 2023 (arXiv 2307.09288), equation 2.
    """
    of_pairs = {} if jnp.ndim(margin) == 0 else {"margin": margin}
    _check_shapes("reward_loss", chosen=chosen, rejected=rejected, **of_pairs)
    return -jax.nn.log_sigmoid(chosen - rejected - margin)


def group_advantages(
    rewards: Float[Array, " answers"], group_size: int, *, scale: bool = True
) -> Float[Array, " answers"]:
    """Computes how much better each answer is than the others to its prompt.

    Args:
      rewards: Rewards; those of one prompt follow each other.
      group_size: Number of answers to each prompt, at least 2.
      scale: Whether advantages are divided by the standard deviation of the group.

    Returns:
      Advantages, of mean 0 in each group.

    Raises:
      ValueError: If the answers do not divide into groups, or the rewards are not of
        one dim.

    Examples:
      >>> rewards = jnp.array([1.0, 3.0])
      >>> print(fsdp.rl.group_advantages(rewards, 2, scale=False))
      [-1.  1.]

    Source: Shao et al. 2024 (arXiv 2402.03300), section 4.1.2. As in TRL the standard
    deviation is that of a sample, and 1e-4 is added to it.
    """
    rewards = jnp.asarray(rewards)
    if rewards.ndim != 1:
        raise ValueError(
            f"group_advantages: rewards of shape {rewards.shape}; give one number for "
            "each answer."
        )
    if group_size < 2 or rewards.shape[0] % group_size:
        raise ValueError(
            f"group_advantages: {rewards.shape[0]} rewards, group_size={group_size}: "
            "give at least 2 answers to each prompt, and as many to each."
        )
    groups = rewards.reshape(-1, group_size)
    advantages = groups - groups.mean(axis=1, keepdims=True)
    if scale:
        advantages /= groups.std(axis=1, keepdims=True, ddof=1) + 1e-4
    return advantages.reshape(-1)


def policy_loss(
    log_probs: Float[Array, "batch seq"],
    old_log_probs: Float[Array, "batch seq"],
    advantages: Float[Array, " batch"] | Float[Array, "batch seq"],
    reference_log_probs: Float[Array, "batch seq"] | None = None,
    *,
    mask: Bool[Array, "batch seq"] | None = None,
    clip: tuple[float, float] = (0.2, 0.2),
    beta: float = 0.0,
) -> Float[Array, "batch seq"]:
    """Computes the loss of GRPO, or PPO's of the policy, for each token.

    How tokens are averaged is the caller's: over each answer first (GRPO), with
    `fsdp_jax.ops.masked_mean` over all tokens (DAPO), or over a constant (Dr. GRPO).

    Args:
      log_probs: Log-probability of each token.
      old_log_probs: Log-probability by the policy that wrote the answers; in the first
        update after it wrote them, `jax.lax.stop_gradient(log_probs)`.
      advantages: Advantage of each answer, from `group_advantages`, or of each token.
      reference_log_probs: Log-probability by the reference model; None without `beta`.
      mask: Whether a token belongs to an answer: the loss of others is 0 and has no
        gradient, whatever their values. None if all of them do; a token that is masked
        in the loss alone gives NaN gradients where its ratio overflows.
      clip: How far below and above 1 the ratio of probabilities counts.
      beta: Weight of the divergence from the reference model.

    Returns:
      Loss of each token; those outside of the answers are to be masked.

    Raises:
      ValueError: If one of `beta` and `reference_log_probs` is given without the other,
        `beta` or a bound of `clip` is negative or no number, or the shapes differ.

    Examples:
      >>> log_probs = jnp.log(jnp.full((1, 2), 0.5))
      >>> print(fsdp.rl.policy_loss(log_probs, log_probs, jnp.array([2.0])))
      [[-2. -2.]]

    Source: Shao et al. 2024 (arXiv 2402.03300), equations 3 and 4; two bounds of the
    clip: Yu et al. 2025 (arXiv 2503.14476).
    """
    _check_policy(clip, beta, reference_log_probs is not None)
    shape, gains = jnp.shape(log_probs), jnp.asarray(advantages)
    if len(shape) > 1 and gains.shape == shape[:1]:
        gains = jnp.broadcast_to(gains[:, None], shape)
    optional = {"reference_log_probs": reference_log_probs, "mask": mask}
    _check_shapes(
        "policy_loss",
        log_probs=log_probs,
        old_log_probs=old_log_probs,
        advantages=gains,
        **{name: value for name, value in optional.items() if value is not None},
    )
    ratio = jnp.exp(_within(mask, log_probs - old_log_probs))
    low, high = 1 - clip[0], 1 + clip[1]
    loss = -jnp.minimum(ratio * gains, jnp.clip(ratio, low, high) * gains)
    if reference_log_probs is not None:
        log_ratio = _within(mask, reference_log_probs - log_probs)
        loss += beta * (jnp.exp(log_ratio) - log_ratio - 1)
    return _within(mask, loss)


def _within(
    mask: Bool[Array, "batch seq"] | None, values: Float[Array, "batch seq"]
) -> Float[Array, "batch seq"]:
    """Returns the values, with 0 outside of the mask, and no gradient there."""
    return values if mask is None else jnp.where(mask, values, 0)


def _check_policy(clip: Any, beta: float, has_reference: bool) -> None:
    """Raises a `ValueError` unless the options of `policy_loss` make sense."""
    bounds = clip if hasattr(clip, "__len__") else ()
    wrong = []
    if len(bounds) != 2 or not all(bound >= 0 for bound in bounds):
        wrong.append(
            f"clip={clip} must be two numbers of at least 0, how far below and above 1 "
            "the ratio counts, such as (0.2, 0.2)"
        )
    elif bounds[0] > 1:
        wrong.append(f"clip={clip}: clip[0] is at most 1, as no ratio is negative")
    if not 0 <= beta < math.inf:
        wrong.append(f"beta={beta} must be a number of at least 0")
    elif (beta > 0) != has_reference:
        wrong.append(
            f"beta={beta} weighs the divergence from the reference model: give a "
            "positive beta and reference_log_probs, or neither"
        )
    if wrong:
        raise ValueError(f"policy_loss: {'; '.join(wrong)}.")


def _check_shapes(owner: str, **arrays: Any) -> None:
    """Raises a `ValueError` unless all have one shape: smaller ones would repeat."""
    shapes = {name: jnp.shape(array) for name, array in arrays.items()}
    if len(set(shapes.values())) > 1:
        said = ", ".join(f"{name} {shape}" for name, shape in shapes.items())
        raise ValueError(
            f"{owner}: {said} must have one shape. Drop a dim of size 1 with "
            "`x.squeeze(-1)`, and give each answer its own row."
        )
