"""`export --push` uploads what it wrote, by the hub's own client, to a server here."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from helpers.errors import facts
from huggingface_hub import constants

from fsdp_jax.cli import main
from fsdp_jax.cli._hub import check_push, push

TOKEN = "hf_" + "x" * 34


class Hub(ThreadingHTTPServer):
    """Keeps the files of commits, as the hub's HTTP interface takes them."""

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.repos: dict[str, dict[str, bytes]] = {}
        self.private: dict[str, bool] = {}
        self.messages: list[str] = []
        self.refuses_commits = False

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    server: Hub  # pyright: ignore[reportIncompatibleVariableOverride]

    def log_message(self, format, *args):
        pass

    def do_GET(self):
        if self.path.startswith("/api/whoami"):
            known = self.headers["Authorization"] == f"Bearer {TOKEN}"
            self._answer(200 if known else 401, {"name": "tester", "type": "user"})
        else:
            self._answer(404, {"error": f"no {self.path}"})

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"] or 0))
        path = self.path.partition("?")[0]
        if path == "/api/repos/create":
            asked = json.loads(body)
            name = "/".join(filter(None, (asked.get("organization"), asked["name"])))
            self.server.repos.setdefault(name, {})
            self.server.private[name] = asked.get("visibility") == "private"
            self._answer(200, {"url": f"{self.server.url}/{name}"})
        elif "/preupload/" in path:
            files = [
                {"path": f["path"], "uploadMode": "regular", "shouldIgnore": False}
                for f in json.loads(body)["files"]
            ]
            self._answer(200, {"files": files})
        elif "/commit/" in path and not self.server.refuses_commits:
            self._commit("/".join(path.split("/")[3:5]), body)
        else:
            self._answer(403, {"error": "forbidden"})

    def _commit(self, repo: str, body: bytes):
        for line in map(json.loads, body.splitlines()):
            if line["key"] == "header":
                self.server.messages.append(line["value"]["summary"])
            else:
                file = line["value"]
                content = base64.b64decode(file["content"])
                self.server.repos[repo][file["path"]] = content
        url = f"{self.server.url}/{repo}/commit/{'a' * 40}"
        self._answer(200, {"commitUrl": url, "commitOid": "a" * 40})

    def _answer(self, status: int, content: dict):
        data = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


@pytest.fixture
def hub(monkeypatch) -> Iterator[Hub]:
    with Hub() as server:
        monkeypatch.setattr(constants, "ENDPOINT", server.url)
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def test_an_export_is_uploaded_byte_for_byte(hub, trained, tmp_path, capsys):
    out = tmp_path / "out"
    argv = ["export", str(trained.save), str(out), "--push", "org/name", "--private"]
    assert main(argv) == 0
    written = {p.name: p.read_bytes() for p in out.iterdir()}
    assert {"config.json", "model.safetensors"} <= written.keys()
    assert hub.repos == {"org/name": written}
    assert hub.private == {"org/name": True}
    assert hub.messages == ["Upload step 4"]
    assert f"uploaded to {hub.url}/org/name/commit/" in capsys.readouterr().out


@pytest.mark.parametrize(
    "argv, wanted",
    [
        (["--push", "a/b/c"], ["--push a/b/c"]),
        (["--private"], ["--private", "--push"]),
    ],
)
def test_what_cannot_be_pushed_is_refused_before_anything_is_written(
    argv, wanted, hub, trained, tmp_path, capsys
):
    assert main(["export", str(trained.save), str(tmp_path / "out"), *argv]) == 2
    said = capsys.readouterr().err
    assert all(fact in said for fact in wanted)
    assert not (tmp_path / "out").exists()


def test_a_token_that_the_hub_does_not_know_is_refused(hub, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_" + "y" * 34)
    with pytest.raises(ValueError, match=facts("--push org/name", hub.url, "HF_TOKEN")):
        check_push("org/name")


def test_a_refused_commit_says_that_the_folder_is_written(hub, tmp_path: Path):
    (tmp_path / "config.json").write_text("{}")
    hub.refuses_commits = True
    said = "--push org/name", f"'{tmp_path}'", "403"
    with pytest.raises(ValueError, match=facts(*said)):
        push(tmp_path, "org/name", private=False, message="Upload")
    assert hub.repos == {"org/name": {}}
