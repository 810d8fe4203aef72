"""The families that can be imported and exported, by their `model_type`.

How to write one is in `docs/pages/how-to/add-a-model-family.md`.
"""

import dataclasses
from types import MappingProxyType

from bridge.families import (
    afmoe,
    apertus,
    arcee,
    aria,
    axk2,
    bailing_hybrid,
    bamba,
    biogpt,
    bitnet,
    bloom,
    codegen,
    cohere,
    cohere2,
    cohere2_moe,
    cohere_compass,
    cwm,
    dbrx,
    deepseek,
    deepseek_v2,
    deepseek_v3,
    deepseek_v4,
    deepseek_v32,
    diffllama,
    doge,
    dots1,
    ernie4_5,
    ernie4_5_moe,
    exaone,
    exaone4,
    exaone_moe,
    falcon,
    falcon_h1,
    falcon_mamba,
    flex_olmo,
    flint,
    gemma,
    gemma2,
    gemma3,
    gemma3n,
    gemma4,
    glm,
    glm4,
    glm4_moe,
    glm4_moe_lite,
    glm_moe_dsa,
    gpt2,
    gpt_bigcode,
    gpt_neo,
    gpt_neox,
    gpt_oss,
    gptj,
    granite,
    granite_swa,
    granitemoe,
    granitemoe_swa,
    granitemoehybrid,
    granitemoeshared,
    helium,
    hunyuan_v1_dense,
    hunyuan_v1_moe,
    hy_v3,
    hy_v4,
    hyperclovax,
    internlm3,
    iquestcoder,
    jais2,
    jamba,
    jetmoe,
    kimi_linear,
    kolibri1,
    laguna,
    lara_mini,
    lfm2,
    lfm2_moe,
    lfm3,
    llama,
    llama4,
    longcat_flash,
    mamba,
    mamba2,
    mellum,
    mimo_v2_flash,
    minicpm3,
    minimax,
    minimax_m2,
    minimax_m3_vl,
    ministral,
    ministral3,
    mistral,
    mistral4,
    mixtral,
    mllama_text_model,
    modernbert_decoder,
    mpt,
    nanochat,
    nemotron,
    nemotron_h,
    nemotron_nas,
    olmo,
    olmo2,
    olmo3,
    olmo_hybrid,
    olmoe,
    openai_gpt,
    opt,
    persimmon,
    phi,
    phi3,
    phimoe,
    qwen2,
    qwen2_moe,
    qwen3,
    qwen3_5,
    qwen3_5_moe,
    qwen3_moe,
    qwen3_next,
    recurrent_gemma,
    sarvam_mla,
    sarvam_moe,
    seed_oss,
    smollm3,
    solar_open,
    stablelm,
    starcoder2,
    vaultgemma,
    xglm,
    youtu,
    zamba,
    zamba2,
)
from bridge.families._family import Family
from bridge.families.releases import RELEASES

# Dense models, mixtures of experts, and models with layers that keep a state, each
# roughly in the order they were added. No code depends on it: new ones go anywhere.
_MODULES = (
    *(llama, mistral, qwen2, qwen3, gemma, gemma2, gemma3, phi, phi3, gpt2, gptj, opt),
    *(olmo, olmo2, olmo3, smollm3, granite, cohere, cohere2, glm, glm4, exaone4),
    *(gpt_bigcode, gpt_neox, falcon, bloom, mpt, apertus, phimoe, llama4),
    *(starcoder2, stablelm, seed_oss, ernie4_5, arcee, nemotron, internlm3),
    *(hunyuan_v1_dense, qwen2_moe, olmoe, qwen3_moe, mixtral, gpt_oss, granitemoe),
    *(granitemoeshared, deepseek_v2, deepseek_v3, glm4_moe, ernie4_5_moe, minimax_m2),
    minimax_m3_vl,
    *(hunyuan_v1_moe, dots1, glm4_moe_lite, ministral3),
    *(deepseek_v32, glm_moe_dsa, gemma4, gemma3n, lfm2_moe),
    *(lfm2, qwen3_next, qwen3_5, qwen3_5_moe, granitemoehybrid),
    *(nemotron_h, falcon_h1, mamba, mamba2, jamba, minicpm3),
    *(ministral, helium, cwm, vaultgemma, youtu, exaone, hyperclovax, iquestcoder),
    *(jais2, granite_swa, granitemoe_swa, solar_open, sarvam_moe, sarvam_mla, mellum),
    *(exaone_moe, flex_olmo, hy_v3, afmoe, bamba, nanochat, gpt_neo, falcon_mamba),
    *(codegen, dbrx, flint, kolibri1, deepseek, lfm3, nemotron_nas),
    *(deepseek_v4, longcat_flash, mimo_v2_flash, minimax, kimi_linear, cohere2_moe),
    *(olmo_hybrid, recurrent_gemma, diffllama, doge, persimmon, xglm, biogpt),
    *(aria, bitnet, modernbert_decoder, mistral4, cohere_compass),
    *(lara_mini, bailing_hybrid, laguna, zamba2, mllama_text_model, hy_v4, axk2),
    *(zamba, jetmoe, openai_gpt),
)


def _with_names_of_releases(family: Family) -> Family:
    """Adds the ways in which releases of the same model name their tensors."""
    ways = {
        way: None
        for table in (family, *RELEASES.values())
        if family.model_type in (table.model_type, table.written_as)
        for way in table.key_mappings
    }
    return dataclasses.replace(family, key_mappings=tuple(ways))


FAMILIES = MappingProxyType[str, Family](
    {
        module.FAMILY.model_type: _with_names_of_releases(module.FAMILY)
        for module in _MODULES
    }
)
"""Families by the `model_type` that an export writes."""

NAMES = MappingProxyType[str, str](
    {
        name: family.model_type
        for family in FAMILIES.values()
        for name in (family.model_type, *family.also_named)
    }
)
"""Key of `FAMILIES` by each `model_type` that a config file may say."""
