"""Adam's state of a run that Megatron began, as trees like the parameters."""

import dataclasses
import os
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from bridge._tree import named_leaves
from bridge.formats._source import Source
from bridge.megatron._decoder import decoder_source
from bridge.megatron._weight_rules import weight_mapping
from bridge.megatron.config._args import from_args
from bridge.megatron.read._adam_settings import (
    AdamSettings,
    adam_settings,
    undecayed_leaves,
)
from bridge.megatron.read._checkpoint import open_megatron
from bridge.models import DecoderConfig
from bridge.rules._mapping import Mapping
from bridge.streaming._load import Progress, load

# No gradient trains it: Megatron holds it beside the parameters, without moments.
_UNTRAINED = "correction_bias"


@dataclasses.dataclass(frozen=True)
class Adam:
    """What Adam knows of each weight, and how far it is.

    Goes on in optax as `optax.tree.set(tx.init(params), mu=mu, nu=nu, count=count)`.

    Args:
      params: The weights as the optimizer holds them: in more bits than the model's, if
        the run kept such.
      mu: First moments.
      nu: Second moments.
      count: Steps taken, as the bias correction counts them.
      settings: With what it took them; optax's defaults are others.
    """

    params: Any
    mu: Any
    nu: Any
    count: Int[Array, ""]
    settings: AdamSettings


def load_megatron_adam(
    path: str | os.PathLike[str],
    mould: Any,
    *,
    config: DecoderConfig | None = None,
    progress: Progress | None = None,
) -> Adam:
    """Fills moulds with weights and Adam's state of a Megatron checkpoint.

    Args:
      path: What `open_megatron` takes.
      mould: As for `load_megatron`; moments are born in its shardings and dtypes.
      config: As for `load_megatron`.
      progress: Called with bytes done, and bytes in all, of weights and of each moment
        in turn.

    Returns:
      Trees like the mould. What Megatron trains by no gradient has moments of zero.

    Raises:
      FileNotFoundError: If there is no checkpoint.
      ValueError: If it holds no such state, or none that can be carried (the reason is
        said), if the optimizer is another than AdamW, or as `load_megatron` raises it.
    """
    checkpoint = open_megatron(path)
    adam = checkpoint.optimizer
    if adam is None or adam.step is None:
        lines = "\n".join(f"  {line}" for line in checkpoint.left_out)
        missing = "moments" if adam is None else "number of steps"
        raise ValueError(
            f"'{checkpoint.path}' holds no {missing} of Adam that can be carried. Left "
            f"out are:\n{lines or '  nothing'}"
        )
    config = from_args(checkpoint.args) if config is None else config
    settings = adam_settings(
        adam.param_groups,
        checkpoint.args,
        checkpoint.scheduler,
        lambda: undecayed_leaves(checkpoint.source, weight_mapping(config)),
    )
    leaves = named_leaves(mould)
    untrained = {n: leaf for n, leaf in leaves.items() if n.endswith(_UNTRAINED)}
    trained = {n: leaf for n, leaf in leaves.items() if n not in untrained}

    def fill(source: Source, some: dict[str, Any]) -> dict[str, jax.Array]:
        return _fill(decoder_source(source, config), config, some, progress)

    def tree(filled: dict[str, jax.Array]) -> Any:
        in_order = [filled[name] for name in leaves]
        return jax.tree.unflatten(jax.tree.structure(mould), in_order)

    weights = checkpoint.source if adam.master is None else adam.master
    zeros = {name: _zeros(leaf) for name, leaf in untrained.items()}
    return Adam(
        params=tree(fill(weights, trained) | fill(checkpoint.source, untrained)),
        mu=tree(fill(adam.exp_avg, trained) | zeros),
        nu=tree(fill(adam.exp_avg_sq, trained) | zeros),
        count=jnp.asarray(adam.step, jnp.int32),
        settings=settings,
    )


def _fill(
    source: Source,
    config: DecoderConfig,
    leaves: dict[str, Any],
    progress: Progress | None,
) -> dict[str, jax.Array]:
    """Fills some leaves, from the tensors of the rules that speak of them."""
    mapping = weight_mapping(config)
    rules, others = [], []
    for rule in mapping.rules:
        (rules if rule.destinations[0] in leaves else others).append(rule)
    beside = Mapping(tuple(others), mapping.sizes).by_source()
    some = Mapping(tuple(rules), mapping.sizes, (*mapping.ignore, *beside))
    return load(source, some, leaves, progress=progress) if leaves else {}


def _zeros(leaf: Any) -> jax.Array:
    return jnp.zeros(leaf.shape, leaf.dtype, device=getattr(leaf, "sharding", None))
