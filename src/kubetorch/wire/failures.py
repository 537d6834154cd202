"""Exceptions on the wire: what is sent, the HTTP status, and how the other end rebuilds them.

Standard library only: the worker uses this module too.

A failure is a JSON object: `error_type`, `message`, `traceback`, `pod_name` as every client of the
contract knows them, and what our own client needs to raise the very class: `module`, `qualname`,
`args`, `state`, `members`, `code`, `rank`, `cause`. An exception is never pickled: it is rebuilt
without running its constructor (`kubetorch.wire.rebuilding`), from plain values.

`started` is false when nothing of the call ran, so that it may be sent again.
"""

from __future__ import annotations

import builtins
import importlib
import json
import traceback
from collections.abc import Mapping
from dataclasses import field, fields, replace
from types import TracebackType
from typing import Any

from kubetorch import errors
from kubetorch.lib.records import record
from kubetorch.wire import guarding, rebuilding

#: A message or traceback that is longer is cut in the middle; the pod's log has all of it.
TEXT_LIMIT = 256 * 1024
#: Bytes of JSON: it travels in one frame. Text and traceback alone always fit.
JSON_LIMIT = 4 * 1024 * 1024
#: Causes of causes that are told.
CAUSES_LIMIT = 20
#: Its class makes no text: it is not asked for one on this side either.
_UNSHOWN = "its message cannot be shown:"


@record
class Failure:
    """An exception as plain values.

    Attributes:
        error_type: Name of its class.
        message: Its `str()`.
        traceback: Text of the traceback where it was raised; empty when it has none to show.
        pod_name: Pod that it was raised in.
        rank: Rank of the worker that raised it, in a distributed call.
        module, qualname: Where its class can be imported.
        args: Its `args`, when all of them are plain values, else `None`.
        state: The plain attributes of the exception.
        members: What `args` and `state` do not tell, see `rebuilding.members_of`.
        code: Identity of an error of our own tree.
        started: Whether the call had started.
        cause: What it was raised from.
        status: HTTP status of a response that carries it, see `http_status`.
    """

    error_type: str
    message: str
    traceback: str = ""
    pod_name: str | None = None
    rank: int | None = None
    module: str = "builtins"
    qualname: str = ""
    args: list[Any] | None = None
    state: dict[str, Any] = field(default_factory=dict)
    members: dict[str, Any] = field(default_factory=dict)
    code: str | None = None
    started: bool = True
    cause: dict[str, Any] | None = None
    status: int = 500

    def to_dict(self) -> dict[str, Any]:
        """As a JSON object."""
        return {item.name: getattr(self, item.name) for item in fields(self)}

    def to_json(self) -> bytes:
        """As JSON text, without what is too much: the traceback has the causes, too."""
        most: dict[str, Any] = {"cause": None, "members": {}, "args": None, "state": {}}
        data = b""
        for left_out in ({}, {"cause": None}, most):
            # The state of an error of our own may hold what JSON cannot carry.
            data = guarding.tell(_encode, b"", self.to_dict() | left_out)
            if data and len(data) <= JSON_LIMIT:
                break
        return data


def _encode(told: dict[str, Any]) -> bytes:
    text = json.dumps(told, ensure_ascii=False, default=repr)
    # Lone surrogates in the state of an error of our own become escapes of JSON.
    return text.encode(errors="backslashreplace")


_FIELDS = {item.name for item in fields(Failure)}


def parse(data: Mapping[str, Any]) -> Failure:
    """The failure that a JSON object describes; total: anything is made the best of."""
    known = {key: value for key, value in data.items() if key in _FIELDS}
    if not isinstance(known.get("error_type"), str):
        known["error_type"] = "Exception"
    message = known.get("message")
    if not isinstance(message, str):
        detail = data.get("detail", message)
        known["message"] = (
            detail if isinstance(detail, str) else json.dumps(dict(data), default=repr)
        )
    if not isinstance(known.get("traceback", ""), str):
        known["traceback"] = ""
    for name in ("state", "members"):
        if not isinstance(known.get(name, {}), dict):
            known[name] = {}
    for name, kind in (("args", list), ("cause", dict), ("code", str), ("rank", int)):
        if not isinstance(known.get(name), (kind, type(None))):
            known[name] = None
    for name in ("module", "qualname"):
        if not isinstance(known.get(name, ""), str):
            known[name] = ""
    status = known.get("status")
    if type(status) is not int or not 400 <= status < 600:
        known["status"] = 500
    return Failure(**known)


def parse_json(body: bytes | memoryview) -> Failure:
    """The failure in a response body; a body that is not JSON becomes the message."""
    text = bytes(body).decode(errors="replace")
    try:
        data = json.loads(text)
    except ValueError:
        data = None
    if isinstance(data, dict):
        return parse(data)
    return Failure("Exception", text.strip() or "an empty answer")


# ---------------------------------------------------------------------- exception → failure


