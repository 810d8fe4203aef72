"""Buffer layouts: the elements of a flat buffer that each parameter occupies."""

import collections
import dataclasses
import functools
from collections.abc import Mapping, Sequence

from bridge._box import Range
from bridge.megatron.buffers._param_spec import ParamSpec


@dataclasses.dataclass(frozen=True)
class Placement:
    """Position of one parameter in its buffer.

    Args:
      param: Parameter that is placed.
      start: Index in the buffer of the parameter's first element.
      stop: Index one past the parameter's last element.
      bucket: Index of the bucket that contains the parameter.
    """

    param: ParamSpec
    start: int
    stop: int
    bucket: int


@dataclasses.dataclass(frozen=True)
class Bucket:
    """Contiguous section of a buffer that is communicated as one unit.

    Args:
      start: Index in the buffer of the bucket's first element.
      stop: Index one past the bucket's last element, padding included.
      num_unpadded: Number of elements without the padding at the bucket's end. Gaps
        between parameters count in a sequential layout but not in a layer-wise one, as
        in Megatron, whose checkpoints record this number.
    """

    start: int
    stop: int
    num_unpadded: int

    @property
    def num_elements(self) -> int:
        """Number of elements in the bucket, padding included."""
        return self.stop - self.start


@dataclasses.dataclass(frozen=True)
class BufferLayout:
    """Layout of one buffer: parameter placements, buckets and alignment.

    Args:
      placements: One placement per parameter, in buffer order.
      buckets: Buckets in buffer order, contiguous from element 0.
      num_shards: Number of data-parallel ranks that share each bucket evenly; None if
        every rank keeps the whole buffer.
      start_divisor: Alignment of each parameter's start, in elements.
      end_divisor: Alignment of each bucket's end, in elements.
      whole_params: Whether every parameter lies within one shard, as in the layer-wise
        layout.
    """

    placements: tuple[Placement, ...]
    buckets: tuple[Bucket, ...]
    num_shards: int | None
    start_divisor: int
    end_divisor: int
    whole_params: bool = False

    @property
    def num_elements(self) -> int:
        """Number of elements in the buffer, padding included."""
        return self.buckets[-1].stop if self.buckets else 0

    @property
    def num_unpadded(self) -> int:
        """Sum of `num_unpadded` over the buckets."""
        return sum(bucket.num_unpadded for bucket in self.buckets)

    @functools.cached_property
    def by_name(self) -> Mapping[str, Placement]:
        """Placements keyed by parameter name."""
        return {placement.param.name: placement for placement in self.placements}

    def in_bucket(self, name: str) -> Range:
        """Returns a parameter's element range relative to the start of its bucket."""
        place = self.by_name[name]
        offset = self.buckets[place.bucket].start
        return Range(place.start - offset, place.stop - offset)


def check(
    params: Sequence[ParamSpec], bucket_size: int | None, dp_sizes: Sequence[int] = ()
) -> None:
    """Validates the inputs of a layout function; reports all errors at once.

    Args:
      params: Parameters to lay out.
      bucket_size: Requested bucket size in elements; None for a single bucket.
      dp_sizes: Sizes of the data-parallel groups.

    Raises:
      ValueError: If two parameters share a name, or a size is not positive.
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
