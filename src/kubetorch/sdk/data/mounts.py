"""`kt.Compute(data=)`: keys of the data store at paths of pods.

A deploy notes what each key holds (`resolved`), so a key that is missing fails it before any pod is
made, and one that holds something else makes a new generation. An agent runs this module as a
program, in the pod and with the pod's credentials, to fetch what keys hold into a new folder:

    python -m kubetorch.sdk.data.mounts ORDER      a `FetchData` as JSON

Its last line on standard output is the list of mounts with their versions, or the failure.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from kubetorch.datastore import keys
from kubetorch.datastore.blobs import digest_of
from kubetorch.datastore.node_trees import NodeTrees
from kubetorch.errors import DataStoreError, KubetorchError, SpecError
from kubetorch.sdk import backend
from kubetorch.sdk.controller import refusal
from kubetorch.sdk.data import buckets
from kubetorch.sdk.data.client import ask
from kubetorch.sdk.data.declarations import EXAMPLE
from kubetorch.sdk.data.download import DeclaredData, Download
from kubetorch.sdk.data.progress import Progress
from kubetorch.sdk.transport import pod_transport
from kubetorch.sdk.tuning import LIMITS, TIMING
from kubetorch.specs.data import DataMount
from kubetorch.wire import exceptions, messages, routes
from kubetorch.wire.data import FindKeys
from kubetorch.wire.pod_commands import FetchData

if TYPE_CHECKING:
    from kubetorch.sdk.secret import Secret
    from kubetorch.sdk.transport.session import Session
    from kubetorch.specs.compute import ComputeSpec
    from kubetorch.wire.data import PathKey
    from kubetorch.wire.messages import PodView, WorkloadView


def resolved(
    session: Session, namespace: str, compute: ComputeSpec, secrets: Iterable[Secret] = ()
) -> tuple[DataMount, ...]:
    """The mounts of a service with what their keys hold now; addresses are pulled first.

    Raises:
        DataStoreError: There is no such key, or nothing at such an address.
    """
    texts = list(dict.fromkeys(mount.key for mount in compute.data if "://" in mount.key))
    if texts:
        variables = buckets.variables_of_service(session, namespace, compute.secrets, secrets)
        with Progress("pulling", ", ".join(texts)) as shown:
            for text in texts:
                buckets.pull(session, namespace, text, shown, variables=variables)
    return tuple(_resolved(session, namespace, mount) for mount in compute.data)


def _resolved(session: Session, namespace: str, mount: DataMount) -> DataMount:
    path_keys = ask(session, namespace, lambda client: client.find(FindKeys(path=mount.key))).keys
    if not path_keys:
        raise DataStoreError(
            f"there is no key {mount.key!r} in namespace {namespace}, for {mount.path} of "
            "kt.Compute(data=)",
            hint=f"kt put {mount.key} --src FOLDER --contents stores a folder there; kt ls shows "
            "the keys",
        )
    return _versioned(mount, path_keys)


def _versioned(mount: DataMount, path_keys: Sequence[PathKey]) -> DataMount:
    """A mount with what its keys hold."""
    views = [path_key.key for path_key in path_keys]
    held = [
        (path_key.key.key, path_key.key.manifest, path_key.inside, path_key.shadowed)
        for path_key in path_keys
    ]
    version = str(views[0].version) if len(views) == 1 else f"of {len(views)} keys"
    return replace(mount, version=version, digest=digest_of(messages.encode(held)))


# ---------------------------------------------------------------------------------------- refresh


def refresh(session: Session, view: WorkloadView) -> dict[str, str]:
    """Have all pods of a service fetch what the keys hold now; returns the versions by path."""
    spec = view.spec
    if not spec.compute.data:
        raise SpecError(f"{spec.name} has no data to refresh", hint=EXAMPLE)
    mounts = resolved(session, spec.namespace, spec.compute)
    pods = [pod for pod in view.pods if pod.phase == "Running" and pod.generation]
    if pods:
        with ThreadPoolExecutor(min(len(pods), LIMITS.refreshed_pods), "kubetorch-data") as pool:
            for pod_mounts in pool.map(lambda pod: _refresh_pod(session, view, pod), pods):
                mounts = pod_mounts
    return {mount.path: mount.version for mount in mounts}


def _refresh_pod(session: Session, view: WorkloadView, pod: PodView) -> tuple[DataMount, ...]:
    url = session.address(view, pod)
    client = pod_transport.client(session.transport, url, session.own_token(view))
    timeout = view.spec.compute.launch_timeout + TIMING.image_step_margin_seconds
    with client, client.request("POST", routes.DATA, body=b"", timeout=timeout) as answer:
        body = answer.read()
        if answer.status >= 300:
            raise refusal("POST", url + routes.DATA, answer.status, body)
    return messages.decode(tuple[DataMount, ...], body)


# ----------------------------------------------------------------------------------- as a program


def fetch(session: Session, order: FetchData, mount: DataMount, target: str) -> DataMount:
    """Fetch what a key holds to a path that does not exist; returns the mount with its version.

    What has the digest of the mount is not fetched: the pod has it. A single file lands in a folder
    at the path, or at the path itself if that has a suffix, as with `kt.get`. Where pods of the
    node share trees, the path becomes a link to one.
    """
    shown_digest = mount.digest
    mount = _resolved(session, order.namespace, mount)
    if mount.digest == shown_digest:
        return mount
    try:
        os.makedirs(os.path.dirname(target))  # noqa: PTH103, PTH120  # text, as below
        shared_mount = _fetch_shared(session, order, mount, target)
        return shared_mount or _fetch_to(session, order, mount, target, is_any_version=True)
    except (KubetorchError, OSError) as error:
        if not isinstance(error, KubetorchError):
            error = DataStoreError(f"{error.filename or target}: {error.strerror}")
        error.message = f"{mount.key!r} cannot be fetched for {mount.path}: {error.message}"
        raise error from error.__cause__


def _fetch_shared(
    session: Session, order: FetchData, mount: DataMount, target: str
) -> DataMount | None:
    """Fetch to the trees of the node, unless a pod has; `None` where that cannot be."""
    if not order.node or not mount.is_read_only:
        return None
    try:
        trees = NodeTrees(Path(order.node))
        for _ in range(LIMITS.data_attempts):
            content = trees.content(mount.digest, os.path.basename(mount.path))  # noqa: PTH119  # text
            if not trees.add(Path(order.lease), content):
                with trees.fetching(content, order.wait_seconds) as is_there:
                    new_mount = mount
                    if not is_there:
                        new_mount = _fetch_to(session, order, mount, str(content))
                if new_mount.digest != mount.digest:
                    mount = new_mount
                    continue
            os.symlink(content, target)  # noqa: PTH211  # text
            return mount
    except (PermissionError, TimeoutError) as error:
        sys.stderr.write(f"{mount.key} is fetched for this pod alone: {error}\n")
    return None


def _fetch_to(
    session: Session,
    order: FetchData,
    mount: DataMount,
    target: str,
    *,
    is_any_version: bool = False,
) -> DataMount:
    """Fetch a version to a path; where the keys hold another one by now, nothing, or that one."""
    download = Download(session, order.namespace, Progress("getting", mount.key))
    # An address is a key, too: the deploy has pulled what is there, once for all pods.
    parts = download.find(FindKeys(path=keys.check(mount.key)))
    new_mount = _versioned(mount, [path_key for path_key, _ in parts])
    if new_mount.digest == mount.digest or is_any_version:
        declared_data = DeclaredData(parts, mount.is_read_only, order.former.get(mount.path, ""))
        download.get(mount.key, target, contents=True, declared=declared_data)
        if not os.path.lexists(target):  # an empty folder
            os.mkdir(target, 0o555 if mount.is_read_only else 0o755)  # noqa: PTH102  # text
    return new_mount


def main(arguments: Sequence[str]) -> int:
    """Fetch what an agent orders; returns the exit status."""
    order = messages.decode(FetchData, arguments[0])
    try:
        session = backend.session(None)
        mounts = []
        for number, mount in enumerate(order.mounts):
            folder = os.path.join(order.folder, str(number))  # noqa: PTH118  # text, as above
            target = os.path.join(folder, os.path.basename(mount.path))  # noqa: PTH118, PTH119
            mounts.append(fetch(session, order, mount, target))
    except KubetorchError as error:
        sys.stdout.write(exceptions.describe_refusal(error).to_json().decode() + "\n")
        return 1
    sys.stdout.write(messages.encode(mounts).decode() + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
