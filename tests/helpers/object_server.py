"""An object store on loopback that speaks as much of S3 and GCS as TensorStore asks.

Objects are in memory, versions are counted, and conditions on them are honoured. Faults
are injected by a function that sees each request first.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Literal
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

Fault = Literal["503", "429", "403", "reset", "truncate", "hang", "flip"] | None
_PAGE = 1000
_HANG_SECS = 30.0


@dataclasses.dataclass(frozen=True)
class Object:
    content: bytes
    version: int


@dataclasses.dataclass(frozen=True)
class Answer:
    status: int
    content: bytes = b""
    headers: tuple[tuple[str, str], ...] = ()


class ObjectStore:
    """The objects of all buckets, by `bucket/key`, and what was asked of them.

    Attributes:
      objects: Object by `bucket/key`.
      requests: Number of requests of each method.
      fault: Function from method and `bucket/key` to the fault of that request.
    """

    def __init__(self) -> None:
        self.objects: dict[str, Object] = {}
        self.requests: Counter[str] = Counter()
        self.fault: Callable[[str, str], Fault] = lambda method, key: None
        self.lock = threading.Lock()
        self.over = threading.Event()
        self._version = 1_000_000

    def get(self, key: str) -> Object | None:
        with self.lock:
            return self.objects.get(key)

    def put(self, key: str, content: bytes, expected: int | None) -> Object | None:
        """Writes an object; None if its version is not `expected`, 0 for no object."""
        with self.lock:
            if not self._is(key, expected):
                return None
            self._version += 1
            self.objects[key] = Object(content, self._version)
            return self.objects[key]

    def delete(self, key: str, expected: int | None) -> bool:
        with self.lock:
            if not self._is(key, expected):
                return False
            self.objects.pop(key, None)
            return True

    def list(self, prefix: str) -> list[tuple[str, Object]]:
        with self.lock:
            found = [
                pair for pair in self.objects.items() if pair[0].startswith(prefix)
            ]
        return sorted(found)

    def _is(self, key: str, expected: int | None) -> bool:
        have = self.objects.get(key)
        return expected is None or (0 if have is None else have.version) == expected


@contextlib.contextmanager
def serving() -> Iterator[tuple[ObjectStore, str]]:
    """Serves an empty store; yields it with its address, `http://127.0.0.1:port`."""
    store = ObjectStore()
    handler = type("Handler", (_Handler,), {"store": store})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    server.block_on_close = False
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield store, f"http://127.0.0.1:{server.server_port}"
    finally:
        store.over.set()
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    store: ObjectStore
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def log_message(self, format: str, *args: object) -> None:
        pass

    def _serve(self) -> None:
        url = urlsplit(self.path)
        query = {
            name: values[0]
            for name, values in parse_qs(url.query, keep_blank_values=True).items()
        }
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        is_gcs = url.path.startswith(("/storage/v1/b/", "/upload/storage/v1/b/"))
        key = _gcs_key(url.path, query) if is_gcs else unquote(url.path).lstrip("/")
        self.store.requests[self.command] += 1
        fault = self.store.fault(self.command, key)
        if fault == "hang":
            self.store.over.wait(_HANG_SECS)
        if fault in ("reset", "hang"):
            self.close_connection = True
            return
        if fault in ("503", "429", "403"):
            code = "AccessDenied" if fault == "403" else "SlowDown"
            self._send(
                Answer(int(fault), f"<Error><Code>{code}</Code></Error>".encode())
            )
            return
        answer = (self._gcs if is_gcs else self._s3)(key, query, body)
        self._send(answer, fault)

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _serve

    def _s3(self, key: str, query: dict[str, str], body: bytes) -> Answer:
        store, command = self.store, self.command
        if "list-type" in query:
            return _s3_list(store, key.rstrip("/"), query)
        if "/" not in key:  # of the bucket: its region
            return Answer(200, headers=(("x-amz-bucket-region", "us-east-1"),))
        if command == "PUT":
            written = store.put(key, body, self._s3_expected())
            if written is None:
                return Answer(412, b"<Error><Code>PreconditionFailed</Code></Error>")
            return Answer(200, headers=(("ETag", f'"{written.version}"'),))
        if command == "DELETE":
            done = store.delete(key, self._s3_expected())
            return Answer(204 if done else 412)
        found = store.get(key)
        if found is None:
            return Answer(404, b"<Error><Code>NoSuchKey</Code></Error>")
        tag = f'"{found.version}"'
        headers = (("ETag", tag), ("Last-Modified", _LAST_MODIFIED))
        if self.headers.get("If-None-Match") == tag:
            return Answer(304, headers=headers)
        if self.headers.get("If-Match", tag) != tag:
            return Answer(412)
        return self._ranged(found.content, headers)

    def _s3_expected(self) -> int | None:
        if self.headers.get("If-None-Match") == "*":
            return 0
        tag = self.headers.get("If-Match")
        return None if tag is None else int(tag.strip('"'))

    def _gcs(self, key: str, query: dict[str, str], body: bytes) -> Answer:
        store, command = self.store, self.command
        match = query.get("ifGenerationMatch")
        expected = None if match is None else int(match)
        if command == "POST":
            written = store.put(key, body, expected)
            return Answer(412) if written is None else _gcs_object(key, written)
        if command == "DELETE":
            if store.get(key) is None:
                return Answer(404)
            return Answer(204 if store.delete(key, expected) else 412)
        if key.endswith("/") and "alt" not in query:
            return _gcs_list(store, key, query)
        found = store.get(key)
        if found is None:
            return Answer(404)
        if expected is not None and expected != found.version:
            return Answer(412)
        if query.get("ifGenerationNotMatch") == str(found.version):
            return Answer(304)
        if query.get("alt") != "media":
            return _gcs_object(key, found)
        return self._ranged(found.content, (("x-goog-generation", str(found.version)),))

    def _ranged(self, content: bytes, headers: tuple) -> Answer:
        """Returns the bytes that the header `Range` asks for."""
        wanted = self.headers.get("Range")
        if wanted is None:
            return Answer(200, content, headers)
        first, _, last = wanted.removeprefix("bytes=").partition("-")
        size = len(content)
        start = int(first) if first else max(0, size - int(last))
        stop = min(int(last) + 1, size) if first and last else size
        if start >= size:
            return Answer(416, headers=(("Content-Range", f"bytes */{size}"),))
        place = ("Content-Range", f"bytes {start}-{stop - 1}/{size}")
        return Answer(206, content[start:stop], (*headers, place))

    def _send(self, answer: Answer, fault: Fault = None) -> None:
        content = b"" if self.command == "HEAD" else answer.content
        self.send_response(answer.status)
        for name, value in answer.headers:
            self.send_header(name, value)
        if answer.status not in (204, 304):
            self.send_header("Content-Length", str(len(answer.content)))
        self.end_headers()
        if fault == "flip" and content:
            content = bytes([content[0] ^ 1]) + content[1:]
        if fault == "truncate":
            content, self.close_connection = content[: len(content) // 2], True
        with contextlib.suppress(OSError):
            self.wfile.write(content)


_LAST_MODIFIED = "Wed, 12 Oct 2026 17:50:00 GMT"


def _gcs_key(path: str, query: dict[str, str]) -> str:
    _, _, rest = path.partition("/b/")
    bucket, _, name = rest.partition("/o")
    return f"{bucket}/{query.get('name') or unquote(name.lstrip('/'))}"


def _gcs_object(key: str, found: Object) -> Answer:
    return Answer(200, json.dumps(_gcs_metadata(key, found)).encode())


def _gcs_metadata(key: str, found: Object) -> dict[str, object]:
    bucket, _, name = key.partition("/")
    return {
        "name": name,
        "bucket": bucket,
        "generation": str(found.version),
        "metageneration": "1",
        "size": str(len(found.content)),
        "updated": "2026-10-12T17:50:00Z",
        "timeCreated": "2026-10-12T17:50:00Z",
    }


def _gcs_list(store: ObjectStore, bucket: str, query: dict[str, str]) -> Answer:
    found = store.list(bucket + query.get("prefix", ""))
    start, end = bucket + query.get("startOffset", ""), query.get("endOffset")
    start = max(start, query.get("pageToken", ""))
    inside = [
        pair
        for pair in found
        if pair[0] >= start and (end is None or pair[0] < bucket + end)
    ]
    size = min(int(query.get("maxResults", _PAGE)), _PAGE)
    page, rest = inside[:size], inside[size:]
    body: dict[str, object] = {"items": [_gcs_metadata(*pair) for pair in page]}
    if rest:
        body["nextPageToken"] = rest[0][0]
    return Answer(200, json.dumps(body).encode())


def _s3_list(store: ObjectStore, bucket: str, query: dict[str, str]) -> Answer:
    found = store.list(f"{bucket}/{query.get('prefix', '')}")
    after = query.get("continuation-token") or query.get("start-after") or ""
    names = [
        (key.removeprefix(f"{bucket}/"), one)
        for key, one in found
        if key.removeprefix(f"{bucket}/") > after
    ]
    page, rest = names[:_PAGE], names[_PAGE:]
    contents = "".join(
        f"<Contents><Key>{escape(name)}</Key><Size>{len(one.content)}</Size>"
        f"<ETag>&quot;{one.version}&quot;</ETag></Contents>"
        for name, one in page
    )
    more = (
        f"<NextContinuationToken>{escape(page[-1][0])}</NextContinuationToken>"
        if rest
        else ""
    )
    text = (
        '<?xml version="1.0" encoding="UTF-8"?><ListBucketResult>'
        f"<Name>{bucket}</Name><KeyCount>{len(page)}</KeyCount>"
        f"<IsTruncated>{'true' if rest else 'false'}</IsTruncated>"
        f"{contents}{more}</ListBucketResult>"
    )
    return Answer(200, text.encode(), (("Content-Type", "application/xml"),))


if __name__ == "__main__":
    with serving() as (_, address):
        print(address, flush=True)
        threading.Event().wait()
