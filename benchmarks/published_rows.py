"""Which program each row of `published_steps.csv` is, or why it is not built."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path

from published_models import REMAT_POLICIES, Program

HERE = Path(__file__).parent
ROWS = HERE / "published_steps.csv"
SCHEDULES = HERE / "schedules"
INDEX = SCHEDULES / "index.json"

Row = dict[str, str]

MODELS = {
    "Llama2-7B": "llama2-7b",
    "Llama2-13B": "llama2-13b",
    "Llama-34B": "llama2-34b",
    "Llama2-70B": "llama2-70b",
    "fuji-7B-v2 (Llama2)": "fuji-7b-v2",
    "fuji-70B-v2 (Llama2)": "fuji-70b-v2",
    "Llama3-8B": "llama3-8b",
    "Llama3.1-8B": "llama3-8b",
    "Llama3-70B": "llama3-70b",
    "Llama3.1-70B": "llama3-70b",
}
# Layers that are computed again. fms-fsdp names no number: its table of utilization for
# H100s has model FLOPs, and hardware FLOPs, which count a layer's forward pass again.
RECOMPUTED = {
    "Llama2-13B": round(40 * 3 * (0.46 / 0.43 - 1)),
    "Llama-34B": round(48 * 3 * (0.49 / 0.38 - 1)),
    "Llama2-70B": round(80 * 3 * (0.47 / 0.38 - 1)),
}
OTHER_AXES = ("PP", "EP")


def read_rows() -> list[Row]:
    """Returns the rows of the CSV, numbers as text."""
    with ROWS.open(newline="") as file:
        return list(csv.DictReader(file))


def read_index() -> dict[str, dict]:
    """Returns what is known of each schedule beside its steps, by program name."""
    return json.loads(INDEX.read_text()) if INDEX.exists() else {}


def reason_not_built(row: Row) -> str | None:
    """Returns why a row has no program; None if it has one."""
    if _model(row) is None:
        return f"no proxy model for {row['model']}"
    if any(axis in row["parallelism"] for axis in OTHER_AXES):
        return f"the proxy model has no {row['parallelism']}"
    if "async" in row["system"]:
        return "products that overlap with TP's collectives are not in XLA's program"
    if _remat(row) not in REMAT_POLICIES:
        return f"what is recomputed is not stated: '{row['remat']}'"
    return None if row["mbs"] else "the source does not state the batch"


def program_of(row: Row) -> Program:
    """Returns the program of a row that `reason_not_built` lets pass."""
    model = _model(row)
    assert model is not None
    grads = "float32" if "torchtitan" in row["system"] else "bfloat16"
    return Program(
        model=model,
        gpu=gpu_of(row),
        gpus=int(row["gpus"]),
        outer=_replicas(row),
        seq=int(row["seq"]),
        rows=int(row["mbs"]),
        microbatches=int(row["ga"] or 1),
        zero=2 if row["parallelism"] == "SHARD_GRAD_OP" else 3,
        remat=_remat(row),
        float8=_scaling(row),
        grads=grads,
        tp=_ranks(row, "TP"),
        loss="eager" if has_eager_loss(row) else "fused",
        recomputed=_recomputed(row),
        cp=_ranks(row, "CP"),
    )


def gpu_of(row: Row) -> str:
    """Returns the key of `GPUS` of a row's GPU."""
    for text, gpu in (("500W", "h100-500w"), ("H200", "h200"), ("B200", "b200")):
        if text in row["gpu"]:
            return gpu
    return "h100"


def is_eager(row: Row) -> bool:
    """Whether each operation was a kernel of its own: PyTorch without a compiler."""
    return "eager" in row["system"] or "llm-foundry" in row["system"]


def has_eager_loss(row: Row) -> bool:
    """Whether the loss alone was not compiled, as in torchtitan of December 2024.

    Source: torchtitan 9dec370, the commit of the run, `train.py`: the loss is not
    compiled, "turning off for now", and each layer is. Of llm-foundry and fms-fsdp, who
    publish no memory, it is not modelled; nor is the loss over split logits.
    """
    is_split = "TP" in row["parallelism"]
    return "llama3_h100_202412_torchtitan" in row["source"] and not is_split


def _model(row: Row) -> str | None:
    if row["model"].startswith("MPT-"):
        return row["model"].lower()
    return MODELS.get(row["model"])


def _remat(row: Row) -> str:
    """Returns what a row keeps for backward, if possible a key of `REMAT_POLICIES`."""
    return "blocks" if _recomputed(row) else row["remat"].removesuffix(", scan off")


def _recomputed(row: Row) -> int:
    """Returns how many layers are computed again; 0 where it is all or none."""
    is_counted = row["remat"] == "selective"
    return RECOMPUTED.get(row["model"], 0) if is_counted else 0


def _scaling(row: Row) -> str:
    """Returns how a row scales 8-bit floats: torchao by the tensors, others delayed.

    Megatron's "CS" is current scaling.
    """
    if "8" not in row["precision"]:
        return ""
    is_current = "torchtitan" in row["system"] or "CS" in row["precision"]
    return "current" if is_current else "delayed"


def _replicas(row: Row) -> int:
    """Returns the replicas of HSDP that a row's parallelism states."""
    if "HSDP 96" in row["parallelism"]:  # Sharded in a node, as torch's HYBRID_SHARD.
        return int(row["gpus"]) // 8
    _, _, after = row["parallelism"].partition("DP")
    _, _, replicas = after.partition("x DP")
    return int(replicas.split()[0]) if replicas else 1


def _ranks(row: Row, axis: str) -> int:
    """Returns the ranks of an axis, such as 4 of "FSDP2 CP4" for "CP"; 1 for none."""
    found = re.search(rf"\b{axis}(\d+)", row["parallelism"])
    return int(found[1]) if found else 1


def attention_of(row: Row) -> str:
    """Returns which kernel attention was; "" for that of the program itself.

    PyTorch's before 2.6 is FlashAttention-2. axlearn's comment beside its step time
    names a faster kernel of Transformer Engine to be matched: its own, in Pallas, has
    that algorithm too. llm-foundry's benchmarks say `attn_impl: triton`.
    """
    if _ranks(row, "CP") > 1:  # A ring's kernels are compiled as they are.
        return ""
    if "llm-foundry" in row["system"]:
        return "triton"
    systems = ("torchtitan", "fms-fsdp", "axlearn")
    is_second = any(name in row["system"] for name in systems)
    return "flash_attention_2" if is_second else ""


def network_bandwidth(row: Row) -> float | None:
    """Returns the bytes/s of a NIC where a source states other ones than 400 Gb/s.

    fms-fsdp's "800 Gbps" are read as those of a node, as no NIC has as many, and as its
    A100s' "400 Gbps"; of them 94 % carry data, as of 400 Gb/s in nccl-tests#290.
    """
    return 0.94 * 800e9 / 8 / 8 if "800Gb/s" in row["gpu"] else None
