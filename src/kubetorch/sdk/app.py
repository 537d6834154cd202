"""`kt.app`: a command as a service, and the paths of the command in a pod."""

from __future__ import annotations

import importlib.util
import os
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, overload

from kubetorch.config import environment
from kubetorch.config.environment import RunRequest
from kubetorch.errors import SpecError
from kubetorch.lib import modules
from kubetorch.sdk import inpod
from kubetorch.sdk.calls import options
from kubetorch.sdk.compute import Compute
from kubetorch.sdk.deploys import source
from kubetorch.sdk.deploys.source import Placement, Pointers, ProjectRef, Source
from kubetorch.sdk.module import Module
from kubetorch.sdk.transport import pod_transport
from kubetorch.specs.callable import AppSpec, CallableRef

if TYPE_CHECKING:
    from kubetorch.sdk.deploys.deploy import Deployment
    from kubetorch.wire.messages import DeployLog

_WORD = re.compile(r"\S+")
#: `package.module:application`, as servers of ASGI and WSGI take it.
_APPLICATION = re.compile(r"([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*):[A-Za-z_][\w.()]*")


def is_command(text: str) -> bool:
    """True if the first argument of `kt.app` is certainly a command, and not a name."""
    return "/" in text or any(character.isspace() for character in text.strip())


def python_file(command: str) -> str | None:
    """The first word of a command that is a Python file, as it stands there."""
    return next((word for word in command.split() if word.endswith(".py")), None)


def local_files(command: str, folder: Path) -> Iterator[Path]:
    for word in command.split():
        application = _APPLICATION.fullmatch(word)
        file = folder / word
        if application is not None:
            file = folder.joinpath(*application[1].split(".")).with_suffix(".py")
        if file.is_file():
            yield Path(os.path.abspath(file))  # noqa: PTH100  # links stay as they are


def run_folder(project_ref: ProjectRef, cwd: Path, workdir: str | None = None) -> str | None:
    """The folder of the project that an app runs in: the working directory, or else the root."""
    if project_ref.folder is None:
        return workdir
    if cwd.is_relative_to(project_ref.folder):
        inner = cwd.relative_to(project_ref.folder).as_posix()
        return "" if inner == "." else inner
    return project_ref.root


def in_pod(command: str, project_ref: ProjectRef, cwd: Path, folder: str | None) -> str:
    """The command with paths of this machine replaced by those of a pod."""
    if project_ref.folder is None:
        return command
    project = project_ref.folder
    if project_ref.only is not None:
        _check_files(command, project_ref, cwd)
    base = "." if folder is None else f"{project_ref.name}/{folder}"
    is_same_folder = folder is not None and cwd == project / folder

    def moved(match: re.Match[str]) -> str:
        word = match[0]
        path = Path(os.path.abspath(cwd / word))  # noqa: PTH100  # links stay as they are
        is_kept = is_same_folder and not word.startswith("/")
        if is_kept or not (path.is_relative_to(project) and path.is_file()):
            return word
        pod_path = PurePosixPath(project_ref.name or "", path.relative_to(project).as_posix())
        relative_path = os.path.relpath(pod_path, base)
        return relative_path if "/" in relative_path else f"./{relative_path}"

    return _WORD.sub(moved, command)


def _check_files(command: str, project_ref: ProjectRef, cwd: Path) -> None:
    assert project_ref.folder is not None
    assert project_ref.only is not None
    for path in local_files(command, cwd):
        if path != project_ref.folder / project_ref.only and path.is_relative_to(
            project_ref.folder
        ):
            raise SpecError(
                f"{path.name} would not be sent: {project_ref.folder} is no project, "
                f"so only {project_ref.only} is",
                hint=f"sync_dir={str(project_ref.folder)!r} sends the folder, "
                "and so does an empty pyproject.toml in it",
            )


