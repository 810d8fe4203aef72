"""DeepSeek-MoE made of transformers' Llama, since transformers has no class for it.

Its experts are written from the paper (arXiv:2401.06066) and owe nothing to bridge.
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
from transformers.models.llama.modeling_llama import LlamaMLP


class DeepseekConfig(LlamaConfig):
    model_type = "deepseek"

    moe_intermediate_size: int = 1407
    n_shared_experts: int | None = None
    n_routed_experts: int | None = None
    num_experts_per_tok: int | None = None
    moe_layer_freq: int = 1
    first_k_dense_replace: int = 0
    norm_topk_prob: bool = False
    scoring_func: str = "softmax"
    aux_loss_alpha: float = 0.001
    seq_aux: bool = True
    bos_token_id: int | None = 100000
    eos_token_id: int | list[int] | None = 100001

    def to_dict(self) -> dict[str, Any]:
        """Returns the fields, but for two of Llama that it lacks."""
        lacks = ("head_dim", "mlp_bias")
        return {k: v for k, v in super().to_dict().items() if k not in lacks}


class _Experts(torch.nn.Module):
    def __init__(self, config: DeepseekConfig) -> None:
        super().__init__()
        self.config = config
        count, width = config.n_routed_experts, config.moe_intermediate_size
        self.gate = torch.nn.Linear(config.hidden_size, count, bias=False)
        self.experts = torch.nn.ModuleList(_mlp(config, width) for _ in range(count))
        self.shared_experts = _mlp(config, config.n_shared_experts * width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores = self.gate(x).softmax(dim=-1)
        weights, chosen = scores.topk(self.config.num_experts_per_tok, dim=-1)
        if self.config.norm_topk_prob:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        gates = torch.zeros_like(scores).scatter(-1, chosen, weights)
        made = torch.stack([expert(x) for expert in self.experts], dim=-1)
        return (made * gates.unsqueeze(-2)).sum(-1) + self.shared_experts(x)


def _mlp(config: DeepseekConfig, width: int) -> LlamaMLP:
    sizes = config.to_dict() | {"intermediate_size": width}
    return LlamaMLP(LlamaConfig(**sizes))


class DeepseekForCausalLM(LlamaForCausalLM):
    config_class = DeepseekConfig

    def __init__(self, config: DeepseekConfig) -> None:
        super().__init__(config)
        for layer in self.model.layers[config.first_k_dense_replace :]:
            layer.mlp = _Experts(config)
        self.post_init()


AutoConfig.register("deepseek", DeepseekConfig)
AutoModelForCausalLM.register(DeepseekConfig, DeepseekForCausalLM)
