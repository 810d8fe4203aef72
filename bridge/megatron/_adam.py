"""Adam state of a Megatron run, loaded as pytrees that match the parameters."""

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

# Not trained by a gradient: Megatron stores it beside the parameters, without moments.
_UNTRAINED = "correction_bias"


@dataclasses.dataclass(frozen=True)
class Adam:
    """Adam state of a run: weights, moments, step count and hyperparameters.

    Continue in optax with
    `optax.tree.set(tx.init(params), mu=mu, nu=nu, count=count)`.

    Args:
      params: Pytree of weights as the optimizer holds them: the master weights if the
        run kept them, otherwise the model's weights.
      mu: Pytree of first moments.
      nu: Pytree of second moments.
      count: Number of steps taken, as Adam's bias correction counts them; int32 scalar.
      settings: Hyperparameters of the run, which differ from optax's defaults.
    """

    params: Any
    mu: Any
    nu: Any
    count: Int[Array, ""]
    settings: AdamSettings


def load_megatron_adam(
    path: str | os.PathLike[str],
    like: Any,
    *,
    config: DecoderConfig | None = None,
    progress: Progress | None = None,
) -> Adam:
    """Loads the weights and the Adam state of a Megatron checkpoint.

    Args:
      path: Checkpoint directory, as `open_megatron` takes it.
      like: Abstract parameters, as `load_megatron` takes them. Moments are created
        with the same shardings and dtypes.
      config: Model config; None reads it from the run's settings.
      progress: Called with bytes read and total bytes; counts restart for the weights
        and for each moment.

    Returns:
      Adam state with pytrees of the structure of `like`. Tensors that Megatron does
      not train by a gradient get moments of zero.

    Raises:
      FileNotFoundError: If there is no checkpoint.
      ValueError: If the checkpoint holds no Adam state or none that can be converted
        (the message says why), if the optimizer is not AdamW, or for the reasons given
        in `load_megatron`.
    """
    checkpoint = open_megatron(path)
    adam = checkpoint.optimizer
    if adam is None or adam.step is None:
        lines = "\n".join(f"  {line}" for line in checkpoint.left_out)
        missing = "moments" if adam is None else "number of steps"
        raise ValueError(
            f"'{checkpoint.path}' holds no {missing} of Adam that can be read. Left "
            f"out are:\n{lines or '  nothing'}"
        )
    config = from_args(checkpoint.args) if config is None else config
    settings = adam_settings(
        adam.param_groups,
        checkpoint.args,
        checkpoint.scheduler,
        lambda: undecayed_leaves(checkpoint.source, weight_mapping(config)),
    )
    leaves = named_leaves(like)
    untrained = {n: leaf for n, leaf in leaves.items() if n.endswith(_UNTRAINED)}
    trained = {n: leaf for n, leaf in leaves.items() if n not in untrained}

    def fill(source: Source, some: dict[str, Any]) -> dict[str, jax.Array]:
        return _fill(decoder_source(source, config), config, some, progress)

    def tree(filled: dict[str, jax.Array]) -> Any:
        in_order = [filled[name] for name in leaves]
        return jax.tree.unflatten(jax.tree.structure(like), in_order)

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
    """Loads a subset of the leaves, using only the rules that cover them."""
    mapping = weight_mapping(config)
    rules, others = [], []
    for rule in mapping.rules:
        (rules if rule.destinations[0] in leaves else others).append(rule)
    # Ignore the tensors of all other rules, which would be reported as unexpected.
    beside = Mapping(tuple(others), mapping.sizes).by_source()
    some = Mapping(tuple(rules), mapping.sizes, (*mapping.ignore, *beside))
    return load(source, some, leaves, progress=progress) if leaves else {}


def _zeros(leaf: Any) -> jax.Array:
    return jnp.zeros(leaf.shape, leaf.dtype, device=getattr(leaf, "sharding", None))
