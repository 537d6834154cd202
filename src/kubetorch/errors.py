"""The one tree of errors.

Everything that Kubetorch itself raises derives from `KubetorchError`; no exception of a transport
or a Kubernetes library escapes, not even as a base class (it is the `__cause__`). A user's own
exception is never part of this tree: it arrives as itself, or as `RemoteError` when its class
cannot be imported here.

    KubetorchError
    ├── ConfigError (ValueError)
    │   └── KubernetesCredentialsError
    ├── SpecError (ValueError)              what the user declared is impossible
    │   ├── AutoScalingError
    │   ├── NotebookError
    │   ├── ProjectTooLargeError
    │   ├── SecretConflictError
    │   └── UnknownParameterError (TypeError)
    ├── ControllerError
    │   ├── ControllerUnavailableError (ConnectionError)
    │   ├── ControllerRequestError
    │   ├── UnauthorizedError (PermissionError)
    │   ├── ForbiddenError (PermissionError)
    │   ├── ForeignOriginError (PermissionError)
    │   └── VersionMismatchError
    ├── KubernetesError                     the API server of a cluster
    │   ├── KubernetesUnavailableError (ConnectionError)
    │   └── KubernetesRequestError
    │       ├── KubernetesForbiddenError (PermissionError)
    │       ├── KubernetesNotFoundError (LookupError)
    │       └── KubernetesConflictError
    ├── InstallError                        Kubetorch in a cluster
    ├── WorkloadError                       one workload, its pods
    │   ├── ServiceNotFoundError (LookupError)
    │   ├── ServiceTakenError
    │   ├── StartupError
    │   │   ├── ServiceTimeoutError (TimeoutError)
    │   │   │   └── QuorumError
    │   │   ├── ResourceNotAvailableError
    │   │   │   ├── UnschedulableError
    │   │   │   │   └── QueueUnschedulableError
    │   │   │   └── QuotaExceededError
    │   │   ├── MissingObjectError (LookupError)
    │   │   ├── OperatorMissingError
    │   │   ├── AdmissionError (PermissionError)
    │   │   ├── PodContainerError
    │   │   ├── ImageStepError
    │   │   ├── KnativeServiceConflictError
    │   │   └── ServiceHealthError
    │   │       ├── ImagePullError
    │   │       └── ProbeFailedError
    │   ├── PodTerminatedError
    │   │   └── AgentDiedError
    │   ├── WorkerDiedError
    │   │   ├── OutOfMemoryError (MemoryError)
    │   │   └── WorkerRecycledError
    │   ├── InstanceReplacedError           with a warning beside it, InstanceReplacedWarning
    │   └── WorkerMembershipChanged
    ├── CallError                           one call
    │   ├── BatchError
    │   ├── CallTimeoutError (TimeoutError)
    │   ├── CallCancelledError
    │   ├── CallLostError (ConnectionError)
    │   ├── CallRefusedError
    │   ├── QueueFullError
    │   ├── CallableNotFoundError (LookupError)
    │   ├── ResultExpiredError (LookupError)
    │   ├── ReferenceLostError (LookupError)
    │   ├── SerializationError (TypeError)
    │   └── RemoteError
    ├── ProtocolError
    └── DataStoreError
        ├── DataRefusedError (RuntimeError)
        ├── StorageFullError (OSError)
        ├── StoreUnavailableError (ConnectionError)
        ├── RsyncError
        ├── SecretNotFound (LookupError)
        ├── VolumeNotFoundError (LookupError)
        └── VolumeInUseError

`code` is an error's identity on the wire, `hint` the next step for the user. Every class survives
pickling and `to_state`/`from_state`, with the attributes that it documents.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any, ClassVar


class KubetorchError(Exception):
    """Base of every error that Kubetorch raises.

    Args:
        message: What is wrong, with the value that is wrong.
        hint: The next step for the user; shown below the message.
    """

    code: ClassVar[str] = "internal"
    #: HTTP status of a response that carries this error.
    status: ClassVar[int] = 500

    hint: str | None = None
    remote_traceback: str | None = None
    pod_name: str | None = None
    rank: int | None = None
    #: Of a call on several ranks or pods: the errors of the other ranks or pods.
    other_errors: tuple[Exception, ...] = ()
    #: When the condition that dooms a launch began, in seconds since the epoch, from Kubernetes.
    since: float | None = None

    def __init__(self, message: str = "", *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    @cached_property
    def message(self) -> str:
        """The text of the error; of a subclass with another constructor, its arguments."""
        return Exception.__str__(self)

    def __str__(self) -> str:
        return f"{self.message}\nhint: {self.hint}" if self.hint else self.message

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.args, dict(self.__dict__))

    def to_state(self) -> dict[str, Any]:
        """The plain attributes of this error, as JSON can carry them."""
        return {key: value for key, value in self.__dict__.items() if _is_plain(value)}

    @classmethod
    def from_state(cls, message: str, state: Mapping[str, Any]) -> KubetorchError:
        """The error that `to_state` described."""
        error = _rebuild(cls, (message,), dict(state))
        assert isinstance(error, KubetorchError)
        error.__dict__.setdefault("message", message)
        error.__dict__.setdefault("hint", None)
        return error


#: Characters of the longest word that is compared with known words.
_LONGEST_WORD = 1000


def did_you_mean(
    unknown_word: str, known_words: Iterable[str], *, likeness: float = 0.8
) -> str | None:
    """The hint that names the known word that is most like the unknown word; `None` without one."""
    import difflib  # noqa: PLC0415  # 8 ms, for mistakes only

    if len(unknown_word) > _LONGEST_WORD:  # it would take long
        return None
    spellings = {word.lower(): word for word in known_words}
    near = difflib.get_close_matches(unknown_word.lower(), spellings, n=1, cutoff=likeness)
    return f"did you mean {spellings[near[0]]}?" if near else None


def _rebuild(
    cls: type[BaseException], args: tuple[Any, ...], state: dict[str, Any]
) -> BaseException:
    """An exception of `cls` without running its constructor, whose signature may differ."""
    error = cls.__new__(cls, *args)
    error.args = args
    error.__dict__.update(state)
    return error


def _is_plain(value: object) -> bool:
    if value is None or isinstance(value, (bool, int, float, str)):
        return True
    if isinstance(value, (list, tuple)):
        return all(_is_plain(item) for item in value)
    if isinstance(value, dict):
        return all(isinstance(key, str) and _is_plain(item) for key, item in value.items())
    return False


# ---------------------------------------------------------------- configuration and declarations


class ConfigError(KubetorchError, ValueError):
    """A setting has a value that cannot be used."""

    code = "config"
    status = 400


class KubernetesCredentialsError(ConfigError):
    """There is neither an in-cluster token nor a usable kubeconfig, or what it names fails."""

    code = "kubernetes_credentials"


class SpecError(KubetorchError, ValueError):
    """The user declared the impossible; raised where it was written."""

    code = "spec"
    status = 400


class UnknownParameterError(SpecError, TypeError):
    """There is no parameter of that name."""

    code = "unknown_parameter"


class AutoScalingError(SpecError):
    """An argument of `.autoscale()` is wrong."""

    code = "autoscaling"


class NotebookError(SpecError):
    """A callable of a notebook has no source, or uses values that cannot travel with it."""

    code = "notebook"


class ProjectTooLargeError(SpecError):
    """The project has more or larger files than may travel."""

    code = "project_too_large"


class SecretConflictError(SpecError):
    """A secret of that name exists with other values, and is not to be replaced."""

    code = "secret_conflict"
    status = 409

    def __init__(self, secret_name: str, namespace: str) -> None:
        super().__init__(
            f"the secret {secret_name!r} exists in namespace {namespace!r} with different values, "
            "and override is not True",
            hint="override=True replaces its values; another name leaves it as it is",
        )
        self.secret_name = secret_name
        self.namespace = namespace


# ---------------------------------------------------------------------------------- controller


class ControllerError(KubetorchError):
    """The controller, or the local service, could not do what was asked."""

    code = "controller"


class ControllerUnavailableError(ControllerError, ConnectionError):
    """The controller, or the local service, does not answer."""

    code = "controller_unavailable"
    status = 503


class ControllerRequestError(ControllerError):
    """The controller refused a request.

    Attributes:
        method, url: The request.
        status_code: HTTP status of the answer; `status` is the same number.
    """

    code = "controller_request"

    def __init__(
        self, method: str, url: str, status_code: int, message: str, *, hint: str | None = None
    ) -> None:
        super().__init__(f"{method} {url} answered {status_code}: {message}", hint=hint)
        self.method = method
        self.url = url
        self.status_code = status_code
        self.__dict__["status"] = status_code


class UnauthorizedError(ControllerError, PermissionError):
    """A token is missing, wrong, expired, or not meant for this."""

    code = "unauthorized"
    status = 401


class ForbiddenError(ControllerError, PermissionError):
    """The sender of a request is known, and must not do this.

    Attributes:
        user: The user who sent the request.
        verb, resource, namespace: The request in words of RBAC; `namespace` is empty for all.
    """

    code = "forbidden"
    status = 403

    user: str = ""
    verb: str = ""
    resource: str = ""
    namespace: str = ""


class ForeignOriginError(ControllerError, PermissionError):
    """A request that the page of another site made, or that a foreign name led to a server."""

    code = "foreign_origin"
    status = 403


class VersionMismatchError(ControllerError):
    """Two parts are too far apart in version to understand each other."""

    code = "version_mismatch"
    status = 409


# ---------------------------------------------------------------------------------- kubernetes


class KubernetesError(KubetorchError):
    """The API server of a cluster did not do what was asked."""

    code = "kubernetes"
    status = 502


class KubernetesUnavailableError(KubernetesError, ConnectionError):
    """The API server cannot be reached, broke off, or was silent for too long."""

    code = "kubernetes_unavailable"
    status = 503


class KubernetesRequestError(KubernetesError):
    """The API server refused a request.

    Attributes:
        verb: The verb of the request, as RBAC calls it: `get`, `list`, `patch`, ….
        resource: Its resource, as RBAC calls it: `pods`, `pods/exec`, `deployments.apps`, ….
        namespace: Its namespace; `None` for cluster-wide objects, and for all namespaces.
        name: The name of the object; `None` for a request without a name.
        status_code: HTTP status of the answer.
        reason: Kubernetes' word for the fault, such as `Invalid` or `AlreadyExists`; may be empty.
        causes: Details: dicts with `reason`, `message` and `field`, as far as the answer had them.
        retry_after: Seconds after which the API server asked to try again, if it did.
    """

    code = "kubernetes_request"

    verb: str = ""
    resource: str = ""
    namespace: str | None = None
    name: str | None = None
    status_code: int = 0
    reason: str = ""
    causes: Sequence[dict[str, str]] = ()
    retry_after: float | None = None


class KubernetesForbiddenError(KubernetesRequestError, PermissionError):
    """The API server does not know who asks, or does not let them; also quotas and admission."""

    code = "kubernetes_forbidden"
    status = 403


class KubernetesNotFoundError(KubernetesRequestError, LookupError):
    """There is no such object, or no such kind."""

    code = "kubernetes_not_found"
    status = 404


class KubernetesConflictError(KubernetesRequestError):
    """The object exists, was changed in between, or another manager owns its fields (`causes`)."""

    code = "kubernetes_conflict"
    status = 409


class InstallError(KubetorchError):
    """Kubetorch could not be installed in a cluster, upgraded, checked or removed."""

    code = "install"


# ------------------------------------------------------------------------- workloads and pods


class WorkloadError(KubetorchError):
    """Something is wrong with one workload or its pods."""

    code = "workload"


class ServiceNotFoundError(WorkloadError, LookupError, ValueError):
    """There is no workload of that name, or it was torn down.

    It is a `ValueError` too, which programs expect for an unknown name.

    Attributes:
        reason: Why it stopped by itself; empty if it did not.
    """

    code = "service_not_found"
    status = 404
    reason: str = ""


class ServiceTakenError(WorkloadError):
    """A deploy would replace the service of another creator, or another callable that is in use.

    Attributes:
        name, namespace: The service.
        creator: The user who deployed it; empty if unknown.
        project, callable: The project and the callable that it runs.
    """

    code = "service_taken"
    status = 409

    name: str = ""
    namespace: str = ""
    creator: str = ""
    project: str = ""
    callable: str = ""


class StartupError(WorkloadError):
    """A workload could not start."""

    code = "startup"


class ServiceTimeoutError(StartupError, TimeoutError):
    """A workload was not ready within its `launch_timeout`."""

    code = "service_timeout"
    status = 504


class QuorumError(ServiceTimeoutError):
    """Fewer pods of a distributed service than its quorum came within `quorum_timeout`."""

    code = "quorum"


class ResourceNotAvailableError(StartupError):
    """No node can give what the workload asks for."""

    code = "resource_not_available"


class UnschedulableError(ResourceNotAvailableError):
    """No node of the cluster could ever take a pod, and nothing adds nodes."""

    code = "unschedulable"


class QueueUnschedulableError(UnschedulableError):
    """A queue could never admit the workload, however long it waited."""

    code = "queue_unschedulable"


class QuotaExceededError(ResourceNotAvailableError):
    """A pod asks for more than a quota of its namespace allows altogether."""

    code = "quota_exceeded"


class MissingObjectError(StartupError, LookupError):
    """A pod refers to an object that does not exist.

    Attributes:
        kind, name: The missing object; kinds are `Secret`, `PersistentVolumeClaim`, ….
    """

    code = "missing_object"
    kind: str = ""
    name: str = ""


class OperatorMissingError(StartupError):
    """The cluster lacks the operator, the queue or the scheduler that the workload needs."""

    code = "operator_missing"


class AdmissionError(StartupError, PermissionError):
    """A webhook, a policy or a limit of the namespace refused an object."""

    code = "admission"
    status = 403


class PodContainerError(StartupError):
    """A container of a pod ended or cannot start."""

    code = "pod_container"


class KnativeServiceConflictError(StartupError):
    """A Service that Knative does not own has the name that it needs."""

    code = "knative_conflict"
    status = 409


class ServiceHealthError(StartupError):
    """Pods of the workload start and fail again and again."""

    code = "service_health"


class ImageStepError(StartupError):
    """A step of an image failed.

    Attributes:
        step: The step, as a Dockerfile has it.
        exit_code: The exit status of its command.
    """

    code = "image_step"
    step: str = ""
    exit_code: int | None = None


class ImagePullError(ServiceHealthError):
    """An image failed to pull."""

    code = "image_pull"


class ProbeFailedError(ServiceHealthError):
    """A container was killed because its startup or liveness probe failed."""

    code = "probe_failed"


class PodTerminatedError(WorkloadError):
    """A pod ended while a call ran on it.

    Attributes:
        pod_name: The pod.
        reason: Kubernetes' word for it, such as `OOMKilled`, `Evicted` or `SIGTERM`.
        status_code: HTTP status of an answer that carries it.
        events: What happened to the pod: dicts with `timestamp`, `reason` and `message`.
    """

    code = "pod_terminated"
    status = 503

    def __init__(
        self,
        pod_name: str = "unknown",
        reason: str = "Unknown",
        status_code: int = 503,
        events: list[dict[str, Any]] | None = None,
        *,
        hint: str | None = None,
    ) -> None:
        text = self._describe(pod_name, reason, status_code)
        recent = [f"  {e.get('reason', '')}: {e.get('message', '')}" for e in (events or [])[-5:]]
        super().__init__("\n".join([text, *recent]), hint=hint)
        self.pod_name = pod_name
        self.reason = reason
        self.status_code = status_code
        self.events = list(events or [])

    @staticmethod
    def _describe(pod_name: str, reason: str, status_code: int) -> str:
        return f"pod {pod_name} was terminated (reason: {reason}, status: {status_code})"

    @property
    def evicted(self) -> bool:
        """True if the node's kubelet evicted the pod."""
        return self._has_reason("Evicted")

    @property
    def oom_killed(self) -> bool:
        """True if the kernel ended the pod for its memory."""
        return self._has_reason("OOMKilled")

    def _has_reason(self, word: str) -> bool:
        reasons = [str(event.get("reason", "")) for event in self.events]
        return self.reason == word or any(word in reason for reason in reasons)

    @classmethod
    def from_dict(cls, state: Mapping[str, Any]) -> PodTerminatedError:
        """The error that a response body describes."""
        names = ("pod_name", "reason", "status_code", "events")
        return cls(**{name: state[name] for name in names if name in state})


