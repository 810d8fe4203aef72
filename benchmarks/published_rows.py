"""Which program each row of `published_steps.csv` is, or why it is not built."""

from __future__ import annotations

import csv
import json
from pathlib import Path

from published_models import SAVED, Program

HERE = Path(__file__).parent
ROWS = HERE / "published_steps.csv"
SCHEDULES = HERE / "schedules"
INDEX = SCHEDULES / "index.json"

Row = dict[str, str]

MODELS = {
    "Llama2-7B": "llama2-7b",
    "Llama3-8B": "llama3-8b",
    "Llama3.1-8B": "llama3-8b",
    "Llama3-70B": "llama3-70b",
    "Llama3.1-70B": "llama3-70b",
}
OTHER_AXES = ("PP", "EP", "CP2", "CP4", "CP8")


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
        return f"no stand-in for {row['model']}"
    if row["source"].startswith("apple/axlearn"):
        return "the source does not state the batch"
    if any(axis in row["parallelism"] for axis in OTHER_AXES):
        return f"the stand-in has no {row['parallelism']}"
    if "async" in row["system"]:
        return "products that overlap with TP's collectives are not in XLA's program"
    if row["remat"] not in (*SAVED, "none", "minimal_flash, scan off"):
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
        remat=row["remat"].removesuffix(", scan off"),
        float8=_scaling(row),
        grads=grads,
        tp=8 if "TP8" in row["parallelism"] else 1,
        loss="eager" if has_eager_loss(row) else "fused",
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


def _scaling(row: Row) -> str:
    """Returns how a row scales 8-bit floats: torchao by the tensors, others delayed."""
    if "8" not in row["precision"]:
        return ""
    return "current" if "torchtitan" in row["system"] else "delayed"


def _replicas(row: Row) -> int:
    """Returns the replicas of HSDP that a row's parallelism states."""
    if "HSDP 96" in row["parallelism"]:  # Sharded in a node, as torch's HYBRID_SHARD.
        return int(row["gpus"]) // 8
    _, _, after = row["parallelism"].partition("DP")
    _, _, replicas = after.partition("x DP")
    return int(replicas.split()[0]) if replicas else 1


def uses_flash_attention_2(row: Row) -> bool:
    """Whether the attention of a run was FlashAttention-2, as in PyTorch before 2.6."""
    return any(name in row["system"] for name in ("torchtitan", "foundry", "fms-fsdp"))
