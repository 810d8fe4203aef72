"""`fsdp-jax compare`: two models on the same tokens, or one and transformers' of it."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Annotated, Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from jaxtyping import Float32, Int

import fsdp_jax as fsdp
from bridge.models._positions import check_length
from fsdp_jax.cli._decoder import plan_decoder
from fsdp_jax.cli._errors import CheckFailed, check_tolerance, require
from fsdp_jax.cli._model_source import Origin, open_any, read_config
from fsdp_jax.cli._options import Devices, Group, IgnoreField, Unset

Tokens = Int[np.ndarray, "batch seq"]


@dataclasses.dataclass(frozen=True)
class Outputs:
    """Outputs of a model.

    Attributes:
      logits: Logits of all tokens.
      hidden: The residual stream before the layers and behind each; the last, normed.
    """

    logits: Float32[np.ndarray, "batch seq vocab"]
    hidden: Float32[np.ndarray, "layers+1 batch seq embed"]


@dataclasses.dataclass(frozen=True)
class Difference:
    """Difference of two models.

    Attributes:
      max_logit: The largest logit, in size, of the second.
      max_diff: The largest difference of two logits.
      mean_diff: The mean difference.
      relative: `max_diff` as a share of `max_logit`.
      kl: The mean over tokens of KL(second || first), in nats.
      same_choice: Share of tokens for which both would say the same next.
      first_layer: The first entry of the hidden states (0: the embedding) that is
        further apart than the tolerance, by the same measure; None if there is none.
    """

    max_logit: float
    max_diff: float
    mean_diff: float
    relative: float
    kl: float
    same_choice: float
    first_layer: int | None


@dataclasses.dataclass(frozen=True)
class Compare:
    """Compare the logits of two models, and say in which layer they part.

    Both compute in float32, on random tokens.

    Attributes:
      checkpoint: Directory of `fsdp-jax train --save`, or a model's directory.
      out: Other model: by default a directory that transformers loads, e.g. of
        `fsdp-jax export`.
      against: Library that computes OUT: transformers, or bridge, which takes all that
        CHECKPOINT may be, and needs no torch.
      step: Step of a checkpoint; default the newest.
      seq: Tokens of a row.
      tolerance: The largest difference allowed, as a share of the largest logit. Two
        float32 programs that sum in different orders stay far below the default; a
        model exported in bfloat16 differs by some 1e-3.
      json: Prints the figures as one line of JSON instead.
      ignore_field: Field of config.json to ignore although it is refused; may be
        repeated. For fields that change no number.
      where: Devices.
    """

    checkpoint: tyro.conf.Positional[Path]
    out: tyro.conf.Positional[Path]
    against: Literal["transformers", "bridge"] = "transformers"
    step: Unset[int] = None
    seq: int = 64
    tolerance: float = 1e-4
    json: bool = False
    ignore_field: IgnoreField = ()
    where: Annotated[Devices, Group] = Devices()

    def run(self) -> None:
        """Prints how far they are apart; fails if that is above the tolerance."""
        if self.seq < 1:
            raise ValueError(f"--seq {self.seq} must be at least 1.")
        check_tolerance(self.tolerance)
        devices = self.where.pick()
        ours = open_any(self.checkpoint, self.step, ignore_fields=self.ignore_field)
        check_length(ours.config, self.seq, f"--seq {self.seq}")
        vocab = ours.config.vocab_size
        other = self._open_other(vocab)
        shape = len(devices), self.seq
        tokens = np.random.default_rng(0).integers(0, vocab, shape)
        theirs = (
            _outputs_of_transformers(self.out, tokens)
            if other is None
            else _our_outputs(other, devices, tokens)
        )
        self._report(_our_outputs(ours, devices, tokens), theirs)

    def _open_other(self, vocab: int) -> Origin | None:
        """Opens OUT, but for transformers; either way a `ValueError` if it differs."""
        other = None
        if self.against == "bridge":
            other = open_any(self.out, ignore_fields=self.ignore_field)
        config = other.config if other else read_config(self.out, self.ignore_field)
        if config.vocab_size != vocab:
            raise ValueError(
                f"OUT '{self.out}' has a vocabulary of {config.vocab_size}, but that "
                f"of the checkpoint has {vocab} entries: they are different models."
            )
        return other

    def _report(self, ours: Outputs, theirs: Outputs) -> None:
        found = difference(ours, theirs, self.tolerance)
        if self.json:
            print(json.dumps(dataclasses.asdict(found)))
        else:
            print(_describe(found, theirs.logits.size))
        if not found.relative <= self.tolerance:  # so that nan fails
            raise CheckFailed(
                f"The logits differ by more than --tolerance {self.tolerance:g}."
            )


def difference(ours: Outputs, theirs: Outputs, tolerance: float) -> Difference:
    """Measures the difference of two models.

    Args:
      ours: The one.
      theirs: The other, to whose largest logit differences are put in relation.
      tolerance: How far hidden states may be apart.
    """
    gap = np.abs(ours.logits - theirs.logits)
    scale = float(np.abs(theirs.logits).max())
    p, q = (_log_softmax(x.logits) for x in (theirs, ours))
    same = ours.logits.argmax(-1) == theirs.logits.argmax(-1)
    return Difference(
        max_logit=scale,
        max_diff=float(gap.max()),
        mean_diff=float(gap.mean()),
        relative=float(gap.max()) / scale,
        kl=float((np.exp(p) * (p - q)).sum(-1).mean()),
        same_choice=float(same.mean()),
        first_layer=_first_layer(ours.hidden, theirs.hidden, tolerance),
    )


def _first_layer(ours: np.ndarray, theirs: np.ndarray, tolerance: float) -> int | None:
    for layer, (a, b) in enumerate(zip(ours, theirs, strict=False)):
        if a.shape != b.shape or not np.abs(a - b).max() <= tolerance * np.abs(b).max():
            return layer
    return None if len(ours) == len(theirs) else min(len(ours), len(theirs))


def _describe(found: Difference, count: int) -> str:
    where = {None: "nowhere", 0: "the embedding"}.get(found.first_layer)
    return (
        f"largest difference of logits: {found.max_diff:.3g}, {found.relative:.3g} of "
        f"the largest logit, {found.max_logit:.3g} ({count:,} compared)\n"
        f"mean difference: {found.mean_diff:.3g}; KL: {found.kl:.3g} nats; the same "
        f"next token: {found.same_choice:.2%}\n"
        f"first differing layer: {where or f'layer {found.first_layer}'}"
    )


def _log_softmax(logits: np.ndarray) -> np.ndarray:
    wide = logits.astype(np.float64)
    wide -= wide.max(-1, keepdims=True)
    return wide - np.log(np.exp(wide).sum(-1, keepdims=True))


def _our_outputs(origin: Origin, devices: list[Any], tokens: Tokens) -> Outputs:
    """Computes them sharded, one row a device."""
    plan = plan_decoder(origin.config, fsdp.make_mesh(devices=devices))
    params = origin.load_params(plan.params)
    forward = fsdp.make_forward(plan, _forward)
    # GPUs would round the factors of a float32 product to 10 bits.
    with jax.default_matmul_precision("highest"):
        logits, hidden = forward(params, jnp.asarray(tokens, jnp.int32))
    hidden = np.asarray(hidden, np.float32).swapaxes(0, 1)
    return Outputs(np.asarray(logits, np.float32), hidden)


def _forward(model: Any, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
    # Rows first, as they come back from the ranks.
    return model(tokens), model.hidden_states(tokens).swapaxes(0, 1)


def _outputs_of_transformers(path: Path, tokens: Tokens) -> Outputs:
    torch = require("torch", "fsdp-jax compare")
    transformers = require("transformers", "fsdp-jax compare")
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()  # What is missing is said below.
    try:
        model, report = transformers.AutoModelForCausalLM.from_pretrained(
            # Not the dtype that the config says: the weights would be rounded to it.
            path,
            dtype=torch.float32,
            output_loading_info=True,
        )
    except Exception as error:  # Any, as files of any kind are read.
        raise ValueError(
            f"transformers cannot load OUT '{path}': {type(error).__name__}: {error}. "
            "--against bridge reads it without transformers."
        ) from error
    if missing := sorted(report["missing_keys"]):
        raise ValueError(
            f"{path} lacks {len(missing)} tensors of its model, which transformers "
            "would draw at random: " + ", ".join(missing) + "."
        )
    model = model.float().eval()
    with torch.no_grad():
        out = model(torch.from_numpy(tokens), output_hidden_states=True)
    hidden = np.stack([state.numpy() for state in out.hidden_states])
    return Outputs(out.logits.numpy(), hidden)
