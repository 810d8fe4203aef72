"""Tiny random models of every family, written by transformers itself."""

import dataclasses
from pathlib import Path

import helpers.deepseek_moe  # noqa: F401  (makes it known to transformers)
import helpers.mistral4  # noqa: F401  (makes it known to transformers)
import helpers.mllama  # noqa: F401  (makes it known to transformers)
import helpers.nemotron_nas  # noqa: F401  (makes it known to transformers)
import numpy as np
import torch
from tiny_configs import SIZES, hf_fields
from transformers import AutoConfig, AutoModelForCausalLM


@dataclasses.dataclass(frozen=True)
class HFModel:
    """A checkpoint, and what transformers makes of it."""

    path: Path
    tokens: np.ndarray
    logits: np.ndarray


def make_model(path: Path, variant: str, *, dtype=torch.float32, **changes) -> HFModel:
    """Writes a model whose logits have a standard deviation of about 1 or more."""
    torch.manual_seed(0)
    fields = hf_fields(variant, **changes)
    config = AutoConfig.for_model(fields.pop("model_type"), **fields)
    model = AutoModelForCausalLM.from_config(config).eval()
    randomize(model, variant)
    model.to(dtype).save_pretrained(path)
    # Read back: `.to(bfloat16)` has also rounded the rotary frequencies.
    model = AutoModelForCausalLM.from_pretrained(path).eval()
    tokens = np.random.default_rng(0).integers(0, SIZES["vocab_size"], (2, 40))
    return HFModel(path, tokens, hf_logits(model, tokens))


def randomize(model: torch.nn.Module, model_type: str) -> None:
    """Draws all weights anew, so that each of them matters to the logits."""
    family = model_type.partition("-")[0].removesuffix("_text")
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.copy_(torch.randn(weight.shape) * _std(name, weight))
            if _is_norm_scale(name) and family not in LESS_ONE:
                weight.add_(1.0)
            if family in WIDE and "embed_tokens" in name:
                weight.mul_(8.0)
        for name, buffer in model.named_buffers():
            if "correction_bias" in name or "expert_bias" in name:
                buffer.copy_(torch.randn(buffer.shape) * 0.3)
            if "tid2eid" in name:  # Other experts for each token and layer.
                order = torch.rand(len(buffer), model.config.n_routed_experts)
                buffer.copy_(order.argsort(dim=-1)[:, : buffer.shape[1]])
            if "layer_scalar" in name:
                buffer.copy_(1 + torch.randn(buffer.shape) * 0.3)


# Families whose files hold the scales of norms less one.
LESS_ONE = {
    *("gemma", "gemma2", "gemma3", "nemotron"),
    *("qwen3_next", "qwen3_5", "qwen3_5_moe", "recurrent_gemma"),
}
# Families whose layers, each two parts without a residual stream between, amplify
# roundings unless what they add to is wide.
WIDE = {"zamba", "zamba2"}
TABLES = (
    *("embed_tokens", "embed_positions", "wte", "wpe", "lm_head"),
    *("embed_in", "embed_out", "word_embeddings", "tokens_embed", "positions_embed"),
)


def hf_logits(model: torch.nn.Module, tokens: np.ndarray) -> np.ndarray:
    # Kernels of torch round by the alignment of weights, which a file maps as it lies.
    for weight in (*model.parameters(), *model.buffers()):
        weight.data = weight.data.clone()
    with torch.no_grad():
        return model(torch.from_numpy(tokens)).logits.float().numpy()


def _std(name: str, weight: torch.Tensor) -> float:
    # Norms around 1, biases and embeddings not zero, kernels that keep the variance:
    # every weight matters to the logits.
    if weight.ndim == 1:
        return 0.5
    if any(table in name for table in TABLES):
        return 0.5
    transposed = any(part in name for part in (".c_", "experts.down_proj"))
    fan_in = weight.shape[-2] if transposed else weight.shape[-1]
    return fan_in**-0.5


def _is_norm_scale(name: str) -> bool:
    # A module around it may be named for its norms, as those of DBRX are.
    own = ".".join(name.split(".")[-3:])
    return name.endswith("weight") and ("norm" in own or "ln_" in own)
