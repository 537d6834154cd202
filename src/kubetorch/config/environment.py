"""Variables of the environment that are no settings of `kt.config`; one function reads each."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from kubetorch.config import values
from kubetorch.errors import ConfigError

#: The variable with the file in which a pod's agent keeps the addresses of its service's pods.
MEMBERS_FILE = "KT_MEMBERS_FILE"
#: The variable with the named pipe in which processes of a pod report values of `kt.metric`.
METRICS_PIPE = "KT_METRICS_PIPE"
PUBLICATIONS_FOLDER = "KT_PUBLICATIONS_FOLDER"
#: The variables with the origin and the user of a pod's code: services that the pod deploys are
#: of the same origin and user.
ORIGIN, USERNAME = "KT_ORIGIN", "KT_USERNAME"
PREFIX_USERNAME = "KT_PREFIX_USERNAME"
#: The folder in which a pod finds the token for its API server.
_SERVICE_ACCOUNT = "/var/run/secrets/kubernetes.io/serviceaccount"
#: The variables in which CI systems name the branch that they build, the most specific first.
_BRANCHES = ("GITHUB_HEAD_REF", "GITHUB_REF_NAME", "CI_COMMIT_REF_NAME", "CIRCLE_BRANCH")
#: The variables that describe the machine and the user, and prefixes of further ones.
_MACHINE = frozenset(
    {
        *("HOME", "LANG", "LANGUAGE", "LOGNAME", "PATH", "SHELL", "TMPDIR", "TZ", "USER"),
        *("HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "http_proxy", "https_proxy", "no_proxy"),
        *("LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "DYLD_FALLBACK_LIBRARY_PATH"),
        *("REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "VIRTUAL_ENV"),
    }
)
_MACHINE_PREFIXES = ("LC_", "XDG_", "SSL_CERT_", "CUDA_", "NVIDIA_", "CONDA_", "PIP_", "UV_")


class RunRequest(NamedTuple):
    """The request of `kt run`.

    Attributes:
        command: The command that the pods run.
        file: The Python file whose `kt.app` names the compute for the command.
        name: The name of the app; `None` for that in the file.
        is_async: Whether `kt run` returns as soon as the app serves.
    """

    command: str
    file: str
    name: str | None
    is_async: bool

    def to_environment(self) -> dict[str, str]:
        """The variables in which `run_request` finds this request."""
        variables = {"KT_RUN": "1", "KT_RUN_CMD": self.command, "KT_RUN_FILE": self.file}
        if self.name is not None:
            variables["KT_RUN_NAME"] = self.name
        if self.is_async:
            variables["KT_RUN_ASYNC"] = "1"
        return variables


def run_request() -> RunRequest | None:
    """The request of `kt run`, in the program that it runs."""
    command, file = os.environ.get("KT_RUN_CMD"), os.environ.get("KT_RUN_FILE")
    if os.environ.get("KT_RUN") != "1" or not command or not file:
        return None
    name = os.environ.get("KT_RUN_NAME") or None
    return RunRequest(command, file, name, os.environ.get("KT_RUN_ASYNC") == "1")


def opens_browser() -> bool:
    """True unless the user wants no browser to be opened."""
    return os.environ.get("KT_NO_BROWSER", "").lower() in ("", "0", "false", "no")


def record() -> str:
    """The calls that leave a record, of a function or class that names none."""
    return os.environ.get("KT_RECORD") or "failed"


def launch_timeout() -> str | None:
    """The `launch_timeout` of a `kt.Compute` that names none."""
    return os.environ.get("KT_LAUNCH_TIMEOUT") or None


def allowed_serialization() -> list[str] | None:
    """The `allowed_serialization` of a `kt.Compute` that names none."""
    text = os.environ.get("KT_ALLOWED_SERIALIZATION")
    if not text:
        return None
    return [name.strip() for name in text.split(",") if name.strip()]


def gpu_anti_affinity() -> bool | None:
    """The `gpu_anti_affinity` of a `kt.Compute` that names none."""
    text = os.environ.get("KT_GPU_ANTI_AFFINITY")
    if not text:
        return None
    try:
        return values.boolean(text)
    except ValueError as error:
        raise ConfigError(f"KT_GPU_ANTI_AFFINITY is {text!r}: {error}") from error


def pretends_gpus() -> bool:
    """True if pods of this machine that ask for GPUs run without GPUs."""
    text = os.environ.get("KT_LOCAL_GPUS")
    if text and text != "pretend":
        raise ConfigError(f"KT_LOCAL_GPUS is {text!r}; it can be 'pretend' alone, or unset")
    return bool(text)


def pod_service() -> str:
    """The service of this pod; empty outside of pods."""
    return os.environ.get("KT_SERVICE_NAME") or ""


def pod_name() -> str:
    """The name of this pod; empty outside of pods."""
    return os.environ.get("POD_NAME") or ""


def pod_ip() -> str:
    """The address of this pod; empty outside of pods."""
    return os.environ.get("POD_IP") or ""


def rsync_filters() -> str | None:
    """The files of a project that travel, in the words of rsync, in place of ignore files."""
    return os.environ.get("KT_RSYNC_FILTERS") or None


def kubeconfig() -> Path:
    """The kubeconfig of this machine: the first of `KUBECONFIG`, or `~/.kube/config`."""
    first = (os.environ.get("KUBECONFIG") or "").partition(":")[0]
    return Path(first or "~/.kube/config").expanduser()


def branch_of_build() -> str | None:
    """The git branch that a CI system builds."""
    return next((os.environ[name] for name in _BRANCHES if os.environ.get(name)), None)


def deployed_file() -> str | None:
    """The file whose import a worker ends early, in a worker and the processes it starts."""
    return os.environ.get("KT_DEPLOYED_FILE")


def deployed_apps() -> tuple[str, ...]:
    """The names of the app whose command this process is of, and of the apps above that app."""
    return tuple(name for name in os.environ.get("KT_DEPLOYED_APPS", "").split(",") if name)


def is_in_pod() -> bool:
    return any(os.environ.get(name) for name in ("KT_SERVICE_NAME", "KT_POD_NAME"))


def contexts_file() -> Path:
    """The file with the kubeconfig contexts that this user has deployed to, one in each line."""
    return Path("~/.kt/contexts").expanduser()


def origin() -> str | None:
    """The origin of the code that a pod runs, as JSON of `kubetorch.specs.workload.Origin`."""
    return os.environ.get(ORIGIN) or None


def session_name() -> str | None:
    """The notebook file that this process is the kernel of, from Jupyter's variable."""
    return os.environ.get("JPY_SESSION_NAME") or None


