"""Options of `fsdp-jax train`, in the groups of its help."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from jax.sharding import Mesh

import fsdp_jax as fsdp
from fsdp_jax.cli._data_config import Objective, Overlong, RowsOf, Tokenizer, TrainOn
from fsdp_jax.cli._lora import BaseDType
from fsdp_jax.cli._optimizer import OptimizerBits, OptimizerName, ScheduleShape
from fsdp_jax.cli._options import IgnoreField, Unset
from fsdp_jax.cli._precision import (
    ExpertProducts,
    OffloadTo,
    ParamDtype,
    ParamGather,
    Products,
)
from fsdp_jax.cli._routing import DispatchDtype, Over, RouterDtype


@dataclasses.dataclass(frozen=True)
class StartOptions:
    """Where training starts: one of --hf, --config and --resume.

    Attributes:
      hf: Model to start from: a directory with config.json and weights (safetensors,
        or pytorch_model.bin, read as data), a hub id, a Megatron checkpoint, or a
        checkpoint of fsdp-jax, whose parameters are taken.
      config: Config of a model to start from random weights: a config.json, or a
        directory with one, whose tokenizer is used too; --seed chooses the weights.
      resume: Directory of a run to resume, given to --save before.
      resume_step: Step to resume from; default the newest.
      ignore_field: Field of config.json to ignore although it is refused; may be
        repeated. For fields that change no number.
    """

    hf: Unset[str] = None
    config: Unset[Path] = None
    resume: Unset[Path] = None
    resume_step: Unset[int] = None
    ignore_field: IgnoreField = ()

    def check(self) -> None:
        """Raises a `ValueError` unless there is exactly one place to start from."""
        named = {"--hf": self.hf, "--config": self.config, "--resume": self.resume}
        given = [f"{name} {x}" for name, x in named.items() if x is not None]
        if len(given) != 1:
            raise ValueError(
                "train starts from one of --hf MODEL, --config FILE and --resume RUN; "
                f"got {', '.join(given) or 'none'}."
            )
        if self.resume is None and self.resume_step is not None:
            raise ValueError(
                f"--resume-step {self.resume_step} chooses a step of the run to "
                "resume: give --resume RUN too."
            )
        if self.resume is not None and self.ignore_field:
            raise ValueError(
                f"--ignore-field {' '.join(self.ignore_field)}: --resume goes on from "
                "a run, which has read its config.json. Leave it out."
            )


@dataclasses.dataclass(frozen=True)
class BatchOptions:
    """How data becomes batches.

    Attributes:
      batch: Rows of a global batch; default 8.
      seq: Tokens that a row predicts; default 256.
      seed: Seed of the order of the data, and of random weights; default 0.
      tokenizer: Tokenizer of the data: bytes as they are, or the model's
        tokenizer.json; default the latter where there is one.
      microbatches: Microbatches a step, whose gradients are accumulated; default 1.
      rows: Layout of JSON Lines in rows: several documents, which do not attend to each
        other (pack, the default), or one and padding (pad).
      overlong: Treatment of documents longer than --seq: truncate, the default, or
        drop.
      train_on: Trained tokens of JSON Lines: those of completions, the default, or all.
      data_weights: Share of each file of JSON Lines among the rows, as numbers
        separated by commas; default its number of rows.
      objective: What is learned: the completions of records (sft, the default), or to
        prefer the chosen to the rejected answer of pairs (dpo), or to give it the
        higher reward (reward).
    """

    batch: Unset[int] = None
    seq: Unset[int] = None
    seed: Unset[int] = None
    tokenizer: Unset[Tokenizer] = None
    microbatches: Unset[int] = None
    rows: Unset[RowsOf] = None
    overlong: Unset[Overlong] = None
    train_on: Unset[TrainOn] = None
    data_weights: Unset[str] = None
    objective: Unset[Objective] = None


@dataclasses.dataclass(frozen=True)
class OptimizerOptions:
    """The optimizer and the loss.

    Attributes:
      optimizer: Optimizer; muon is for the matrices of layers, beside adamw for the
        rest. Default adamw.
      lr: Learning rate at its peak; default 3e-4.
      lr_schedule: Shape of the learning rate after the warmup: constant, the default,
        cosine, linear, or constant and then linear (wsd).
      warmup: Steps in which the learning rate rises linearly from 0; default 0.
      lr_steps: Step at which the schedule ends; default --steps of the first start.
      lr_end: Last learning rate, as a fraction of --lr; default 0.
      lr_decay: Fraction of --lr-steps in which wsd decays; default 0.1.
      weight_decay: Decoupled weight decay; default 0.1.
      no_decay: Patterns of parameters without weight decay, separated by commas;
        default "*.scale,*.bias,*_bias,*.sinks": norms and biases.
      b1: Decay of the first moments; default 0.9.
      b2: Decay of the second moments; default 0.999, of lion 0.99.
      eps: Constant added to the root of the second moments; default 1e-8.
      clip: Norm to which gradients are clipped; default 0: not clipped.
      optimizer_bits: Bits of an element of the moments; default 32.
      ema: Decay of an average of the weights, which eval, generate and export use with
        their --ema; default 0: none.
      label_smoothing: Fraction of each target spread over the vocabulary; of dpo, the
        probability that a pair is labelled the wrong way round. Default 0.
      dpo_beta: Strength of the pull to the reference model, of --objective dpo; default
        0.1.
      z_loss: Weight of the squared log-normalizer of the logits; default 0.
    """

    optimizer: Unset[OptimizerName] = None
    lr: Unset[float] = None
    lr_schedule: Unset[ScheduleShape] = None
    warmup: Unset[int] = None
    lr_steps: Unset[int] = None
    lr_end: Unset[float] = None
    lr_decay: Unset[float] = None
    weight_decay: Unset[float] = None
    no_decay: Unset[str] = None
    b1: Unset[float] = None
    b2: Unset[float] = None
    eps: Unset[float] = None
    clip: Unset[float] = None
    optimizer_bits: Unset[OptimizerBits] = None
    ema: Unset[float] = None
    label_smoothing: Unset[float] = None
    dpo_beta: Unset[float] = None
    z_loss: Unset[float] = None


@dataclasses.dataclass(frozen=True)
class PrecisionOptions:
    """Dtypes and memory.

    Attributes:
      param_dtype: Dtype that weights are gathered and computed in; they are stored and
        updated in float32. Default float32.
      param_gather: Format of a byte an element in which the matrices of layers are
        communicated, decoded to --param-dtype on arrival; default --param-dtype.
      products: Format in which the projections of attention and MLPs are multiplied:
        float8 for e4m3 forward and e5m2 backward, with current scaling; mxfp8 for e4m3
        with a scale for each 32 numbers, which Blackwell GPUs multiply; default
        --param-dtype. Embedding, head, norms and routers keep that.
      expert_products: Format in which experts are multiplied: float8, as of --products;
        default --param-dtype.
      num_layers_at_start_in_bf16: Number of first layers that keep bfloat16 beside
        other --products; default 0.
      num_layers_at_end_in_bf16: Number of last layers that keep it; default 0.
      loss_scale: Initial factor of the loss, so that gradients do not vanish in
        float16; it is halved on overflow. Default 65536 with --param-dtype float16,
        none otherwise.
      offload: State kept in host memory: the optimizer's, or the float32 weights too
        (all), those of layers copied one layer at a time (stream); default none.
      fused_loss: Computes logits by chunks of the vocabulary, and again for backward:
        less memory, more work.
    """

    param_dtype: Unset[ParamDtype] = None
    param_gather: Unset[ParamGather] = None
    products: Unset[Products] = None
    expert_products: Unset[ExpertProducts] = None
    num_layers_at_start_in_bf16: Unset[int] = None
    num_layers_at_end_in_bf16: Unset[int] = None
    loss_scale: Unset[float] = None
    offload: Unset[OffloadTo] = None
    fused_loss: bool = True


@dataclasses.dataclass(frozen=True)
class ExpertOptions:
    """Models with experts.

    Attributes:
      aux_loss_coef: Weight of the load-balancing loss; default that of the model's
        config.
      aux_loss_over: Tokens whose routing it balances: those of each rank's batch, as in
        transformers, of the batches of all ranks (global), or of each sequence, layer
        by layer, as in DeepSeek's. Default batch.
      router_z_loss_coef: Weight of the routers' z-loss; default 0.
      expert_bias_rate: Change of the routers' biases in a step towards an even load,
        such as 1e-3, if the model has such biases; default 0: unchanged.
      capacity_factor: Capacity of an expert as a multiple of its even share of a rank's
        tokens; tokens beyond it are dropped and counted. Default: no limit.
      router_dtype: Dtype of the routers' products: float32, the default, or that of the
        model.
      dispatch_dtype: Dtype in which tokens, and gradients in backward, are sent to
        their experts: float8 for e4m3 with a scale for each 128 elements; default
        --param-dtype, in which all comes back.
      ranks_per_node: Ranks on --ep that a node has: tokens are sent once to each node
        with an expert that they chose, and copied there; with --capacity-factor.
        Default: once to each expert.
      nodes_per_token: Maximum number of nodes that a token is sent to, where the router
        keeps to one; it bounds the buffers. Default all nodes.
    """

    aux_loss_coef: Unset[float] = None
    aux_loss_over: Unset[Over] = None
    router_z_loss_coef: Unset[float] = None
    expert_bias_rate: Unset[float] = None
    capacity_factor: Unset[float] = None
    router_dtype: Unset[RouterDtype] = None
    dispatch_dtype: Unset[DispatchDtype] = None
    ranks_per_node: Unset[int] = None
    nodes_per_token: Unset[int] = None


@dataclasses.dataclass(frozen=True)
class LoRAOptions:
    """Training of low-rank factors in place of the model.

    Attributes:
      lora_rank: Rank of the factors, which are trained beside frozen weights.
      lora_alpha: Numerator of the factors' scale, `alpha / rank`; default the rank.
      lora_targets: PEFT's names of the modules with factors, separated by commas;
        default all-linear: those of all layers.
      base_dtype: Format of the frozen weights: a floating dtype, which also computes,
        or nf4 or int8, decoded to --param-dtype layer by layer; default --param-dtype.
    """

    lora_rank: Unset[int] = None
    lora_alpha: Unset[float] = None
    lora_targets: Unset[str] = None
    base_dtype: Unset[BaseDType] = None


@dataclasses.dataclass(frozen=True)
class MeshOptions:
    """The device mesh.

    Attributes:
      dp_shard: Devices that shard the model; -1 for all that the other axes leave.
      dp_outer: Replicas of the sharded model (HSDP).
      ep: Devices that split experts; they also shard a dense model.
      cp: Devices that split the tokens of each row.
      tp: Devices that split each matrix, and the tokens in between.
      pp: Pipeline stages, which split the layers; --microbatches pass through them.
    """

    dp_shard: int = -1
    dp_outer: int = 1
    ep: int = 1
    cp: int = 1
    tp: int = 1
    pp: int = 1

    def make(self, devices: list[Any]) -> Mesh:
        """Makes the mesh.

        Args:
          devices: Devices, in the order of jax.
        """
        return fsdp.make_mesh(**dataclasses.asdict(self), devices=devices)
