"""Exceptions on the wire: their failures, HTTP statuses, and how the other end rebuilds them.

The module imports only the standard library: the worker uses it, too.

A failure is a JSON object: `error_type`, `message`, `traceback`, `pod_name` for every client of the
contract, and fields by which our own client raises the very class. An exception is never pickled,
and no constructor of the user runs when the exception is rebuilt.

`args` and `state` are plain JSON. `members` holds, by attribute, values that JSON would change and
values that live in C (`OSError.filename`): tuples, bytes and paths are objects with one key, which
is the tag of their kind; the tag `value` has text of the codec `values`. Text stands in the `args`
for a value that cannot travel.
"""

from __future__ import annotations

import builtins
import importlib
import json
import os
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from enum import Enum
from pathlib import Path
from types import GetSetDescriptorType, MemberDescriptorType, TracebackType
from typing import Any, TypeGuard

from kubetorch import errors
from kubetorch.lib.frozen_values import FrozenValue
from kubetorch.wire import codecs
from kubetorch.wire.introspection import (
    attempt,
    class_attribute,
    error_attribute,
    is_a,
    module_of,
    name_of,
    qualname_of,
    safely,
    set_error_attribute,
    shown,
)
from kubetorch.wire.tuning import LIMITS
from kubetorch.wire.values import EXACT, decode, encode

#: Bits of an integer that JSON carries: Python reads no more than 4300 digits.
_INTEGER_BITS = 10_000
#: Beginnings of the paths of files of Kubetorch and Python, which are not the user's code.
_SYSTEM_FILES = (
    f"{Path(errors.__file__).parent}{os.sep}",
    f"{Path(os.__file__).parent}{os.sep}",
    "<frozen",
)
#: The file whose frame stands above those of a cell of `%%kt`.
_CELLS = str(Path(errors.__file__).parent / "sdk" / "cell.py")
#: Words in a message whose class raised for its text; this side does not ask the class either.
_NO_TEXT = "its message cannot be shown:"
#: Attributes of built-in classes that repeat other attributes, or hold objects of the user.
_REDUNDANT_ATTRIBUTES = frozenset({"obj", "exceptions", "message"})


