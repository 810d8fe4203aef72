"""Merged LoRA: the base weights plus the scaled product of the factors.

Merging is arithmetic and so not a rule: the sum is computed in float32 when weights
are read, and cast once to the dtype of the abstract tree. It is not bit-exactly
invertible.
"""

import dataclasses
import os
from typing import Any

import numpy as np

from bridge._box import Box, as_index, complete
from bridge._local_path import check_local
from bridge._report import format_report
from bridge.formats._source import Source
from bridge.hf._config import find_family
from bridge.hf._hf_checkpoint import open_hf
from bridge.lora._lora_names import in_family
from bridge.lora._lora_source import (
    A_SUFFIX,
    B_SUFFIX,
    M_SUFFIX,
    PREFIX,
    LoraSource,
    open_lora,
)
from bridge.models import DecoderConfig
from bridge.rules._mapping import Mapping as WeightMapping
from bridge.streaming._load import Progress, load


@dataclasses.dataclass(frozen=True)
class MergedSource:
    """Source that merges an adapter into a base checkpoint, box by box when read.

    Args:
      base: Base checkpoint.
      adapter: Adapter to merge.
      transposed: Whether the base stores weights as `[in, out]`.
    """

    base: Source
    adapter: LoraSource
    transposed: bool = False

    @property
    def name(self) -> str:
        """Names of base checkpoint and adapter."""
        return f"{self.base.name} with {self.adapter.source.name}"

    def keys(self) -> tuple[str, ...]:
        """Returns the names of all tensors of the base model."""
        return self.base.keys()

    def shape(self, key: str) -> tuple[int, ...]:
        """Returns the shape of a tensor."""
        return self.base.shape(key)

    def dtype(self, key: str) -> np.dtype:
        """Returns the dtype of a tensor: float32 if it is adapted."""
        if key in self.adapter.whole:
            return self.adapter.source.dtype(self.adapter.whole[key])
        return np.dtype(np.float32) if self._module(key) else self.base.dtype(key)

    def read(self, key: str, slices: tuple[slice, ...] = ()) -> np.ndarray:
        """Reads a tensor, or the region selected by `slices`."""
        if key in self.adapter.whole:
            return self.adapter.source.read(self.adapter.whole[key], slices)
        module = self._module(key)
        if module is None:
            return self.base.read(key, slices)
        box = complete(slices, self.shape(key))
        if self.adapter.config.use_dora:
            return self._with_magnitudes(key, module, box)
        base = self.base.read(key, slices).astype(np.float32)
        return base + self._delta(module, box)

    def _with_magnitudes(self, key: str, module: str, box: Box) -> np.ndarray:
        """Merges DoRA: each output's weights get the norm that the adapter has for it.

        Source: Liu et al. 2024 (DoRA); huggingface/peft src/peft/tuners/lora/layer.py.
        """
        rows, columns = self._out_and_in(as_index(box))
        inner = self.shape(key)[0 if self.transposed else 1]
        # A norm is of all inputs, whichever of them the box has.
        wide = complete(self._out_and_in((rows, slice(0, inner))), self.shape(key))
        base = self.base.read(key, as_index(wide)).astype(np.float32)
        sums = self._out_by_in(base + self._delta(module, wide))
        norms = np.linalg.norm(sums, axis=1)
        magnitudes = self.adapter.source.read(PREFIX + module + M_SUFFIX, (rows,))
        scales = magnitudes.astype(np.float32) / norms
        return self._out_by_in(sums[:, columns] * scales[:, None])

    def _out_by_in(self, matrix: np.ndarray) -> np.ndarray:
        return matrix.T if self.transposed else matrix

    def _module(self, key: str) -> str | None:
        module = key.removesuffix(".weight")
        return module if key != module and module in self.adapter.modules else None

    def _delta(self, module: str, box: Box) -> np.ndarray:
        # A box needs only its columns of A and its rows of B.
        rows, columns = self._out_and_in(as_index(box))
        a = self.adapter.source.read(PREFIX + module + A_SUFFIX, (slice(None), columns))
        b = self.adapter.source.read(PREFIX + module + B_SUFFIX, (rows,))
        scale = np.float32(self.adapter.config.scale(module))
        delta = (b.astype(np.float32) @ a.astype(np.float32)) * scale
        return self._out_by_in(delta)

    def _out_and_in(self, sides: tuple[Any, ...]) -> tuple[Any, ...]:
        return sides[::-1] if self.transposed else sides


