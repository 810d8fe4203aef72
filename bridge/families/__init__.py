"""The families that can be imported and exported, by their `model_type`."""

from types import MappingProxyType

from bridge.families import (
    cohere,
    deepseek_v2,
    deepseek_v3,
    gemma2,
    gemma3,
    glm4,
    gpt2,
    gpt_oss,
    granite,
    llama,
    mistral,
    mixtral,
    olmo2,
    olmo3,
    olmoe,
    phi3,
    qwen2,
    qwen2_moe,
    qwen3,
    qwen3_moe,
    smollm3,
)
from bridge.families._family import Family

_MODULES = (
    *(llama, mistral, qwen2, qwen3, gemma2, gemma3, phi3, gpt2, olmo2, olmo3),
    *(smollm3, granite, cohere, glm4, qwen2_moe, olmoe, qwen3_moe, mixtral, gpt_oss),
    *(deepseek_v2, deepseek_v3),
)

FAMILIES = MappingProxyType[str, Family](
    {module.FAMILY.model_type: module.FAMILY for module in _MODULES}
)