class Failure(FrozenValue):
    """An exception as plain values.

    Attributes:
        traceback: Text of the traceback; empty for an exception without one to show.
        rank: Rank of the worker that raised it, in a distributed call.
        args: Its `args`, when all of them are plain values, else `None`.
        state: The plain attributes of the exception.
        members: Attributes that JSON would change in `args` and `state`.
        code: Identity of an error of our own tree.
        started: Whether the call had started; it may be sent again if not.
        cause: The failure of the exception that it was raised from.
        status: HTTP status of a response that carries it, see `http_status`.
        other_errors: Failures of other ranks of a distributed call, or of other pods.
        repeats: The call runs again after an exception of this class.
        attempts: How often the call ran, if it may run more than once.
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
    other_errors: list[dict[str, Any]] = field(default_factory=list)
    repeats: bool = False
    attempts: int | None = None

    def to_dict(self) -> dict[str, Any]:
        values = {item.name: getattr(self, item.name) for item in fields(self)}
        for name in ("other_errors", "repeats", "attempts"):
            if not values[name]:
                del values[name]
        return values

    def to_json(self, limit: int = LIMITS.failure_json_bytes) -> bytes:
        """The failure as JSON; too long, it loses its cause, then all but its text."""
        reduced_fields: dict[str, Any] = {"cause": None, "members": {}, "args": None, "state": {}}
        reduced_fields |= {
            name: _shortened(getattr(self, name), LIMITS.failure_name_characters) for name in _NAMES
        }
        reduced_fields |= {
            "message": _shortened(self.message),
            "traceback": _shortened(self.traceback),
        }
        reduced_fields |= {"code": None, "pod_name": None, "other_errors": []}
        data = b""
        for replaced_fields in ({}, {"cause": None}, reduced_fields):
            # The state of an error of Kubetorch may hold a value that JSON cannot carry.
            data = safely(_encode, b"", self.to_dict() | replaced_fields)
            if data and len(data) <= limit:
                break
        return data

    def to_message(self) -> dict[str, Any]:
        """As `to_dict`, shortened to one message of a session."""
        data: dict[str, Any] = json.loads(self.to_json(LIMITS.session_failure_bytes))
        return safely(
            _without_surrogates,
            Failure(_shortened(self.error_type), _shortened(self.message)).to_dict(),
            data,
        )


def _encode(data: dict[str, Any]) -> bytes:
    text = json.dumps(data, ensure_ascii=False, default=repr)
    # Lone surrogates in the state of an error of Kubetorch become escapes of JSON.
    return text.encode(errors="backslashreplace")


def _without_surrogates(value: Any) -> Any:  # noqa: ANN401  # of JSON
    """A copy of a value of JSON without lone surrogates."""
    if isinstance(value, dict):
        return {_escape_surrogates(key): _without_surrogates(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_without_surrogates(item) for item in value]
    return _escape_surrogates(value) if isinstance(value, str) else value


_NAMES = ("error_type", "module", "qualname")
_FIELD_TYPES: dict[str, Any] = {item.name: object for item in fields(Failure)}
_FIELD_TYPES |= dict.fromkeys(
    ("error_type", "message", "traceback", "module", "qualname", "code"), str
)
_FIELD_TYPES |= {
    "state": dict,
    "members": dict,
    "cause": dict,
    "args": list,
    "rank": int,
    "other_errors": list,
    "repeats": bool,
    "attempts": int,
}


def parse(data: Mapping[str, Any]) -> Failure:
    """The failure that a JSON object describes; any object gives a failure."""
    values = {
        key: value for key, value in data.items() if isinstance(value, _FIELD_TYPES.get(key, ()))
    }
    values.setdefault("error_type", "Exception")
    if "message" not in values:
        detail = data.get("detail", data.get("message"))
        is_text = isinstance(detail, str)
        values["message"] = detail if is_text else json.dumps(dict(data), default=repr)
    status = values.get("status")
    if type(status) is not int or not 400 <= status < 600:
        values["status"] = 500
    return Failure(**values)


def parse_json(body: bytes | memoryview) -> Failure:
    """The failure in a response body; a body that is not JSON becomes the message."""
    text = bytes(body).decode(errors="replace")
    try:
        data = json.loads(text)
    except (ValueError, RecursionError):
        data = None
    if isinstance(data, dict):
        return parse(data)
    return Failure("Exception", text.strip() or "an empty answer")


# -------------------------------------------------------------------------- the user's exceptions


def trace_of(error: BaseException) -> TracebackType | None:
    """The `__traceback__` of an exception."""
    return error_attribute(error, "__traceback__")  # type: ignore[no-any-return]


def attributes_of(error: BaseException) -> dict[str, Any]:
    """A copy of the `__dict__` of an exception, without keys and notes that are no text."""
    attributes = dict(error_attribute(error, "__dict__"))
    notes = attributes.pop("__notes__", None)
    if is_a(notes, list):
        texts = [
            _shortened(note, LIMITS.failure_text_characters // 8)
            for note in list.__iter__(notes)
            if type(note) is str
        ]
        attributes["__notes__"] = texts[: LIMITS.failure_value_items]
    return {key: value for key, value in attributes.items() if type(key) is str}


def set_attribute(error: BaseException, name: str, value: object) -> None:
    """Set an attribute of an exception, if that is possible: also of a frozen dataclass."""
    # A property, or a class in C, may refuse.
    attempt(lambda: BaseException.__setattr__(error, name, value), None)


def set_attempts(error: BaseException, attempts: int) -> None:
    """Set the number of runs of the call, unless the user's class has an attribute `attempts`."""
    if attempt(getattr, None, error, "attempts", None) is None:
        set_attribute(error, "attempts", attempts)


def add_note(error: BaseException, text: str) -> None:
    """Add a line below the traceback of an exception, whatever its class allows."""
    notes: list[str] = attempt(lambda: [*attributes_of(error).get("__notes__", ())], [])
    set_attribute(error, "__notes__", [*notes, text])


# ---------------------------------------------------------------------- exception → failure


