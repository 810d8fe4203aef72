"""Parameter classes: the properties by which Megatron groups an optimizer's parameters.

Megatron makes one parameter group per class. With expert parallelism experts have an
optimizer of their own; without it they are in that of the dense weights.

Source: Megatron-LM megatron/core/optimizer/__init__.py::_get_param_groups
"""

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

_EXPERT = re.compile(r"\.mlp\.experts\.")
_QK_NORM = re.compile(r"\b[qk]_layernorm\.")


class ParamClass(NamedTuple):
    """Class of a parameter.

    Args:
      decays: Whether weight decay applies to the parameter (`wd_mult` is not 0).
      is_expert: Whether the parameter belongs to an expert, and experts have an
        optimizer of their own.
    """

    decays: bool
    is_expert: bool


def class_of_param(
    name: str, shape: tuple[int, ...], args: Mapping[str, Any], *, experts_apart: bool
) -> ParamClass:
    """Returns the class of a parameter under Megatron's default rules.

    Args:
      name: Name of the parameter in the model's module, as `in_module` returns it.
      shape: Shape of the parameter.
      args: Settings of the run.
      experts_apart: Whether experts have an optimizer of their own.
    """
    decays = len(shape) > 1 and not name.endswith(".bias")
    if args.get("apply_wd_to_qk_layernorm") and _QK_NORM.search(name):
        decays = True
    return ParamClass(decays, experts_apart and _EXPERT.search(name) is not None)


def class_of_group(group: Mapping[str, Any]) -> ParamClass:
    """Returns the class of the parameters of a parameter group.

    Args:
      group: Settings of the group. NeMo prefixes some names with `pre_`.

    Raises:
      ValueError: If the group has a learning rate of its own.
    """
    scale = group.get("lr_mult", group.get("pre_lr_mult", 1.0))
    if scale != 1.0 or group.get("is_decoupled_lr"):
        raise ValueError("groups have learning rates of their own")
    decay = group.get("wd_mult", group.get("pre_wd_mult", 1.0))
    return ParamClass(bool(decay), bool(group.get("is_expert_parallel")))
