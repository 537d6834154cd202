"""The environment, `sys.path` and interpreter with which a worker or an app starts.

On the local backend the deploy names the Python that runs the user's code: the one of the deploying
program. In a container the agent searches for it when it starts: the Python that the image is
declared with, an active virtual environment, and the Pythons on its PATH.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import math
import os
import posixpath
import pwd
import re
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from kubetorch.config.environment import (
    MEMBERS_FILE,
    METRICS_PIPE,
    ORIGIN,
    PREFIX_USERNAME,
    PUBLICATIONS_FOLDER,
    USERNAME,
)
from kubetorch.errors import PodContainerError, SpecError
from kubetorch.lib import deadlines, process_watch, processes, runtime
from kubetorch.pod import rank_environment
from kubetorch.pod.apps import stacks
from kubetorch.pod.apps.process import AppRun
from kubetorch.pod.tuning import LIMITS, TIMING
from kubetorch.pod.user_process import protocol
from kubetorch.pod.user_process.loader import CHILDREN_FOLDER
from kubetorch.pod.worker_process.worker import WorkerSpec
from kubetorch.specs import quantity
from kubetorch.specs.callable import APP_PORT
from kubetorch.specs.compute import MOST_WAITING, ComputeSpec, thaw
from kubetorch.specs.dockerfile import VARIABLE, variable_value
from kubetorch.specs.image import EnvStep
from kubetorch.specs.logging import LEVELS
from kubetorch.specs.workload import RuntimeSpec, WorkloadSpec
from kubetorch.wire import debugger, messages
from kubetorch.wire.podenv import BACKEND, HOME, INHERITED, PodEnv

#: Prefix of variables for the agent itself.
INTERNAL = "KT_POD_"

#: In the folder of the pod: the addresses of the pods of its service, for `kt.distributed`.
MEMBERS = "members"

#: In the folder of the pod: the named pipe for values of `kt.metric`.
METRICS = "metrics"

#: In the folder of the pod: the socket that programs dial that stop for a debugger.
DEBUGGER = "debugger"
#: In the folder of the pod: what its programs publish of the data store.
PUBLICATIONS = "publications"

#: In the folder of the pod: the stacks of a process of its app.
STACKS = "stacks"

#: In the folder of the pod: values of calls that cannot travel.
VALUES = "values"

#: Prefix of variables that were put aside when the agent started: they are meant for the image's
#: own programs.
SAVED_PREFIX = f"{INTERNAL}KEPT_"

#: The name of a user without a name.
USER_NAME = "kubetorch"

# The form in parentheses is Kubernetes', and so is `$$(NAME)` for the text itself.
_VARIABLE = re.compile(
    rf"\$(?:\((?P<reference>[\w.-]+)\)|(?P<text>\$\([\w.-]+\)))|{VARIABLE}", re.ASCII
)

_log = logging.getLogger(__name__)


class Prepared(msgspec.Struct, frozen=True):
    """The interpreter, variables and `sys.path` of the workers of a generation."""

    python: str
    env: dict[str, str]
    sys_path: tuple[str, ...] = ()


def debugger_socket(root: Path) -> Path:
    """The path of the socket for debuggers: in the folder of the pod, if that is short enough."""
    path = root / DEBUGGER
    if len(os.fsencode(path)) <= LIMITS.socket_path_bytes:
        return path
    name = hashlib.sha256(os.fsencode(root)).hexdigest()[:16]
    return Path(tempfile.gettempdir(), f"kt-{os.getuid()}-{name}", DEBUGGER)


def container_environ(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment of a container, with the variables that the runtime has put aside."""
    saved_variables = {
        k.removeprefix(SAVED_PREFIX): v for k, v in environ.items() if k.startswith(SAVED_PREFIX)
    }
    container_variables = {
        **{k: v for k, v in environ.items() if not k.startswith(SAVED_PREFIX)},
        **saved_variables,
    }
    if runtime.is_used():  # so that every Python finds this package
        paths = _entries(container_variables.get("PYTHONPATH", ""))
        container_variables["PYTHONPATH"] = os.pathsep.join(_unique([*paths, runtime.SITE]))
    return container_variables


