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
      scale_latents: Whether queries, and the normed latent vector of keys and values,
        are multiplied by the root of `hidden_size` over the rank they come from.
      gated_queries: Whether queries are projected from their latent vector, normed and
        not, together with a gate of each dim of the output of a head.

    Raises:
      ValueError: If a size is not a positive integer, or `qk_rope_head_dim` is odd.

    Source: DeepSeek-V2, https://arxiv.org/abs/2405.04434, section 2.1; LongCat-Flash,
      https://arxiv.org/abs/2509.01322, section 2.2, for `scale_latents`.
    """

    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    q_lora_rank: int | None = None
    scale_latents: bool = False
    gated_queries: bool = False

    def __post_init__(self):
        """Validates the sizes."""
        wrong = wrong_fields(self) or wrong_sizes(self, _SIZES)
        if not wrong and self.qk_rope_head_dim % 2:
            wrong = [
                f"qk_rope_head_dim {self.qk_rope_head_dim} is odd, but rotary "
                "embedding rotates pairs"
            ]
        if not wrong and self.gated_queries and self.q_lora_rank is None:
            wrong = ["gated_queries: q_lora_rank is None"]
        raise_if("MLAConfig", wrong)

    @property
    def qk_head_dim(self) -> int:
        """Width of a query or key head."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim


_SIZES = (
    "kv_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "v_head_dim",
    "q_lora_rank",
)
