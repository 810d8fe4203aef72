"""Tables of records: Parquet files."""

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
    return file.suffix.lower() == ".parquet"


def check_table(file: Path) -> None:
    """Raises a `ValueError` if the package that reads tables is missing.

    Args:
      file: Table.
    """
    _parquet(file)


def read_table(file: Path) -> Iterator[dict[str, Any]]:
    """Yields the rows of a table, without fields that are null.

    Args:
      file: Parquet file.

    Raises:
      ValueError: If it is no Parquet.
    """
    parquet = _parquet(file)
    try:
        with parquet.ParquetFile(file) as table:
            for batch in table.iter_batches():
                yield from map(_without_nulls, batch.to_pylist())
    except (ValueError, OSError) as error:
        raise ValueError(f"--data '{file}' is no Parquet: {error}") from error


def _parquet(file: Path) -> Any:
    require("pyarrow", f"--data '{file}'")
    return require("pyarrow.parquet", f"--data '{file}'")


def _without_nulls(row: dict[str, Any]) -> dict[str, Any]:
    # A table has all columns in all rows, JSON Lines only those that a record has.
    return {name: value for name, value in row.items() if value is not None}