def describe(
    error: BaseException,
    *,
    pod_name: str | None = None,
    started: bool = True,
    skip: str | None = None,
    above: tuple[BaseException, ...] = (),
) -> Failure:
    """The failure that describes `error`; attributes that raise are left out.

    Leading frames in files under `skip` are left out of the traceback. `above` has the exceptions
    that this exception is a cause or an argument of.
    """
    cls = type(error)
    own_error = error if _is_own(error) else None
    cause, above = error_attribute(error, "__cause__"), (*above, error)
    described_cause = None
    if (
        cause is not None
        and not is_a(cause, errors.RemoteTraceback)
        and not _ends_causes(cause, above)
    ):
        described_cause = describe(cause, skip=skip, above=above).to_dict()
    values = _plain_values({"args": list(error_attribute(error, "args")), **attributes_of(error)})
    members = _members(error, values, above) if own_error is None else {}
    args = values.pop("args", None)
    return Failure(
        error_type=_shortened(name_of(cls), LIMITS.failure_name_characters),
        message=_shortened(_message(error)),
        traceback=_shortened(format_traceback(error, skip=skip)),
        pod_name=pod_name,
        module=_shortened(module_of(cls), LIMITS.failure_name_characters),
        qualname=_shortened(qualname_of(cls), LIMITS.failure_name_characters),
        args=args,
        state=values if own_error is None else safely(own_error.to_state, {}),
        members=members,
        code=None if own_error is None else safely(lambda: own_error.code, None),
        started=started,
        cause=described_cause,
        status=http_status(error),
    )


def _is_own(error: BaseException) -> TypeGuard[errors.KubetorchError]:
    """True if the class is one of ours; a class of the user may derive from ours."""
    return errors.EXCEPTION_REGISTRY.get(name_of(type(error))) is type(error)


def _ends_causes(error: BaseException, above: tuple[BaseException, ...]) -> bool:
    return len(above) >= LIMITS.failure_causes or any(error is outer_error for outer_error in above)


def describe_refusal(
    error: Exception, *, pod_name: str | None = None, started: bool = True
) -> Failure:
    """The failure of a refusal by the server itself, or of a fault of the server.

    It has no traceback, cause or path of the server, which would tell a caller nothing.
    """
    if not isinstance(error, errors.KubetorchError):
        system_message = getattr(error, "strerror", None)
        description = (
            f"{type(error).__name__}: {system_message}" if system_message else type(error).__name__
        )
        error = errors.KubetorchError(
            f"the server failed: {description}",
            hint="this is a fault of Kubetorch; the server's log has the traceback",
        )
    failure = describe(error, pod_name=pod_name, started=started)
    return replace(failure, traceback=error.remote_traceback or "", cause=None)


def format_traceback(error: BaseException, *, skip: str | None = None) -> str:
    """The traceback as Python prints it, without leading frames in files under `skip`."""
    trace = trace_of(error)
    if is_a(error, errors.KubetorchError):
        remote = safely(lambda: error.remote_traceback, None)
        if remote or trace is None:  # never raised: the message is all that it has
            return remote or ""
        if _is_own(error) and not any(map(_is_users, _files(trace))):
            return ""
    hidden = ("<frozen importlib", _CELLS, skip) if skip else ("<frozen importlib",)
    while trace and trace.tb_frame.f_code.co_filename.startswith(hidden):
        trace = trace.tb_next
    formatted = safely(lambda: "".join(traceback.format_exception(type(error), error, trace)), "")
    if formatted:
        return formatted
    # The user's __cause__ or __notes__ may raise.
    frames = "".join(safely(traceback.format_tb, [], trace))
    name = qualname_of(type(error))
    return f"Traceback (most recent call last):\n{frames}{name}: {_message(error)}\n"


def _files(trace: TracebackType | None) -> Iterator[str]:
    while trace:
        yield trace.tb_frame.f_code.co_filename
        trace = trace.tb_next


def _is_users(file: str) -> bool:
    """True if a file belongs neither to Kubetorch nor to Python."""
    return f"{os.sep}site-packages{os.sep}" in file or not file.startswith(_SYSTEM_FILES)


def _message(error: BaseException) -> str:
    try:
        return _text(error)
    except BaseException as broken:  # noqa: BLE001  # the user's __str__
        args = safely(BaseException.__str__, "", error)
        why = f"({_NO_TEXT} {shown(broken)})"
        return _escape_surrogates(f"{args} {why}" if args else why)


def _text(error: BaseException) -> str:
    """The `str` of an exception, or the nearest text that the user wrote."""
    if _is_own(error):
        return _escape_surrogates(error.message)
    args = error_attribute(error, "args")
    makes_text = safely(lambda: type(error).__str__, None)
    if makes_text is not KeyError.__str__ or len(args) != 1:
        return _escape_surrogates(str.__str__(str(error)))
    # str(KeyError("x")) has quotes that the user's message had not.
    return _escape_surrogates(args[0] if type(args[0]) is str else str.__str__(repr(args[0])))


