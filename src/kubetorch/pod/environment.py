"""What a worker or an app starts with: environment, `sys.path`, interpreter. Pure."""

from __future__ import annotations

import os
import posixpath
import re
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

from kubetorch.errors import SpecError
from kubetorch.lib import expansion, runtime
from kubetorch.lib.expansion import VARIABLE
from kubetorch.lib.records import record
from kubetorch.pod.apps.run import AppRun
from kubetorch.pod.workers.host import WorkerSpec
from kubetorch.specs.logging import LEVELS
from kubetorch.specs.workload import WorkloadSpec
from kubetorch.wire.podenv import BACKEND, PodEnv

#: Variables that only the agent itself is concerned with.
INTERNAL = "KT_POD_"

#: What was put aside when the agent started, because it is meant for the image's own programs.
KEPT = f"{INTERNAL}KEPT_"

# The form in parentheses is Kubernetes', and so is `$$(NAME)` for the text itself.
_VARIABLE = re.compile(
    rf"\$(?:\((?P<reference>[\w.-]+)\)|(?P<text>\$\([\w.-]+\)))|{VARIABLE}", re.ASCII
)


@record
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


def given(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment that a container was given, of which the runtime puts something aside."""
    kept = {k.removeprefix(KEPT): v for k, v in environ.items() if k.startswith(KEPT)}
    found = {**{k: v for k, v in environ.items() if not k.startswith(KEPT)}, **kept}
    if runtime.is_used():  # so that every Python finds this package
        paths = _entries(found.get("PYTHONPATH", ""))
        found["PYTHONPATH"] = os.pathsep.join(_unique([*paths, runtime.SITE]))
    return found


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
    if pod.controller_url:
        env["KT_CONTROLLER_URL"] = pod.controller_url
    return env


def interpreter(spec: WorkloadSpec) -> str:
    """The interpreter that runs the user's code; the agent's own where none is named."""
    return spec.runtime.python or sys.executable


def expand(value: str, env: Mapping[str, str]) -> str:
    """`value` with its variables replaced; names that `env` lacks stay.

    They are `$NAME`, `${NAME}`, `${NAME:-word}` and `${NAME:+word}`, and `$(NAME)`.
    """

    def replaced(match: re.Match[str]) -> str:
        if match["text"] or match["reference"]:
            return match["text"] or env.get(match["reference"], match[0])
        found = expansion.value(match, env, lambda word: expand(word, env))
        return match[0] if found is None else found

    return _VARIABLE.sub(replaced, value)


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
    return WorkerSpec(
        generation=generation,
        ref=ref,
        python=prepared.python,
        sys_path=_unique([*_own_path(spec, pod, code), *prepared.path]),
        cwd=pod.working_dir,
        env=tuple(prepared.env.items()),
        init_args=init_args,
        preload=spec.runtime.preload,
        log_level=level if level in LEVELS else spec.compute.logging.level,
        modules=(("__main__", ref.module),) if ref.is_script else (),
        library_path=prepared.path,
    )


def unprepared(environ: Mapping[str, str], pod: PodEnv, spec: WorkloadSpec) -> Prepared:
    """What there is before the image is."""
    return Prepared(interpreter(spec), worker_env(environ, pod, spec), spec.runtime.path)


def shell_env(
    prepared: Prepared, spec: WorkloadSpec, pod: PodEnv, code: Path | None
) -> dict[str, str]:
    """The environment of a shell: the interpreter and the project are found from there.

    Args:
        prepared: What a worker starts with.
        spec: The workload.
        pod: Who the pod is.
        code: Folder with the project, when one is synced.
    """
    more = dict(prepared.env)
    programs = os.path.dirname(prepared.python)  # noqa: PTH120  # text is what a PATH is made of
    more["PATH"] = os.pathsep.join(_unique([programs, *_entries(more.get("PATH", os.defpath))]))
    given = _entries(more.get("PYTHONPATH", ""))
    path = _unique([*_own_path(spec, pod, code), *given, *prepared.path])
    more["PYTHONPATH"] = os.pathsep.join(path)
    more.setdefault("PYTHONUNBUFFERED", "1")
    return more


def app_run(
    generation: int, spec: WorkloadSpec, *, pod: PodEnv, prepared: Prepared, code: Path | None
) -> AppRun:
    """What an app of this generation runs, and how.

    Its shell finds the interpreter and its programs first; Python, in whatever it starts, finds the
    project, writes lines as they come, and does not deploy the app once more.

    Args:
        generation: The generation.
        spec: The workload.
        pod: Who the pod is.
        prepared: What a worker starts with.
        code: Folder with the project, when one is synced.
    """
    ref, app = spec.callable, spec.callable.app
    if app is None:
        raise SpecError(f"{spec.name} is no app")
    env = shell_env(prepared, spec, pod, code)
    if app.port is not None:
        env["KT_APP_PORT"] = str(app.port)
    if app.health_check is not None:
        env["KT_APP_HEALTHCHECK"] = app.health_check
    if code is not None and ref.source_file is not None:
        env["KT_DEPLOYED_FILE"] = str(code / ref.source_file)
    folder = Path(pod.working_dir)
    if app.folder is not None:
        folder = (folder if code is None else code) / app.folder
    return AppRun(generation=generation, app=app, folder=str(folder), env=tuple(env.items()))


def patience(spec: WorkloadSpec) -> float:
    """Seconds that an app has to answer: less than the deploy has, which is then told why."""
    limit = float(spec.compute.launch_timeout)
    return limit - min(5.0, limit / 5)


def _own_path(spec: WorkloadSpec, pod: PodEnv, code: Path | None) -> list[str]:
    """Entries of `sys.path` for the deployed code."""
    ref = spec.callable
    entries: list[str] = []
    if code is not None:
        entries += [str(code / ref.root), str(code), *(str(code / root) for root in ref.roots)]
    if ref.remote_dir is not None:
        entries.append(posixpath.join(pod.working_dir, ref.remote_dir))
    return entries


def _entries(path: str) -> list[str]:
    return [entry for entry in path.split(os.pathsep) if entry]


def _unique(entries: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(entries))
