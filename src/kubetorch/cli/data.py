"""`kt put`, `kt get`, `kt ls`, `kt rm`, and `kt store`: the data store, its files and folders."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from typing import Annotated, Literal

import typer
from msgspec import to_builtins
from msgspec.structs import replace

from kubetorch.cli import views
from kubetorch.cli.args import AsJson, Namespace
from kubetorch.cli.output import Output
from kubetorch.cli.services import open_namespace
from kubetorch.datastore import keys
from kubetorch.datastore.manifests import Manifest
from kubetorch.errors import DataStoreError, KubetorchError, ServiceNotFoundError, SpecError
from kubetorch.sdk.controller import Controller
from kubetorch.sdk.data import buckets, files, store
from kubetorch.sdk.data.client import DataClient, ask
from kubetorch.sdk.data.download import Download
from kubetorch.sdk.data.progress import Progress, readable
from kubetorch.sdk.transport.session import Session
from kubetorch.specs import names
from kubetorch.wire.data import CheckedKey, FindKeys, KeySource, KeyView, ListedPath, RemovePath

app = typer.Typer(rich_markup_mode=None, add_completion=False)

Key = Annotated[
    str, typer.Argument(metavar="KEY", help="The key, such as models/base, or s3://bucket/x.")
]
Verbose = Annotated[bool, typer.Option("-v", "--verbose", help="Show more.")]
Force = Annotated[
    bool, typer.Option("-f", "--force", help="Also files that are as they were, and damaged ones.")
]
Contents = Annotated[
    bool, typer.Option("-c", "--contents", help="What a folder has, without the folder.")
]
SecretName = Annotated[
    str | None,
    typer.Option("--secret", metavar="NAME", help="The secret, or provider, for an address."),
]
Exclude = Annotated[
    list[str] | None,
    typer.Option("--exclude", metavar="PATTERN", help="Leave these files out; may be repeated."),
]
Include = Annotated[
    list[str] | None,
    typer.Option("--include", metavar="PATTERN", help="Take these files in any case."),
]


def _filters(include: list[str] | None, exclude: list[str] | None) -> str | None:
    options = [f"--include={pattern}" for pattern in include or ()]
    options += [f"--exclude={pattern}" for pattern in exclude or ()]
    return shlex.join(options) or None


def _report(output: Output, key: str, progress: Progress, line: str, *, verbose: bool) -> None:
    if output.as_json:
        output.record(
            {
                "key": key,
                "files": progress.files,
                "bytes": progress.total,
                "moved": progress.moved,
                "seconds": round(progress.seconds, 3),
            }
        )
        return
    output.report(line, "green")
    if verbose:
        output.report(progress.summary())


@app.command("put")
def put(  # noqa: PLR0913  # the documented options
    key: Key,
    sources: Annotated[
        list[str] | None, typer.Argument(metavar="PATH", help="A file or folder, as --src.")
    ] = None,
    src: Annotated[
        list[str] | None, typer.Option("-s", "--src", help="A file or folder; may be repeated.")
    ] = None,
    force: Force = False,
    exclude: Exclude = None,
    include: Include = None,
    contents: Contents = False,
    lifespan: Annotated[
        Literal["cluster", "resource"] | None,
        typer.Option(help="cluster: until it is deleted; resource: until its service is."),
    ] = None,
    secret: SecretName = None,
    verbose: Verbose = False,
    namespace: Namespace = None,
    as_json: AsJson = False,
) -> None:
    """Store files or folders under a key, or in a bucket."""
    output = Output(as_json=as_json)
    sources = [*(sources or ()), *(src or ())]
    if not sources:
        raise SpecError("nothing to store", hint=f"name a file or folder: kt put {key} --src PATH")
    paths = store.existing_paths(sources)
    session, chosen = open_namespace(namespace, output, is_changing=True)
    with Progress("storing", key) as progress:
        new_upload = None
        if "://" in key:
            new_upload = buckets.uploads(session, chosen, key, progress, secret)
        files.put(
            session,
            chosen,
            key,
            paths,
            progress,
            contents=contents,
            filter_options=_filters(include, exclude),
            is_forced=force,
            lifespan=lifespan,
            new_upload=new_upload,
        )
    _report(output, key, progress, f"✓ Stored at key '{key}'", verbose=verbose)


@app.command("get")
def get(  # noqa: PLR0913  # the documented options
    key: Key,
    folder: Annotated[
        str | None, typer.Argument(metavar="FOLDER", help="The folder that gets it, as --dest.")
    ] = None,
    dest: Annotated[
        str | None,
        typer.Option("-d", "--dest", help="The folder that gets it; this one by default."),
    ] = None,
    force: Force = False,
    exclude: Exclude = None,
    include: Include = None,
    only: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PATTERN", help="Get files and folders of these names alone; may be repeated."
        ),
    ] = None,
    contents: Contents = False,
    secret: SecretName = None,
    verbose: Verbose = False,
    namespace: Namespace = None,
    as_json: AsJson = False,
) -> None:
    """Get the file or folder under a key or address, or all keys below it."""
    output = Output(as_json=as_json)
    if folder is not None and dest is not None:
        raise SpecError(f"two folders get {key!r}: {folder} and {dest}", hint="name one of them")
    session, chosen = open_namespace(namespace, output, is_changing=False)
    path = key
    if "://" in key:
        variables = buckets.variables_of(secret, chosen)
        with Progress("pulling", key) as progress:
            path = buckets.pull(session, chosen, key, progress, variables=variables)
    with Progress("getting", key) as progress:
        Download(session, chosen, progress).get(
            path,
            folder or dest,
            contents=contents,
            filter_options=_filters(include, exclude),
            is_forced=force,
            only=only or (),
        )
    _report(output, key, progress, f"✓ Retrieved key '{key}'", verbose=verbose)


@app.command("ls")
def ls(
    key: Annotated[str, typer.Argument(metavar="KEY", help="A key; all of them if left out.")] = "",
    verbose: Verbose = False,
    namespace: Namespace = None,
    as_json: AsJson = False,
) -> None:
    """List what is stored below a key; -v shows sizes, ages, versions and who has them."""
    output = Output(as_json=as_json)
    session, chosen = open_namespace(namespace, output, is_changing=False)
    rows = ask(session, chosen, lambda client: client.list(key))
    rows.sort(key=lambda row: (not row.is_directory, row.name))
    if as_json:
        output.value([store.listed(row, is_verbose=True) for row in rows])
        return
    if not rows:
        output.report(f"No items found under key '{key}'" if key else "Store is empty")
        return
    if verbose:
        output.table([_row(row) for row in rows])
    else:
        for row in rows:
            output.report(_line(row))
    directories = sum(row.is_directory for row in rows)
    output.report(f"Total: {directories} directories, {len(rows) - directories} files")


def _line(row: ListedPath) -> str:
    locale = "" if row.locale == "store" else f" (locale: {row.locale})"
    return f"📁 {row.name}/{locale}" if row.is_directory else f"📄 {row.name}{locale}"


def _row(row: ListedPath) -> dict[str, str]:
    view = row.key
    return {
        "NAME": f"{row.name}/" if row.is_directory else row.name,
        "SIZE": readable(row.size),
        "AGE": views.age(row.created),
        "VERSION": "-" if view is None else str(view.version),
        "HOLDERS": row.locale if view is None else ", ".join(view.holders),
        "ENDS WITH": "-" if view is None or not view.service else view.service,
    }


@app.command("rm")
def rm(
    key: Key,
    recursive: Annotated[
        bool, typer.Option("-r", "--recursive", help="Folders too, with all that is below them.")
    ] = False,
    prefix: Annotated[
        bool, typer.Option("-p", "--prefix", help="All keys that begin with these characters.")
    ] = False,
    verbose: Verbose = False,
    namespace: Namespace = None,
    as_json: AsJson = False,
) -> None:
    """Delete a key, or a path in its folder."""
    output = Output(as_json=as_json)
    session, chosen = open_namespace(namespace, output, is_changing=True)
    request = RemovePath(path=key, recursive=recursive, is_prefix=prefix)
    deleted = ask(session, chosen, lambda client: client.remove(request)).keys
    if as_json:
        output.record({"deleted": list(deleted)})
    elif not deleted:
        _report_absent(output, session, chosen, key)
    else:
        output.report(
            f"✓ Deleted all keys with prefix '{key}'" if prefix else f"✓ Deleted key '{key}'"
        )
        if verbose:
            output.report(f"deleted or changed: {', '.join(deleted)}")


def _report_absent(output: Output, session: Session, namespace: str, key: str) -> None:
    """Report that there is no such key; one that is the name of a service was meant as that."""
    try:
        # A path such as models/base is no name of a service.
        name = key if names.clean(key) == key else ""
        service = session.get_workload(namespace, name).spec.name if name else ""
    except (ServiceNotFoundError, SpecError):
        service = ""
    if not service:
        output.report(f"There is no key '{key}'; nothing was deleted")
        return
    raise DataStoreError(
        f"there is no key {key!r}, but a service of that name",
        hint=f"kt teardown {service} deletes the service",
    )


# ----------------------------------------------------- whether the store is whole, and its garbage

store_app = typer.Typer(rich_markup_mode=None, add_completion=False)
app.add_typer(store_app, name="store")


@store_app.callback(invoke_without_command=True)
def show_help(context: typer.Context) -> None:
    """Verify keys of the data store, or delete what nothing needs."""
    if context.invoked_subcommand is None:
        Output().text(context.get_help())


@store_app.command()
def verify(
    key: Annotated[str, typer.Argument(metavar="KEY", help="A key, or a path above keys.")],
    namespace: Namespace = None,
    as_json: AsJson = False,
) -> None:
    """Compare all bytes of keys with their digests: who has which version, whole or not."""
    output = Output(as_json=as_json)
    session, chosen = open_namespace(namespace, output, is_changing=False)
    path = keys.check(key)

    def verified(controller: Controller) -> list[CheckedKey]:
        client = DataClient(controller, chosen)
        rows = list(_verified_in_store(client.verify(path), output))
        find = FindKeys(path=path, wants_all_sources=True)
        if any(path_key.sources for path_key in client.find(find).keys):
            for path_key, manifest in Download(session, chosen, Progress("", "")).find(find):
                for source in path_key.sources:
                    rows.append(_verified_in_pod(client, source, path_key.key, manifest))
        return sorted(rows, key=lambda row: row.key)

    rows = session.ask(verified)
    if not rows:
        raise DataStoreError(f"there is no key at {key!r}", hint="kt ls lists the keys")
    if as_json:
        output.value([to_builtins(row) for row in rows])
    for row in rows:
        state = "whole" if row.is_whole else "not whole"
        text = f"{row.key} version {row.version} in {row.holder}: {state}, {row.checked:,} bytes"
        output.report(text, "green" if row.is_whole else "red")
        for fault in row.faults:
            output.report(f"  {fault}")
    if not all(row.is_whole for row in rows):
        output.note("hint: put these keys again; what is whole is not sent again")
        raise typer.Exit(1)


def _verified_in_store(rows: Iterator[CheckedKey], output: Output) -> Iterator[CheckedKey]:
    for row in rows:
        if row.is_whole is not None:
            yield row
        else:
            output.note(f"{row.key}: {row.checked:,} of {row.size:,} bytes")


def _verified_in_pod(
    client: DataClient, source: KeySource, view: KeyView, manifest: Manifest
) -> CheckedKey:
    """What a pod says about its files of a key."""
    row = CheckedKey(key=view.key, version=view.version, holder=source.pod, size=view.size)
    try:
        faults = dict(client.faults_in(source, view.manifest, manifest.digests()))
    except KubetorchError as error:
        return replace(row, faults=(error.message,), is_whole=False)
    wrong = tuple(sorted({fault for fault in faults.values() if fault}))
    return replace(row, checked=view.size, faults=wrong, is_whole=not wrong)


@store_app.command()
def gc(
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only say what would be deleted.")
    ] = False,
    namespace: Namespace = None,
    as_json: AsJson = False,
) -> None:
    """Delete blobs that no key, service or result needs; the controller does so twice an hour."""
    output = Output(as_json=as_json)
    session, chosen = open_namespace(namespace, output, is_changing=not dry_run)
    collected = session.ask(
        lambda controller: DataClient(controller, chosen).collect(is_dry=dry_run)
    )
    if as_json:
        output.value(to_builtins(collected))
    verb = "would be deleted" if dry_run else "deleted"
    output.report(f"{collected.deleted_blobs:,} blobs of {collected.deleted_size:,} bytes {verb}")
    if collected.young_blobs:
        output.report(
            f"{collected.young_blobs:,} blobs of {collected.young_size:,} bytes that nothing needs "
            "stay some minutes more: a put may be under way"
        )
    output.report(f"{collected.remaining_blobs:,} blobs of {collected.remaining_size:,} bytes stay")
