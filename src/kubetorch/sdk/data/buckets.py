"""Buckets in `kt.get`, `kt.put` and `kt.Compute(data=)`.

What is at an address becomes the content of a key, which then is got as any other key is. The
controller pulls it, by the values of a `kt.Secret`, or without credentials. In a pod whose identity
opens the bucket, a program in this pod pulls it and puts it in the store.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import lru_cache, partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from kubetorch.config import environment
from kubetorch.datastore import addresses
from kubetorch.datastore.addresses import SETTINGS, WRITABLE, Address
from kubetorch.datastore.blobs import BlobStore
from kubetorch.datastore.transfer import compressed
from kubetorch.errors import DataStoreError, KubetorchError
from kubetorch.lib.http_client import HttpClient
from kubetorch.sdk.credentials import EnvVars, pairs
from kubetorch.sdk.data.client import DataClient, ask
from kubetorch.sdk.data.progress import Progress
from kubetorch.sdk.data.upload import Upload, batches
from kubetorch.sdk.secret import Secret
from kubetorch.sdk.transport.session import Session
from kubetorch.sdk.tuning import LIMITS, TIMING
from kubetorch.wire import exceptions, messages
from kubetorch.wire.buckets import BucketJob, BucketProgress, PullBucket, PushBucket
from kubetorch.wire.data import FindKeys, PutKey

if TYPE_CHECKING:
    from kubetorch.specs.secret import SecretRef

_PROGRAM = "kubetorch.datastore.bucket_program"
#: Variables of pods whose identity a cloud knows.
_IDENTITIES = (
    *("AWS_WEB_IDENTITY_TOKEN_FILE", "AWS_CONTAINER_CREDENTIALS_FULL_URI"),
    *("AWS_CONTAINER_CREDENTIALS_RELATIVE_URI", "AZURE_FEDERATED_TOKEN_FILE"),
    "GOOGLE_APPLICATION_CREDENTIALS",
)
_GOOGLE_ACCOUNT = "/computeMetadata/v1/instance/service-accounts/default"


def pull(
    session: Session,
    namespace: str,
    text: str,
    progress: Progress,
    *,
    variables: Mapping[str, str] | None = None,
) -> str:
    """Let the key of an address hold what is there now; returns the key.

    The variables are those of secrets; without any a pod uses its own.
    """
    address = addresses.parse(text)
    options = _options(address, variables)
    if variables is None and _has_identity(address, options):
        _pull_here(session, namespace, address, options, progress)
        return address.key
    message = PullBucket(address=str(address), options=options)
    ask(session, namespace, lambda client: _follow(client.pull(message), progress))
    return address.key


def uploads(
    session: Session, namespace: str, text: str, progress: Progress, secret: Secret | str | None
) -> Callable[[], Upload]:
    """Makes uploads for a put to an address."""
    address = addresses.parse(text)
    if address.scheme not in WRITABLE:
        raise DataStoreError(
            f"{address} cannot be written to",
            hint=f"{', '.join(f'{scheme}://' for scheme in WRITABLE)} can",
        )
    variables = variables_of(secret, namespace)
    return partial(_BucketUpload, session, namespace, progress, address, variables)


class _BucketUpload(Upload):
    """An upload that ends with objects in a bucket; only then its key holds them."""

    def __init__(
        self,
        session: Session,
        namespace: str,
        progress: Progress,
        address: Address,
        variables: Mapping[str, str] | None,
    ) -> None:
        super().__init__(session, namespace, progress)
        self._address = address
        self._variables = variables

    def put_key(self, put: PutKey, encoded: bytes) -> None:
        self._send_missing({put.manifest: len(encoded)}, lambda _: encoded)
        options = _options(self._address, self._variables)
        message = PushBucket(address=str(self._address), put=put, options=options)
        self._ask(lambda client: _follow(client.push(message), self._progress))


def _follow(rows: Iterator[BucketProgress], progress: Progress) -> None:
    """Show how far a pull or put is, to its end."""
    row = before = BucketProgress()
    for row in rows:
        _show(row, before, progress)
        before = row
    if row.failure is not None:
        raise exceptions.rebuild(exceptions.parse_json(messages.encode(row.failure)))
    if row.key is None:
        raise DataStoreError("the controller ended before the bucket was read", hint="try again")


def _show(row: BucketProgress, before: BucketProgress, progress: Progress) -> None:
    if (row.size, row.files) != (before.size, before.files) or row.done < progress.done:
        progress.begin(row.size, row.files)
    progress.add(row.done - progress.done)
    progress.add_moved(row.moved - before.moved)


# ------------------------------------------------------------------------------------ credentials


def variables_of(secret: Secret | str | None, namespace: str) -> dict[str, str] | None:
    """The variables that a secret stands for; `None` without a secret.

    A text is the name of a provider, or of a secret that exists.
    """
    if secret is None:
        return None
    from kubetorch.sdk import compute_parameters  # noqa: PLC0415  # for secrets by name alone

    (chosen,) = compute_parameters.secrets([secret])
    if not chosen.values:
        existing = Secret.from_name(chosen.name, namespace)
        if existing is None:
            raise DataStoreError(
                f"there is no secret {chosen.name!r} in namespace {namespace}",
                hint="kt secrets list shows those that there are",
            )
        chosen = existing
    return _named(chosen.values, None if chosen.path is None else (), chosen.env_vars)


def variables_of_service(
    session: Session, namespace: str, refs: Iterable[SecretRef], secrets: Iterable[Secret]
) -> dict[str, str]:
    """The variables of the secrets of a service: those that are known here, and stored ones."""
    variables: dict[str, str] = {}
    secret_by_name = {secret.name: secret for secret in secrets if secret.values}
    for ref in refs:
        secret = secret_by_name.get(ref.name)
        if secret is not None:
            path = None if secret.path is None else ()
            variables |= _named(secret.values, path, secret.env_vars)
            continue
        object_name = ref.object_name
        with contextlib.suppress(KubetorchError):  # the bucket says that it needs credentials
            values = session.ask(
                lambda controller, name=object_name: controller.secrets.values(namespace, name)  # type: ignore[misc]
            )
            texts = {name: value.decode(errors="replace") for name, value in values.items()}
            files = () if ref.mount_type == "volume" else None
            names = {key: variable for variable, key in ref.variables}
            variables |= _named(texts, files, names or None)
    return variables


def _named(
    values: Mapping[str, str | bytes],
    files: tuple[()] | None,
    env_vars: EnvVars | None,
) -> dict[str, str]:
    texts = {name: value for name, value in values.items() if isinstance(value, str)}
    if files is not None:
        return addresses.variables_of_files(texts)
    names = pairs(env_vars) if env_vars else {}
    return {names.get(name, name): value for name, value in texts.items()}


def _options(address: Address, variables: Mapping[str, str] | None) -> dict[str, str]:
    """What the store of an address gets: the secret's variables, or in a pod those of the pod."""
    environ = environment.for_programs()
    if variables is None and not environment.is_in_pod():
        variables = {}
    settings = {name: environ[name] for name in SETTINGS if name in environ}
    available_variables = environ if variables is None else {**settings, **variables}
    return addresses.options_for(address.scheme, available_variables)


