"""Paths, header names and time limits of the controller and of the agent; both ends import them.

A client waits longer than the server works: else the user never learns why the answer took so long,
and a request that is sent again meets the work of the first request.
"""

from __future__ import annotations

from urllib.parse import quote

#: Name of the controller's Service in a cluster, and its port.
CONTROLLER, CONTROLLER_PORT = "kubetorch-controller", 8080


def controller_url(namespace: str) -> str:
    """The URL of the controller in a namespace, for pods."""
    return f"http://{CONTROLLER}.{namespace}.svc.cluster.local:{CONTROLLER_PORT}"


# ------------------------------------------------------------------------------------- headers

AUTHORIZATION = "Authorization"
REQUEST_ID = "X-Request-ID"
#: Of a request about keys to a store of its own: the digest of the services that it must know.
SERVICES = "X-Kubetorch-Services"
#: Of an answer of a process that does not lead, and has begun nothing.
STANDBY = "X-Kubetorch-Standby"
#: The status of its answer if it does not know them.
UNKNOWN_SERVICES = 428
SERIALIZATION = "X-Serialization"
#: The reason why the instance of a class was made anew, with the first answer of the new instance.
INSTANCE_REPLACED = "X-Kubetorch-Instance-Replaced"
#: Seconds of its run after which the agent interrupts a call made by `POST`.
TIMEOUT = "X-Kubetorch-Timeout"
#: Seconds that such a call may wait for its turn, if the service bounds its running calls.
QUEUE_TIMEOUT = "X-Kubetorch-Queue-Timeout"
IDEMPOTENCY_KEY = "Idempotency-Key"
#: Sent by a pod that passes a call on to others of a service: this one is to run it alone.
ALONE = "X-Kubetorch-Alone"
#: Integer protocol version of the sender, see `kubetorch.wire.versions`.
PROTOCOL = "X-Kubetorch-Protocol"
#: The pod to which the controller relays a request.
POD = "X-Kubetorch-Pod"
#: Identity of one client's stream; the same when it reconnects.
CLIENT = "X-Kubetorch-Client"
#: What kind of debugger a terminal brings; one of `kubetorch.wire.debugger.MODES`.
DEBUG_MODE = "X-Kubetorch-Debugger"
#: `<incarnation>:<frames received>` when a client reconnects to an agent that it spoke to before.
RESUME = "X-Kubetorch-Resume"

#: The token for an app that uses `Authorization` itself.
APP_TOKEN = "X-Kubetorch-Token"
#: The same token in a query, for browsers: the agent exchanges it for a cookie.
APP_TOKEN_QUERY = "kubetorch_token"
#: The beginning of the names of such cookies.
APP_COOKIE = "kubetorch-app-"

# --------------------------------------------------------------------------- on both of them

HEALTH = "/health"

# ---------------------------------------------------------------------------------- controller

SESSIONS = "/v1/sessions"
BLOBS = "/v1/blobs"
BLOBS_MISSING = "/v1/blobs/missing"
BLOBS_FETCH = "/v1/blobs/fetch"
STATUS = "/v1/status"
STOP = "/v1/stop"
WORKLOADS = "/v1/workloads"
CALLS = "/v1/calls"
SECRETS = "/v1/secrets"
VOLUMES = "/v1/volumes"
STORAGE_CLASS = "/v1/storage-class"
DATA = "/v1/data"


def _path(base: str, *names: str, verb: str = "") -> str:
    path = "/".join([base, *(quote(name, safe="") for name in names)])
    return f"{path}/{verb}" if verb else path


def workloads(namespace: str) -> str:
    return _path(WORKLOADS, namespace)


def workload(namespace: str, name: str, verb: str = "") -> str:
    """One workload, or a verb on it: `deploy`, `token`, `pods`, `logs`, `wait`, `scale`."""
    return _path(WORKLOADS, namespace, name, verb=verb)


def call(call_id: str, verb: str = "") -> str:
    """One spawned call, or a verb on it: `cancel`, `result`."""
    return _path(CALLS, call_id, verb=verb)


def secrets(namespace: str) -> str:
    return _path(SECRETS, namespace)


def secret(namespace: str, object_name: str, verb: str = "") -> str:
    """One secret, or a verb on it: `values`."""
    return _path(SECRETS, namespace, object_name, verb=verb)


def volumes(namespace: str) -> str:
    return _path(VOLUMES, namespace)


def volume(namespace: str, claim: str) -> str:
    return _path(VOLUMES, namespace, claim)


def data(namespace: str, verb: str) -> str:
    """A verb on the data store of a namespace.

    `put`, `find`, `ls`, `rm`, `verify`, `hold` on keys; `gc`; `blobs`, `blobs-missing`,
    `blobs-fetch` as `BLOBS` has them; `contact` for a store of its own. Such a store has `services`
    and `end`, too, for the controller.
    """
    return _path(DATA, namespace, verb=verb)


# --------------------------------------------------------------------------------------- agent

#: Whether calls are served: a status and no more, so it needs no token, as `HEALTH`.
SERVING = "/health/serving"


def serving(*, wait: int) -> str:
    """`SERVING`, answered while the pod starts only when it serves, or after so many seconds."""
    return f"{SERVING}?wait={wait}" if wait else SERVING


READY = "/ready"
#: How many calls, or requests of its app, a pod has, for its siblings.
LOAD = "/v1/load"
METRICS = "/metrics"
OPENAPI = "/openapi.json"
DOCS = "/docs"
STREAM = "/v1/stream"
#: A shell in the pod, for its owner alone.
SHELL = "/v1/shell"
#: The stopped programs of the pod; below it, the terminal of one of them.
DEBUGGER = "/v1/debugger"
#: Paths of the app of a pod lie below this path.
APP = "/http"
APP_STATUS = "/app/status"
LOGS = "/v1/logs"
#: Blobs of keys that the pod publishes.
PUBLISHED = "/v1/published"
STACKS = "/v1/stacks"
RUN = "/v1/run"
#: What keys of the data store hold at paths of the pod; a `POST` fetches it anew.
DATA = "/v1/data"


#: Below `DEBUGGER`: terminals of a stopped program, of the caller or of others, who see the lines
#: of the call too; and of a call that is to stop, on a rank or `ANY_RANK`.
CALLER, SESSION, RUNNING, ANY_RANK = "caller", "session", "call", "any"


def debug_terminal(session: str, *, is_caller: bool) -> str:
    """The terminal of a stopped program."""
    return _path(DEBUGGER, CALLER if is_caller else SESSION, session)


def debug_call(call: str, rank: int | None) -> str:
    """The terminal of a call that is to stop."""
    return _path(DEBUGGER, RUNNING, ANY_RANK if rank is None else str(rank), call)


def callable_path(callable_name: str, method: str | None = None) -> str:
    """The path of calls of a callable, or of a method of a class, by `POST`."""
    return _path("", callable_name, *([method] if method else ()))
