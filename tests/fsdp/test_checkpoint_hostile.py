"""A directory that somebody else wrote: one clear error each, nothing touched outside.

The manifests here carry a right digest of themselves, as those of an attacker would.
"""

from __future__ import annotations

import base64
import hashlib
import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tensorstore as ts
from helpers.errors import facts
from helpers.saving_worker import like, state_at

import fsdp_jax as fsdp
from fsdp_jax.checkpoint._manifest import _sha256_of
from fsdp_jax.checkpoint._seal import seal, seal_files

SECRET = b"TOP SECRET"


class Counter:
    def get_state(self):
        return {"seen": 1}

    def set_state(self, state):
        pass


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("saved")
    (root / "tokenizer").write_text("tokens")
    fsdp.save(
        root / "run",
        state_at(1),
        metadata={"a": 1},
        files={"tokenizer": root / "tokenizer"},
        extras={"data": Counter()},
    )
    return root / "run"


@pytest.fixture
def run(saved, tmp_path) -> Path:
    shutil.copytree(saved, tmp_path / "run")
    (tmp_path / "secret").write_bytes(SECRET)
    return tmp_path / "run"


def state_of(run: Path) -> Path:
    return run / "1" / "state"


def edit(run: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Changes the manifest, and its digest with it."""
    path = state_of(run) / "manifest.json"
    body = json.loads(path.read_bytes())["body"]
    change(body)
    path.write_text(json.dumps({"body": body, "sha256": _sha256_of(body)}))


def claim_file(name: str) -> Callable[[dict[str, Any]], object]:
    digest = hashlib.sha256(SECRET).hexdigest()
    claimed = {"size": len(SECRET), "sha256": digest, "values": []}
    return lambda body: body["files"].update({name: claimed})


def assert_refused(run: Path, *said: object) -> None:
    """By everything that reads a step."""
    for read in (
        lambda: fsdp.load(run, like(), extras={"data": Counter()}),
        lambda: fsdp.checkpoint.verify(run),
        lambda: fsdp.checkpoint.load_shapes(run),
        lambda: fsdp.checkpoint.load_files(run, "tokenizer"),
    ):
        with pytest.raises(fsdp.checkpoint.DamagedCheckpointError, match=facts(*said)):
            read()
    with (
        pytest.warns(UserWarning),
        pytest.raises(fsdp.checkpoint.DamagedCheckpointError),
    ):
        fsdp.load(run, like(), step="latest-good")


@pytest.mark.parametrize(
    "name",
    ["files/tokenizer/../../../../../secret", "/etc/passwd", "files/evil//etc/passwd"],
)
def test_a_file_outside_of_the_step_is_refused(run, name):
    edit(run, claim_file(name))
    assert_refused(run, "manifest.json", repr(name))


@pytest.mark.parametrize("where", ["files/tokenizer/link", "linked/secret"])
def test_a_link_out_of_the_step_is_not_followed(run, where):
    link = state_of(run) / where
    if where.startswith("linked"):
        link.parent.symlink_to(run.parent)
    else:
        link.symlink_to(run.parent / "secret")
    edit(run, claim_file(where))
    assert_refused(run, where)


@pytest.mark.parametrize(
    "content",
    [
        b"[" * 200_000 + b"]" * 200_000,
        b"{}",
        b"[]",
        b'{"body": [], "sha256": 1}',
        b"\xff\xfe",
    ],
)
def test_a_manifest_of_another_kind_is_refused(run, content):
    (state_of(run) / "manifest.json").write_bytes(content)
    assert_refused(run, "manifest.json")


@pytest.mark.parametrize(
    "field, value",
    [
        ("leaves", []),
        ("leaves", {"params.w": [[-1], "float32"]}),
        ("leaves", {"params.w": [[2.5], "float32"]}),
        ("leaves", {"params.w": [[1], "evil"]}),
        ("leaves", {"params.w": [[2**50, 2**12], "float32"]}),
        ("files", []),
        ("files", {"prng_impls.json": {"size": "1"}}),
        ("files", {"d/x": {"size": 9, "sha256": "", "values": [[5, 3]]}}),
        ("files", {"d/x": {"size": 9, "sha256": "", "values": [[0, 2**60]]}}),
        ("step", "1"),
        ("step", True),
        ("run", 7),
        ("attempt", None),
    ],
)
def test_a_mistyped_field_of_the_manifest_is_refused(run, field, value):
    edit(run, lambda body: body.update({field: value}))
    assert_refused(run, "manifest.json")


@pytest.mark.parametrize(
    "metadata",
    [
        {"a": {"__array__": ["float32", [2**40], ""]}},
        {"a": {"__scalar__": ["object", base64.b64encode(bytes(8)).decode()]}},
        {"a": {"__array__": ["float32", "x", ""]}},
        {"a": {"__bytes__": 7}},
        {"a": {"__tree__": "nowhere"}},
    ],
)
def test_metadata_that_nobody_encoded_is_refused(run, metadata):
    edit(run, lambda body: body.update(metadata=metadata))
    with pytest.raises(
        fsdp.checkpoint.DamagedCheckpointError, match=facts("metadata:")
    ):
        fsdp.checkpoint.load_metadata(run)


def test_metadata_nested_without_end_is_refused_when_saved_and_when_loaded(
    run, tmp_path
):
    deep: Any = 1
    for _ in range(5000):
        deep = [deep]
    with pytest.raises(ValueError, match=facts("metadata")):
        fsdp.save(tmp_path / "deep", state_at(1), metadata={"a": deep})
    path = state_of(run) / "manifest.json"
    path.write_text('{"body": {"metadata": ' + "[" * 5000 + "]" * 5000 + "}}")
    assert_refused(run, "manifest.json")


def claim_array(run: Path, shape: list[int], chunk: list[int]) -> None:
    """Makes an array of the step larger than it is, in all places that say it."""
    state = state_of(run)
    base = {"driver": "file", "path": f"{state}/"}
    store = ts.KvStore.open({"driver": "ocdbt", "base": base}).result()
    zarr = json.loads(store.read("params.w/zarr.json").result().value)
    zarr["shape"] = shape
    zarr["chunk_grid"]["configuration"]["chunk_shape"] = chunk
    zarr["codecs"] = [{"name": "bytes", "configuration": {"endian": "little"}}]
    store.write("params.w/zarr.json", json.dumps(zarr)).result()

    def change(body: dict[str, Any]) -> None:
        files = [path for path in state.rglob("*") if path.is_file()]
        names = [path.relative_to(state).as_posix() for path in files]
        body["files"] = {
            name: vars(seal(state / name))
            for name in names
            if name not in ("manifest.json", "commit_success.txt")
        }

    edit(run, change)


@pytest.mark.parametrize(
    "shape, chunk",
    [([2**23, 2**23], [2**10, 2**10]), ([512, 512], [2**18, 2**18])],
)
def test_an_array_that_claims_too_much_is_refused_before_memory_is_taken(
    run, shape, chunk
):
    claim_array(run, shape, chunk)
    began = time.process_time()
    for read in (
        lambda: fsdp.load(run, like(), strict="ignore_all"),
        lambda: fsdp.checkpoint.verify(run),
    ):
        with pytest.raises(
            fsdp.checkpoint.DamagedCheckpointError, match=facts("1/state'", "params.w:")
        ):
            _ = read()
    assert time.process_time() - began < 5


def test_a_run_id_that_is_a_path_deletes_nothing_outside(run, tmp_path):
    outside = tmp_path / "outside"
    (outside / "12-abcdef").mkdir(parents=True)
    (outside / "12-abcdef" / "precious").touch()
    for value in (str(outside), "../../outside", "", "0" * 15, "\xe9" * 16):
        (run / "run_id").write_text(value)
        local = fsdp.checkpoint.LocalCheckpoints(tmp_path / "local", every=1)
        with pytest.raises(ValueError, match=facts("run_id'", "16")):
            fsdp.Checkpointer(run, local=local)
    assert (outside / "12-abcdef" / "precious").exists()


def test_a_seal_of_a_step_is_that_of_its_manifest(saved):
    """So that the manifests above differ from right ones by what they claim alone."""
    manifest = json.loads((state_of(saved) / "manifest.json").read_bytes())["body"]
    database = state_of(saved) / "ocdbt.process_0"
    for name, sealed in seal_files(database).items():
        assert manifest["files"][f"ocdbt.process_0/{name}"]["sha256"] == sealed.sha256
