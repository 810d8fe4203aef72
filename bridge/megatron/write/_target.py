"""Target of a write: the run that will load the checkpoint."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from bridge.megatron._pipeline import Pipeline


@dataclasses.dataclass(frozen=True)
class Target:
    """Run that a checkpoint is written for.

    Args:
      args: Settings of the run.
      pipeline: Distribution of layers and experts over model-parallel ranks.
      multiple: Divisor of the padded number of vocabulary rows.
    """

    args: Mapping[str, Any]
    pipeline: Pipeline
    multiple: int
