"""The loss of a run as a curve of characters."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

_BRAILLE = 0x2800
# Bits of the dots of a braille character, by column and by row from the top.
_DOTS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))
_LABEL = 9


@dataclasses.dataclass
class LossHistory:
    """Losses of a run, in bounded memory: means over intervals of equal length.

    Attributes:
      limit: Number of means that are never exceeded; even.
      means: Mean loss of each full interval.
      interval: Number of steps of an interval.
    """

    limit: int = 2048
    means: list[float] = dataclasses.field(default_factory=list)
    interval: int = 1
    _open: list[float] = dataclasses.field(default_factory=list)

    def add(self, loss: float) -> None:
        """Adds the loss of the next step.

        Args:
          loss: Finite loss.
        """
        self._open.append(loss)
        if len(self._open) < self.interval:
            return
        self.means.append(sum(self._open) / len(self._open))
        self._open.clear()
        if len(self.means) >= self.limit:
            pairs = zip(self.means[::2], self.means[1::2], strict=True)
            self.means = [(first + second) / 2 for first, second in pairs]
            self.interval *= 2


def draw_curve(
    values: Sequence[float], width: int, height: int, *, braille: bool = True
) -> list[str]:
    """Draws values over equal steps, with the largest and the least beside it.

    Args:
      values: Finite values; where there are more than columns, means of neighbours.
      width: Characters of a line, more than 10.
      height: Number of lines, at least 2.
      braille: Whether the terminal has braille, of 2 x 4 dots a character.

    Returns:
      Lines; none without values.
    """
    if not values:
        return []
    across, down = (2, 4) if braille else (1, 1)
    columns = _resample(values, across * (width - _LABEL))
    low, high = min(values), max(values)
    span = (high - low) or 1.0
    rows = down * height
    heights = [round((high - value) / span * (rows - 1)) for value in columns]
    cells = [[0] * (width - _LABEL) for _ in range(height)]
    previous = heights[0]
    for column, row in enumerate(heights):
        # The line is drawn down to its neighbour, so that steep parts hang together.
        for filled in range(min(previous, row), max(previous, row) + 1):
            bit = _DOTS[column % 2][filled % 4] if braille else 1
            cells[filled // down][column // across] |= bit
        previous = row
    labels = {0: f"{high:.4g}", height - 1: f"{low:.4g}"}
    return [
        f"{labels.get(number, ''):>{_LABEL - 1}} " + _characters(cell, braille)
        for number, cell in enumerate(cells)
    ]


def _resample(values: Sequence[float], count: int) -> list[float]:
    """Returns means of neighbours, at most `count`."""
    if len(values) <= count:
        return list(values)
    edges = [math.floor(index * len(values) / count) for index in range(count + 1)]
    bins = [values[a:b] for a, b in zip(edges, edges[1:], strict=False)]
    return [sum(each) / len(each) for each in bins]


def _characters(cells: Sequence[int], braille: bool) -> str:
    if braille:
        return "".join(chr(_BRAILLE | bits) if bits else " " for bits in cells)
    return "".join("*" if bits else " " for bits in cells)
