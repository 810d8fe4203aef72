"""Hybrid models: Megatron's GPT with a layer for each of its sub-blocks, and back.

A layer of a GPT holds attention and an MLP. A pattern such as `M*-M*E` names the layers
of a hybrid model: the i-th `*` has the attention of the i-th layer of a GPT, the i-th
`-` (dense) or `E` (experts) its MLP, and `M` (Mamba) has no equivalent.

Source: Megatron-LM megatron/core/dist_checkpointing/gpt_checkpoint_interop.py
::gpt_compatible_layer_maps, tools/checkpoint/gpt_hybrid_conversion.py
"""

import dataclasses
import re
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any

import numpy as np

from bridge._box import complete, shape_of
from bridge.formats._source import Source
from bridge.formats._tensor_source import TensorSource
from bridge.megatron._cast import Cast
from bridge.megatron._key_mapping import hybrid_pattern
from bridge.megatron._views import Tensor
from bridge.megatron._vocab import Keyed
from bridge.megatron.buffers._param_order import is_parameter
from bridge.megatron.read._checkpoint import MegatronCheckpoint
from bridge.megatron.read._optimizer import MegatronOptimizer

_LAYER = re.compile(r"^decoder\.layers\.(\d+)\.(.+)$")
_ATTENTION = re.compile(r"^(self_attention|input_layernorm)\.")
_MLP = re.compile(r"^(mlp|pre_mlp_layernorm)\.")


@dataclasses.dataclass(frozen=True)
class HybridLayers:
    """Numbers of a hybrid model's layers.

    Attributes:
      attention: Layer with the attention of each of the GPT's layers.
      mlp: Layer with the MLP of each.
      others: Layers without an equivalent in a GPT.
    """

    attention: tuple[int, ...]
    mlp: tuple[int, ...]
    others: tuple[int, ...]

    @classmethod
    def of(cls, pattern: str) -> "HybridLayers":
        """Returns the layers of a pattern; `|` between pipeline stages is ignored.

        Raises:
          ValueError: If no GPT is the equivalent of the pattern's other layers.
        """
        layers = pattern.replace("|", "")

        def places(symbols: str) -> tuple[int, ...]:
            return tuple(i for i, symbol in enumerate(layers) if symbol in symbols)

        attention, mlp = places("*"), places("-E")
        wrong = []
        if unknown := sorted(set(layers) - set("M*-E")):
            wrong.append(f"{unknown} are no layers of a GPT (known: M * - E)")
        if "-" in layers and "E" in layers:
            wrong.append("a GPT has a dense MLP (-) or experts (E) in all layers")
        if len(attention) != len(mlp) or not attention:
            wrong.append(
                f"{len(attention)} of attention (*) and {len(mlp)} of an MLP (- or E) "
                "do not make layers of a GPT, which have one of each"
            )
        if wrong:
            raise ValueError(f"Hybrid pattern {pattern!r}: {'; '.join(wrong)}.")
        return cls(attention, mlp, places("M"))


def to_hybrid(
    run: MegatronCheckpoint, pattern: str, fresh: Source | None = None
) -> MegatronCheckpoint:
    """Renames the tensors of a GPT as those of a hybrid model; reads none.

    `write_megatron` writes the result, with Adam's state where the run has it.

    Args:
      run: Checkpoint of a GPT, as `open_megatron` returns it.
      pattern: Layers of the hybrid model, Megatron's `--hybrid-layer-pattern`.
      fresh: Initial weights of the layers `M` by canonical name, such as
        `decoder.layers.0.mixer.A_log`; their moments are zeros.

    Returns:
      Checkpoint of the hybrid model; its args have `hybrid_layer_pattern`.

    Raises:
      ValueError: If the pattern and the layers of the run do not match, or `fresh` does
        not hold exactly the layers `M`.

    Examples:
      >>> gpt = bridge.megatron.open_megatron(path)  # doctest: +SKIP
      >>> hybrid = bridge.megatron.to_hybrid(gpt, "*-" * 32)  # doctest: +SKIP
    """
    layers = HybridLayers.of(pattern)
    if before := hybrid_pattern(run.args):
        raise ValueError(f"'{run.path}' is hybrid already: its pattern is {before!r}.")
    _check_count(run, len(layers.attention))
    added = {} if fresh is None else {key: Keyed(fresh, key) for key in fresh.keys()}
    _check_fresh(added, layers)

    def rename(name: str) -> str:
        match = _LAYER.match(name)
        if match is None:
            return name
        of = layers.attention if _ATTENTION.match(match[2]) else layers.mlp
        return f"decoder.layers.{of[int(match[1])]}.{match[2]}"

    args = {**run.args, "hybrid_layer_pattern": pattern, "is_hybrid_model": True}
    args["num_layers"] = len(pattern.replace("|", ""))
    return _renamed(run, rename, args, added)