class AgentDiedError(PodTerminatedError):
    """The agent of a pod ended while a call ran on it; whether it had an effect is unknown."""

    code = "agent_died"

    def __init__(
        self,
        pod_name: str = "unknown",
        reason: str = "Unknown",
        status_code: int = 503,
        events: list[dict[str, Any]] | None = None,
        *,
        hint: str | None = "what the call has done until then is unknown; if it may run twice, "
        "make it again: f.options(retries=1)(...), or f.spawn(...) anew",
    ) -> None:
        super().__init__(pod_name, reason, status_code, events, hint=hint)

    @staticmethod
    def _describe(pod_name: str, reason: str, status_code: int) -> str:
        ends = {
            "AgentDied": f"the agent of pod {pod_name} ended",
            "AgentRestarted": f"the agent of pod {pod_name} was started again and lost its calls",
        }
        if reason.startswith("unreachable"):
            return f"the agent of pod {pod_name} is {reason}"
        return ends.get(reason, f"the agent of pod {pod_name} ended: {reason}")


class WorkerDiedError(WorkloadError):
    """The process that ran the call ended.

    Attributes:
        exit_code: Its exit status; negative numbers are signals, as in `subprocess`.
    """

    code = "worker_died"
    exit_code: int | None = None

    def __init__(
        self, message: str = "", *, exit_code: int | None = None, hint: str | None = None
    ) -> None:
        super().__init__(message, hint=hint)
        self.exit_code = exit_code


