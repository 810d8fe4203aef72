"""A small Hugging Face hub on this machine: what huggingface_hub asks, from memory."""

import contextlib
import hashlib
import json
import re
import threading
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

COMMIT = hashlib.sha1(b"main").hexdigest()
BRANCH_COMMIT = hashlib.sha1(b"branch").hexdigest()
Files = Mapping[str, bytes]
_API = re.compile(
    r"/api/(models|datasets)/(?P<repo>.+?)(/(?P<kind>revision|tree)/(?P<revision>.+))?"
)
_FILE = re.compile(
    r"/(datasets/)?(?P<repo>.+?)/resolve/(?P<revision>[^/]+)/(?P<file>.+)"
)


class Hub(ThreadingHTTPServer):
    """Serves repositories, and remembers which files were fetched.

    Args:
      repos: The files of each repository, `{commit}` in them being the commit's hash.
      gated: A repository whose files are shown and not given.
      moves_after: A file name; once it is fetched, `main` is another commit.
    """

    daemon_threads = True

    def __init__(self, repos: Mapping[str, Files], gated: str = "", moves_after=""):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.repos, self.gated, self.moves_after = repos, gated, moves_after
        self.revisions = {"main": COMMIT, "branch": BRANCH_COMMIT}
        self.fetched: dict[str, set[str]] = {}

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


@contextlib.contextmanager
def running(hub: Hub) -> Iterator[Hub]:
    thread = threading.Thread(target=hub.serve_forever)
    thread.start()
    try:
        yield hub
    finally:
        hub.shutdown()
        thread.join()
        hub.server_close()


class _Handler(BaseHTTPRequestHandler):
    server: Hub

    def do_GET(self):
        path = unquote(urlsplit(self.path).path)
        if match := _API.fullmatch(path):
            self._answer_api(match["repo"], match["kind"], match["revision"] or "main")
        elif match := _FILE.fullmatch(path):
            self._answer_file(match["repo"], match["revision"], match["file"])
        else:
            raise AssertionError(f"not served here: {path}")

    do_HEAD = do_GET

    def _answer_api(self, repo: str, kind: str | None, revision: str):
        """`tree`: a repository's files with sizes; else: its commit and file names."""
        files = self._find(repo, revision)
        if files is None:
            return
        if kind == "tree":
            answer = [
                {"type": "file", "path": file, "size": len(data), "oid": _etag(data)}
                for file, data in files.items()
            ]
        else:
            siblings = [{"rfilename": file} for file in files]
            answer = {"id": repo, "sha": self.commit, "siblings": siblings}
        self._send(200, json.dumps(answer).encode())

    def _answer_file(self, repo: str, revision: str, file: str):
        files = self._find(repo, revision)
        if files is None:
            return
        if repo == self.server.gated:
            self._send(403, b"", {"X-Error-Code": "GatedRepo"})
            return
        if self.command == "GET":
            self.server.fetched.setdefault(repo, set()).add(file)
            if file == self.server.moves_after:
                self.server.revisions["main"] = BRANCH_COMMIT
        self._send(200, files[file], {"ETag": f'"{_etag(files[file])}"'})

    def _find(self, repo: str, revision: str) -> Files | None:
        self.commit = self.server.revisions.get(revision, revision)
        if repo not in self.server.repos:
            self._send(404, b"", {"X-Error-Code": "RepoNotFound"})
        elif self.commit not in (COMMIT, BRANCH_COMMIT):
            self._send(404, b"", {"X-Error-Code": "RevisionNotFound"})
        else:
            files = self.server.repos[repo].items()
            return {k: v.replace(b"{commit}", self.commit.encode()) for k, v in files}
        return None

    def _send(self, status: int, body: bytes, headers: Mapping[str, str] | None = None):
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("X-Repo-Commit", self.commit)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, *args: object) -> None:
        """Says nothing: what was fetched is remembered."""


def _etag(data: bytes) -> str:
    return hashlib.sha1(data).hexdigest()
