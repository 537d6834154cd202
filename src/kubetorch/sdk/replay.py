"""`kt replay`: runs a call that has left a record again, on this machine or in a pod.

    record ── arguments, still encoded ──────────────┐
      └── spec ── trees ── folder ── service here ───┴──► call

The arguments are sent as they were, and are not decoded here, so classes of the user need not exist
here. On this machine the call runs on the local backend, whatever is configured, in a
service of its own, which is deleted afterwards. The service has no `Fn` or `Cls`: a handle of
spawned calls, which those need, leads here.
"""

from __future__ import annotations

import ast
import contextlib
import json
import logging
import os
import secrets
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from kubetorch.config.settings import config
from kubetorch.datastore import trees
from kubetorch.errors import (
    KubetorchError,
    SerializationError,
    ServiceNotFoundError,
    SpecError,
    UnauthorizedError,
)
from kubetorch.lib import terminal
from kubetorch.sdk import backend
from kubetorch.sdk.calls import blocking, target
from kubetorch.sdk.calls.attempts import Invocation
from kubetorch.sdk.calls.options import CallOptions
from kubetorch.sdk.deploys import deploy
from kubetorch.sdk.deploys.source import Placement, Source, find_project, working_directory
from kubetorch.sdk.transport.session import Session
from kubetorch.specs.callable import CallableRef
from kubetorch.specs.compute import ComputeSpec
from kubetorch.specs.image import CopyStep
from kubetorch.specs.workload import WorkloadSpec
from kubetorch.wire import calls, codecs, debugger, values
from kubetorch.wire.calls import Record
from kubetorch.wire.codecs import Segment
from kubetorch.wire.messages import RecordView, WorkloadView

log = logging.getLogger(__name__)

#: Time after which the service of a replay is deleted that was killed, and could not do so.
_TTL = "10m"

#: The code that a replay on this machine runs: that of the call, or that of the working directory.
Code = Literal["recorded", "here"]


class _RecordedSource(Source):
    """The callable of a record, in a folder of this machine."""

    def __init__(self, ref: CallableRef, folder: Path) -> None:
        self._ref = replace(ref, record="none", remote_dir=None)
        pointers = (str(folder / ref.root), ref.module, ref.qualname)
        super().__init__(ref.kind, None, Placement(sync_dir=str(folder)), pointers)

    def with_placement(self, changes: Placement) -> Source:
        del changes  # `.to()` has none
        return self

    def ref(self) -> CallableRef:
        local_ref = super().ref()
        return replace(
            self._ref,
            module=local_ref.module,
            project=local_ref.project,
            root=local_ref.root,
            source_file=local_ref.source_file,
        )


