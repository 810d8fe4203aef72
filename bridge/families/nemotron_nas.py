"""Llama-Nemotron Super, Ultra and 51B: Llama whose layers were chosen one by one.

Of a searched architecture, some layers have no attention, some no MLP, and MLPs have
widths of their own. Its code came with its weights, and transformers has no class for
it: an export is for that code, and for libraries that have their own.

Source: Puzzle (arXiv:2411.19146); the fields of `Llama-3_3-Nemotron-Super-49B-v1`.
"""

import collections
from collections.abc import Mapping
from typing import Any

from bridge.families._blocks import (
    Rules,
    attention,
    ignore_tied_head,
    key_mapping,
    mlp,
    norms,
)
from bridge.families._dim_sizes import mlp_dim
from bridge.families._family import Family, Field
from bridge.families._field_transform import FieldTransform
from bridge.families._fields import SIZES, attention_bias, tokens
from bridge.families._hf_rope import rope
from bridge.models import DecoderConfig, LayerKind

_BLOCKS = "block_configs"
_ATTENTION = {
    "n_heads_in_group": None,
    "no_op": False,
    "num_sink_tokens": None,
    "replace_with_linear": False,
    "sparsify": None,
    "unshifted_sink": False,
    "use_prefill_window_in_sink_attention": False,
    "window_length": None,
}
_MLP = {
    "ffn_mult": None,
    "no_op": False,
    "replace_with_linear": False,
    "sparsify": None,
}
_WIDTH_UNIT = 256


def _layer(config: DecoderConfig, kind: LayerKind) -> Rules:
    own, names = (), {}
    if kind.mixer is not None:
        own, names = attention(config), {"input_layernorm": "input_layernorm"}
    if kind.channels is not None:
        own += mlp(config, width=mlp_dim(kind))
        names["post_attention_layernorm"] = "pre_feedforward_layernorm"
    return own + norms(names)


def _part(block: Any, name: str, read: str, layer: int) -> tuple[Any, list[str]]:
    """Returns the number of a part of a layer, None where it has none; what is wrong.

    Args:
      block: Object of the file for a layer.
      name: Name of the part.
      read: Its field that is a number.
      layer: Index of the layer.
    """
    given = block.get(name) if isinstance(block, Mapping) else None
    at = f"{_BLOCKS}[{layer}].{name}"
    if not isinstance(given, Mapping):
        return None, [f"{at} = {given!r} is not an object"]
    wrong = [
        f"{at}.{key} = {value!r}: this field is not modelled"
        for key, value in given.items()
        if key not in (read, "no_op") and value not in (None, False)
    ]
    if given.get("no_op"):
        return None, wrong
    number = given.get(read)
    if isinstance(number, bool) or not isinstance(number, int | float) or number <= 0:
        wrong.append(f"{at}.{read} = {number!r} is not a positive number")
        return None, wrong
    return number, wrong


def _unread(block: Any, layer: int) -> list[str]:
    return [
        f"{_BLOCKS}[{layer}].{key} = {value!r}: this field is not modelled"
        for key, value in (block.items() if isinstance(block, Mapping) else ())
        if key not in ("attention", "ffn") and value not in (None, False)
    ]


def _width(multiple: float, hidden: int) -> int:
    """Returns the width of an MLP, in whole units."""
    width = int(2 * multiple * hidden / 3)
    return -(-width // _WIDTH_UNIT) * _WIDTH_UNIT


def _read_blocks(fields: Mapping[str, Any]) -> dict[str, Any]:
    blocks, layers = fields[_BLOCKS], fields["num_hidden_layers"]
    if not isinstance(blocks, list | tuple) or len(blocks) != layers:
        raise ValueError(f"{_BLOCKS}: an object for each of the {layers} layers")
    attends, expands, wrong = [], [], []
    for layer, block in enumerate(blocks):
        group, lines = _part(block, "attention", "n_heads_in_group", layer)
        multiple, others = _part(block, "ffn", "ffn_mult", layer)
        attends.append(group)
        expands.append(multiple)
        wrong += lines + others + _unread(block, layer)
    groups = {group for group in attends if group is not None}
    if len(groups) > 1:
        wrong.append(
            f"{_BLOCKS}: n_heads_in_group is {sorted(groups)}; one number is modelled"
        )
    heads = fields["num_attention_heads"]
    group = groups.pop() if len(groups) == 1 else 1
    if not isinstance(group, int) or heads % group:
        wrong.append(f"n_heads_in_group {group} does not divide the {heads} heads")
    if fields["num_key_value_heads"] not in (None, heads // group):
        wrong.append(
            f"num_key_value_heads = {fields['num_key_value_heads']!r}: {_BLOCKS} say "
            f"{heads // group}"
        )
    if wrong:
        raise ValueError("\n".join(wrong))
    widths = [m and _width(m, fields["hidden_size"]) for m in expands]
    counts = collections.Counter(width for width in widths if width)
    most = counts.most_common(1)[0][0] if counts else _WIDTH_UNIT
    types = tuple("none" if g is None else "full_attention" for g in attends)
    return {
        "num_key_value_heads": heads // group,
        "intermediate_size": most,
        "mlp_sizes": tuple(
            (i, width) for i, width in enumerate(widths) if width not in (None, most)
        ),
        "layer_types": types if "none" in types else None,
        "mixer_only_layers": tuple(i for i, w in enumerate(widths) if w is None),
    }


def _write_blocks(config: DecoderConfig) -> dict[str, Any]:
    group = config.num_attention_heads // config.num_key_value_heads
    blocks = []
    for kind in config.layer_kinds:
        attends, expands = kind.mixer is not None, kind.channels is not None
        multiple = 3 * config.mlp_width(kind) / (2 * config.hidden_size)
        attention = {
            "n_heads_in_group": group if attends else None,
            "no_op": not attends,
        }
        ffn = {"ffn_mult": multiple if expands else None, "no_op": not expands}
        blocks.append({"attention": _ATTENTION | attention, "ffn": _MLP | ffn})
    return {_BLOCKS: blocks, "num_key_value_heads": None}


FAMILY = Family(
    model_type="nemotron-nas",
    architecture="DeciLMForCausalLM",
    fields={
        **{
            name: field
            for name, field in SIZES.items()
            if name not in ("intermediate_size", "num_key_value_heads", "head_dim")
        },
        **tokens(1, 2),
        **attention_bias(),
        "max_position_embeddings": Field(2048),
        "rms_norm_eps": Field(1e-6, "norm_eps"),
        "mlp_bias": Field(False),
    },
    transforms=(
        rope(),
        FieldTransform(
            (_BLOCKS, "num_key_value_heads"),
            _read_blocks,
            _write_blocks,
            {_BLOCKS: None, "num_key_value_heads": None},
        ),
    ),
    fixed={"hidden_act": "silu", "attention_dropout": 0.0},
    passthrough={"pretraining_tp": 1},
    key_mappings=(key_mapping(_layer),),
    ignore=ignore_tied_head,
)
