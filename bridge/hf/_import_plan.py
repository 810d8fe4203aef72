"""Plan of an import, from headers alone: tensors, their places, their bytes."""

import collections
import dataclasses
import os
from typing import Any

import jax
import numpy as np

from bridge._box import Box, complete
from bridge._report import fold_numbers
from bridge._tree import named_leaves
from bridge.formats._source import Source
from bridge.hf._hf_checkpoint import open_hf
from bridge.models import DecoderConfig
from bridge.rules._layout import Layout, Side
from bridge.rules._mapping import Mapping, is_ignored
from bridge.rules._piece import Piece
from bridge.streaming._bands import elements_to_read
from bridge.streaming._cooperate import put_together
from bridge.streaming._shards import inner_boxes


@dataclasses.dataclass(frozen=True)
class PlannedLeaf:
    """One leaf of the tree, and the tensors that fill it.

    Args:
      name: Path of the leaf.
      shape: Shape of the leaf, stacked layers first.
      dtype: Dtype of the leaf.
      tensors: Names of the tensors that fill it, in the order in which they are read.
      layouts: Distinct patterns from tensor to leaf.
      nbytes: Bytes of the parts of those tensors that belong to the leaf.

    Examples:
      >>> leaf = bridge.plan("small-llama").leaves[0]
      >>> leaf.name, leaf.tensors
      ('embed_tokens.embedding', ('model.embed_tokens.weight',))
    """

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype
    tensors: tuple[str, ...]
    layouts: tuple[str, ...]
    nbytes: int


