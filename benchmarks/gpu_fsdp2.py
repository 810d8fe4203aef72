"""The same Llama in PyTorch: transformers' model under FSDP2, compiled by layer.

As torchtitan does: each layer is compiled and sharded, and the loss is compiled.

    python benchmarks/gpu_fsdp2.py SIZES        a JSON object; JSON goes to stdout
"""

from __future__ import annotations

import json
import statistics
import sys
import time

import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import LlamaConfig, LlamaForCausalLM


def train(config, rows, seq, steps, recompute, compiled):
    """Seconds of steps, and the most bytes that torch took."""
    cuda = torch.cuda.is_available()
    device = "cuda" if cuda else "cpu"
    backend = "nccl" if cuda else "gloo"
    store = dist.HashStore()
    dist.init_process_group(backend, rank=0, world_size=1, store=store)
    torch.manual_seed(0)
    with torch.device(device):
        model = LlamaForCausalLM(
            LlamaConfig(**config, attn_implementation="sdpa", use_cache=False)
        )
    if recompute:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    model.train()
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16)
    for layer in model.model.layers:
        if compiled:
            layer.compile()
        fully_shard(layer, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    tx = torch.optim.AdamW(model.parameters(), lr=3e-4, weight_decay=0.1, fused=cuda)
    tokens = torch.randint(config["vocab_size"], (rows, seq + 1), device=device)

    def cross_entropy(logits, targets):
        logits = logits.flatten(0, 1).float()
        return torch.nn.functional.cross_entropy(logits, targets.flatten())

    loss_of = torch.compile(cross_entropy) if compiled else cross_entropy
    seconds, losses, started = [], [], time.perf_counter()
    for _ in range(3 + steps):
        logits = model(input_ids=tokens[:, :-1]).logits
        loss = loss_of(logits, tokens[:, 1:])
        del logits
        loss.backward()
        tx.step()
        tx.zero_grad()
        losses.append(float(loss.detach()))
        seconds.append(time.perf_counter() - started)
        started = time.perf_counter()
    dist.destroy_process_group()
    return {
        "median_step_s": statistics.median(seconds[3:]),
        "first_step_s": seconds[0],
        "steps_s": seconds[3:],
        "losses": losses,
        "peak_in_use": torch.cuda.max_memory_allocated() if cuda else None,
        "torch": torch.__version__,
    }


if __name__ == "__main__":
    sys.stdin.readline()  # It begins when the GPU is free.
    print(json.dumps(train(**json.loads(sys.argv[1]))))