class App(Module["App"]):
    """A command that is, or can be, deployed as a service; `kt.app(...)` makes one.

    Args:
        compute: What it runs on; `.to()` says so too.
        cli_command: What a shell in each pod runs.
        pointers: Where the file is that declares it: folder, dotted module, any name.
        name: Name of the service; that of the file if not given.
        run_async: Whether `kt run` leaves it to itself once it serves.
        port: Port that it listens on; without one it is a script, which is done when it ends.
        health_check: Path that answers with 200 once it serves; an open port is enough without one.
        public: Whether requests reach it without a token.

    Raises:
        SpecError: A value is impossible.
    """

    kind = "app"
    #: Pods, times and texts of the lines that its last deploy has shown.
    _shown: tuple[tuple[str | None, float, str], ...] = ()
    _PLAIN = frozenset({"is_decorated", "run_async"})

    def __init__(  # noqa: PLR0913  # the documented constructor
        self,
        compute: Compute | None,
        cli_command: str,
        pointers: Pointers | None,
        name: str | None = None,
        run_async: bool = False,
        port: int | None = None,
        health_check: str | None = None,
        _from_manifest: bool = False,
        *,
        public: bool = False,
    ) -> None:
        command = _command(cli_command)
        self._app = AppSpec(
            command=command,
            port=None if port is None else _port(port),
            health_check=_path(health_check, port),
            public=options.boolean("public", public),
        )
        self.run_async = run_async
        super().__init__(name or _default_name(command, pointers))
        self._is_named = name is not None
        if pointers is not None:
            self._source = Source(self.kind, None, Placement(), pointers)
        if _from_manifest:
            self.service_name = self._known_as = self.name
        if compute is not None:
            self.compute = compute

    @classmethod
    def from_name(
        cls,
        name: str,
        namespace: str | None = None,
        reload_prefixes: Any = None,  # noqa: ANN401  # as for the others
        prefix_username: bool | None = None,
    ) -> App:
        """Not possible: what an app is lies in its program.

        Raises:
            SpecError: Always.
        """
        raise SpecError(
            f"the app {name} cannot be loaded by its name",
            hint=f"kt describe {name} says where it is reached; kt.app(...) deploys it",
        )

    @property
    def command(self) -> str:
        """The command that a shell in each pod runs."""
        return self._app.command

    @property
    def port(self) -> int | None:
        """Port that it listens on."""
        return self._app.port

    @property
    def is_public(self) -> bool:
        """True if requests reach the app without a token."""
        return self._app.public

    def endpoint(self, method_name: str | None = None) -> str:
        """The URL that the app's own paths lie below; see `request_headers`.

        Args:
            method_name: A path of the app.
        """
        base = pod_transport.app_url(self.base_endpoint, self._required_view())
        return f"{base}/{(method_name or '').lstrip('/')}"

    def follow(self, on_line: Callable[[str], None] | None = None) -> int:
        """Show what it writes until it has ended; its exit code.

        Args:
            on_line: Called with each line instead; from several threads if there are several pods.

        Raises:
            ServiceNotFoundError: It was torn down meanwhile.
            ControllerUnavailableError: It cannot be followed any more.
        """
        # A pod, which imports this file for `kt.app` alone, does not need these.
        from kubetorch.sdk import logs, service_logs, tracebacks  # noqa: PLC0415

        show = on_line or logs.Screen().line
        shown = frozenset() if on_line else frozenset(self._shown)
        view, name = self._required_view(), self.service_name
        try:
            return service_logs.follow_app(self._session(), view, show, shown=shown)
        except KeyboardInterrupt as interrupt:
            tracebacks.explain_interrupt(
                interrupt,
                f"The app goes on: kt logs {name} -f shows its lines, kt teardown {name} ends it.",
            )
            raise

    def _note_shown(self, line: DeployLog) -> None:
        self._shown = (*self._shown, (line.pod, line.time, line.text))

    def _deployment(self, get_if_exists: bool = False, is_replacing: bool = False) -> Deployment:
        self._shown = ()
        return super()._deployment(get_if_exists, is_replacing)

    def _has_no_effect(self, compute: Compute | None = None) -> bool:
        """True if its own command, or one that deployed it, runs the file that deploys it."""
        named = None if compute is None else compute.service_name
        names = {self.service_name, named} & set(environment.deployed_apps())
        return (bool(names) and inpod.runs_deployed_file()) or super()._has_no_effect(compute)

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"_app": self._app, "run_async": self.run_async}

    def _source_of(self, ref: CallableRef, placement: Placement) -> Source:
        spec = importlib.util.find_spec(ref.module)
        origin = None if spec is None else modules.origin_of(spec)
        if origin is None:
            raise ModuleNotFoundError(f"No module named {ref.module!r}")
        root, import_path = source.pointers(Path(origin), ref.module)
        return Source(self.kind, None, placement, (str(root), import_path, ref.qualname))

    def _declared_ref(self) -> CallableRef:
        if self._source is None:
            raise SpecError(f"{self.name} has no program", hint="kt.app(...).to(compute)")
        project_ref, cwd = self._source.locate(), source.working_directory()
        compute, folder = self._compute, None
        if compute is not None and compute.distributed_config is not None:
            raise SpecError(
                f"the app {self.name} runs its command once in each pod, and would have no ranks",
                hint="kt.Compute(replicas=...) runs it in several pods; functions have ranks",
            )
        if compute is None or compute.working_dir is None:
            workdir = None if compute is None else compute.image.to_spec().workdir
            folder = run_folder(project_ref, cwd, workdir)
        command = in_pod(self._app.command, project_ref, cwd, folder)
        app = replace(self._app, command=command, folder=folder, within=environment.deployed_apps())
        return replace(self._source.ref(), name=self.service_name, app=app)


