"""What the layers of a decoder receive of tokens."""

from typing import NamedTuple

from jaxtyping import Array, Float

from bridge.models._layer_mixer import Stream
from bridge.models._positions import Ids
from bridge.models._routes import Routes


class Start(NamedTuple):
    """What the layers receive of tokens.

    Attributes:
      x: Residual stream before the first layer.
      positions: Position of each token.
      inputs_of_layers: Input that each layer has of each token; None for none.
      token_experts: Experts that follow from each token; None if routers choose all.
    """

    x: Stream
    positions: Ids
    inputs_of_layers: Float[Array, "layers batch seq size"] | None
    token_experts: Routes | None
