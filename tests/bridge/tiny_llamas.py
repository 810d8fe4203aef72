"""Tiny random Llamas, written by transformers itself."""

import dataclasses
from pathlib import Path

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

SIZES = {
    "vocab_size": 131,  # odd, so that nothing divides it
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    # Short, so that a 40-token text meets all three bands of wavelengths.
    "original_max_position_embeddings": 32,
}
LINEAR_ROPE = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
VARIANTS = {
    "untied": {},
    "tied": {"tie_word_embeddings": True},
    "wide_heads": {"head_dim": 32, "num_attention_heads": 6},  # 6 * 32 != 48
    "llama3_rope": {"rope_parameters": LLAMA3_ROPE},
    "linear_rope": {"rope_parameters": LINEAR_ROPE, "num_key_value_heads": 4},
    "biased": {"attention_bias": True, "mlp_bias": True, "eos_token_id": [2, 7]},
}


@dataclasses.dataclass(frozen=True)
class HFModel:
    """A checkpoint, and what transformers makes of it."""

    path: Path
    tokens: np.ndarray
    logits: np.ndarray


def make_llama(path: Path, *, dtype=torch.float32, **traits) -> HFModel:
    """Writes a Llama whose logits have a standard deviation of at least 1."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**{**SIZES, **traits})).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            # Norms around 1, biases and embeddings not zero, kernels that keep the
            # variance: every weight matters to the logits.
            fan_in = weight.shape[-1] if "proj" in name and weight.ndim > 1 else 4
            weight.copy_(torch.randn(weight.shape) * fan_in**-0.5)
            if "norm" in name:
                weight.add_(1.0)
    model.to(dtype).save_pretrained(path)
    # Read back: `.to(bfloat16)` has also rounded the rotary frequencies.
    model = LlamaForCausalLM.from_pretrained(path)
    tokens = np.random.default_rng(0).integers(0, SIZES["vocab_size"], (2, 40))
    return HFModel(path, tokens, hf_logits(model, tokens))


def hf_logits(model: torch.nn.Module, tokens: np.ndarray) -> np.ndarray:
    with torch.no_grad():
        return model(torch.from_numpy(tokens)).logits.float().numpy()