def user_environ(environ: Mapping[str, str], root: Path) -> dict[str, str]:
    """The environment of a container whose image may not know the user whom it runs as.

    A user who cannot write to the home gets the mounted home, or one in the folder of the pod.
    A user without a name gets a name, since programs ask for it.
    """
    home = environ.get("HOME", "/")
    pod_home = root / "home"
    if not os.access(home, os.W_OK | os.X_OK):
        home = HOME
    if not os.access(home, os.W_OK | os.X_OK):
        pod_home.mkdir(exist_ok=True)
        home = str(pod_home)
    try:
        pwd.getpwuid(os.geteuid())
    except KeyError:
        environ = {"USER": USER_NAME, "LOGNAME": USER_NAME, **environ}
    return {**environ, "HOME": home}


def denials(spec: WorkloadSpec, pod: PodEnv) -> list[str]:
    """The paths of a pod that the user whom it runs as cannot use, one sentence each."""
    needed_paths = [(pod.working_dir, os.W_OK, "write to", "the working directory")]
    for volume in spec.compute.volumes:
        if not volume.is_read_only:
            needed_paths.append(
                (volume.mount_path, os.W_OK, "write to", f"the volume {volume.name!r}")
            )
    for secret in spec.compute.secrets:
        if secret.mount_type == "volume":
            path = re.sub("^~(?=/|$)", HOME, secret.path or "~")
            needed_paths.append((path, os.R_OK | os.X_OK, "read", f"the secret {secret.name!r}"))
    return [
        f"there is no {path}, {description}"
        if _is_missing(path)
        else f"user {os.geteuid()}, as whom the pod runs, cannot {verb} {path}, {description}"
        for path, mode, verb, description in needed_paths
        if not os.access(path, mode)
    ]


def _is_missing(path: str) -> bool:
    try:
        Path(path).stat()
    except OSError as error:
        return isinstance(error, FileNotFoundError)
    return False


def program_environ(environ: Mapping[str, str], spec: WorkloadSpec) -> Mapping[str, str]:
    """The environment of a pod with its deployer's variables of machine and user.

    Where the pod has a variable from its manifest, a secret or its devices, that value stays.
    """
    if not spec.runtime.environ:
        return environ
    inherited = environ.get(INHERITED, "").split(",")
    pod_variables = {name: value for name, value in environ.items() if name not in inherited}
    return {**dict(spec.runtime.environ), **pod_variables}


def worker_environ(
    environ: Mapping[str, str], pod: PodEnv, spec: WorkloadSpec, image: Iterable[EnvStep] = ()
) -> dict[str, str]:
    """The environment of a worker.

    The agent's own variables, then the image's, then those of the compute and its secrets, as in
    Kubernetes; and variables that name the pod: so a program in a pod can deploy and call with the
    pod's own backend, namespace and credentials, and its services belong to the pod's deployer and
    project.
    """
    compute = spec.compute
    pod_variables = {
        "POD_NAME": pod.pod,
        "POD_NAMESPACE": pod.namespace,
        "POD_IP": environ.get("POD_IP", pod.host),
        "HOSTNAME": pod.pod,
        "KT_SERVICE_NAME": pod.workload,
        "KT_SERVICE": pod.workload,
        "KT_NAMESPACE": pod.namespace,
        "KT_LOG_LEVEL": dict(compute.env_vars).get("KT_LOG_LEVEL", compute.logging.level),
        MEMBERS_FILE: str(Path(pod.root, MEMBERS)),
        METRICS_PIPE: str(Path(pod.root, METRICS)),
        debugger.SOCKET: str(debugger_socket(Path(pod.root))),
        PUBLICATIONS_FOLDER: str(Path(pod.root, PUBLICATIONS)),
        BACKEND: pod.backend,
    }
    if spec.origin is not None:
        pod_variables[ORIGIN] = messages.encode(spec.origin).decode()
    if pod.controller_url:
        pod_variables["KT_CONTROLLER_URL"] = pod.controller_url
    env = {name: value for name, value in environ.items() if not name.startswith(INTERNAL)}
    if spec.username is not None:
        env.setdefault(USERNAME, spec.username)
        env.setdefault(PREFIX_USERNAME, str(spec.prefix_username).lower())
    secret_names = {name for secret in compute.secrets for name, _ in secret.variables}
    secret_values = {name: env[name] for name in secret_names if name in env}
    image_variables: dict[str, str] = {}
    for step in image:
        image_variables[step.name] = expand(step.value, {**env, **pod_variables, **image_variables})
    env |= {**pod_variables, **image_variables, **secret_values}
    resolved = _manifest_variables(compute) if compute.manifest is not None else ()
    for name, value in compute.env_vars:
        if (name, value) in resolved and name in environ:
            if name in image_variables:
                env[name] = environ[name]
        elif name in image_variables or name not in pod_variables:
            env[name] = expand(value, env)
    return env