@dataclass(frozen=True)
class Replay:
    """A call with a record."""

    session: Session
    view: RecordView
    record: Record

    @classmethod
    def of(cls, call_id: str, session: Session) -> Replay:
        """The replay of a call.

        Raises:
            ResultExpiredError: The call has left no record, or its record is no longer kept.
        """
        view = session.ask(lambda controller: controller.get_record(call_id))
        data = session.ask(lambda controller: controller.get_arguments(call_id))
        return cls(session, view, calls.unpack_record(data))

    @property
    def is_own(self) -> bool:
        """True if the code of the call was deployed by this user."""
        return self.session.is_local or self.view.is_own

    def missing_parts(self, *, in_pod: bool) -> list[str]:
        """The parts of the call that a replay lacks, in words."""
        spec, compute = self.view.spec, self.view.spec.compute
        parts = []
        if spec.callable.kind == "cls":
            parts.append(f"the state of {spec.callable.name} before the call")
        parts.append("what services outside answered, files, random numbers and the time")
        if in_pod:
            return parts
        absent = [name for name in self.view.variables if name not in os.environ]
        if absent:
            parts.append(f"variables that are not set here: {', '.join(absent)}")
        if compute.secrets:
            parts.append(f"secrets: {', '.join(secret.name for secret in compute.secrets)}")
        if compute.volumes:
            parts.append(f"volumes: {', '.join(volume.name for volume in compute.volumes)}")
        if compute.gpus:
            parts.append(f"{compute.gpus} GPUs")
        sources = [step.source for step in _missing_copies(compute)]
        if sources:
            parts.append(f"copied files that are not here: {', '.join(sources)}")
        return parts

    def check(self, *, in_pod: bool, trust: bool, has_terminal: bool) -> None:
        """Refuse a replay that this user may not make, or for which the arguments are missing.

        Raises:
            UnauthorizedError: The code, or the pickle of the arguments, may be of another user, or
                the record is of another call.
            SerializationError: The arguments were not kept.
        """
        shown, recorded = self.view.call.callable, self.view.spec.callable.name
        if self.record.method is not None:
            recorded = f"{recorded}.{self.record.method}"
        if shown != recorded:
            raise UnauthorizedError(
                f"{self.view.call.id} is listed as a call of {shown}; its record calls {recorded}",
                hint="a pod of the service has made that up: the call is not replayed",
            )
        risk = self._risk()
        if risk and not in_pod and not (trust and has_terminal):
            terminal = "" if has_terminal else ", at a terminal"
            raise UnauthorizedError(
                f"{self.view.call.id} {risk}",
                hint=f"--in-pod runs it in a pod of the service; --trust runs it here{terminal}",
            )
        if self.record.omission:
            raise SerializationError(
                f"the arguments of {self.view.call.id} were not kept: {self.record.omission}",
                hint="pass the name or path of large data, and calls can be replayed",
            )

    def _risk(self) -> str:
        """The code of others that a replay on this machine would run, in words; empty if none."""
        if not self.is_own:
            creator = self.view.creator
            who = "another user" if creator is None else str(creator)
            return (
                f"is a call of {who}: a replay would run code of {who} on this machine, with "
                "arguments that you do not know"
            )
        if self.record.codec == "pickle" and not self.session.is_local:
            return (
                "has pickled arguments, from a user who may call the service: unpickling runs "
                "code of that user on this machine"
            )
        return ""

    @contextlib.contextmanager
    def recorded_call(
        self,
        *,
        in_pod: bool,
        code: Code,
        changes: Mapping[str, Any],
        post_mortem: bool | None = None,
        is_trusted: bool = False,
        stops: bool = True,
        before_start: Callable[[], None] = lambda: None,
    ) -> Iterator[_RecordedCall]:
        """The call, to be made again any number of times; see `CallOptions.post_mortem`.

        A pod of a cluster that is not trusted does not answer with a pickle. Unless it `stops`, a
        `breakpoint()` on this machine lets the call go on. `before_start` is called once the
        options are known to be right.
        """
        if in_pod:
            spec = self.view.spec
            view = self.session.get_workload(spec.namespace, spec.name)
            options = CallOptions(post_mortem=post_mortem)
            takes_pickle = is_trusted or self.session.is_local
            arguments = self._arguments(changes, None)
            before_start()
            yield _RecordedCall(self, self.session, view, options, arguments, takes_pickle)
            return
        with contextlib.ExitStack() as stack:
            folder = _find_project(self.view) if code == "here" else self._fetch_code(stack)
            source = _RecordedSource(self.view.spec.callable, folder)
            arguments = self._arguments(changes, Path(source.file()[0] or ""))
            before_start()
            session, view = self._deploy(source, stack, stops=stops)
            options = CallOptions(post_mortem=post_mortem)
            yield _RecordedCall(self, session, view, options, arguments)

    def _fetch_code(self, stack: contextlib.ExitStack) -> Path:
        """Bring the code of the generation that ran the call into a folder."""
        spec = self.view.spec
        if spec.tree is None:
            raise SpecError(
                f"the code of {spec.name} was not sent by a deploy: its image has it",
                hint="--in-pod runs the call in a pod of the service; --code here runs the project "
                "of the working directory",
            )
        base = stack.enter_context(tempfile.TemporaryDirectory(prefix="kt-replay-"))
        folder = Path(base, Path(spec.callable.project or "project").name)
        folder.mkdir()
        read = self.session.ask(
            lambda controller: controller.get_blob(spec.tree or "", spec.namespace)
        )
        tree = trees.decode(read)
        content = self.session.ask(
            lambda controller: controller.get_blobs(tree.digests(), spec.namespace)
        )
        trees.materialise(
            str(folder), tree, lambda digest: (len(content[digest]), [content[digest]]), {}, []
        )
        return folder

    def _deploy(
        self, source: Source, stack: contextlib.ExitStack, *, stops: bool
    ) -> tuple[Session, WorkloadView]:
        """Make a service of this machine that runs the code; also its session."""
        spec, init_args = self.view.spec, None
        if spec.init_args is not None:
            stored = self.session.ask(
                lambda controller: controller.get_blob(spec.init_args or "", spec.namespace)
            )
            init_args = codecs.decode_arguments(json.loads(stored), "__main__")
        stack.enter_context(backend.on_this_machine())
        session = backend.session()
        replay_spec = WorkloadSpec(
            namespace=config.namespace,
            # Replays of one call may run at one time.
            name=f"replay-{self.view.call.id[:8]}-{secrets.token_hex(2)}",
            callable=source.ref(),
            compute=_local_spec(spec.compute, self.view.variables, stops=stops),
            username=config.username,
            prefix_username=config.prefix_username,
        )
        stack.callback(_delete, session, replay_spec)
        order = deploy.Order(
            source, replay_spec, init_args, stream_logs=False, replace=True, is_named=True
        )
        view = deploy.begin(order, session).run()
        backend.remember(session, view)
        return session, view

    def _arguments(self, changes: Mapping[str, Any], file: Path | None) -> list[memoryview]:
        """The segments of the arguments, with changes."""
        record = self.record
        segments = codecs.split(memoryview(record.arguments), record.sizes)
        if not changes:
            return segments
        if record.codec == "pickle":
            raise SerializationError(
                f"the arguments of {self.view.call.id} are pickled, and cannot be changed",
                hint="leave --set out, or call the function with its default serialization",
            )
        text = bytes(segments[0])
        head = values.HEAD if text.startswith(values.HEAD) else b""
        document = json.loads(text[len(head) :])
        parameters = _parameters(file, self.view.spec.callable, record.method)
        if parameters is None:
            _check_names(document, changes, self.view.call.callable, file)
        _change(document, changes, parameters, self.view.call.callable)
        try:
            changed_text = json.dumps(document, separators=(",", ":")).encode()
        except (TypeError, ValueError) as error:
            raise SerializationError(
                f"the changes of {', '.join(changes)} are no JSON: {error}",
                hint="pass numbers, texts, lists and mappings; other values stay as they were",
            ) from error
        return [memoryview(head + changed_text), *segments[1:]]