class OutOfMemoryError(WorkerDiedError, MemoryError):
    """The process that ran the call was killed for its memory.

    Attributes:
        limit_bytes: The memory that its pod may use; `None` if unknown.
        used_bytes: The memory that its pod used; `None` if unknown.
    """

    code = "out_of_memory"
    limit_bytes: int | None = None
    used_bytes: int | None = None

    def __new__(cls, *args: object, **_: object) -> OutOfMemoryError:
        """Make an object; `MemoryError.__new__`, which goes first, makes none of a subclass."""
        return Exception.__new__(cls, *args)


class WorkerRecycledError(WorkerDiedError):
    """The worker was replaced because another call on it could not be interrupted."""

    code = "worker_recycled"


class InstanceReplacedError(WorkloadError):
    """The instance of a class was made anew without a deploy, and its state is lost.

    This call did not run. The next call runs on the new instance.

    Attributes:
        instance: Identity of the new instance.
    """

    code = "instance_replaced"
    status = 409
    instance: str | None = None

    def __init__(
        self, message: str = "", *, instance: str | None = None, hint: str | None = None
    ) -> None:
        super().__init__(message, hint=hint)
        self.instance = instance


class InstanceReplacedWarning(UserWarning):
    """The instance of a class was made anew without a deploy, and its state is lost."""


