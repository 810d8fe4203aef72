"""Fine-tuning as TRL does it: the losses of both, step by step, on the same batches.

    pip install trl accelerate datasets        # into another environment than .venv
    python benchmarks/trl_comparison.py [--only sft dpo] [--steps 50]

Trains a Llama of 20M parameters from the same weights in float32, on conversations
(`fsdp-jax train`, against TRL's SFTTrainer on transformers' Trainer), and on pairs of
answers (`fsdp-jax train --objective dpo`, against TRL's DPOTrainer). TRL gets the
conversations and pairs as they are, in the order in which ours are drawn, and its own
tokenization, masks, loss, clipping, schedule and optimizer do the rest. In the middle
ours is saved, and resumed on another mesh.
"""

from __future__ import annotations

import argparse
import importlib
import json
import math
import random
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import result

TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>"
    "{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] }}<|end|>"
    "{% endgeneration %}{% else %}{{ m['content'] }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SPECIALS = ["<|user|>", "<|assistant|>", "<|end|>", "<pad>"]
BATCH, SEQ, LR, WARMUP, CLIP, DECAY, SEED = 8, 64, 1e-3, 5, 1.0, 0.1, 3
DPO_LR, DPO_SEQ, BETA = 1e-4, 32, 0.1
TOLERANCE = 1e-4
"""Relative: two frameworks sum in other orders, and 50 updates carry it on."""


def write_model(folder: Path) -> None:
    """Writes a Llama of 20M random parameters with a tokenizer of 260 tokens."""
    import tokenizers
    import torch
    import transformers

    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocab = {char: index for index, char in enumerate(alphabet)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, []))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(
        add_prefix_space=False
    )
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIALS)
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|end|>",
        pad_token="<pad>",
        chat_template=TEMPLATE,
    ).save_pretrained(folder)
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=len(vocab) + len(SPECIALS),
        hidden_size=512,
        intermediate_size=1408,
        num_hidden_layers=6,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=512,
        eos_token_id=len(vocab) + 2,
        pad_token_id=len(vocab) + 3,
    )
    model = transformers.LlamaForCausalLM(config)
    print(f"{model.num_parameters():,} parameters", file=sys.stderr)
    model.save_pretrained(folder)


def conversations(count: int) -> list[dict[str, Any]]:
    """Makes sums and differences in one to three turns, all of them different."""
    rng, found = random.Random(0), {}
    while len(found) < count:
        messages = []
        for _ in range(rng.randint(1, 3)):
            a, b, sign = rng.randint(0, 99), rng.randint(0, 99), rng.choice("+-")
            answer = a + b if sign == "+" else a - b
            messages += [
                {"role": "user", "content": f"{a}{sign}{b}"},
                {"role": "assistant", "content": str(answer)},
            ]
        found[json.dumps(messages)] = {"messages": messages}
    return list(found.values())


def answers(count: int) -> list[dict[str, str]]:
    """Makes questions with a right answer and a wrong one."""
    rng, found = random.Random(1), {}
    while len(found) < count:
        a, b = rng.randint(0, 999), rng.randint(0, 999)
        found[a, b] = {
            "prompt": f"{a}+{b}=",
            "chosen": str(a + b),
            "rejected": str(a + b + rng.randint(1, 9)),
        }
    return list(found.values())


def write_lines(path: Path, rows: Sequence[Any]) -> Path:
    """Writes rows as JSON Lines."""
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def our_sft(folder: Path, steps: int) -> list[float]:
    """Trains on conversations."""
    options = f"--seq {SEQ} --rows pad --lr {LR} --lr-schedule cosine"
    options += f" --warmup {WARMUP} --weight-decay {DECAY}"
    return _trained(folder, "chats.jsonl", folder / "sft", options, steps)


