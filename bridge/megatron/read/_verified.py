"""Optimizer state, handed out only if it proves to be of its weight."""

import dataclasses
from collections.abc import Mapping

import numpy as np

from bridge.megatron._views import Tensor

States = Mapping[str, Mapping[str, Tensor]]
"""Tensors by kind, such as `"exp_avg"` or `"master"`, and canonical name."""


def verify_states(states: States, model: Mapping[str, Tensor]) -> dict[str, dict]:
    """Makes every read of a state prove that it is of its weight.

    Master weights round to the model's weights, bit by bit; those of any other weight
    do not.

    Args:
      states: With `"master"` among the kinds. States of other weights than the model's
        stay as they are.
      model: The model's tensors by canonical name.
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
    """A state, the master weights at the same place, and the model's weight."""

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
