"""`--data` takes Hugging Face data sets: folders, and ids of the hub."""

from __future__ import annotations

import gzip
import io
import json
from collections.abc import Iterator
from pathlib import Path

import pyarrow
import pytest
from helpers.errors import facts
from helpers.hub_server import COMMIT, Hub, running
from huggingface_hub import constants
from pyarrow import parquet

from fsdp_jax.cli import main
from fsdp_jax.cli._dataset import dataset_name, is_hub_id
from fsdp_jax.cli._dataset_layout import choose_split, find_configs
from fsdp_jax.cli._records import read_records
from fsdp_jax.cli._tokens import check_files

ABSENT = "http://127.0.0.1:9"  # No server has the port "discard".


def rows(*texts: str) -> list[dict[str, str]]:
    return [{"text": text} for text in texts]


def as_parquet(*texts: str) -> bytes:
    sink = io.BytesIO()
    parquet.write_table(pyarrow.Table.from_pylist(rows(*texts)), sink)
    return sink.getvalue()


def as_stream(file: Path, *texts: str):
    """Writes a stream as `datasets` does."""
    table = pyarrow.Table.from_pylist(rows(*texts))
    file.parent.mkdir(parents=True, exist_ok=True)
    with pyarrow.OSFile(str(file), "wb") as sink:
        with pyarrow.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table)


def texts(entry: Path | str) -> list[str]:
    return [record.text for record in read_records(Path(entry), None)]


README = b"""---
license: mit
configs:
- config_name: small
  data_files:
  - split: train
    path: small/*.parquet
- config_name: large
  default: true
  data_dir: big
  data_files:
    train: ["**/a.parquet", b.parquet]
    held: h?.parquet
---
# A data set
"""
REPOS = {
    "org/plain": {
        "README.md": b"# Nothing in a header",
        "data/train-00000-of-00002.parquet": as_parquet("a", "b"),
        "data/train-00001-of-00002.parquet": as_parquet("c"),
        "data/test-00000-of-00001.parquet": as_parquet("t"),
    },
    "org/configs": {
        "README.md": README,
        "small/x.parquet": as_parquet("small"),
        "big/deep/a.parquet": as_parquet("a"),
        "big/b.parquet": as_parquet("b"),
        "big/h1.parquet": as_parquet("h"),
        "big/not.parquet": as_parquet("not"),
    },
    "org/lacking": {"data/train-00001-of-00002.parquet": as_parquet("c")},
    "org/pictures": {"0.png": b"png"},
    "org/gated": {"train.jsonl": b'{"text": "secret"}'},
}


@pytest.fixture
def hub(monkeypatch, tmp_path) -> Iterator[Hub]:
    with running(Hub(REPOS, gated="org/gated")) as server:
        connect(monkeypatch, server.url, tmp_path / "cache")
        yield server


def connect(monkeypatch, url: str, cache: Path):
    template = url + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "ENDPOINT", url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))


def test_a_split_of_the_hub_is_fetched_and_no_other(hub):
    assert texts("org/plain") == ["a", "b", "c"]
    wanted = {"README.md", *(f"data/train-0000{i}-of-00002.parquet" for i in range(2))}
    assert hub.fetched == {"org/plain": wanted}
    assert texts("org/plain:test") == texts(f"org/plain@{COMMIT}:default:test") == ["t"]


def test_what_was_fetched_is_read_without_a_network(hub, monkeypatch, tmp_path):
    assert texts("org/plain") == ["a", "b", "c"]
    connect(monkeypatch, ABSENT, tmp_path / "cache")
    assert texts("org/plain") == ["a", "b", "c"]
    with pytest.raises(ValueError, match=facts("org/plain:test", "'test'", "train")):
        texts("org/plain:test")


def test_the_readme_says_which_files_are_the_splits_of_a_config(hub):
    assert texts("org/configs") == ["b", "a"]
    assert texts("org/configs:held") == ["h"]
    assert texts("org/configs:small:train") == ["small"]


@pytest.mark.parametrize(
    "entry, named",
    [
        ("org/absent", ["org/absent"]),
        ("org/plain@v9", ["org/plain@v9", "revision"]),
        ("org/plain:dev", ["'dev'", "train", "test"]),
        ("org/configs:huge:train", ["'huge'", "large", "small"]),
        ("org/lacking", ["'train'", "data/train-00000-of-00002.parquet"]),
        ("org/pictures", [".parquet", ".jsonl"]),
        ("org/gated", ["org/gated", "`hf auth login`"]),
        ("a--b/c", ["a--b/c"]),
    ],
)
def test_what_the_hub_has_not_is_one_line(entry, named, hub):
    with pytest.raises(ValueError, match=facts(f"--data '{entry}'", *named)) as error:
        texts(entry)
    assert "\n" not in str(error.value)


def test_a_hub_that_does_not_answer_is_one_line(monkeypatch, llama, tmp_path, capsys):
    connect(monkeypatch, ABSENT, tmp_path / "cache")
    argv = ["train", "--hf", str(llama), "--data", "org/name", "--steps", "1"]
    assert main([*argv, "--save", str(tmp_path / "save")]) == 2
    told = capsys.readouterr().err.strip()
    assert told.startswith("fsdp-jax: error: ") and "\n" not in told
    assert "'org/name'" in told and ABSENT in told
    assert not (tmp_path / "save").exists()


