"""Legacy checkpoints: one file per model-parallel rank, merged lazily.

`mp_rank_TT[_PPP][_EEE]/model_optim_rng.pt` holds the state of one rank: its slices of
the weights, the layers of its pipeline stage numbered from 0, and its experts numbered
from 0. Global layer numbers are derived by counting layers in the files, stage after
stage, not from the six settings that determine the pipeline layout.

Source: Megatron-LM megatron/training/checkpointing.py::get_checkpoint_name,
megatron/core/transformer/transformer_layer.py::get_transformer_layer_offset
"""

import dataclasses
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from bridge._report import format_report
from bridge.formats._torch_tensors import LazyTensor
from bridge.formats._torch_zip import flatten_tensors, read_torch_file
from bridge.megatron._names import EMBEDDING, HEAD, canonical_tensors, strip_prefix
from bridge.megatron._ranks import RANK_DIRECTORY, ParallelSizes, Rank
from bridge.megatron._tensor_parallel import Split, is_gated, merge, split_of
from bridge.megatron._views import Replicated, Tensor

FILE_NAME = "model_optim_rng.pt"

_UNREADABLE = {
    r"^language_model\.": "a model from before Megatron-Core",
    r"\.experts\.weight[12]$": "all experts of a layer in one matrix, transposed",
}
_CONVERT = "Load it with Megatron and save it with --ckpt-format torch_dist."
_MODEL_KEY = re.compile(r"model(\d*)")
_LAYER = re.compile(r"^(decoder\.layers\.)(\d+)(?=\.)")
_EXPERT = re.compile(r"(\.mlp\.experts\.)(\d+)(?=\.)")


@dataclasses.dataclass(frozen=True)
class LegacyDirectory:
    """Contents of a legacy checkpoint.

    Args:
      path: Directory of the checkpoint.
      sizes: Numbers of model-parallel ranks that wrote the checkpoint.
      files: Contents of each rank's file, with lazy tensors.
      tensors: Merged tensors of the model by canonical name.
    """

    path: Path
    sizes: ParallelSizes
    files: Mapping[Rank, Any]
    tensors: Mapping[str, Tensor]

    @property
    def common(self) -> Mapping[str, Any]:
        """Contents of the first rank's file, including settings and progress."""
        return self.files[Rank(0, 0, 0)]


def open_legacy(path: Path) -> LegacyDirectory:
    """Opens a legacy checkpoint of any TP, PP, VPP and EP; reads only the pickles.

    Args:
      path: Directory that contains the `mp_rank_*` directories.

    Raises:
      ValueError: If ranks are missing or inconsistent, a file is damaged or would
        execute code, or the layout is not supported; all errors of a kind are listed.
    """
    found = sorted(
        entry.name for entry in path.iterdir() if RANK_DIRECTORY.fullmatch(entry.name)
    )
    first = read_torch_file(path / found[0] / FILE_NAME)
    sizes = _sizes(path, first)
    _check_directories(path, sizes, found)
    files = {
        rank: read_torch_file(path / sizes.directory(rank) / FILE_NAME)
        for rank in sizes.ranks()
    }
    _check_files(path, sizes, files)
    return LegacyDirectory(path, sizes, files, merge_ranks(path, sizes, files))


def chunk_keys(file: Mapping[str, Any]) -> list[str]:
    """Returns the keys of a rank's model chunks; a virtual pipeline has several."""
    keys = [key for key in file if _MODEL_KEY.fullmatch(str(key))]
    return sorted(keys, key=lambda key: int(key.removeprefix("model") or 0))


