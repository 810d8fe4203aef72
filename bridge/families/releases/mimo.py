"""MiMo 7B: Qwen2 with a layer that predicts a further token, which is left out.

Source: XiaomiMiMo/MiMo-7B-Base `configuration_mimo.py`, `modeling_mimo.py`.
"""

import dataclasses

from bridge.families import qwen2

FAMILY = dataclasses.replace(
    qwen2.FAMILY,
    model_type="mimo",
    architecture="MiMoForCausalLM",
    also_architectures=(),
    also_named=(),
    written_as=qwen2.FAMILY.model_type,
    # Qwen2's attention has biases always, whatever the field says.
    inert={"attention_bias": True, "use_mrope": False},
    unread=frozenset({"num_nextn_predict_layers"}),
)
