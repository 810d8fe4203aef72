"""`fsdp-jax edit`: renames, drops and casts the tensors of a checkpoint."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated

import jax.numpy as jnp
import tyro

import bridge
from fsdp_jax._report import bytes_bar
from fsdp_jax.cli._errors import check_empty

_Pairs = Annotated[
    tyro.conf.UseAppendAction[tuple[tuple[str, str], ...]],
    tyro.conf.arg(metavar="FROM TO"),
]
_Patterns = Annotated[
    tyro.conf.UseAppendAction[tuple[str, ...]], tyro.conf.arg(metavar="PATTERN")
]
_DTYPES = ("float32", "bfloat16", "float16")


@dataclasses.dataclass(frozen=True)
class Edit:
    """Write a checkpoint with other names, other dtypes or fewer tensors.

    Edits Hugging Face's files, of which it writes safetensors, and Megatron's
    distributed checkpoints (torch_dist and fsdp_dtensor) by their keys on disk. One
    tensor is in memory at a time, and all that is not edited is copied bit by bit. The
    config is copied too and not changed.

    Attributes:
      src: Checkpoint to read: a directory, or a file of weights.
      dst: Directory to write; new.
      rename: A regular expression, and what replaces it in every name; may be repeated.
      drop: Tensors to leave out, by name; `*` matches anything; may be repeated.
      cast: Tensors by name, and their new dtype: float32, bfloat16 or float16; may be
        repeated.
    """

    src: tyro.conf.Positional[Path]
    dst: tyro.conf.Positional[Path]
    rename: _Pairs = ()
    drop: _Patterns = ()
    cast: _Pairs = ()

    def run(self) -> None:
        """Finds out what SRC is, and writes DST."""
        if not (self.rename or self.drop or self.cast):
            raise ValueError("Nothing to edit: give --rename, --drop or --cast.")
        unknown = [dtype for _, dtype in self.cast if dtype not in _DTYPES]
        if unknown:
            raise ValueError(f"--cast to {unknown[0]}: one of {', '.join(_DTYPES)}.")
        check_empty(self.dst, "DST")
        cast = tuple((pattern, jnp.dtype(dtype)) for pattern, dtype in self.cast)
        edits = bridge.Edits(self.rename, self.drop, cast)
        if bridge.megatron.is_megatron(self.src):
            bridge.megatron.edit_distributed(self.src, self.dst, edits)
        else:
            with bytes_bar(f"writing {self.dst}") as progress:
                bridge.edit_safetensors(self.src, self.dst, edits, progress=progress)
        print(f"{self.src} is now in {self.dst}")
