"""How a pipeline of stages runs: what a user may choose of it."""

from __future__ import annotations

import dataclasses
from typing import Literal, get_args

ScheduleName = Literal["1f1b", "gpipe"]


@dataclasses.dataclass(frozen=True)
class Pipeline:
    """How the stages over the mesh axis `pp` take turns; with one stage, nothing.

    The microbatches of a step are those of `make_train_step(accumulate=...)`. Each
    stage keeps what enters it, and runs its layers again for backward; what of a layer
    is saved within that is `FSDPConfig.remat_policy`'s. Gradients are reduced over what
    axes are left behind the last microbatch, whatever `FSDPConfig.overlap_outer` is.

    Args:
      schedule: `1f1b` runs the backward of a microbatch as soon as its forward is
        through, so that `2 * pp * virtual_stages - 1` inputs of a stage are kept at
        most. `gpipe` runs all forwards, then all backwards, and keeps those of all
        microbatches.
      virtual_stages: Parts of the stack that each stage has, one from each round over
        the stages (Megatron's interleaved schedule): the bubble shrinks by this factor,
        and inputs pass between stages as often more. Layers rest in their own order, so
        more than 1 costs an exchange of weights and of gradients over `pp` each step.
      stack: The path of the stack that stages split, such as `layers.1`; None for the
        only one. What the loss computes before it, other stacks too, is the first
        stage's to do, and what it computes behind it the last one's.

    Raises:
      ValueError: If there is no such schedule, or a stage has nothing.

    Source: Huang et al., arXiv 1811.06965 (GPipe); Narayanan et al., arXiv 2104.04473;
      Megatron-LM `schedules.py::forward_backward_pipelining_with_interleaving` (there a
      stage has `pp` microbatches in flight, and stages wait for each other in pairs;
      here all pass on at once, as one program does, and the first has twice as many).
    """

    schedule: ScheduleName = "1f1b"
    virtual_stages: int = 1
    stack: str | None = None

    def __post_init__(self):
        """Refuses what is no schedule."""
        known = get_args(ScheduleName)
        if self.schedule not in known or self.virtual_stages < 1:
            raise ValueError(
                f"{self}: schedule is one of {', '.join(known)}, and a stage has "
                "at least 1 part of the stack."
            )
