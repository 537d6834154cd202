"""Servers that stand for object storage, with faults: of S3, Google, Azure and Hugging Face."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit
from xml.sax.saxutils import escape

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

    @property
    def key(self) -> str:
        """The name of the object, in the bucket `bucket`."""
        return unquote(urlsplit(self.path).path).partition("/bucket")[2].strip("/")

    @property
    def query(self) -> dict[str, str]:
        return dict(parse_qsl(urlsplit(self.path).query, keep_blank_values=True))

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
    """The objects of a bucket of S3 or Google, for `serving`, and what goes wrong with them.

    Attributes:
        content: By key.
        on_request: Called with method and key before an answer; may change the content, and may
            return the status of a refusal.
        requests: Method and key of each request.
        stores_first: Whether a put that is refused is stored all the same.
        modified: When all objects were written, as lists have it.
        allows: Whether the signature of a request is right.
    """

    def __init__(self, **content: bytes) -> None:
        self.content = {name.replace("__", "/"): data for name, data in content.items()}
        self.on_request: Callable[[str, str], int | None] = lambda method, key: None
        self.requests: list[tuple[str, str]] = []
        self.stores_first = False
        self.modified = "2026-11-02T10:00:00.000Z"
        self.allows: Callable[[BaseHTTPRequestHandler], bool] = lambda request: True
        #: The parts of objects that are being written, by key and number.
        self.parts: dict[tuple[str, str], bytes] = {}
        #: Tags that the list has in place of the right ones.
        self.listed_tags: dict[str, str] = {}

    def tag(self, key: str) -> str:
        return hashlib.md5(self.content[key], usedforsecurity=False).hexdigest()

    def handler(self) -> type[BaseHTTPRequestHandler]:
        objects = self

        class Handler(_Handler):
            def do_GET(self) -> None:
                key, query = self.key, self.query
                if objects.refuses(self):
                    return
                if "list-type" in query:
                    lists = objects.list(query.get("prefix", ""), query.get("delimiter", ""))
                    self.answer(200, lists)
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
                key, part = self.key, self.query.get("partNumber")
                data = self.rfile.read(int(self.headers["content-length"]))
                if objects.stores_first:
                    objects.content[key] = data
                if objects.refuses(self):
                    return
                if part is None:
                    objects.content[key] = data
                else:
                    objects.parts[key, part] = data
                self.answer(200, etag=f'"{hashlib.md5(data, usedforsecurity=False).hexdigest()}"')

            def do_POST(self) -> None:
                """The begin and the end of a put in parts, or the deletion of several objects."""
                body = self.rfile.read(int(self.headers["content-length"])).decode()
                if self.query.keys() & {"uploads", "uploadId"}:
                    if objects.refuses(self):
                        return
                    row = "<UploadId>1</UploadId>"
                    if "uploadId" in self.query:
                        objects.join(self.key, re.findall("<PartNumber>(.*?)</", body))
                        row = f"<ETag>{objects.tag(self.key)}</ETag>"
                    self.answer(200, f"<Answer>{row}</Answer>".encode())
                    return
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

    def refuses(self, request: _Handler) -> bool:
        """Note a request, and answer it if it is refused."""
        self.requests.append((request.command, request.key))
        status = self.on_request(request.command, request.key)
        if status is None and not self.allows(request):
            status = 403
        if status is None and not re.match(r"(/\w+)?/bucket([/?]|$)", request.path):
            status = 404
        if status is not None:
            request.answer(status)
        return status is not None

    def join(self, key: str, numbers: Iterable[str]) -> None:
        """Let parts be the content of an object."""
        self.content[key] = b"".join(self.parts.pop((key, number)) for number in numbers)

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
            f"<Contents><Key>{escape(key)}</Key><LastModified>{self.modified}</LastModified>"
            f'<ETag>"{self.listed_tags.get(key, self.tag(key))}"</ETag>'
            f"<Size>{len(data)}</Size></Contents>"
            for key, data in sorted(content.items())
            if not any(key.startswith(folder) for folder in folders)
        )
        return (
            f"<ListBucketResult><Name>bucket</Name><IsTruncated>false</IsTruncated>{rows}"
            "</ListBucketResult>"
        ).encode()


def azure(objects: Objects, account: str, key: str) -> type[BaseHTTPRequestHandler]:
    """A server of the layout of Azure; `bucket` is the only container of the account.

    Args:
        key: Of the account; a request without a right signature is refused.
    """

    class Handler(_Handler):
        def do_GET(self) -> None:
            if objects.refuses(self):
                return
            if self.query.get("comp") == "list":
                self.answer(200, _azure_list(objects, self.query.get("prefix", "")))
            elif self.key not in objects.content:
                self.answer(404)
            elif self.headers.get("if-match", tag := f'"{objects.tag(self.key)}"') != tag:
                self.answer(412)
            else:
                self.part(objects.content[self.key], etag=tag, last_modified=_MODIFIED)

        do_HEAD = do_GET

        def do_PUT(self) -> None:
            data = self.rfile.read(int(self.headers["content-length"]))
            if objects.refuses(self):
                return
            kind = self.query.get("comp")
            if kind == "block":
                objects.parts[self.key, self.query["blockid"]] = data
                self.answer(201)
                return
            if kind == "blocklist":
                objects.join(self.key, re.findall("<Uncommitted>(.*?)</", data.decode()))
            else:
                objects.content[self.key] = data
            self.answer(201, etag=f'"{objects.tag(self.key)}"', last_modified=_MODIFIED)

    objects.allows = lambda request: (
        request.headers.get("authorization")
        == (
            f"SharedKey {account}:"
            + azure_signature(request.command, request.path, dict(request.headers), account, key)
        )
    )
    return Handler


def _azure_list(objects: Objects, prefix: str) -> bytes:
    rows = "".join(
        f"<Blob><Name>{escape(key)}</Name><Properties><Last-Modified>{_MODIFIED}</Last-Modified>"
        f"<Etag>{objects.tag(key)}</Etag><Content-Length>{len(data)}</Content-Length>"
        "<Content-Type>a/b</Content-Type></Properties></Blob>"
        for key, data in sorted(objects.content.items())
        if key.startswith(prefix)
    )
    return f"<EnumerationResults><Blobs>{rows}</Blobs><NextMarker/></EnumerationResults>".encode()


def azure_signature(
    method: str, path: str, headers: Mapping[str, str], account: str, key: str
) -> str:
    """What Azure wants a request to be signed with."""
    sent = {name.lower(): value for name, value in headers.items()}
    if sent.get("content-length") == "0":
        del sent["content-length"]
    url = urlsplit(path)
    lines = [
        method,
        *(sent.get(name, "") for name in _SIGNED_HEADERS),
        *sorted(f"{name}:{value}" for name, value in sent.items() if name.startswith("x-ms-")),
        f"/{account}{url.path}",
        *sorted(f"{name}:{value}" for name, value in parse_qsl(url.query, keep_blank_values=True)),
    ]
    text = "\n".join(lines).encode()
    return base64.b64encode(hmac.digest(base64.b64decode(key), text, "sha256")).decode()


_SIGNED_HEADERS = (
    *("content-encoding", "content-language", "content-length", "content-md5", "content-type"),
    *("date", "if-modified-since", "if-match", "if-none-match", "if-unmodified-since", "range"),
)


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
