"""Saving a run that was trained in JAX so that Megatron goes on with it."""

import os
from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp

from bridge._local_path import check_local
from bridge.formats._source import Source
from bridge.megatron._adam import Adam
from bridge.megatron._cast import Cast
from bridge.megatron._decoder import megatron_tensors
from bridge.megatron._save import write_decoder
from bridge.megatron._weight_rules import weight_mapping
from bridge.megatron.read._adam_settings import AdamSettings, undecayed_leaves
from bridge.megatron.read._optimizer import MegatronOptimizer
from bridge.megatron.write._checkpoint import Format
from bridge.megatron.write._optimizer_state import FLOAT32, OptimizerFormat
from bridge.models import DecoderConfig
from bridge.streaming._load import Progress


def save_megatron_adam(
    path: str | os.PathLike[str],
    adam: Adam,
    config: DecoderConfig,
    *,
    format: Format = "torch_dist",
    optimizer_format: OptimizerFormat | None = None,
    param_dtype: Any = None,
    param_groups: Sequence[Mapping[str, Any]] | None = None,
    scheduler: Mapping[str, Any] | None = None,
    consumed_samples: int = 0,
    iteration: int | None = None,
    tensor_parallel: int = 1,
    pipeline_parallel: int = 1,
    virtual_pipeline: int | None = None,
    expert_parallel: int = 1,
    make_vocab_size_divisible_by: int = 128,
    flags: Mapping[str, Any] | None = None,
    max_file_bytes: int = 5 * 10**9,
    progress: Progress | None = None,
) -> None:
    """Writes weights and Adam state so that a Megatron run goes on with the next step.

    The inverse of `load_megatron_adam`. One tensor is gathered to the host at a time,
    and the write is atomic. torch's random generators are not written: load the
    checkpoint with `--no-load-rng`.

    Args:
      path: Directory that does not exist yet, or is empty.
      adam: Adam state; its `params` in float32 become the master weights.
      config: Model config.
      format: `"torch_dist"`, `"legacy"` or `"fsdp_dtensor"`, as `save_megatron` takes.
      optimizer_format: Form of the Adam state, as `write_megatron` takes it.
      param_dtype: Dtype of the model's weights in Megatron; None takes that of
        `config`. Weights are rounded to it, master weights are not.
      param_groups: Settings of each parameter group, as in
        `MegatronCheckpoint.optimizer` of the run that this one goes on from; None makes
        them from `adam.settings`.
      scheduler: State of the learning-rate schedule, as in
        `MegatronCheckpoint.scheduler`; None writes a constant rate. Its `num_steps`
        is set to `consumed_samples`.
      consumed_samples: Number of training samples seen.
      iteration: Number of training steps done; None takes `adam.count`.
      tensor_parallel: Number of tensor-parallel ranks, for experts too. Only for legacy
        files and `"dp_reshardable"`, as are the next three arguments.
      pipeline_parallel: Number of pipeline stages.
      virtual_pipeline: Number of model chunks per stage; None means one.
      expert_parallel: Number of expert-parallel ranks.
      make_vocab_size_divisible_by: Padding of the vocabulary.
      flags: Further settings of the run.
      max_file_bytes: Size in bytes at which a file that is not legacy is closed and the
        next one started.
      progress: Called after each tensor with bytes written and total bytes.

    Raises:
      ValueError: If `adam.settings` leave a hyperparameter open and `param_groups` is
        None, if the moments do not match the weights, or for the reasons given in
        `save_megatron`; nothing is written.
    """
    check_local(path)
    weights = megatron_tensors(adam.params, config)
    groups = param_groups or default_groups(
        adam.settings, weights, config, experts_apart=expert_parallel > 1
    )
    narrow = jnp.dtype(config.dtype if param_dtype is None else param_dtype)
    write_decoder(
        path,
        Cast(weights, narrow),
        config,
        sizes={
            "tensor_parallel": tensor_parallel,
            "pipeline_parallel": pipeline_parallel,
            "virtual_pipeline": virtual_pipeline,
            "expert_parallel": expert_parallel,
        },
        make_vocab_size_divisible_by=make_vocab_size_divisible_by,
        flags={"consumed_train_samples": consumed_samples, **(flags or {})},
        format=format,
        optimizer=_optimizer_state(adam, weights, config, narrow, groups),
        optimizer_format=optimizer_format,
        scheduler={
            **(scheduler or _constant(groups[0])),
            "num_steps": consumed_samples,
        },
        iteration=int(adam.count) if iteration is None else iteration,
        max_file_bytes=max_file_bytes,
        progress=progress,
    )


def _optimizer_state(
    adam: Adam,
    weights: Source,
    config: DecoderConfig,
    narrow: Any,
    groups: Sequence[Mapping[str, Any]],
) -> MegatronOptimizer:
    """Returns Megatron's state; no master weights where the model's are float32."""
    return MegatronOptimizer(
        exp_avg=megatron_tensors(adam.mu, config),
        exp_avg_sq=megatron_tensors(adam.nu, config),
        master=None if narrow == FLOAT32 else Cast(weights, FLOAT32),
        step=int(adam.count),
        param_groups=tuple(groups),
    )


def default_groups(
    settings: AdamSettings,
    weights: Source,
    config: DecoderConfig,
    *,
    experts_apart: bool = False,
) -> list[dict[str, Any]]:
    """Returns parameter groups as Megatron makes them, with Adam's hyperparameters.

    Args:
      settings: Hyperparameters.
      weights: Tensors of the model by canonical name.
      config: Model config.
      experts_apart: Whether experts have groups of their own, as with expert
        parallelism.

    Raises:
      ValueError: If a hyperparameter is open, or weight decay leaves out other leaves
        than Megatron's default rule does.
    """
    names = ("lr", "b1", "b2", "eps", "weight_decay", "no_decay")
    wrong = [
        f"  {name}: {settings.open.get(name, 'not given')}"
        for name in names
        if getattr(settings, name) is None
    ]
    undecayed = set(undecayed_leaves(weights, weight_mapping(config)))
    if settings.no_decay is not None and set(settings.no_decay) != undecayed:
        odd = sorted(undecayed ^ set(settings.no_decay))
        wrong.append(
            f"  no_decay: Megatron's rule differs in {', '.join(odd[:5])}, {len(odd)} "
            "leaves in all"
        )
    if wrong:
        raise ValueError(
            "Megatron's parameter groups need these of `adam.settings`; set them, or "
            "give `param_groups`:\n" + "\n".join(wrong)
        )
    shared = {
        "default_config": True,
        "lr_mult": 1.0,
        "is_decoupled_lr": False,
        "max_lr": settings.lr,
        "min_lr": settings.lr,
        "lr": settings.lr,
        "bias_correction": True,
        "betas": (settings.b1, settings.b2),
        "eps": settings.eps,
        "weight_decay": settings.weight_decay,
    }
    return [
        {"is_expert_parallel": is_expert, "wd_mult": decay, **shared}
        for is_expert in (False, True)[: 1 + experts_apart]
        for decay in (1.0, 0.0)
    ]


def _constant(group: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the state of a schedule with constant learning rate and weight decay."""
    rate, decay = group["lr"], group["weight_decay"]
    return {
        "max_lr": rate,
        "min_lr": rate,
        "lr_warmup_steps": 0,
        "lr_decay_style": "constant",
        "lr_decay_steps": 1,
        "start_wd": decay,
        "end_wd": decay,
        "wd_incr_style": "constant",
        "wd_incr_steps": 1,
    }
