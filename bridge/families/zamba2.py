"""Zamba2: Mamba 2 mixers, and blocks of attention and an MLP that layers share.

A time step has the lower bound `time_step_min` in every token here; transformers leaves
the bound out of tokens that it generates one by one.

Source: transformers `configuration_zamba2.py`, `modeling_zamba2.py`.
"""

from collections.abc import Mapping
from typing import Any

from bridge.families._blocks import (
    Rules,
    ignore_tied_head,
    linear,
    norm,
    norms,
    outside,
)
from bridge.families._dim_sizes import use_capture
from bridge.families._family import Family, Field, KeyMapping, Layers
from bridge.families._field_transform import FieldTransform
from bridge.families._fields import SIZES, tokens
from bridge.families._hf_rope import rope
from bridge.families._mamba import mamba
from bridge.families._shared_blocks import (
    HEADS,
    HYBRID,
    LINEAR,
    TIED,
    TYPES,
    block_attention,
    block_copies,
    block_prefix,
    hybrid_layers,
    tied_alone,
    types_of,
)
from bridge.models import DecoderConfig, LayerKind, SharedBlocksConfig
from bridge.rules._rules import Rule

Fields = Mapping[str, Any]
_NORM = {"input_layernorm": "input_layernorm"}
_NAME = "shared_transformer"


def _layer(config: DecoderConfig, kind: LayerKind) -> Rules:
    if kind.shared_block is None:
        return mamba(config) + norms(_NORM)
    return (
        *mamba(config, "mamba_decoder.mamba."),
        norm("mamba_decoder.input_layernorm", "input_layernorm"),
        *linear("linear", "shared_use.out_proj", "embed_out embed -> embed embed_out"),
    )


def _block(config: DecoderConfig, at: str, to: str) -> Rules:
    up, down = f"{at}feed_forward.gate_up_proj", f"{at}feed_forward.down_proj"
    parts = f"{to}mlp.gate_proj", f"{to}mlp.up_proj"
    leaves = {"weight": ("kernel", "mlp embed -> embed mlp")}
    if config.mlp_bias:
        leaves["bias"] = ("bias", "mlp -> mlp")
    back = "embed -> embed" if config.mlp_bias else None
    return (
        *block_attention(at, to),
        *(
            Rule(f"{up}.{theirs}", tuple(f"{p}.{leaf}" for p in parts), (layout,) * 2)
            for theirs, (leaf, layout) in leaves.items()
        ),
        *linear(down, f"{to}mlp.down_proj", "embed mlp -> mlp embed", back),
    )


def _adapters(blocks: SharedBlocksConfig, at: str, use: str, to: str) -> Rules:
    """What the layers of a stack add to a block, which the file holds in the block."""
    rules = ()
    if blocks.attention_rank is not None:
        for name, heads in HEADS.items():
            source = f"{at}self_attn.linear_{name}_adapter_list.{{{use}}}"
            own, rank = f"{to}{name}_adapter.", "attention_rank"
            down = f"{rank} two_embeds -> two_embeds {rank}"
            rules += linear(f"{source}.0", f"{own}down", down)
            up = f"({heads}) {rank} -> {rank} {heads}"
            rules += linear(f"{source}.1", f"{own}up", up)
    source = f"{at}feed_forward.gate_up_proj_adapter_list.{{{use}}}"
    down, *others = (f"{to}mlp_adapter.{name}" for name in ("down", "gate", "up"))
    return (
        *rules,
        *linear(f"{source}.0", down, "mlp_rank embed -> embed mlp_rank"),
        Rule(
            f"{source}.1.weight",
            tuple(f"{name}.kernel" for name in others),
            ("mlp mlp_rank -> mlp_rank mlp",) * 2,
        ),
    )


