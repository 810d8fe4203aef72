"""What three steps of training are compared by: settings and summaries of tensors."""

import numpy as np

VARIANTS = ("llama", "mixtral", "deepseek_v2-lite")
"""A dense model, one with experts, one with latent attention and experts."""

NUM_STEPS = 3
ADAM = {
    "learning_rate": 1e-2,
    "b1": 0.9,
    "b2": 0.95,
    "eps": 1e-8,
    "weight_decay": 0.1,
}

MUON_VARIANT = "gpt2-untied"
"""A model whose matrices are those of Megatron: no gate beside the up projection."""

MUON = {"momentum": 0.95, "nesterov": True, "scale": 0.2}
"""Of updates scaled by the root of the longer side, as Adam's are in size."""


def summary(tensor: np.ndarray) -> list[float]:
    """Norm of a tensor, and its product with a fixed vector: two tensors that agree in
    both have the same values in the same places.
    """
    values = np.asarray(tensor, np.float64).reshape(-1)
    fixed = np.cos(np.arange(values.size) * 0.7 + 0.3)
    return [float(f"{x:.9g}") for x in (np.linalg.norm(values), values @ fixed)]