def test_folders_of_save_to_disk_are_read(tmp_path):
    for split in ("train", "test"):
        name = "data-00000-of-00001.arrow"
        as_stream(tmp_path / "both" / split / name, split)
        state = {"_data_files": [{"filename": name}], "_split": split}
        (tmp_path / "both" / split / "state.json").write_text(json.dumps(state))
        (tmp_path / "both" / split / "dataset_info.json").write_text("{}")
    splits = json.dumps({"splits": ["train", "test"]})
    (tmp_path / "both" / "dataset_dict.json").write_text(splits)
    assert texts(tmp_path / "both") == ["train"]
    assert texts(f"{tmp_path / 'both'}:test") == ["test"]
    assert texts(tmp_path / "both" / "test") == ["test"]


def test_folders_of_each_format_are_read(tmp_path):
    lines = "".join(json.dumps(row) + "\n" for row in rows("a", "b")).encode()
    for name, data in (
        ("train.jsonl", lines),
        ("train.jsonl.gz", gzip.compress(lines)),
        ("train.jsonl.zst", pyarrow.compress(lines, "zstd", asbytes=True)),
        ("train.json", json.dumps(rows("a", "b")).encode()),
        ("x.parquet", as_parquet("a", "b")),
    ):
        folder = tmp_path / name.replace(".", "-")
        folder.mkdir()
        (folder / name).write_bytes(data)
        assert texts(folder) == ["a", "b"], name
    file = tmp_path / "file" / "train.arrow"
    file.parent.mkdir()
    table = pyarrow.Table.from_pylist(rows("a", "b"))
    with pyarrow.ipc.new_file(str(file), table.schema) as writer:
        writer.write_table(table)
    assert texts(file.parent) == texts(file) == ["a", "b"]


@pytest.mark.parametrize(
    "names, splits",
    [
        (
            ["data/my_part-00000-of-00001.parquet", "other.parquet"],
            {"my_part": ["data/my_part-00000-of-00001.parquet"]},
        ),
        (
            ["x/dev/0.jsonl", "x/training/0.jsonl"],
            {"train": ["x/training/0.jsonl"], "validation": ["x/dev/0.jsonl"]},
        ),
        (["a-test.jsonl", "b.jsonl", "contest.jsonl"], {"test": ["a-test.jsonl"]}),
        (
            ["one.jsonl", "two.jsonl", ".hidden.jsonl"],
            {"train": ["one.jsonl", "two.jsonl"]},
        ),
    ],
)
def test_names_of_files_say_their_splits(names, splits):
    (found,) = find_configs(names, []).splits.values()
    assert found == splits


def test_several_configs_without_a_default_are_refused():
    configs = find_configs(
        ["a.jsonl", "b.jsonl"],
        [{"config_name": name, "data_files": f"{name}.jsonl"} for name in ("a", "b")],
    )
    with pytest.raises(ValueError, match=facts("a, b")):
        choose_split(configs, None, None)


@pytest.mark.parametrize(
    "files, named",
    [
        ({"a.jsonl": b"{}", "a.parquet": b""}, [".jsonl", ".parquet"]),
        ({"a.txt": b"text"}, [".parquet"]),
        ({"state.json": b"[]"}, ["state.json"]),
        ({"state.json": b"{}"}, ["state.json", "_data_files"]),
        ({"a.jsonl": b"{}", "README.md": b"---\nconfigs: [\n---\n"}, ["README"]),
        ({"a.jsonl": b"{}", "README.md": b"---\nconfigs: [a]\n---\n"}, ["README"]),
        ({"a.jsonl": b"{}", "README.md": b"---\nconfigs: 3\n---\n"}, ["README"]),
        ({"state.json": b'{"_data_files": [{"filename": "../x"}]}'}, ["../x"]),
        ({"dataset_dict.json": b'{"splits": ["../y"]}'}, ["../y"]),
    ],
)
def test_folders_that_are_no_data_set_are_refused(files, named, tmp_path):
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
    with pytest.raises(ValueError, match=facts(f"--data '{tmp_path}'", *named)):
        check_files([tmp_path])


def test_damaged_files_are_named(tmp_path):
    for name in ("train.jsonl.gz", "train.jsonl.zst", "train.arrow", "train.json"):
        folder = tmp_path / name.replace(".", "-")
        folder.mkdir()
        (folder / name).write_bytes(b"[no such format")
        with pytest.raises(ValueError, match=facts(str(folder / name))):
            texts(folder)


def test_missing_files_are_not_taken_for_hub_ids(tmp_path):
    assert not is_hub_id(Path("data/text.txt"))
    assert not is_hub_id(tmp_path / "no")
    assert dataset_name(Path("a/b/c")) is None
    with pytest.raises(ValueError, match=facts("'data/chats.jsonl'")):
        check_files([Path("data/chats.jsonl")])


def test_a_run_remembers_folders_whole_and_hub_ids_as_they_are(tmp_path, monkeypatch):
    from fsdp_jax.cli._run_file import _as_yaml

    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    paths = (Path("org/name:test"), Path("folder"))
    assert _as_yaml(paths, True) == ["org/name:test", str(tmp_path / "folder")]
