"""IQuest-Coder: Llama by another name.

Source: transformers `configuration_iquestcoder.py`, `modeling_iquestcoder.py`.
"""

import dataclasses

from bridge.families import llama
from bridge.families._family import Field

FAMILY = dataclasses.replace(
    llama.FAMILY,
    model_type="iquestcoder",
    architecture="IQuestCoderForCausalLM",
    also_named=(),
    also_architectures=("LlamaForCausalLM",),  # what transformers makes of it
    fields={
        **llama.FAMILY.fields,
        "num_key_value_heads": Field(8),
        "head_dim": Field(128),
        "max_position_embeddings": Field(131072),
        "rms_norm_eps": Field(1e-5, "norm_eps"),
    },
    # Of the code that the releases name; transformers refuses other values too.
    inert={"clip_qkv": None, "use_sliding_window": False, "sliding_window": None},
)
