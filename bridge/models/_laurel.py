"""Learned residual of low rank beside attention (LAuReL)."""

from functools import partial

from flax import nnx
from jaxtyping import Array, DTypeLike, Float

from bridge.models._config import DecoderConfig
from bridge.models._constrain import Constrain
from bridge.models._linear import Linear
from bridge.models._norm import Norm


class Laurel(nnx.Module):
    """Normed input of attention, and its projection through a narrow layer.

    Its matrices are narrow on one side, and tensor parallelism does not split them.

    Args:
      config: Config of the decoder, with `laurel_rank`.
      rngs: Source of keys.
      param_dtype: Dtype of the parameters.
      constrain: Sharding constraint of activations.

    Source: LAuReL (arXiv:2411.07501); transformers
      `modeling_gemma3n.py::Gemma3nTextLaurelBlock`.
    """

    def __init__(
        self,
        config: DecoderConfig,
        *,
        rngs: nnx.Rngs,
        param_dtype: DTypeLike,
        constrain: Constrain,
    ):
        """Initializes both projections and the norm."""
        assert config.laurel_rank is not None
        embed, rank = (config.hidden_size,), (config.laurel_rank,)
        linear = partial(
            Linear, std=config.initializer_range, rngs=rngs, param_dtype=param_dtype
        )
        self.left = linear(embed, rank)
        self.right = linear(rank, embed)
        self.norm = Norm(embed, config.norm, config.norm_eps, param_dtype=param_dtype)
        self.constrain = constrain

    def __call__(
        self, x: Float[Array, "batch seq embed"]
    ) -> Float[Array, "batch seq embed"]:
        """Returns the input and its normed projection.

        Args:
          x: Normed residual stream.
        """
        narrow = self.constrain(self.left(x), "tokens")
        return x + self.norm(self.constrain(self.right(narrow), "tokens"))