class WorkerMembershipChanged(WorkloadError):
    """The set of pods that a distributed call runs on changed while it ran.

    Attributes:
        added_ips, removed_ips, previous_ips, current_ips: Sets of addresses.
        reasons: Why pods are gone, by pod: `Deleted`, `OOMKilled`, `AgentDied`, `unreachable`, ….
    """

    code = "membership_changed"

    def __init__(
        self,
        added_ips: Iterable[str] | None = None,
        removed_ips: Iterable[str] | None = None,
        previous_ips: Iterable[str] | None = None,
        current_ips: Iterable[str] | None = None,
        message: str | None = None,
        *,
        reasons: Mapping[str, str] | None = None,
        hint: str | None = None,
    ) -> None:
        if message is not None and added_ips is None and removed_ips is None:
            added_ips, removed_ips = _addresses_in(message)
        self.added_ips = set(added_ips or ())
        self.removed_ips = set(removed_ips or ())
        self.previous_ips = set(previous_ips or ())
        self.current_ips = set(current_ips or ())
        self.reasons = dict(reasons or {})
        super().__init__(message or self._describe(), hint=hint)

    def _describe(self) -> str:
        if self.removed_ips:
            count, addresses = len(self.removed_ips), sorted(self.removed_ips)
            text = f"Critical: {count} worker(s) removed during execution: {addresses}"
            reasons = "; ".join(f"{pod}: {reason}" for pod, reason in self.reasons.items())
            return f"{text} ({reasons})" if reasons else text
        return (
            f"Warning: {len(self.added_ips)} worker(s) added during execution: "
            f"{sorted(self.added_ips)}"
        )

    @property
    def is_critical(self) -> bool:
        """True if a worker was lost."""
        return bool(self.removed_ips)

    @classmethod
    def from_dict(cls, state: Mapping[str, Any]) -> WorkerMembershipChanged:
        """The error that a response body describes."""
        names = ("added_ips", "removed_ips", "previous_ips", "current_ips", "message", "reasons")
        return cls(**{name: state[name] for name in (*names, "hint") if name in state})

    @classmethod
    def from_state(cls, message: str, state: Mapping[str, Any]) -> KubetorchError:
        names = ("added_ips", "removed_ips", "previous_ips", "current_ips")
        sets = {name: set(state.get(name) or ()) for name in names}
        return super().from_state(message, {"reasons": {}, **state, **sets})

    def to_state(self) -> dict[str, Any]:  # sets become sorted lists
        names = ("added_ips", "removed_ips", "previous_ips", "current_ips")
        addresses = {name: sorted(getattr(self, name)) for name in names}
        return super().to_state() | addresses | {"reasons": self.reasons}