def _shortened(text: str, limit: int = LIMITS.failure_text_characters) -> str:
    text = _escape_surrogates(text)
    if len(text) <= limit:
        return text
    half = limit // 2
    return f"{text[:half]}\n… {len(text) - 2 * half} characters left out …\n{text[-half:]}"


def _is_utf8(text: str) -> bool:
    """False for lone surrogates, as in undecodable file names."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _escape_surrogates(text: str) -> str:
    """The text, with lone surrogates as Python's escapes."""
    return text if _is_utf8(text) else text.encode(errors="backslashreplace").decode()


def _size(packed: object) -> int:
    return safely(lambda: len(json.dumps(packed)), LIMITS.failure_json_bytes)


def _plain_values(values: Mapping[str, object]) -> dict[str, Any]:
    nothing, remaining_characters = object(), LIMITS.failure_state_characters
    plain_attributes: dict[str, Any] = {}
    for name, value in values.items():
        packed = safely(plain, nothing, value)
        size = _size(packed)
        if packed is not nothing and size <= remaining_characters:
            remaining_characters -= size
            plain_attributes[name] = packed
    return plain_attributes


def _members(
    error: BaseException, values: Mapping[str, Any], above: tuple[BaseException, ...]
) -> dict[str, Any]:
    remaining_characters, nothing = LIMITS.failure_members_characters, object()

    def pack(value: object, *, stands_in: bool) -> Any:  # noqa: ANN401  # of JSON
        nonlocal remaining_characters
        copier = _Copier(above, tags=True, stands_in=stands_in)
        packed = safely(copier.copy, nothing, value)  # the user's __repr__; what cannot travel
        if packed is nothing and not copier.is_too_large:
            return packed
        if packed is nothing or _size(packed) > remaining_characters:
            placeholder = f"<a value of type {name_of(type(value))}, too large for an exception>"
            packed = {"shown": [placeholder, placeholder]}
        remaining_characters -= _size(packed)
        return packed

    members: dict[str, Any] = {}
    for name, value in _attributes_to_tag(error, values):
        is_args = name == "args"
        stands_in = is_args or name == _PYDANTIC_MEMBER
        # The message replaces a single argument that is too large.
        if is_args and 1 < len(value) <= LIMITS.failure_value_items:
            members[name] = {"tuple": [pack(argument, stands_in=True) for argument in value]}
        else:
            members[name] = pack(value, stands_in=stands_in)
    return {name: packed for name, packed in members.items() if packed is not nothing}


def _attributes_to_tag(
    error: BaseException, values: Mapping[str, Any]
) -> Iterator[tuple[str, Any]]:
    args = error_attribute(error, "args")
    if "args" not in values or not _survives_json(list(args)):
        yield "args", args
    if (module_of(type(error)), name_of(type(error))) == _PYDANTIC:
        yield _PYDANTIC_MEMBER, safely(_of_pydantic, None, error)
    # Attributes that are not in the `__dict__`: those of built-in classes, and of `__slots__`.
    for cls in class_attribute(type(error), "__mro__"):
        if cls is BaseException:
            break
        for name, kind in class_attribute(cls, "__dict__").items():
            is_slot = is_a(kind, (MemberDescriptorType, GetSetDescriptorType))
            if is_slot and not name.startswith("__") and name not in _REDUNDANT_ATTRIBUTES:
                value = safely(kind.__get__, None, error)  # raises if it was never set
                if value is not None:
                    yield name, value
    for name, value in attributes_of(error).items():
        if name != "__notes__" and (name not in values or not _survives_json(value)):
            yield name, value


#: The class of pydantic's errors, which has no constructor, and the member with its parts.
_PYDANTIC = ("pydantic_core._pydantic_core", "ValidationError")
_PYDANTIC_MEMBER = "pydantic"


def _of_pydantic(error: Any) -> list[object]:  # noqa: ANN401  # a ValidationError
    return [error.title, error.errors(include_url=False)]


