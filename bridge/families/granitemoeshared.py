"""Granite 3 with experts and an MLP that all tokens share.

Source: transformers `configuration_granitemoeshared.py`,
`modeling_granitemoeshared.py`.
"""

import dataclasses

from bridge.families import granitemoe
from bridge.families._blocks import Rules, key_mapping, linear
from bridge.families._field_transform import FieldTransform
from bridge.models import DecoderConfig, LayerKind
from bridge.rules._rules import Rule

_WIDTH = "shared_intermediate_size"
_TO = "mlp.shared_expert."


def layer(config: DecoderConfig, kind: LayerKind) -> Rules:
    """A layer with the shared MLP, if there is one."""
    return granitemoe.layer(config, kind) + shared_mlp(config)


def shared_mlp(config: DecoderConfig) -> Rules:
    """The shared MLP, if there is one, of which gate and up are one tensor."""
    assert config.moe is not None
    if config.moe.shared_intermediate_size is None:
        return ()
    gate_up = Rule(
        "shared_mlp.input_linear.weight",
        (f"{_TO}gate_proj.kernel", f"{_TO}up_proj.kernel"),
        ("shared_mlp embed -> embed shared_mlp",) * 2,
    )
    down = "embed shared_mlp -> shared_mlp embed"
    down = linear("shared_mlp.output_linear", f"{_TO}down_proj", down)
    return (gate_up, *down)


def _write_width(config: DecoderConfig):
    assert config.moe is not None
    return {_WIDTH: config.moe.shared_intermediate_size or 0}


SHARED = FieldTransform(
    (_WIDTH,),
    lambda fields: {f"moe.{_WIDTH}": fields[_WIDTH] or None},  # 0 stands for none
    _write_width,
    {_WIDTH: 0},
)
"""The width of the MLP that all tokens share; 0 for none."""

FAMILY = dataclasses.replace(
    granitemoe.FAMILY,
    model_type="granitemoeshared",
    architecture="GraniteMoeSharedForCausalLM",
    transforms=(*granitemoe.FAMILY.transforms, SHARED),
    key_mappings=(key_mapping(layer),),
)
