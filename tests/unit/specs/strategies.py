"""Specs for property-based tests: what the declaring functions let through."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from kubetorch.specs import autoscaling, distribution
from kubetorch.specs.compute import ComputeSpec, Toleration, freeze
from kubetorch.specs.data import MODES, DataMount
from kubetorch.specs.endpoint import Endpoint
from kubetorch.specs.image import (
    CopyStep,
    EnvStep,
    ImageSpec,
    PipStep,
    RunStep,
    UserStep,
    WorkdirStep,
)
from kubetorch.specs.logging import LEVELS, LoggingConfig
from kubetorch.specs.secret import SecretRef
from kubetorch.specs.volume import ACCESS_MODES, VolumeSpec

WORDS = st.from_regex(r"[a-z]([a-z0-9-]{0,8}[a-z0-9])?", fullmatch=True)
TEXT = st.text(st.characters(exclude_categories=("Cs", "Cc")), max_size=12)
LABEL_NAMES = st.one_of(WORDS, st.builds("{}.io/{}".format, WORDS, WORDS))
VARIABLES = st.from_regex(r"[A-Z][A-Z0-9_]{0,8}", fullmatch=True).map("X_{}".format)
CPUS = st.sampled_from(["0.5", "1", "500m", "16"])
SIZES = st.sampled_from(["512Mi", "2Gi", "1G", "1000000"])
PATHS = st.builds("/{}/{}".format, WORDS, WORDS)
JSON: st.SearchStrategy[Any] = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-(2**53), 2**53), TEXT),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(WORDS, inner, max_size=3)),
    max_leaves=8,
)


def pairs(names: st.SearchStrategy[str], values: st.SearchStrategy[str]) -> Any:
    return st.dictionaries(names, values, max_size=3).map(lambda mapping: tuple(mapping.items()))


def maybe(strategy: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.one_of(st.none(), strategy)


STEPS = st.one_of(
    st.builds(PipStep, WORDS, st.booleans()),
    st.builds(RunStep, TEXT, st.booleans()),
    st.builds(EnvStep, VARIABLES, TEXT),
    st.builds(CopyStep, PATHS, WORDS, is_folder=st.booleans(), digest=maybe(WORDS)),
    st.builds(WorkdirStep, PATHS),
    st.builds(UserStep, WORDS),
)
IMAGES = st.builds(
    ImageSpec,
    name=maybe(WORDS),
    image_id=maybe(WORDS.map("registry.example/{}:1".format)),
    steps=st.lists(STEPS, max_size=4).map(tuple),
    cmd=st.one_of(st.none(), TEXT, st.lists(TEXT, max_size=2).map(tuple)),
)
TOLERATIONS = st.builds(
    Toleration,
    key=WORDS,
    operator=st.sampled_from(["Exists", "Equal"]),
    value=maybe(WORDS),
    effect=maybe(st.sampled_from(["NoSchedule", "NoExecute"])),
    seconds=maybe(st.integers(0, 600)),
)


def _secret(name: str, form: str) -> SecretRef:
    object_name = f"kt.secret.me.{name}"
    if form == "files":
        return SecretRef(name, object_name, "volume", path=f"~/.{name}")
    if form == "all":
        return SecretRef(name, object_name, "env", all_keys=True)
    variable = f"S_{name.upper().replace('-', '_')}"
    return SecretRef(name, object_name, "env", keys=(variable, f"{variable}_ID"))


SECRETS = st.builds(_secret, WORDS, st.sampled_from(["files", "all", "keys"]))
VOLUMES = st.builds(
    VolumeSpec,
    name=WORDS,
    mount_path=WORDS.map("/mnt/{}".format),
    size=maybe(SIZES),
    storage_class=maybe(WORDS),
    access_mode=st.sampled_from(ACCESS_MODES),
    claim=maybe(WORDS),
)


def _is_possible(parameters: dict[str, Any]) -> bool:
    """Whether the HPA class always has a pod, and a metric of the user's a target."""
    metric = parameters.get("metric")
    if metric in autoscaling.RESOURCE_METRICS:
        least = parameters.get("min_scale")
        numbers = [*least.values()] if isinstance(least, dict) else [least]
        return 0 not in (*numbers, parameters.get("initial_scale"))
    return metric != "queue-length" or "target" in parameters