def to_gpt(run: MegatronCheckpoint) -> MegatronCheckpoint:
    """Renames the tensors of a hybrid model as those of a GPT: undoes `to_hybrid`.

    Args:
      run: Checkpoint of a hybrid model, whose args have `hybrid_layer_pattern`.

    Returns:
      Checkpoint of a GPT without the layers `M`, which `left_out` names.

    Raises:
      ValueError: If the run is not hybrid, or no GPT is its equivalent.
    """
    pattern = hybrid_pattern(run.args)
    if not pattern:
        raise ValueError(f"'{run.path}' is not hybrid: args have no pattern.")
    layers = HybridLayers.of(pattern)
    numbers = {
        layer: number
        for of in (layers.attention, layers.mlp)
        for number, layer in enumerate(of)
    }

    def rename(name: str) -> str | None:
        match = _LAYER.match(name)
        if match is None:
            return name
        number = numbers.get(int(match[1]))
        return None if number is None else f"decoder.layers.{number}.{match[2]}"

    removed = ("hybrid_layer_pattern", "hybrid_override_pattern", "is_hybrid_model")
    args = {key: value for key, value in run.args.items() if key not in removed}
    args["num_layers"] = len(layers.attention)
    gpt = _renamed(run, rename, args, {})
    if not layers.others:
        return gpt
    line = f"layers {list(layers.others)} of Mamba, which a GPT does not have"
    return dataclasses.replace(gpt, left_out=(*gpt.left_out, line))


def _check_count(run: MegatronCheckpoint, count: int) -> None:
    matches = [_LAYER.match(key) for key in run.source.keys()]
    found = {int(match[1]) for match in matches if match}
    if found != set(range(count)):
        raise ValueError(
            f"'{run.path}' has {len(found)} layers; the pattern is of a GPT of {count}."
        )
    unknown = sorted(
        match[0]
        for match in matches
        if match and not (_ATTENTION.match(match[2]) or _MLP.match(match[2]))
    )
    if unknown:
        raise ValueError(
            f"'{run.path}' has tensors of neither attention nor an MLP: {unknown}."
        )


def _check_fresh(added: Iterable[str], layers: HybridLayers) -> None:
    matches = {key: _LAYER.match(key) for key in added}
    found = {int(match[1]) for match in matches.values() if match}
    stray = sorted(key for key, match in matches.items() if match is None)
    if found != set(layers.others) or stray:
        raise ValueError(
            f"fresh holds layers {sorted(found)}{' and ' if stray else ''}"
            f"{', '.join(stray)}; the pattern has M at {list(layers.others)}. A GPT "
            "has no weights for these: give them, and no others."
        )


def _renamed(
    run: MegatronCheckpoint,
    rename: Callable[[str], str | None],
    args: Mapping[str, Any],
    added: Mapping[str, Tensor],
) -> MegatronCheckpoint:
    """Returns a checkpoint with other names; a tensor named None is left out."""

    def of(source: Source, more: Mapping[str, Tensor]) -> Source:
        names = {key: rename(key) for key in source.keys()}
        kept = {new: Keyed(source, key) for key, new in names.items() if new}
        return TensorSource(source.name, MappingProxyType({**kept, **more}))

    state = run.optimizer
    if state is not None:
        zeros = {
            key: _Zeros(tensor.shape)
            for key, tensor in added.items()
            if is_parameter(key)
        }
        masters = Cast(of(_NOTHING, added), np.dtype(np.float32))
        wide = {key: Keyed(masters, key) for key in zeros}
        state = MegatronOptimizer(
            of(state.exp_avg, zeros),
            of(state.exp_avg_sq, zeros),
            None if state.master is None else of(state.master, wide),
            state.step,
            state.param_groups,
        )
    return dataclasses.replace(
        run,
        source=of(run.source, added),
        optimizer=state,
        args=MappingProxyType(dict(args)),
    )


_NOTHING = TensorSource("fresh", MappingProxyType({}))


@dataclasses.dataclass(frozen=True)
class _Zeros:
    """Moments of a weight that was never updated."""

    shape: tuple[int, ...]
    dtype: np.dtype = np.dtype(np.float32)

    def read(self, slices: tuple[slice, ...] = ()) -> np.ndarray:
        return np.zeros(shape_of(complete(slices, self.shape)), self.dtype)