def process_count(compute: ComputeSpec, pod: PodEnv, environ: Mapping[str, str]) -> int:
    """Processes of the pod that run calls side by side."""
    if compute.num_proc != "auto":
        return compute.num_proc or 1
    devices = rank_environment.visible_devices(compute, environ)
    if devices:
        return len(devices)
    allowed = processes.quota()
    # A local pod is in the control group of the program that deploys.
    limit = pod.cpu_limit or (math.inf if pod.backend == "local" else allowed)
    if math.isinf(limit):
        machine = min(len(processes.usable()), allowed)
        limit = quantity.cores(compute.cpus) if compute.cpus else machine
    return max(1, int(limit))


def _manifest_variables(compute: ComputeSpec) -> list[tuple[str, str]]:
    """The variables of the user's manifest, whose references the pod's starter has replaced."""
    variables: list[tuple[str, str]] = []
    nodes: list[Any] = [thaw(compute.manifest or "{}")]
    while nodes:
        node = nodes.pop()
        if isinstance(node, list):
            nodes += node
        elif isinstance(node, dict):
            nodes += node.values()
            if isinstance(node.get("name"), str) and "valueFrom" not in node:
                variables.append((node["name"], node.get("value") or ""))
    return variables


def interpreter(spec: WorkloadSpec) -> str:
    """The interpreter that runs the user's code; the agent's own where none is named."""
    return spec.runtime.python or sys.executable


def expand(value: str, env: Mapping[str, str]) -> str:
    """Replace the variables in `value`; names that `env` lacks stay.

    Their forms are `$NAME`, `${NAME}`, `${NAME:-word}`, `${NAME:+word}` and `$(NAME)`.
    """

    def replaced(match: re.Match[str]) -> str:
        if match["text"] or match["reference"]:
            return match["text"] or env.get(match["reference"], match[0])
        replacement = variable_value(match, env, lambda word: expand(word, env))
        return match[0] if replacement is None else replacement

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
    ref = spec.callable
    level = prepared.env.get("KT_LOG_LEVEL", "").lower()  # an image may set it
    return WorkerSpec(
        generation=generation,
        ref=ref,
        python=prepared.python,
        sys_path=_unique([*_own_path(spec, pod, code), *prepared.sys_path]),
        cwd=pod.working_dir,
        env=prepared.env,
        init_args=init_args,
        preload=spec.runtime.preload,
        umask=spec.runtime.umask,
        log_level=level if level in LEVELS else spec.compute.logging.level,
        modules={"__main__": ref.module} if ref.is_script else {},
        library_path=prepared.sys_path,
        code=None if code is None else str(code),
        values=str(Path(pod.root, VALUES)),
    )


def before_image_steps(environ: Mapping[str, str], pod: PodEnv, spec: WorkloadSpec) -> Prepared:
    """The interpreter and variables before the steps of the image have run."""
    env = worker_environ(program_environ(environ, spec), pod, spec)
    return Prepared(interpreter(spec), env, spec.runtime.path)


def shell_environ(
    prepared: Prepared, spec: WorkloadSpec, pod: PodEnv, code: Path | None
) -> dict[str, str]:
    """The environment of a shell, in which the interpreter and the project are found."""
    variables = dict(prepared.env)
    programs = os.path.dirname(prepared.python)  # noqa: PTH120  # text is what a PATH is made of
    variables["PATH"] = os.pathsep.join(
        _unique([programs, *_entries(variables.get("PATH", os.defpath))])
    )
    python_path = _entries(variables.get("PYTHONPATH", ""))
    path = _unique([*_own_path(spec, pod, code), *python_path, *prepared.sys_path])
    variables["PYTHONPATH"] = os.pathsep.join(path)
    variables.setdefault("PYTHONUNBUFFERED", "1")
    return variables


