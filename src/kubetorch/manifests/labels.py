"""Labels and annotations that Kubetorch puts on its objects; their names stand only here."""

from __future__ import annotations

import re

from kubetorch._version import __version__
from kubetorch.specs.callable import CallableRef

PREFIX = "kubetorch.com/"

SERVICE = f"{PREFIX}service"
MODULE = f"{PREFIX}module"
VERSION = f"{PREFIX}version"
TEMPLATE = f"{PREFIX}template"
USERNAME = f"{PREFIX}username"
VOLUME = f"{PREFIX}volume"
SECRET_NAME = f"{PREFIX}secret-name"
MOUNT_TYPE = f"{PREFIX}mount-type"
PROVIDER = f"{PREFIX}provider"
USER_IDENTIFIER = f"{PREFIX}user-identifier"
APP = "app"
#: On objects that Kubetorch makes for itself; `kt uninstall` removes objects that have them all.
MANAGED = {
    "app.kubernetes.io/name": "kubetorch",
    "app.kubernetes.io/managed-by": "kubetorch",
    f"{PREFIX}made-by": "controller",
}
#: Keys of other projects.
LAST_APPLIED = "kubectl.kubernetes.io/last-applied-configuration"
DELETION_COST = "controller.kubernetes.io/pod-deletion-cost"
KUEUE = "kueue.x-k8s.io/queue-name"
#: Kueue admits the pods of a group, named by this label, together once the count of the annotation
#: is reached. https://kueue.sigs.k8s.io/docs/tasks/run/plain_pods/
KUEUE_GROUP = "kueue.x-k8s.io/pod-group-name"
KUEUE_GROUP_COUNT = "kueue.x-k8s.io/pod-group-total-count"
KAI = "kai.scheduler/queue"

ALLOWED_SERIALIZATION = f"{PREFIX}allowed-serialization"
INACTIVITY_TTL = f"{PREFIX}inactivity-ttl"
KUBECONFIG_PATH = f"{PREFIX}kubeconfig-path"
FREEZE = f"{PREFIX}freeze"
MOUNT_PATH = f"{PREFIX}mount-path"
#: Digests of the template that a pod was made from, and of the manifest that an object was applied
#: from.
TEMPLATE_DIGEST = f"{PREFIX}template-digest"
APPLIED = f"{PREFIX}applied"
#: The fields that an object of a user had before a deploy took it over.
BEFORE = f"{PREFIX}before"
#: Any change of this annotation has a controller of Kubernetes retry at once.
TRIED_AGAIN = f"{PREFIX}tried-again"
#: Of a pod: its number in the workload.
ORDINAL = f"{PREFIX}ordinal"
#: On the pod of the controller that leads.
LEADS = f"{PREFIX}leads"
OVERRIDE = f"{PREFIX}override"
SECRET_PATH = f"{PREFIX}secret-path"
SECRET_FILENAMES = f"{PREFIX}secret-filenames"
SECRET_VARIABLES = f"{PREFIX}secret-variables"
#: Of KAI and Run:ai: the memory that a pod has of each GPU it shares, and the number of these GPUs.
GPU_MEMORY = "gpu-memory"
GPU_DEVICES = "gpu-fraction-num-devices"
#: Of a TrainJob: kind and name of the runtime that it referred to at first.
BASE_RUNTIME = f"{PREFIX}base-runtime"
#: Of a pod template: a text that changes with the values of its secrets.
SECRETS_VERSION = f"{PREFIX}secrets-version"
#: Of a storage class: which access modes it can give, with commas.
ACCESS_MODES = f"{PREFIX}access-modes"

#: Keys that users cannot set.
RESERVED = (
    SERVICE,
    MODULE,
    VERSION,
    TEMPLATE,
    USERNAME,
    USER_IDENTIFIER,
    f"{PREFIX}pod-type",
    SECRET_NAME,
)

_VALUE_CHARACTERS = 63


def value(text: str) -> str:
    """`text` as the value of a label: what is not allowed becomes `-`, at most 63 characters."""
    cleaned = re.sub(r"[^A-Za-z0-9_.-]", "-", text)[-_VALUE_CHARACTERS:]
    return re.sub(r"^[^A-Za-z0-9]+|[^A-Za-z0-9]+$", "", cleaned)


def of_pods(*, name: str | None, username: str | None) -> dict[str, str]:
    """The labels of a workload's pods; a label whose value is not known yet is left out.

    The module is not among them: it changes with the code, and pods outlive their code.
    """
    pod_labels = {VERSION: __version__}
    if username:
        pod_labels[USERNAME] = username
    if name:
        pod_labels |= {SERVICE: name, APP: name}
    return pod_labels


def of_object(
    *, name: str | None, callable: CallableRef | None, username: str | None, template: str
) -> dict[str, str]:
    object_labels = of_pods(name=name, username=username)
    if callable is not None:
        object_labels[MODULE] = value(callable.module)
    return object_labels | {TEMPLATE: template}
