"""Trains with Megatron-Core what `bridge` exports, and records losses and gradients.

A dense model, one with experts and one with latent attention, each of
`megatron_variants`: Megatron's own `GPTModel` in its own `DistributedDataParallel`,
its own optimizer (AdamW) and its own backward take three steps on
one batch. Of each tensor's first gradient, and of its change after the last step, the
norm and a product with a fixed vector are recorded. One process on a CPU, the local
layer spec, float32.

    pip download --no-deps megatron-core==0.16.1 && unzip megatron_core-*.whl -d mcore
    PYTHONPATH=.:tests:tests/bridge:tests/golden:mcore python \
        tests/golden/write_megatron_steps.py
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
)
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron_steps import ADAM, NUM_STEPS, VARIANTS, summary
from megatron_variants import exact_params, exact_tokens, twin_config
from write_megatron_logits import make_config, make_spec, prepare

from bridge.megatron import megatron_tensors, to_gpt_model, to_transformer_config
from bridge.megatron._key_mapping import in_module

OUT = Path(__file__).with_name("megatron_steps.json")


def put_on_cpu() -> None:
    """Makes the tensors on a CPU that Megatron's optimizer asks a GPU for."""

    def on_cpu(make):
        def made(*args, **kwargs):
            if str(kwargs.get("device", "")).startswith("cuda"):
                kwargs["device"] = "cpu"
            return make(*args, **kwargs)

        return made

    for name in ("empty", "tensor", "zeros"):
        setattr(torch, name, on_cpu(getattr(torch, name)))
    torch.Tensor.cuda = lambda self, *_, **__: self
    torch.cuda.synchronize = lambda *_: None


def make_model(variant: str) -> tuple[DistributedDataParallel, dict[str, str]]:
    """Returns a model with our weights, and its parameters' names by canonical name."""
    config = twin_config(variant)
    theirs = make_config(to_transformer_config(config))
    theirs.moe_aux_loss_coeff = 0  # the loss is that of the tokens alone
    theirs.attention_dropout = theirs.hidden_dropout = 0.0
    arguments = to_gpt_model(config, make_vocab_size_divisible_by=1)
    model = GPTModel(theirs, make_spec(theirs), **arguments)
    source = megatron_tensors(exact_params(config), config)
    local = {"transformer_impl": "local"}
    names = {key: in_module(key, source.keys(), local) for key in source.keys()}
    weights = {
        name: torch.from_numpy(np.ascontiguousarray(source.read(key)))
        for key, name in names.items()
    }
    found = model.load_state_dict(weights, strict=False)
    assert not found.unexpected_keys, found
    ddp = DistributedDataParallelConfig(overlap_grad_reduce=False)
    return DistributedDataParallel(theirs, ddp, model), names


def loss_of(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    inputs, labels = tokens[:, :-1], tokens[:, 1:]
    length = inputs.shape[1]
    positions = torch.arange(length).expand_as(inputs)
    ahead = torch.ones(1, 1, length, length, dtype=torch.bool).triu(1)
    logits = model(inputs, positions, ahead)
    return torch.nn.functional.cross_entropy(
        logits.reshape(-1, logits.shape[-1]).float(), labels.reshape(-1)
    )


def record(variant: str) -> dict[str, Any]:
    model, names = make_model(variant)
    settings = OptimizerConfig(
        optimizer="adam",
        lr=ADAM["learning_rate"],
        adam_beta1=ADAM["b1"],
        adam_beta2=ADAM["b2"],
        adam_eps=ADAM["eps"],
        weight_decay=ADAM["weight_decay"],
        clip_grad=0.0,  # its clipping asserts that gradients are on a GPU
    )
    optimizer = get_megatron_optimizer(settings, [model])
    rate, decay = ADAM["learning_rate"], ADAM["weight_decay"]
    OptimizerParamScheduler(  # sets each group's weight decay, by its `wd_mult`
        optimizer,
        init_lr=rate,
        max_lr=rate,
        min_lr=rate,
        lr_warmup_steps=0,
        lr_decay_steps=NUM_STEPS,
        lr_decay_style="constant",
        start_wd=decay,
        end_wd=decay,
        wd_incr_steps=NUM_STEPS,
        wd_incr_style="constant",
    )
    params = dict(model.module.named_parameters())
    trained = {key: params[name] for key, name in names.items() if name in params}
    before = {key: param.detach().numpy().copy() for key, param in trained.items()}
    tokens = torch.from_numpy(exact_tokens(twin_config(variant)))
    losses, grads = [], {}
    for _ in range(NUM_STEPS):
        model.zero_grad_buffer()
        optimizer.zero_grad()
        loss = loss_of(model, tokens)
        loss.backward()
        model.finish_grad_sync()
        if not grads:
            grads = {k: summary(p.main_grad.numpy()) for k, p in trained.items()}
        updated, *_ = optimizer.step()
        assert updated
        losses.append(float(f"{loss.item():.9g}"))
    changes = {
        key: summary(param.detach().numpy() - before[key])
        for key, param in trained.items()
    }
    return {"losses": losses, "grads": grads, "changes": changes}


if __name__ == "__main__":
    prepare()
    put_on_cpu()
    golden = {variant: record(variant) for variant in VARIANTS}
    OUT.write_text(json.dumps(golden, indent=0) + "\n")
