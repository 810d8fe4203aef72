"""Trains a LoRA with PEFT itself, and keeps what it saved and its losses.

The base, the factors it starts from and the tokens are drawn by numpy, so that a test
makes the same ones. Needs peft and accelerate beside the tests' own requirements:

    PYTHONPATH=tests/bridge:tests/golden python tests/golden/write_peft_lora.py
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import numpy as np
from bridge_helpers import random_tensors, write_llama

FOLDER = Path(__file__).parent / "peft_lora"
TARGETS = ("q_proj", "o_proj", "down_proj")
RANK, ALPHA, STEPS = 4, 16, 20
ADAMW = {"lr": 3e-3, "weight_decay": 0.1, "eps": 1e-4}


def write_base(path: Path) -> Path:
    """The base model; its activations keep their size."""
    tensors = random_tensors(np.float32)
    for tensor in tensors.values():
        if tensor.ndim == 2:
            tensor *= tensor.shape[1] ** -0.5
        else:
            tensor[...] = 1 + tensor / 10
    return write_llama(path, tensors=tensors)


def first_factors() -> dict[str, np.ndarray]:
    """By the names of PEFT: A at random and B zero."""
    random = np.random.default_rng(1)
    factors = {}
    for key, base in random_tensors(np.float32).items():
        module = key.removesuffix(".weight")
        if module.endswith(TARGETS):
            rows, columns = base.shape
            stem = f"base_model.model.{module}.lora"
            a = random.uniform(-1, 1, (RANK, columns)) / columns**0.5
            factors[f"{stem}_A.weight"] = a.astype(np.float32)
            factors[f"{stem}_B.weight"] = np.zeros((rows, RANK), np.float32)
    return factors


def batches() -> np.ndarray:
    """Tokens of each step, shape `[steps, rows, seq + 1]`."""
    return np.random.default_rng(2).integers(0, 131, (STEPS, 8, 17))


def train() -> None:
    import peft
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        base = AutoModelForCausalLM.from_pretrained(write_base(Path(folder) / "base"))
    config = peft.LoraConfig(
        r=RANK, lora_alpha=ALPHA, target_modules=list(TARGETS), task_type="CAUSAL_LM"
    )
    model = peft.get_peft_model(base, config)
    start = {key: torch.from_numpy(value) for key, value in first_factors().items()}
    peft.set_peft_model_state_dict(model, start)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, **ADAMW)
    losses = []
    for tokens in torch.from_numpy(batches()):
        logits = model(tokens[:, :-1]).logits
        loss = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), tokens[:, 1:].flatten()
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    model.peft_config["default"].base_model_name_or_path = None
    model.save_pretrained(FOLDER)
    (FOLDER / "README.md").unlink(missing_ok=True)
    told = {"peft": peft.__version__, "torch": torch.__version__, "losses": losses}
    (FOLDER / "losses.json").write_text(json.dumps(told, indent=1) + "\n")


if __name__ == "__main__":
    train()
