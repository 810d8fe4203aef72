"""Kinds of layers as data, and the blocks in which they repeat."""

import dataclasses
import functools
from collections.abc import Iterator
from typing import Literal

Mixer = Literal[
    "attention",
    "short_conv",
    "delta_net",
    "lightning",
    "mamba",
    "mamba1",
    "rg_lru",
    "attention_mamba",
]
"""Part of a layer in which tokens see those before them.

The last is two of them side by side.
"""

Compression = Literal["sparse", "heavy"]
"""Entries that attention reads beside single tokens.

Those of few tokens, of which an indexer selects some, or those of many tokens.
"""

Channels = Literal["dense", "sparse"]
"""Part of a layer that works on each token alone: an MLP, or a mixture of experts."""


@dataclasses.dataclass(frozen=True)
class LayerKind:
    """Structure of a layer; layers of one kind have the same parameters.

    Args:
      mixer: Part that mixes tokens; None without any.
      channels: Part that works on each token alone; None without any.
      indexes: Whether an indexer selects the keys that its queries attend to.
      is_full: Whether its attention has the sizes of `full_attention` of the config.
      reuses: Whether it attends to keys and values of an earlier layer.
      cuts_gate: Whether its MLP keeps only the largest values of the gate.
      mlp_size: Width inside its MLP; None for that of the config.
      compresses: Entries that its attention reads; None for none.
      hashes: Whether the experts of a token follow from its id.
      norms_mixer: Whether its mixer reads a normed stream.
      shared_block: Index of the shared block that it runs before its mixer; None for
        none.
    """

    mixer: Mixer | None = "attention"
    channels: Channels | None = "dense"
    indexes: bool = False
    is_full: bool = False
    reuses: bool = False
    cuts_gate: bool = False
    mlp_size: int | None = None
    compresses: Compression | None = None
    hashes: bool = False
    norms_mixer: bool = True
    shared_block: int | None = None

    @property
    def attends(self) -> bool:
        """Whether attention is its mixer, or one of two."""
        return self.mixer in ("attention", "attention_mamba")


DENSE_ATTENTION = LayerKind()
"""Attention and an MLP, as in Llama."""


@dataclasses.dataclass(frozen=True)
class LayerStack:
    """Layers of one kind at equal distances, whose weights are stacked.

    Args:
      path: Path of the stack in a `Decoder`.
      layers: Indices of the layers.
      kind: Kind of the layers.
    """

    path: str
    layers: range
    kind: LayerKind


@dataclasses.dataclass(frozen=True)
class LayerBlock:
    """Consecutive layers whose kinds repeat: one loop, whose body is a period.

    Args:
      start: Index of the first layer.
      stop: Index after the last layer.
      kinds: Kinds of the layers of one period.
    """

    start: int
    stop: int
    kinds: tuple[LayerKind, ...]

    @property
    def num_periods(self) -> int:
        """Number of times that the period comes."""
        return (self.stop - self.start) // len(self.kinds)

    def stacks(self, path: str) -> tuple[LayerStack, ...]:
        """Returns a stack for each layer of the period.

        Args:
          path: Path of the block in a `Decoder`.
        """
        period = len(self.kinds)
        return tuple(
            LayerStack(
                path if period == 1 else f"{path}.{position}",
                range(self.start + position, self.stop, period),
                kind,
            )
            for position, kind in enumerate(self.kinds)
        )


_LONGEST_PERIOD = 32
"""Upper bound on the layers of a period, which are compiled one by one."""


@functools.cache
def layer_blocks(kinds: tuple[LayerKind, ...]) -> tuple[LayerBlock, ...]:
    """Returns the blocks of a decoder with the fewest layers and loops to compile.

    ```python
    a, b = LayerKind(), LayerKind(channels="sparse")
    [block.kinds for block in layer_blocks((a, b, b, a, b, b, a))]  # [(a, b, b), (a,)]
    ```

    Args:
      kinds: Kind of each layer.
    """
    numbers = tuple(map(list(dict.fromkeys(kinds)).index, kinds))
    # Of the layers from i on: layers and loops to compile, at the least.
    least = [0] * (len(kinds) + 1)
    first = [(0, 0)] * len(kinds)  # stop and period of the first block of these
    for start in reversed(range(len(kinds))):
        least[start], stop, period = min(
            (least[stop] + period + 1, -stop, period)
            for period in range(1, min(_LONGEST_PERIOD, len(kinds) - start) + 1)
            for stop in _ends(numbers, start, period)
        )
        first[start] = -stop, period
    blocks, start = [], 0
    while start < len(kinds):
        stop, period = first[start]
        blocks.append(LayerBlock(start, stop, kinds[start : start + period]))
        start = stop
    return tuple(blocks)


def _ends(numbers: tuple[int, ...], start: int, period: int) -> Iterator[int]:
    """Yields where blocks of a period can end; one of several layers comes twice."""
    if period == 1:
        yield start + 1
    kinds, stop = numbers[start : start + period], start + period
    while numbers[stop : stop + period] == kinds:
        stop += period
        yield stop
