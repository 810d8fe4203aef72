"""Config of attention whose queries and projections back are of experts."""

import dataclasses

from bridge.models._checks import raise_if, wrong_fields, wrong_sizes
from bridge.models._moe_config import MoEConfig


@dataclasses.dataclass(frozen=True)
class AttentionExpertsConfig:
    """Experts of attention: each has queries of all key heads, and a projection back.

    A token attends with the queries of the experts that a router chooses for it, whose
    outputs are summed by the router's weights. Keys and values are the same for all.
    `RouterStats` and replayed routes are those of MLPs alone.

    Args:
      num_experts: Number of experts.
      num_experts_per_tok: Number of experts per token.

    Raises:
      ValueError: If a field has an invalid value, or more are chosen than there are.

    Source: JetMoE, https://arxiv.org/abs/2404.07413.
    """

    num_experts: int
    num_experts_per_tok: int

    def __post_init__(self):
        """Validates both numbers."""
        names = ("num_experts", "num_experts_per_tok")
        wrong = wrong_fields(self) or wrong_sizes(self, names)
        if not wrong and self.num_experts_per_tok > self.num_experts:
            wrong = [
                f"num_experts_per_tok {self.num_experts_per_tok} of num_experts "
                f"{self.num_experts}"
            ]
        raise_if("AttentionExpertsConfig", wrong)

    def router(self, width: int) -> MoEConfig:
        """Returns the config of the router, whose weights are a softmax of the chosen.

        Args:
          width: Width of the queries of an expert.
        """
        return MoEConfig(
            self.num_experts,
            self.num_experts_per_tok,
            width,
            norm_topk_prob=True,
            rounded_weights=True,
        )