def _outer(config: DecoderConfig) -> Rules:
    blocks = config.shared_blocks
    assert blocks is not None
    rules = outside(norm="model.final_layernorm")(config)
    for number in range(blocks.num_blocks):
        at = block_prefix(blocks, number, _NAME)
        rules += _block(config, at, f"shared_blocks.{number}.")
    for number, stack in enumerate(config.layer_stacks):
        if (block := stack.kind.shared_block) is not None:
            to = f"{stack.path}.shared_use.adapters."
            at = block_prefix(blocks, block, _NAME)
            rules += _adapters(blocks, at, use_capture(number), to)
    return rules


_COUNT, _IDS = "num_mem_blocks", "hybrid_layer_ids"
_ADAPTED, _RANK = "use_shared_attention_adapter", "adapter_rank"
_BLOCKS = {TYPES: None, _IDS: None, _COUNT: 1, _ADAPTED: False, _RANK: 128}
# Of the 54 layers of Zamba2-2.7B.
_HYBRIDS = (*range(6, 48, 6), 47, 51)


def _read_blocks(fields: Fields) -> dict[str, Any]:
    count, given = fields["num_hidden_layers"], fields[TYPES]
    if given is None:
        given = [HYBRID if i in _HYBRIDS else LINEAR for i in range(54)]
    layers, wrong = hybrid_layers(given, "a mamba2 model has such layers alone")
    if fields[_IDS] is not None and tuple(fields[_IDS]) != layers:
        wrong.append(f"{_IDS} = {fields[_IDS]}, but {TYPES} has {list(layers)}")
    if wrong:
        raise ValueError("\n".join(wrong))
    rank = fields[_RANK]
    return {
        "layer_types": ("mamba",) * len(given),
        "mixer_only_layers": tuple(range(count)),
        "shared_blocks.num_blocks": fields[_COUNT],
        "shared_blocks.layers": layers,
        "shared_blocks.attention_rank": rank if fields[_ADAPTED] else None,
        "shared_blocks.mlp_rank": rank,
    }


def _write_blocks(config: DecoderConfig) -> dict[str, Any]:
    blocks = config.shared_blocks
    assert blocks is not None
    return {
        TYPES: types_of(config),
        _IDS: blocks.layers,
        _COUNT: blocks.num_blocks,
        _ADAPTED: blocks.attention_rank is not None,
        _RANK: blocks.mlp_rank,
    }


_WIDTH = "attention_head_dim"
# Sizes that files repeat, by those that they follow from.
_REPEATED = {
    "attention_hidden_size": lambda hidden, heads: 2 * hidden,
    "kv_channels": lambda hidden, heads: hidden // heads,
    "num_query_groups": lambda hidden, heads: heads,
}
_HEAD = dict.fromkeys(("num_key_value_heads", _WIDTH, *_REPEATED))


def _read_heads(fields: Fields) -> dict[str, Any]:
    hidden, heads = fields["hidden_size"], fields["num_attention_heads"]
    kv_heads, width = fields["num_key_value_heads"], fields[_WIDTH]
    kv_heads = heads if kv_heads is None else kv_heads
    width = 2 * hidden // heads if width is None else width
    wrong = [
        f"{name} = {fields[name]!r}: it is {size(hidden, heads)} where hidden_size is "
        f"{hidden} and num_attention_heads {heads}; set it to that, or remove it"
        for name, size in _REPEATED.items()
        if fields[name] not in (None, size(hidden, heads))
    ]
    # transformers' adapters of all three have as many rows as queries have columns.
    if fields[_ADAPTED] and (kv_heads != heads or heads * width != 2 * hidden):
        wrong.append(
            f"{_ADAPTED} = True with {heads} heads of {width} and num_key_value_heads "
            f"{kv_heads}: adapters are of {heads} key heads, and of {2 * hidden} dims "
            "in all; transformers adds no others"
        )
    if wrong:
        raise ValueError("\n".join(wrong))
    return {
        "num_key_value_heads": kv_heads,
        "head_dim": width,
        "query_pre_attn_scalar": width / 2,
    }


def _write_heads(config: DecoderConfig) -> dict[str, Any]:
    hidden, heads = config.hidden_size, config.num_attention_heads
    return {
        "num_key_value_heads": config.num_key_value_heads,
        _WIDTH: config.head_dim,
        **{name: size(hidden, heads) for name, size in _REPEATED.items()},
    }


