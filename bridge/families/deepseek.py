"""DeepSeek-MoE: Llama with experts scored by a softmax, and experts that all share.

Its code came with its weights, and transformers has no class for it: an export is for
that code, and for libraries that have their own.

Source: DeepSeek-MoE (arXiv:2401.06066); the fields of `deepseek-moe-16b-base`.
"""

from bridge.families import _deepseek
from bridge.families._blocks import ignore_tied_head
from bridge.families._family import Family, Field
from bridge.families._fields import SIZES, attention_bias, moe, tokens
from bridge.families._hf_rope import rope
from bridge.families._layer_types import first_dense
from bridge.families._sparse import key_mappings

FAMILY = Family(
    model_type="deepseek",
    architecture="DeepseekForCausalLM",
    fields={
        **{name: field for name, field in SIZES.items() if name != "head_dim"},
        **tokens(100000, 100001),
        **attention_bias(),
        **moe(
            num_experts=("n_routed_experts", None),
            num_experts_per_tok=("num_experts_per_tok", None),
            intermediate_size=("moe_intermediate_size", 1407),
            norm_topk_prob=("norm_topk_prob", False),
        ),
        "max_position_embeddings": Field(2048),
        "rms_norm_eps": Field(1e-6, "norm_eps"),
    },
    transforms=(
        rope(types=("default", "linear", "dynamic")),
        first_dense(0),
        _deepseek.shared_experts(None),
    ),
    constants={"moe.rounded_weights": True},
    fixed={
        "hidden_act": "silu",
        "attention_dropout": 0.0,
        "moe_layer_freq": 1,
        "scoring_func": "softmax",
    },
    passthrough={"aux_loss_alpha": 0.001, "seq_aux": True, "pretraining_tp": 1},
    key_mappings=key_mappings(beside=_deepseek.shared)[:1],
    ignore=ignore_tied_head,
)
