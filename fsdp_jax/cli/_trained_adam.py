"""Adam's state of a trained run, in the form that Megatron goes on from."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh

import fsdp_jax as fsdp
from bridge.megatron import Adam, AdamSettings
from fsdp_jax._tree import PyTree, named_leaves
from fsdp_jax.cli._decoder import plan_decoder
from fsdp_jax.cli._model_source import Checkpoint
from fsdp_jax.cli._optimizer import OptimizerConfig
from fsdp_jax.cli._train_config import TrainConfig, stored_config


def load_trained_adam(origin: Checkpoint, mesh: Mesh) -> Adam:
    """Loads weights, moments, counts and settings of a run with AdamW.

    Args:
      origin: Step of `fsdp-jax train`.
      mesh: Mesh to load it on.

    Returns:
      Adam state for `bridge.megatron.save_megatron_adam`. Its learning rate is that of
      the next update, which a schedule of Megatron's own replaces.

    Raises:
      ValueError: If the run has no Adam state that Megatron could go on with; lists
        all reasons.
    """
    config = _config_of(origin)
    plan = plan_decoder(origin.config, mesh, routing=config.routing)
    tx = config.make_optimizer(origin.config)
    like = fsdp.abstract_state(plan, tx, config.precision.scale())
    state = fsdp.load(origin.path, like, step=origin.step)
    params, opt_state = (
        fsdp.sharding.unpack(tree) for tree in (state.params, state.opt_state)
    )
    mu, nu = (_filled(params, optax.tree.get(opt_state, name)) for name in ("mu", "nu"))
    count: Any = optax.tree.get(opt_state, "count", filtering=_is_of_adam)
    settings = adam_settings(config.optimizer, params, int(count))
    return Adam(params, mu, nu, count, settings)


def _config_of(origin: Checkpoint) -> TrainConfig:
    if "train" not in origin.metadata:
        raise ValueError(
            f"--optimizer: step {origin.step} of '{origin.path}' was imported and not "
            "trained. `fsdp-jax convert SRC DST --optimizer` writes Adam's state of a "
            "Megatron checkpoint in another format."
        )
    config = stored_config(origin.metadata["train"])
    found = config.optimizer
    wrong = {
        f"--optimizer {found.optimizer}": found.optimizer != "adamw",
        f"--optimizer-bits {found.optimizer_bits}": found.optimizer_bits != 32,
        "--lora-rank": config.adapter is not None,
    }
    if any(wrong.values()):
        raise ValueError(
            f"--optimizer: step {origin.step} of '{origin.path}' was trained with "
            f"{', '.join(option for option, is_wrong in wrong.items() if is_wrong)}, "
            "but Megatron resumes only AdamW in float32 on all weights. Leave "
            "--optimizer out to export the weights."
        )
    return config


def _is_of_adam(path: Any, _: Any) -> bool:
    """Returns whether a leaf is of the state with the moments; schedules count too."""
    return any("ScaleByAdam" in str(key) for key in path)


def _filled(params: PyTree, moments: PyTree) -> PyTree:
    """Returns the moments, with zeros for what no gradient trains."""
    return jax.tree.map(
        lambda leaf, moment: jnp.zeros_like(leaf) if moment is None else moment,
        params,
        moments,
    )


def adam_settings(
    optimizer: OptimizerConfig, params: PyTree, count: int
) -> AdamSettings:
    """Returns the hyperparameters of the next update.

    Args:
      optimizer: Optimizer of the run; AdamW.
      params: Parameters.
      count: Number of updates done.
    """
    decayed = named_leaves(optimizer.is_decayed(params))
    return AdamSettings(
        lr=float(np.asarray(optimizer.schedule()(count))),
        b1=optimizer.b1,
        b2=optimizer.second_moment_decay,
        eps=optimizer.eps,
        weight_decay=optimizer.weight_decay,
        clip_grad=optimizer.clip,
        no_decay=tuple(name for name, is_decayed in decayed if not is_decayed),
    )