def our_dpo(folder: Path, steps: int) -> list[float]:
    """Trains on pairs of answers."""
    options = f"--objective dpo --dpo-beta {BETA} --seq {DPO_SEQ} --lr {DPO_LR}"
    options += " --lr-schedule linear --weight-decay 0"
    return _trained(folder, "pairs.jsonl", folder / "dpo", options, steps)


def _trained(
    folder: Path, data: str, save: Path, options: str, steps: int
) -> list[float]:
    """Trains half of the steps on 2 devices, and resumes on 4 as HSDP."""
    metrics = save.with_suffix(".jsonl")
    options += f" --batch {BATCH} --seed {SEED} --lr-steps {steps} --clip {CLIP}"
    start = ["--hf", str(folder / "model"), *options.split(), "--devices", "2"]
    half = steps // 2
    resume = ["--resume", str(save), "--devices", "4", "--dp-outer", "2"]
    for more, last in ((start, half), (resume, steps)):
        command = [sys.executable, "-m", "fsdp_jax.cli", "train", *more]
        command += ["--data", str(folder / data), "--save", str(save)]
        command += ["--metrics", str(metrics), "--steps", str(last)]
        subprocess.run([*command, "--cpu-devices", "4"], check=True)
    return [json.loads(line)["loss"] for line in metrics.read_text().splitlines()]


def sft_order(folder: Path, rows: Sequence[Any], steps: int) -> list[Any]:
    """Returns the conversations in the order in which ours are drawn."""
    from fsdp_jax.cli._chat_template import read_chat_template
    from fsdp_jax.cli._model_source import open_any
    from fsdp_jax.cli._records import read_records
    from fsdp_jax.cli._train_config import config_of
    from fsdp_jax.cli._training_data import batches_of, encoder_of, read_data
    from fsdp_jax.data import HostShard

    origin = open_any(str(folder / "model"))
    values = {"tokenizer": "model", "batch": BATCH, "seq": SEQ, "seed": SEED}
    config = config_of({**values, "rows": "pad"}).data
    file = folder / "chats.jsonl"
    encoder = encoder_of(origin, config)
    records = read_records(file, read_chat_template(origin.files))
    known = {
        tuple(encoder.encode(record, "completions")[0]): row
        for record, row in zip(records, rows, strict=True)
    }
    assert len(known) == len(rows)
    data = read_data([file], origin, config, None)
    batches, found = batches_of(data, config, HostShard(0, 1)), []
    for _ in range(steps):
        batch = next(batches)
        for index in range(BATCH):
            real = batch["segment_ids"][index] > 0
            tokens = batch["tokens"][index][real].tolist()
            last = batch["targets"][index][real][-1]
            found.append(known[*tokens, int(last)])
    return found


def their_sft(folder: Path, rows: Sequence[Any], steps: int) -> list[float]:
    """Trains with TRL on the conversations in this order."""
    trl = importlib.import_module("trl")

    config = trl.SFTConfig(
        **_arguments(folder, steps, LR, DECAY),
        lr_scheduler_type="cosine",
        warmup_steps=WARMUP,
        max_length=None,
        assistant_only_loss=True,
    )
    trainer = trl.SFTTrainer(
        model=_load(folder),
        args=config,
        train_dataset=_dataset(folder, rows),
        processing_class=_tokenizer(folder),
    )
    return _losses(trainer)


def dpo_order(folder: Path, rows: Sequence[Any], steps: int) -> list[Any]:
    """Returns the pairs in the order in which ours are drawn."""
    from fsdp_jax.cli._data import origins
    from fsdp_jax.cli._model_source import open_any
    from fsdp_jax.cli._train_config import config_of
    from fsdp_jax.cli._training_data import read_data

    values = {"tokenizer": "model", "batch": BATCH, "seq": DPO_SEQ, "seed": SEED}
    config = config_of({**values, "objective": "dpo"}).data
    origin = open_any(str(folder / "model"))
    data = read_data([folder / "pairs.jsonl"], origin, config, None)
    found = origins(data.sources, data.weights, SEED, range(steps * BATCH))
    return [rows[index] for _, index in found]


