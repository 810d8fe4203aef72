"""Loads with Megatron-Core the runs that `bridge` writes, continues them, and records.

Each run of `megatron_continued` is written in each of its formats. Megatron's own model
and optimizer load it, with `dist_checkpointing` or from legacy files, and take two
steps more. Losses are recorded, and of each tensor's change the norm and a product with
a fixed vector. One process on a CPU, the local layer spec, float32.

    pip download --no-deps megatron-core==0.16.1 && unzip megatron_core-*.whl -d mcore
    PYTHONPATH=.:tests:tests/bridge:tests/golden:mcore python \
        tests/golden/write_megatron_continued.py
"""

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
)
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron_continued import FORMATS, NUM_STEPS, VARIANTS, digest, write
from megatron_steps import summary
from megatron_variants import exact_tokens, twin_config
from write_megatron_logits import make_config, make_spec, prepare
from write_megatron_steps import loss_of, put_on_cpu

from bridge.megatron import to_gpt_model, to_transformer_config

OUT = Path(__file__).with_name("megatron_continued.json")


def name_types_of_gpus() -> None:
    """Names tensors as on a GPU, which the distributed optimizer tells them by."""
    kind = torch.Tensor.type

    def named(self, *args, **kwargs):
        found = kind(self, *args, **kwargs)
        is_name = isinstance(found, str)
        return found.replace("torch.", "torch.cuda.") if is_name else found

    torch.Tensor.type = named


def count_steps_as_torch_does() -> None:
    """Gives each parameter the step count that `load_state_dict` has read.

    Megatron loads shards of an Adam that counts in its groups, as TransformerEngine's;
    torch's, which a CPU has, counts for each parameter.
    """
    fill = DistributedOptimizer._set_main_param_and_optimizer_states

    def filled(self, model_param, tensors):
        group, order = self.model_param_group_index_map[model_param]
        state = self.optimizer.state[
            self.optimizer.param_groups[group]["params"][order]
        ]
        state["step"] = state["step"].clone()
        fill(self, model_param, {**tensors, "step": state["step"]})

    DistributedOptimizer._set_main_param_and_optimizer_states = filled


def make_run(variant: str, optimizer_format: str) -> tuple[Any, Any]:
    """Megatron's model, wrapped, and its optimizer, with other weights than ours."""
    config = twin_config(variant)
    theirs = make_config(to_transformer_config(config))
    theirs.moe_aux_loss_coeff = 0  # the loss is that of the tokens alone
    arguments = to_gpt_model(config, make_vocab_size_divisible_by=1)
    model = GPTModel(theirs, make_spec(theirs), **arguments)
    is_distributed = optimizer_format != "plain"
    ddp = DistributedDataParallelConfig(
        overlap_grad_reduce=False, use_distributed_optimizer=is_distributed
    )
    model = DistributedDataParallel(theirs, ddp, model)
    settings = OptimizerConfig(
        optimizer="adam",
        lr=0.123,  # the checkpoint's groups replace this and what else is not given
        use_distributed_optimizer=is_distributed,
        clip_grad=0.0,  # its clipping asserts that gradients are on a GPU
    )
    optimizer = get_megatron_optimizer(settings, [model])
    for each in optimizer.chained_optimizers if is_distributed else ():
        each._init_optimizer_states_with_dummy_values()  # torch's AdamW has none yet
    return model, optimizer


def load_torch_dist(path: Path, model: Any, optimizer: Any, form: str) -> None:
    metadata = {"distrib_optim_sharding_type": form} if form != "plain" else {}
    metadata["chained_optim_avoid_prefix"] = True
    ours = model.module.sharded_state_dict(metadata=metadata)
    wanted = {
        "model": ours,
        "optimizer": optimizer.sharded_state_dict(
            ours, is_loading=True, metadata=metadata
        ),
    }
    found, missing, extra = dist_checkpointing.load(
        wanted, str(path), strict="return_all"
    )
    # Of TransformerEngine's layers, which no local layer is.
    assert not missing, missing
    assert all(key.endswith("_extra_state") for key in extra), extra
    model.module.load_state_dict(found["model"])
    optimizer.load_state_dict(found["optimizer"])


def load_legacy(path: Path, model: Any, optimizer: Any, form: str) -> None:
    rank = path / "mp_rank_00"
    found = torch.load(rank / "model_optim_rng.pt", weights_only=True)
    missing = model.module.load_state_dict(found["model"], strict=False)
    assert not missing.unexpected_keys, missing
    assert all("_extra_state" in key for key in missing.missing_keys), missing
    optimizer.load_state_dict(found["optimizer"])
    if form == "distributed":
        optimizer.load_parameter_state(str(rank / "distrib_optim.pt"))


def record(variant: str, format: str, path: Path) -> dict[str, Any]:
    config, options = twin_config(variant), FORMATS[format]
    write(path, config, format)
    form = options["optimizer_format"]
    model, optimizer = make_run(variant, form)
    (directory,) = (each for each in path.iterdir() if each.is_dir())
    load = load_legacy if options.get("format") == "legacy" else load_torch_dist
    with torch.no_grad():  # shards of float32 are views of the model's parameters
        load(directory, model, optimizer, form)
    for group in optimizer.param_groups:  # as Megatron's schedule does at each step
        group["lr"] = group["max_lr"]
        group["weight_decay"] = group["weight_decay"] * group["wd_mult"]
    params = dict(model.module.named_parameters())
    before = {name: param.detach().numpy().copy() for name, param in params.items()}
    tokens, losses = torch.from_numpy(exact_tokens(config)), []
    for _ in range(NUM_STEPS + 1):
        model.zero_grad_buffer()
        optimizer.zero_grad()
        loss = loss_of(model, tokens)
        losses.append(float(f"{loss.item():.9g}"))
        if len(losses) <= NUM_STEPS:
            loss.backward()
            model.finish_grad_sync()
            updated, *_ = optimizer.step()
            assert updated
    changes = {
        name: summary(param.detach().numpy() - before[name])
        for name, param in params.items()
    }
    return {"sha256": digest(path), "losses": losses, "changes": changes}


if __name__ == "__main__":
    prepare()
    put_on_cpu()
    name_types_of_gpus()
    count_steps_as_torch_does()
    torch.serialization.add_safe_globals([argparse.Namespace])
    with tempfile.TemporaryDirectory() as directory:
        golden = {
            variant: {
                format: record(variant, format, Path(directory) / variant / format)
                for format in FORMATS
            }
            for variant in VARIANTS
        }
    OUT.write_text(json.dumps(golden, indent=0) + "\n")
