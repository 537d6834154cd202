"""Pulls objects of a bucket into a store of blobs, or writes objects from there, as a program.

    python -m kubetorch.datastore.bucket_program      a `BucketJob` on standard input

It writes lines of `BucketProgress`, the last of which has the manifest or the failure. A program of
its own because of `obstore` (see `buckets`), and because it has no credentials but those of its
job: the controller starts it without its own environment.

    list ── tags as they were? ── entries of the manifest before
      └──── others ── parts, fetched ahead ── chunks ── blobs ── manifest

Nothing names the blobs of a pull that fails, so the collector removes them.
"""

from __future__ import annotations

import functools
import itertools
import resource
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec

from kubetorch.datastore import addresses, buckets, chunks, manifests
from kubetorch.datastore.addresses import Address
from kubetorch.datastore.blobs import BlobStore, Room, digest_of
from kubetorch.datastore.manifests import Chunk, Entry, Manifest
from kubetorch.datastore.trees import path_fault
from kubetorch.datastore.tuning import LIMITS, TIMING
from kubetorch.errors import DataStoreError, KubetorchError
from kubetorch.lib.egress import EgressProxy, networks
from kubetorch.wire import exceptions, messages
from kubetorch.wire.buckets import BucketJob, BucketProgress


class Report:
    """Counts what a program has done, and writes lines about it."""

    def __init__(self, write: Callable[[BucketProgress], None]) -> None:
        self._write = write
        self._progress = BucketProgress()
        self._due = 0.0
        self._lock = threading.Lock()

    def begin(self, size: int, files: int) -> None:
        self._progress = msgspec.structs.replace(self._progress, size=size, files=files, done=0)

    def add(self, size: int, *, is_moved: bool) -> None:
        with self._lock:
            progress = self._progress
            moved = progress.moved + (size if is_moved else 0)
            self._progress = msgspec.structs.replace(
                progress, done=progress.done + size, moved=moved
            )
            if time.monotonic() >= self._due:
                self._due = time.monotonic() + TIMING.bucket_report_seconds
                self._write(self._progress)

    def end(self, manifest: str) -> None:
        self._write(msgspec.structs.replace(self._progress, manifest=manifest))