def describe(
    error: BaseException,
    *,
    pod_name: str | None = None,
    rank: int | None = None,
    started: bool = True,
    skip: str | None = None,
    above: tuple[BaseException, ...] = (),
) -> Failure:
    """The failure that stands for `error`.

    Total: whatever the exception does when it is looked at, what can be had of it is told.

    Args:
        error: What was raised.
        pod_name: Pod that it was raised in.
        rank: Rank of the worker.
        started: Whether the call had started.
        skip: Leading frames of the traceback that lie in files under this folder are left out:
            the user has no use for our own.
        above: What it is the cause of. One among them is no cause again (`raise error from error`).
    """
    cls = type(error)
    own = error if guarding.is_a(error, errors.KubetorchError) else None
    cause, above = guarding.cause_of(error), (*above, error)
    return Failure(
        error_type=guarding.name_of(cls),
        message=_cut(_text(error)),
        traceback=_cut(format_traceback(error, skip=skip)),
        pod_name=pod_name,
        rank=rank,
        module=guarding.module_of(cls),
        qualname=guarding.qualname_of(cls),
        args=guarding.tell(lambda: _plain(list(guarding.args_of(error))), None),
        state=_state(error),
        members={}
        if own is not None
        else rebuilding.members_of(error, lambda one: _argument(one, above)),
        code=None if own is None else guarding.tell(lambda: own.code, None),
        started=started,
        cause=None
        if cause is None or guarding.is_a(cause, errors.RemoteTraceback) or _is_again(cause, above)
        else describe(cause, skip=skip, above=above).to_dict(),
        status=http_status(error),
    )


def _argument(error: BaseException, above: tuple[BaseException, ...]) -> dict[str, Any] | None:
    """What stands for an exception among the arguments of another, such as one of a group."""
    if _is_again(error, above):
        return None
    # The traceback of the whole has its own.
    return replace(describe(error, above=above), traceback="", cause=None).to_dict()


def _is_again(cause: BaseException, above: tuple[BaseException, ...]) -> bool:
    return len(above) >= CAUSES_LIMIT or any(cause is one for one in above)


def without_traceback(failure: Failure, error: errors.KubetorchError) -> Failure:
    """The failure of a server's own refusal: how the server came to it says nothing to a caller."""
    return replace(failure, traceback=error.remote_traceback or "")


def format_traceback(error: BaseException, *, skip: str | None = None) -> str:
    """The traceback as Python prints it, without leading frames in files under `skip`."""
    trace = guarding.trace_of(error)
    if guarding.is_a(error, errors.KubetorchError):
        remote = guarding.tell(lambda: error.remote_traceback, None)
        if remote or trace is None:  # never raised: there is nothing to show but its message
            return remote or ""
    shown = _without_leading(trace, skip)
    formatted = guarding.tell(
        lambda: "".join(traceback.format_exception(type(error), error, shown)), ""
    )
    if formatted:
        return formatted
    # The user's __cause__ or __notes__ may raise.
    frames = guarding.tell(lambda: "".join(traceback.format_tb(shown)), "")
    name = guarding.qualname_of(type(error))
    return f"Traceback (most recent call last):\n{frames}{name}: {_text(error)}\n"


def _without_leading(trace: TracebackType | None, skip: str | None) -> TracebackType | None:
    ours = ("<frozen importlib", skip) if skip else ("<frozen importlib",)
    while trace and trace.tb_frame.f_code.co_filename.startswith(ours):
        trace = trace.tb_next
    return trace


def _text(error: BaseException) -> str:
    try:
        return rebuilding.clean(_said(error))
    except BaseException as broken:  # noqa: BLE001  # the user's __str__
        args = guarding.tell(lambda: BaseException.__str__(error), "")
        why = f"({_UNSHOWN} {guarding.shown(broken)})"
        return rebuilding.clean(f"{args} {why}" if args else why)


def _said(error: BaseException) -> str:
    """What `str` says, or as near to what the user wrote as that is."""
    if guarding.is_a(error, errors.KubetorchError):
        return error.message
    # str(KeyError("x")) has quotes that the user's message had not.
    args = guarding.args_of(error)
    makes_text = guarding.tell(lambda: type(error).__str__, None)
    if makes_text is KeyError.__str__ and len(args) == 1:
        return args[0] if type(args[0]) is str else str.__str__(repr(args[0]))
    return str.__str__(str(error))


def _cut(text: str) -> str:
    text = rebuilding.clean(text)
    if len(text) <= TEXT_LIMIT:
        return text
    half = TEXT_LIMIT // 2
    return f"{text[:half]}\n… {len(text) - 2 * half} characters left out …\n{text[-half:]}"


def _plain(value: object) -> Any:  # noqa: ANN401  # of JSON
    return guarding.plain(value, TEXT_LIMIT)