def app_run(
    generation: int,
    spec: WorkloadSpec,
    *,
    pod: PodEnv,
    prepared: Prepared,
    code: Path | None,
    own_port: int | None = None,
) -> AppRun:
    """The run of an app of this generation.

    The app's shell finds the interpreter and its programs first. Each Python that the app starts
    finds the project, writes whole lines at once, and deploys neither the app nor the apps that
    deployed it. Without an `own_port` the app listens on the declared port.
    """
    ref, app = spec.callable, spec.callable.app
    if app is None:
        raise SpecError(f"{spec.name} is no app")
    env = shell_environ(prepared, spec, pod, code)
    env.setdefault(*protocol.BREAKPOINT)
    stacks_file = str(Path(pod.root, STACKS))
    if protocol.STACKS is not None and sys.platform == "linux":
        env[stacks.VARIABLE] = f"{int(protocol.STACKS)}:{stacks_file}"
        env["PYTHONPATH"] = os.pathsep.join((CHILDREN_FOLDER, *_entries(env["PYTHONPATH"])))
    port, command = app.port, app.command
    if port is not None:
        if own_port is not None or "PORT" not in dict(spec.compute.env_vars):
            port = own_port or port
            env["PORT"] = str(port)  # also where the image has another one
        env["KT_APP_PORT"] = str(port)
        command = APP_PORT.sub(str(port), command)
    if app.health_check is not None:
        env["KT_APP_HEALTHCHECK"] = app.health_check
    if code is not None and ref.source_file is not None:
        env["KT_DEPLOYED_FILE"] = str(code / ref.source_file)
        env["KT_DEPLOYED_APPS"] = ",".join((spec.name, *app.within))
    folder = Path(pod.working_dir)
    if app.folder is not None:
        folder = (folder if code is None else code) / app.folder
    return AppRun(
        generation=generation,
        app=replace(app, command=command),
        port=port,
        folder=str(folder),
        env=env,
        stacks_file=stacks_file,
        concurrency=spec.compute.concurrency_of(1),
        max_queue=spec.compute.max_queue or MOST_WAITING,
        is_balanced=spec.compute.is_balanced,
    )


def health_timeout(spec: WorkloadSpec) -> float:
    """Seconds that an app has to answer: fewer than the deploy, whose error can then say why."""
    limit = float(spec.compute.launch_timeout)
    return limit - min(TIMING.app_launch_margin_seconds, limit / 5)


def _own_path(spec: WorkloadSpec, pod: PodEnv, code: Path | None) -> list[str]:
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


#: The oldest Python that workers run on.
OLDEST_PYTHON = (3, 10)
#: File names of interpreters.
INTERPRETER_NAMES = (
    "python3",
    "python",
    *(f"python3.{minor}" for minor in range(16, OLDEST_PYTHON[1] - 1, -1)),
)
#: Folders of the interpreter in images whose PATH lacks it.
INTERPRETER_FOLDERS = ("/usr/local/bin", "/opt/venv/bin", "/opt/conda/bin", "/usr/bin", "/bin")

_PROBE = """
import json, os, site, sys
folders = ([site.getusersitepackages()] if site.ENABLE_USER_SITE else []) + site.getsitepackages()
found = [sys.executable, list(sys.version_info[:3]), [f for f in folders if os.path.isdir(f)]]
print("kubetorch " + json.dumps(found))
"""


_Report = tuple[str | None, tuple[int, ...], tuple[str, ...]]


class Interpreter(msgspec.Struct, frozen=True):
    path: str
    version: tuple[int, ...]
    site: tuple[str, ...]