def _command(value: object) -> str:
    if isinstance(value, str) and value.strip() and "\0" not in value:
        return value.strip()
    raise SpecError(
        f"the command is {value!r}; it must be a line for a shell",
        hint='for example kt.app("python train.py")',
    )


def _port(value: object) -> int:
    if isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= 65535:
        return value
    if isinstance(value, str) and value.isascii() and value.isdigit():
        return _port(int(value[:9]))
    raise SpecError(
        f"port is {value!r}; it must be a number from 1 to 65535", hint="kt.app(..., port=8000)"
    )


def _path(health_check: object, port: object) -> str | None:
    if health_check is None:
        return None
    if port is None:
        raise SpecError(f"health_check={health_check!r} needs a port", hint="kt.app(..., port=...)")
    if isinstance(health_check, str) and re.fullmatch(r"/[!-~]*", health_check):
        return health_check
    raise SpecError(
        f"health_check is {health_check!r}; it must be a path of the app", hint='such as "/health"'
    )


def _default_name(command: str, pointers: Pointers | None) -> str:
    file = python_file(command)
    if file is not None:
        return Path(file).stem
    return pointers[1].rpartition(".")[2] if pointers is not None else command.split()[0]


class AppFoundError(BaseException):
    """Ends the import of the file that `kt run` runs, at its `kt.app`."""

    def __init__(self, app: App) -> None:
        super().__init__(app.name)
        self.app = app


@overload
def app(
    name_or_command: str,
    /,
    port: int | None = None,
    health_check: str | None = None,
    *,
    public: bool = False,
    name: str | None = None,
    **compute_kwargs: Any,  # noqa: ANN401  # those of kt.Compute
) -> App: ...
@overload
def app(
    *,
    port: int | None = None,
    health_check: str | None = None,
    public: bool = False,
    name: str | None = None,
    **compute_kwargs: Any,  # noqa: ANN401  # as above
) -> App | None: ...
def app(
    name_or_command: str | None = None,
    /,
    port: int | None = None,
    health_check: str | None = None,
    *,
    public: bool = False,
    name: str | None = None,
    **compute_kwargs: Any,
) -> App | None:
    """Make a service of a command.

    `kt.app("uvicorn main:app", port=8000).to(compute)` deploys it. Without a command it says what
    the command of `kt run` runs on, as in `kt.app(cpus=1)`; when the file is run otherwise, that
    has no effect.

    Args:
        name_or_command: The command, if there is a space or a slash in it, or a port is given and
            no `kt run` runs this; else the name of the service.
        port: Port that it listens on; without one it is a script, which is done when it ends.
        health_check: Path that answers with 200 once it serves; an open port is enough without one.
        public: Whether requests reach it without a token.
        name: Name of the service; that of the file if not given.
        **compute_kwargs: What it runs on, as `kt.Compute` takes it.

    Returns:
        The app, or `None` where there is no command.

    Raises:
        SpecError: A value is impossible.
    """
    text = name_or_command
    compute = Compute(**compute_kwargs) if compute_kwargs else None
    frame = sys._getframe(1)
    request = environment.run_request()
    # `kt run` has a command already; otherwise an argument beside a port is the command.
    is_run = request is None and port is not None
    if text is not None and (is_command(text) or is_run):
        return App(
            compute,
            text,
            _pointers(frame.f_globals.get("__file__"), frame.f_globals.get("__name__")),
            name=name,
            port=port,
            health_check=health_check,
            public=public,
        )
    if request is None:
        return None
    if name is not None and text is not None:
        raise SpecError(f"the name of the app is {text!r} and {name!r}; give one")
    chosen = _run_name(text or name, request)
    run_app = App(
        compute or Compute(),
        request.command,
        _pointers(request.file, None),
        name=chosen or Path(request.file).stem,
        run_async=request.is_async,
        port=port,
        health_check=health_check,
        public=public,
    )
    run_app._is_named = chosen is not None
    if frame.f_code.co_name == "<module>" and frame.f_globals.get("__file__") == request.file:
        raise AppFoundError(run_app)
    return run_app


def _run_name(declared: str | None, request: RunRequest) -> str | None:
    if declared is not None and request.name is not None and declared != request.name:
        raise SpecError(
            f"{request.file} names the app {declared!r}, and --name {request.name!r}",
            hint="leave one name out",
        )
    return declared or request.name


def _pointers(file: object, module: object) -> Pointers | None:
    """The file that declares an app; outside of a file, the working directory counts."""
    if isinstance(file, str) and Path(file).is_file() and not file.endswith(".ipynb"):
        name = module if isinstance(module, str) else None
        root, import_path = source.pointers(Path(os.path.abspath(file)), name)  # noqa: PTH100
        return str(root), import_path, "app"
    return str(source.working_directory()), "app", "app"
