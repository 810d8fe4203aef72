"""Tables of records: Parquet and Arrow files."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fsdp_jax.cli._errors import require


def is_table(file: Path) -> bool:
    """Returns whether a file is a table, by its name.

    Args:
      file: File of `--data`.
    """
    return file.suffix.lower() in (".parquet", ".arrow")


def check_table(file: Path) -> None:
    """Raises a `ValueError` if the package that reads tables is missing.

    Args:
      file: Table.
    """
    _module("parquet", file)


def read_table(file: Path) -> Iterator[dict[str, Any]]:
    """Yields the rows of a table.

    Args:
      file: Parquet, or Arrow as `datasets` writes it.

    Raises:
      ValueError: If it is neither.
    """
    is_arrow = file.suffix.lower() == ".arrow"
    try:
        for batch in _arrow(file) if is_arrow else _parquet(file):
            yield from batch.to_pylist()
    except (ValueError, OSError) as error:
        kind = "an Arrow" if is_arrow else "a Parquet"
        raise ValueError(f"--data '{file}' is not {kind} file: {error}") from error


def _parquet(file: Path) -> Iterator[Any]:
    with _module("parquet", file).ParquetFile(file) as table:
        yield from table.iter_batches()


def _arrow(file: Path) -> Iterator[Any]:
    """Yields the batches of a stream, or of a file, whose first bytes say that."""
    ipc, pyarrow = _module("ipc", file), require("pyarrow", f"--data '{file}'")
    with pyarrow.memory_map(str(file)) as source:
        if source.read(6) == b"ARROW1":
            source.seek(0)
            table = ipc.open_file(source)
            yield from map(table.get_batch, range(table.num_record_batches))
        else:
            source.seek(0)
            yield from ipc.open_stream(source)


def _module(name: str, file: Path) -> Any:
    require("pyarrow", f"--data '{file}'")
    return require(f"pyarrow.{name}", f"--data '{file}'")