def merge_ranks(
    path: Path, sizes: ParallelSizes, files: Mapping[Rank, Any]
) -> dict[str, Tensor]:
    """Merges the ranks' model chunks, or optimizer state with their names and shapes.

    Args:
      path: Directory of the checkpoint, for error messages.
      sizes: Numbers of model-parallel ranks.
      files: Model chunks of each rank; the first rank's also holds `args`.

    Returns:
      Merged tensors by canonical name.

    Raises:
      ValueError: If the ranks are inconsistent, or the layout is not supported.
    """
    args = files[Rank(0, 0, 0)]["args"]
    chunks = {
        rank: [canonical_tensors(chunk) for chunk in _chunks(file)]
        for rank, file in files.items()
    }
    found: dict[str, dict[Rank, Tensor]] = {}
    for rank, number, offset in _in_model_order(path, sizes, chunks):
        for name, tensor in chunks[rank][number].items():
            key = _global_name(name, offset, rank, chunks)
            found.setdefault(key, {})[rank] = tensor
    _check_layers(path, found, args)
    merged, wrong = {}, []
    for name, tensors in found.items():
        try:
            merged[name] = _merge(name, tensors, sizes, is_gated(args))
        except ValueError as error:
            wrong.append(f"  {name}: {error}")
    if wrong:
        raise ValueError(f"The ranks of '{path}' do not fit:\n" + "\n".join(wrong))
    tied = not args.get("untie_embeddings_and_output_weights", True)
    return _tie(merged) if tied else merged


def _sizes(path: Path, first: Any) -> ParallelSizes:
    args = first.get("args") if isinstance(first, dict) else None
    if not isinstance(args, dict):
        raise ValueError(
            f"'{path}' holds no `args`: without them nobody can tell its pipeline "
            "ranks from its expert ranks. Save it again from Megatron."
        )
    names = ("tensor", "pipeline", "expert")
    sizes = ParallelSizes(*(args.get(f"{n}_model_parallel_size") or 1 for n in names))
    version = first.get("checkpoint_version", 0)
    if version < 3:
        raise ValueError(
            f"'{path}' has checkpoint_version {version}: before 3.0 attention weights "
            "were in another order. Load and save it with a Megatron of today."
        )
    expert_tp = args.get("expert_tensor_parallel_size") or sizes.tp
    if args.get("num_experts") and expert_tp != sizes.tp:
        raise ValueError(
            f"'{path}' cuts experts among {expert_tp} tensor-parallel ranks and all "
            f"else among {sizes.tp}: which file holds what, the legacy format does not "
            "say. Save it with --ckpt-format torch_dist."
        )
    return sizes


def _check_directories(path: Path, sizes: ParallelSizes, found: list[str]) -> None:
    expected = {sizes.directory(rank) for rank in sizes.ranks()}
    present = {name for name in found if (path / name / FILE_NAME).is_file()}
    report = {
        f"missing (or without '{FILE_NAME}')": sorted(expected - present),
        "unexpected": sorted(set(found) - expected),
    }
    if any(report.values()):
        raise ValueError(
            f"'{path}' was saved by TP {sizes.tp} x PP {sizes.pp} x EP {sizes.ep} "
            f"ranks, but its directories are others:\n{format_report(report)}"
        )


def _check_files(path: Path, sizes: ParallelSizes, files: Mapping[Rank, Any]) -> None:
    steps = {
        sizes.directory(rank): file.get("iteration") for rank, file in files.items()
    }
    if len(set(steps.values())) > 1:
        raise ValueError(f"The ranks of '{path}' are of different iterations: {steps}.")
    names = [key for file in files.values() for chunk in _chunks(file) for key in chunk]
    for start, what in _UNREADABLE.items():
        found = [name for name in names if re.search(start, name)]
        if found:
            raise ValueError(f"'{path}' has {what} ('{found[0]}'). {_CONVERT}")


def _chunks(file: Mapping[str, Any]) -> list[dict[str, LazyTensor]]:
    return [
        {
            strip_prefix(name): tensor
            for name, tensor in flatten_tensors(file[key], key).items()
            if not name.endswith("_extra_state")
        }
        for key in chunk_keys(file)
    ]