class Pull:
    """The content of an address, as it becomes the content of a key.

    Args:
        before: What the key holds; of objects whose tags are as they were, nothing is fetched.
        is_store: Whether `blobs` is the store with what the key holds.
    """

    def __init__(
        self,
        address: Address,
        blobs: BlobStore,
        before: Manifest | None,
        report: Report,
        *,
        is_store: bool = True,
    ) -> None:
        self._address = address
        self._blobs = blobs
        self._report = report
        self._before = before
        self._is_store = is_store
        self._packs: dict[str, int] = {}
        #: By path: the tag, and the entry.
        self._entries: dict[str, tuple[str, Entry]] = {}
        #: Small objects that wait for their pack: path, tag, digest and content.
        self._small: list[tuple[str, str, str, bytes]] = []
        self._small_bytes = 0
        self._digests: set[str] = set()
        self._renewal_due = time.monotonic() + TIMING.bucket_renewal_seconds

    def run(self, bucket: buckets.Bucket) -> str:
        """Returns the digest of the manifest, which is stored, as are its blobs."""
        if self._before is not None:
            self._keep(self._before)
        for attempt in itertools.count(1):
            infos = bucket.objects()
            self._check(infos)
            try:
                self._fetch(bucket, infos)
            except buckets.ObjectChangedError as error:
                if attempt == LIMITS.bucket_pulls:
                    error.message += f", {attempt} times in a row"
                    error.hint = "get it again when nothing writes to it"
                    raise
            else:
                return self._finish(infos)
        raise AssertionError  # the last attempt has returned or raised

    def _check(self, infos: list[buckets.ObjectInfo]) -> None:
        for info in infos:
            fault = path_fault(info.path) if info.path else None
            if fault is not None:
                raise DataStoreError(
                    f"the object {info.path[:200]!r} of {self._address} {fault}: it cannot be a "
                    "file",
                    hint="get the folders without it, each by its own address",
                )
        paths = {info.path for info in infos}
        for path in paths:
            above = path.rpartition("/")[0]
            while above:
                if above in paths:
                    raise DataStoreError(
                        f"{self._address} has the object {above[:200]!r} and objects below it: it "
                        "cannot be a file and a folder",
                        hint=f"get {self._address}/{above[:200]}/ for those below it",
                    )
                above = above.rpartition("/")[0]

    def _keep(self, before: Manifest) -> None:
        """Take over the entries of the version before, whose blobs the store has."""
        if before.tags is msgspec.UNSET:
            return
        if self._is_store and self._blobs.missing(before.digests()):
            return  # what is damaged is fetched again
        for entry in before.entries:
            tag = before.tags.get(entry.path)
            if tag is not None and entry.kind == "file":
                chunks = tuple(
                    chunk
                    if chunk.pack is None
                    else msgspec.structs.replace(chunk, pack=self._pack(before.packs[chunk.pack]))
                    for chunk in entry.chunks
                )
                self._entries[entry.path] = tag, msgspec.structs.replace(entry, chunks=chunks)

    def _pack(self, digest: str) -> int:
        return self._packs.setdefault(digest, len(self._packs))

    def _fetch(self, bucket: buckets.Bucket, infos: list[buckets.ObjectInfo]) -> None:
        stored = {path: (tag, entry.size) for path, (tag, entry) in self._entries.items()}
        changed = [
            info for info in infos if not info.tag or stored.get(info.path) != (info.tag, info.size)
        ]
        size = sum(info.size for info in infos)
        self._report.begin(size, len(infos))
        missing = sum(info.size for info in changed)
        self._blobs.check_room(missing)
        self._report.add(size - missing, is_moved=False)
        blocks = bucket.read(changed)
        for info, of_object in itertools.groupby(blocks, key=lambda block: block[0]):
            self._take(info, (block for _, block in of_object))
        self._close_pack()

    def _take(self, info: buckets.ObjectInfo, blocks: Iterator[memoryview]) -> None:
        """Store the blocks of an object."""
        update, has_checksum = buckets.hasher(info)
        chunks: list[Chunk] = []
        received = 0
        content = b""
        for block in blocks:
            received += len(block)
            if received > info.size:
                break
            update(block)
            self._report.add(len(block), is_moved=True)
            if info.size <= LIMITS.packed_file_bytes:
                content += block
            else:
                chunks += map(self._store, _cut(block))
            self._renew()
        if received != info.size or not has_checksum():
            raise buckets.ObjectChangedError(
                f"{info.path[:200] or self._address} came with another content than its list says: "
                f"{received:,} of {info.size:,} bytes"
            )
        if content:
            self._small.append((info.path, info.tag, digest_of(content), content))
            self._small_bytes += len(content)
            if self._small_bytes >= LIMITS.pack_bytes:
                self._close_pack()
        else:
            self._entries[info.path] = info.tag, Entry(info.path, chunks=tuple(chunks))

    def _store(self, data: bytes | memoryview) -> Chunk:
        digest = self._blobs.add(data)
        self._digests.add(digest)
        return Chunk(digest, len(data))

    def _close_pack(self) -> None:
        small, self._small, self._small_bytes = self._small, [], 0
        if not small:
            return
        pack = self._pack(self._store(b"".join(content for *_, content in small)).digest)
        offset = 0
        for path, tag, digest, content in small:
            chunk = Chunk(digest, len(content), pack, offset)
            self._entries[path] = tag, Entry(path, chunks=(chunk,))
            offset += len(content)

    def _renew(self) -> None:
        """Keep the collector from blobs that no manifest names yet."""
        if time.monotonic() >= self._renewal_due:
            self._blobs.touch(self._digests)
            self._renewal_due = time.monotonic() + TIMING.bucket_renewal_seconds

    def _finish(self, infos: list[buckets.ObjectInfo]) -> str:
        entries = tuple(self._entries[info.path][1] for info in infos)
        tags = {info.path: info.tag for info in infos if info.tag}
        used = {chunk.pack for entry in entries for chunk in entry.chunks} - {None}
        packs = [digest for digest, number in self._packs.items() if number in used]
        numbers = {self._packs[digest]: number for number, digest in enumerate(packs)}
        entries = tuple(
            msgspec.structs.replace(
                entry,
                chunks=tuple(
                    chunk
                    if chunk.pack is None
                    else msgspec.structs.replace(chunk, pack=numbers[chunk.pack])
                    for chunk in entry.chunks
                ),
            )
            for entry in entries
        )
        is_file = len(entries) == 1 and not entries[0].path
        manifest = Manifest("file" if is_file else "folder", entries, tuple(packs), tags)
        manifests.check(manifest)
        before = self._before
        if before is not None and (before.entries, before.packs, before.tags) == (
            manifest.entries,
            manifest.packs,
            manifest.tags,
        ):
            manifest = before
        return _stored(self._blobs, manifest)


