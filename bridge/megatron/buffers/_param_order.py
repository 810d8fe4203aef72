"""The order of a model's parameters: what Megatron's modules register, one by one.

Its buffers are filled in that order, and nothing on disk says it.

Source: Megatron-LM megatron/core/transformer/transformer_layer.py::TransformerLayer,
megatron/core/transformer/attention.py::SelfAttention, megatron/core/transformer/
multi_latent_attention.py::MLASelfAttention, megatron/core/transformer/moe/
moe_layer.py::MoELayer; TransformerEngine's LayerNormLinear, whose norm comes first
"""

# Siblings are compared with each other alone, so one list will do for all modules.
_ORDER = {
    name: number
    for number, name in enumerate(
        """
        embedding word_embeddings position_embeddings
        decoder layers final_layernorm output_layer
        input_layernorm self_attention pre_mlp_layernorm mlp
        router experts local_experts shared_experts gate_weight
        core_attention softmax_offset linear_proj linear_qkv
        linear_q_proj linear_q_down_proj linear_q_up_proj
        linear_kv_down_proj linear_kv_up_proj q_layernorm k_layernorm kv_layernorm
        linear_fc1 linear_fc2 layer_norm_weight layer_norm_bias weight bias
        """.split()
    )
}


def is_parameter(name: str) -> bool:
    """Says whether a tensor is trained: a router's balancing bias is not."""
    return not name.endswith(".expert_bias")


def order_in_module(name: str) -> tuple[tuple[int, int], ...]:
    """Returns what sorts parameters as their modules register them.

    Args:
      name: The name in the module, as `in_module` spells it.

    Raises:
      ValueError: If a part of the name is not known.
    """
    return tuple(map(_order_of, name.split(".")))


def _order_of(part: str) -> tuple[int, int]:
    if part in _ORDER:
        return _ORDER[part], 0
    if part.isdigit():
        return 0, int(part)
    name = part.rstrip("0123456789")  # of grouped experts: weight0, weight1
    if name in _ORDER and name != part:
        return _ORDER[name], int(part.removeprefix(name))
    raise ValueError(f"where '{part}' comes among its siblings is not known")
