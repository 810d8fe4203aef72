"""Commands say which attention kernel a layer gets, and refuse one that cannot run."""

from __future__ import annotations

import dataclasses

import pytest
from helpers.errors import facts
from tiny_configs import hf_fields

import bridge
import fsdp_jax as fsdp
from bridge.models import Accelerator, DecoderConfig
from fsdp_jax.cli._attention_table import (
    AttentionSettings,
    attention_choices,
    choice_table,
)
from fsdp_jax.cli._context_parallel import DOCUMENT_SEQUENCES
from fsdp_jax.cli._decoder import computed_in, plan_decoder
from fsdp_jax.cli._subprocess import Outcome
from fsdp_jax.cli.commands._doctor import _attention
from fsdp_jax.planner import GPUS, gpu_devices

H100 = Accelerator("NVIDIA H100 80GB HBM3", (9, 0))
CONFIG = DecoderConfig(
    vocab_size=64,
    hidden_size=64,
    intermediate_size=64,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
)
SLIDING = dataclasses.replace(
    CONFIG,
    sliding_window=8,
    layer_types=("sliding_attention", "full_attention") * 2,
)


def test_each_kind_of_layer_has_its_kernel_and_why():
    settings = AttentionSettings(H100, "bfloat16")
    (plain,) = attention_choices(CONFIG, settings).values()
    assert plain.kernel == "cudnn"
    mixed = attention_choices(SLIDING, settings)
    assert list(mixed) == ["2 x window of 8", "2 x full attention"]
    assert {one.kernel for one in mixed.values()} == {"flash"}
    packed = dataclasses.replace(settings, packed=True)
    table = choice_table(attention_choices(CONFIG, packed))
    assert "flash" in table and "[seq, seq]" in table


def test_attention_beside_another_mixer_has_a_kernel_too():
    settings = AttentionSettings(H100, "bfloat16")
    config = bridge.from_hf_config(hf_fields("falcon_h1", head_dim=64))
    assert list(attention_choices(config, settings)) == ["2 x full attention"]
    alone = bridge.from_hf_config(hf_fields("mamba2"))
    assert choice_table(attention_choices(alone, settings)) == "attention: in no layer"


@pytest.mark.parametrize(
    ("family", "rows"),
    [
        ("minimax_m3", {"1 x full attention": "", "2 x full attention, keys": "8"}),
        ("deepseek_v32", {"3 x full attention, keys": "tokens"}),
        ("deepseek_v4", {"1 x window": "", "entries": "exist at once"}),
    ],
)
def test_layers_that_mask_their_scores_say_so(family, rows):
    settings = AttentionSettings(H100, "bfloat16")
    config = bridge.from_hf_config(hf_fields(family))
    table = choice_table(attention_choices(config, settings)).splitlines()
    for name, reason in rows.items():
        assert any(name in line and reason in line for line in table), table


def test_a_kernel_that_the_devices_cannot_run_is_refused_by_the_plan():
    with pytest.raises(ValueError, match=facts("cudnn", "cpu")):
        plan_decoder(CONFIG, fsdp.make_mesh(), attention="cudnn")


@pytest.mark.plan
def test_a_plan_for_packed_documents_refuses_a_kernel_without_segments():
    mesh = fsdp.make_mesh(devices=gpu_devices(GPUS["h100"], 8))
    bf16 = computed_in("bfloat16")
    plan_decoder(CONFIG, mesh, bf16, attention="cudnn")
    with pytest.raises(ValueError, match=facts("cudnn", "[seq, seq]")):
        documents = DOCUMENT_SEQUENCES
        plan_decoder(CONFIG, mesh, bf16, attention="cudnn", sequences=documents)


def test_doctor_has_a_table_for_a_gpu_and_none_for_cpus():
    told = {"kind": H100.kind, "capability": [9, 0], "cudnn": 91000}
    choices = _attention(Outcome({"accelerator": told}))
    kernels = {name: one.kernel for name, one in choices.items()}
    assert kernels["heads of 256"] == "cudnn"
    assert kernels["softcap"] == kernels["packed documents"] == "flash"
    assert _attention(Outcome({"platform": "cpu"})) == {}
