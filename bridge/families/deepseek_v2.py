"""DeepSeek-V2 and V2-Lite.

Source: transformers `configuration_deepseek_v2.py`, `modeling_deepseek_v2.py`.
"""

from bridge.families import _deepseek
from bridge.families._blocks import ignore_tied_head, latent_attention
from bridge.families._family import Family, Field
from bridge.families._field_transform import FieldTransform
from bridge.families._fields import moe
from bridge.families._hf_rope import rope
from bridge.families._layer_types import first_dense
from bridge.families._sparse import key_mappings
from bridge.models import DecoderConfig

_METHODS = ("greedy", "group_limited_greedy")
_GROUPS = {"topk_method": "greedy", "n_group": None, "topk_group": None}


def _read_groups(fields):
    method = fields["topk_method"]
    if method not in _METHODS:
        raise ValueError(f"topk_method = {method!r}: only {_METHODS} are modelled")
    if method == "greedy":  # it reads no groups
        return {"moe.n_group": None, "moe.topk_group": None}
    groups = {name: fields[name] for name in ("n_group", "topk_group")}
    if None in groups.values():
        raise ValueError(f"topk_method = {method!r} needs n_group and topk_group")
    return {f"moe.{name}": value for name, value in groups.items()}


def _write_groups(config: DecoderConfig):
    assert config.moe is not None
    method = _METHODS[config.moe.n_group is not None]
    groups = {"n_group": config.moe.n_group, "topk_group": config.moe.topk_group}
    return {"topk_method": method, **groups}


FAMILY = Family(
    model_type="deepseek_v2",
    architecture="DeepseekV2ForCausalLM",
    fields={
        **_deepseek.FIELDS,
        **moe(
            num_experts=("n_routed_experts", 64),
            num_experts_per_tok=("num_experts_per_tok", None),
            intermediate_size=("moe_intermediate_size", 1407),
            routed_scaling_factor=("routed_scaling_factor", 1.0),
        ),
        "max_position_embeddings": Field(2048),
        "mlp_bias": Field(False),
    },
    transforms=(
        rope(interleaved=True),
        first_dense(0),
        _deepseek.shared_experts(2),
        _deepseek.DERIVED_SIZES,
        FieldTransform(tuple(_GROUPS), _read_groups, _write_groups, _GROUPS),
    ),
    constants={"moe.float32_logits": True},
    # transformers reads no `norm_topk_prob` of this family.
    fixed={**_deepseek.FIXED, "norm_topk_prob": False, "scoring_func": "softmax"},
    passthrough=_deepseek.PASSTHROUGH,
    key_mappings=key_mappings(latent_attention, _deepseek.shared),
    ignore=ignore_tied_head,
)
