"""Where activations lie when matrices are split: the decoder's word for it."""

from typing import Literal, Protocol

from jaxtyping import Array, Float

Place = Literal["embeddings", "tokens", "input", "output", "logits"]
"""Where in the decoder an activation is, all `[batch, seq, features]`.

`embeddings`: what the table gave. `tokens`: what a matrix that is not split made of
each token. `input`: what matrices that are split by columns read, behind a norm.
`output`: what those that are split by rows made, before it is added to the residual
stream. `logits`: of the whole vocabulary.
"""


class Constrain(Protocol):
    """What the decoder asks of a constraint: the same numbers, laid out anew."""

    def __call__(
        self, x: Float[Array, "batch seq features"], place: Place
    ) -> Float[Array, "batch seq features"]:
        """Returns `x`, laid out as it should be in that place."""
        ...


def unconstrained(
    x: Float[Array, "batch seq features"], place: Place
) -> Float[Array, "batch seq features"]:
    """Leaves everything where it is: the default of the decoder's `constrain`.

    Args:
      x: An activation.
      place: Where in the decoder it is; the signature that any other must have.
    """
    del place
    return x
