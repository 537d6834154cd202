"""A put: what lies on disk becomes the content of a key."""

from __future__ import annotations

import itertools
import os
import stat
from collections.abc import Callable, Sequence

from msgspec.structs import replace

from kubetorch.config import environment
from kubetorch.datastore import keys, manifests
from kubetorch.datastore.chunk_cache import ChunkCache
from kubetorch.datastore.manifests import ContentKind
from kubetorch.datastore.scan import FileChangedError
from kubetorch.datastore.snapshots import Snapshot
from kubetorch.datastore.sources import Filter, Source, Walk
from kubetorch.errors import SpecError
from kubetorch.lib import terminal
from kubetorch.sdk.data.progress import Progress
from kubetorch.sdk.data.tensor_cache import FileDeltas
from kubetorch.sdk.data.upload import Upload
from kubetorch.sdk.transport.session import Session
from kubetorch.sdk.tuning import LIMITS
from kubetorch.wire.data import Lifespan, PutKey

#: Names of ignored files that a line names.
_NAMED = 5


def put(  # noqa: PLR0913  # the parameters of `kt.put`
    session: Session,
    namespace: str,
    key: str,
    paths: Sequence[str],
    progress: Progress,
    *,
    contents: bool,
    filter_options: str | None,
    is_forced: bool,
    lifespan: Lifespan | None,
    is_published: bool = False,
    new_upload: Callable[[], Upload] | None = None,
) -> None:
    """Put files; `new_upload` makes an upload that ends elsewhere than with the key."""
    name = keys.check(key)
    for attempt in range(1, LIMITS.data_attempts + 1):
        kind, sources = _sources(paths, filter_options, contents=contents)
        size = sum(source.file_stat.st_size for source in sources if source.kind == "file")
        progress.begin(size, sum(source.kind == "file" for source in sources))
        cache = ChunkCache(environment.cache_dir(), "\0".join(map(os.path.realpath, paths)))
        if is_forced:
            cache.clear()
        try:
            put = PutKey(
                key=name, manifest="", lifespan=lifespan, service=environment.pod_service()
            )
            if new_upload is None:
                upload = Upload(session, namespace, progress, is_published=is_published)
                if not (session.is_local or is_published):
                    upload.deltas = FileDeltas(session, namespace, name, size)
            else:
                upload = new_upload()
            upload.is_forced = is_forced
            _send(upload, put, kind, sources, cache)
        except FileChangedError:
            if attempt == LIMITS.data_attempts:
                raise
        else:
            return


def _send(
    upload: Upload, put: PutKey, kind: ContentKind, sources: Sequence[Source], cache: ChunkCache
) -> None:
    contents = [
        cache.content(source.disk_path, source.file_stat) if source.kind == "file" else None
        for source in sources
    ]
    fresh_bytes = sum(
        source.file_stat.st_size
        for source, content in zip(sources, contents, strict=True)
        if source.kind == "file" and content is None
    )
    with upload:
        if upload.is_sending and fresh_bytes and not upload.has_room(fresh_bytes):
            # Much of it may be there already: what is missing decides, before a byte is sent.
            upload.is_sending = False
        snapshot = Snapshot(cache, upload)
        snapshot.read(sources, contents)
        manifest = snapshot.finish(kind)
        if kind == "file" and not manifest.entries:
            raise SpecError(f"{sources[0].disk_path} vanished while it was put")
        upload.send_unread()
        digest, encoded = manifests.encode(manifest)
        upload.put_key(replace(put, manifest=digest), encoded)
        if upload.deltas is not None:
            upload.deltas.keep_manifest(manifest, digest, encoded)


def _sources(
    paths: Sequence[str], filter_options: str | None, *, contents: bool
) -> tuple[ContentKind, list[Source]]:
    """What is stored: a single file as the key itself, all else below the key."""
    if len(paths) == 1 and not contents and not os.path.isdir(paths[0]):  # noqa: PTH112  # text
        return "file", [_file("", paths[0])]
    sources: list[Source] = []
    for path in paths:
        name = os.path.basename(os.path.realpath(path))  # noqa: PTH119  # text
        if not os.path.isdir(path):  # noqa: PTH112  # text
            sources.append(_file(os.path.basename(path), path))  # noqa: PTH119  # text
            continue
        filters = environment.rsync_filters()
        walk = Walk(path, Filter(os.path.realpath(path), filter_options, filters))
        walk.run("" if contents else f"{name}/")
        if not contents:
            sources.append(Source(name, "folder", path, os.stat(path)))  # noqa: PTH116  # text
        sources += walk.sources
        _report(path, walk)
    sources.sort(key=lambda source: source.path)
    for source, following in itertools.pairwise(sources):
        if source.path == following.path:
            raise SpecError(f"two of the sources have {source.path!r}: put them at different keys")
    return "folder", sources


def _file(name: str, path: str) -> Source:
    real = os.path.realpath(path)
    file_stat = os.stat(real)  # noqa: PTH116  # text
    if not stat.S_ISREG(file_stat.st_mode):
        raise SpecError(f"{path} is no file or folder, so it cannot be stored")
    return Source(name, "file", real, file_stat)


def _report(path: str, walk: Walk) -> None:
    for warning in walk.warnings:
        terminal.say_once(f"kt.put: {path}: {warning}")
    if walk.ignored:
        ignored = ", ".join(walk.ignored[:_NAMED])
        more = len(walk.ignored) - _NAMED
        terminal.say_once(
            f"kt.put: left out of {path} by ignore rules: {ignored}"
            + (f" and {more} more" if more > 0 else "")
        )
