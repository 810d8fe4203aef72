"""The optimizer of a run: plain optax transformations, chosen by options."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, Literal, NamedTuple

import jax
import optax
from jaxtyping import Array

import fsdp_jax as fsdp
from fsdp_jax._tree import PyTree, leaf_name

OptimizerName = Literal["adamw", "lion", "adafactor", "muon"]
ScheduleShape = Literal["constant", "cosine", "linear", "wsd"]
OptimizerBits = Literal[32, 16, 8]

NO_DECAY = "*.scale,*.bias,*_bias,*.sinks"
"""Norms, biases and attention sinks: by default no weight decay shrinks them."""

_B2 = {"adamw": 0.999, "lion": 0.99, "adafactor": None, "muon": 0.999}
_RATES = ("lr", "weight_decay", "eps", "clip", "lr_end")
# Options that only some optimizers or schedules read.
_ONLY = {
    "b1": ("optimizer", ("adamw", "lion", "muon")),
    "b2": ("optimizer", ("adamw", "lion", "muon")),
    "eps": ("optimizer", ("adamw", "muon")),
    "lr_steps": ("lr_schedule", ("cosine", "linear", "wsd")),
    "lr_end": ("lr_schedule", ("cosine", "linear", "wsd")),
    "lr_decay": ("lr_schedule", ("wsd",)),
}


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    """An optimizer, its learning rate and its weight decay.

    Attributes:
      optimizer: Name of the optimizer. Muon updates the matrices of layers, scaled to
        the size of AdamW's updates, and AdamW everything else.
      lr: Learning rate at its peak.
      lr_schedule: Shape of the learning rate after the warmup: constant, cosine or
        linear to `lr_end`, or constant and then linear (wsd).
      warmup: Steps in which the learning rate rises linearly from 0.
      lr_steps: Last step of the schedule; None only for a constant one.
      lr_end: Last learning rate, as a fraction of `lr`.
      lr_decay: Fraction of `lr_steps` in which wsd decays.
      weight_decay: Decoupled weight decay, multiplied by the learning rate.
      no_decay: Patterns of parameters without weight decay, separated by commas.
      b1: Decay of the first moments.
      b2: Decay of the second moments; None for 0.999, or 0.99 of Lion.
      eps: Constant added to the root of the second moments.
      clip: Norm to which gradients are clipped; 0 for not.
      optimizer_bits: Bits of an element of the moments: 16 is float16 with scales.
      ema: Decay of an average of the weights, kept beside them; 0 for none.
    """

    optimizer: OptimizerName = "adamw"
    lr: float = 3e-4
    lr_schedule: ScheduleShape = "constant"
    warmup: int = 0
    lr_steps: int | None = None
    lr_end: float = 0.0
    lr_decay: float = 0.1
    weight_decay: float = 0.1
    no_decay: str = NO_DECAY
    b1: float = 0.9
    b2: float | None = None
    eps: float = 1e-8
    clip: float = 0.0
    optimizer_bits: OptimizerBits = 32
    ema: float = 0.0

    @property
    def second_moment_decay(self) -> float | None:
        """Decay of the second moments; None for an optimizer without."""
        return self.b2 if self.b2 is not None else _B2[self.optimizer]

    def problems(self) -> list[str]:
        """Returns what is out of range or without effect, by option."""
        wrong = [
            f"{_option(name)} {value}: a finite number, at least 0"
            for name in _RATES
            if not 0 <= (value := getattr(self, name)) < math.inf
        ]
        wrong += [
            f"{_option(name)} {value} must be at least 0 and less than 1"
            for name in ("b1", "b2", "ema")
            if (value := getattr(self, name)) is not None and not 0 <= value < 1
        ]
        if not 0 < self.lr_decay <= 1:
            wrong.append(
                f"--lr-decay {self.lr_decay} must be more than 0 and at most 1"
            )
        if self.warmup < 0:
            wrong.append(f"--warmup {self.warmup} must be at least 0")
        if self.lr_steps is None and self.lr_schedule != "constant":
            wrong.append(f"--lr-schedule {self.lr_schedule} needs --lr-steps")
        if self.lr_steps is not None and self.lr_steps <= self.warmup:
            wrong.append(
                f"--lr-steps {self.lr_steps}: more than --warmup {self.warmup}"
            )
        if self.optimizer_bits != 32 and self.optimizer not in ("adamw", "lion"):
            wrong.append(
                f"--optimizer-bits {self.optimizer_bits} is for adamw and lion, and "
                f"this is --optimizer {self.optimizer}"
            )
        return wrong + self._unused()

    def _unused(self) -> list[str]:
        defaults = OptimizerConfig()
        return [
            f"{_option(name)} {getattr(self, name)} has no effect with "
            f"{_option(by)} {getattr(self, by)}"
            for name, (by, choices) in _ONLY.items()
            if getattr(self, by) not in choices
            and getattr(self, name) != getattr(defaults, name)
        ]

    def schedule(self) -> optax.Schedule:
        """Returns the learning rate of each update, counted from 0."""
        rest = self._after_warmup((self.lr_steps or 0) - self.warmup)
        if not self.warmup:
            return rest
        rise = optax.linear_schedule(0.0, self.lr, self.warmup)
        return optax.join_schedules([rise, rest], [self.warmup])

    def _after_warmup(self, steps: int) -> optax.Schedule:
        end = self.lr * self.lr_end
        match self.lr_schedule:
            case "constant":
                return optax.constant_schedule(self.lr)
            case "cosine":
                return optax.cosine_decay_schedule(self.lr, steps, self.lr_end)
            case "linear":
                return optax.linear_schedule(self.lr, end, steps)
            case "wsd":
                last = max(1, round(self.lr_decay * (self.lr_steps or 0)))
                return optax.linear_schedule(self.lr, end, last, max(steps - last, 0))

    def make(
        self, matrices: Mapping[str, int] | None = None
    ) -> optax.GradientTransformation:
        """Makes the transformation; its state has the same names for any numbers.

        Args:
          matrices: Paths of the matrices of layers -> number of their input dims, from
            `bridge.lora_targets`; for Muon.

        Raises:
          ValueError: If Muon has no matrices.
        """
        clip = optax.clip_by_global_norm(self.clip) if self.clip else optax.identity()
        tx = optax.chain(
            clip,
            self._direction(matrices or {}),
            optax.add_decayed_weights(self.weight_decay, self.is_decayed),
            optax.scale_by_learning_rate(self.schedule()),
        )
        if self.optimizer_bits == 8:
            tx = fsdp.optim.eight_bit(tx)
        elif self.optimizer_bits == 16:
            tx = fsdp.optim.precision_aware(tx, {"mu": "float16", "nu": "float16"})
        return optax.chain(tx, fsdp.optim.ema_of_params(self.ema)) if self.ema else tx

    def _direction(self, matrices: Mapping[str, int]) -> optax.GradientTransformation:
        b2 = self.second_moment_decay
        if self.optimizer == "adafactor":
            return optax.chain(
                optax.scale_by_factored_rms(),
                optax.clip_by_block_rms(1.0),
                optax.scale_by_param_block_rms(),
            )
        assert b2 is not None
        if self.optimizer == "lion":
            return optax.scale_by_lion(self.b1, b2)
        adam = optax.scale_by_adam(self.b1, b2, self.eps)
        return adam if self.optimizer == "adamw" else _muon(matrices, adam)

    def is_decayed(self, params: PyTree) -> PyTree:
        """Returns a tree of flags: whether each parameter has weight decay.

        Args:
          params: Parameters.
        """
        patterns = self._patterns()
        return jax.tree_util.tree_map_with_path(
            lambda path, _: not any(fnmatchcase(_name(path), p) for p in patterns),
            params,
        )

    def check_no_decay(self, names: Sequence[str]) -> None:
        """Raises a `ValueError` for patterns of `--no-decay` that match no parameter.

        The default's are for any model, and may match none.

        Args:
          names: Names of the parameters.
        """
        unused = [
            repr(pattern)
            for pattern in self._patterns()
            if pattern not in NO_DECAY.split(",")
            and not any(fnmatchcase(name, pattern) for name in names)
        ]
        if unused:
            raise ValueError(
                f"--no-decay: {', '.join(unused)} match no parameter. Names begin: "
                f"{', '.join(names[:5])}."
            )

    def _patterns(self) -> list[str]:
        return [pattern for pattern in self.no_decay.split(",") if pattern]


class MuonState(NamedTuple):
    """State of Muon for some parameters and of another optimizer for the rest.

    Attributes:
      matrices: State of Muon; None in the place of other parameters.
      rest: State of the other optimizer; None in the place of the matrices.
    """

    matrices: optax.OptState
    rest: optax.OptState


def _muon(
    matrices: Mapping[str, int], rest_tx: optax.GradientTransformation
) -> optax.GradientTransformation:
    """Makes Muon for the matrices, and `rest_tx` for other parameters.

    `optax.contrib.muon` marks the parameters of the other half by nodes that a
    checkpoint cannot hold; here they are None.
    """
    if not matrices:
        raise ValueError(
            "--optimizer muon updates the matrices of layers, and none are trained. "
            "Use --optimizer adamw."
        )

    def dims(tree: PyTree) -> PyTree:
        return jax.tree_util.tree_map_with_path(
            lambda path, leaf: _muon_dims(leaf.ndim, matrices[_name(path)]), tree
        )

    def chosen(tree: PyTree, is_matrix: bool) -> PyTree:
        return jax.tree_util.tree_map_with_path(
            lambda path, x: x if (_name(path) in matrices) == is_matrix else None,
            tree,
        )

    matrix_tx = optax.chain(
        optax.contrib.scale_by_muon(weight_dimension_numbers=dims),
        optax.stateless(lambda tree, _: jax.tree.map(_like_adam, tree, dims(tree))),
    )

    def init(params: PyTree) -> MuonState:
        return MuonState(
            matrix_tx.init(chosen(params, True)), rest_tx.init(chosen(params, False))
        )

    def update(updates: PyTree, state: Any, params: PyTree | None = None):
        found, matrix_state = matrix_tx.update(chosen(updates, True), state.matrices)
        rest, rest_state = rest_tx.update(chosen(updates, False), state.rest)
        joined = jax.tree.map(
            lambda a, b: b if a is None else a, found, rest, is_leaf=lambda x: x is None
        )
        return joined, MuonState(matrix_state, rest_state)

    return optax.GradientTransformation(init, update)  # pyright: ignore[reportArgumentType]


def _muon_dims(ndim: int, num_in: int) -> optax.contrib.MuonDimensionNumbers:
    """Returns the dims of a stack of matrices: dim 0 counts layers."""
    split = 1 + num_in
    return optax.contrib.MuonDimensionNumbers(
        reduction_axis=tuple(range(1, split)), output_axis=tuple(range(split, ndim))
    )


def _like_adam(update: Array, dims: optax.contrib.MuonDimensionNumbers) -> Array:
    """Scales orthogonal matrices to the size of AdamW's updates (arXiv 2502.16982)."""
    num_in = len(dims.reduction_axis)  # pyright: ignore[reportArgumentType]
    sides = update.shape[1 : 1 + num_in], update.shape[1 + num_in :]
    return 0.2 * math.sqrt(max(map(math.prod, sides))) * update


def _name(path: Sequence[Any]) -> str:
    """Returns the name of a parameter, without the last key of an nnx `Variable`."""
    return leaf_name(path).removesuffix(".value")


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"