class _RecordedCall:
    """A call of a service with the arguments of the record."""

    def __init__(
        self,
        replayed: Replay,
        session: Session,
        view: WorkloadView,
        options: CallOptions,
        arguments: Sequence[Segment],
        takes_pickle: bool = True,
    ) -> None:
        self._codec = replayed.record.codec
        self._target = target.describe(
            view, replayed.record.method, None, view.spec.compute.logging
        )
        self._route = backend.route(session, view.spec.namespace, view.spec.name)
        self._options = options
        self._arguments = arguments
        self._takes_pickle = takes_pickle

    def __call__(self) -> Any:  # noqa: ANN401  # the user's own value
        """Make the call; a generator runs to its end."""
        invocation = Invocation(self._target, self._route, self._options, (), {})
        invocation.replace_arguments(self._codec, self._arguments)
        invocation.takes_pickle = self._takes_pickle
        done = blocking.run(invocation)
        if done.error is not None:
            raise done.error
        return list(done.value) if isinstance(done.value, Iterator) else done.value


def replay(
    call_id: str,
    session: Session,
    *,
    changes: Mapping[str, Any],
    code: Code = "recorded",
    in_pod: bool = False,
    trust: bool = False,
) -> Any:  # noqa: ANN401  # the user's own value
    """Make a call again; see `CallHandle.replay`."""
    if code not in ("recorded", "here"):
        raise SpecError(f"code is {code!r}; it must be 'recorded' or 'here'")
    replayed = Replay.of(call_id, session)
    has_terminal = terminal.is_terminal(sys.stdin)
    replayed.check(in_pod=in_pod, trust=trust, has_terminal=has_terminal)
    with replayed.recorded_call(
        in_pod=in_pod, code=code, changes=changes, is_trusted=trust and has_terminal
    ) as call:
        return call()


def _delete(session: Session, spec: WorkloadSpec) -> None:
    try:
        backend.delete(session, spec.namespace, spec.name)
    except ServiceNotFoundError:  # the deploy has failed
        return
    except KubetorchError as error:
        log.warning("%s could not be torn down: %s", spec.name, error)


