"""Key mapping: canonical names to the names that a given Megatron run uses."""

import re
from collections.abc import Collection, Mapping
from typing import Any

_INPUT_NORM = re.compile(r"\bself_attention\.linear_qkv\.layer_norm_(\w+)$")
_MLP_NORM = re.compile(r"\bmlp\.linear_fc1\.layer_norm_(\w+)$")
_EXPERTS_NORM = re.compile(r"\bpre_mlp_layernorm\.(\w+)$")
_LATENT_NORM = re.compile(r"\b(self_attention)\.(q|kv)_layernorm\.(\w+)$")
_FINAL_NORM = re.compile(r"^decoder\.final_layernorm\.")
_MIXER_CONV = re.compile(r"\.mixer\.conv1d\.(weight|bias)$")
_LAYER = re.compile(r"^.*?\blayers\.\d+\.")
_EXPERT = re.compile(r"\bmlp\.experts\.(\d+)\.(linear_fc[12])\.(\w+)$")


def hybrid_pattern(args: Mapping[str, Any]) -> str | None:
    """Returns the layers of a hybrid run, such as `M*-`; None for a GPT."""
    return args.get("hybrid_layer_pattern") or args.get("hybrid_override_pattern")


def uses_transformer_engine(args: Mapping[str, Any]) -> bool:
    """Returns whether a run uses TransformerEngine's layers, which is the default."""
    return args.get("transformer_impl") != "local"


def in_torch_dist(name: str, names: Collection[str], args: Mapping[str, Any]) -> str:
    """Returns a tensor's name in `torch_dist`, with layer and expert numbers.

    Args:
      name: Canonical name of the tensor.
      names: Canonical names of all tensors of the model.
      args: Settings of the run.
    """
    name = _final_norm(name, args)
    if uses_transformer_engine(args):
        return _fused_latent_norm(name, names)
    if _is_latent(name, names):  # whose local layers have no mapping of names
        return _MLP_NORM.sub(r"pre_mlp_layernorm.\1", name)
    return _EXPERTS_NORM.sub(r"mlp.linear_fc1.layer_norm_\1", name)


def in_module(name: str, names: Collection[str], args: Mapping[str, Any]) -> str:
    """Returns a tensor's name in the model's module, as legacy files use it.

    Args:
      name: Canonical name, with layer and expert numbers local to the rank.
      names: Canonical names of all tensors of the model.
      args: Settings of the run.
    """
    name = _MIXER_CONV.sub(r".mixer.conv1d_\1", _final_norm(name, args))
    if not uses_transformer_engine(args):
        name = _INPUT_NORM.sub(r"input_layernorm.\1", name)
        name = _MLP_NORM.sub(r"pre_mlp_layernorm.\1", name)
        return _EXPERT.sub(r"mlp.experts.local_experts.\1.\2.\3", name)
    name = _fused_latent_norm(name, names)
    if args.get("moe_grouped_gemm"):
        return _EXPERT.sub(r"mlp.experts.\2.\3\1", name)
    return _EXPERT.sub(r"mlp.experts.local_experts.\1.\2.\3", name)


def _final_norm(name: str, args: Mapping[str, Any]) -> str:
    """Renames the norm after the last layer as a hybrid model's module does."""
    return (
        _FINAL_NORM.sub("decoder.final_norm.", name) if hybrid_pattern(args) else name
    )


def _is_latent(name: str, names: Collection[str]) -> bool:
    """Returns whether a tensor belongs to a layer with latent attention."""
    layer = _LAYER.match(name)
    return bool(
        layer and f"{layer[0]}self_attention.linear_kv_down_proj.weight" in names
    )


def _fused_latent_norm(name: str, names: Collection[str]) -> str:
    """Renames MLA's latent norms as TransformerEngine fuses them into projections."""
    match = _LATENT_NORM.search(name)
    if match is None:
        return name
    projection = f"{name[: match.end(1)]}.linear_{match[2]}_up_proj"
    if f"{projection}.weight" not in names:
        return name
    return f"{projection}.layer_norm_{match[3]}"