# --------------------------------------------------------------------------------------- in a pod


def _has_identity(address: Address, options: Mapping[str, str]) -> bool:
    """True in a pod which is the one that may open a bucket, as far as its variables say."""
    if not environment.is_in_pod() or address.scheme not in WRITABLE or options.keys() - SETTINGS:
        return False
    environ = environment.for_programs()
    if find_spec("obstore") is None:
        return False
    if any(map(environ.get, _IDENTITIES)):
        return True
    return address.scheme == "gs" and _is_known_to_google(_google_metadata_url(environ))


def _google_metadata_url(environ: Mapping[str, str]) -> str:
    """Where Google tells a pod its identity, as its libraries and obstore find it.

    By number: where there is no such server, a name would wait for DNS.
    """
    names = ("GCE_METADATA_HOST", "GCE_METADATA_ROOT", "GCE_METADATA_IP")
    host = next((environ[name] for name in names if environ.get(name)), "169.254.169.254")
    return f"http://{host}"


@lru_cache(maxsize=4)
def _is_known_to_google(url: str) -> bool:
    """Whether the metadata server of a node of Google's has an account for this pod.

    A pod of GKE with Workload Identity has no variable that says so. See "About VM metadata" and
    "Workload Identity Federation for GKE" of Google Cloud's documentation.
    """
    path, headers = f"{_GOOGLE_ACCOUNT}/email", {"Metadata-Flavor": "Google"}
    try:
        with (
            HttpClient(url, timeout=TIMING.metadata_seconds) as http,
            http.request("GET", path, headers=headers) as answer,
        ):
            return answer.status == 200 and bool(answer.read(LIMITS.metadata_bytes))
    except (KubetorchError, ValueError):
        return False


def _pull_here(
    session: Session,
    namespace: str,
    address: Address,
    options: Mapping[str, str],
    progress: Progress,
) -> None:
    """Pull with the identity of this pod, and put what the store lacks."""
    path = FindKeys(path=address.key)
    keys = ask(session, namespace, lambda client: client.find(path)).keys
    before = next((part.key.manifest for part in keys if part.key.key == address.key), "")
    with tempfile.TemporaryDirectory(prefix="kubetorch-") as folder:
        blobs = BlobStore(Path(folder))
        if before:
            _fetch(session, namespace, before, blobs)
        job = BucketJob(
            address=str(address),
            folder=folder,
            options=dict(options),
            manifest=before,
            networks=None,
        )
        manifest = _run(job, progress)
        if manifest == before and len(keys) == 1:
            return
        sizes = {blob.digest: blob.size for blob in blobs.iterate()}
        put = PutKey(key=address.key, manifest=manifest, lifespan="cluster")

        def store(client: DataClient) -> None:
            missing = client.missing(sizes)
            for batch in batches({digest: sizes[digest] for digest in missing}):
                client.upload(compressed(batch, blobs.stream))
            if client.put_key(put).key is None:
                raise DataStoreError(f"blobs of {address} vanished from the store", hint="again")

        ask(session, namespace, store)


def _fetch(session: Session, namespace: str, digest: str, blobs: BlobStore) -> None:
    from kubetorch.datastore.transfer import Receiver  # noqa: PLC0415  # for this alone

    def fetch(client: DataClient) -> None:
        receiver = Receiver(blobs)
        try:
            for piece in client.fetch([digest]):
                receiver.feed(piece)
            receiver.finish()
        finally:
            receiver.close()

    ask(session, namespace, fetch)


def _run(job: BucketJob, progress: Progress) -> str:
    """Run the program: it must not be a fork of this process, see `datastore.buckets`."""
    with subprocess.Popen(
        [sys.executable, "-m", _PROGRAM], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        row = before = BucketProgress()
        try:
            process.stdin.write(messages.encode(job))
            process.stdin.close()
            for line in process.stdout:
                row = messages.decode(BucketProgress, line)
                _show(row, before, progress)
                before = row
        finally:
            process.terminate()
    if row.failure is not None:
        raise exceptions.rebuild(exceptions.parse_json(messages.encode(row.failure)))
    if not row.manifest:
        raise DataStoreError(f"the program for {job.address} ended with {process.returncode}")
    return row.manifest