def _rebuild_pydantic(
    cls: Any,  # noqa: ANN401  # ValidationError
    text: str,
    title: str,
    lines: list[dict[str, Any]],
) -> Exception | None:
    """Pydantic's error with these lines, from their parts before pydantic wrote messages."""
    core = importlib.import_module("pydantic_core")
    line_errors = []
    for line in lines:
        parts = {name: line[name] for name in ("type", "loc", "input", "ctx") if name in line}
        if attempt(cls.from_exception_data, None, title, [parts]) is None:  # a type of the user's
            message = core.PydanticCustomError(line["type"], line["msg"])
            parts = {"type": message, "loc": line["loc"], "input": line["input"]}
        line_errors.append(parts)
    # An error does not have its input type: the one with the right text is chosen.
    candidates: list[Exception] = [
        cls.from_exception_data(title, line_errors, input_type=input_type)
        for input_type in ("python", "json")
    ]
    return next((candidate for candidate in candidates if str(candidate) == text), candidates[0])


# ------------------------------------------------------------------------------------- values


def plain(value: object) -> Any:  # noqa: ANN401  # of JSON
    """A copy of a value in types of JSON, made without any method of the value's class."""
    return _Copier().copy(value)


def _survives_json(value: object) -> bool:
    """True if JSON carries a value without change."""
    copier, nothing = _Copier(), object()
    return safely(copier.copy, nothing, value) is not nothing and copier.is_exact


_TYPES = (type(None), bool, int, float, str, bytes, list, tuple, dict)
_SIZED_TYPES = (str, bytes, list, tuple, dict)


@dataclass
class _Copier:
    """Copies values into types of JSON; raises ValueError for values too deep, long or strange.

    With `tags`, a value that JSON would change gets a tag; without them a value of a subclass is
    copied as its base. With `stands_in`, text replaces a value that cannot travel.
    """

    #: The exceptions that a copied exception is an argument of.
    above: tuple[BaseException, ...] = ()
    tags: bool = False
    stands_in: bool = False
    #: False once JSON has changed a value.
    is_exact: bool = True
    #: True once a value was too deep, too long, or one of too many.
    is_too_large: bool = False
    #: The number of values that may still be copied.
    remaining_values: int = LIMITS.failure_values

    def copy(self, value: Any, depth: int = 0) -> Any:  # noqa: ANN401  # any value, and of JSON
        self.remaining_values -= 1
        kind: Any = next((base for base in _TYPES if is_a(value, base)), None)
        limit = (
            LIMITS.failure_text_characters if kind in (str, bytes) else LIMITS.failure_value_items
        )
        if (
            depth > LIMITS.failure_value_levels
            or self.remaining_values < 0
            or (kind in _SIZED_TYPES and kind.__len__(value) > limit)
        ):
            self.is_too_large = True
            raise ValueError("too deep, too many, or too long")
        self.is_exact &= kind is type(value) and kind is not tuple
        if kind is None or (kind is not type(value) and self.tags):
            return self._copy_object(value, depth + 1)
        if kind in (list, tuple):
            items = [self.copy(item, depth + 1) for item in kind.__iter__(value)]
            return {"tuple": items} if kind is tuple and self.tags else items
        if kind is dict:
            pairs = [[self.copy(part, depth + 1) for part in item] for item in dict.items(value)]
            if not self.tags and not all(type(key) is str for key, _ in pairs):
                raise ValueError("a key that is no text")
            return {"dict": pairs} if self.tags else dict(pairs)
        return self._copy_scalar(kind, value)

    def _copy_scalar(self, kind: Any, value: Any) -> Any:  # noqa: ANN401  # as above
        if value is None or kind is bool:
            return value
        if kind is int:
            self.is_too_large |= int.bit_length(value) > _INTEGER_BITS
            if not self.is_too_large:
                return int.__pos__(value)
        if kind is float:
            number = float.__pos__(value)
            if number - number == 0:  # JSON has no other numbers
                return number
            if self.tags:
                return {"float": repr(number)}
        if kind is str:
            text = str.__str__(value)
            if _is_utf8(text):
                return text
            if self.tags:
                return {"text": text.encode(errors="surrogatepass").hex()}
        if kind is bytes and self.tags:
            return {"bytes": value.hex()}
        raise ValueError("no plain value")

    def _copy_object(self, value: Any, deeper: int) -> Any:  # noqa: ANN401  # as above
        kind = type(value)
        if not self.tags:
            raise ValueError("no plain value")
        if module_of(kind).partition(".")[0] == "pathlib" and hasattr(kind, "__fspath__"):
            return {"path": self.copy(os.fspath(value), deeper)}
        if is_a(value, BaseException) and not _ends_causes(value, self.above):
            # The traceback of the outer exception includes the traceback of this exception.
            described = replace(describe(value, above=self.above), traceback="", cause=None)
            return {"error": described.to_dict()}
        # The codec would make a value of a subclass of `str` a plain `str`.
        is_text = is_a(value, str) and not is_a(value, Enum)
        segments: list[Any] = [] if is_text else safely(lambda: encode(value, "", EXACT), [])
        if segments and sum(map(len, segments)) < LIMITS.failure_members_characters:
            return {"value": codecs.to_text(segments)}
        self.is_too_large |= bool(segments)
        if not self.stands_in:
            raise ValueError(f"a value of type {name_of(kind)}")
        # `str()` of a value may return an instance of a subclass of `str`.
        text = safely(lambda: str.__str__(str(value)), "")
        return {"shown": [self.copy(text), self.copy(shown(value))]}


