"""The parameters of `kt.Compute`: one table of them, their parsers, and checks of combinations.

A parser raises `SpecError` with the parameter, the value, and what would be right.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields, replace
from functools import partial
from os import PathLike
from typing import TYPE_CHECKING, Any, get_args

from kubetorch.config import environment
from kubetorch.errors import AutoScalingError, SpecError, UnknownParameterError, did_you_mean
from kubetorch.lib.frozen_values import FrozenValue
from kubetorch.manifests.labels import RESERVED
from kubetorch.manifests.scheduling import render_toleration
from kubetorch.sdk import parameters
from kubetorch.sdk.image import Image
from kubetorch.sdk.parameters import Pairs
from kubetorch.sdk.tuning import LIMITS
from kubetorch.specs import autoscaling, distribution, hints, quantity
from kubetorch.specs.compute import (
    AGENT_PORT,
    MOST_WAITING,
    TOLERATION_WORDS,
    ComputeSpec,
    Dispatch,
    Toleration,
    freeze,
    thaw,
)
from kubetorch.specs.data import DataMount
from kubetorch.specs.endpoint import Endpoint
from kubetorch.specs.image import CopyStep
from kubetorch.specs.logging import LoggingConfig
from kubetorch.specs.names import check_namespace
from kubetorch.specs.secret import PROVIDERS, SecretRef
from kubetorch.specs.volume import VolumeSpec, check_claim, default_mount_path
from kubetorch.wire.codecs import DEFAULT_ALLOWED

if TYPE_CHECKING:
    from kubetorch.sdk.data.declarations import Data
    from kubetorch.sdk.secret import Secret

#: The defaults of the spec's fields.
ABSENT = {item.name: item.default for item in fields(ComputeSpec)}


class Parameter(FrozenValue):
    """A parameter of `kt.Compute`; `manifests.parameters` has its place in a manifest.

    Attributes:
        name: Its name, also as an attribute.
        parse: Turns a user's value into the spec's; raises `SpecError`.
        show: Turns a value of the spec into the user's, if they differ.
        default: Makes the value for `None`, if it is not the spec's own default.
        variable: Variable of the environment that the default may come from.
        field: Field of `ComputeSpec`, if not of the same name; `None` if it is none.
        is_argument: True if the constructor takes it.
        is_for_new_pods: True if it is of no use for pods that are there already.
    """

    name: str
    parse: Callable[[Any], Any]
    show: Callable[[Any], Any] | None = None
    default: Callable[[], object] | None = None
    variable: str | None = None
    field: str | None = ""
    is_argument: bool = True
    is_for_new_pods: bool = False

    def __post_init__(self) -> None:
        if self.field == "":
            object.__setattr__(self, "field", self.name)

    def value(self, user_value: object) -> object:
        """The spec's value for a value that the user sets."""
        value = self.default() if user_value is None and self.default is not None else user_value
        try:
            return ABSENT[str(self.field)] if value is None else self.parse(value)
        except SpecError as error:
            if user_value is None and self.variable is not None:
                raise SpecError(f"{self.variable}: {error.message}", hint=error.hint) from error
            raise


# ---------------------------------------------------------------------------- resources and nodes

_OPERATORS = ("Exists", "Equal")
_EFFECTS = ("NoSchedule", "PreferNoSchedule", "NoExecute")
_EXAMPLE = '{"key": "dedicated", "operator": "Equal", "value": "ml", "effect": "NoSchedule"}'


def _memory(parameter: str) -> Callable[[object], str]:
    def parse(value: object) -> str:
        text = quantity.memory(value, parameter=parameter)
        if text.isdecimal() and int(text) < LIMITS.little_memory_bytes:
            parameters.warn(
                f'{parameter} is {value!r}, which is {text} bytes; "{text}Gi" has a unit'
            )
        return text

    return parse


def gpus(value: object) -> str | None:
    """A number of whole GPUs; 0 is none."""
    text = value.strip() if isinstance(value, str) else value
    number = parameters.whole(text)
    if number is None or number < 0:
        raise SpecError(
            f"gpus is {value!r}; it must be a whole number, 0 or more", hint=_gpu_hint(text)
        )
    return str(number) if number else None


