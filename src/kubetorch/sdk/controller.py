"""Typed requests to a controller; blocking, for the SDK and the CLI.

Every method raises the error that the controller answered: an error of Kubetorch as itself, any
other as `ControllerRequestError`.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import EllipsisType
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlencode

from kubetorch.config import environment
from kubetorch.config.settings import config
from kubetorch.errors import (
    ConfigError,
    ControllerRequestError,
    KubernetesUnavailableError,
    KubetorchError,
    SecretNotFound,
    did_you_mean,
)
from kubetorch.lib.http_client import HttpClient, Response
from kubetorch.lib.secret_bytes import SecretBytes
from kubetorch.specs import secret as specs
from kubetorch.specs.volume import VolumeSpec
from kubetorch.wire import blobs, exceptions, messages, routes
from kubetorch.wire import tuning as wire_tuning
from kubetorch.wire.messages import (
    CallView,
    Deploy,
    DeployEvent,
    DeployLog,
    PodWait,
    RecordView,
    ScaleChange,
    StatusView,
    Teardown,
    TokenView,
    WorkloadView,
)
from kubetorch.wire.secrets import PutSecret, SecretValues, SecretView, StoredSecret
from kubetorch.wire.volumes import CreatedVolume, StorageClass, VolumeView

_T = TypeVar("_T")
Body = bytes | Iterable[bytes] | None
#: Seconds that a request may go without progress: `...` for the timeout of the client.
Timeout = float | None | EllipsisType

#: Errors of an address at which nothing listens.
_UNREACHABLE = (ConnectionRefusedError, TimeoutError, socket.gaierror)
#: Content type of a stream of JSON lines.
NDJSON = "application/x-ndjson"


class FirstContact:
    """Remembers if a cluster has answered this program yet.

    Until then an error says how to run without the cluster, which may never answer.
    """

    def __init__(self, api_url: str | None = None) -> None:
        self.is_over = False
        self._api_url = api_url

    def explain(self, error: KubetorchError) -> KubetorchError:
        """The error of a cluster that cannot be used, with a hint to run without the cluster."""
        if self.is_over or environment.is_in_pod():
            return error
        cause = error.__cause__
        # Waiting for one of these to pass would take long, and mostly be in vain.
        if isinstance(cause, KubernetesUnavailableError):
            error = cause
        elif self._api_url is not None and isinstance(cause, _UNREACHABLE):
            reason = error.message.partition(": ")[2]
            error = ConfigError(f"api_url is {self._api_url!r}: {reason}", hint="kt check")
            error.__cause__ = cause
        local_hint = "KT_BACKEND=local runs on this machine"
        if "KT_BACKEND" not in (error.hint or ""):
            error.hint = f"{error.hint}; or {local_hint}" if error.hint else local_hint
        return error


class Controller:
    """A controller, over HTTP; `contact` belongs to its cluster, if it is in one."""

    def __init__(self, http: HttpClient, contact: FirstContact | None = None) -> None:
        self._http = http
        self._contact = contact
        #: Finds the methods of a controller of 0.5, for programs that ask `kt.globals` for one.
        self.find_method: Callable[[str], Any] | None = None

    @property
    def base_url(self) -> str:
        return self._http.base_url

    @property
    def token(self) -> str | None:
        """The user's own token, which pods of the local backend know too."""
        return self._http.token

    def close(self) -> None:
        self._http.close()

    if not TYPE_CHECKING:  # which would believe that it has every name

        def __getattr__(self, name):
            if name.startswith("_") or self.find_method is None:
                raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
            return self.find_method(name)

    def get_status(self) -> StatusView:
        return self._get(StatusView, routes.STATUS)

    # --------------------------------------------------------------------------------- workloads

    def list_workloads(self, namespace: str | None = None) -> list[WorkloadView]:
        path = routes.WORKLOADS if namespace is None else routes.workloads(namespace)
        return self._get(list[WorkloadView], path)

    def get_workload(self, namespace: str, name: str, *, program: str = "") -> WorkloadView:
        """A workload, of which this program of the controller's machine, if any, has a handle."""
        query = f"?{urlencode({'program': program})}" if program else ""
        return self._get(WorkloadView, routes.workload(namespace, name) + query)

    def wait_for_pods(self, namespace: str, name: str, wait: PodWait) -> WorkloadView:
        """A workload once its ready pods have changed, see `PodWait`."""
        path, timeout = routes.workload(namespace, name, "wait"), wait.seconds
        timeout += wire_tuning.TIMING.answer_margin_seconds
        answer = self.ask("POST", path, body=messages.encode(wait), timeout=timeout)
        return messages.decode(WorkloadView, answer)

    def scale_workload(self, namespace: str, name: str, settings: dict[str, Any]) -> WorkloadView:
        """Change keywords of `autoscale()` of a workload; returns it as it is then."""
        body = messages.encode(ScaleChange(settings=settings))
        answer = self.ask("POST", routes.workload(namespace, name, "scale"), body=body)
        return messages.decode(WorkloadView, answer)

    def describe_pods(self, namespace: str, name: str) -> list[dict[str, Any]]:
        """The pods of a workload as their cluster describes them; none without a cluster."""
        answer = self.ask("GET", routes.workload(namespace, name, "pods"))
        pods: list[dict[str, Any]] = json.loads(answer)
        return pods

    def delete_workload(self, namespace: str, name: str, *, grace: float | None = None) -> Teardown:
        """Delete a service."""
        query = "" if grace is None else f"?grace={grace:g}"
        wait = (
            wire_tuning.TIMING.teardown_grace_seconds if grace is None else grace
        ) + wire_tuning.TIMING.teardown_slack_seconds
        path = routes.workload(namespace, name) + query
        answer = self.ask("DELETE", path, timeout=wait + wire_tuning.TIMING.answer_margin_seconds)
        return messages.decode(Teardown, answer)

    def get_token(
        self,
        namespace: str,
        name: str,
        *,
        ttl: float | None = None,
        verbs: Sequence[str] | None = None,
    ) -> TokenView:
        body = json.dumps(_without_none(ttl=ttl, verbs=verbs))
        path = routes.workload(namespace, name, "token")
        answer = self.ask("POST", path, body=body.encode())
        return messages.decode(TokenView, answer)

    def stream_logs(
        self,
        namespace: str,
        name: str,
        *,
        follow: bool = False,
        tail: int | None = None,
        pod: str | None = None,
    ) -> Iterator[DeployLog]:
        """The lines that the pods of a workload wrote, the oldest first."""
        query = urlencode(_without_none(follow=str(follow).lower(), tail=tail, pod=pod))
        path = f"{routes.workload(namespace, name, 'logs')}?{query}"
        return _log_lines(self.request("GET", path, timeout=None if follow else 60.0))

    # ------------------------------------------------------------------------------------ deploy

    def begin_deploy(self, deploy: Deploy, packed: Iterable[bytes], *, silence: float) -> Response:
        """Send a deploy; its answer has the `deploy_events`."""
        path = routes.workload(deploy.spec.namespace, deploy.spec.name, "deploy")
        body = itertools.chain((messages.encode(deploy) + b"\n",), packed)
        headers = {"Accept": NDJSON, "Content-Type": blobs.CONTENT_TYPE}
        return self.request("POST", path, body=body, headers=headers, timeout=silence)

    def upload(self, packed: Iterable[bytes], namespace: str) -> None:
        """Store blobs of a namespace, as `datastore.transfer.compressed` has them."""
        headers = {"Content-Type": blobs.CONTENT_TYPE}
        path = _with_namespace(routes.BLOBS, namespace)
        self.ask("POST", path, body=packed, headers=headers)

    def missing_blobs(self, digests: Iterable[str], namespace: str) -> list[str]:
        """The blobs among these that the controller lacks in a namespace."""
        body = json.dumps({"blobs": list(digests)}).encode()
        answer = self.ask("POST", _with_namespace(routes.BLOBS_MISSING, namespace), body=body)
        missing: list[str] = json.loads(answer)["missing"]
        return missing

    def get_blob(self, digest: str, namespace: str) -> bytes:
        """A small blob of a namespace."""
        return self.get_blobs([digest], namespace)[digest]

    def get_blobs(self, digests: Sequence[str], namespace: str) -> dict[str, bytes]:
        """Blobs of a namespace, such as the files of a project, by digest."""
        import zstandard  # noqa: PLC0415  # few programs ask for one

        content = {digest: bytearray() for digest in digests}
        if digests:
            body = json.dumps({"blobs": list(digests)}).encode()
            packed = self.ask("POST", _with_namespace(routes.BLOBS_FETCH, namespace), body=body)
            decompressor = zstandard.ZstdDecompressor().decompressobj(read_across_frames=True)
            unpacker = blobs.Unpacker()
            for digest, _, piece in unpacker.feed(decompressor.decompress(packed)):
                content[digest] += piece
            unpacker.close()
        return {digest: bytes(data) for digest, data in content.items()}

    # ------------------------------------------------------------------------------ spawned calls

    def list_calls(
        self, namespace: str | None = None, workload: str | None = None
    ) -> list[CallView]:
        query = urlencode(_without_none(namespace=namespace, workload=workload))
        return self._get(list[CallView], f"{routes.CALLS}?{query}" if query else routes.CALLS)

    def get_call(self, call_id: str) -> CallView:
        return self._get(CallView, routes.call(call_id))

    def get_result(self, call_id: str) -> bytes:
        """The packed outcome of a spawned call that ended (`kubetorch.wire.calls`)."""
        return self.ask("GET", routes.call(call_id, "result"))

    def get_record(self, call_id: str) -> RecordView:
        """What a call was that can be replayed."""
        return self._get(RecordView, routes.call(call_id, "record"))

    def get_arguments(self, call_id: str) -> bytes:
        """The packed record of a call (`kubetorch.wire.calls`)."""
        return self.ask("GET", routes.call(call_id, "arguments"))

    def cancel_call(self, call_id: str) -> None:
        """Cancel a spawned call, if it still runs."""
        self.ask("POST", routes.call(call_id, "cancel"))

    # ------------------------------------------------------------------------ secrets and volumes

    @property
    def secrets(self) -> SecretRequests:
        return SecretRequests(self)

    @property
    def volumes(self) -> VolumeRequests:
        return VolumeRequests(self)

    # ---------------------------------------------------------------------------------- requests

    def _get(self, kind: type[_T], path: str) -> _T:
        return messages.decode(kind, self.ask("GET", path))

    def ask(
        self,
        method: str,
        path: str,
        *,
        body: Body = None,
        headers: Mapping[str, str] | None = None,
        timeout: Timeout = ...,
    ) -> bytes:
        with self.request(method, path, body=body, headers=headers, timeout=timeout) as response:
            return response.read()

    def request(
        self,
        method: str,
        path: str,
        *,
        body: Body = None,
        headers: Mapping[str, str] | None = None,
        timeout: Timeout = ...,
    ) -> Response:
        try:
            response = self._http.request(method, path, body=body, headers=headers, timeout=timeout)
        except KubetorchError as error:
            if self._contact is None:
                raise
            raise self._contact.explain(error)  # noqa: B904  # it is the same, or its cause
        if self._contact is not None:
            self._contact.is_over = True
        if 200 <= response.status < 300:
            return response
        with response:
            raise refusal(method, self.base_url + path, response.status, response.read())


