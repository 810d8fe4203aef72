"""Spelling: canonical names as a given run of Megatron has them, to be written."""

import re
from collections.abc import Collection, Mapping
from typing import Any

_INPUT_NORM = re.compile(r"\bself_attention\.linear_qkv\.layer_norm_(\w+)$")
_MLP_NORM = re.compile(r"\bmlp\.linear_fc1\.layer_norm_(\w+)$")
_EXPERTS_NORM = re.compile(r"\bpre_mlp_layernorm\.(\w+)$")
_LATENT_NORM = re.compile(r"\b(self_attention)\.(q|kv)_layernorm\.(\w+)$")
_EXPERT = re.compile(r"\bmlp\.experts\.(\d+)\.(linear_fc[12])\.(\w+)$")


def uses_transformer_engine(args: Mapping[str, Any]) -> bool:
    """Says whether a run's layers are TransformerEngine's, as they are by default."""
    return args.get("transformer_impl") != "local"


def in_torch_dist(name: str, names: Collection[str], args: Mapping[str, Any]) -> str:
    """Spells a canonical name as `torch_dist` has it, layer and expert still numbered.

    Args:
      name: The canonical name.
      names: Those of the whole model.
      args: The run's settings.
    """
    if uses_transformer_engine(args):
        return _fused_latent_norm(name, names)
    return _EXPERTS_NORM.sub(r"mlp.linear_fc1.layer_norm_\1", name)


def in_module(name: str, names: Collection[str], args: Mapping[str, Any]) -> str:
    """Spells a canonical name as the model's own module has it, in legacy files.

    Args:
      name: The canonical name, with the layer's and the expert's local numbers.
      names: The canonical names of the whole model.
      args: The run's settings.
    """
    if not uses_transformer_engine(args):
        name = _INPUT_NORM.sub(r"input_layernorm.\1", name)
        name = _MLP_NORM.sub(r"pre_mlp_layernorm.\1", name)
        return _EXPERT.sub(r"mlp.experts.local_experts.\1.\2.\3", name)
    name = _fused_latent_norm(name, names)
    if args.get("moe_grouped_gemm"):
        return _EXPERT.sub(r"mlp.experts.\2.\3\1", name)
    return _EXPERT.sub(r"mlp.experts.local_experts.\1.\2.\3", name)


def _fused_latent_norm(name: str, names: Collection[str]) -> str:
    """Spells MLA's inner norms as TransformerEngine: with the projection after them."""
    match = _LATENT_NORM.search(name)
    if match is None:
        return name
    projection = f"{name[: match.end(1)]}.linear_{match[2]}_up_proj"
    if f"{projection}.weight" not in names:
        return name
    return f"{projection}.layer_norm_{match[3]}"
