"""Routes of a decoder: the experts of each token, which a later call can replay."""

from jaxtyping import Array, Int

from bridge.models._config import DecoderConfig
from bridge.models._layer_loop import sparse_layers
from bridge.models._positions import Ids

Routes = Int[Array, "layers batch seq chosen"]
"""Experts of each token in each layer that has any."""


def check_routes(config: DecoderConfig, tokens: Ids, experts: Routes) -> None:
    """Checks that a decoder can replay the experts.

    Args:
      config: Config of the decoder.
      tokens: Token ids.
      experts: Experts of each token.

    Raises:
      ValueError: If `experts` has not the shape that the decoder chooses.
    """
    moe, layers = config.moe, len(sparse_layers(config))
    if moe is None or not layers:
        raise ValueError("This decoder has no experts to replay: leave out experts=.")
    shape = (layers, *tokens.shape, moe.num_experts_per_tok)
    if experts.shape != shape:
        raise ValueError(
            f"experts={experts.shape}: this decoder chooses {shape} for tokens "
            f"{tokens.shape}: sparse layers, batch, seq, experts of a token."
        )
