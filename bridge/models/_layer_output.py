"""Output of a decoder layer, and what layers pass to one another."""

from typing import NamedTuple

from jaxtyping import Array, Int

from bridge.models._altup import Streams
from bridge.models._batch_parts import BatchParts
from bridge.models._indexed_attention import SelectedStream
from bridge.models._layer_mixer import Stream
from bridge.models._layer_state import LayerState
from bridge.models._moe import Routed
from bridge.models._router_stats import RouterStats
from bridge.models._shared_attention import SharedStream

Experts = Int[Array, "batch seq chosen"]
PerLayer = dict[str, Array]
Carry = Stream | Streams | SelectedStream | SharedStream


class LayerOutput(NamedTuple):
    """Output of a layer.

    Attributes:
      stream: Residual stream; beside selected keys, or keys and values of layers, if
        the layer was given both.
      router_stats: Statistics of the router; None in a dense layer.
      cache: Cache with the new tokens; None if there was no cache.
      experts: Experts of each token; None in a dense layer.
    """

    stream: Carry | BatchParts
    router_stats: RouterStats | None
    cache: LayerState | None
    experts: Experts | None

    @classmethod
    def of(
        cls, stream: Carry, routed: Routed | None, cache: LayerState | None
    ) -> "LayerOutput":
        """Returns the output of a layer.

        Args:
          stream: Residual stream behind the layer.
          routed: Statistics and experts of the router; None in a dense layer.
          cache: Cache with the new tokens; None if there was no cache.
        """
        stats, experts = (None, None) if routed is None else routed
        return cls(stream, stats, cache, experts)
