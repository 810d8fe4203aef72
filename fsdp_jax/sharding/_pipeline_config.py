"""User options of a pipeline of stages."""

from __future__ import annotations

import dataclasses
from typing import Literal

from fsdp_jax._option_types import check_options

ScheduleName = Literal["1f1b", "gpipe"]


@dataclasses.dataclass(frozen=True)
class PipelineConfig:
    """Schedule of the stages over the mesh axis `pp`; without effect for one stage.

    The microbatches of a step are those of `make_train_step(num_microbatches=...)`.
    Each stage stores its inputs and runs its layers again for backward; what a layer
    saves within that is set by `FSDPConfig.remat_policy`. Reductions of gradients that
    are left after the last microbatch run then, whatever `FSDPConfig.overlap_outer` is.

    Args:
      schedule: `1f1b` runs the backward of a microbatch as soon as its forward is
        complete, so that a stage stores at most `2 * pp * virtual_stages - 1` inputs.
        `gpipe` runs all forwards, then all backwards, and stores the inputs of all
        microbatches.
      virtual_stages: Number of chunks of the stack a stage, one from each round over
        the stages (Megatron's interleaved schedule). The bubble shrinks by this factor,
        and inputs are sent between stages this many times as often. Layers are stored
        in their own order, so more than 1 costs a permutation of weights and of
        gradients over `pp` each step.
      stack: Path of the stack that stages split, such as `layers.1`, or of several that
        one `fsdp.scan` runs a period of layers at a time; None for the only one. The
        first stage runs what the loss computes before it, other stacks included, and
        the last stage what the loss computes after it.

    Raises:
      ValueError: If the schedule is unknown, or `virtual_stages` is less than 1.

    Examples:
      >>> config = fsdp.FSDPConfig(pipeline=fsdp.PipelineConfig("gpipe"))
      >>> mesh = fsdp.make_mesh(pp=2)
      >>> plan = fsdp.fully_shard(make_model, mesh, [fsdp.Stacked("layers")], config)
      >>> tuple(plan.specs["layers"]["w"])
      ('pp', 'dp_shard')

    Source: Huang et al., arXiv 1811.06965 (GPipe); Narayanan et al., arXiv 2104.04473;
      Megatron-LM `schedules.py::forward_backward_pipelining_with_interleaving` (there a
      stage has `pp` microbatches in flight, and stages wait for each other in pairs;
      here all send at once, since they run one program, and the first has twice as
      many).
    """

    schedule: ScheduleName = "1f1b"
    virtual_stages: int = 1
    stack: str | None = None

    def __post_init__(self):
        """Validates the schedule and the number of virtual stages."""
        check_options(self)
        if self.virtual_stages < 1:
            raise ValueError(f"{self}: a stage has at least 1 part of the stack.")
