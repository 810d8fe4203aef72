"""Canonical names: one naming of a model's tensors for all checkpoint formats.

Megatron's keys depend on the format, on the version, on whether TransformerEngine made
the layers, and on whether all layers are alike. This module maps all of them to the
names of `torch_dist` with an explicit number for each layer and each expert:

    embedding.word_embeddings.weight
    decoder.layers.3.self_attention.linear_qkv.layer_norm_weight
    decoder.layers.3.self_attention.linear_qkv.weight
    decoder.layers.3.mlp.linear_fc1.layer_norm_weight      (dense layer)
    decoder.layers.3.pre_mlp_layernorm.weight              (MoE layer)
    decoder.layers.3.mlp.experts.7.linear_fc1.weight
    decoder.final_layernorm.weight
    output_layer.weight                                    (unless tied)
"""

import re
from collections import Counter
from collections.abc import Callable, Mapping

from bridge.megatron._mixers import join_mixers
from bridge.megatron._views import Tensor, concatenate, section

EMBEDDING = "embedding.word_embeddings.weight"
HEAD = "output_layer.weight"

Tensors = Mapping[str, Tensor]

# Prefixes of wrapper modules that training code, NeMo or FSDP add to every name.
_PREFIX = re.compile(r"^(?:(?:model|module)\.)+")
_STACKED_LAYER = re.compile(r"^(.*\blayers)\.(?!\d+\.)(.+)$")
_STACKED_EXPERT = re.compile(r"^(.*\bexperts)\.experts\.(?!\d+\.)(.+)$")
_GATED_HALF = re.compile(r"^(.*\.(?:weight|bias)\d*)_([wv])$")
# Upper bound on stacked layers or experts, above that of any model: it guards against
# damaged shapes.
_MAX_STACKED = 2**16
_RENAMED = (
    (re.compile(r"\bexperts\.(?:local_)?experts\.(\d+)\."), r"experts.\1."),
    (
        re.compile(r"\bmlp\.experts\.(linear_fc[12])\.(weight|bias)(\d+)$"),
        r"mlp.experts.\3.\1.\2",
    ),
    (re.compile(r"\.mtp_model_layer\."), ".transformer_layer."),
    (re.compile(r"^decoder\.final_norm\."), "decoder.final_layernorm."),
    (re.compile(r"\blinear_q_up_proj\.layer_norm_"), "q_layernorm."),
    (re.compile(r"\blinear_kv_up_proj\.layer_norm_"), "kv_layernorm."),
)
_INPUT_NORM = re.compile(r"^(.*)\binput_layernorm\.(\w+)$")
_MLP_NORM = re.compile(
    r"^(.*)\b(?:pre_mlp_layernorm\.|mlp\.linear_fc1\.layer_norm_)(\w+)$"
)


def canonical_tensors(tensors: Tensors) -> dict[str, Tensor]:
    """Renames tensors to canonical names, with one tensor per layer and expert.

    The result is lazy: no tensor is read.

    Args:
      tensors: Tensors of a model, or of one kind of its optimizer state, by key on
        disk.

    Returns:
      Tensors by canonical name. Tensors stacked over layers or experts are split, and
      separate gate and up projections are concatenated, gate first, as are the parts of
      mixers.

    Raises:
      ValueError: If two tensors map to the same name, or one half of a gated
        projection is missing.
    """
    tensors = _renamed(tensors, strip_prefix)
    tensors = join_mixers(_join_halves(tensors))
    tensors = _unstacked(tensors, _STACKED_LAYER, "{}.{}.{}")
    tensors = _unstacked(tensors, _STACKED_EXPERT, "{}.{}.{}")
    for pattern, replacement in _RENAMED:
        tensors = _renamed(
            tensors, lambda name, p=pattern, r=replacement: p.sub(r, name)
        )
    # Last, because the name of a norm depends on which projections exist.
    names = frozenset(tensors)
    return _renamed(tensors, lambda name: _norm_name(name, names))


def strip_prefix(name: str) -> str:
    """Returns a name without the prefixes of wrapper modules."""
    return _PREFIX.sub("", name)


def _renamed(tensors: Tensors, rename: Callable[[str], str]) -> dict[str, Tensor]:
    names = [rename(name) for name in tensors]
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice:
        raise ValueError(f"Two tensors each would be called {sorted(twice)}.")
    return dict(zip(names, tensors.values(), strict=True))


def _join_halves(tensors: Tensors) -> dict[str, Tensor]:
    joined: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        half = _GATED_HALF.match(name)
        if half is not None and half[1] in tensors:
            raise ValueError(f"'{half[1]}' is stored both whole and in halves.")
        if half is None:
            joined[name] = tensor
        elif f"{half[1]}_w" not in tensors or f"{half[1]}_v" not in tensors:
            raise ValueError(f"'{name}' is half a projection: its twin is missing.")
        elif half[2] == "w":
            parts = [tensor, tensors[f"{half[1]}_v"]]
            joined[half[1]] = concatenate(parts, dim=0)
    return joined


def _unstacked(
    tensors: Tensors, pattern: re.Pattern[str], template: str
) -> dict[str, Tensor]:
    cut: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        stacked = pattern.match(name)
        if stacked is None:
            _add_layer(cut, name, tensor)
            continue
        if not tensor.shape or 0 in tensor.shape or tensor.shape[0] > _MAX_STACKED:
            raise ValueError(
                f"'{name}' of shape {tensor.shape} is not a stack of layers."
            )
        for number in range(tensor.shape[0]):
            inner = template.format(stacked[1], number, stacked[2])
            _add_layer(cut, inner, section(tensor, number))
    return cut


def _add_layer(cut: dict[str, Tensor], name: str, tensor: Tensor) -> None:
    if name in cut:
        raise ValueError(f"'{name}' is stored both alone and in a stack of layers.")
    cut[name] = tensor


def _norm_name(name: str, names: frozenset[str]) -> str:
    """Renames a norm as TransformerEngine fuses it into the projection after it."""
    if match := _INPUT_NORM.match(name):
        projection = f"{match[1]}self_attention.linear_qkv"
        if f"{projection}.weight" in names:
            return f"{projection}.layer_norm_{match[2]}"
    if match := _MLP_NORM.match(name):
        projection = f"{match[1]}mlp.linear_fc1"
        if f"{projection}.weight" in names:
            return f"{projection}.layer_norm_{match[2]}"
        return f"{match[1]}pre_mlp_layernorm.{match[2]}"
    return name
