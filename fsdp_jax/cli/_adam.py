"""AdamW's settings: what a run remembers, and what it takes over from Megatron."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any

import jax
import optax

from bridge.megatron import AdamSettings
from fsdp_jax._tree import PyTree, named_leaves

_ADAM = "adam"  # in the metadata of an import, until a run has a recipe
_FROM_MEGATRON = (
    *("lr", "weight_decay", "b1", "b2", "eps"),
    *("clip_grad", "no_decay"),
)


@dataclasses.dataclass(frozen=True)
class AdamOptions:
    """What decides an update beside the learning rate and the weight decay.

    Attributes:
      b1: Decay of the first moments.
      b2: Decay of the second moments.
      eps: What is added to the root of the second moments.
      clip_grad: Norm to which gradients are clipped; 0 for not.
      no_decay: Patterns of names of parameters that are not decayed, by commas.
    """

    b1: float = 0.9
    b2: float = 0.999
    eps: float = 1e-8
    clip_grad: float = 0.0
    no_decay: str = ""

    def adamw(self, lr: float, weight_decay: float) -> optax.GradientTransformation:
        """AdamW with these; the names in its state are the same whatever they are."""
        patterns = [pattern for pattern in self.no_decay.split(",") if pattern]
        tx = optax.adamw(
            lr,
            b1=self.b1,
            b2=self.b2,
            eps=self.eps,
            weight_decay=weight_decay,
            mask=(lambda params: _decayed(params, patterns)) if patterns else None,
        )
        return _clipped(tx, self.clip_grad) if self.clip_grad else tx


def option(name: str) -> str:
    """How a setting is called on the command line."""
    return f"--{name.replace('_', '-')}"


def stored_settings(settings: AdamSettings) -> dict[str, Any]:
    """Settings as the metadata of a step holds them."""
    values = {name: getattr(settings, name) for name in _FROM_MEGATRON}
    carried = {name: x for name, x in values.items() if x is not None}
    if settings.no_decay is not None:
        carried["no_decay"] = ",".join(settings.no_decay)
    return {"carried": carried, "open": dict(settings.open)}


def settings_of_import(
    metadata: Mapping[str, Any], typed: Mapping[str, Any]
) -> dict[str, Any]:
    """The settings of the run that a checkpoint was imported from.

    Args:
      metadata: Of the checkpoint.
      typed: What is given on the command line, which replaces them.

    Raises:
      ValueError: If a setting that did not come along is not given.
    """
    unknown = dict.fromkeys(_FROM_MEGATRON, "not kept by the version that imported it")
    adam = metadata.get(_ADAM, {"carried": {}, "open": unknown})
    needed = {name: told for name, told in adam["open"].items() if name not in typed}
    if needed:
        lines = [f"{option(name)}: {told}" for name, told in needed.items()]
        raise ValueError(
            f"Adam goes on with the settings it had, and {len(needed)} of them did not "
            "come along from Megatron:\n  " + "\n  ".join(lines) + "\nGive each "
            "option; a rate or a decay that changes goes on as the constant you give."
        )
    return adam["carried"]


def _clipped(
    tx: optax.GradientTransformation, max_norm: float
) -> optax.GradientTransformation:
    """`tx` after clipping, which has no state: that of `tx` keeps its names."""
    clip = optax.clip_by_global_norm(max_norm)

    def update(updates: PyTree, state: Any, params: PyTree | None = None):
        updates, _ = clip.update(updates, optax.EmptyState())
        return tx.update(updates, state, params)

    return optax.GradientTransformation(tx.init, update)


def _decayed(params: PyTree, patterns: list[str]) -> PyTree:
    """Whether each parameter is decayed."""
    flags = [
        not any(fnmatchcase(name, pattern) for pattern in patterns)
        for name, _ in named_leaves(params)
    ]
    return jax.tree.structure(params).unflatten(flags)