def replaces() -> bool:
    """True if a deploy may replace another user's service, though its program does not say so."""
    text = os.environ.get("KT_REPLACE", "").lower()
    if text not in ("", "0", "1", "false", "true"):
        raise ConfigError(f"KT_REPLACE is {text!r}; it must be 1 or 0")
    return text in ("1", "true")


def cache_dir() -> Path:
    """The folder for caches: `KT_CACHE_DIR`, or `~/.kt/cache`."""
    return Path(os.environ.get("KT_CACHE_DIR") or "~/.kt/cache").expanduser()


def local_dir() -> Path:
    """The folder of the local service: `KT_LOCAL_DIR`, or `~/.kt/local`."""
    return Path(os.environ.get("KT_LOCAL_DIR") or "~/.kt/local").expanduser()


def own_folders() -> tuple[str, ...]:
    """Folders of Kubetorch on this machine, which never travel with a project."""
    return tuple(map(str, (Path("~/.kt").expanduser(), cache_dir(), local_dir())))


def kubeconfig_list() -> str | None:
    """The kubeconfig files that the user lists, all of `KUBECONFIG`."""
    return os.environ.get("KUBECONFIG") or None


def kubernetes_service() -> tuple[str, int] | None:
    """Host and port of the API server of this pod's cluster; `None` outside of pods."""
    host, port = (os.environ.get(f"KUBERNETES_SERVICE_{part}") for part in ("HOST", "PORT"))
    return (host, int(port)) if host and port and port.isdigit() else None


def pod_token_file() -> Path | None:
    """The token of this pod's service account: the one for Kubetorch, or the API server's."""
    configured_file = os.environ.get("KT_POD_TOKEN_FILE")
    standard_files = "/var/run/secrets/kubetorch.com/token", f"{_SERVICE_ACCOUNT}/token"
    return next(
        (Path(file) for file in (configured_file, *standard_files) if file and Path(file).exists()),
        None,
    )


def controller_url() -> str | None:
    """The URL of the controller for programs in a pod, and for programs that set it."""
    names = "KT_POD_CONTROLLER_URL", "KT_CONTROLLER_URL"
    return next((os.environ[name] for name in names if os.environ.get(name)), None)


def members_file() -> Path | None:
    """The file in which the agent keeps the addresses of the pods of its service, for workers."""
    path = os.environ.get(MEMBERS_FILE)
    return Path(path) if path else None


def metrics_pipe() -> str | None:
    """The named pipe that values of `kt.metric` are written to, in processes of a pod."""
    return os.environ.get(METRICS_PIPE) or None


def publications_folder() -> Path | None:
    """The folder for what this pod publishes of the data store; `None` outside of pods."""
    path = os.environ.get(PUBLICATIONS_FOLDER)
    return Path(path) if path else None


def local_ips() -> list[str]:
    """The addresses that a program outside of pods uses as those of pods."""
    text = os.environ.get("LOCAL_IPS") or ""
    return [address.strip() for address in text.split(",") if address.strip()]


def for_programs() -> dict[str, str]:
    """The whole environment, for programs of the user's configuration, and for proxies."""
    return dict(os.environ)


def of_machine(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables that describe the machine and the user, and not a program."""
    return {
        name: value
        for name, value in environ.items()
        if name in _MACHINE or name.startswith(_MACHINE_PREFIXES)
    }


@contextlib.contextmanager
def variable_set(name: str, value: str) -> Iterator[None]:
    """Set a variable for a library that reads it now, unless the user has set it."""
    was_set = name in os.environ
    os.environ.setdefault(name, value)
    try:
        yield
    finally:
        if not was_set:
            os.environ.pop(name, None)


def variable(name: str) -> str | None:
    """A variable that the user named as the source of a secret; `None` if it is empty."""
    return os.environ.get(name) or None
