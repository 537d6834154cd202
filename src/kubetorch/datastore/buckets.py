"""Objects of buckets, of the web and of Hugging Face, by `obstore`.

`obstore` hangs in a child that was forked after its parent used it, so programs of their own load
this module, `kubetorch.datastore.bucket_program`, and controllers whose store has a bucket, which
fork nothing.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
import tempfile
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, NoReturn

import msgspec

from kubetorch.datastore.addresses import Address
from kubetorch.datastore.tuning import LIMITS, TIMING
from kubetorch.errors import DataStoreError

if TYPE_CHECKING:
    from obstore import GetOptions
    from obstore.store import ObjectStore

try:
    import obstore
    from obstore import exceptions, store
except ImportError:
    obstore = None  # type: ignore[assignment]  # `Bucket` says so

#: The option with the credentials of Google.
_GOOGLE = "GOOGLE_APPLICATION_CREDENTIALS_JSON"


class ObjectChangedError(DataStoreError):
    """An object is another one than its list said: the list is to be read again."""


@dataclass(frozen=True)
class ObjectInfo:
    """An object as a list has it.

    Attributes:
        path: Below the address; empty if the address is that of the object.
        tag: Changes with the content; empty if the server has none.
        location: Its path in the store.
        checksum: `sha256:…` or `git:…` of the content, where the list has it.
    """

    path: str
    size: int
    tag: str
    location: str
    checksum: str = ""


class Patience(NamedTuple):
    """How long a bucket is asked; in seconds but for the attempts."""

    attempts: int = LIMITS.bucket_attempts
    retry_seconds: float = TIMING.bucket_retry_seconds
    request_seconds: float = TIMING.bucket_request_seconds


class Bucket:
    """The objects at an address.

    Args:
        options: Values of `addresses.VARIABLES`; none are no credentials.
        proxy: URL of the proxy through which everything goes.
        is_own: Whether the credentials are those of this process, from wherever `obstore` finds
            them.

    Attributes:
        store: The bucket as `obstore` has it.
    """

    def __init__(
        self,
        address: Address,
        options: Mapping[str, str],
        *,
        proxy: str | None = None,
        is_own: bool = False,
        patience: Patience = Patience(),  # noqa: B008  # it is frozen
    ) -> None:
        if obstore is None:
            raise DataStoreError(
                "the process that talks to buckets has no obstore",
                hint="pip install 'kubetorch[object-storage]' there: on this machine for the local "
                "service, in the image of the controller or pod else",
            )
        self.address = address
        self._proxy = proxy
        self._options = options
        self._patience = patience
        self._can_write = is_own or address.scheme != "gs" or _GOOGLE in options
        try:
            self.store = self._open(is_own=is_own)
            self._contents = self.store
            if address.scheme == "gs":
                # Google decompresses an object whose encoding is gzip, unless it is asked for gzip.
                # It may compress a list then.
                self._contents = self._open(is_own=is_own, encoding="gzip")
        except (exceptions.BaseError, ValueError, OSError) as error:
            raise DataStoreError(
                f"{address} cannot be opened: {_text(error)}",
                hint="the values of secret= are wrong, or one is missing",
            ) from None

    def objects(self) -> list[ObjectInfo]:
        """All objects, in the order of their paths.

        Raises:
            DataStoreError: There are none, or too many, or the bucket does not list them.
        """
        with errors_of(self.address):
            objects = self._hub_objects() if self.address.scheme == "hf" else self._stored_objects()
        if not objects:
            raise _absent(self.address)
        return sorted(objects, key=lambda info: info.path)

    def read(self, infos: Iterable[ObjectInfo]) -> Iterator[tuple[ObjectInfo, memoryview]]:
        """The content of objects, in order, as blocks of which some are fetched ahead.

        Each object has a block at least, which is empty for an empty object.

        Raises:
            ObjectChangedError: An object is another one than the list said.
        """
        if self.address.scheme in ("https", "http"):
            for info in infos:
                yield from ((info, block) for block in self._stream(info))
            return
        requests = (
            (info, begin, min(begin + LIMITS.bucket_part_bytes, info.size))
            for info in infos
            for begin in range(0, max(info.size, 1), LIMITS.bucket_part_bytes)
        )
        running: deque[tuple[ObjectInfo, Future[memoryview]]] = deque()
        with ThreadPoolExecutor(LIMITS.bucket_streams, "kubetorch-bucket") as pool:
            try:
                for info, begin, end in requests:
                    running.append((info, pool.submit(self._part, info, begin, end)))
                    if len(running) >= LIMITS.bucket_streams:
                        first, part = running.popleft()
                        yield first, part.result()
                while running:
                    first, part = running.popleft()
                    yield first, part.result()
            finally:
                pool.shutdown(wait=False, cancel_futures=True)

    def write(self, path: str, pieces: Iterable[bytes], size: int) -> str:
        """Write an object, which appears at once or not at all; returns its tag."""
        if not self._can_write:  # obstore would ask for the identity of this machine
            raise DataStoreError(
                f"{self.address} may not be written to without credentials", hint=_SECRET_HINT
            )
        location = "/".join(filter(None, (self.address.path, path)))
        content: Any = b"".join(pieces) if size <= LIMITS.bucket_part_bytes else pieces
        part = _part_bytes(size)
        streams = LIMITS.bucket_writes_of_object * LIMITS.bucket_written_part_bytes // part
        with errors_of(self.address, path):
            result = obstore.put(
                self.store, location, content, chunk_size=part, max_concurrency=max(streams, 1)
            )
        return _tag(result["e_tag"])

    # -------------------------------------------------------------------------------------- lists

    def _stored_objects(self) -> list[ObjectInfo]:
        address = self.address
        if address.path and not address.is_folder:
            with contextlib.suppress(FileNotFoundError):
                meta = obstore.head(self._contents, address.path)
                return [ObjectInfo("", meta["size"], _tag_of(meta), meta["path"])]
        if address.scheme in ("https", "http"):
            return []
        objects: list[ObjectInfo] = []
        skipped = len(address.path) + 1 if address.path else 0
        for page in obstore.list(self.store, address.path or None):
            objects += (
                ObjectInfo(meta["path"][skipped:], meta["size"], _tag_of(meta), meta["path"])
                for meta in page
            )
            if len(objects) > LIMITS.manifest_entries:
                raise DataStoreError(
                    f"{address} has more than {LIMITS.manifest_entries:,} objects",
                    hint="get parts of it",
                )
        return _without_marks(objects)

    def _hub_objects(self) -> list[ObjectInfo]:
        """The files of a repository at one commit."""
        address = self.address
        *folder, owner, name = address.bucket.split("/")
        kind, repository = folder[0] if folder else "models", f"{owner}/{name}"
        revision = address.revision or "main"
        api = self._http(
            f"{self._hub}/api/{kind}/{repository}/revision/{revision}?blobs=true", is_exact=True
        )
        answer = obstore.get(api, "").stream(LIMITS.bucket_part_bytes)
        encoded = b""
        for piece in answer:
            encoded += piece
            if len(encoded) > LIMITS.hub_list_bytes:
                raise DataStoreError(f"{address} has a list of more than {len(encoded):,} bytes")
        view = msgspec.json.decode(encoded, type=_HubRevision)
        path = f"{address.path}/" if address.path else ""
        objects = []
        for file in view.siblings:
            if file.rfilename != address.path and not file.rfilename.startswith(path):
                continue
            inside = file.rfilename[len(path) :] if file.rfilename != address.path else ""
            sha256 = "" if file.lfs is None else file.lfs.get("sha256", "")
            size = file.size if file.size is not None else 0
            objects.append(
                ObjectInfo(
                    inside,
                    size,
                    sha256 or file.blobId,
                    f"{address.bucket}/resolve/{view.sha}/{file.rfilename}",
                    f"sha256:{sha256}" if sha256 else f"git:{file.blobId}" if file.blobId else "",
                )
            )
        return objects

    # ------------------------------------------------------------------------------------ content

    def _part(self, info: ObjectInfo, begin: int, end: int) -> memoryview:
        if begin == end:
            return memoryview(b"")
        options: GetOptions = {"range": (begin, end)}
        if info.tag and self.address.scheme != "hf":
            options["if_match"] = f'"{info.tag}"'
        with errors_of(self.address, info.path):
            try:
                result = obstore.get(self._contents, info.location, options=options)
                data = memoryview(result.bytes())
            except (exceptions.PreconditionError, FileNotFoundError) as error:
                raise _changed(self.address, info, "vanished or changed") from error
        meta = result.meta
        is_same = self.address.scheme == "hf" or _tag_of(meta) == info.tag
        if not is_same or meta["size"] != info.size or len(data) != end - begin:
            raise _changed(
                self.address,
                info,
                f"came as another one: {meta['size']:,} bytes with the tag {_tag_of(meta)[:80]!r}, "
                f"where the list has {info.size:,} bytes with the tag {info.tag[:80]!r}",
            )
        return data

    def _stream(self, info: ObjectInfo) -> Iterator[memoryview]:
        """An object from its begin to its end: not all servers give parts of one."""
        with errors_of(self.address, info.path):
            result = obstore.get(self.store, info.location)
            if _tag_of(result.meta) != info.tag or result.meta["size"] != info.size:
                raise _changed(self.address, info, "changed")
            yield memoryview(b"")
            for block in result.stream(LIMITS.bucket_part_bytes):
                yield memoryview(block)

    # ------------------------------------------------------------------------------------- stores

    @property
    def _hub(self) -> str:
        return self._options.get("HF_ENDPOINT", "https://huggingface.co").rstrip("/")

    def _client(self, *, timeout: bool = True, encoding: str = "") -> Any:  # noqa: ANN401  # of stubs
        token = self._options.get("HF_TOKEN")
        authorization = token and f"Bearer {token}"
        client: dict[str, Any] = {
            "allow_http": True,  # that of an endpoint or address says it
            "connect_timeout": timedelta(seconds=TIMING.bucket_connect_seconds),
            "read_timeout": timedelta(seconds=self._patience.request_seconds),
            # A stream may take long; who waits for it notices when nothing comes.
            "timeout": timedelta(seconds=self._patience.request_seconds * (1 if timeout else 1440)),
            "user_agent": "kubetorch",
            "default_headers": _named(
                {"authorization": authorization, "accept-encoding": encoding}
            ),
        }
        if self._proxy is not None:
            client["proxy_url"] = self._proxy
        return client

    def _http(self, url: str, *, is_exact: bool = False) -> ObjectStore:
        is_stream = not is_exact and self.address.scheme != "hf"
        return store.HTTPStore(
            url,
            client_options=self._client(timeout=not is_stream),
            retry_config=_retry(self._patience),
        )

    def _open(self, *, is_own: bool, encoding: str = "") -> ObjectStore:
        address, options = self.address, self._options
        more: dict[str, Any] = {
            "client_options": self._client(encoding=encoding),
            "retry_config": _retry(self._patience),
        }
        if address.scheme == "s3":
            return store.S3Store(address.bucket, config=_s3(options, is_own=is_own), **more)
        if address.scheme == "az":
            return store.AzureStore(address.bucket, config=_azure(options, is_own=is_own), **more)
        if address.scheme == "gs":
            config: Any = _named({"base_url": options.get("GOOGLE_ENDPOINT_URL")})
            content = options.get(_GOOGLE)
            if content is None:
                if not is_own:
                    config["skip_signature"] = True
                return store.GCSStore(address.bucket, config=config, **more)
            with tempfile.TemporaryDirectory() as folder:  # read by the constructor
                file = Path(folder) / "credentials.json"
                file.touch(mode=0o600)
                file.write_text(content)
                config["application_credentials"] = str(file)
                return store.GCSStore(address.bucket, config=config, **more)
        if address.scheme == "hf":
            return self._http(self._hub)
        return self._http(f"{address.scheme}://{address.bucket}")


def _part_bytes(size: int) -> int:
    """The parts in which an object of so many bytes is written, of which it has not too many."""
    return max(LIMITS.bucket_written_part_bytes, -(-size // LIMITS.bucket_parts_of_object))


class _HubFile(msgspec.Struct):
    rfilename: str
    size: Annotated[int, msgspec.Meta(ge=0)] | None = None
    blobId: str = ""  # the name in the answer
    lfs: dict[str, Any] | None = None


class _HubRevision(msgspec.Struct):
    sha: str
    siblings: list[_HubFile] = []


def _retry(patience: Patience) -> Any:  # noqa: ANN401  # as `_client`
    return {
        "max_retries": patience.attempts - 1,
        "retry_timeout": timedelta(seconds=patience.retry_seconds),
        "backoff": {
            "init_backoff": timedelta(seconds=TIMING.bucket_retry_pause_seconds),
            "max_backoff": timedelta(seconds=patience.retry_seconds / 10),
            "base": 2,
        },
    }


def _named(config: Mapping[str, Any]) -> Any:  # noqa: ANN401  # as `_client`
    return {name: value for name, value in config.items() if value}


def _s3(options: Mapping[str, str], *, is_own: bool) -> Any:  # noqa: ANN401  # as `_client`
    endpoint = options.get("AWS_ENDPOINT_URL_S3") or options.get("AWS_ENDPOINT_URL")
    region = options.get("AWS_REGION") or options.get("AWS_DEFAULT_REGION")
    config = _named(
        {
            "access_key_id": options.get("AWS_ACCESS_KEY_ID"),
            "secret_access_key": options.get("AWS_SECRET_ACCESS_KEY"),
            "session_token": options.get("AWS_SESSION_TOKEN"),
            "region": region or ("" if is_own else "us-east-1"),
            "endpoint": endpoint,
        }
    )
    # Else obstore would look for credentials of this process.
    if not is_own and "access_key_id" not in config:
        config["skip_signature"] = True
    return config


def _azure(options: Mapping[str, str], *, is_own: bool) -> Any:  # noqa: ANN401  # as `_client`
    config = _named(
        {
            "account_name": options.get("AZURE_STORAGE_ACCOUNT_NAME"),
            "account_key": options.get("AZURE_STORAGE_ACCOUNT_KEY"),
            "sas_key": options.get("AZURE_STORAGE_SAS_KEY"),
            "client_id": options.get("AZURE_CLIENT_ID"),
            "client_secret": options.get("AZURE_CLIENT_SECRET"),
            "tenant_id": options.get("AZURE_TENANT_ID"),
            "endpoint": options.get("AZURE_ENDPOINT_URL"),
        }
    )
    # Part of the values of a client would let obstore look for the identity of this process.
    is_client = {"client_id", "client_secret", "tenant_id"} <= config.keys()
    if not is_own and not is_client and not {"account_key", "sas_key"} & config.keys():
        config["skip_signature"] = True
    return config


# --------------------------------------------------------------------------------------- checksums


def hasher(info: ObjectInfo) -> tuple[Callable[[memoryview], object], Callable[[], bool]]:
    """Takes the blocks of an object, and then says whether they have the checksum of the list."""
    kind, _, expected = info.checksum.partition(":")
    if not expected:
        return (lambda _: None), (lambda: True)
    if kind == "sha256":
        digest = hashlib.sha256()
    else:  # as git names a blob
        digest = hashlib.sha1(b"blob %d\0" % info.size, usedforsecurity=False)
    return digest.update, lambda: digest.hexdigest() == expected


# ------------------------------------------------------------------------------------------ errors


def _tag(e_tag: str | None) -> str:
    return (e_tag or "").removeprefix("W/").strip('"')


def _tag_of(meta: Mapping[str, Any]) -> str:
    return _tag(meta["e_tag"]) or meta["last_modified"].isoformat()


def _without_marks(objects: list[ObjectInfo]) -> list[ObjectInfo]:
    """The objects without those of no bytes that consoles make for folders."""
    folders: set[str] = set()
    for info in objects:
        folder = info.path.rpartition("/")[0]
        while folder and folder not in folders:
            folders.add(folder)
            folder = folder.rpartition("/")[0]
    return [info for info in objects if info.size or (info.path and info.path not in folders)]


def _changed(address: Address, info: ObjectInfo, change: str) -> ObjectChangedError:
    name = f"{info.path[:200]!r} of {address}" if info.path else str(address)
    return ObjectChangedError(f"{name} {change} while it was pulled")


def _absent(address: Address) -> DataStoreError:
    return DataStoreError(
        f"there is nothing at {address}", hint="a bucket that is not listed looks empty, too"
    )


#: The hint for credentials that do not suffice.
_SECRET_HINT = "secret= names the kt.Secret with credentials; without one nothing is signed"


@contextlib.contextmanager
def errors_of(address: Address, path: str = "", secret_hint: str = _SECRET_HINT) -> Iterator[None]:
    """Raise what `obstore` raises as errors of the data store."""
    try:
        yield
    except DataStoreError:
        raise
    except (exceptions.BaseError, msgspec.MsgspecError, ValueError, OSError) as error:
        _raise(error, address, path, secret_hint)


def _text(error: Exception) -> str:
    return str(error).partition("\n\nDebug source")[0]


def _raise(error: Exception, address: Address, path: str, secret_hint: str) -> NoReturn:
    text = _text(error)
    where = f"{path[:200]!r} of {address}" if path else str(address)
    code = re.search(r"status code: (\d{3})", text)
    reason = re.search(r"<Code>([A-Za-z]{1,60})</Code>", text)
    answer = " ".join(reason.groups() if reason else ())
    status = f"{code.group(1)}{answer and f' {answer}'}" if code else ""
    if isinstance(error, msgspec.MsgspecError):
        message, hint = f"{address} answers with no list of files", "HF_ENDPOINT may be wrong"
    elif status.startswith(("401", "403")) or isinstance(
        error, (exceptions.PermissionDeniedError, exceptions.UnauthenticatedError)
    ):
        message = f"{where} may not be reached with these credentials ({status or 'refused'})"
        hint = secret_hint
    elif isinstance(error, FileNotFoundError) or status.startswith("404"):
        message = f"there is nothing at {where} ({status or '404'})"
        hint = "the bucket, or the object, is not there by this name"
    elif status.startswith("301"):
        message = f"{where} is in another region ({status})"
        hint = "AWS_REGION of the secret names it"
    else:
        # Queries have signatures.
        text = re.sub(r"\?[^\s)]*", "", text.replace("\n", " "))
        message = f"{where} does not answer as it should: {text[: LIMITS.bucket_answer_characters]}"
        hint = "try again; each request was sent several times"
    raise DataStoreError(message, hint=hint) from None
