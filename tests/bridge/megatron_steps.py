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


def summary(tensor: np.ndarray) -> list[float]:
    """Norm of a tensor, and its product with a fixed vector: two tensors that agree in
    both have the same values in the same places.
    """
    values = np.asarray(tensor, np.float64).reshape(-1)
    fixed = np.cos(np.arange(values.size) * 0.7 + 0.3)
    return [float(f"{x:.9g}") for x in (np.linalg.norm(values), values @ fixed)]