def deploy_events(response: Response) -> Iterator[DeployEvent]:
    """The events of a deploy, as they come."""
    for line in response.iter_lines():
        if line:
            yield messages.decode(DeployEvent, line)  # type: ignore[arg-type]  # a union


def _log_lines(response: Response) -> Iterator[DeployLog]:
    with response:
        for line in response.iter_lines():
            if line:
                yield messages.decode(DeployLog, line)


def _without_none(**values: object) -> dict[str, object]:
    return {name: value for name, value in values.items() if value is not None}


def _with_namespace(path: str, namespace: str) -> str:
    return f"{path}?{urlencode({'namespace': namespace})}"


def refusal(method: str, url: str, status: int, body: bytes) -> Exception:
    failure = exceptions.parse_json(body)
    if failure.code is not None:
        error = exceptions.rebuild(failure)
        if isinstance(error, KubetorchError):
            return error
    return ControllerRequestError(method, url, status, failure.message)


class SecretRequests:
    def __init__(self, controller: Controller) -> None:
        self._controller = controller

    def put(self, namespace: str, object_name: str, put: PutSecret) -> StoredSecret:
        path, body = routes.secret(namespace, object_name), messages.encode(put)
        return messages.decode(StoredSecret, self._controller.ask("POST", path, body=body))

    def get(self, namespace: str, object_name: str) -> SecretView | None:
        """A secret without its values, if there is one of that name."""
        answer = self._controller.ask("GET", routes.secret(namespace, object_name))
        return messages.decode(SecretView | None, answer)  # type: ignore[arg-type]  # a union

    def find(self, namespace: str, name: str) -> SecretView:
        """A secret by its declared name, or by the name of its Kubernetes object."""
        for object_name in specs.object_names(name, username=config.username):
            secret_view = self.get(namespace, object_name)
            if secret_view is not None:
                return secret_view
        error = SecretNotFound(name, namespace)
        with contextlib.suppress(KubetorchError):  # who may not list them gets no help
            secret_names = [view.name for view in self.list(namespace)]
            suggestion = did_you_mean(name, secret_names, likeness=0.6)
            error.hint = f"{suggestion} {error.hint}" if suggestion else error.hint
        raise error

    def values(self, namespace: str, object_name: str) -> SecretBytes:
        answer = self._controller.ask("GET", routes.secret(namespace, object_name, "values"))
        return SecretBytes(messages.decode(SecretValues, answer).values)

    def list(self, namespace: str | None = None) -> list[SecretView]:
        """The secrets of a namespace, or of all."""
        path = routes.SECRETS if namespace is None else routes.secrets(namespace)
        return messages.decode(list[SecretView], self._controller.ask("GET", path))

    def delete(self, namespace: str, object_name: str) -> None:
        self._controller.ask("DELETE", routes.secret(namespace, object_name))


