"""Config of a mixture of experts."""

import dataclasses
from typing import Literal

from bridge.models._checks import raise_if, wrong_fields, wrong_sizes

Scoring = Literal[
    "softmax", "sigmoid", "sqrtsoftplus", "softmax_of_chosen", "sparsemixer"
]


@dataclasses.dataclass(frozen=True)
class MoEConfig:
    """Config of a layer's experts and their router.

    Args:
      num_experts: Number of experts.
      num_experts_per_tok: Number of experts per token.
      intermediate_size: Width inside an expert.
      scoring: Scores of the router's logits: `softmax` over all experts, `sigmoid` of
        each, `sqrtsoftplus`, the root of the softplus of each, `softmax_of_chosen`,
        over the logits of the chosen experts only, or `sparsemixer`: of two experts,
        chosen one after the other, each weighted by a softmax over the logits close to
        its own. Its sampling in training is not
        modelled: experts are chosen as in evaluation.
      sparsemixer_jitter: Half of the relative distance up to which logits are close;
        set if and only if `scoring` is `sparsemixer`.
      norm_topk_prob: Whether the weights of the chosen experts are divided by their
        sum.
      norm_topk_eps: Epsilon added to that sum, for `sigmoid` and `sqrtsoftplus`.
      routed_scaling_factor: Factor of the weights, applied last.
      n_group: Number of expert groups, of which a token first chooses some; None to
        choose among all experts.
      topk_group: Number of groups that a token chooses.
      group_scoring: Score of a group: of its best expert (`max`), or the sum of its
        best two (`top2_sum`). Experts of the other groups are not chosen with
        `top2_sum`; with `max` and `top2_sum_zeroed` their scores are 0, above those
        that a correction bias made negative.
      correction_bias: Whether a bias that no gradient trains is added to the scores
        for the choice of experts, but not to their weights.
      corrected_logits: Whether that bias is added to the logits, before `scoring`.
      router_bias: Whether the router's projection has a bias.
      float32_logits: Whether the router projects in float32 for weights of any dtype.
      rounded_weights: Whether the weights are rounded to the dtype of the model.
      expert_bias: Whether the experts' projections have biases.
      output_bias: Whether a bias is added to what the experts of a token sum to.
      latent_size: Width of the vectors that experts see, projected from the token and
        back; None for the token itself.
      swiglu_limit: Bound on the inputs of the experts' gated activation; None for no
        bound. That of the shared MLP is the config's own.
      swiglu_alpha: Factor in the sigmoid of the activation
        `(up + 1) * gate * sigmoid(swiglu_alpha * gate)`, whose inputs are bounded;
        None for the plain one.
      shared_intermediate_size: Width of an additional MLP shared by all tokens; None
        for no such MLP.
      shared_gate: Whether a sigmoid gate per token scales the shared MLP's output.
      shared_average: Whether the output is the mean of those of experts and shared MLP,
        in the place of their sum.
      weighted_inputs: Whether the weight of the one chosen expert scales its input
        and not its output.
      own_norms: Whether router and experts read the residual stream through norms of
        their own, and the outputs of experts and shared MLP are each normed.
      expert_scale: Whether a learned number of each expert scales its weight.
      num_zero_experts: Number of further experts that the router chooses from, behind
        the others: they return the token as it is.

    Raises:
      ValueError: If a field has an invalid value, or fields are inconsistent.

    Source: transformers `modeling_mixtral.py`, `modeling_qwen2_moe.py`,
      `modeling_gpt_oss.py`, `modeling_deepseek_v2.py`, `modeling_deepseek_v3.py`,
      `modeling_deepseek_v4.py`, `modeling_longcat_flash.py`,
      `modeling_cohere2_moe.py`, each `*TopKRouter` and `*Experts`.
    """

    num_experts: int
    num_experts_per_tok: int
    intermediate_size: int
    scoring: Scoring = "softmax"
    sparsemixer_jitter: float | None = None
    norm_topk_prob: bool = False
    norm_topk_eps: float = 1e-20
    routed_scaling_factor: float = 1.0
    n_group: int | None = None
    topk_group: int | None = None
    group_scoring: Literal["max", "top2_sum", "top2_sum_zeroed"] = "max"
    correction_bias: bool = False
    corrected_logits: bool = False
    router_bias: bool = False
    float32_logits: bool = False
    rounded_weights: bool = False
    expert_bias: bool = False
    output_bias: bool = False
    latent_size: int | None = None
    swiglu_limit: float | None = None
    swiglu_alpha: float | None = None
    shared_intermediate_size: int | None = None
    shared_gate: bool = False
    shared_average: bool = False
    weighted_inputs: bool = False
    own_norms: bool = False
    expert_scale: bool = False
    num_zero_experts: int = 0

    def __post_init__(self):
        """Validates the fields, then their consistency."""
        wrong = (
            wrong_fields(self) or wrong_sizes(self, _SIZES) or self._inconsistencies()
        )
        raise_if("MoEConfig", wrong)

    @property
    def num_choices(self) -> int:
        """Number of experts that the router chooses from."""
        return self.num_experts + self.num_zero_experts

    def _inconsistencies(self) -> list[str]:
        chosen, experts = self.num_experts_per_tok, self.num_choices
        wrong = self._inconsistent_zero_experts()
        if chosen > experts:
            wrong.append(f"num_experts_per_tok {chosen} of num_experts {experts}")
        if (self.n_group is None) != (self.topk_group is None):
            wrong.append("n_group and topk_group are set together, or neither")
        if (self.scoring == "sparsemixer") != (self.sparsemixer_jitter is not None):
            wrong.append("scoring sparsemixer and sparsemixer_jitter: both or neither")
        if self.weighted_inputs and chosen != 1:
            wrong.append(f"num_experts_per_tok {chosen}: weighted_inputs are of 1")
        if self.scoring == "sparsemixer" and chosen != 2:
            wrong.append(f"num_experts_per_tok {chosen}: scoring sparsemixer chooses 2")
        if self.corrected_logits and not self.correction_bias:
            wrong.append("corrected_logits without correction_bias corrects nothing")
        if self.scoring in ("softmax_of_chosen", "sparsemixer"):
            wrong += [
                f"{name} is set, but {self.scoring} never reads it"
                for name in _OF_SCORES
                if getattr(self, name) != getattr(MoEConfig, name)
            ]
        if self.n_group is not None and self.topk_group is not None:
            wrong += self._inconsistent_groups(self.n_group, self.topk_group)
        if self.swiglu_limit is None and self.swiglu_alpha is not None:
            wrong.append("swiglu_alpha without swiglu_limit: its inputs are bounded")
        if self.own_norms and self.shared_intermediate_size is None:
            wrong.append("own_norms: beside an MLP of shared_intermediate_size")
        if self.own_norms and (self.latent_size or self.weighted_inputs):
            wrong.append("own_norms: neither with latent_size nor weighted_inputs")
        if self.shared_gate and self.shared_intermediate_size is None:
            wrong.append("shared_gate without shared_intermediate_size gates nothing")
        if self.shared_average and self.shared_intermediate_size is None:
            wrong.append("shared_average without shared_intermediate_size: of what")
        return wrong

    def _inconsistent_zero_experts(self) -> list[str]:
        if (count := self.num_zero_experts) == 0:
            return []
        if count < 0:
            return [f"num_zero_experts {count} is negative"]
        beside = ("n_group", "latent_size", "weighted_inputs", "expert_scale")
        return [
            f"num_zero_experts {count}: not beside {name}"
            for name in beside
            if getattr(self, name)
        ]

    def _inconsistent_groups(self, groups: int, chosen: int) -> list[str]:
        if self.num_experts % groups or chosen > groups:
            return [
                f"topk_group {chosen} of n_group {groups} of {self.num_experts} "
                "experts: groups must be equal, and no more chosen than there are"
            ]
        size = self.num_experts // groups
        wrong = []
        if self.num_experts_per_tok > chosen * size:
            wrong.append(
                f"num_experts_per_tok {self.num_experts_per_tok}: {chosen} groups "
                f"have only {chosen * size} experts"
            )
        if self.group_scoring != "max" and size < 2:
            wrong.append(f"group_scoring '{self.group_scoring}' of groups of {size}")
        return wrong


# Fields that need one score of each expert.
_OF_SCORES = (
    "norm_topk_prob",
    "routed_scaling_factor",
    "n_group",
    "correction_bias",
    "rounded_weights",
    "expert_scale",
)
_SIZES = (
    "num_experts",
    "num_experts_per_tok",
    "intermediate_size",
    "latent_size",
    "n_group",
    "topk_group",
    "shared_intermediate_size",
)
