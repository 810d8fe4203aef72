"""Config of multi-head latent attention."""

import dataclasses

from bridge.models._checks import raise_if, wrong_fields, wrong_sizes


@dataclasses.dataclass(frozen=True)
class MLAConfig:
    """Sizes of latent attention, which projects keys and values from a latent vector.

    Args:
      kv_lora_rank: Width of the latent vector of keys and values.
      qk_nope_head_dim: Number of dims of a query or key head without rotation.
      qk_rope_head_dim: Number of rotated dims; those of the key are shared by all
        heads.
      v_head_dim: Width of a value head.
      q_lora_rank: Width of the latent vector of queries; None to project queries from
        the hidden state.

    Raises:
      ValueError: If a size is not a positive integer, or `qk_rope_head_dim` is odd.

    Source: DeepSeek-V2, https://arxiv.org/abs/2405.04434, section 2.1.
    """

    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    q_lora_rank: int | None = None

    def __post_init__(self):
        """Validates the sizes."""
        names = tuple(field.name for field in dataclasses.fields(self))
        wrong = wrong_fields(self) or wrong_sizes(self, names)
        if not wrong and self.qk_rope_head_dim % 2:
            wrong = [
                f"qk_rope_head_dim {self.qk_rope_head_dim} is odd, but rotary "
                "embedding rotates pairs"
            ]
        raise_if("MLAConfig", wrong)

    @property
    def qk_head_dim(self) -> int:
        """Width of a query or key head."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim
