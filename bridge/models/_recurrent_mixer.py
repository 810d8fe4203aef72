"""Base of mixers that convolve projections of the tokens and run a recurrence."""

import abc
from collections.abc import Mapping
from typing import Any

from flax import nnx
from jaxtyping import Array, Float, Int

from bridge.models._causal_conv import CausalConv, Mask

Stream = Float[Array, "batch seq embed"]
Heads = Float[Array, "batch seq heads dim"]


class RecurrentMixer(nnx.Module):
    """Mixer with a state of constant size: projects, convolves, recurs, projects back.

    The state of a layer is a NamedTuple with the last inputs of each convolution, by
    the name of the projection, and the `memory` of the recurrence.
    """

    def __call__(
        self, x: Stream, segment_ids: Int[Array, "batch seq"] | None
    ) -> Stream:
        """Mixes each token with those before it in its segment."""
        made = self._project(x)
        convolved = {
            name: conv(getattr(made, name), segment_ids)
            for name, conv in self._convs().items()
        }
        out, _ = self._recur(made._replace(**convolved), None, segment_ids, None)
        return self._finish(made, out)

    def extend(self, x: Stream, state: Any, is_token: Mask) -> tuple[Stream, Any]:
        """Mixes new tokens with those of a state, and returns the state after them.

        Args:
          x: Normed hidden states of the new tokens.
          state: State before them.
          is_token: False behind the last new token of a row; None if all are tokens.
        """
        made, convolved, last = self._project(x), {}, {}
        for name, conv in self._convs().items():
            before = getattr(state, name)
            convolved[name], last[name] = conv.extend(
                getattr(made, name), before, is_token
            )
        made = made._replace(**convolved)
        out, memory = self._recur(made, state.memory, None, is_token)
        return self._finish(made, out), state._replace(**last, memory=memory)

    @abc.abstractmethod
    def _project(self, x: Stream) -> Any:
        """Returns the projections of the tokens, a NamedTuple."""

    @abc.abstractmethod
    def _convs(self) -> Mapping[str, CausalConv]:
        """Returns the convolutions, by the name of the projection that each reads."""

    @abc.abstractmethod
    def _recur(
        self,
        made: Any,
        memory: Any,
        segment_ids: Array | None,
        is_token: Mask,
    ) -> tuple[Heads, Any]:
        """Runs the recurrence over convolved projections.

        Args:
          made: Projections, convolved.
          memory: State of the recurrence before the tokens; None for zeros.
          segment_ids: Segment of each token; None if a row is one segment.
          is_token: False where there is no token; None if all are tokens.

        Returns:
          Outputs of the heads, and the state after the tokens.
        """

    @abc.abstractmethod
    def _finish(self, made: Any, out: Heads) -> Stream:
        """Gates, norms and projects the outputs of the heads."""
