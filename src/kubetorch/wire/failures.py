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
from kubetorch.wire import rebuilding

#: A message or traceback that is longer is cut in the middle; the pod's log has all of it.
TEXT_LIMIT = 256 * 1024
#: Bytes of JSON: it travels in one frame. Text and traceback alone always fit.
JSON_LIMIT = 4 * 1024 * 1024
#: Causes of causes that are told.
CAUSES_LIMIT = 20


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
        data = _encode(self.to_dict())
        if len(data) > JSON_LIMIT:
            data = _encode(self.to_dict() | {"cause": None})
        if len(data) > JSON_LIMIT:
            left_out: dict[str, Any] = {"cause": None, "members": {}, "args": None, "state": {}}
            data = _encode(self.to_dict() | left_out)
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
    if not isinstance(known.get("args"), (list, type(None))):
        known["args"] = None
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
    own = isinstance(error, errors.KubetorchError)
    cause, above = error.__cause__, (*above, error)
    return Failure(
        error_type=cls.__name__,
        message=_cut(error.message if isinstance(error, errors.KubetorchError) else _text(error)),
        traceback=_cut(format_traceback(error, skip=skip)),
        pod_name=pod_name,
        rank=rank,
        module=cls.__module__,
        qualname=cls.__qualname__,
        args=_plain_args(error),
        state=error.to_state() if isinstance(error, errors.KubetorchError) else _state(error),
        members={} if own else rebuilding.members_of(error, lambda one: _argument(one, above)),
        code=type(error).code if own else None,  # type: ignore[attr-defined]  # own: it has one
        started=started,
        cause=None
        if cause is None or isinstance(cause, errors.RemoteTraceback) or _is_again(cause, above)
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
    if isinstance(error, errors.KubetorchError) and error.remote_traceback:
        return error.remote_traceback
    if isinstance(error, errors.KubetorchError) and error.__traceback__ is None:
        return ""  # never raised: there is nothing to show but its message
    try:
        shown = _without_leading(error.__traceback__, skip)
        return "".join(traceback.format_exception(type(error), error, shown))
    except Exception as broken:  # noqa: BLE001  # the user's __str__ or __repr__ may raise
        return f"{type(error).__name__} (its traceback cannot be shown: {broken!r})\n"


def _without_leading(trace: TracebackType | None, skip: str | None) -> TracebackType | None:
    ours = ("<frozen importlib", skip) if skip else ("<frozen importlib",)
    while trace and trace.tb_frame.f_code.co_filename.startswith(ours):
        trace = trace.tb_next
    return trace


def _text(error: BaseException) -> str:
    try:
        # str(KeyError("x")) has quotes that the user's message had not.
        if type(error).__str__ is KeyError.__str__ and len(error.args) == 1:
            key = error.args[0]
            return _clean(key if type(key) is str else repr(key))
        return _clean(str(error))
    except Exception as broken:  # noqa: BLE001  # the user's __str__
        return f"(its message cannot be shown: {broken!r})"


def _clean(text: str) -> str:
    """Text that can be encoded: lone surrogates are shown as Python writes them."""
    if rebuilding.is_text(text):
        return text
    return text.encode(errors="backslashreplace").decode()


def _cut(text: str) -> str:
    text = _clean(text)
    if len(text) <= TEXT_LIMIT:
        return text
    half = TEXT_LIMIT // 2
    return f"{text[:half]}\n… {len(text) - 2 * half} characters left out …\n{text[-half:]}"


def _is_plain(value: object, depth: int = 0) -> bool:
    if isinstance(value, float):
        return value - value == 0  # JSON has no other numbers
    if isinstance(value, str):
        return len(value) <= TEXT_LIMIT and rebuilding.is_text(value)
    if value is None or isinstance(value, (bool, int)):
        return True
    if depth > 8:
        return False
    if isinstance(value, (list, tuple)):
        return len(value) <= 1000 and all(_is_plain(item, depth + 1) for item in value)
    if isinstance(value, dict):
        return len(value) <= 1000 and all(
            isinstance(key, str) and _is_plain(key) and _is_plain(item, depth + 1)
            for key, item in value.items()
        )
    return False


def _plain_args(error: BaseException) -> list[Any] | None:
    return list(error.args) if _is_plain(error.args) else None


def _state(error: BaseException) -> dict[str, Any]:
    state = getattr(error, "__dict__", {})
    return {key: value for key, value in state.items() if key != "__notes__" and _is_plain(value)}


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
    error = _own(failure) or _raised(failure, modules or {})
    if error is None:
        name = failure.error_type
        error = errors.RemoteError(failure.message, error_type=name)
    _set(error, "remote_traceback", failure.traceback)
    _set(error, "pod_name", failure.pod_name)
    _set(error, "rank", failure.rank)
    if failure.traceback:
        trace = errors.RemoteTraceback(failure.traceback, failure.pod_name, failure.rank)
        error.__cause__ = trace
    elif failure.cause is not None:
        error.__cause__ = rebuild(parse(failure.cause), modules=modules)
    return error


def _set(error: Exception, name: str, value: object) -> None:
    if value is None and getattr(error, name, None) is not None:
        return
    rebuilding.put(error, name, value)


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
    if error is not None and _text(error) == failure.message:
        return error
    return rebuilding.make_telling(cls, failure.message, args, attributes)


def _find_class(failure: Failure, modules: Mapping[str, str]) -> type[Exception] | None:
    found: Any
    try:
        if failure.module == "builtins":
            found = getattr(builtins, failure.error_type)
        else:
            found = importlib.import_module(modules.get(failure.module, failure.module))
            for part in (failure.qualname or failure.error_type).split("."):
                found = getattr(found, part)
    except Exception:  # noqa: BLE001  # importing runs the user's code
        return None
    return found if isinstance(found, type) and issubclass(found, Exception) else None


# ------------------------------------------------------------------------------- HTTP statuses


def http_status(error: BaseException) -> int:
    """Status of a response that carries `error`.

    An own `status_code` attribute wins; our own classes have a `status`; then by class, with
    time-outs before `OSError`, whose subclass `TimeoutError` is.
    """
    for name in ("status_code", "status"):
        value = getattr(error, name, None)
        if isinstance(value, int) and not isinstance(value, bool) and 400 <= value < 600:
            return value
    for classes, status in _STATUSES:
        if isinstance(error, classes):
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
