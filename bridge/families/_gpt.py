"""Parts shared by GPT-2, GPT-J and their descendants: names of fields, constants."""

from collections.abc import Mapping
from typing import Any

from bridge.families._family import Field
from bridge.families._field_transform import FieldTransform
from bridge.models import DecoderConfig

SIZES = {
    "n_embd": Field(768, "hidden_size"),
    "n_layer": Field(12, "num_hidden_layers"),
    "n_head": Field(12, "num_attention_heads"),
    "n_positions": Field(1024, "max_position_embeddings"),
    "activation_function": Field("gelu_new", "hidden_act"),
    "layer_norm_epsilon": Field(1e-5, "norm_eps"),
    "initializer_range": Field(0.02),
    "tie_word_embeddings": Field(True),
}
LAYERS = {
    "norm": "layer",
    "norm_bias": True,
    "gated_mlp": False,
    "mlp_bias": True,
    "attention_bias": True,
    "attention_out_bias": True,
}
"""Constants of layers as GPT-2 has them: layer norms, plain MLPs, biases everywhere."""

# Dropout is not part of the decoder.
DROPOUT = {"resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.1}


def _read_inner(fields: Mapping[str, Any]) -> dict[str, Any]:
    inner = fields["n_inner"]
    return {"intermediate_size": 4 * fields["n_embd"] if inner is None else inner}


def _write_inner(config: DecoderConfig) -> dict[str, Any]:
    derived = config.intermediate_size == 4 * config.hidden_size
    return {"n_inner": None if derived else config.intermediate_size}


INNER = FieldTransform(("n_inner",), _read_inner, _write_inner, {"n_inner": None})
"""The width of the MLP, four times the model's unless the file says another."""


def scaled_embeddings(width: str) -> FieldTransform:
    """Reads whether embeddings are multiplied by the root of their width.

    Args:
      width: Field of the width.
    """
    name = "scale_embedding"

    def read(fields: Mapping[str, Any]) -> dict[str, Any]:
        # A factor in float32, whatever the dtype of the weights.
        factor = fields[width] ** 0.5 if fields[name] else 1.0
        return {"embedding_multiplier": factor}

    def write(config: DecoderConfig) -> dict[str, Any]:
        return {name: config.embedding_multiplier != 1}

    return FieldTransform((name,), read, write, {name: True})
