"""`fsdp-jax compare`: our logits beside those of transformers."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from jaxtyping import Float32, Int

import bridge
import fsdp_jax as fsdp
from fsdp_jax.cli._errors import CheckFailed, require
from fsdp_jax.cli._model import plan_decoder
from fsdp_jax.cli._options import Devices, Unset
from fsdp_jax.cli._origin import Origin, open_either

Tokens = Int[np.ndarray, "batch seq"]
Logits = Float32[np.ndarray, "batch seq vocab"]


@dataclasses.dataclass(frozen=True)
class Compare:
    """Compare the logits of a checkpoint with those transformers computes from OUT.

    Both compute in float32, on random tokens.

    Attributes:
      checkpoint: A directory of `fsdp-jax train --save`, or a model's directory.
      out: A directory that transformers loads, e.g. of `fsdp-jax export`.
      step: Which step of the checkpoint; default the newest.
      seq: Tokens of a row.
      tolerance: The largest difference allowed, as a share of the largest logit. Two
        float32 programs that sum in different orders stay far below the default; a
        model exported in bfloat16 differs by some 1e-3.
      where: On which devices.
    """

    checkpoint: tyro.conf.Positional[Path]
    out: tyro.conf.Positional[Path]
    step: Unset[int] = None
    seq: int = 64
    tolerance: float = 1e-4
    where: Annotated[Devices, tyro.conf.arg(name="")] = Devices()

    def run(self) -> None:
        """Prints the largest difference; fails if it is above the tolerance."""
        if self.seq < 1:
            raise ValueError(f"--seq {self.seq}: at least 1.")
        devices = self.where.pick()
        origin = open_either(self.checkpoint, self.step)
        vocab = origin.config.vocab_size
        _check_vocab(self.out, vocab)
        shape = len(devices), self.seq
        tokens = np.random.default_rng(0).integers(0, vocab, shape)
        theirs = _logits_of_transformers(self.out, tokens)
        _verdict(_our_logits(origin, devices, tokens), theirs, self.tolerance)


def _check_vocab(out: Path, vocab: int) -> None:
    theirs = bridge.from_hf_config(out).vocab_size
    if theirs != vocab:
        raise ValueError(
            f"OUT '{out}' has a vocabulary of {theirs}, not {vocab} as the checkpoint: "
            "it is another model."
        )


def _verdict(ours: Logits, theirs: Logits, tolerance: float) -> None:
    largest, scale = np.abs(ours - theirs).max(), np.abs(theirs).max()
    print(
        f"largest difference of logits: {largest:.3g}, {largest / scale:.3g} of the "
        f"largest logit, {scale:.3g} ({theirs.size:,} compared)"
    )
    if not largest <= tolerance * scale:  # so that nan fails
        raise CheckFailed(f"The logits differ by more than --tolerance {tolerance:g}.")


def _our_logits(origin: Origin, devices: list[Any], tokens: Tokens) -> Logits:
    """Computes them sharded, one row a device."""
    plan = plan_decoder(origin.config, fsdp.make_mesh(devices=devices))
    params = origin.load_params(plan.params)
    forward = fsdp.make_eval_step(plan, _forward, has_aux=True)
    # GPUs would round the factors of a float32 product to 10 bits.
    with jax.default_matmul_precision("highest"):
        logits = forward(params, jnp.asarray(tokens, jnp.int32))["aux"]
    return np.asarray(logits, np.float32)


def _forward(model: Any, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
    return jnp.zeros(()), model(tokens)  # evaluation wants a loss


def _logits_of_transformers(path: Path, tokens: Tokens) -> Logits:
    torch = require("torch", "fsdp-jax compare")
    transformers = require("transformers", "fsdp-jax compare")
    transformers.utils.logging.disable_progress_bar()
    model = transformers.AutoModelForCausalLM.from_pretrained(path).float().eval()
    with torch.no_grad():
        return model(torch.from_numpy(tokens)).logits.numpy()