class Interpreters:
    """Finds the interpreter of a container, once for each path that images declare."""

    def __init__(
        self, pod: PodEnv, environ: Mapping[str, str], agent_python: str | None = None
    ) -> None:
        self._pod = pod
        self._environ = environ
        self._agent_python = agent_python
        self._searches: dict[str, asyncio.Task[Interpreter | list[str]]] = {}

    def start(self) -> None:
        """Begin to search, for images that declare no path."""
        if self._pod.backend != "local":
            self._search("")

    async def choose(self, spec: WorkloadSpec) -> WorkloadSpec:
        """The workload with the interpreter that it runs on in this pod."""
        if self._pod.backend == "local":
            return spec
        image = spec.compute.image
        declared_path = (image.python_path if image is not None else None) or ""
        try:
            search_result = await asyncio.shield(self._search(declared_path))
        except Exception:
            self._searches.pop(declared_path, None)  # the next deploy searches again
            raise
        if isinstance(search_result, Interpreter):
            chosen_runtime = RuntimeSpec(
                python=search_result.path,
                version=".".join(map(str, search_result.version)),
                preload=spec.runtime.preload,
                site=search_result.site,
                package_managers=True,
            )
            return replace(spec, runtime=chosen_runtime)
        self._searches.pop(declared_path, None)  # a command in the running pod may install one
        name = (image.image_id if image is not None else None) or f"of pod {self._pod.pod}"
        oldest = ".".join(map(str, OLDEST_PYTHON))
        where = f" at {declared_path}, where it is declared to be" if declared_path else ""
        raise PodContainerError(
            f"the image {name} has no Python {oldest} or newer{where}; found: "
            f"{', '.join(search_result) or 'none'}",
            hint=f"use an image with Python {oldest} or newer on its PATH, or say where it is with "
            "kt.Image(python_path=...)",
        )

    def _search(self, declared_path: str) -> asyncio.Task[Interpreter | list[str]]:
        if declared_path not in self._searches:
            loop = asyncio.get_running_loop()
            self._searches[declared_path] = loop.create_task(self._find(declared_path))
        return self._searches[declared_path]

    async def _find(self, declared_path: str) -> Interpreter | list[str]:
        """An interpreter that is new enough; else the rejected ones, with the reasons."""
        rejections: list[str] = []
        try:
            async with deadlines.timeout(TIMING.interpreter_search_seconds):
                for path in candidates(declared_path, self._environ, self._agent_python):
                    candidate = await _probe(path, self._environ)
                    if candidate is not None and candidate.version >= OLDEST_PYTHON:
                        return candidate
                    problem = "does not run"
                    if candidate is not None:
                        problem = ".".join(map(str, candidate.version))
                    rejections.append(f"{path} ({problem})")
        except TimeoutError:
            rejections.append(f"nothing more within {TIMING.interpreter_search_seconds:g} s")
        return rejections


def candidates(
    declared_path: str, environ: Mapping[str, str], agent_python: str | None
) -> Iterator[str]:
    """The interpreters to try, the best first, each once."""
    if declared_path:
        paths = iter(
            [declared_path]
            if os.path.isfile(declared_path)  # noqa: PTH113  # it may be in a closed folder
            else [f"{declared_path}/{n}" for n in INTERPRETER_NAMES]
        )
    else:
        paths = _usual_paths(environ, agent_python)
    identities = set()
    for path in paths:
        if not (os.access(path, os.X_OK) and Path(path).is_file()):
            continue
        folder = Path(path).parent
        is_venv = (folder.parent / "pyvenv.cfg").exists()
        # The program of a virtual environment is a link to the interpreter that made it.
        identity = str(folder) if is_venv else os.path.realpath(path)
        if identity not in identities:
            identities.add(identity)
            yield path


def _usual_paths(environ: Mapping[str, str], agent_python: str | None) -> Iterator[str]:
    if agent_python is not None:
        yield agent_python
    if environ.get("VIRTUAL_ENV"):
        yield f"{environ['VIRTUAL_ENV']}/bin/python"
    folders = [path_entry for path_entry in environ.get("PATH", "").split(os.pathsep) if path_entry]
    for folder in dict.fromkeys((*folders, *INTERPRETER_FOLDERS)):
        for name in INTERPRETER_NAMES:
            yield f"{folder}/{name}"


async def _probe(path: str, environ: Mapping[str, str]) -> Interpreter | None:
    """The version and libraries that an interpreter reports; `None` if it does not run."""
    lines: list[str] = []
    command = (path, "-c", _PROBE)
    with contextlib.suppress(OSError, TimeoutError):
        async with deadlines.timeout(TIMING.interpreter_probe_seconds):
            await process_watch.run(command, environ, folder="/", on_line=lines.append)
    for line in lines:
        word, _, report = line.partition(" ")
        if word == "kubetorch":
            with contextlib.suppress(msgspec.MsgspecError):  # a program's own line
                executable, version, site = msgspec.json.decode(report, type=_Report)
                return Interpreter(executable or path, version, site)
        _log.info("interpreter path=%s says=%s", path, line)
    return None
