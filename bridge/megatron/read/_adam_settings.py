"""Adam settings of a Megatron run, read from its checkpoint."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from bridge.formats._source import Source
from bridge.rules._mapping import Mapping as WeightMapping

# Settings that make Megatron's weight decay deviate from its default rule.
_OTHER_DECAY = ("apply_wd_to_qk_layernorm", "no_weight_decay_cond_type")
_NOT_SAID = "not said in the checkpoint"


@dataclasses.dataclass(frozen=True)
class AdamSettings:
    """Adam hyperparameters of a run; None where no single value applies.

    Continue in optax with `optax.adamw(lr, b1, b2, eps, weight_decay=..., mask=...)`
    after `optax.clip_by_global_norm(clip_grad)`.

    Args:
      lr: Learning rate of further training, if it is constant.
      b1: Decay rate of the first moments.
      b2: Decay rate of the second moments.
      eps: Constant added to the square root of the second moments.
      weight_decay: Decoupled weight decay, if it is constant.
      clip_grad: Global norm to which gradients are clipped; 0 for no clipping.
      no_decay: Dotted names of the leaves without weight decay (`wd_mult=0`).
      open: Explanation for each field above that is None: the checkpoint's schedule or
        rule, or that the checkpoint does not record it.
    """

    lr: float | None
    b1: float | None
    b2: float | None
    eps: float | None
    weight_decay: float | None
    clip_grad: float | None
    no_decay: tuple[str, ...] | None
    open: Mapping[str, str] = dataclasses.field(default_factory=dict)


def adam_settings(
    groups: Sequence[Mapping[str, Any]],
    args: Mapping[str, Any],
    scheduler: Mapping[str, Any],
    undecayed: Callable[[], tuple[str, ...]],
) -> AdamSettings:
    """Reads the Adam settings from a checkpoint's optimizer, args and scheduler.

    Args:
      groups: Parameter groups of the optimizer; empty if the checkpoint has none.
      args: Settings of the run.
      scheduler: State of the learning-rate schedule.
      undecayed: Function that returns the leaves that Megatron's default rule does not
        decay; called only if that rule applies.

    Raises:
      ValueError: If the optimizer is not AdamW.
    """
    _check_adamw(groups, args)
    betas = _agreed(groups, "betas") or (args.get("adam_beta1"), args.get("adam_beta2"))
    eps = _agreed(groups, "eps")
    values = {
        "lr": _rate(groups, scheduler),
        "b1": _number(betas[0]),
        "b2": _number(betas[1]),
        "eps": _number(args.get("adam_eps") if eps is None else eps),
        "weight_decay": _decay(groups, args, scheduler),
        "clip_grad": _number(args.get("clip_grad")),
        "no_decay": _no_decay(groups, args, undecayed),
    }
    known = {k: None if isinstance(v, str) else v for k, v in values.items()}
    told = {k: v for k, v in values.items() if isinstance(v, str)}
    return AdamSettings(**known, open=MappingProxyType(told))


def undecayed_leaves(source: Source, mapping: WeightMapping) -> tuple[str, ...]:
    """Returns the leaves without weight decay: those made only of biases and vectors.

    Args:
      source: Tensors of the model, in Megatron's shapes.
      mapping: Weight mapping from these tensors to leaves.

    Returns:
      Dotted names of the leaves.

    Source: Megatron-LM megatron/core/optimizer/__init__.py::_get_param_groups
    """

    def is_decayed(key: str) -> bool:
        return not key.endswith(".bias") and len(source.shape(key)) > 1

    present = set(source.keys())
    return tuple(
        name
        for name, pieces in mapping.by_destination().items()
        if not any(is_decayed(p.source) for p in pieces if p.source in present)
    )


def _check_adamw(groups: Sequence[Mapping[str, Any]], args: Mapping[str, Any]) -> None:
    every = [*groups, args]
    wrong = [f"{key}=True" for key in ("amsgrad", "maximize") if _any(every, key, True)]
    if _any(every, "decoupled_weight_decay", False):
        wrong.append("decoupled_weight_decay=False")
    scaled = {value for g in groups if (value := _of(g, "lr_mult", 1.0)) != 1.0}
    wrong += [f"lr_mult={value}" for value in sorted(scaled)]
    if wrong:
        raise ValueError(
            f"The run's optimizer is not plain AdamW: {', '.join(wrong)}. Take its "
            "weights alone, and start another optimizer."
        )


def _any(every: Sequence[Mapping[str, Any]], key: str, value: bool) -> bool:
    return any(each.get(key) is value for each in every)


def _of(group: Mapping[str, Any], key: str, default: Any = None) -> Any:
    """Returns a group's setting; Megatron prefixes some names with `pre_` on disk."""
    return group.get(key, group.get(f"pre_{key}", default))


def _agreed(groups: Sequence[Mapping[str, Any]], key: str) -> Any:
    """Returns the value of a setting that all groups share, or None."""
    said = [group.get(key) for group in groups]
    return said[0] if said and all(value == said[0] for value in said) else None


def _number(value: Any) -> float | str:
    return _NOT_SAID if value is None else float(value)


def _rate(
    groups: Sequence[Mapping[str, Any]], scheduler: Mapping[str, Any]
) -> float | str:
    now, style = _agreed(groups, "lr"), scheduler.get("lr_decay_style")
    if now is None or style is None:
        return _NOT_SAID
    done, warmup = scheduler.get("num_steps", 0), scheduler.get("lr_warmup_steps", 0)
    if style == "constant" and done >= warmup:
        return float(now)
    return (
        f"{style} to {scheduler.get('min_lr')} over {scheduler.get('lr_decay_steps')} "
        f"samples with {warmup} of warmup, {now} after {done}"
    )


def _decay(
    groups: Sequence[Mapping[str, Any]],
    args: Mapping[str, Any],
    scheduler: Mapping[str, Any],
) -> float | str:
    start, end = scheduler.get("start_wd"), scheduler.get("end_wd")
    if start != end:
        return f"{scheduler.get('wd_incr_style')} from {start} to {end}"
    factors = {_of(group, "wd_mult") for group in groups}
    if not factors <= {None, 0.0, 1.0}:
        return f"wd_mult of {', '.join(map(str, sorted(factors)))}"
    decayed = [group for group in groups if _of(group, "wd_mult") != 0.0]
    value = _agreed(decayed, "weight_decay")
    return _number(args.get("weight_decay") if value is None else value)


def _no_decay(
    groups: Sequence[Mapping[str, Any]],
    args: Mapping[str, Any],
    undecayed: Callable[[], tuple[str, ...]],
) -> tuple[str, ...] | str:
    factors = {_of(group, "wd_mult") for group in groups}
    if None in factors:
        return _NOT_SAID
    if factors and 0.0 not in factors:
        return ()
    if rules := [f"{key}={args[key]}" for key in _OTHER_DECAY if args.get(key)]:
        return f"a rule of its own, {', '.join(rules)}"
    return undecayed()
