"""Parts shared by ERNIE 4.5 with and without experts."""

from bridge.families._family import Field
from bridge.families._fields import SIZES, tokens
from bridge.families._hf_rope import rope

FIELDS = {
    **SIZES,
    **tokens(1, 2, 0),
    "max_position_embeddings": Field(131072),
    "tie_word_embeddings": Field(True),
    "rms_norm_eps": Field(1e-5, "norm_eps"),
}
ROPE = rope(500000.0, interleaved=True)
FIXED = {"hidden_act": "silu"}