_MAMBA = {
    "n_mamba_heads": 8,
    "mamba_headdim": None,
    "mamba_ngroups": 1,
    "mamba_d_state": 64,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "chunk_size": 256,
    "time_step_min": 0.001,
    "add_bias_linear": False,
}
_OURS = {
    "n_mamba_heads": "num_heads",
    "mamba_headdim": "head_dim",
    "mamba_ngroups": "num_groups",
    "mamba_d_state": "state_size",
    "mamba_d_conv": "kernel_size",
    "chunk_size": "chunk_size",
    "time_step_min": "min_time_step",
    "add_bias_linear": "proj_bias",
}


def _read_mamba(fields: Fields) -> dict[str, Any]:
    width = fields["mamba_expand"] * fields["hidden_size"]
    heads, head_dim = fields["n_mamba_heads"], fields["mamba_headdim"]
    head_dim = width // heads if head_dim is None else head_dim
    if heads * head_dim != width:
        raise ValueError(
            f"n_mamba_heads {heads} of {head_dim} dims are not mamba_expand "
            f"{fields['mamba_expand']} times hidden_size {fields['hidden_size']}: "
            "transformers fails; set mamba_headdim or n_mamba_heads so that they are"
        )
    values = {ours: fields[name] for name, ours in _OURS.items()}
    values |= {"head_dim": head_dim, "norm_eps": 1e-5}  # whatever rms_norm_eps is
    of_mamba = {f"mamba.{name}": value for name, value in values.items()}
    return of_mamba | {"mlp_bias": fields["add_bias_linear"]}


def _write_mamba(config: DecoderConfig) -> dict[str, Any]:
    sizes = config.mamba
    assert sizes is not None
    expand = sizes.num_heads * sizes.head_dim // config.hidden_size
    written = {name: getattr(sizes, ours) for name, ours in _OURS.items()}
    return written | {"mamba_expand": expand}


_ROPE, _TURNS = rope(), "use_mem_rope"


def _read_rope(fields: Fields) -> dict[str, Any]:
    return _ROPE.read(fields) if fields[_TURNS] else {"rope": None}


def _write_rope(config: DecoderConfig) -> dict[str, Any]:
    if config.rope is None:
        return {_TURNS: False}
    return {_TURNS: True, **_ROPE.write(config)}


_OTHERS = {*_HEAD, TIED, "head_dim"}

FAMILY = Family(
    model_type="zamba2",
    architecture="Zamba2ForCausalLM",
    fields={
        **{name: f for name, f in SIZES.items() if name not in _OTHERS},
        **tokens(1, 2, 0),
        "max_position_embeddings": Field(4096),
        "hidden_act": Field("gelu"),
        "rms_norm_eps": Field(1e-5, "norm_eps"),
    },
    transforms=(
        FieldTransform(
            (*_ROPE.names, _TURNS),
            _read_rope,
            _write_rope,
            {**_ROPE.defaults, _TURNS: False},
        ),
        FieldTransform(tuple(_BLOCKS), _read_blocks, _write_blocks, _BLOCKS),
        tied_alone(_COUNT),
        FieldTransform(tuple(_HEAD), _read_heads, _write_heads, _HEAD),
        FieldTransform(tuple(_MAMBA), _read_mamba, _write_mamba, _MAMBA),
    ),
    constants={"learned_positions": False},
    fixed={"attention_dropout": 0.0, "use_conv_bias": True, "use_long_context": False},
    passthrough={
        "num_logits_to_keep": 1,
        "time_step_floor": 1e-4,
        "time_step_max": 0.1,
        "use_mamba_kernels": True,
        "use_mem_eff_path": False,
    },
    aliases={"layer_types": TYPES, "head_dim": _WIDTH},
    optional=("rope", "mamba", "shared_blocks"),
    key_mappings=(KeyMapping(_outer, Layers("model.layers.{layer}.", _layer)),),
    ignore=ignore_tied_head,
    copies=block_copies(_NAME),
)
