"""linen modules that transform the weights of others, such as WeightNorm."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from flax.errors import ScopeParamNotFoundError


@contextmanager
def says_which_weights() -> Iterator[None]:
    """Context in which a linen module that finds shards in place of weights is told so.

    `nn.WeightNorm` makes a parameter for each array of a layer's variables. Outside of
    a unit a weight is a `Shard`, whose arrays have names of their own.

    Raises:
      ValueError: If that happens.
    """
    try:
        yield
    except ScopeParamNotFoundError as error:
        if "/value" not in str(error):
            raise
        raise ValueError(
            "A linen module transforms weights of a unit from outside of it, as "
            "nn.WeightNorm does, where only this device's shards exist: "
            f"{str(error).partition('. (http')[0]}. Make the module around both the "
            "unit, or leave its weights out of `units`, so that they are gathered at "
            "the entry of the loss."
        ) from error