def _addresses_in(message: str) -> tuple[set[str], set[str]]:
    addresses = set(re.findall(r"'([^']+)'", message))
    return (set(), addresses) if "removed" in message else (addresses, set())


# --------------------------------------------------------------------------------------- calls


class CallError(KubetorchError):
    """Something is wrong with one call."""

    code = "call"


class CallTimeoutError(CallError, TimeoutError):
    """The call did not end within its `timeout`; it was interrupted."""

    code = "call_timeout"
    status = 504


class CallCancelledError(CallError):
    """The call was cancelled."""

    code = "call_cancelled"
    status = 499


class CallLostError(CallError, ConnectionError):
    """The connection broke and whether the call ran cannot be known, so it was not sent again."""

    code = "call_lost"
    status = 503


class CallRefusedError(CallError):
    """The call was refused before it started: nothing of it ran.

    Attributes:
        calls: How many calls the pod has, if it refused since other pods have fewer.
    """

    code = "call_refused"
    status = 503
    calls: int | None = None


class QueueFullError(CallError):
    """More calls wait for a process of the service than may: this call did not run."""

    code = "queue_full"
    status = 429


class BatchError(CallError):
    """A call of a `@kt.batched` function has not one argument, or gets none of its results.

    The function returned something else than a list with one result for each item.
    """

    code = "batch"


