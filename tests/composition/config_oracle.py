"""What transformers computes from a config file, and what we compute from it."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import json
import tempfile
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import helpers.deepseek_moe  # noqa: F401  (makes it known to transformers)
import helpers.mistral4  # noqa: F401  (makes it known to transformers)
import helpers.mllama  # noqa: F401  (makes it known to transformers)
import helpers.nemotron_nas  # noqa: F401  (makes it known to transformers)
import jax
import jax.numpy as jnp
import numpy as np
import torch
from bridge_helpers import load_model
from composition.config_cases import ConfigCase
from huggingface_hub.errors import StrictDataclassError
from safetensors.numpy import load_file, save_file
from tiny_models import randomize
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM

TOLERANCE = 1e-4
"""Of the largest logit: float32 sums in other orders differ by 2e-6, wrong fields by
1e-2 and more; in between lie fields on the border of what is stable."""

LENGTH = 24
KINDS = ("agree", "differ", "refused", "rejected")


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What became of a case.

    Args:
      kind: `agree`, `differ`, `refused` by bridge, or `rejected` by transformers, in
        which case there is nothing to compare with.
      error: Largest difference over the largest logit, where both computed.
      says: The message of whoever did not.
    """

    kind: str
    error: float = 0.0
    says: str = ""


# What transformers raises for configs that it does not read; AttributeError for a field
# that a class derives.
_REFUSES = (
    *(StrictDataclassError, ValueError, TypeError, KeyError, ArithmeticError),
    AttributeError,
)


def filled(fields: Mapping[str, Any]) -> dict[str, Any] | None:
    """Returns a config file with transformers' defaults; None if it is rejected."""
    given = copy.deepcopy(dict(fields))  # the rope in it is written to
    try:
        with warnings.catch_warnings():
            # Of a class without a rope, whose field `rope_scaling` it still takes.
            warnings.filterwarnings("ignore", "`rope_scaling` is", FutureWarning)
            return CONFIG_MAPPING[given.pop("model_type")](**given).to_dict()
    except _REFUSES:
        return None


def outcome_of(case: ConfigCase) -> Outcome:
    """Computes the logits of a case in transformers and here."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory)
        try:
            theirs = _their_logits(case, path)
        except Exception as error:  # whatever transformers raises, it has not read it
            return Outcome("rejected", says=f"{type(error).__name__}: {error}")
        try:
            ours = _our_logits(path)
        except ValueError as error:
            return Outcome("refused", says=str(error))
    if not np.isfinite(theirs).all():
        return Outcome("rejected", says="logits that are not finite")
    error = float(np.abs(ours - theirs).max() / np.abs(theirs).max())
    return Outcome("agree" if error <= TOLERANCE else "differ", error)


def _tokens(vocab: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, vocab, (1, LENGTH))


def _their_logits(case: ConfigCase, path: Path) -> np.ndarray:
    (path / "config.json").write_text(json.dumps(case.fields))
    config = AutoConfig.from_pretrained(path)
    torch.manual_seed(0)
    with _quiet():
        model = AutoModelForCausalLM.from_config(config).eval()
    randomize(model, case.fields["model_type"])
    with _quiet():
        model.save_pretrained(path)
    (path / "config.json").write_text(json.dumps(case.fields))
    if case.head != "as_saved":
        _store_head(path, case.head)
        with _quiet():
            model = AutoModelForCausalLM.from_pretrained(path).eval()
    with torch.no_grad():
        tokens = torch.from_numpy(_tokens(config.vocab_size))
        return model(tokens).logits.float().numpy()


def _store_head(path: Path, head: str) -> None:
    tensors = load_file(path / "model.safetensors")
    names = ("embed_tokens", "wte", "word_embeddings", "backbone.embeddings")
    ends = tuple(f"{name}.weight" for name in names)
    table = next(key for key in tensors if key.endswith(ends))
    change = 1.0 if head == "same" else -0.5
    tensors["lm_head.weight"] = tensors[table] * np.float32(change)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})


def _our_logits(path: Path) -> np.ndarray:
    model = load_model(path)
    tokens = jnp.asarray(_tokens(model.config.vocab_size))
    with jax.disable_jit():  # compiles each operation once for all cases
        return np.asarray(model(tokens))


@contextlib.contextmanager
def _quiet():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
