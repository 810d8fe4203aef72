"""Parts of state-space mixers: `torch_dist` stores those of a fused projection apart.

Ranks of tensor parallelism split each part, so that Megatron's Mamba 2 mixer has an
entry for each of `in_proj`'s and the convolution's rows.

Source: Megatron-LM megatron/core/ssm/mamba_mixer.py::MambaMixer.sharded_state_dict
"""

import re
from collections.abc import Mapping

from bridge.megatron._views import Tensor, concatenate

FUSED = re.compile(r"^(.*\.mixer\.)(in_proj|conv1d)\.(?:weight|bias)$")
"""Name of a tensor that has parts; its first group is the prefix of the mixer."""

_IN_PROJ = ("z", "x", "B", "C", "dt")
_CONV = ("x", "B", "C")
_PART = re.compile(r"^(.*\.mixer\.(?:in_proj|conv1d)\.(?:weight|bias))\.(?:\w+)$")
# Megatron-FSDP stores the names of the module's own parameters.
_OWN_CONV = re.compile(r"\.mixer\.conv1d_(weight|bias)$")


def join_mixers(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Concatenates the parts of mixers; the result is lazy.

    Args:
      tensors: Tensors by name.

    Raises:
      ValueError: If parts of a projection are missing.
    """
    joined: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        match = _PART.match(name)
        if match is None:
            joined[_OWN_CONV.sub(r".mixer.conv1d.\1", name)] = tensor
        elif match[1] not in joined:
            joined[match[1]] = _concatenated(match[1], tensors)
    return joined


def _concatenated(name: str, tensors: Mapping[str, Tensor]) -> Tensor:
    names = [f"{name}.{part}" for part in parts_of(name)]
    missing = [part for part in names if part not in tensors]
    if missing:
        raise ValueError(f"'{name}' is not complete: {missing} are missing.")
    return concatenate([tensors[part] for part in names], dim=0)


def parts_of(name: str) -> tuple[str, ...]:
    """Returns the parts of a fused tensor, in the order of its rows."""
    return _IN_PROJ if ".in_proj." in name else _CONV