def _gpu_hint(value: object) -> str:
    kind, colon, number = value.partition(":") if isinstance(value, str) else ("", "", "")
    if colon and number.isdecimal():
        return f"did you mean gpus={number}, gpu_type={kind!r}?"
    if re.fullmatch(r"0?\.\d+", str(value)):
        return 'a part of one is asked for by its memory: gpu_memory="4Gi"'
    return "for example kt.Compute(gpus=1)"


def gpu_type(value: object) -> str:
    """A value of the node label for GPUs, or `key: value` of another."""
    hint = 'for example gpu_type="L4", or "cloud.google.com/gke-accelerator: nvidia-l4"'
    if not isinstance(value, str) or not value.strip():
        raise SpecError(f"gpu_type is {value!r}; it must be text", hint=hint)
    key, colon, last = value.partition(":")
    node_labels = {key.strip(): last.strip()} if colon else {"product": value}
    if colon and not last.strip():
        raise SpecError(f"gpu_type is {value!r}; the value of the label is missing", hint=hint)
    try:
        parameters.labels(node_labels, parameter="gpu_type")
    except SpecError as error:
        raise SpecError(
            f"gpu_type is {value!r}; it must be a value of a node's label, or `key: value`",
            hint=hint,
        ) from error
    return value


def tolerations(value: object) -> tuple[Toleration, ...]:
    """Tolerations, each a dictionary in the words of Kubernetes."""
    if isinstance(value, (str, Mapping)) or not isinstance(value, Iterable):
        raise SpecError(
            f"tolerations is {value!r}; it must be a list of dictionaries",
            hint=f"for example kt.Compute(tolerations=[{_EXAMPLE}])",
        )
    return tuple(dict.fromkeys(_toleration(toleration) for toleration in value))


def _toleration(value: object) -> Toleration:
    if isinstance(value, Toleration):
        return value
    if not isinstance(value, Mapping):
        raise SpecError(
            f"tolerations has {value!r}; each must be a dictionary", hint=f"for example {_EXAMPLE}"
        )
    toleration_fields: dict[str, Any] = {}
    for word, text in value.items():
        if word not in TOLERATION_WORDS:
            raise SpecError(
                f"tolerations has {word!r} in {dict(value)!r}; the keys are "
                f"{', '.join(TOLERATION_WORDS)}",
                hint=did_you_mean(str(word), TOLERATION_WORDS),
            )
        # Text that is empty is the same as none.
        toleration_fields[TOLERATION_WORDS[word]] = text if text != "" else None
    toleration = Toleration(**toleration_fields)
    _check_toleration(toleration, dict(value))
    return toleration


def _check_toleration(toleration: Toleration, written: dict[str, Any]) -> None:
    def refuse(problem: str, hint: str | None = None) -> SpecError:
        return SpecError(f"tolerations has {written!r}; {problem}", hint=hint)

    for word in ("key", "operator", "value", "effect"):
        text: object = getattr(toleration, word)
        if text is not None and not isinstance(text, str):
            raise refuse(f"{word} must be text", f'for example "{word}": {str(text)!r}')
    for word, allowed in (("operator", _OPERATORS), ("effect", _EFFECTS)):
        if getattr(toleration, word) not in (None, *allowed):
            raise refuse(f"{word} must be one of {', '.join(allowed)}")
    if toleration.operator == "Exists" and toleration.value is not None:
        raise refuse("a taint that only has to exist has no value", 'leave "value" out')
    if toleration.key is None and toleration.operator != "Exists":
        raise refuse("a key is missing", 'without one, "operator": "Exists" accepts every taint')
    seconds: object = toleration.seconds
    if seconds is not None and (
        isinstance(seconds, bool)
        or not isinstance(seconds, int)
        or toleration.effect != "NoExecute"
    ):
        raise refuse('tolerationSeconds is a whole number, for the effect "NoExecute" alone')


# ------------------------------------------------------------------- objects of Kubernetes