def _state(error: BaseException) -> dict[str, Any]:
    if guarding.is_a(error, errors.KubetorchError):
        return guarding.tell(error.to_state, {})
    nothing = object()
    found = {
        key: guarding.tell(_plain, nothing, value)
        for key, value in guarding.attributes_of(error).items()
    }
    return {key: value for key, value in found.items() if value is not nothing}


# ---------------------------------------------------------------------- failure → exception


def rebuild(failure: Failure, *, modules: Mapping[str, str] | None = None) -> Exception:
    """The exception to raise on this side.

    Its class is the very class that was raised when that can be imported here: one of Kubetorch's
    own tree, a built-in one, or the user's; else `RemoteError`. A class that is no `Exception`,
    such as `SystemExit`, becomes `RemoteError` too: it must not end the caller's process.

    Args:
        failure: What arrived.
        modules: Modules to look up under another name, see `kubetorch.wire.codecs.decode`.
    """
    error = guarding.take(lambda: _made(failure, modules or {}), None)
    if error is None:
        name = failure.error_type
        error = errors.RemoteError(failure.message, error_type=name)
    _set(error, "remote_traceback", failure.traceback)
    _set(error, "pod_name", failure.pod_name)
    _set(error, "rank", failure.rank)
    if failure.traceback:
        trace = errors.RemoteTraceback(failure.traceback, failure.pod_name, failure.rank)
        guarding.put_cause(error, trace)
    elif failure.cause is not None:
        guarding.put_cause(error, rebuild(parse(failure.cause), modules=modules))
    return error


def _set(error: Exception, name: str, value: object) -> None:
    if value is None and guarding.take(lambda: getattr(error, name, None), None) is not None:
        return
    guarding.put(error, name, value)


def _made(failure: Failure, modules: Mapping[str, str]) -> Exception | None:
    own = _own(failure)
    error = _raised(failure, modules) if own is None else own
    if error is not None:
        # One that raises when it is asked for these would break whatever handles or prints it.
        _ = error.__class__, error.__cause__, error.__context__
        if guarding.take(lambda: getattr(error, "__notes__", ()), None) is None:
            guarding.put(error, "__notes__", [])
    return error


def _own(failure: Failure) -> Exception | None:
    cls = errors.BY_CODE.get(failure.code or "")
    if cls is None and failure.module in ("builtins", "kubetorch", ""):
        cls = errors.EXCEPTION_REGISTRY.get(failure.error_type)
    if cls is None:
        return None
    if not failure.state and hasattr(cls, "from_dict"):
        return cls.from_dict({"message": failure.message})  # type: ignore[no-any-return]
    return cls.from_state(failure.message, failure.state)


def _raised(failure: Failure, modules: Mapping[str, str]) -> Exception | None:
    """The exception of the very class that was raised, with the very text."""
    cls = _find_class(failure, modules)
    if cls is None:
        return None
    members = rebuilding.unpack_members(
        failure.members, lambda data: rebuild(parse(data), modules=modules)
    )
    args = members.pop("args", failure.args)
    if not isinstance(args, (list, tuple)):
        args = [failure.message]
    attributes = {**failure.state, **members}
    error = rebuilding.make(cls, args, attributes)
    if (
        error is not None
        and _UNSHOWN not in failure.message
        and guarding.take(lambda: rebuilding.clean(_said(error)), None) == failure.message
    ):
        return error
    return rebuilding.make_telling(cls, failure.message, args, attributes)


def _find_class(failure: Failure, modules: Mapping[str, str]) -> type[Exception] | None:
    # Importing runs the user's code.
    found = guarding.take(lambda: _look_up(failure, modules), None)
    return found if isinstance(found, type) and issubclass(found, Exception) else None


def _look_up(failure: Failure, modules: Mapping[str, str]) -> Any:  # noqa: ANN401  # anything
    if failure.module == "builtins":
        return getattr(builtins, failure.error_type)
    found: Any = importlib.import_module(modules.get(failure.module, failure.module))
    for part in (failure.qualname or failure.error_type).split("."):
        found = getattr(found, part)
    return found


# ------------------------------------------------------------------------------- HTTP statuses


def http_status(error: BaseException) -> int:
    """Status of a response that carries `error`.

    An own `status_code` attribute wins; our own classes have a `status`; then by class, with
    time-outs before `OSError`, whose subclass `TimeoutError` is.
    """
    for name in ("status_code", "status"):
        value = guarding.tell(_plain, None, guarding.tell(getattr, None, error, name, None))
        if type(value) is int and 400 <= value < 600:
            return value
    for classes, status in _STATUSES:
        if guarding.is_a(error, classes):
            return status
    return 500


_STATUSES: tuple[tuple[tuple[type[BaseException], ...], int], ...] = (
    ((TimeoutError,), 504),
    ((NotImplementedError,), 501),
    ((TypeError, AssertionError), 422),
    ((KeyError, FileNotFoundError), 404),
    ((PermissionError,), 403),
    ((ValueError, UnicodeError), 400),
    ((MemoryError, OSError), 500),
)