def their_dpo(folder: Path, rows: Sequence[Any], steps: int) -> list[float]:
    """Trains with TRL on the pairs in this order."""
    trl = importlib.import_module("trl")

    config = trl.DPOConfig(
        **_arguments(folder, steps, DPO_LR, 0.0),
        lr_scheduler_type="linear",
        warmup_steps=0,
        beta=BETA,
        max_length=None,
    )
    trainer = trl.DPOTrainer(
        model=_load(folder),
        args=config,
        train_dataset=_dataset(folder, rows),
        processing_class=_tokenizer(folder),
    )
    return _losses(trainer)


def _arguments(folder: Path, steps: int, lr: float, decay: float) -> dict[str, Any]:
    return dict(
        output_dir=str(folder / "theirs"),
        per_device_train_batch_size=BATCH,
        max_steps=steps,
        learning_rate=lr,
        weight_decay=decay,
        max_grad_norm=CLIP,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        train_sampling_strategy="sequential",
        gradient_checkpointing=False,
        use_cpu=True,
        bf16=False,
        disable_tqdm=True,
    )


def _dataset(folder: Path, rows: Sequence[Any]) -> Any:
    datasets = importlib.import_module("datasets")

    file = write_lines(folder / "in_order.jsonl", rows)
    cache = tempfile.mkdtemp(dir=folder)
    files = {"train": str(file)}
    return datasets.load_dataset("json", data_files=files, cache_dir=cache)["train"]


def _load(folder: Path) -> Any:
    import torch
    import transformers

    return transformers.AutoModelForCausalLM.from_pretrained(
        folder / "model", dtype=torch.float32
    )


def _tokenizer(folder: Path) -> Any:
    import transformers

    return transformers.AutoTokenizer.from_pretrained(folder / "model")


def _losses(trainer: Any) -> list[float]:
    """Trains, and returns the losses as they are, which the log would round."""
    found, step = [], trainer.training_step

    def recorded(*args: Any, **kwargs: Any) -> Any:
        loss = step(*args, **kwargs)
        found.append(float(loss))
        return loss

    trainer.training_step = recorded
    trainer.train()
    return found


def compare(ours: Sequence[float], theirs: Sequence[float]) -> dict[str, Any]:
    """Returns both curves and their largest relative difference."""
    differences = [abs(a - b) / abs(b) for a, b in zip(ours, theirs, strict=True)]
    return {
        "steps": len(ours),
        "largest_relative_difference": max(differences),
        "within": max(differences) <= TOLERANCE,
        "ours": list(ours),
        "theirs": list(theirs),
    }


def main() -> None:
    """Runs what was asked for, and writes the JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="*", default=["sft", "dpo"])
    parser.add_argument("--steps", type=int, default=50, help="of sft; dpo does 20")
    result.add_arguments(parser)
    args = parser.parse_args()
    packages = ("jax", "flax", "optax", "torch", "transformers", "trl")
    conditions = result.begin(args, packages=packages)
    found: dict[str, Any] = {"tolerance": TOLERANCE}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_model(folder / "model")
        if "sft" in args.only:
            rows = conversations(8 * math.ceil(args.steps / 2))
            write_lines(folder / "chats.jsonl", rows)
            ours = our_sft(folder, args.steps)
            theirs = their_sft(folder, sft_order(folder, rows, args.steps), args.steps)
            found["sft"] = compare(ours, theirs)
        if "dpo" in args.only:
            rows = answers(64)
            write_lines(folder / "pairs.jsonl", rows)
            ours = our_dpo(folder, 20)
            theirs = their_dpo(folder, dpo_order(folder, rows, 20), 20)
            found["dpo"] = compare(ours, theirs)
    for name in args.only:
        print(f"{name}: {found[name]['largest_relative_difference']:.1e}")
    result.write(args, conditions, found)


if __name__ == "__main__":
    main()
