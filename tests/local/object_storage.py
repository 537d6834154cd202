"""Servers that stand for object storage: of S3, with faults, and of the layout of Hugging Face."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

SECRET = {"AWS_ACCESS_KEY_ID": "me", "AWS_SECRET_ACCESS_KEY": "mine"}


@contextmanager
def serving(handler: type[BaseHTTPRequestHandler]) -> Iterator[str]:
    """A server of a thread; its URL."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def answer(self, status: int, body: bytes = b"", **headers: str) -> None:
        self.send_response(status)
        sent = {"content-length": str(len(body))} | {
            name.replace("_", "-"): value for name, value in headers.items()
        }
        for name, value in sent.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def part(self, body: bytes, **headers: str) -> None:
        """Answer with the range that is asked for."""
        asked = self.headers.get("range", "").removeprefix("bytes=")
        if not asked or self.command == "HEAD":
            self.answer(200, body, **headers)
            return
        begin, end = map(int, asked.split("-"))
        end = min(end, len(body) - 1)
        span = f"bytes {begin}-{end}/{len(body)}"
        self.answer(206, body[begin : end + 1], content_range=span, **headers)


class Objects:
    """The objects of a bucket of S3, for `serving`, and what goes wrong with them.

    Attributes:
        content: By key.
        on_request: Called with method and key before an answer; may change the content, and may
            return the status of a refusal.
        requests: Method and key of each request.
        stores_first: Whether a put that is refused is stored all the same.
        modified: When all objects were written, as lists have it.
    """

    def __init__(self, **content: bytes) -> None:
        self.content = {name.replace("__", "/"): data for name, data in content.items()}
        self.on_request: Callable[[str, str], int | None] = lambda method, key: None
        self.requests: list[tuple[str, str]] = []
        self.stores_first = False
        self.modified = "2026-11-02T10:00:00.000Z"
        #: Tags that the list has in place of the right ones.
        self.listed_tags: dict[str, str] = {}

    def tag(self, key: str) -> str:
        return hashlib.md5(self.content[key], usedforsecurity=False).hexdigest()

    def handler(self) -> type[BaseHTTPRequestHandler]:
        objects = self

        class Handler(_Handler):
            def do_GET(self) -> None:
                url = urlsplit(self.path)
                key = unquote(url.path).removeprefix("/bucket").strip("/")
                objects.requests.append((self.command, key))
                status = objects.on_request(self.command, key)
                if status is not None:
                    self.answer(status)
                elif "list-type" in parse_qs(url.query):
                    query = parse_qs(url.query)
                    prefix, delimiter = (
                        query.get(name, [""])[0] for name in ("prefix", "delimiter")
                    )
                    self.answer(200, objects.list(prefix, delimiter))
                elif key not in objects.content:
                    self.answer(404)
                else:
                    tag = f'"{objects.tag(key)}"'
                    if self.headers.get("if-match", tag) != tag:
                        self.answer(412)
                        return
                    self.part(
                        objects.content[key],
                        etag=tag,
                        last_modified="Mon, 02 Nov 2026 10:00:00 GMT",
                    )

            do_HEAD = do_GET

            def do_PUT(self) -> None:
                key = unquote(urlsplit(self.path).path).removeprefix("/bucket").strip("/")
                data = self.rfile.read(int(self.headers["content-length"]))
                objects.requests.append((self.command, key))
                if objects.stores_first:
                    objects.content[key] = data
                status = objects.on_request(self.command, key)
                if status is None:
                    objects.content[key] = data
                    self.answer(200, etag=f'"{objects.tag(key)}"')
                else:
                    self.answer(status)

            def do_POST(self) -> None:
                """The deletion of several objects."""
                body = self.rfile.read(int(self.headers["content-length"])).decode()
                keys = re.findall("<Key>(.*?)</Key>", body)
                objects.requests += [("DELETE", key) for key in keys]
                statuses = [objects.on_request("DELETE", key) for key in keys]
                if any(statuses):
                    self.answer(503)
                    return
                for key in keys:
                    objects.content.pop(key, None)
                rows = "".join(f"<Deleted><Key>{key}</Key></Deleted>" for key in keys)
                self.answer(200, f"<DeleteResult>{rows}</DeleteResult>".encode())

        return Handler

    def list(self, prefix: str, delimiter: str = "") -> bytes:
        content = {key: data for key, data in self.content.items() if key.startswith(prefix)}
        folders = dict.fromkeys(
            key[: key.index(delimiter, len(prefix)) + 1]
            for key in content
            if delimiter and delimiter in key[len(prefix) :]
        )
        rows = "".join(
            f"<CommonPrefixes><Prefix>{folder}</Prefix></CommonPrefixes>" for folder in folders
        ) + "".join(
            f"<Contents><Key>{key}</Key><LastModified>{self.modified}</LastModified>"
            f'<ETag>"{self.listed_tags.get(key, self.tag(key))}"</ETag>'
            f"<Size>{len(data)}</Size></Contents>"
            for key, data in sorted(content.items())
            if not any(key.startswith(folder) for folder in folders)
        )
        return (
            f"<ListBucketResult><Name>bucket</Name><IsTruncated>false</IsTruncated>{rows}"
            "</ListBucketResult>"
        ).encode()


def hub(files: dict[str, bytes], *, token: str = "") -> type[BaseHTTPRequestHandler]:
    """A server of the layout of huggingface.co, with the model `me/small` at the commit `c0ffee`.

    Files whose names end in `.bin` are kept as large ones are, at another address.
    """

    def row(name: str, data: bytes) -> dict[str, Any]:
        blob = hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()
        lfs = {"sha256": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 130}
        row = {"rfilename": name, "size": len(data), "blobId": blob}
        return row | ({"lfs": lfs} if name.endswith(".bin") else {})

    class Handler(_Handler):
        def do_GET(self) -> None:
            path = unquote(urlsplit(self.path).path)
            if path.startswith("/cdn/"):
                assert "authorization" in self.headers or not token
                self.part(files[path.removeprefix("/cdn/")], last_modified=_MODIFIED)
                return
            if token and self.headers.get("authorization") != f"Bearer {token}":
                self.answer(401, b'{"error": "Invalid credentials in Authorization header"}')
            elif path == "/api/models/me/small/revision/main":
                siblings = [row(name, data) for name, data in files.items()]
                self.answer(200, json.dumps({"sha": "c0ffee", "siblings": siblings}).encode())
            elif path.startswith("/me/small/resolve/c0ffee/"):
                name = path.removeprefix("/me/small/resolve/c0ffee/")
                if name.endswith(".bin"):
                    self.answer(302, location=f"/cdn/{name}")
                else:
                    self.part(files[name], etag='"x"', last_modified=_MODIFIED)
            else:
                self.answer(404, b'{"error": "Repository not found"}')

        do_HEAD = do_GET

    return Handler


_MODIFIED = "Mon, 02 Nov 2026 10:00:00 GMT"