def _in_model_order(
    path: Path,
    sizes: ParallelSizes,
    chunks: Mapping[Rank, list[dict[str, Tensor]]],
) -> Iterator[tuple[Rank, int, int]]:
    """Yields rank, chunk index and number of preceding layers, in layer order.

    A virtual pipeline assigns chunks to stages round-robin: chunk 0 of all stages comes
    before chunk 1 of all stages.
    """
    counts = {len(of_rank) for of_rank in chunks.values()}
    if len(counts) > 1 or counts == {0}:
        raise ValueError(f"The ranks of '{path}' have {sorted(counts)} model chunks.")
    offset = 0
    for number in range(*counts):
        for stage in range(sizes.pp):
            layers: set[int] = set()
            for rank in (rank for rank in chunks if rank.pp == stage):
                yield rank, number, offset
                layers |= _layers(chunks[rank][number])
            if layers != set(range(len(layers))):
                raise ValueError(f"'{path}': stage {stage} has the layers {layers}.")
            offset += len(layers)


def _layers(names: Mapping[str, Tensor]) -> set[int]:
    return {int(match[2]) for name in names if (match := _LAYER.match(name))}


def _global_name(
    name: str, offset: int, rank: Rank, chunks: Mapping[Rank, list[dict[str, Tensor]]]
) -> str:
    name = _LAYER.sub(lambda match: f"{match[1]}{int(match[2]) + offset}", name)
    if rank.ep == 0 or not _EXPERT.search(name):
        return name
    # Every rank holds the same number of experts, numbered from 0 in each layer.
    per_rank = 1 + max(
        int(match[2])
        for chunk in chunks[rank]
        for inner in chunk
        if (match := _EXPERT.search(inner))
    )
    return _EXPERT.sub(
        lambda match: f"{match[1]}{int(match[2]) + rank.ep * per_rank}", name
    )


def _check_layers(
    path: Path, found: Mapping[str, Any], args: Mapping[str, Any]
) -> None:
    report = {}
    for what, pattern, expected in (
        ("layers", _LAYER, args.get("num_layers")),
        ("experts", _EXPERT, args.get("num_experts")),
    ):
        numbers = {int(m[2]) for name in found if (m := pattern.search(name))}
        if expected and len(numbers) != expected:
            report[f"{what}: args say {expected}"] = [f"found {len(numbers)}"]
    if report:
        raise ValueError(f"'{path}' is not complete:\n{format_report(report)}")


def _merge(
    name: str, tensors: Mapping[Rank, Tensor], sizes: ParallelSizes, gated: bool
) -> Tensor:
    """Merges the ranks' tensors of one name: slices over tp, copies over pp and ep."""
    split = split_of(name, gated=gated) if sizes.tp > 1 else Split.NONE
    groups: dict[tuple[int, int], list[Tensor]] = {}
    for rank, tensor in sorted(tensors.items()):
        groups.setdefault((rank.pp, rank.ep), []).append(tensor)
    short = [group for group in groups.values() if len(group) != sizes.tp]
    if short:
        raise ValueError(f"{len(short[0])} of {sizes.tp} tensor-parallel ranks have it")
    if split is not Split.NONE:
        whole = {key: merge(group, split) for key, group in groups.items()}
        return _replicated({f"PP {p}, EP {e}": t for (p, e), t in whole.items()})
    return _replicated(
        {sizes.directory(rank): tensor for rank, tensor in sorted(tensors.items())}
    )


def _replicated(copies: Mapping[str, Tensor]) -> Tensor:
    kinds = {(copy.shape, copy.dtype) for copy in copies.values()}
    if len(kinds) > 1:
        shown = {label: (c.shape, str(c.dtype)) for label, c in copies.items()}
        raise ValueError(f"copies differ in shape or dtype: {shown}")
    if len(copies) == 1:
        return next(iter(copies.values()))
    return Replicated(tuple(copies.items()))


def _tie(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Marks the last stage's head as a copy of the embedding, for tied embeddings."""
    tensors = dict(tensors)
    copy = tensors.pop(HEAD, None)
    if copy is not None and EMBEDDING in tensors:
        copies = {EMBEDDING: tensors[EMBEDDING], f"the tied {HEAD}": copy}
        tensors[EMBEDDING] = _replicated(copies)
    return tensors