class CallableNotFoundError(CallError, LookupError):
    """The workload has no such callable or method."""

    code = "callable_not_found"
    status = 404


class ResultExpiredError(CallError, LookupError):
    """The result of a spawned call is not kept any more, or the call is unknown."""

    code = "result_expired"
    status = 410


class ReferenceLostError(CallError, LookupError):
    """The value of a reference (`kt.ref`) is gone, or has no room in the pod of a call.

    Attributes:
        reference: Identity of the reference.
    """

    code = "reference_lost"
    status = 410
    reference: str | None = None

    @classmethod
    def of(cls, reference: str, message: str, hint: str) -> ReferenceLostError:
        """The error about a reference."""
        error = cls(message, hint=hint)
        error.reference = reference
        return error


class SerializationError(CallError, TypeError):
    """A value cannot travel in the call's serialization, or the serialization is not allowed.

    Attributes:
        call_id: The call whose value cannot travel, if its pod keeps the value.
    """

    code = "serialization"
    status = 400
    call_id: str | None = None


class RemoteError(CallError):
    """The user's exception, when its own class cannot be rebuilt here.

    Attributes:
        error_type: Name of the class that was raised.
    """

    code = "remote"
    error_type: str = "Exception"

    def __init__(self, message: str = "", *, error_type: str = "Exception") -> None:
        super().__init__(message)
        self.error_type = error_type

    def __str__(self) -> str:
        return f"{self.error_type}: {self.message}" if self.message else self.error_type

    def __repr__(self) -> str:
        return f"RemoteError({str(self)!r})"


