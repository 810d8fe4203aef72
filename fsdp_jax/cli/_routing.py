"""Routing and load balancing of experts in `fsdp-jax train`."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, Literal

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Array, Float

import fsdp_jax as fsdp
from bridge.models import (
    Decoder,
    DecoderConfig,
    Dispatch,
    MoE,
    RouterStats,
    correction_bias_paths,
)

RouterDtype = Literal["float32", "model"]
Over = Literal["sequence", "batch", "global"]
DispatchDtype = Literal["param_dtype", "float8"]

_DISPATCH_DTYPES = {"param_dtype": None, "float8": jnp.float8_e4m3fn}


@dataclasses.dataclass(frozen=True)
class Routing:
    """Routing options of a model with experts.

    Attributes:
      aux_loss_coef: Weight of the load-balancing loss.
      aux_loss_over: Tokens whose routing it balances. Over a batch or all ranks it is
        transformers' loss, of all layers together; over a row DeepSeek's, by layer.
      router_z_loss_coef: Weight of the router's z-loss, the sum of all layers'.
      expert_bias_rate: Change of the routers' biases in a step; 0 for none.
      capacity_factor: Capacity of an expert, as for
        `fsdp_jax.ops.expert_capacity_dispatch`; None for no limit.
      router_dtype: Dtype of the routers' products: float32, or that of the weights.
      dispatch_dtype: Dtype in which tokens are sent to their experts.
      ranks_per_node: Ranks on `ep` in a node that share one copy of a token, as for
        `fsdp_jax.ops.expert_capacity_dispatch`; None to send each expert its own.
      nodes_per_token: Maximum number of nodes that a token is sent to; None for all.
    """

    aux_loss_coef: float = 0.0
    aux_loss_over: Over = "batch"
    router_z_loss_coef: float = 0.0
    expert_bias_rate: float = 0.0
    capacity_factor: float | None = None
    router_dtype: RouterDtype = "float32"
    dispatch_dtype: DispatchDtype = "param_dtype"
    ranks_per_node: int | None = None
    nodes_per_token: int | None = None

    def problems(self) -> list[str]:
        """Returns what is out of range, by option."""
        names = ("aux_loss_coef", "router_z_loss_coef", "expert_bias_rate")
        wrong = [
            f"--{name.replace('_', '-')} {value}: a finite number, at least 0"
            for name in names
            if not 0 <= (value := getattr(self, name)) < math.inf
        ]
        capacity = self.capacity_factor
        if capacity is not None and not 0 < capacity < math.inf:
            wrong.append(f"--capacity-factor {capacity} must be more than 0")
        return wrong + self._node_problems()

    def _node_problems(self) -> list[str]:
        wrong = [
            f"{option} {number} must be at least 1"
            for option, number in (
                ("--ranks-per-node", self.ranks_per_node),
                ("--nodes-per-token", self.nodes_per_token),
            )
            if number is not None and number < 1
        ]
        if self.ranks_per_node is not None and self.capacity_factor is None:
            wrong.append(
                f"--ranks-per-node {self.ranks_per_node} needs --capacity-factor: "
                "without one each expert is sent a copy of its own"
            )
        if self.nodes_per_token is not None and self.ranks_per_node is None:
            wrong.append(
                f"--nodes-per-token {self.nodes_per_token} has no effect without "
                "--ranks-per-node"
            )
        return wrong

    def check_mesh(self, mesh: Mesh) -> None:
        """Raises a `ValueError` unless nodes hold whole parts of the `ep` axis."""
        ep, per_node = mesh.shape["ep"], self.ranks_per_node
        if per_node is not None and ep > per_node and ep % per_node:
            raise ValueError(
                f"--ranks-per-node {per_node} does not divide the {ep} ranks on ep. "
                "Pass the number of consecutive ranks on ep that a node has."
            )

    def pads(self, mesh: Mesh) -> bool:
        """Returns whether rows of experts are padded to the most a rank may receive."""
        return self.capacity_factor is None and mesh.shape["ep"] > 1

    @property
    def dispatch(self) -> Dispatch:
        """Dispatch function of the decoder."""
        dtype = _DISPATCH_DTYPES[self.dispatch_dtype]
        if self.capacity_factor is None:
            if wrong := self._node_problems():
                raise ValueError("; ".join(wrong) + ".")
            return functools.partial(
                fsdp.ops.expert_parallel_dispatch, dispatch_dtype=dtype
            )
        return functools.partial(
            fsdp.ops.expert_capacity_dispatch,
            capacity_factor=self.capacity_factor,
            dispatch_dtype=dtype,
            ranks_per_node=self.ranks_per_node,
            nodes_per_token=self.nodes_per_token,
        )

    def apply(self, config: DecoderConfig) -> DecoderConfig:
        """Returns the config with routers that multiply in `router_dtype`."""
        if config.moe is None or self.router_dtype == "model":
            return config
        moe = dataclasses.replace(config.moe, float32_logits=True)
        return dataclasses.replace(config, moe=moe)

    def check(self, config: DecoderConfig) -> None:
        """Raises a `ValueError` for options that do not apply to a model."""
        given = [
            f"--{field.name.replace('_', '-')} {getattr(self, field.name)}"
            for field in dataclasses.fields(self)
            if getattr(self, field.name) != field.default
        ]
        if config.moe is None and given:
            raise ValueError(f"{', '.join(given)}: this model has no experts.")
        if self.expert_bias_rate and not correction_bias_paths(config):
            raise ValueError(
                f"--expert-bias-rate {self.expert_bias_rate}: the routers of a "
                f"{config.model_type} have no bias that could follow the load. Use "
                "--aux-loss-coef."
            )


def default_aux_loss_coef(config: DecoderConfig) -> float:
    """Returns the coefficient of the config file, by either name; 0 for none."""
    passthrough = dict(config.passthrough)
    names = ("router_aux_loss_coef", "aux_loss_alpha")
    return next((passthrough[name] for name in names if passthrough.get(name)), 0.0)


def router_losses(
    config: DecoderConfig, routing: Routing, stats: RouterStats
) -> tuple[Float[Array, ""], dict[str, Array]]:
    """Computes the balancing losses and their metrics.

    Args:
      config: Config of the decoder.
      routing: Routing options.
      stats: Router statistics from `Decoder.final_states`.

    Returns:
      The sum; and by name the losses, before their weights, `max_expert_load` of the
      worst layer, over all ranks, and `dropped_choices`.
    """
    assert config.moe is not None
    by_row = routing.aux_loss_over == "sequence"
    aux_loss = fsdp.ops.load_balancing_loss(
        stats.tokens_per_expert,
        stats.scores_per_expert,
        over=routing.aux_loss_over,
        joint_layers=not by_row,
    ).sum()
    if not by_row:
        aux_loss *= config.moe.num_experts_per_tok
    z_loss = stats.z_loss.mean(-1).sum()
    loads = fsdp.ops.max_expert_load(stats.tokens_per_expert)
    reported = {
        "aux_loss": aux_loss,
        "z_loss": z_loss,
        "max_expert_load": loads.max(),
        "dropped_choices": stats.dropped.sum(),
    }
    return (
        routing.aux_loss_coef * aux_loss + routing.router_z_loss_coef * z_loss,
        reported,
    )


class CountingDecoder(Decoder):
    """A decoder with the count of tokens that its routers' biases follow.

    Args:
      config: Config of the decoder; `config.moe` is set.
      options: Other arguments of `Decoder`.
    """

    def __init__(self, config: DecoderConfig, **options: Any):
        """Counts from zero."""
        super().__init__(config, **options)
        assert config.moe is not None
        shape = (len(_sparse_layers(config)), config.moe.num_choices)
        self.tokens_per_expert = fsdp.step.Tally(jnp.zeros(shape, jnp.int32))

    def count(self, stats: RouterStats) -> None:
        """Adds a forward's tokens to the count."""
        self.tokens_per_expert[...] += stats.tokens_per_expert.sum(1)


