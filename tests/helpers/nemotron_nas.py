"""Llama-Nemotron made of transformers' Llama, since transformers has no class for it.

Its layers are written from the paper (arXiv:2411.19146) and owe nothing to bridge.
Importing this file makes the classes known to transformers' `Auto` classes.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
)
from transformers.models.llama.modeling_llama import LlamaDecoderLayer


class DeciLMConfig(LlamaConfig):
    model_type = "nemotron-nas"

    block_configs: list[dict[str, Any]] | None = None

    def to_dict(self) -> dict[str, Any]:
        """Returns the fields, but for those that each layer says itself."""
        own = ("head_dim", "num_key_value_heads", "intermediate_size")
        return {k: v for k, v in super().to_dict().items() if k not in own}


class _Layer(LlamaDecoderLayer):
    def __init__(self, config: DeciLMConfig, layer_idx: int) -> None:
        assert config.block_configs is not None
        block = config.block_configs[layer_idx]
        attention, ffn = block["attention"], block["ffn"]
        group, multiple = attention["n_heads_in_group"] or 1, ffn["ffn_mult"] or 1
        units = int(2 * multiple * config.hidden_size / 3)
        sizes = config.to_dict() | {
            "num_key_value_heads": config.num_attention_heads // group,
            "intermediate_size": units + -units % 256,
        }
        del sizes["block_configs"]
        llama = LlamaConfig(**sizes)
        llama._attn_implementation = config._attn_implementation
        super().__init__(llama, layer_idx)
        if attention["no_op"]:
            del self.self_attn, self.input_layernorm
        if ffn["no_op"]:
            del self.mlp, self.post_attention_layernorm

    def forward(self, hidden_states: torch.Tensor, **options: Any) -> torch.Tensor:
        if hasattr(self, "self_attn"):
            normed = self.input_layernorm(hidden_states)
            hidden_states = hidden_states + self.self_attn(normed, **options)[0]
        if hasattr(self, "mlp"):
            normed = self.post_attention_layernorm(hidden_states)
            hidden_states = hidden_states + self.mlp(normed)
        return hidden_states


class DeciLMForCausalLM(LlamaForCausalLM):
    config_class = DeciLMConfig

    def __init__(self, config: DeciLMConfig) -> None:
        super().__init__(config)
        layers = (_Layer(config, i) for i in range(config.num_hidden_layers))
        self.model.layers = torch.nn.ModuleList(layers)
        self.post_init()


AutoConfig.register("nemotron-nas", DeciLMConfig)
AutoModelForCausalLM.register(DeciLMConfig, DeciLMForCausalLM)
