"""Runs that Megatron-Core continues: their state, and how each is written."""

import hashlib
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from megatron_steps import ADAM
from megatron_variants import exact_params

from bridge.megatron import (
    Adam,
    AdamSettings,
    megatron_tensors,
    open_megatron,
    save_megatron_adam,
    weight_mapping,
)
from bridge.megatron._save_adam import default_groups
from bridge.megatron.read._adam_settings import undecayed_leaves

VARIANTS = ("llama", "mixtral", "deepseek_v2-lite")
NUM_STEPS = 2
COUNT = 5
"""Steps that the run has behind it: Adam's bias correction depends on it."""

FORMATS: dict[str, dict[str, Any]] = {
    "by name": {"optimizer_format": "plain"},
    "fully reshardable": {"optimizer_format": "fully_reshardable"},
    "flat buckets": {"optimizer_format": "dp_reshardable"},
    "legacy": {"format": "legacy", "optimizer_format": "plain"},
    "legacy distributed": {"format": "legacy", "optimizer_format": "distributed"},
}


def exact_adam(config: Any) -> Adam:
    """Adam state in the middle of a run, the same bits on every machine."""
    params = exact_params(config)

    def drawn(scale: float, power: int) -> Any:
        # The same numbers as the weights, in another order and size.
        return jax.tree.map(
            lambda x: (np.float32(scale) * x.reshape(-1)[::-1] ** power).reshape(
                x.shape
            ),
            params,
        )

    settings = AdamSettings(
        lr=ADAM["learning_rate"],
        b1=ADAM["b1"],
        b2=ADAM["b2"],
        eps=ADAM["eps"],
        weight_decay=ADAM["weight_decay"],
        clip_grad=0.0,
        no_decay=undecayed_leaves(
            megatron_tensors(params, config), weight_mapping(config)
        ),
    )
    return Adam(
        params=params,
        mu=drawn(2.0**-12, 1),
        nu=drawn(2.0**-18, 2),
        count=jnp.int32(COUNT),
        settings=settings,
    )


def write(path: Path, config: Any, format: str) -> None:
    """Writes the run as one of `FORMATS`, for one process and the local layer spec."""
    options = FORMATS[format]
    is_plain = options["optimizer_format"] == "plain"
    adam = exact_adam(config)
    groups = None
    if is_plain:  # torch's AdamW, which counts steps for each parameter
        weights = megatron_tensors(adam.params, config)
        groups = default_groups(adam.settings, weights, config)
        groups = [{**group, "amsgrad": False} for group in groups]
    flags = {
        "transformer_impl": "local",
        "use_distributed_optimizer": not is_plain,
        "data_parallel_size": 1,
    }
    save_megatron_adam(
        path,
        adam,
        config,
        param_groups=groups,
        make_vocab_size_divisible_by=1,
        param_dtype=jnp.float32,
        flags=flags,
        **options,
    )


def digest(path: Path) -> str:
    """A checksum of the tensors that a checkpoint has for Megatron, with moments."""
    run = open_megatron(path)
    assert run.optimizer is not None, run.left_out
    sha = hashlib.sha256(str(run.optimizer.step).encode())
    for source in (run.source, run.optimizer.exp_avg, run.optimizer.exp_avg_sq):
        for key in sorted(source.keys()):
            tensor = source.read(key)
            sha.update(f"{key} {tensor.dtype} {tensor.shape}".encode())
            sha.update(np.ascontiguousarray(tensor).tobytes())
    return sha.hexdigest()
