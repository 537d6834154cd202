"""What a worker starts with: environment, `sys.path`, interpreter. Pure."""

from __future__ import annotations

import posixpath
import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from kubetorch.pod.workers import WorkerSpec
from kubetorch.specs.logging import LEVELS
from kubetorch.specs.workload import WorkloadSpec
from kubetorch.wire.podenv import BACKEND, PodEnv

#: Variables that only the agent itself is concerned with.
INTERNAL = "KT_POD_"

_VARIABLE = re.compile(r"\$(?:(\w+)|\{(\w+)\})", re.ASCII)


@dataclass(frozen=True)
class Prepared:
    """What the workers of a generation start with, once its image is there.

    Attributes:
        python: Their interpreter.
        env: Their environment.
        path: Entries to import from, outside of the deployed code.
    """

    python: str
    env: dict[str, str]
    path: tuple[str, ...] = ()


def worker_env(environ: Mapping[str, str], pod: PodEnv, spec: WorkloadSpec) -> dict[str, str]:
    """The environment of a worker.

    The agent's own, then what the user declared, then who the pod is: so a program in a pod can
    deploy and call with the backend, namespace and credentials that the pod itself came from.
    """
    env = {name: value for name, value in environ.items() if not name.startswith(INTERNAL)}
    for name, value in spec.compute.env_vars:
        env[name] = expand(value, env)
    env.update(
        {
            "POD_NAME": pod.pod,
            "POD_NAMESPACE": pod.namespace,
            "POD_IP": environ.get("POD_IP", pod.host),
            "HOSTNAME": pod.pod,
            "KT_SERVICE_NAME": pod.workload,
            "KT_SERVICE": pod.workload,
            "KT_NAMESPACE": pod.namespace,
            "KT_LOG_LEVEL": spec.compute.logging.level,
            BACKEND: pod.backend,
        }
    )
    return env


def interpreter(spec: WorkloadSpec) -> str:
    """The interpreter that runs the user's code; the agent's own where none is named."""
    return spec.runtime.python or sys.executable


def expand(value: str, env: Mapping[str, str]) -> str:
    """`value` with `$NAME` and `${NAME}` replaced; names that `env` lacks stay as they are."""
    return _VARIABLE.sub(lambda match: env.get(match[1] or match[2], match[0]), value)


def worker_spec(
    generation: int,
    spec: WorkloadSpec,
    *,
    pod: PodEnv,
    prepared: Prepared,
    code: Path | None,
    init_args: str | None,
) -> WorkerSpec:
    """What a worker of this generation runs, and how.

    Args:
        generation: The generation.
        spec: The workload.
        pod: Who the pod is.
        prepared: What it starts with.
        code: Folder with the project, when one is synced.
        init_args: JSON object of the constructor's arguments.
    """
    ref = spec.callable
    level = prepared.env.get("KT_LOG_LEVEL", "").lower()  # an image may set it
    entries: list[str] = []
    if code is not None:
        entries += [str(code / ref.root), str(code), *(str(code / root) for root in ref.roots)]
    if ref.remote_dir is not None:
        entries.append(posixpath.join(pod.working_dir, ref.remote_dir))
    return WorkerSpec(
        generation=generation,
        ref=ref,
        python=prepared.python,
        sys_path=_unique([*entries, *prepared.path]),
        cwd=pod.working_dir,
        env=tuple(prepared.env.items()),
        init_args=init_args,
        preload=spec.runtime.preload,
        log_level=level if level in LEVELS else spec.compute.logging.level,
        modules=(("__main__", ref.module),) if ref.is_script else (),
        library_path=prepared.path,
    )


def _unique(entries: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(entries))
