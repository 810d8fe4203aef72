"""Experts that follow from the id of a token: a table for each layer that hashes."""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from bridge.models._config import DecoderConfig

_PATH = "token_experts.table"


class TokenExperts(nnx.Module):
    """Experts of each token in the layers whose router does not choose them.

    The table holds indices, as float32, so that it is stored, sharded and saved as the
    other parameters are; files have integers. No gradient trains it: freeze it
    (`constant_paths`), and keep it in float32 (`param_name_patterns_in_fp32`).

    Args:
      config: Config of the decoder, with `hash_layers`.

    Source: transformers `modeling_deepseek_v4.py::DeepseekV4HashRouter`.
    """

    def __init__(self, config: DecoderConfig):
        """Initializes each token to the experts after those of the one before it."""
        moe = config.moe
        assert moe is not None
        shape = (config.vocab_size, moe.num_experts_per_tok)
        experts = jnp.arange(shape[0] * shape[1]) % moe.num_experts
        table = experts.reshape(shape).astype(jnp.float32)
        layers = len(config.hash_layers)
        self.table = nnx.Param(jnp.broadcast_to(table, (layers, *shape)))
        self.num_experts = moe.num_experts

    def __call__(
        self, tokens: Int[Array, "batch seq"]
    ) -> Int[Array, "layers batch seq chosen"]:
        """Returns the experts of each token in each layer that hashes.

        Args:
          tokens: Token ids.

        Raises:
          ValueError: If the dtype of the table cannot tell all experts apart.
        """
        table = jax.lax.stop_gradient(self.table[...])
        _check_exact(table, self.num_experts)
        chosen = jnp.take(table, tokens, axis=1, mode="clip")
        return jnp.rint(chosen).astype(jnp.int32)


def token_expert_paths(config: DecoderConfig) -> tuple[str, ...]:
    """Returns the path of the table of experts by token; empty if no layer hashes.

    Args:
      config: Config of the decoder.
    """
    return (_PATH,) if config.hash_layers else ()


def _check_exact(table: Float[Array, "..."], num_experts: int) -> None:
    exact = 2 ** (jnp.finfo(table.dtype).nmant + 1)
    if num_experts > exact:
        raise ValueError(
            f"{_PATH} in {table.dtype.name}: exact up to {exact}, of {num_experts} "
            "experts. Keep it in float32: MixedPrecisionPolicy("
            "param_name_patterns_in_fp32=bridge.models.token_expert_paths(config))."
        )
