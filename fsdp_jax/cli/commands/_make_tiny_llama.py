"""`fsdp-jax make-tiny-llama`: writes a small model to try commands on."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import tyro

from fsdp_jax.cli._errors import check_absent, require


@dataclasses.dataclass(frozen=True)
class MakeTinyLlama:
    """Write a small Llama with random weights; needs torch and transformers.

    Small in size, not in kind: grouped queries and the rotary scaling of Llama 3.1.

    Attributes:
      out: Directory to write; must not exist.
      vocab: Number of tokens; 256 for bytes.
      hidden: Width of the residual stream.
      intermediate: Width inside the MLP.
      layers: Number of layers.
      heads: Number of query heads.
      kv_heads: Number of key and value heads.
      seed: Seed of the weights.
    """

    out: tyro.conf.Positional[Path]
    vocab: int = 256
    hidden: int = 64
    intermediate: int = 160
    layers: int = 4
    heads: int = 8
    kv_heads: int = 4
    seed: int = 0

    def run(self) -> None:
        """Lets transformers make and write the model."""
        check_absent(self.out, "OUT")
        _check_sizes(self)
        torch = require("torch", "fsdp-jax make-tiny-llama")
        transformers = require("transformers", "fsdp-jax make-tiny-llama")
        transformers.utils.logging.disable_progress_bar()
        torch.manual_seed(self.seed)
        config = transformers.LlamaConfig(
            vocab_size=self.vocab,
            hidden_size=self.hidden,
            intermediate_size=self.intermediate,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            max_position_embeddings=16384,
            rope_parameters=_LLAMA3_ROPE,
            bos_token_id=None,
            eos_token_id=None,
        )
        model = transformers.LlamaForCausalLM(config)
        model.save_pretrained(self.out)
        print(f"{model.num_parameters():,} random parameters are now in {self.out}")


_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def _check_sizes(sizes: MakeTinyLlama) -> None:
    numbers = {f.name: getattr(sizes, f.name) for f in dataclasses.fields(sizes)}
    wrong = [
        f"--{name.replace('_', '-')} {value} must be at least 1"
        for name, value in numbers.items()
        if name not in ("out", "seed") and value < 1
    ]
    heads = sizes.heads
    if not wrong and sizes.hidden % (2 * heads):
        wrong.append(f"--hidden {sizes.hidden}: a multiple of 2 x --heads {heads}")
    if not wrong and heads % sizes.kv_heads:
        wrong.append(f"--heads {heads}: a multiple of --kv-heads {sizes.kv_heads}")
    if wrong:
        raise ValueError("; ".join(wrong) + ".")
