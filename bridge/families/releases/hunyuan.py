"""HunYuan-A13B with code of its own, whose fields may be lists by layer.

Source: tencent/Hunyuan-A13B-Instruct `configuration_hunyuan.py`, `hunyuan.py`.
"""

import dataclasses
from typing import Any

from bridge.families import hunyuan_v1_moe
from bridge.families._family import REQUIRED, Field
from bridge.families.releases._read import (
    Fields,
    one_for_all,
    reads,
    said,
    without,
)

_BY_LAYER = {"moe_topk": 1, "num_shared_expert": 1, "moe_intermediate_size": None}


def _read_by_layer(fields: Fields) -> dict[str, Any]:
    given = {name: one_for_all(name, fields[name]) for name in _BY_LAYER}
    width, own = fields["intermediate_size"], given["moe_intermediate_size"]
    if given["num_shared_expert"] != 1 or own not in (None, width):
        raise ValueError(
            f"intermediate_size = {width}, moe_intermediate_size = {own}, "
            f"num_shared_expert = {given['num_shared_expert']}: experts, and one that "
            "is shared, have one width in the family"
        )
    return {"moe.num_experts_per_tok": given["moe_topk"]}


FAMILY = dataclasses.replace(
    hunyuan_v1_moe.FAMILY,
    model_type="hunyuan",
    also_architectures=("HunYuanForCausalLM",),
    written_as=hunyuan_v1_moe.FAMILY.model_type,
    fields={
        **without(hunyuan_v1_moe.FAMILY.fields, "moe_topk"),
        "head_dim": Field(REQUIRED, aliases=("attention_head_dim",)),
    },
    transforms=(
        *hunyuan_v1_moe.FAMILY.transforms,
        reads(_read_by_layer, _BY_LAYER),
        said(use_mixed_mlp_moe=True, use_qk_norm=True),
    ),
    fixed={
        **hunyuan_v1_moe.FAMILY.fixed,
        "group_limited_greedy": False,
        "mlp_bias": False,
        "moe_drop_tokens": False,
        "moe_layer_num_skipped": 0,
        "norm_topk_prob": True,
        "norm_type": "rms",
        "position_embedding_xdrope": False,
        "routed_scaling_factor": 1.0,
        "use_cla": False,
        "use_mla": False,
        "use_rotary_pos_emb": True,
    },
    # Of images, of the tokenizer, of a head of classes, of what the above switch off.
    unread=frozenset(
        """
        add_classification_head anyres_pooling_size anyres_vit_max_image_size
        anyres_vit_two_views capacity_factor cla_share_factor class_num dense_list
        im_end_id im_newline_id im_start_id image_token_id kv_lora_rank mask_init_id
        moe_random_routing_dropped_token n_group num_media_embeds org_vocab_size pad_id
        pool_type q_lora_rank
        qk_nope_head_dim qk_rope_head_dim skip_cls_token text_end_id text_start_id
        topk_group v_head_dim video_end_id video_start_id vit_add_patchemb_bias
        vit_input_resolution vit_mapping_type vit_norm_type vit_patch vit_path
        vit_remove_prenorm vit_token vit_type vit_used_rms_norm xdrope_section
        """.split()
    ),
    key_mappings=hunyuan_v1_moe.FAMILY.key_mappings,
)
