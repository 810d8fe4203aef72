"""No URL and no `~` is taken for a folder: every public path is checked first."""

from __future__ import annotations

import inspect
import os
from pathlib import Path
from unittest.mock import MagicMock

import pytest
from helpers.errors import facts

import bridge
import bridge.pytorch
import fsdp_jax as fsdp
from fsdp_jax._local_path import check_local
from fsdp_jax.cli import _check_paths, main
from fsdp_jax.cli.commands._eval import Eval
from fsdp_jax.cli.commands._generate import Generate


def takes_paths(module):
    """Public functions and classes, with the parameters that are annotated as paths."""
    for name, thing in vars(module).items():
        is_error = inspect.isclass(thing) and issubclass(thing, Exception)
        if name.startswith("_") or not callable(thing) or is_error:
            continue
        parameters = inspect.signature(thing).parameters.values()
        for parameter in parameters:
            if "os.PathLike" in str(parameter.annotation):
                yield pytest.param(
                    thing, parameter.name, id=f"{thing.__name__}-{parameter.name}"
                )


ENTRIES = [
    *takes_paths(fsdp),
    *takes_paths(fsdp.checkpoint),
    *takes_paths(fsdp.rl),
    *takes_paths(bridge),
    *takes_paths(bridge.megatron),
    *takes_paths(bridge.pytorch),
]


def test_the_entries_are_found():
    found = {entry.id for entry in ENTRIES}
    assert {"save-path", "Checkpointer-path", "LocalCheckpoints-path"} <= found
    assert {"save_hf-path", "save_hf-copy_from", "load_megatron_adam-path"} <= found
    assert len(found) >= 25


@pytest.mark.parametrize("entry, parameter", ENTRIES)
@pytest.mark.parametrize(
    "path, reason",
    [
        ("hdfs://bucket/run", ["URL", "'hdfs'"]),
        (Path("msc://profile/run"), ["URL", "'msc'"]),
        ("~/run", ["'~'", os.path.expanduser("~/run")]),
    ],
    ids=["url", "url-of-a-path", "home"],
)
def test_every_public_path_refuses_what_is_none(
    entry, parameter, path, reason, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    needed = {
        name: MagicMock()
        for name, p in inspect.signature(entry).parameters.items()
        if p.default is p.empty and p.kind is not p.VAR_POSITIONAL
    }
    others = {"path": tmp_path} if "path" in needed else {}
    with pytest.raises(ValueError, match=facts(*reason)):
        entry(**needed | others | {parameter: path})
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    "url", ["gs://b/x", "file:///tmp/x", "HTTPS://x.org/y", "hdfs://n:1/x", "s3:/b/x"]
)
def test_schemes_of_any_kind_are_urls(url):
    with pytest.raises(ValueError, match=facts(url)):
        check_local("plain", url)


@pytest.mark.parametrize(
    "path",
    [
        "runs/1",
        "/data/a:b/c",
        "C:/runs",
        "C:\\runs",
        "./s3:/bucket",
        "meta/Llama",
        "a:",
        "./~/runs",
        "runs/~old",
        "~old/runs",
    ],
)
def test_paths_are_no_urls(path):
    check_local(path, Path("/") / path, None, 1)


@pytest.mark.parametrize("path", ["~", "~/runs", Path("~/runs")])
def test_a_home_is_named_by_what_it_is(path):
    with pytest.raises(ValueError, match=facts("'~'", os.path.expanduser(path))):
        check_local(path)


def test_a_prompt_may_be_a_url():
    _check_paths(Generate("model", ("https://example.org/ is a",)))
    with pytest.raises(ValueError, match=facts("s3:/bucket/text")):
        _check_paths(Eval("model", (Path("text"), Path("s3://bucket/text"))))


@pytest.mark.parametrize(
    "command",
    [
        ["verify", "msc://bucket/run"],
        ["import", "model", "gs://bucket/run"],
        ["export", "msc://bucket/run", "out"],
        ["train", "--data", "s3://b/text", "--steps", "1", "--save", "out"],
        ["train", "--data", "x", "--steps", "1", "--save", "msc://profile/run"],
        ["generate", "hf://a/b", "--prompt", "https://x.org/y"],
    ],
    ids=lambda command: " ".join(command),
)
def test_every_command_refuses_a_url(command, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(command) == 2
    assert " is a URL " in capsys.readouterr().err
    assert os.listdir(tmp_path) == []
