"""`kt store`: whether the data store is whole, and what it keeps for nothing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

import typer
from msgspec import to_builtins
from msgspec.structs import replace

from kubetorch.cli.args import AsJson, Namespace
from kubetorch.cli.output import Output
from kubetorch.cli.services import open_namespace
from kubetorch.datastore import keys
from kubetorch.datastore.manifests import Manifest
from kubetorch.errors import DataStoreError, KubetorchError
from kubetorch.sdk.controller import Controller
from kubetorch.sdk.data.client import DataClient
from kubetorch.sdk.data.download import Download
from kubetorch.sdk.data.progress import Progress
from kubetorch.wire.data import CheckedKey, FindKeys, KeySource, KeyView

store_app = typer.Typer(rich_markup_mode=None, add_completion=False)
app = typer.Typer(rich_markup_mode=None, add_completion=False)
app.add_typer(store_app, name="store")


@store_app.callback(invoke_without_command=True)
def store(context: typer.Context) -> None:
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
