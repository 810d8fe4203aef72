"""Parquet has the same records as JSON Lines."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pyarrow
import pytest
from helpers.errors import facts
from pyarrow import parquet

from fsdp_jax.cli import main
from fsdp_jax.cli._records import read_records
from fsdp_jax.cli._tokens import check_files

RECORDS = [
    {"text": "One and two."},
    {"prompt": "3+4=", "completion": "7"},
    {"prompt": "1+1=", "completion": "2"},
]


@pytest.fixture
def lines(tmp_path) -> Path:
    file = tmp_path / "data.jsonl"
    file.write_text("\n".join(map(json.dumps, RECORDS)))
    return file


@pytest.fixture
def table(tmp_path) -> Path:
    """The same records, with null where one lacks a field, in two row groups."""
    names = ("text", "prompt", "completion")
    rows = [{name: record.get(name) for name in names} for record in RECORDS]
    file = tmp_path / "data.parquet"
    parquet.write_table(pyarrow.Table.from_pylist(rows), file, row_group_size=2)
    return file


@pytest.fixture
def array(tmp_path) -> Path:
    """The same records as one array of JSON over many lines, with nulls."""
    rows = [{"id": None, "text": None, **record} for record in RECORDS]
    file = tmp_path / "data.json"
    file.write_text(json.dumps(rows, indent=2))
    return file


def test_tables_and_arrays_have_the_records_of_the_lines(lines, table, array, tmp_path):
    wanted = read_records(lines, None)
    assert read_records(table, None) == read_records(array, None) == wanted
    (tmp_path / "lines.json").write_text(lines.read_text())
    assert read_records(tmp_path / "lines.json", None) == wanted
    (tmp_path / "one.json").write_text(json.dumps(RECORDS[0], indent=2))
    assert read_records(tmp_path / "one.json", None) == wanted[:1]
    (tmp_path / "cut.json").write_text(array.read_text()[:-3])
    with pytest.raises(ValueError, match=facts("cut.json'", "JSON")):
        read_records(tmp_path / "cut.json", None)
    with_nulls = tmp_path / "nulls.jsonl"
    with_nulls.write_text("\n".join(map(json.dumps, json.loads(array.read_text()))))
    assert read_records(with_nulls, None) == wanted


def test_runs_on_them_have_the_rows_of_the_lines(lines, table, array, llama, capsys):
    shown = []
    for file in (lines, table, array):
        argv = ["data", str(llama), "--data", str(file), "--seq", "16"]
        assert main([*argv, "--tokenizer", "bytes"]) == 0
        shown.append(capsys.readouterr().out.replace(file.name, ""))
    assert shown[0] == shown[1] == shown[2] and "3 documents" in shown[0]


def test_a_bad_row_of_a_table_is_named(tmp_path):
    file = tmp_path / "bad.parquet"
    rows = [{"text": "a"}, {"text": None}]
    parquet.write_table(pyarrow.Table.from_pylist(rows), file)
    with pytest.raises(ValueError, match=facts("bad.parquet", "row 2", "1 of 2")):
        read_records(file, None)
    file = tmp_path / "bad.json"
    file.write_text(json.dumps(rows, indent=2))
    with pytest.raises(ValueError, match=facts("bad.json", "row 2", "1 of 2")):
        read_records(file, None)


def test_a_file_that_is_no_table_is_one_line(llama, tmp_path, capsys):
    file = tmp_path / "x.parquet"
    file.write_bytes(b"PAR1 but no more")
    argv = ["train", "--hf", str(llama), "--data", str(file), "--steps", "1"]
    assert main([*argv, "--save", str(tmp_path / "save")]) == 2
    told = capsys.readouterr().err
    assert told.startswith("fsdp-jax: error: ") and str(file) in told
    assert not (tmp_path / "save").exists()


def test_a_missing_package_is_named_before_anything_is_read(table, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ValueError, match=facts(f"'{table}'", "'pyarrow'")):
        check_files([table])
