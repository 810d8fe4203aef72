"""Parameter order: the order in which Megatron's modules register parameters.

Megatron fills its buffers in this order and does not record it on disk.

Source: Megatron-LM megatron/core/transformer/transformer_layer.py::TransformerLayer,
megatron/core/transformer/attention.py::SelfAttention, megatron/core/transformer/
multi_latent_attention.py::MLASelfAttention, megatron/core/transformer/moe/
moe_layer.py::MoELayer; TransformerEngine's LayerNormLinear, which registers its norm
first
"""

# Only siblings are compared with each other, so one list suffices for all modules.
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
    """Returns whether a tensor is trained; a router's balancing bias is not."""
    return not name.endswith(".expert_bias")


def order_in_module(name: str) -> tuple[tuple[int, int], ...]:
    """Returns a sort key that puts parameters in registration order.

    Args:
      name: Dotted path of the parameter in the module, as `in_module` returns it.

    Returns:
      One pair per component of the path: its rank among sibling names, and its number
      (0 if it has none).

    Raises:
      ValueError: If a component of the path is unknown.
    """
    return tuple(map(_order_of, name.split(".")))


def _order_of(part: str) -> tuple[int, int]:
    if part in _ORDER:
        return _ORDER[part], 0
    if part.isdigit():
        return 0, int(part)
    name = part.rstrip("0123456789")  # grouped experts: weight0, weight1
    if name in _ORDER and name != part:
        return _ORDER[name], int(part.removeprefix(name))
    raise ValueError(f"where '{part}' comes among its siblings is not known")