class StandIn(str):
    """The text and the `repr` of an argument that could not travel."""

    shown = ""

    def __repr__(self) -> str:
        return self.shown


def _untagged(packed: Any, modules: Mapping[str, str]) -> Any:  # noqa: ANN401
    """The value from a copy that `_Copier` made with tags."""
    if isinstance(packed, list):
        return [_untagged(item, modules) for item in packed]
    if not isinstance(packed, dict):
        return packed
    ((tag, content),) = packed.items()
    if tag == "error":
        return rebuild(parse(content), modules=modules)
    if tag == "value":
        return decode(codecs.buffers_of(content), modules)
    if tag == "float":
        return float(content)
    if tag in ("bytes", "text"):
        data = bytes.fromhex(content)
        return data if tag == "bytes" else data.decode(errors="surrogatepass")
    parts = _untagged(content, modules)
    if tag == "shown":
        value = StandIn(parts[0])
        value.shown = str(parts[1])
        return value
    makers: dict[str, Callable[[Any], object]] = {"tuple": tuple, "dict": dict, "path": Path}
    return makers[tag](parts)


# ---------------------------------------------------------------------- failure → exception


def rebuild(failure: Failure, *, modules: Mapping[str, str] | None = None) -> Exception:
    """The exception to raise on this side.

    Its class is the very class that was raised, if it can be imported here: a class of Kubetorch's
    own tree, a built-in class, or a class of the user; else `RemoteError`. A class that is no
    `Exception`, such as `SystemExit`, becomes `RemoteError`, too: it must not end the caller.
    """
    error = attempt(_rebuild_class, None, failure, modules or {})
    if error is None:
        error = errors.RemoteError(failure.message, error_type=failure.error_type)
        notes = failure.state.get("__notes__")
        if is_a(notes, list):
            set_attribute(error, "__notes__", [note for note in notes if type(note) is str])
    for name in ("remote_traceback", "pod_name", "rank"):
        value = failure.traceback if name == "remote_traceback" else getattr(failure, name)
        if value is not None or attempt(getattr, None, error, name, None) is None:
            set_attribute(error, name, value)
    other_errors = tuple(
        rebuild(parse(other_failure), modules=modules)
        for other_failure in failure.other_errors
        if is_a(other_failure, dict)
    )
    if other_errors or attempt(getattr, None, error, "other_errors", None) is None:
        set_attribute(error, "other_errors", other_errors)
    if failure.attempts is not None:
        set_attempts(error, failure.attempts)
    if failure.traceback:
        trace = errors.RemoteTraceback(failure.traceback, failure.pod_name, failure.rank)
        set_error_attribute(error, "__cause__", trace)
    elif failure.cause is not None:
        set_error_attribute(error, "__cause__", rebuild(parse(failure.cause), modules=modules))
    return error


def _rebuild_class(failure: Failure, modules: Mapping[str, str]) -> Exception | None:
    is_own = failure.module in ("builtins", "kubetorch", "")
    error = _rebuild_own(failure) if is_own else None
    if error is None:
        error = _rebuild_users(failure, modules)
    if error is not None:
        # An exception that raises for one of these would break code that handles or prints it.
        _ = error.__class__, error.__cause__, error.__context__
        if attempt(getattr, None, error, "__notes__", ()) is None:
            set_attribute(error, "__notes__", [])
    return error


