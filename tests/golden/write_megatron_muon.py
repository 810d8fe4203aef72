"""Trains with Megatron-Core's Muon what `bridge` exports, and records the steps.

A dense model of `megatron_variants`: Megatron's own `GPTModel` and backward, its
`TensorParallelMuon` with split queries, keys and values, and its Adam for all else take
three steps on one batch. The orthogonalization is NVIDIA's Emerging-Optimizers, in
float32. Losses are recorded, and of each tensor's change the norm and a product with a
fixed vector, and which tensors Muon updates. One process on a CPU, the local layer
spec, float32.

    pip download --no-deps megatron-core==0.16.1 && unzip megatron_core-*.whl -d mcore
    git clone https://github.com/NVIDIA-NeMo/Emerging-Optimizers muon
    git -C muon checkout v0.1.0
    PYTHONPATH=.:tests:tests/bridge:tests/golden:mcore:muon python \
        tests/golden/write_megatron_muon.py
"""

import json
import typing
from pathlib import Path
from typing import Any

import torch
import typing_extensions

if not hasattr(typing, "override"):  # Python 3.11, before Megatron looks for it
    typing.override = typing_extensions.override
from megatron.core.optimizer import OptimizerConfig
from megatron.core.optimizer.muon import (
    TensorParallelMuon,
    get_megatron_muon_optimizer,
)
from megatron_steps import ADAM, MUON, MUON_VARIANT, NUM_STEPS, summary
from megatron_variants import exact_tokens, twin_config
from write_megatron_logits import prepare
from write_megatron_steps import loss_of, make_model, put_on_cpu

OUT = Path(__file__).with_name("megatron_muon.json")


def record() -> dict[str, Any]:
    model, names = make_model(MUON_VARIANT)
    settings = OptimizerConfig(
        optimizer="muon",
        lr=ADAM["learning_rate"],
        adam_beta1=ADAM["b1"],
        adam_beta2=ADAM["b2"],
        adam_eps=ADAM["eps"],
        weight_decay=0.0,
        clip_grad=0.0,  # its clipping asserts that gradients are on a GPU
        muon_momentum=MUON["momentum"],
        muon_use_nesterov=MUON["nesterov"],
        muon_split_qkv=True,
        muon_scale_mode="spectral",
        muon_extra_scale_factor=MUON["scale"],
        muon_fp32_matmul_prec="highest",
        muon_tp_mode="duplicated",
    )
    optimizer = get_megatron_muon_optimizer(settings, [model])
    params = dict(model.module.named_parameters())
    trained = {key: params[name] for key, name in names.items() if name in params}
    by_muon = {
        id(param)
        for each in optimizer.chained_optimizers
        if isinstance(each.optimizer, TensorParallelMuon)
        for group in each.optimizer.param_groups
        for param in group["params"]
    }
    before = {key: param.detach().numpy().copy() for key, param in trained.items()}
    tokens, losses = torch.from_numpy(exact_tokens(twin_config(MUON_VARIANT))), []
    for _ in range(NUM_STEPS):
        model.zero_grad_buffer()
        optimizer.zero_grad()
        loss = loss_of(model, tokens)
        loss.backward()
        model.finish_grad_sync()
        updated, *_ = optimizer.step()
        assert updated
        losses.append(float(f"{loss.item():.9g}"))
    changes = {
        key: summary(param.detach().numpy() - before[key])
        for key, param in trained.items()
    }
    matrices = sorted(key for key, param in trained.items() if id(param) in by_muon)
    return {"losses": losses, "matrices": matrices, "changes": changes}


if __name__ == "__main__":
    prepare()
    put_on_cpu()
    OUT.write_text(json.dumps(record(), indent=0) + "\n")