def _cut(block: memoryview) -> Iterator[memoryview]:
    """The chunks of a block; a block ends in the middle of nothing but an object."""
    if len(block) <= LIMITS.smallest_chunk_bytes:
        yield from [block] if block else []
        return
    for chunk in chunks.content_cutter().cut_buf(block):
        yield block[chunk.offset : chunk.offset + chunk.length]


def _stored(blobs: BlobStore, manifest: Manifest) -> str:
    digest, encoded = manifests.encode(manifest)
    if len(encoded) > LIMITS.manifest_encoded_bytes:
        raise DataStoreError(
            f"the list of {len(manifest.entries):,} objects has {len(encoded):,} bytes; "
            f"{LIMITS.manifest_encoded_bytes:,} are allowed",
            hint="get parts of it",
        )
    blobs.add(encoded, digest)
    blobs.touch(manifest.digests())
    return digest


# -------------------------------------------------------------------------------------------- push


def push(bucket: buckets.Bucket, blobs: BlobStore, manifest: Manifest, report: Report) -> str:
    """Write the files of a manifest as objects; returns a manifest with their tags.

    Each object is there as a whole or not at all. Objects that the manifest does not have stay.
    """
    files = {entry.path: entry for entry in manifest.entries if entry.kind == "file"}
    objects = {
        entry.path: entry if entry.kind == "file" else _target(entry, files, bucket.address)
        for entry in manifest.entries
        if entry.kind != "folder"
    }
    report.begin(sum(entry.size for entry in objects.values()), len(objects))
    is_ending = threading.Event()
    # An object that is half written is then taken back.
    signal.signal(signal.SIGTERM, lambda *_: is_ending.set())
    tags: dict[str, str] = {}

    @functools.lru_cache(LIMITS.bucket_streams)
    def read_pack(digest: str) -> bytes:
        size = blobs.size(digest)
        if size > LIMITS.cut_block_bytes:
            raise DataStoreError(f"the pack {digest} has {size:,} bytes: it is no pack of a put")
        return blobs.read(digest)

    def write(path: str) -> None:
        entry = objects[path]

        def pieces() -> Iterator[bytes]:
            for piece in _pieces(blobs, manifest, entry, read_pack):
                if is_ending.is_set():
                    raise DataStoreError("nobody waits for the end of this put any more")
                report.add(len(piece), is_moved=True)
                yield piece

        tags[path] = bucket.write(path, pieces(), entry.size)

    with ThreadPoolExecutor(LIMITS.bucket_streams, "kubetorch-bucket") as pool:
        futures = [pool.submit(write, path) for path in objects]
        try:
            for future in futures:
                future.result()
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    # A link is an object of its own there.
    stored_tags = {path: tag for path, tag in tags.items() if tag and path in files}
    return _stored(blobs, msgspec.structs.replace(manifest, tags=stored_tags))


def _target(entry: Entry, files: dict[str, Entry], address: Address) -> Entry:
    """The file that a link leads to; buckets have no links."""
    names = entry.path.split("/")[:-1]
    for name in entry.target.split("/"):
        if name == "..":
            del names[-1:]
        elif name != ".":
            names.append(name)
    target = files.get("/".join(names))
    if target is None:
        raise DataStoreError(
            f"the link {entry.path!r} leads to {entry.target!r}, which is no file of the folder: "
            f"it cannot be an object of {address}",
            hint="leave it out by filter_options, or put the files instead of links",
        )
    return target