def _rebuild_own(failure: Failure) -> Exception | None:
    cls = errors.BY_CODE.get(failure.code or "", errors.EXCEPTION_REGISTRY.get(failure.error_type))
    if cls is None:
        return None
    if not failure.state and hasattr(cls, "from_dict"):
        return cls.from_dict({"message": failure.message})  # type: ignore[no-any-return]
    return cls.from_state(failure.message, failure.state)


def _rebuild_users(failure: Failure, modules: Mapping[str, str]) -> Exception | None:
    cls = attempt(_import_class, None, failure, modules)  # runs the user's code
    if not isinstance(cls, type) or not issubclass(cls, Exception):
        return None
    nothing = object()
    rebuilt_members = {
        name: attempt(_untagged, nothing, packed, modules)
        for name, packed in failure.members.items()
    }
    members = {name: value for name, value in rebuilt_members.items() if value is not nothing}
    parts: Any = members.pop(_PYDANTIC_MEMBER, None)
    if parts is not None and (failure.module, failure.error_type) == _PYDANTIC:
        return attempt(_rebuild_pydantic, None, cls, failure.message, *parts)
    args = members.pop("args", failure.args)
    if not isinstance(args, (list, tuple)):
        args = [failure.message]
    attributes = {**failure.state, **members}
    error = _instance(cls, args, attributes)
    text = failure.message
    if error is not None and _NO_TEXT not in text and attempt(_text, None, error) == text:
        return error
    return with_text(cls, text, args, attributes)


def _import_class(failure: Failure, modules: Mapping[str, str]) -> object:
    if failure.module == "builtins":
        return getattr(builtins, failure.error_type)
    attribute: object = importlib.import_module(modules.get(failure.module, failure.module))
    for part in (failure.qualname or failure.error_type).split("."):
        attribute = getattr(attribute, part)
    return attribute


def _instance(
    cls: type[Exception], args: Sequence[object], attributes: Mapping[str, Any]
) -> Exception | None:
    """An exception of a class with these `args` and attributes; `None` if the class refuses.

    The constructor runs for built-in classes only, whose state lives in C.
    """
    bases = class_attribute(cls, "__mro__")
    builtin: Any = next(base for base in bases if module_of(base) == "builtins")
    # The first maker fails if the class has its own signature.
    makers: list[Callable[..., Any]] = [lambda: cls.__new__(cls, *args)]
    makers.append(lambda: builtin.__new__(cls, *args))
    if cls is builtin:
        makers.insert(0, lambda: cls(*args))  # fails without an argument that could not travel
    for make in makers:
        error = attempt(make, None)
        if is_a(error, cls):
            set_error_attribute(error, "args", tuple(args))
            for name, value in attributes.items():
                set_attribute(error, name, value)
            return error
    return None


def with_text(
    cls: type[Exception], text: str, args: Sequence[object], attributes: Mapping[str, Any]
) -> Exception | None:
    """An exception of a subclass whose text is `text`, if the class makes another text here."""

    def reduce(self: Exception) -> tuple[Any, ...]:
        return with_text, (cls, text, error_attribute(self, "args"), attributes_of(self))

    members = {
        "__module__": module_of(cls),
        "__qualname__": qualname_of(cls),
        "__doc__": class_attribute(cls, "__dict__").get("__doc__"),
        "__str__": lambda _: text,
        "__reduce__": reduce,
    }
    metaclass: Any = type(cls)
    # A class may refuse to have subclasses.
    subclass = attempt(metaclass, None, name_of(cls), (cls,), members)
    return None if subclass is None else _instance(subclass, args, attributes)


# ------------------------------------------------------------------------------- HTTP statuses


def http_status(error: BaseException) -> int:
    """Status of a response that carries `error`.

    A `status_code` attribute wins; Kubetorch's classes have a `status`; then the class decides,
    with `TimeoutError` before its base `OSError`.
    """
    for name in ("status_code", "status"):
        value = safely(plain, None, safely(getattr, None, error, name, None))
        if type(value) is int and 400 <= value < 600:
            return value
    return next((status for classes, status in _STATUSES if is_a(error, classes)), 500)


_STATUSES: tuple[tuple[tuple[type[BaseException], ...], int], ...] = (
    ((TimeoutError,), 504),
    ((NotImplementedError,), 501),
    ((TypeError, AssertionError), 422),
    ((KeyError, FileNotFoundError), 404),
    ((PermissionError,), 403),
    ((ValueError, UnicodeError), 400),
    ((MemoryError, OSError), 500),
)