def merge_lora(
    base: Source, adapter: LoraSource, *, transposed: bool = False
) -> MergedSource:
    """Returns a base checkpoint with an adapter merged in; reads headers only.

    Args:
      base: Base checkpoint.
      adapter: Adapter.
      transposed: Whether the base stores weights as `[in, out]`. The base decides, as
        in PEFT, which takes `fan_in_fan_out` back where modules are of the other kind.

    Raises:
      ValueError: If an adapted tensor is missing in the base or has another shape.
        All are listed.
    """
    shapes = {name: adapter.source.shape(key) for name, key in adapter.whole.items()}
    for module in adapter.modules:
        (_, columns), (rows, _) = (
            adapter.source.shape(PREFIX + module + suffix)
            for suffix in (A_SUFFIX, B_SUFFIX)
        )
        sides = rows, columns
        shapes[f"{module}.weight"] = sides[:: -1 if transposed else 1]
    keys = set(base.keys())
    report = {
        "not in the base": [key for key in shapes if key not in keys],
        "of another shape": [
            f"{key}: {base.shape(key)}, the adapter is for {shape}"
            for key, shape in shapes.items()
            if key in keys and base.shape(key) != shape
        ],
    }
    if any(report.values()):
        raise ValueError(
            f"'{adapter.source.name}' is not an adapter of '{base.name}':\n"
            f"{format_report(report)}"
        )
    return MergedSource(base, adapter, transposed)


def _check_tied(
    adapter: LoraSource, mapping: WeightMapping, config: DecoderConfig
) -> None:
    """Refuses a table that is saved whole for a model whose head it is too.

    PEFT trains a copy, and the head keeps the table of the base, unless it is told to
    tie both (`ensure_weight_tying`).
    """
    rules = mapping.by_destination().get("embed_tokens.embedding", ())
    tables = {piece.source for piece in rules} & set(adapter.whole)
    tells = adapter.config.fields.get("ensure_weight_tying")
    if config.tie_word_embeddings and tables and not tells:
        raise ValueError(
            f"'{adapter.source.name}' saves {', '.join(tables)} whole, and the head of "
            "the base is that table: with PEFT the head keeps the table of the base, "
            "and the two differ. Merge it with PEFT into a model with "
            "tie_word_embeddings=False first."
        )


def load_hf_with_lora(
    path: str | os.PathLike[str],
    adapter: str | os.PathLike[str],
    like: Any,
    *,
    config: DecoderConfig | None = None,
    progress: Progress | None = None,
) -> Any:
    """Loads a Hugging Face checkpoint with a LoRA adapter merged into its weights.

    Each adapted weight is `W + scale * B @ A` in float32, cast once to the dtype of
    the abstract tree; with `use_dora` each output of that sum is scaled to its
    magnitude.

    Args:
      path: Base checkpoint, as in `load_hf`.
      adapter: Directory saved by PEFT.
      like: Abstract tree to load, as in `load_hf`.
      config: Config of the base model, as in `load_hf`.
      progress: Called after each tensor of the base with bytes read and total bytes.

    Returns:
      Tree of the same structure, with arrays as leaves.

    Raises:
      FileNotFoundError: If a file is missing.
      ValueError: If the adapter is not supported or not of this base, or for a reason
        listed in `load_hf`.

    Examples:
      >>> bridge.save_lora(path, adapter, config)
      >>> merged = bridge.load_hf_with_lora("small-llama", path, like)
      >>> merged["lm_head"]["kernel"].shape
      (16, 64)
    """
    check_local(path, adapter)
    base, config, mapping = open_hf(path, config)
    opened = in_family(open_lora(adapter), mapping, config)
    _check_tied(opened, mapping, config)
    transposed = find_family(config.model_type).fan_in_fan_out
    source = merge_lora(base, opened, transposed=transposed)
    return load(source, mapping, like, progress=progress)
