"""The data store: `kt.put`, `kt.get`, `kt.ls`, `kt.rm`, and their awaitable forms.

A key is a path in its namespace. It holds a file or a folder. Files and folders are chunked, and
the store has each chunk once, so a put sends what the store lacks, and a get fetches what the
destination lacks.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kubetorch.config import environment
from kubetorch.config.settings import config
from kubetorch.datastore import keys
from kubetorch.datastore.tensors import holds_tensors
from kubetorch.errors import DataRefusedError, DataStoreError, KubetorchError, SpecError
from kubetorch.lib import terminal
from kubetorch.sdk import backend, inpod
from kubetorch.sdk.awaitable import awaitable
from kubetorch.sdk.data import buckets, files, tensors, windows
from kubetorch.sdk.data.client import ask, find_key
from kubetorch.sdk.data.direct import Sink, Source
from kubetorch.sdk.data.download import Download, no_key
from kubetorch.sdk.data.progress import Progress
from kubetorch.sdk.data.windows import BroadcastWindow, check_window
from kubetorch.specs import names
from kubetorch.wire import introspection
from kubetorch.wire.data import FindKeys, RemovePath

if TYPE_CHECKING:
    from kubetorch.sdk.secret import Secret
    from kubetorch.sdk.transport.session import Session
    from kubetorch.wire.data import KeyView, Lifespan, ListedPath

#: One path or several.
Paths = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]
Keys = str | Sequence[str]

_LOCALES = ("store", "local")


def put(  # noqa: PLR0913  # the documented parameters
    key: Keys,
    src: Any = None,  # noqa: ANN401  # paths, or tensors
    locale: str = "store",
    broadcast: BroadcastWindow | None = None,
    contents: bool = False,
    filter_options: str | None = None,
    force: bool = False,
    verbose: bool = False,
    namespace: str | None = None,
    kubeconfig_path: str | None = None,
    start_rsyncd: bool = True,
    base_path: str = "/",
    nccl_port: int = 29500,
    nccl_pg_mode: str | None = None,
    *,
    lifespan: Lifespan | None = None,
    secret: Secret | str | None = None,
) -> None:
    """Store files, a folder or tensors under a key; what the key held before is replaced at once.

    A single file is stored as the key, a folder below it: `kt.put("models/base", "ckpt/")` stores
    `models/base/ckpt/…`, with `contents=True` `models/base/…`.

    Args:
        key: A path such as `"models/base"`; several keys get the same content. Also an address in a
            bucket, `"s3://bucket/models"`, `gs://` or `az://`: files become objects there.
        src: Path of a file or folder, or several paths; or tensors and arrays, also in dicts and
            lists.
        locale: `"store"`; `"local"` publishes files of a pod without copying them.
        broadcast: With tensors, wait after the put until a condition is met, and pass them to the
            getters of the window; files need none.
        contents: Store what a folder has, or a file by its name, directly below the key.
        filter_options: Patterns in the words of rsync, `"--include=*.log --exclude=tmp"`, beside
            those of `.ktignore` and `.gitignore`.
        force: Read all files again, also those that are as they were, and what the store has of
            them: what is damaged there is replaced.
        verbose: Report what was sent.
        namespace: Namespace; `kt.config.namespace` if not given.
        kubeconfig_path: Kubeconfig of the cluster.
        start_rsyncd: No effect: there is no server to start.
        base_path: No effect, as above.
        nccl_port: No effect, as above.
        nccl_pg_mode: No effect, as above.
        lifespan: `"cluster"` stays until it is deleted; `"resource"` goes with its service, that of
            the key's first segment, or of this pod. If not given, a key below a service's name goes
            with the service.
        secret: The credentials for a bucket: a `kt.Secret`, a provider's name, or the name of a
            secret that exists. Without it nothing is signed but in pods, which use their own.

    Raises:
        SpecError: A parameter is impossible, or `src` is not there; it is a `ValueError`.
        DataStoreError: The store refuses the content, or has no room for it.
    """
    del start_rsyncd, base_path, nccl_port, nccl_pg_mode  # of an earlier release
    _check_put(src, locale, lifespan)
    names_of_keys = _keys(key, "put")
    check_window(broadcast)
    if inpod.is_deploying():
        return
    if locale == "local":
        _check_publication(names_of_keys)
    if _holds_tensors(src):
        _refuse_options_of_files(
            locale=locale != "store", contents=contents, filters=filter_options
        )
        _check_key_of_tensors(names_of_keys)
        with _transfer("storing", names_of_keys, verbose) as progress:
            session, name = _session(kubeconfig_path), _single(key)
            version = tensors.put(
                session, _namespace(namespace), name, src, progress, lifespan=lifespan
            )
        if broadcast is not None:
            with Source(session, version, is_packed=broadcast.pack) as source:
                offer, chosen = source.offer, _namespace(namespace)
                source.send(windows.wait(session, chosen, broadcast, names_of_keys, offer))
        return
    paths = existing_paths(src)
    with _transfer("storing", names_of_keys, verbose) as progress:
        for name in names_of_keys:
            new_upload = None
            if "://" in name:
                new_upload = buckets.uploads(
                    _session(kubeconfig_path), _namespace(namespace), name, progress, secret
                )
            files.put(
                _session(kubeconfig_path),
                _namespace(namespace),
                name,
                paths,
                progress,
                contents=contents,
                filter_options=filter_options,
                is_forced=force,
                lifespan=lifespan,
                is_published=locale == "local",
                new_upload=new_upload,
            )


def get(  # noqa: PLR0913  # the documented parameters
    key: Keys,
    dest: Any = None,  # noqa: ANN401  # a path, or tensors
    broadcast: BroadcastWindow | None = None,
    contents: bool = False,
    filter_options: str | None = None,
    force: bool = False,
    verbose: bool = False,
    namespace: str | None = None,
    kubeconfig_path: str | None = None,
    nccl_pg_mode: str | None = None,
    *,
    only: str | Sequence[str] | None = None,
    secret: Secret | str | None = None,
) -> Any:  # noqa: ANN401  # `None`, or tensors
    """Get the file, the folder or the tensors under a key, or all that is below it.

    Files that are at the destination already are not fetched. Each file there is the old or the new
    one, whole, at any moment.

    Args:
        key: The key, a path in the folder of a key, or a path above keys; or several of these. Also
            an address: `"s3://bucket/folder"`, `gs://`, `az://`, `https://host/file.csv`,
            `hf://owner/model`. What is there is pulled into the store, or only compared with it.
        dest: The folder that gets it; the working directory if not given. A single file lands in it
            under the last segment of the key; a `dest` with a suffix, at which there is no folder,
            is the path of this file. Tensors, or a dict of them such as `model.state_dict()`, are
            filled in place.
        broadcast: With tensors, wait until a condition is met, and get them from the putter's
            process where that is possible; with files, its `fanout`.
        contents: Put what a folder has into `dest` itself, not into a folder of the key's name.
        filter_options: Patterns in the words of rsync of the files to get.
        force: Fetch all files, also those that are there.
        verbose: Report what was fetched.
        namespace: Namespace; `kt.config.namespace` if not given.
        kubeconfig_path: Kubeconfig of the cluster.
        nccl_pg_mode: No effect, as above.
        only: Patterns of the names of tensors to get, such as `"layers.0.*"`, or of the paths of
            files below the key, such as `"tokenizer*"`; of a folder that matches, all is fetched.
        secret: The credentials for an address: a `kt.Secret`, a provider's name, or the name of a
            secret that exists. Without it nothing is signed but in pods, which use their own.

    Returns:
        The tensors of a key that holds tensors, without `dest` as they were put, else `dest`;
        `None` for files, which are written.

    Raises:
        DataStoreError: There is no such key, or the destination cannot be written, or the tensors
            do not fit it. Of several keys, of which one is missing, none is written.
        SpecError: One of several keys holds tensors, and there is no `dest`.
    """
    del nccl_pg_mode  # of an earlier release
    names_of_keys = _keys(key, "get")
    check_window(broadcast)
    if any("://" in name for name in names_of_keys):
        names_of_keys = _pulled(names_of_keys, secret, namespace, kubeconfig_path, verbose)
        key = names_of_keys[0] if isinstance(key, str) else names_of_keys
    patterns = (only,) if isinstance(only, str) else tuple(only or ())
    is_for_tensors = isinstance(dest, dict) or _holds_tensors(dest)
    if is_for_tensors or (dest is None and isinstance(key, str)):
        session, name = _session(kubeconfig_path), _single(key)
        view = find_key(session, _namespace(namespace), name)
        with Sink(session, name, dest, patterns) as sink:
            if broadcast and (is_for_tensors or view is None or view.kind == "tensors"):
                sink.meet(
                    windows.wait(session, _namespace(namespace), broadcast, [name], sink.offer)
                )
                view = find_key(session, _namespace(namespace), name)
            if is_for_tensors or (view is not None and _has_tensors(view, is_part=bool(only))):
                with _transfer("getting", names_of_keys, verbose) as progress:
                    return tensors.get(
                        *(session, _namespace(namespace), name, view, dest, progress),
                        only=patterns,
                        sink=sink,
                    )
    if dest is None or len(names_of_keys) > 1:
        session = _session(kubeconfig_path)
        _check_keys(session, _namespace(namespace), names_of_keys, has_dest=dest is not None)
    with _transfer("getting", names_of_keys, verbose) as progress:
        fanout = 0 if broadcast is None else broadcast.fanout or 0
        download = Download(
            _session(kubeconfig_path), _namespace(namespace), progress, fanout=fanout
        )
        for name in names_of_keys:
            download.get(
                name,
                None if dest is None else os.fspath(dest),
                contents=contents,
                filter_options=filter_options,
                is_forced=force,
                only=patterns,
            )
    return None


def ls(
    key: str = "",
    verbose: bool = False,
    namespace: str | None = None,
    kubeconfig_path: str | None = None,
) -> list[dict[str, Any]]:
    """The names directly below a key; empty if there are none, or the store does not answer.

    Returns:
        For each its `name`, which ends in `/` for a folder, `is_directory`, and its `locale`:
        `"store"`, or the name of the pod that published it. With `verbose` also `size` in bytes,
        `created` in seconds since the epoch, `version` and `holders`, as far as they are known.
    """
    try:
        rows = ask(
            _session(kubeconfig_path), _namespace(namespace), lambda client: client.list(key)
        )
    except KubetorchError as error:
        if verbose:
            for line in f"kt.ls({key!r}): {error}".splitlines():
                terminal.say(line)
        return []
    return [listed(row, is_verbose=verbose) for row in rows]


def listed(row: ListedPath, *, is_verbose: bool) -> dict[str, Any]:
    """A name in the answer of `ls`."""
    item: dict[str, Any] = {
        "name": f"{row.name}/" if row.is_directory else row.name,
        "is_directory": row.is_directory,
        "locale": row.locale,
    }
    if is_verbose:
        item |= {"size": row.size, "created": row.created}
        if row.key is not None:
            item |= {"version": row.key.version, "holders": list(row.key.holders)}
    return item


def rm(
    key: Keys,
    recursive: bool = False,
    prefix: bool = False,
    verbose: bool = False,
    namespace: str | None = None,
    kubeconfig_path: str | None = None,
) -> None:
    """Delete a key, or a path in its folder; an absent one is no error.

    Args:
        key: The key, or several.
        recursive: Delete folders too, with all keys below them.
        prefix: Delete all keys that begin with these characters.
        verbose: Report what was deleted.
        namespace: Namespace; `kt.config.namespace` if not given.
        kubeconfig_path: Kubeconfig of the cluster.

    Raises:
        DataRefusedError: It cannot be deleted, for example a folder without `recursive`.
    """
    names_of_keys = _keys(key, "rm")
    if inpod.is_deploying():
        return
    for name in names_of_keys:
        try:
            deleted = remove(
                name,
                recursive=recursive,
                is_prefix=prefix,
                namespace=namespace,
                kubeconfig=kubeconfig_path,
            )
        except DataStoreError as error:
            text = f"{name!r} cannot be deleted: {error.message}"
            raise DataRefusedError(text, hint=error.hint) from error
        if verbose:
            terminal.say(f"deleted {', '.join(deleted) or 'nothing'}")


def remove(
    key: str,
    *,
    recursive: bool,
    is_prefix: bool,
    namespace: str | None = None,
    kubeconfig: str | None = None,
) -> tuple[str, ...]:
    """Delete a path; returns the keys that were deleted or changed."""
    request = RemovePath(path=key, recursive=recursive, is_prefix=is_prefix)
    return ask(
        _session(kubeconfig), _namespace(namespace), lambda client: client.remove(request)
    ).keys


put_async = awaitable(put)
get_async = awaitable(get)
ls_async = awaitable(ls)
rm_async = awaitable(rm)


# ------------------------------------------------------------------------------------- parameters


def _keys(key: object, verb: str) -> list[str]:
    names_of_keys: list[str] = []
    for name in key if isinstance(key, (list, tuple)) else (key,):
        if not isinstance(name, str):  # as `ray.get` takes what `.remote()` gave
            raise TypeError(
                f"kt.{verb} takes keys of the data store, not {introspection.shown(key)}\n"
                "hint: handle.get() waits for a spawned call, [each.get() for each in handles] for "
                "several"
            )
        names_of_keys.append(name)
    return names_of_keys


def _pulled(
    names_of_keys: list[str],
    secret: Secret | str | None,
    namespace: str | None,
    kubeconfig: str | None,
    verbose: bool,
) -> list[str]:
    """The keys, of which those of addresses hold what is there now."""
    session, chosen = _session(kubeconfig), _namespace(namespace)
    variables = buckets.variables_of(secret, chosen)
    with _transfer("pulling", names_of_keys, verbose) as progress:
        return [
            buckets.pull(session, chosen, name, progress, variables=variables)
            if "://" in name
            else name
            for name in names_of_keys
        ]


def existing_paths(src: object) -> list[str]:
    """The paths of `src`, which exist."""
    paths = []
    for path in [*src] if isinstance(src, (list, tuple)) else [src]:
        if not isinstance(path, (str, os.PathLike)):
            raise SpecError(
                f"src is {introspection.shown(path)}; it must be a path, a list of paths, or "
                "tensors, alone or in dicts and lists",
                hint="write other values to a file, and put that",
            )
        if not os.fspath(path):
            raise SpecError(
                "src is an empty path", hint='"." is the working directory; is a variable unset?'
            )
        expanded = Path(path).expanduser()
        if not expanded.exists():
            raise SpecError(f"Could not locate path to sync up: {path}")
        paths.append(str(expanded))
    if not paths:
        raise SpecError("src is empty; it must be a path, or a list of paths")
    return paths


def _namespace(namespace: str | None) -> str:
    return config.namespace if namespace is None else names.check_namespace(namespace)


def _session(kubeconfig: str | None) -> Session:
    return backend.session(kubeconfig)


def _check_put(src: object, locale: str, lifespan: str | None) -> None:
    if src is None:
        raise SpecError("kt.put needs src", hint='for example kt.put("models/base", src="ckpt/")')
    if locale not in _LOCALES:
        raise SpecError(f'locale is {locale!r}; it can be "store" or "local"')
    if lifespan not in (None, "cluster", "resource"):
        raise SpecError(f'lifespan is {lifespan!r}; it can be "cluster" or "resource"')


def _is_for_bucket(names_of_keys: Sequence[str]) -> bool:
    return any("://" in name for name in names_of_keys)


def _check_publication(names_of_keys: Sequence[str]) -> None:
    """Refuse to publish without a copy what has to be copied, or is in no pod."""
    if not environment.is_in_pod():
        raise DataRefusedError(
            'locale="local" publishes files of a pod; this program runs in none',
            hint='leave out locale, or put locale="store"',
        )
    if _is_for_bucket(names_of_keys):
        raise SpecError('locale="local" is for keys', hint="leave out locale for a bucket")


def _check_key_of_tensors(names_of_keys: Sequence[str]) -> None:
    if _is_for_bucket(names_of_keys):
        raise SpecError(
            "src holds tensors, and the key is an address",
            hint="put them at a key, get them as a file, and put that: kt.get(key, "
            'dest="w.safetensors")',
        )


def _refuse_options_of_files(*, locale: bool, contents: bool, filters: str | None) -> None:
    """Refuse options that mean nothing for tensors."""
    options = {'locale="local"': locale, "contents": contents, "filter_options": filters}
    for name, value in options.items():
        if value:
            raise SpecError(f"{name} is for files; src holds tensors", hint=f"leave out {name}")


def _holds_tensors(value: object) -> bool:
    if value is None or isinstance(value, (str, os.PathLike)):
        return False
    return holds_tensors(value)


def _has_tensors(view: KeyView, *, is_part: bool) -> bool:
    """True if a get without a destination gives tensors: of a file, a part can be nothing else."""
    return view.kind == "tensors" or (is_part and view.kind == "file")


def _check_keys(
    session: Session, namespace: str, names_of_keys: Sequence[str], *, has_dest: bool
) -> None:
    """Refuse what cannot be got before the first file is written."""
    for name in names_of_keys:
        path = keys.check(name)
        find = FindKeys(path=path)
        path_keys = ask(session, namespace, lambda client, find=find: client.find(find)).keys  # type: ignore[misc]
        if not path_keys:
            raise no_key(path, namespace)
        for path_key in path_keys:
            if path_key.key.kind == "tensors" and not has_dest:
                raise SpecError(
                    f"{path_key.key.key!r} holds tensors; a get of several keys writes files",
                    hint="kt.get(key) of this key alone returns its tensors; with a dest, such as "
                    'dest=".", they are written as a file of the safetensors format',
                )


def _single(key: Keys) -> str:
    if not isinstance(key, str):
        raise SpecError(
            f"tensors need a single key, not {introspection.shown(key)}",
            hint="a loop over the keys costs no more: the store has each chunk once",
        )
    return key


def _transfer(verb: str, names_of_keys: list[str], verbose: bool) -> Progress:
    return Progress(verb, ", ".join(names_of_keys), is_verbose=verbose)