class RemoteTraceback(Exception):
    """Cause of an exception that was raised in a pod; its text is the traceback there."""

    def __init__(self, text: str, pod_name: str | None = None, rank: int | None = None) -> None:
        super().__init__(text, pod_name, rank)
        self.text = text
        self.pod_name = pod_name
        self.rank = rank

    def __str__(self) -> str:
        pod_text = f" in {self.pod_name}" if self.pod_name else ""
        rank_text = f", rank {self.rank}" if self.rank is not None else ""
        return f"\n\nRemote traceback{pod_text}{rank_text}:\n{self.text}"


class ProtocolError(KubetorchError):
    """A peer sent what the protocol does not allow."""

    code = "protocol"
    status = 400


# ---------------------------------------------------------------------------------- data store


class DataStoreError(KubetorchError):
    """A key or a blob is missing, broken, or out of reach."""

    code = "data_store"


class DataRefusedError(DataStoreError, RuntimeError):
    """A key cannot be deleted, or files cannot be published, in the way that was asked."""

    code = "data_refused"
    status = 409


class StorageFullError(DataStoreError, OSError):
    """The disk, or the store's share of it, is full; no half-written blob stays."""

    code = "storage_full"
    status = 507


class StoreUnavailableError(DataStoreError, ConnectionError):
    """The bucket that keeps the data store does not answer, or refuses; a put changed nothing."""

    code = "store_unavailable"
    status = 503


class RsyncError(DataStoreError):
    """A transfer of files failed.

    Attributes:
        cmd, returncode, stdout, stderr: The command, its exit status and its output.
    """

    code = "transfer"

    def __init__(self, cmd: str, returncode: int, stdout: str, stderr: str) -> None:
        super().__init__(f"transfer failed with code {returncode}: {stderr}")
        self.cmd = cmd
        self.returncode = returncode
        self.stdout = stdout
        self.stderr = stderr
        if returncode == 12 or "protocol data stream" in stderr:
            self.hint = "check that the namespace exists and that its data store runs: kt check"
        elif returncode == 10:
            self.hint = "the data store refused the connection; is it running? kt check"


class SecretNotFound(DataStoreError, LookupError):
    """There is no secret of that name."""

    code = "secret_not_found"
    status = 404

    def __init__(self, secret_name: str, namespace: str) -> None:
        super().__init__(
            f"secret {secret_name!r} not found in namespace {namespace!r}",
            hint=f"kt secrets -n {namespace} lists the secrets; kt secrets create makes one",
        )
        self.secret_name = secret_name
        self.namespace = namespace


class VolumeNotFoundError(DataStoreError, LookupError, ValueError):
    """There is no volume of that name."""

    code = "volume_not_found"
    status = 404


class VolumeInUseError(DataStoreError):
    """A volume cannot be deleted or used because services have it mounted.

    Attributes:
        services: The names of these services.
    """

    code = "volume_in_use"
    status = 409
    services: tuple[str, ...] = ()

    def __init__(
        self, message: str = "", *, services: Iterable[str] = (), hint: str | None = None
    ) -> None:
        super().__init__(message, hint=hint)
        self.services = tuple(services)


def _tree(root: type[KubetorchError]) -> Iterable[type[KubetorchError]]:
    yield root
    for child in root.__subclasses__():
        yield from _tree(child)


#: Every class of the tree by the name that users import, for both ends of the wire.
EXCEPTION_REGISTRY: dict[str, type[KubetorchError]] = {
    error.__name__: error for error in _tree(KubetorchError)
}
#: The same by wire identity.
BY_CODE: dict[str, type[KubetorchError]] = {
    error.code: error for error in EXCEPTION_REGISTRY.values()
}

for _error in EXCEPTION_REGISTRY.values():
    # Tracebacks and documentation show the name that users import.
    _error.__module__ = "kubetorch"