class VolumeRequests:
    def __init__(self, controller: Controller) -> None:
        self._controller = controller

    def create(self, namespace: str, spec: VolumeSpec) -> CreatedVolume:
        """Make a volume; a volume that exists stays as it is."""
        path, body = routes.volumes(namespace), messages.encode(spec)
        return messages.decode(CreatedVolume, self._controller.ask("POST", path, body=body))

    def get(self, namespace: str, claim: str) -> VolumeView | None:
        """A volume, if there is one of that name."""
        answer = self._controller.ask("GET", routes.volume(namespace, claim))
        return messages.decode(VolumeView | None, answer)  # type: ignore[arg-type]  # a union

    def list(self, namespace: str | None = None) -> list[VolumeView]:
        """The volumes of a namespace, or of all."""
        path = routes.VOLUMES if namespace is None else routes.volumes(namespace)
        return messages.decode(list[VolumeView], self._controller.ask("GET", path))

    def delete(self, namespace: str, claim: str, *, wait: float, is_forced: bool = False) -> bool:
        """Delete a volume with its files; true if it is gone after `wait` seconds."""
        query = {"wait": wait, **({"force": "true"} if is_forced else {})}
        path = f"{routes.volume(namespace, claim)}?{urlencode(query)}"
        answer = self._controller.ask(
            "DELETE", path, timeout=wait + wire_tuning.TIMING.answer_margin_seconds
        )
        is_gone: bool = json.loads(answer)["gone"]
        return is_gone

    def storage_class(self, spec: VolumeSpec, namespace: str) -> StorageClass:
        """The storage class and the access mode of a volume that is made in a namespace."""
        parameters = {
            "access_mode": spec.access_mode,
            "storage_class": spec.storage_class,
            "volume_name": spec.volume_name,
            "namespace": namespace,
        }
        query = urlencode({key: value for key, value in parameters.items() if value is not None})
        path = f"{routes.STORAGE_CLASS}?{query}"
        return messages.decode(StorageClass, self._controller.ask("GET", path))
