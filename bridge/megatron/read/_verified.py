"""Verified optimizer state: each read checks that the state belongs to its weight."""

import dataclasses
from collections.abc import Mapping

import numpy as np

from bridge.megatron._views import Tensor

States = Mapping[str, Mapping[str, Tensor]]
"""Tensors by kind, such as `"exp_avg"` or `"master"`, then by canonical name."""


def verify_states(states: States, model: Mapping[str, Tensor]) -> dict[str, dict]:
    """Wraps optimizer state so that each read checks that it belongs to its weight.

    The check is that the master weights round to the model's weights bit by bit; the
    master weights of any other weight do not.

    Args:
      states: Tensors by kind and canonical name; `"master"` is among the kinds. State
        without a master weight or without a weight in `model` is returned unchanged.
      model: Tensors of the model by canonical name.

    Returns:
      State with the same keys, whose reads raise a ValueError if the check fails.
    """
    masters = states["master"]
    return {
        kind: {
            name: _Verified(name, tensor, masters[name], model[name])
            if name in masters and name in model
            else tensor
            for name, tensor in of_kind.items()
        }
        for kind, of_kind in states.items()
    }


@dataclasses.dataclass(frozen=True)
class _Verified:
    """State tensor with the master weight and the model's weight to verify it."""

    name: str
    tensor: Tensor
    master: Tensor
    weight: Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        return self.tensor.shape

    @property
    def dtype(self) -> np.dtype:
        return self.tensor.dtype

    def read(self, slices: tuple[slice, ...] = ()) -> np.ndarray:
        weight = self.weight.read(slices)
        rounded = self.master.read(slices).astype(weight.dtype)
        if not np.array_equal(_bits(rounded), _bits(weight)):
            raise ValueError(
                f"The optimizer's master weights for '{self.name}' do not round to the "
                "model's, so the state is another weight's: it lies in another order "
                "than was worked out, or was saved so, as Megatron-Core 0.16 does with "
                "--dist-ckpt-optim-fully-reshardable where buckets end in padding."
            )
        return self.tensor.read(slices)


def _bits(values: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(values).reshape(-1).view(np.uint8)