_NAME = re.compile(r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?", re.ASCII)
_NAME_CHARACTERS = 253
#: Names that stand in a label too.
_LABEL_CHARACTERS = 63
_PULL_POLICIES = ("Always", "IfNotPresent", "Never")
_DISPATCH: tuple[Dispatch, ...] = get_args(Dispatch)
_PORTS = range(1, 65536)


def _name(parameter: str, *, limit: int = _NAME_CHARACTERS) -> Callable[[object], str]:
    def parse(value: object) -> str:
        if not isinstance(value, str) or len(value) > limit or not _NAME.fullmatch(value):
            raise SpecError(
                f"{parameter} is {value!r}; it must be the name of an object of Kubernetes: at "
                f"most {limit} lower-case letters, digits, '-' and '.', the first and last a "
                "letter or digit"
            )
        return value

    return parse


def _flag(parameter: str) -> Callable[[object], bool]:
    def parse(value: object) -> bool:
        if not isinstance(value, bool):
            raise SpecError(
                f"{parameter} is {value!r}; it must be True or False",
                hint=f"for example kt.Compute({parameter}=True)",
            )
        return value

    return parse


def image_pull_policy(value: object) -> str:
    if value not in _PULL_POLICIES:
        raise SpecError(
            f"image_pull_policy is {value!r}; it must be one of {', '.join(_PULL_POLICIES)}",
            hint=did_you_mean(str(value), _PULL_POLICIES),
        )
    return str(value)


def kubeconfig_path(value: object) -> str:
    """The path of a kubeconfig, as it was given."""
    path = os.fspath(value) if isinstance(value, (str, PathLike)) else value
    if not isinstance(path, str) or not path.strip() or "\0" in path:
        raise SpecError(
            f"kubeconfig_path is {value!r}; it must be the path of a file",
            hint='for example kt.Compute(kubeconfig_path="~/.kube/config")',
        )
    return path


def num_proc(value: object) -> int | str:
    """A number of processes, or `auto`."""
    if value == "auto":
        return "auto"
    number = parameters.whole(value)
    if number is None or not 1 <= number <= distribution.MOST_PROCESSES:
        raise SpecError(
            f"num_proc is {value!r}; it must be a whole number from 1 to "
            f'{distribution.MOST_PROCESSES}, or "auto"',
            hint="for example kt.Compute(cpus=4, num_proc=4)",
        )
    return number


def dispatch(value: object) -> str:
    """`all` or `any`: the pods that a call goes to."""
    if value not in _DISPATCH:
        raise SpecError(
            f'dispatch is {value!r}; it must be "all", every pod and a list of results, or "any", '
            "the least busy pod and its result",
            hint=did_you_mean(str(value), _DISPATCH),
        )
    return str(value)


def server_port(value: object) -> int | None:
    """A port; `None` is the usual port of agents."""
    number = parameters.whole(value)
    if number is None or number not in _PORTS:
        raise SpecError(f"server_port is {value!r}; it must be a port, 1 to {_PORTS[-1]}")
    return None if number == AGENT_PORT else number


def selector(value: object) -> Pairs:
    """Labels of the pods that belong to a workload."""
    pod_labels = parameters.labels(value, parameter="selector")
    if not pod_labels:
        raise SpecError(
            "selector is empty, so it would select every pod of the namespace",
            hint='for example kt.Compute(selector={"app": "workers"})',
        )
    return pod_labels


def endpoint(value: object) -> Endpoint:
    if not isinstance(value, Endpoint):
        raise SpecError(
            f"endpoint is {value!r}; it must be a kt.Endpoint",
            hint='for example kt.Endpoint(url="my-svc.my-ns.svc.cluster.local:8080")',
        )
    return value


def service_template(value: object) -> str | None:
    """The overlay of the manifest as JSON text."""
    if not isinstance(value, Mapping):
        raise SpecError(
            f"service_template is {value!r}; it must be a dictionary",
            hint='for example {"spec": {"template": {"spec": {"hostNetwork": True}}}}',
        )
    return freeze(value, parameter="service_template") if value else None


def own_labels(value: object) -> Pairs:
    """Labels that users may set."""
    user_labels = parameters.labels(value)
    for key, text in user_labels:
        if key in RESERVED:
            raise SpecError(
                f"labels has {key!r}: {text!r}; that label is set by Kubetorch itself",
                hint="choose another name",
            )
    return user_labels


def annotation_pairs(value: object) -> Pairs:
    pairs = parameters.mapping("annotations", value, 'kt.Compute(annotations={"owner": "me"})')
    for name, item in pairs.items():
        parameters.check_label_name("annotations", name)
        if not isinstance(item, (str, int, float)) or "\0" in str(item):
            raise SpecError(f"annotations[{name!r}] is {item!r}; it must be text or a number")
    return tuple((str(name), str(item)) for name, item in pairs.items())


# ------------------------------------------------------------------- images, volumes, secrets


def image(value: object) -> Image:
    """An image; other values raise `AttributeError`, in the words that programs expect."""
    if not isinstance(value, Image):
        raise AttributeError(
            f"image is {value!r}; it must be a kt.Image, for example kt.Image(image_id={value!r}): "
            f"{type(value).__name__!r} object has no attribute 'image_id'"
        )
    return value


def volumes(value: object) -> tuple[VolumeSpec, ...]:
    """Volumes, or names of claims that exist."""
    if not isinstance(value, (list, tuple)):
        raise SpecError(
            f"volumes is {value!r}; it must be a list of kt.Volume, or of names of claims",
            hint='for example kt.Compute(volumes=["data"])',
        )
    return tuple(_volume(volume) for volume in value)


def _volume(value: object) -> VolumeSpec:
    if isinstance(value, VolumeSpec):
        return value
    if isinstance(value, str):
        claim = check_claim(value, parameter="volumes")
        return VolumeSpec(claim, default_mount_path(claim), claim=claim)
    # As in `_secret`.
    from kubetorch.sdk.volume import Volume  # noqa: PLC0415

    if not isinstance(value, Volume):
        raise SpecError(
            f"volumes has {value!r}; each must be a kt.Volume, or the name of a claim that exists",
            hint='for example kt.Volume(name="data", size="10Gi", mount_path="/data")',
        )
    return value.to_spec()


def data(value: object) -> tuple[DataMount, ...]:
    """Keys of the data store by path."""
    # As in `_secret`.
    from kubetorch.sdk.data import declarations  # noqa: PLC0415

    return declarations.parse(value)


def _data(mounts: Iterable[DataMount]) -> dict[str, str | Data]:
    from kubetorch.sdk.data import declarations  # noqa: PLC0415  # as above

    return declarations.declared(mounts)


def secrets(value: object) -> list[Secret]:
    """Secrets, names of providers, or names of secrets that exist."""
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise SpecError(
            f"secrets is {value!r}; it must be a list of kt.Secret, or of names",
            hint='for example kt.Compute(secrets=["huggingface"])',
        )
    return [_secret(secret) for secret in value]


def _secret(value: object) -> Secret:
    # This imports the controller's client, half of the imports of a declaration.
    from kubetorch.sdk.secret import Secret  # noqa: PLC0415

    if isinstance(value, Secret):
        return value
    if not isinstance(value, str) or not value:
        raise SpecError(
            f"secrets has {value!r}; each must be a kt.Secret, the name of a provider, or that "
            "of a secret that exists"
        )
    return Secret.from_provider(value) if value in PROVIDERS else Secret.reference(value)


def paths(source: object) -> list[str]:
    """The paths of this machine that `rsync` is given."""
    items = [source] if isinstance(source, (str, PathLike)) else source
    if not isinstance(items, Iterable) or isinstance(items, (bytes, dict)):
        raise SpecError(
            f"source is {source!r}; it must be a path, or a list of paths",
            hint='for example compute.rsync(["./src", "./data"])',
        )
    listed_paths = list(items)
    for path in listed_paths:
        if not isinstance(path, (str, PathLike)):
            raise SpecError(f"source has {path!r} in it; each must be a path")
    return [str(os.fspath(path)) for path in listed_paths]


# ----------------------------------------------------------------------------------- the table


def _dictionary(pairs: Pairs | None) -> dict[str, str] | None:
    return None if pairs is None else dict(pairs)


def _template(text: str | None) -> dict[str, Any] | None:
    return None if text is None else thaw(text)


def _tolerations(accepted: Iterable[Toleration]) -> list[dict[str, Any]]:
    return [render_toleration(toleration) for toleration in accepted]


def _most_waiting(number: int | None) -> int:
    return MOST_WAITING if number is None else number


def _port(port: int | None) -> int:
    return AGENT_PORT if port is None else port


#: All parameters, by name, in the order of the constructor.
PARAMETERS = {
    parameter.name: parameter
    for parameter in (
        Parameter("cpus", quantity.cpus),
        Parameter("memory", _memory("memory")),
        Parameter("disk_size", _memory("disk_size")),
        Parameter("gpus", gpus),
        Parameter("gpu_type", gpu_type),
        Parameter("priority_class_name", _name("priority_class_name"), is_for_new_pods=True),
        Parameter("gpu_memory", partial(quantity.memory, parameter="gpu_memory")),
        Parameter("namespace", check_namespace, field=None),
        Parameter("image", image),
        Parameter("labels", own_labels, show=dict),
        Parameter("annotations", annotation_pairs, show=dict),
        Parameter("volumes", volumes, show=list, is_for_new_pods=True),
        Parameter(
            "node_selector",
            partial(parameters.labels, parameter="node_selector"),
            show=dict,
            is_for_new_pods=True,
        ),
        Parameter("service_template", service_template, show=_template, is_for_new_pods=True),
        Parameter("tolerations", tolerations, show=_tolerations, is_for_new_pods=True),
        Parameter("env_vars", parameters.environment, show=dict),
        Parameter("secrets", secrets, is_for_new_pods=True),
        Parameter("freeze", _flag("freeze")),
        Parameter("kubeconfig_path", kubeconfig_path),
        Parameter("service_account_name", _name("service_account_name"), is_for_new_pods=True),
        Parameter("image_pull_policy", image_pull_policy, is_for_new_pods=True),
        Parameter("inactivity_ttl", parameters.ttl),
        Parameter(
            "gpu_anti_affinity",
            _flag("gpu_anti_affinity"),
            default=environment.gpu_anti_affinity,
            is_for_new_pods=True,
        ),
        Parameter(
            "launch_timeout",
            partial(parameters.seconds, "launch_timeout"),
            default=environment.launch_timeout,
            variable="KT_LAUNCH_TIMEOUT",
        ),
        Parameter(
            "working_dir", partial(parameters.absolute_path, "working_dir"), is_for_new_pods=True
        ),
        Parameter("shared_memory_limit", _memory("shared_memory_limit"), is_for_new_pods=True),
        Parameter(
            "allowed_serialization",
            parameters.serializations,
            show=list,
            default=lambda: environment.allowed_serialization() or DEFAULT_ALLOWED,
            variable="KT_ALLOWED_SERIALIZATION",
        ),
        Parameter("replicas", partial(parameters.count, "replicas"), is_for_new_pods=True),
        Parameter("logging_config", parameters.logging, default=LoggingConfig, field="logging"),
        Parameter("queue_name", _name("queue_name", limit=_LABEL_CHARACTERS), is_for_new_pods=True),
        Parameter("selector", selector, show=_dictionary),
        Parameter("endpoint", endpoint),
        Parameter("queue", _name("queue", limit=_LABEL_CHARACTERS), is_for_new_pods=True),
        Parameter("concurrency", partial(parameters.count, "concurrency")),
        Parameter("max_queue", partial(parameters.count, "max_queue"), show=_most_waiting),
        Parameter("num_proc", num_proc, show=lambda number: number or 1),
        Parameter("dispatch", dispatch),
        Parameter("data", data, show=_data),
        Parameter("server_port", server_port, show=_port, is_argument=False),
    )
}
#: Fields of `ComputeSpec` that no parameter sets: `from_manifest` and the methods of `Compute` do.
NO_PARAMETERS = ("pod_labels", "manifest", "pod_template_path", "autoscaling", "distribution")


# ------------------------------------------------------------------------- checks of combinations

#: Kinds whose pods get no calls.
_JOBS = ("Job", "CronJob")
#: More than any cluster runs for one service.
_MOST_PODS = 10_000


def declared(spec: ComputeSpec) -> ComputeSpec:
    """The spec without the facts that a deploy adds about secrets, claims, keys and files."""
    bare = tuple(SecretRef(secret.name, "", "env") for secret in spec.secrets)
    volumes = tuple(
        volume if volume.claim is None else replace(volume, mount_path="", access_mode=None)
        for volume in spec.volumes
    )
    image = spec.image
    if image is not None:
        steps = (
            replace(step, digest=None) if isinstance(step, CopyStep) else step
            for step in image.steps
        )
        image = replace(image, steps=tuple(steps))
    mounts = tuple(replace(mount, version="", digest="") for mount in spec.data)
    return replace(spec, secrets=bare, volumes=volumes, image=image, data=mounts)


def settled(spec: ComputeSpec, before: ComputeSpec) -> ComputeSpec:
    """The spec, with the deadline of a revision that follows from a changed launch timeout."""
    scaling = spec.autoscaling
    if scaling is None or spec.launch_timeout == before.launch_timeout:
        return spec
    if scaling.progress_deadline != autoscaling.default_progress_deadline(before.launch_timeout):
        return spec
    deadline = autoscaling.default_progress_deadline(spec.launch_timeout)
    return replace(spec, autoscaling=replace(scaling, progress_deadline=deadline))


def check_consistency(spec: ComputeSpec) -> None:
    """Refuse parameters that contradict each other, or have no manifest together."""
    _check_modes(spec)
    _check_dispatch(spec)
    _check_slots(spec)
    _check_data(spec)
    if spec.is_selector_only:
        _check_pool(spec)
    _check_numbers(spec)
    parts = (spec.manifest, spec.service_template, spec.volumes, spec.secrets, spec.selector)
    if (any(parts) and not spec.is_selector_only) or (spec.gpu_type and spec.node_selector):
        # Declaring other resources loads no manifests.
        from kubetorch.sdk import compute_manifest  # noqa: PLC0415

        compute_manifest.check(spec)


def _check_modes(spec: ComputeSpec) -> None:
    if spec.autoscaling is not None and spec.distribution is not None:
        raise SpecError(
            "autoscale() and distribute() exclude each other",
            hint="one spreads calls over pods, the other runs each call on all of them",
        )
    if spec.autoscaling is not None and spec.replicas != 1 and spec.manifest is None:
        raise SpecError(
            f"replicas is {spec.replicas}, and autoscale() decides on the number of pods",
            hint=f"autoscale(min_scale={spec.replicas}) keeps so many, initial_scale= begins with "
            "them",
        )


def _check_dispatch(spec: ComputeSpec) -> None:
    if spec.dispatch == "all":
        return
    if spec.distribution is not None:
        raise SpecError(
            f"dispatch is {spec.dispatch!r}, and distribute() runs each call on all pods",
            hint='a call with workers="any" runs on one of them',
        )
    if spec.is_selector_only:
        raise SpecError(
            f"dispatch is {spec.dispatch!r}, of pods that a selector finds, which all get each "
            "call",
            hint='a call with workers="any" goes to one of them',
        )


def _check_slots(spec: ComputeSpec) -> None:
    """Refuse bounds of calls and numbers of processes that cannot be kept."""
    kind = None if spec.distribution is None else spec.distribution.distribution_type
    if spec.num_proc is not None and kind is not None:
        raise SpecError(
            f"num_proc is {spec.num_proc!r}, of a service that is distributed",
            hint=f"distribute({kind!r}, num_proc={spec.num_proc!r}) says how many ranks a pod has",
        )
    scaling = None if spec.autoscaling is None else spec.autoscaling.concurrency
    if spec.concurrency is not None:
        callee = "Ray's head, whose program uses the other pods" if kind == "ray" else None
        if spec.manifest is not None and json.loads(spec.manifest).get("kind") in _JOBS:
            callee = "a job, which nobody calls"
        if callee is not None:
            raise SpecError(
                f"concurrency is {spec.concurrency}; it bounds the calls of a service, and this "
                f"is {callee}"
            )
    if not scaling:
        return
    if isinstance(spec.num_proc, int) and scaling % spec.num_proc:
        raise SpecError(
            f"autoscale(concurrency={scaling}) is the number of calls of a pod, which its "
            f"{spec.num_proc} processes (num_proc) cannot share equally",
            hint=f"kt.Compute(concurrency=N) is for each process: {spec.num_proc} x N for a pod",
        )
    if spec.concurrency is not None and spec.concurrency * (spec.processes or 1) != scaling:
        raise SpecError(
            f"concurrency is {spec.concurrency} for each process, and {scaling} for each pod by "
            f"autoscale(), which has num_proc={spec.num_proc or 1}",
            hint="say one of them; a pod runs as many as its processes together",
        )


def _check_data(spec: ComputeSpec) -> None:
    """Refuse data at paths that volumes, secrets or the code have."""
    mounts = [(volume.mount_path, f"the volume {volume.name!r}") for volume in spec.volumes]
    mounts += [
        (secret.path, f"the secret {secret.name!r}") for secret in spec.secrets if secret.path
    ]
    for mount in spec.data:
        above = f"{mount.path}/"
        for path, owner in mounts:
            if f"{path}/".startswith(above) or above.startswith(f"{path.rstrip('/')}/"):
                raise SpecError(
                    f"data[{mount.path!r}] is {mount.key!r}, and {owner} is at {path}",
                    hint="give each a path outside of the other one",
                )
        if spec.working_dir is not None and f"{spec.working_dir}/".startswith(above):
            raise SpecError(
                f"data[{mount.path!r}] is {mount.key!r}, and the working directory "
                f"{spec.working_dir} is there, which has the code",
                hint="choose a path that the code does not lie in",
            )


def _check_pool(spec: ComputeSpec) -> None:
    fields_of_new_pods = [
        parameter.field for parameter in PARAMETERS.values() if parameter.is_for_new_pods
    ]
    named = (*fields_of_new_pods, "pod_labels", "autoscaling")
    useless = [name for name in named if name and getattr(spec, name) != ABSENT[name]]
    if useless:
        raise SpecError(
            f"selector names pods that are there, and {', '.join(useless)} is for pods that are "
            "still to be made",
            hint="leave it out, or declare new pods, for example with cpus=",
        )


def _check_numbers(spec: ComputeSpec) -> None:
    if spec.pods > _MOST_PODS:
        raise SpecError(f"replicas is {spec.pods}; at most {_MOST_PODS} are possible")
    distribution = spec.distribution
    is_any_number = spec.is_selector_only and distribution and distribution.workers is None
    quorum = (distribution and distribution.quorum_workers) or 0
    if quorum > spec.pods and not is_any_number:
        raise SpecError(
            f"quorum_workers is {quorum}, of {spec.pods} workers",
            hint=f"distribute(workers={quorum}) asks for so many",
        )
    scaling = spec.autoscaling
    if scaling is not None and scaling.progress_deadline is not None:
        deadline = autoscaling.seconds(scaling.progress_deadline)
        if spec.manifest is None and deadline < spec.launch_timeout:
            raise AutoScalingError(
                f"progress_deadline is {scaling.progress_deadline!r}, shorter than launch_timeout, "
                f"which is {spec.launch_timeout} s",
                hint="raise progress_deadline or lower launch_timeout",
            )


def unknown(name: str) -> UnknownParameterError:
    meant = hints.hint("kt.Compute", name)
    meant = meant or did_you_mean(name, PARAMETERS, likeness=0.6)
    return UnknownParameterError(
        f"kt.Compute has no parameter {name!r}", hint=meant or f"it has {', '.join(PARAMETERS)}"
    )
