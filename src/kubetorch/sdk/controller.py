"""Typed requests to a controller; blocking, for the SDK and the CLI.

Every method raises what the controller answered: one of our own errors as itself, anything else as
`ControllerRequestError`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import EllipsisType
from typing import TYPE_CHECKING, TypeVar
from urllib.parse import urlencode

from kubetorch.errors import ControllerRequestError, KubetorchError
from kubetorch.lib.answers import Response
from kubetorch.lib.http import HttpClient
from kubetorch.wire import blobs, failures, messages, routes, waits
from kubetorch.wire.messages import (
    CallView,
    Deploy,
    DeployEvent,
    DeployLog,
    StatusView,
    TokenView,
    WorkloadView,
)

if TYPE_CHECKING:
    from kubetorch.sdk.stores import SecretRequests, VolumeRequests

_T = TypeVar("_T")
Body = bytes | Iterable[bytes] | None
#: Seconds that a request may go without progress: `...` for as long as the client has it.
Timeout = float | None | EllipsisType

#: Content type of a stream of JSON lines.
NDJSON = "application/x-ndjson"


class Controller:
    """A controller, over HTTP.

    Args:
        http: Requests to it.
    """

    def __init__(self, http: HttpClient) -> None:
        self._http = http

    @property
    def base_url(self) -> str:
        """Where it answers."""
        return self._http.base_url

    @property
    def token(self) -> str | None:
        """The user's own token, which pods of the local backend know too."""
        return self._http.token

    def close(self) -> None:
        """Close its idle connections."""
        self._http.close()

    def get_status(self) -> StatusView:
        """The controller itself."""
        return self._get(StatusView, routes.STATUS)

    # --------------------------------------------------------------------------------- workloads

    def list_workloads(self, namespace: str | None = None) -> list[WorkloadView]:
        """The workloads of a namespace, or of all."""
        path = routes.WORKLOADS if namespace is None else routes.workloads(namespace)
        return self._get(list[WorkloadView], path)

    def get_workload(self, namespace: str, name: str) -> WorkloadView:
        """One workload.

        Raises:
            ServiceNotFoundError: There is none of that name.
        """
        return self._get(WorkloadView, routes.workload(namespace, name))

    def delete_workload(self, namespace: str, name: str, *, grace: float | None = None) -> None:
        """Stop a workload and forget it.

        Args:
            namespace: Its namespace.
            name: Its name.
            grace: Seconds that running calls have to end; the controller's choice if not given.

        Raises:
            ServiceNotFoundError: There is none of that name.
        """
        query = "" if grace is None else f"?grace={grace:g}"
        wait = (waits.DELETE_GRACE if grace is None else grace) + waits.DELETE_SLACK
        path = routes.workload(namespace, name) + query
        self._call("DELETE", path, timeout=wait + waits.MARGIN)

    def get_token(
        self,
        namespace: str,
        name: str,
        *,
        ttl: float | None = None,
        verbs: Sequence[str] | None = None,
    ) -> TokenView:
        """A token for one workload.

        Args:
            namespace: Its namespace.
            name: Its name.
            ttl: Seconds that it is good for.
            verbs: What it allows; calls if not given.
        """
        given = {"ttl": ttl, "verbs": verbs}
        body = json.dumps({key: value for key, value in given.items() if value is not None})
        path = routes.workload(namespace, name, "token")
        answer = self._call("POST", path, body=body.encode())
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
        """The lines that the pods of a workload wrote, the oldest first.

        Args:
            namespace: Its namespace.
            name: Its name.
            follow: Go on with new lines; the iterator then ends only with the workload.
            tail: Only so many of the lines that are there.
            pod: Only lines of this pod.

        Raises:
            ServiceNotFoundError: There is no workload of that name.
        """
        given = {"follow": str(follow).lower(), "tail": tail, "pod": pod}
        query = {key: value for key, value in given.items() if value is not None}
        path = f"{routes.workload(namespace, name, 'logs')}?{urlencode(query)}"
        return _log_lines(self._request("GET", path, timeout=None if follow else 60.0))

    # ------------------------------------------------------------------------------------ deploy

    def deploy(self, deploy: Deploy, packed: Iterable[bytes], *, silence: float) -> EventStream:
        """Deploy a workload.

        Args:
            deploy: What is deployed.
            packed: Blobs that the controller may lack, as `datastore.transfer.compressed` has them.
            silence: Seconds without any event after which the controller is given up.

        Returns:
            The events, of which the last is `Missing`, `Ready` or `Failed`.
        """
        path = routes.workload(deploy.spec.namespace, deploy.spec.name, "deploy")
        head = messages.encode(deploy) + b"\n"
        body = _chain(head, packed)
        headers = {"Accept": NDJSON, "Content-Type": blobs.CONTENT_TYPE}
        return EventStream(self._request("POST", path, body=body, headers=headers, timeout=silence))

    def upload(self, packed: Iterable[bytes], namespace: str) -> None:
        """Store blobs of a namespace, as `datastore.transfer.compressed` has them."""
        headers = {"Content-Type": blobs.CONTENT_TYPE}
        path = _of(routes.BLOBS, namespace)
        self._call("POST", path, body=packed, headers=headers)

    def missing_blobs(self, digests: Iterable[str], namespace: str) -> list[str]:
        """Those of these blobs that the controller lacks in a namespace."""
        body = json.dumps({"blobs": list(digests)}).encode()
        answer = self._call("POST", _of(routes.BLOBS_MISSING, namespace), body=body)
        missing: list[str] = json.loads(answer)["missing"]
        return missing

    def get_blob(self, digest: str, namespace: str) -> bytes:
        """A small blob of a namespace.

        Raises:
            DataStoreError: It is not there.
        """
        import zstandard  # noqa: PLC0415  # few programs ask for one

        body = json.dumps({"blobs": [digest]}).encode()
        packed = self._call("POST", _of(routes.BLOBS_FETCH, namespace), body=body)
        records = zstandard.ZstdDecompressor().decompressobj().decompress(packed)
        return b"".join(piece for _, _, piece in blobs.Unpacker().feed(records))

    # ------------------------------------------------------------------------------ spawned calls

    def list_calls(
        self, namespace: str | None = None, workload: str | None = None
    ) -> list[CallView]:
        """Spawned calls, of a namespace or of one workload in it."""
        given = {"namespace": namespace, "workload": workload}
        query = urlencode({name: value for name, value in given.items() if value is not None})
        return self._get(list[CallView], f"{routes.CALLS}?{query}" if query else routes.CALLS)

    def get_call(self, call_id: str) -> CallView:
        """One spawned call.

        Raises:
            ResultExpiredError: It is unknown, or forgotten.
        """
        return self._get(CallView, routes.call(call_id))

    def get_result(self, call_id: str) -> bytes:
        """The packed outcome of a spawned call that ended (`kubetorch.wire.calls`).

        Raises:
            ResultExpiredError: It is not kept any more.
        """
        return self._call("GET", routes.call(call_id, "result"))

    def cancel_call(self, call_id: str) -> None:
        """Cancel a spawned call, if it still runs.

        Raises:
            ResultExpiredError: It is unknown, or forgotten.
        """
        self._call("POST", routes.call(call_id, "cancel"))

    # ------------------------------------------------------------------------ secrets and volumes

    @property
    def secrets(self) -> SecretRequests:
        """Requests about secrets."""
        from kubetorch.sdk.stores import SecretRequests  # noqa: PLC0415  # few programs have some

        return SecretRequests(self)

    @property
    def volumes(self) -> VolumeRequests:
        """Requests about volumes."""
        from kubetorch.sdk.stores import VolumeRequests  # noqa: PLC0415  # as above

        return VolumeRequests(self)

    # ---------------------------------------------------------------------------------- requests

    def ask(
        self, method: str, path: str, *, body: bytes | None = None, timeout: Timeout = ...
    ) -> bytes:
        """The answer to a request that has no method of its own here."""
        return self._call(method, path, body=body, timeout=timeout)

    def _get(self, kind: type[_T], path: str) -> _T:
        return messages.decode(kind, self._call("GET", path))

    def _call(
        self,
        method: str,
        path: str,
        *,
        body: Body = None,
        headers: Mapping[str, str] | None = None,
        timeout: Timeout = ...,
    ) -> bytes:
        with self._request(method, path, body=body, headers=headers, timeout=timeout) as response:
            return response.read()

    def _request(
        self,
        method: str,
        path: str,
        *,
        body: Body = None,
        headers: Mapping[str, str] | None = None,
        timeout: Timeout = ...,
    ) -> Response:
        response = self._http.request(method, path, body=body, headers=headers, timeout=timeout)
        if 200 <= response.status < 300:
            return response
        with response:
            raise refusal(method, self.base_url + path, response.status, response.read())


