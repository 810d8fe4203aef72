"""Signature and default of the decoder's sharding constraint on activations."""

from typing import Literal, Protocol

from jaxtyping import Array, Float

Place = Literal["embeddings", "tokens", "input", "output", "logits"]
"""Place of an activation `[batch, seq, features]` in the decoder.

`embeddings`: output of the embedding. `tokens`: output, per token, of a matrix that is
not split. `input`: input of matrices split by columns, after a norm. `output`: output
of matrices split by rows, before it is added to the residual stream. `logits`: logits
of the full vocabulary.
"""


class Constrain(Protocol):
    """Signature of a sharding constraint: changes the sharding, never the values."""

    def __call__(
        self, x: Float[Array, "batch seq features"], place: Place
    ) -> Float[Array, "batch seq features"]:
        """Returns `x` with the sharding for that place."""
        ...


def unconstrained(
    x: Float[Array, "batch seq features"], place: Place
) -> Float[Array, "batch seq features"]:
    """Returns `x` unchanged: the default of the decoder's `constrain`.

    Args:
      x: Activation to constrain.
      place: Place of the activation; unused here, but part of the signature.
    """
    del place
    return x