def _find_project(view: RecordView) -> Path:
    """The project of the working directory, which has the file of the call."""
    cwd = working_directory()
    folder, file = find_project(cwd) or cwd, view.spec.callable.source_file
    if file is None or not (folder / file).is_file():
        raise SpecError(
            f"{folder} does not have {file or view.spec.callable.module}, the file of "
            f"{view.call.callable}",
            hint="run it in the project of the call, or leave --code out",
        )
    return folder


def _missing_copies(compute: ComputeSpec) -> list[CopyStep]:
    """The steps that copy what this machine does not have, or this user may not see."""
    steps = () if compute.image is None else compute.image.steps
    copies = [step for step in steps if isinstance(step, CopyStep)]
    return [step for step in copies if not os.path.exists(step.source)]  # noqa: PTH110  # never raises


def _local_spec(compute: ComputeSpec, variables: Sequence[str], *, stops: bool) -> ComputeSpec:
    """Pods of this machine that run the code as those of the service."""
    image = compute.image
    if image is not None:
        missing = _missing_copies(compute)
        image = replace(image, steps=tuple(step for step in image.steps if step not in missing))
    values = {name: os.environ[name] for name in variables if name in os.environ}
    if not stops:
        values[debugger.WAIT] = "0"
    return ComputeSpec(
        image=image,
        env_vars=tuple(values.items()),
        inactivity_ttl=_TTL,
        allowed_serialization=compute.allowed_serialization,
        distribution=compute.distribution,
        num_proc=compute.num_proc,
        launch_timeout=compute.launch_timeout,
    )


# ---------------------------------------------------------------------- changes of the arguments


def _parameters(file: Path | None, ref: CallableRef, method: str | None) -> ast.arguments | None:
    """The parameters of the callable, from its source; `None` if that does not define them."""
    if file is None:
        return None
    try:
        body = ast.parse(file.read_text(encoding="utf-8")).body
    except (OSError, SyntaxError, ValueError):
        return None
    definition: ast.AST | None = None
    for name in [*ref.qualname.split("."), *([method or "__call__"] if ref.kind == "cls" else [])]:
        # The last definition counts: those before may be of `@overload`.
        namesakes = [node for node in body if getattr(node, "name", None) == name]
        definition = namesakes[-1] if namesakes else None
        body = getattr(definition, "body", [])
    if not isinstance(definition, (ast.FunctionDef, ast.AsyncFunctionDef)):
        return None
    parameters, kinds = (
        definition.args,
        {getattr(item, "id", "") for item in definition.decorator_list},
    )
    if ref.kind == "cls" and "staticmethod" not in kinds:
        positional = [*parameters.posonlyargs, *parameters.args][1:]
        return ast.arguments(
            [], positional, parameters.vararg, parameters.kwonlyargs, [], parameters.kwarg, []
        )
    return parameters


def _check_names(
    document: Any,  # noqa: ANN401  # of JSON
    changes: Mapping[str, Any],
    name: str,
    file: Path | None,
) -> None:
    """Refuse changes of arguments whose positions are unknown, as the parameters are."""
    unknown = [key for key in changes if key not in document["kwargs"]]
    if not document["args"] or not unknown:
        return
    count = f"{len(document['args'])} arguments of {name} that were passed by position"
    if file is None:
        raise SpecError(
            f"{unknown[0]!r} may be one of the {count}, and its code is not there to tell",
            hint="replay the call on this machine: leave --in-pod out",
        )
    raise SpecError(
        f"{unknown[0]!r} may be one of the {count}, and {file.name} does not define it: it may be "
        "inherited, or made by other code",
        hint="change the value in the code, and replay the call with --code here",
    )


def _change(
    document: Any,  # noqa: ANN401  # of JSON
    changes: Mapping[str, Any],
    parameters: ast.arguments | None,
    name: str,
) -> None:
    """Change arguments, by their names, in the JSON of a call."""
    positional, takes_any = [], True
    names: list[str] = []
    if parameters is not None:
        positional = [item.arg for item in (*parameters.posonlyargs, *parameters.args)]
        names = [*positional, *(item.arg for item in parameters.kwonlyargs)]
        takes_any = parameters.kwarg is not None
    for key, value in changes.items():
        if not takes_any and key not in names:
            raise SpecError(
                f"{name} has no parameter {key!r}", hint=f"its parameters are {', '.join(names)}"
            )
        index = positional.index(key) if key in positional else len(document["args"])
        if index < len(document["args"]):
            document["args"][index] = value
        else:
            document["kwargs"][key] = value