class EventStream:
    """The events of a deploy, as they come."""

    def __init__(self, response: Response) -> None:
        self._response = response

    def __iter__(self) -> Iterator[DeployEvent]:
        for line in self._response.iter_lines():
            if line:
                yield messages.decode(DeployEvent, line)  # type: ignore[arg-type]  # a union

    def __enter__(self) -> EventStream:
        return self

    def __exit__(self, *_: object) -> None:
        self._response.close()

    def abort(self) -> None:
        """Break off, from another thread; whoever reads gets `ControllerUnavailableError`."""
        self._response.abort()


def _log_lines(response: Response) -> Iterator[DeployLog]:
    with response:
        for line in response.iter_lines():
            if line:
                yield messages.decode(DeployLog, line)


def _of(path: str, namespace: str) -> str:
    return f"{path}?{urlencode({'namespace': namespace})}"


def _chain(head: bytes, pieces: Iterable[bytes]) -> Iterator[bytes]:
    yield head
    yield from pieces


def refusal(method: str, url: str, status: int, body: bytes) -> Exception:
    """The error for an answer that says what is wrong."""
    failure = failures.parse_json(body)
    if failure.code is not None:
        error = failures.rebuild(failure)
        if isinstance(error, KubetorchError):
            return error
    return ControllerRequestError(method, url, status, failure.message)