AUTOSCALING = (
    st.fixed_dictionaries(
        {},
        optional={
            "target": st.integers(1, 100),
            "window": st.sampled_from(["30s", "1m"]),
            "metric": st.sampled_from(["concurrency", "rps", "cpu", "memory", "queue-length"]),
            "target_utilization": st.integers(1, 100),
            "min_scale": st.integers(0, 3)
            | st.dictionaries(
                st.sampled_from(["0 8 * * 1-5", "30 2 * * *", "*/5 * * * *"]),
                st.integers(0, 3),
                min_size=1,
            ),
            "max_scale": st.integers(3, 9),
            "initial_scale": st.integers(0, 3),
            "concurrency": st.integers(0, 20),
            "scale_down_delay": st.sampled_from(["0s", "2m"]),
            "activation_scale": st.integers(1, 3),
            "panic_window_percentage": st.integers(1, 100) | st.floats(1, 100),
            "panic_threshold_percentage": st.integers(110, 1000),
            "buffer": st.integers(0, 3),
            "target_burst_capacity": st.integers(-1, 9),
        },
    )
    .filter(_is_possible)
    .map(lambda parameters: autoscaling.parse(parameters, launch_timeout=300))
)
DISTRIBUTION = st.fixed_dictionaries(
    {},
    optional={
        "distribution_type": st.sampled_from(distribution.FRAMEWORKS),
        "workers": st.integers(1, 8),
        "quorum_timeout": st.integers(1, 600),
        "num_proc": st.integers(1, 8),
        "monitor_members": st.booleans(),
    },
).map(lambda parameters: distribution.parse(parameters)[0])
ENDPOINTS = st.one_of(
    WORDS.map(lambda host: Endpoint(url=f"http://{host}:8080")),
    st.dictionaries(LABEL_NAMES, WORDS, min_size=1, max_size=2).map(
        lambda labels: Endpoint(selector=labels)
    ),
)
#: Every field of a compute but those that say which kind of object it becomes.
SETTINGS: dict[str, st.SearchStrategy[Any]] = {
    "cpus": CPUS,
    "memory": SIZES,
    "env_vars": pairs(VARIABLES, TEXT),
    "replicas": st.integers(1, 9),
    "working_dir": PATHS,
    "launch_timeout": st.integers(1, 300).map(lambda count: 5 * count),
    "labels": pairs(LABEL_NAMES, WORDS),
    "allowed_serialization": st.sampled_from([("json",), ("json", "pickle"), ("none",)]),
    "logging": st.builds(LoggingConfig, level=st.sampled_from(LEVELS)),
    "inactivity_ttl": st.sampled_from(["30m", "1h"]),
    "data": st.lists(
        st.builds(
            DataMount,
            path=PATHS,
            key=WORDS,
            mode=st.sampled_from(MODES),
            version=WORDS,
            digest=WORDS,
        ),
        max_size=2,
        unique_by=lambda mount: mount.path,
    ).map(tuple),
    "disk_size": SIZES,
    "gpus": st.sampled_from(["1", "8"]),
    "gpu_type": WORDS,
    "gpu_memory": SIZES,
    "priority_class_name": WORDS,
    "image": IMAGES,
    "annotations": pairs(LABEL_NAMES, TEXT),
    "pod_labels": pairs(WORDS.map("pod-{}".format), WORDS),
    "volumes": st.lists(
        VOLUMES,
        max_size=2,
        unique_by=(
            lambda volume: volume.mount_path,
            lambda volume: volume.claim_name,
            lambda volume: volume.name,
        ),
    ).map(tuple),
    "node_selector": pairs(LABEL_NAMES, WORDS),
    "tolerations": st.lists(
        TOLERATIONS, max_size=2, unique_by=lambda toleration: toleration.key
    ).map(tuple),
    "secrets": st.lists(SECRETS, max_size=2, unique_by=lambda secret: secret.name).map(tuple),
    "freeze": st.booleans(),
    "kubeconfig_path": PATHS,
    "service_account_name": WORDS,
    "image_pull_policy": st.sampled_from(["Always", "IfNotPresent", "Never"]),
    "gpu_anti_affinity": st.booleans(),
    "shared_memory_limit": SIZES,
    "queue_name": WORDS,
    "queue": WORDS,
    "concurrency": st.integers(1, 64),
    "max_queue": st.integers(1, 100_000),
    "num_proc": st.integers(1, 8) | st.just("auto"),
    "dispatch": st.sampled_from(["all", "any"]),
    "server_port": st.integers(1024, 65535).filter(lambda port: port != 32300),  # the default
}
SELECTORS = st.dictionaries(LABEL_NAMES, WORDS, min_size=1, max_size=2).map(
    lambda mapping: tuple(mapping.items())
)
OBJECTS = st.dictionaries(WORDS, JSON, max_size=3)
COMPUTES = st.fixed_dictionaries(
    {},
    optional=SETTINGS
    | {
        "selector": SELECTORS,
        "endpoint": ENDPOINTS,
        "service_template": OBJECTS.map(
            lambda manifest: freeze(manifest, parameter="service_template")
        ),
        "manifest": OBJECTS.map(lambda manifest: freeze(manifest, parameter="manifest")),
        "pod_template_path": st.just(("spec", "template")),
        "autoscaling": AUTOSCALING,
        "distribution": DISTRIBUTION,
    },
).map(lambda fields: ComputeSpec(**fields))