@dataclasses.dataclass(frozen=True)
class ImportPlan:
    """Plan of a call of `load_hf`; print it for a table.

    Args:
      source: Name of the checkpoint.
      config: Config of the decoder.
      leaves: Leaves that would be filled.
      left_out: Names of the tensors of the checkpoint that no leaf needs.
      bytes_read: Bytes of the checkpoint that each process would read, by its index.

    Examples:
      >>> planned = bridge.plan("small-llama")
      >>> planned.left_out, planned.bytes_read
      ((), {0: 28992})
    """

    source: str
    config: DecoderConfig
    leaves: tuple[PlannedLeaf, ...]
    left_out: tuple[str, ...]
    bytes_read: dict[int, int]

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors that would be used."""
        return sum(leaf.nbytes for leaf in self.leaves)

    def as_dict(self) -> dict[str, Any]:
        """Returns the same as JSON holds it."""
        return {
            "source": self.source,
            "model_type": self.config.model_type,
            "bytes": self.nbytes,
            "bytes_read_by_process": self.bytes_read,
            "left_out": self.left_out,
            "leaves": [
                dataclasses.asdict(leaf) | {"dtype": str(leaf.dtype)}
                for leaf in self.leaves
            ],
        }

    def __str__(self) -> str:
        """A row a leaf, layers folded, and the sums."""
        header = ("leaf", "shape", "dtype", "MiB", "tensors", "layout")
        rows = [
            (
                leaf.name,
                "x".join(map(str, leaf.shape)),
                str(leaf.dtype),
                f"{leaf.nbytes / 2**20:,.2f}",
                ", ".join(fold_numbers(leaf.tensors)),
                "; ".join(leaf.layouts),
            )
            for leaf in self.leaves
        ]
        lines = _columns([header, *rows])
        lines.append(
            f"{self.config.model_type}: {self.nbytes / 2**20:,.2f} MiB in "
            f"{sum(len(leaf.tensors) for leaf in self.leaves):,} tensors of "
            f"'{self.source}'"
        )
        lines += [
            f"process {process} reads {count / 2**20:,.2f} MiB"
            for process, count in self.bytes_read.items()
        ]
        lines += [f"left out: {name}" for name in fold_numbers(self.left_out)]
        return "\n".join(lines)


def plan(
    path: str | os.PathLike[str],
    like: Any = None,
    *,
    config: DecoderConfig | None = None,
) -> ImportPlan:
    """Plans a call of `load_hf` from the headers of a checkpoint; reads no weight.

    There is one exception: if the config ties an output projection that is stored all
    the same, that one is compared with the embedding.

    Args:
      path: Checkpoint, as `load_hf` takes it.
      like: Abstract parameters, as `load_hf` takes them; None plans unsharded leaves in
        the dtypes of their tensors.
      config: Config of the decoder; None reads `config.json`.

    Returns:
      Tensors, layouts and bytes of each leaf; print it for a table.

    Raises:
      FileNotFoundError: If there is no checkpoint or no config.
      ValueError: If the checkpoint is damaged, its family not supported, or `like`,
        config and checkpoint do not fit; everything that does not fit is listed.

    Examples:
      >>> planned = bridge.plan("small-llama", like)
      >>> planned.nbytes, len(planned.leaves)
      (28992, 12)
    """
    source, config, mapping = open_hf(path, config)
    return plan_of(source, mapping, config, like)


def plan_of(
    source: Source, mapping: Mapping, config: DecoderConfig, like: Any = None
) -> ImportPlan:
    """Says what `load` would do with any source and mapping; see `plan`."""
    leaves = _expected(source, mapping) if like is None else named_leaves(like)
    mapping.check(leaves, source)
    pieces = mapping.by_destination()
    return ImportPlan(
        source=source.name,
        config=config,
        leaves=tuple(
            _planned(source, name, leaf, pieces[name]) for name, leaf in leaves.items()
        ),
        left_out=tuple(k for k in source.keys() if is_ignored(k, mapping.ignore)),
        bytes_read=_bytes_read(source, pieces, leaves),
    )


def _expected(source: Source, mapping: Mapping) -> dict[str, jax.ShapeDtypeStruct]:
    """The leaves that the rules would make, each in the dtype of its first tensor."""
    held = set(source.keys())
    return {
        name: jax.ShapeDtypeStruct(
            parts[0].destination_shape,
            source.dtype(key) if (key := parts[0].source) in held else np.float32,
        )
        for name, parts in mapping.by_destination().items()
    }


def _planned(source: Source, name: str, leaf: Any, pieces: list[Piece]) -> PlannedLeaf:
    return PlannedLeaf(
        name=name,
        shape=tuple(leaf.shape),
        dtype=np.dtype(leaf.dtype),
        tensors=tuple(dict.fromkeys(piece.source for piece in pieces)),
        layouts=tuple(dict.fromkeys(_pattern(piece.layout) for piece in pieces)),
        nbytes=sum(p.num_elements * source.dtype(p.source).itemsize for p in pieces),
    )


def _bytes_read(
    source: Source, pieces: dict[str, list[Piece]], leaves: dict[str, Any]
) -> dict[int, int]:
    """Sums for each process what it reads of each leaf."""
    totals: dict[int, int] = collections.defaultdict(int)
    for name, leaf in leaves.items():
        for piece in pieces[name]:
            itemsize = source.dtype(piece.source).itemsize
            for process, count in _elements_read(leaf, pieces[name], piece).items():
                totals[process] += count * itemsize
    return dict(sorted(totals.items()))


def _elements_read(leaf: Any, pieces: list[Piece], piece: Piece) -> dict[int, int]:
    """Numbers of a section that each process reads: what it holds, or its even part."""
    sharding = getattr(leaf, "sharding", None)
    if sharding is None:
        return {0: piece.num_elements}
    boxes: dict[int, list[Box]] = collections.defaultdict(list)
    for device, index in sharding.devices_indices_map(leaf.shape).items():
        boxes[device.process_index].append(complete(index or (), leaf.shape))
    if put_together(leaf, pieces):
        devices = sum(map(len, boxes.values()))
        return {p: piece.num_elements * len(b) // devices for p, b in boxes.items()}
    return {
        process: elements_to_read(piece, inner_boxes(piece, held))
        for process, held in boxes.items()
    }


def _pattern(layout: Layout) -> str:
    return f"{_side(layout.source)} -> {_side(layout.destination)}"


def _side(side: Side) -> str:
    return " ".join(dim[0] if len(dim) == 1 else f"({' '.join(dim)})" for dim in side)


def _columns(rows: list[tuple[str, ...]]) -> list[str]:
    """Lines up columns, numbers on the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    right = {"MiB"}
    return [
        "  ".join(
            cell.rjust(width) if head in right else cell.ljust(width)
            for cell, width, head in zip(row, widths, rows[0], strict=True)
        ).rstrip()
        for row in rows
    ]