def _pieces(
    blobs: BlobStore, manifest: Manifest, entry: Entry, read_pack: Callable[[str], bytes]
) -> Iterator[bytes]:
    """The content of a file; the last piece of a chunk comes only if the chunk is not damaged."""
    for chunk in entry.chunks:
        if chunk.pack is not None:
            pack = read_pack(manifest.blob_of(chunk))
            piece = pack[chunk.offset : chunk.offset + chunk.size]
            _check_size(entry, chunk, len(piece))
            yield piece
        elif chunk.digest:
            _check_size(entry, chunk, blobs.size(chunk.digest))
            yield from blobs.stream(chunk.digest)[1]
        else:
            for begin in range(0, chunk.size, LIMITS.bucket_part_bytes):
                yield bytes(min(LIMITS.bucket_part_bytes, chunk.size - begin))


def _check_size(entry: Entry, chunk: Chunk, size: int) -> None:
    """Refuse what would make an object of another size than its manifest says."""
    if size != chunk.size:
        raise DataStoreError(
            f"{entry.path[:200]!r} has a chunk of {size:,} bytes; its manifest says {chunk.size:,}",
            hint="put the files again",
        )


# ------------------------------------------------------------------------------------ as a program


def run(job: BucketJob, report: Report, proxy: str | None) -> str:
    address = addresses.parse(job.address)
    options = addresses.check_options(address.scheme, job.options)
    blobs = BlobStore(Path(job.folder), Room(job.owner, job.hint, job.limit_bytes))
    before = None
    if job.manifest and (job.is_push or blobs.has(job.manifest)):
        before = manifests.read(blobs, job.manifest)
    bucket = buckets.Bucket(address, options, proxy=proxy, is_own=job.networks is None)
    if not job.is_push:
        is_store = job.networks is not None
        return Pull(address, blobs, before, report, is_store=is_store).run(bucket)
    assert before is not None
    return push(bucket, blobs, before, report)


def _run_guarded(job: BucketJob, report: Report) -> str:
    if job.networks is None:
        return run(job, report, None)
    with EgressProxy(networks(job.networks)) as proxy:
        try:
            return run(job, report, proxy.url)
        except KubetorchError:
            if not proxy.refusals:
                raise
            raise DataStoreError(
                f"{job.address} leads to {proxy.refusals[0]}, which is no public address",
                hint="the networks that may be reached all the same: buckets.allowedNetworks of "
                "the chart; for the local service, once kt local stop has ended it, the variable "
                "KT_BUCKET_NETWORKS, such as 127.0.0.1/32",
            ) from None


def _write(progress: BucketProgress) -> None:
    sys.stdout.buffer.write(messages.encode(progress) + b"\n")
    sys.stdout.buffer.flush()


def _limit_memory() -> None:
    """What a server sends takes memory from this program, not from the controller beside it."""
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    size = LIMITS.bucket_memory_bytes
    if hard == resource.RLIM_INFINITY or size < hard:
        resource.setrlimit(resource.RLIMIT_DATA, (size, size))


def main() -> int:
    job = messages.decode(BucketJob, sys.stdin.buffer.read())
    if job.networks is not None:
        _limit_memory()
    report = Report(_write)
    try:
        report.end(_run_guarded(job, report))
    except MemoryError:
        error = DataStoreError(
            f"{job.address} needs more memory than the {LIMITS.bucket_memory_bytes:,} bytes that "
            "a program for a bucket has",
            hint="get parts of it",
        )
        _write(BucketProgress(failure=exceptions.describe_refusal(error).to_dict()))
        return 1
    except Exception as error:  # noqa: BLE001  # the getters wait for the failure
        if not isinstance(error, KubetorchError | OSError):
            traceback.print_exc()
        failure = exceptions.describe_refusal(error)
        _write(BucketProgress(failure=failure.to_dict()))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
