"""Buffer layouts: which elements of a flat buffer are which parameter's."""

import collections
import dataclasses
import functools
from collections.abc import Mapping, Sequence

from bridge._box import Range
from bridge.megatron.buffers._param_spec import ParamSpec


@dataclasses.dataclass(frozen=True)
class Placement:
    """Where one parameter lies.

    Args:
      param: The parameter.
      start: First element of the buffer that is its own.
      stop: The element after its last.
      bucket: Position of its bucket among the buffer's.
    """

    param: ParamSpec
    start: int
    stop: int
    bucket: int


@dataclasses.dataclass(frozen=True)
class Bucket:
    """A section of a buffer that is communicated as one.

    Args:
      start: Its first element.
      stop: The element after its last, padding included.
      num_unpadded: Elements before the padding at its end. Gaps between parameters
        count in a sequential layout and not in a layer-wise one, as in Megatron,
        whose checkpoints record the number.
    """

    start: int
    stop: int
    num_unpadded: int

    @property
    def num_elements(self) -> int:
        """Elements, padding included."""
        return self.stop - self.start


@dataclasses.dataclass(frozen=True)
class BufferLayout:
    """What a layout function decides about one buffer.

    Args:
      placements: Each parameter once, in the order of the buffer.
      buckets: They follow each other without a gap, from element 0 on.
      num_shards: Data ranks among which each bucket is split evenly; None if every
        rank keeps the whole buffer.
      start_divisor: What each parameter's start is a multiple of.
      end_divisor: What each bucket's end is a multiple of.
      whole_params: Whether no parameter crosses a shard: the layer-wise layout.
    """

    placements: tuple[Placement, ...]
    buckets: tuple[Bucket, ...]
    num_shards: int | None
    start_divisor: int
    end_divisor: int
    whole_params: bool = False

    @property
    def num_elements(self) -> int:
        """Elements of the buffer, padding included."""
        return self.buckets[-1].stop if self.buckets else 0

    @property
    def num_unpadded(self) -> int:
        """Sum of the buckets' `num_unpadded`."""
        return sum(bucket.num_unpadded for bucket in self.buckets)

    @functools.cached_property
    def by_name(self) -> Mapping[str, Placement]:
        """Each parameter's placement."""
        return {placement.param.name: placement for placement in self.placements}

    def in_bucket(self, name: str) -> Range:
        """Returns where a parameter lies, counted from the start of its bucket."""
        place = self.by_name[name]
        offset = self.buckets[place.bucket].start
        return Range(place.start - offset, place.stop - offset)


def check(
    params: Sequence[ParamSpec], bucket_size: int | None, dp_sizes: Sequence[int] = ()
) -> None:
    """Refuses what no layout can be made of, all reasons at once.

    Raises:
      ValueError: If a name is given twice, or a size is not positive.
    """
    counts = collections.Counter(param.name for param in params)
    twice = [name for name, count in counts.items() if count > 1]
    wrong = []
    if twice:
        wrong.append(f"{twice} are named more than once: give each its full path")
    if bucket_size is not None and bucket_size < 1:
        wrong.append(
            f"bucket_size is {bucket_size}: give at least 1 element, or None for one "
            "bucket"
        )
    if any(size < 1 for size in dp_sizes):
        wrong.append(f"dp sizes are {sorted({*dp_sizes})}: a group has at least 1 rank")
    if wrong:
        raise ValueError(
            f"Cannot lay out {len(params)} parameters: {'; '.join(wrong)}."
        )