def move_biases(rate: float) -> Callable[[CountingDecoder], None]:
    """Makes the `update_model_state` that moves biases by the load and resets counts.

    Args:
      rate: Change of a bias in a step, e.g. 1e-3.
    """

    def update(decoder: CountingDecoder) -> None:
        tally = decoder.tokens_per_expert
        rows = _sparse_layers(decoder.config)
        for stack in decoder.config.layer_stacks:
            bias = _correction_bias(decoder, stack.path)
            if bias is not None:
                mine = np.asarray([rows.index(layer) for layer in stack.layers])
                tokens = tally[...][mine]
                bias[...] = fsdp.ops.update_expert_bias(bias[...], tokens, rate)
        tally[...] = jnp.zeros_like(tally[...])

    return update


def _sparse_layers(config: DecoderConfig) -> list[int]:
    """Returns the indices of the layers with experts."""
    kinds = enumerate(config.layer_kinds)
    return [layer for layer, kind in kinds if kind.channels == "sparse"]


def _correction_bias(decoder: Decoder, path: str) -> nnx.Param | None:
    """Returns the biases of a stack of layers, or None if it has no such biases."""
    stack: Any = decoder
    for name in path.split("."):
        stack = stack[int(name)] if name.isdigit() else getattr(stack, name)
    return stack.mlp.router.correction_bias if isinstance(stack.mlp, MoE) else None
