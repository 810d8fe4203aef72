"""Parallel sizes of a `TransformerConfig`, validated against the model."""

import dataclasses
from typing import Any

from bridge.models import DecoderConfig


@dataclasses.dataclass(frozen=True)
class ParallelFields:
    """Parallel sizes, named like Megatron's fields without their suffixes.

    Args:
      tensor: Number of tensor-parallel ranks.
      pipeline: Number of pipeline stages.
      virtual_pipeline: Number of model chunks per stage; None means one.
      context: Number of context-parallel ranks.
      expert: Number of expert-parallel ranks.
      expert_tensor: Number of tensor-parallel ranks of experts; None means `tensor`.
      sequence: Whether activations are sharded along the sequence between
        tensor-parallel blocks; None means if `tensor` is above 1.
    """

    tensor: int = 1
    pipeline: int = 1
    virtual_pipeline: int | None = None
    context: int = 1
    expert: int = 1
    expert_tensor: int | None = None
    sequence: bool | None = None

    def fields(self) -> dict[str, Any]:
        """Returns the fields of `TransformerConfig` by name."""
        tensor = self.tensor
        return {
            "tensor_model_parallel_size": tensor,
            "pipeline_model_parallel_size": self.pipeline,
            "virtual_pipeline_model_parallel_size": self.virtual_pipeline,
            "context_parallel_size": self.context,
            "expert_model_parallel_size": self.expert,
            "expert_tensor_parallel_size": self.expert_tensor or tensor,
            "sequence_parallel": tensor > 1 if self.sequence is None else self.sequence,
        }

    def misfits(self, config: DecoderConfig) -> list[str]:
        """Returns one line per invalid size or size that does not divide the model."""
        wrong = self._impossible()
        if wrong:
            return wrong
        tp, stages = self.tensor, self.pipeline * (self.virtual_pipeline or 1)
        heads, groups = config.num_attention_heads, config.num_key_value_heads
        whole = [
            ("num_attention_heads", heads, "tensor", tp),
            ("intermediate_size", config.intermediate_size, "tensor", tp),
            (
                "num_hidden_layers",
                config.num_hidden_layers,
                "pipeline x virtual",
                stages,
            ),
        ]
        if (moe := config.moe) is not None:
            shared, parts = moe.shared_intermediate_size, self.expert_tensor or tp
            whole += [
                ("moe.num_experts", moe.num_experts, "expert", self.expert),
                (
                    "moe.intermediate_size",
                    moe.intermediate_size,
                    "expert tensor",
                    parts,
                ),
                ("moe.shared_intermediate_size", shared or 0, "tensor", tp),
            ]
        elif self.expert > 1:
            wrong.append(f"expert = {self.expert}: the model has 0 experts")
        if groups % tp and tp % groups:
            wrong.append(
                f"num_key_value_heads {groups}: neither a multiple nor a divisor of "
                f"tensor parallel {tp}"
            )
        return wrong + [
            f"{name} {size} is not a multiple of {kind} parallel {ranks}"
            for name, size, kind, ranks in whole
            if size % ranks
        ]

    def _impossible(self) -> list[str]:
        wrong = [
            f"{field.name} = {value!r}: not a positive integer"
            for field in dataclasses.fields(self)
            if field.name != "sequence"
            if (value := getattr(self, field.name)) is not None
            if type(value) is not int or value < 1
        ]
        if self.sequence and self.tensor == 1:
            wrong.append("sequence = True: needs tensor above 1")
        if self.virtual_pipeline and self.virtual_pipeline > 1 and self.pipeline == 1:
            wrong.append(
                f"virtual_pipeline = {self.virtual_pipeline}: needs pipeline above 1"
            )
        return wrong
