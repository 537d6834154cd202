"""The codec `values`: Python values without loss, and without running code of the user.

It is the codec for `json` between a client and a worker that both have it. An encoded value is JSON
text, which may have NaN and infinities, and then, if the value needs it, a segment of raw buffers:

    {"args":[3],"kwargs":{}}                                       plain
    ${"a":{"$":["np.array","<f8",[2,3],[0,48]]}}      48 bytes     with tags

Text after a `$` has tags: an object `{"$": [kind, ...]}` is a value that JSON lacks; a dictionary
of the user with such a key gets a tag, too. `[0,48]` are 48 bytes from byte 0 of the buffers on.
The meaning of a kind never changes: another meaning needs a new kind.

Both ends may be hostile. For any bytes, decoding imports only libraries of `LIBRARIES` (and
Kubetorch's own handles of services), runs no code of the user's classes (no constructor, no
`__hash__`, no `__del__`), and allocates no more than the bytes account for. Classes are looked up
among the modules that are loaded.

Tuples become lists, but for `EXACT` values: in keys, in sets and in fields of classes.

The module imports only the standard library: workers use it, too. `kubetorch.wire.arrays` has NumPy
and the libraries that build on it.
"""

from __future__ import annotations

import _thread
import contextlib
import enum
import importlib
import io
import json
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import FunctionType, GetSetDescriptorType, MemberDescriptorType
from typing import Any, NoReturn, TypeVar

from kubetorch.errors import SerializationError
from kubetorch.lib.modules import names_of
from kubetorch.wire import introspection
from kubetorch.wire.introspection import class_attribute, is_a
from kubetorch.wire.tuning import LIMITS

_COPIED_BYTES = LIMITS.copied_buffer_bytes

ALIGNMENT = 64
#: The libraries that decoding may import, beside modules of the standard library.
LIBRARIES = ("numpy", "torch", "pandas", "polars", "pyarrow")

#: The mode in which a value arrives: with tuples as lists, exactly, or hashable.
PLAIN, EXACT, KEY = 0, 1, 2

Buffer = bytes | bytearray | memoryview
Array = TypeVar("Array")
Tag = dict[str, list[Any]]

TAG = "$"
#: The beginning of text with tags.
HEAD = TAG.encode()
_HEAD_BYTE = HEAD[0]
_SCALAR_TYPES = frozenset({str, int, float, bool, type(None)})
_TEXT_TYPES = frozenset({str})
#: Digits of an integer that Python writes and reads, unless a program has set another limit; and
#: bits of an integer within any limit.
_PYTHON_DIGITS, _INTEGER_BITS = 4300, 2000
#: Keys with one hash that a dictionary, a set or an index may have, and how many different keys if
#: it has more: `-1` and `-2` have one hash, and an index may repeat a label.
_COLLIDING_KEYS, _DIFFERENT_KEYS = 1000, 8
#: The hint for a value without a better one.
PICKLE = 'send plain values; kt.Compute(allowed_serialization=["pickle"]) sends calls with pickle'
#: The hints for values that pickle cannot carry either, or not always.
HINTS: dict[type, str] = {
    FunctionType: "send its name, and have it at the top level of a module of the project",
    **dict.fromkeys(
        (_thread.LockType, _thread.RLock),
        "a lock means something in one process only: make it where it is used, as at the top level "
        "of the module or in the constructor of the class that is deployed",
    ),
    **dict.fromkeys(
        (io.TextIOWrapper, io.BufferedReader, io.BufferedWriter, io.BufferedRandom, io.FileIO),
        "send its path, or what it holds",
    ),
}


def expect(value: Any, kind: type) -> Any:  # noqa: ANN401  # a part of a tag
    """A part of a tag, if it is of this very class: a subclass may have code of the user."""
    if type(value) is not kind:
        name = introspection.name_of(type(value))
        raise ValueError(f"a {name} where a {kind.__name__} should be")
    return value


class GatheredSegment:
    """A segment whose bytes lie in several buffers."""

    def __init__(self) -> None:
        self.parts: list[Buffer] = []
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def add(self, buffer: Buffer, alignment: int = ALIGNMENT) -> list[int]:
        """Append a buffer; returns its position: offset and length."""
        view = memoryview(buffer)
        size = view.nbytes
        if not size:
            return [0, 0]
        padding = -self._size % alignment
        offset = self._size + padding
        if padding:
            self._copy(bytes(padding))
        if size < _COPIED_BYTES:
            self._copy(view)
        else:
            self.parts.append(view.cast("B"))
        self._size = offset + size
        return [offset, size]

    def _copy(self, data: Buffer) -> None:
        if not (self.parts and isinstance(self.parts[-1], bytearray)):
            self.parts.append(bytearray())
        self.parts[-1] += data  # type: ignore[operator]  # it is a bytearray


# ------------------------------------------------------------------------------------- encoding


class UnfitError(Exception):
    """A value cannot travel."""

    def __init__(self, description: str, hint: str) -> None:
        super().__init__(description)
        self.hint = hint
        #: The path to the value, from the inside.
        self.path: list[str] = []


def encode(
    value: object, root: str = "result", mode: int = PLAIN
) -> list[Buffer | GatheredSegment]:
    """The segments of a value, which errors call `root`, in the mode `PLAIN` or `EXACT`."""
    packer = Packer()
    try:
        try:
            packed = value if type(value) in _SCALAR_TYPES else packer.pack(value, mode)
            text = _encoder.encode(packed).encode()
            if len(text) > _PYTHON_DIGITS and _digits_limit() != _PYTHON_DIGITS:
                raise ValueError("the other end may read fewer digits")
        except ValueError as error:  # an integer of too many digits, or lone surrogates
            if type(error) not in (ValueError, UnicodeEncodeError):
                raise  # by a handler of a signal, say
            packer = Packer()
            packer.scan()
            text = _encoder.encode(packer.pack(value, mode)).encode()
    except UnfitError as error:
        path = "".join(reversed(error.path))
        if not root:  # the dictionary of arguments
            path = path.replace('["', "", 1).replace('"]', "", 1)
        raise SerializationError(f"{root}{path} is {error}", hint=error.hint) from error.__cause__
    except RecursionError as error:
        raise SerializationError(
            f"the {root or 'arguments'} cannot travel: a value contains itself, or it is nested "
            "too deep",
            hint=PICKLE,
        ) from error
    if not packer.is_tagged:
        return [text]
    return [HEAD + text, packer.area] if len(packer.area) else [HEAD + text]


# A value that contains itself ends in a RecursionError.
_encoder = json.JSONEncoder(
    ensure_ascii=False, check_circular=False, allow_nan=True, separators=(",", ":")
)
# Python before 3.10.7 reads any number.
_digits_limit: Callable[[], int] = getattr(sys, "get_int_max_str_digits", lambda: _PYTHON_DIGITS)


class _Rows:
    """Counts the rows of one value without bytes, such as rows of null columns."""

    _rows = 0

    def count_rows(self, rows: int) -> None:
        """Count rows without bytes; raises `ValueError` for too many."""
        self._rows += rows
        if self._rows > LIMITS.empty_rows:
            raise ValueError(f"more than {LIMITS.empty_rows} rows for which there are no bytes")


class Packer(_Rows):
    """Encodes one value into JSON with tags, and into buffers."""

    EXACT, KEY = EXACT, KEY
    # Defaults lie in the class: most values are small, and every assignment costs.
    is_tagged = False
    # Whether each text and integer is checked: JSON may change one of them.
    _scans = False
    _plain: frozenset[object] = _SCALAR_TYPES

    #: The buffers; a value without buffers shares the empty segment of the class.
    area = GatheredSegment()
    _layouts: dict[type, _Layout | None]
    # Whether a class can be found by its name.
    _named_classes: dict[type, bool]
    # By identity; the dictionary keeps the value alive, so no other value gets its identity.
    _offsets_by_id: dict[int, tuple[object, int]]

    def scan(self) -> None:
        """Check each text and integer from now on."""
        self._scans, self._plain = True, frozenset()

    def _begin(self) -> None:
        if self.area is Packer.area:
            self.area, self._layouts = GatheredSegment(), {}
            self._named_classes, self._offsets_by_id = {}, {}

    def add(self, buffer: Buffer, alignment: int = ALIGNMENT) -> list[int]:
        """Add a buffer; returns its position: offset and length."""
        self._begin()
        return self.area.add(buffer, alignment)

    def pack(self, value: Any, mode: int = PLAIN) -> Any:  # noqa: ANN401  # any value, and of JSON
        """The JSON of a value."""
        kind = type(value)
        if kind in _SCALAR_TYPES:
            return self._scalar(value) if self._scans else value
        if kind is dict:
            return self._dict(value, mode)
        if kind is list:
            return self.items(value, mode)
        if kind is tuple:
            items = self.items(value, mode)
            return self.tag("tuple", items) if mode else items
        return self._pack_by_class(value, kind, mode)

    def tag(self, kind: str, *parts: object) -> Tag:
        """The JSON of a value that JSON lacks."""
        self.is_tagged = True
        return {TAG: [kind, *parts]}

    def once(self, value: object, pack: Callable[[], Tag]) -> Tag:
        """The result of `pack` for a value; the last part of the tag is the buffer's position.

        The value travels once, however often it occurs.
        """
        earlier_place = self._offsets_by_id.get(id(value))
        if earlier_place is not None:
            return self.tag("again", earlier_place[1])
        tag = pack()
        offset, size = tag[TAG][-1]
        if size:
            self._offsets_by_id[id(value)] = value, offset
        return tag

    def refuse(self, value: object, why: str = "", hint: str | None = None) -> NoReturn:
        """Refuse a value that cannot travel."""
        class_name = name_of(type(value))
        article = "an" if class_name[0] in "aeiouAEIOU" else "a"
        raise UnfitError(
            f"{article} {class_name}{why or ', which cannot travel'}",
            hint or HINTS.get(type(value), PICKLE),
        )

    def items(self, value: Sequence[Any], mode: int = PLAIN) -> Any:  # noqa: ANN401  # of JSON
        plain = self._plain
        if plain.issuperset(map(type, value)):
            return value if type(value) is list else list(value)
        numbers = _pack_numbers(self, value)
        if numbers is not None:
            return numbers
        packed_items: list[Any] = []
        try:
            for item in value:
                packed_items.append(item if type(item) in plain else self.pack(item, mode))
        except UnfitError as error:
            error.path.append(f"[{len(packed_items)}]")
            raise
        return packed_items

    def named(
        self, values: Mapping[str, Any], step: Callable[[str], str], mode: int
    ) -> dict[str, Any]:
        """The JSON of a dictionary whose keys are names; `step` shows a name in a path."""
        packed_values: dict[str, Any] = {}
        name = ""
        try:
            for name, value in values.items():
                packed_values[name] = (
                    value if type(value) in self._plain else self.pack(value, mode)
                )
        except UnfitError as error:
            error.path.append(step(name))
            raise
        return packed_values

    def _dict(self, value: dict[Any, Any], mode: int) -> Any:  # noqa: ANN401  # of JSON
        if not _TEXT_TYPES.issuperset(map(type, value)) or TAG in value:
            return self._pairs(value, mode)
        if self._scans and any(self._scalar(key) is not key for key in value):
            return self._pairs(value, mode)
        if self._plain.issuperset(map(type, value.values())):
            return value
        return self.named(value, _subscript, mode)

    def _pairs(self, value: dict[Any, Any], mode: int) -> Tag:
        pairs: list[list[Any]] = []
        for key, item in value.items():
            try:
                pairs.append([self.pack(key, KEY)])
                pairs[-1].append(self.pack(item, mode))
            except UnfitError as error:
                is_key = len(pairs) == 0 or len(pairs[-1]) == 2
                error.path.append(" (a key)" if is_key else _subscript(key))
                raise
        return self.tag("dict", pairs)

    def pack_part(self, key: object, pack: Callable[[], Any], *, is_attribute: bool = False) -> Any:  # noqa: ANN401  # of JSON
        """The result of `pack` for the value under a key, or of an attribute."""
        try:
            return pack()
        except UnfitError as error:
            error.path.append(f".{key}" if is_attribute else _subscript(key))
            raise

    def _scalar(self, value: Any) -> Any:  # noqa: ANN401  # as `pack`
        if type(value) is int and value.bit_length() > _INTEGER_BITS:
            return self.tag("int", hex(value))
        if type(value) is str and not value.isascii():
            try:
                value.encode()
            except UnicodeEncodeError:
                return self.tag("str", value.encode(errors="surrogatepass").hex())
        return value

    def _pack_by_class(self, value: Any, kind: type, mode: int) -> Any:  # noqa: ANN401  # as `pack`
        self._begin()
        if self._layouts.get(kind) is not None:  # one of many instances
            return self._object(value, kind, mode)
        pack = _packers_by_class.get(kind) or _find_packer(kind)
        packed = None if pack is None else pack(self, value, mode)
        if packed is not None:
            return packed
        if issubclass(kind, enum.Enum):
            return self._enum(value, kind, mode)
        if issubclass(kind, tuple) and _is_named_tuple(kind) and (mode or self.has_name(kind)):
            self._check_hash(value, kind, mode)
            fields = dict(zip(value._fields, value, strict=True))
            items = self.named(fields, _attribute, mode or EXACT)
            return self.tag("named", *_module_and_name(kind), [*items.values()])
        if mode != KEY and self._is_container(kind):
            return self._object(value, kind, mode)
        # JSON carries an instance of a subclass as one of its base.
        for base, plain in _BASES:
            if issubclass(kind, base):
                return self.pack(plain(value), mode)
        return self._object(value, kind, mode)

    def _enum(self, value: Any, kind: type, mode: int) -> Any:  # noqa: ANN401  # as `pack`
        # The plain value is for a receiver without the class.
        plain = next((plain(value) for base, plain in _BASES if issubclass(kind, base)), _MISSING)
        self._check_hash(value, kind, mode)
        if not self.has_name(kind):
            return self._missing(value, kind) if plain is _MISSING else self.pack(plain, mode)
        fallback = [] if plain is _MISSING else [self.pack(plain, mode)]
        member = value._value_ if issubclass(kind, enum.Flag) else value._name_
        if issubclass(kind, enum.Flag) and type(member) is not int:
            self.refuse(value)
        return self.tag("enum", *_module_and_name(kind), self.pack(member), *fallback)

    def _check_hash(self, value: object, kind: type, mode: int) -> None:
        if mode == KEY and not _hashes_without_user_code(kind):
            self.refuse(
                value, f" with a __hash__ or __eq__ of its own, {_HASH_REFUSAL}", _HASH_HINT
            )

    def _is_container(self, kind: type) -> bool:
        """True for a dataclass that is a dictionary or a list, too."""
        if kind not in self._layouts and issubclass(kind, (dict, list)):
            layout = _layout(kind)
            self._layouts[kind] = layout if layout is not None and self.has_name(kind) else None
        return self._layouts.get(kind) is not None

    def has_name(self, kind: type) -> bool:
        """True if the other end finds the class by its name."""
        if kind not in self._named_classes:
            self._named_classes[kind] = find_class(*_module_and_name(kind), {}) is kind
        return self._named_classes[kind]

    def _missing(self, value: object, kind: type) -> NoReturn:
        module, qualname = _module_and_name(kind)
        if find_class(module, qualname, {}) is not None:
            self.refuse(
                value,
                f" of an earlier definition of the class, which {module} has anew by now",
                "make the value again, as by running the cell or the program that makes it",
            )
        self.refuse(
            value,
            f", and there is no class {qualname} in the module {module} to find it by",
            "define the class at the top level of a module; or send what the value is made of",
        )

    def _object(self, value: object, kind: type, mode: int) -> Tag:
        if kind not in self._layouts:
            self._layouts[kind] = _layout(kind)
        layout = self._layouts[kind]
        if layout is None:
            self.refuse(value, *_ADVICE.get(name_of(kind), ()))
        if mode == KEY:
            self.refuse(value, f", {_HASH_REFUSAL}", _HASH_HINT)
        if not self.has_name(kind):
            self._missing(value, kind)
        attributes = self.named(layout.read(value), _attribute, EXACT)
        if layout.base is not object:
            return self.tag(
                "container",
                *layout.module_and_name,
                attributes,
                self.pack(layout.items(value), EXACT),
            )
        return self.tag("object", *layout.module_and_name, attributes)


_MISSING = object()
_HASH_REFUSAL = "whose class would have to hash it where it arrives"
_HASH_HINT = "use values that Python hashes itself, such as text, numbers and tuples of them"
_ADVICE = {
    kind: (", which cannot travel", advice)
    for kind, advice in {
        "generator": "yield from it: the function is a generator then",
        "memoryview": "send bytes(...) of it",
        "argparse.Namespace": "send vars(...) of it",
        "types.SimpleNamespace": "send vars(...) of it",
    }.items()
}
#: Classes whose subclasses JSON carries, and the functions that make a plain value of an instance.
_BASES: tuple[tuple[type, Callable[[Any], Any]], ...] = (
    (str, str.__str__),
    (int, int.__pos__),
    (float, float.__pos__),
    (dict, lambda value: dict(value.items())),
    (list, list),
    (tuple, tuple),
)


def _subscript(key: object) -> str:
    text = json.dumps(key) if type(key) is str else introspection.shown(key)
    return f"[{text if len(text) <= 80 else f'{text[:80]}…'}]"


def _attribute(name: str) -> str:
    return f".{name}"


def name_of(kind: type) -> str:
    """The name of a class in messages."""
    module, qualname = _module_and_name(kind)
    return qualname if module == "builtins" else f"{module}.{qualname}"


def _module_and_name(kind: type) -> tuple[str, str]:
    """The module of a class, and its name there."""
    return introspection.module_of(kind), introspection.qualname_of(kind)


def _pack_datetime(packer: Packer, value: Any, _: int) -> Tag:  # noqa: ANN401
    naive = value.replace(tzinfo=None, fold=0)
    zone = packer.pack(value.tzinfo)
    return packer.tag(type(value).__name__, naive.isoformat(), value.fold, zone)


def _pack_zone(packer: Packer, value: Any, _: int) -> Tag:  # noqa: ANN401
    if value.key is None:
        packer.refuse(value, " without a name, which cannot travel")
    return packer.tag("zone", value.key)


def _pack_set(packer: Packer, value: Any, _: int) -> Tag:  # noqa: ANN401
    try:
        return packer.tag(type(value).__name__, packer.items(list(value), KEY))
    except UnfitError as error:
        error.path[-1] = " (an element)"
        raise


#: The fewest numbers of NumPy in a list that travel as an array.
_ARRAY_NUMBERS = 16


def _pack_numbers(packer: Packer, values: Sequence[Any]) -> Tag | None:
    """A list of many numbers of NumPy, all of one dtype, as an array; `None` for other lists."""
    if len(values) < _ARRAY_NUMBERS or "numpy" not in sys.modules:
        return None
    kinds = set(map(type, values))
    numpy = sys.modules["numpy"]
    (kind, *other_kinds) = kinds
    module = introspection.module_of(kind)
    if other_kinds or not issubclass(kind, (numpy.number, numpy.bool_)) or module != "numpy":
        return None
    # An array has one unit of time, which would change values of another unit.
    if kind is numpy.timedelta64 and len({value.dtype for value in values}) > 1:
        return None
    array = numpy.array(values)
    return packer.tag("np.list", array.dtype.str, packer.add(array.view("u1")))


Pack = Callable[[Packer, Any, int], Any]
#: The functions that make a tag of a value, by the package of its class; they return `None` for
#: other classes of that package. `kubetorch.wire.codecs` adds those of `kubetorch.wire.arrays`, and
#: their counterparts to `UNPACKERS`.
PACKERS: dict[str, Pack] = {"kubetorch": lambda *parts: _pack_handle(*parts)}


def _json_parts_packer(kind: str, parts: Callable[[Any], Iterable[object]]) -> Pack:
    """Makes tags of values whose parts are JSON."""
    return lambda packer, value, _: packer.tag(kind, *parts(value))


def _pack_bytes(packer: Packer, value: Any, _: int) -> Tag:  # noqa: ANN401
    return packer.tag(type(value).__name__, packer.add(value, 1))


def _pack_path(packer: Packer, value: Any, _: int) -> Tag:  # noqa: ANN401
    return packer.tag("path", type(value).__name__, packer.pack(str(value)))


def _pack_timezone(packer: Packer, value: Any, _: int) -> Tag:  # noqa: ANN401
    # Its offset, and its name if it has one.
    return packer.tag("timezone", *packer.items(value.__getinitargs__()))


def _pack_ordered(packer: Packer, value: Any, mode: int) -> Tag:  # noqa: ANN401
    kind = "counter" if type(value) is Counter else "ordered"
    return packer.tag(kind, packer.pack(dict(value), mode))


def _pack_defaultdict(packer: Packer, value: Any, mode: int) -> Any:  # noqa: ANN401
    """A `defaultdict`; a plain dictionary if its factory is a function, which cannot travel."""
    factory, items = value.default_factory, packer.pack(dict(value), mode)
    if factory is None:
        return packer.tag("defaultdict", None, items)
    if not (is_a(factory, type) and _is_factory(factory) and packer.has_name(factory)):
        return items
    return packer.tag("defaultdict", _module_and_name(factory), items)


def _pack_deque(packer: Packer, value: Any, mode: int) -> Tag:  # noqa: ANN401
    return packer.tag("deque", packer.items(list(value), mode), value.maxlen)


def _pack_handle(packer: Packer, value: Any, _: int) -> Tag | None:  # noqa: ANN401
    """A handle or a reference; `None` for other objects of Kubetorch, which are ordinary values."""
    describe = getattr(type(value), "_to_wire", None)
    if describe is None:
        return None
    if value.kind == "ref":
        *state, content = describe(value)
        return packer.tag("ref", *state, content and packer.add(content))
    if value.kind not in _HANDLES:
        return None
    return packer.tag("handle", value.kind, packer.pack(describe(value), EXACT))


_STANDARD: dict[tuple[str, str], Pack] = {
    ("collections", "OrderedDict"): _pack_ordered,
    ("collections", "Counter"): _pack_ordered,
    ("collections", "defaultdict"): _pack_defaultdict,
    ("collections", "deque"): _pack_deque,
    ("builtins", "bytes"): _pack_bytes,
    ("builtins", "bytearray"): _pack_bytes,
    ("builtins", "complex"): _json_parts_packer("complex", lambda value: (value.real, value.imag)),
    ("builtins", "set"): _pack_set,
    ("builtins", "frozenset"): _pack_set,
    ("datetime", "date"): _json_parts_packer("date", lambda value: (value.isoformat(),)),
    ("datetime", "time"): _pack_datetime,
    ("datetime", "datetime"): _pack_datetime,
    ("datetime", "timedelta"): _json_parts_packer(
        "timedelta", lambda value: (value.days, value.seconds, value.microseconds)
    ),
    ("datetime", "timezone"): _pack_timezone,
    ("zoneinfo", "ZoneInfo"): _pack_zone,
    ("decimal", "Decimal"): _json_parts_packer("decimal", lambda value: (str(value),)),
    ("uuid", "UUID"): _json_parts_packer("uuid", lambda value: (value.hex,)),
    ("pathlib", "PosixPath"): _pack_path,
    ("pathlib", "WindowsPath"): _pack_path,
    ("pathlib", "PurePosixPath"): _pack_path,
    ("pathlib", "PureWindowsPath"): _pack_path,
}
#: The functions for classes of the standard library and of `LIBRARIES` that were packed already.
_packers_by_class: dict[type, Pack] = {}


def _find_packer(kind: type) -> Pack | None:
    package, name = introspection.module_of(kind).partition(".")[0], introspection.name_of(kind)
    packer = _STANDARD.get((package, name))
    if packer is None or getattr(sys.modules.get(package), name, None) is not kind:
        packer = PACKERS.get(package)
    if packer is not None:
        _packers_by_class[kind] = packer
    return packer


#: Classes of libraries that no instance of a subclass gets beyond, by where they are defined.
_NEVER = {("torch.nn.modules.module", "Module"), ("torch.optim.optimizer", "Optimizer")}


def never_travels(kind: type) -> bool:
    """True if the class alone shows that its instances cannot travel.

    Of classes that others may stand for (abstract ones, protocols, those with subclasses), of
    built-in ones and of those of the libraries that have packers, nothing is shown.
    """
    mro = class_attribute(kind, "__mro__")
    if any(_module_and_name(base) in _NEVER for base in mro):
        return True
    package = introspection.module_of(kind).partition(".")[0]
    is_open: object = (
        package in sys.stdlib_module_names
        or package in PACKERS
        or type.__subclasses__(kind)
        or getattr(kind, "__abstractmethods__", None)
        or getattr(kind, "_is_protocol", False)
        or hasattr(kind, "_to_wire")
    )
    if is_open or issubclass(kind, (enum.Enum, *(base for base, _ in _BASES))):
        return False
    return _layout(kind) is None


# -------------------------------------------------------------------------------- users' classes


#: Bases that a dataclass may have; instances are made by the base, without code of the user.
_CONTAINERS = (OrderedDict, dict, list)


class _Layout:
    """The slots and the `__dict__` of instances of a class, read past the user's code."""

    def __init__(self, mro: Sequence[type]) -> None:
        self.module_and_name = _module_and_name(mro[0])
        #: The class that makes instances: a dataclass may be a dictionary or a list, too.
        self.base: Any = next((base for base in mro if base in _CONTAINERS), object)
        members: dict[str, Any] = {}
        for base in reversed(mro):
            members |= class_attribute(base, "__dict__")
        self._slots = {
            name: member for name, member in members.items() if is_a(member, MemberDescriptorType)
        }
        dictionary = [class_attribute(base, "__dict__").get("__dict__") for base in mro]
        self._dictionary = next(
            (member for member in dictionary if is_a(member, GetSetDescriptorType)), None
        )

    def read(self, value: object) -> dict[str, Any]:
        """The attributes of an instance."""
        attributes = {} if self._dictionary is None else dict(self._dictionary.__get__(value))
        for name, slot in self._slots.items():
            item = introspection.attempt(slot.__get__, _MISSING, value)  # it may not be set
            if item is not _MISSING:
                attributes[name] = item
        return attributes

    def items(self, value: Any) -> Any:  # noqa: ANN401  # an instance
        """The items of an instance that is a dictionary or a list, too."""
        return list(list.__iter__(value)) if self.base is list else dict(self.base.items(value))

    def build(self, cls: type, attributes: Mapping[str, Any], items: object = None) -> object:
        """An instance with these attributes and items, made without its constructor."""
        instance: Any = self.base.__new__(cls)
        if self.base is list:
            list.extend(instance, expect(items, list))
        elif self.base is not object:
            for key, item in expect(items, dict).items():
                self.base.__setitem__(instance, key, item)
        space = None if self._dictionary is None else self._dictionary.__get__(instance)
        for name, item in attributes.items():
            slot = self._slots.get(name)
            if slot is not None:
                slot.__set__(instance, item)
            elif space is None or name.startswith("__"):
                raise ValueError(f"a {self.module_and_name[1]} has no {name[:80]}")
            else:
                space[name] = item
        return instance


def _layout(cls: type) -> _Layout | None:
    """The layout of a dataclass or of a pydantic model; other classes have none."""
    mro = class_attribute(cls, "__mro__")
    spaces = [class_attribute(base, "__dict__") for base in mro]
    is_dataclass = any(is_a(space.get("__dataclass_fields__"), dict) for space in spaces)
    if not (is_dataclass or any(map(_is_base_model, mro))):
        return None
    # A finaliser would run with values of the peer. Bases in C cannot be checked.
    if any("__del__" in space for space in spaces):
        return None
    layout = _Layout(mro)
    if introspection.attempt(layout.base.__new__, None, cls) is None:
        return None
    return layout


def _is_base_model(cls: type) -> bool:
    module = sys.modules.get(introspection.module_of(cls))
    is_pydantics = introspection.module_of(cls) in ("pydantic.main", "pydantic.v1.main")
    return is_pydantics and names_of(module).get("BaseModel") is cls


def _is_named_tuple(cls: type) -> bool:
    mro = class_attribute(cls, "__mro__")
    spaces = [class_attribute(base, "__dict__") for base in mro]
    is_safe = not any("__del__" in space for space in spaces)
    return mro[-2:] == (tuple, object) and is_safe and any("_fields" in space for space in spaces)


#: Factories that a `defaultdict` may have, beside dataclasses and pydantic models.
_FACTORIES = frozenset(
    {
        *(bool, bytearray, bytes, complex, dict, float, frozenset, int, list, object, set, str),
        *(tuple, Counter, OrderedDict, defaultdict, deque),
    }
)


def _is_factory(cls: type) -> bool:
    return (type(cls) is type and cls in _FACTORIES) or _layout(cls) is not None


#: Modules whose classes have Python's own `__hash__` and `__eq__`.
_PYTHON_MODULES = frozenset({"builtins", "enum", "datetime", "decimal", "uuid"})


def _hashes_without_user_code(cls: type) -> bool:
    """True if hashing and comparing an instance runs no code of the user."""
    for name in ("__hash__", "__eq__"):
        owner = introspection.owner_of(cls, name)
        if owner is None or introspection.module_of(owner) not in _PYTHON_MODULES:
            return False
    return True


def find_class(module: str, qualname: str, modules: Mapping[str, str]) -> type | None:
    """A class of a module that is loaded, found without any `__getattr__`."""
    loaded = sys.modules.get(modules.get(module, module))
    space = names_of(loaded)
    cls: object = space.get(qualname)  # a generic model has dots in its name
    if cls is None:
        for part in qualname.split("."):
            cls = space.get(part)
            if not is_a(cls, type):
                return None
            space = class_attribute(cls, "__dict__")
    if not is_a(cls, type):
        return None
    # Callers keep classes in dictionaries, whose hash must not come from a metaclass of the user.
    owners = (introspection.owner_of(type(cls), name) for name in ("__hash__", "__eq__"))
    return cls if all(owner in (type, object) for owner in owners) else None


# ------------------------------------------------------------------------------------- decoding


def decode(segments: Sequence[Buffer], modules: Mapping[str, str]) -> Any:  # noqa: ANN401  # the user's
    """The value that `encode` made segments of.

    `modules` maps the other end's names of modules to names in this process.
    """
    head = segments[0]
    if head[0] != _HEAD_BYTE:
        try:
            return _parse(_decoder, head)
        except (ValueError, RecursionError) as error:
            raise SerializationError(f"a value arrived that is no JSON: {error}") from error
    try:
        unpacker = Unpacker(segments[1] if len(segments) > 1 else b"", modules)
        value = _parse(json.JSONDecoder(object_hook=unpacker.unpack), memoryview(head)[1:])
        unpacker.check_positions()
        return value
    except (SerializationError, *introspection.INTERRUPTS):
        raise
    except BaseException as error:  # a library may raise anything for malformed values
        # A panic of polars is no `Exception`; any other such exception is not a library's.
        if (
            not isinstance(error, Exception)
            and introspection.name_of(type(error)) != "PanicException"
        ):
            raise
        raise SerializationError(
            f"the value cannot be rebuilt here: {introspection.summary(error)}",
            hint="both ends need compatible versions of the libraries that it is made with",
        ) from error


_decoder = json.JSONDecoder()


def _parse(decoder: json.JSONDecoder, text: Buffer) -> Any:  # noqa: ANN401  # the user's own value
    characters = str(text, "utf-8")
    value, end = decoder.raw_decode(characters)
    if end != len(characters):
        raise ValueError(f"{len(characters) - end} characters after the value")
    return value


class Unpacker(_Rows):
    """Makes values of JSON objects with tags, the inner values first."""

    def __init__(self, area: Buffer, modules: Mapping[str, str]) -> None:
        self._area = memoryview(area).cast("B")
        self._remaining_bytes = len(self._area)
        self._positions: list[tuple[int, int]] = []
        self._arrays_by_offset: dict[int, object] = {}
        self.modules = modules
        self._classes: dict[tuple[str, str], type | None] = {}
        # The classes of `_classes` that exist here.
        self._types: set[type] = set()
        self._layouts: dict[type, _Layout | None] = {}

    def unpack(self, tagged: dict[str, Any]) -> Any:  # noqa: ANN401  # the user's own value
        """The value that a JSON object stands for."""
        if TAG not in tagged:
            return tagged
        kind, *parts = expect(tagged[TAG], list)
        if len(tagged) != 1 or type(kind) is not str:
            raise ValueError("a tag that is none")
        unpack = UNPACKERS.get(kind)
        if unpack is None:
            raise SerializationError(
                f"a value of the kind {kind!r:.80} arrived, which is unknown here",
                hint="the other end is newer: pip install -U kubetorch, or deploy again",
            )
        return unpack(self, *parts)

    def keep(self, position: list[int], array: Array) -> Array:
        """Keep an array that was made of the bytes at a position: a later tag may repeat it."""
        if position[1]:
            self._arrays_by_offset[position[0]] = array
        return array

    def repeated_array(self, offset: object) -> object:
        """The array at an offset, which an earlier part of the text has."""
        return self._arrays_by_offset[expect(offset, int)]

    def buffer(self, position: object, *, is_writable: bool = False) -> memoryview:
        """The bytes at a position; all such bytes together are no more than the buffers have."""
        offset, size = expect(position, list)
        if type(offset) is not int or type(size) is not int:
            raise ValueError("a place that is none")
        self._remaining_bytes -= size
        if not 0 <= offset <= offset + size <= len(self._area) or self._remaining_bytes < 0:
            raise ValueError(f"there are no {size} bytes at {offset}")
        if is_writable and self._area.readonly:
            self._area = memoryview(bytearray(self._area))
        if size:
            self._positions.append((offset, size))
        return self._area[offset : offset + size]

    def check_positions(self) -> None:
        """Refuse positions that overlap: a write to one value would change another.

        That other value may be a table whose offsets were checked only when it arrived.
        """
        end = 0
        for offset, size in sorted(self._positions):
            if offset < end:
                raise ValueError(f"two values have the bytes at {offset}")
            end = offset + size

    def library(self, name: str, description: str) -> Any:  # noqa: ANN401  # a module
        """Import one of `LIBRARIES`; the description of the value is for the error."""
        assert name in LIBRARIES
        try:
            return importlib.import_module(name)
        except ImportError as error:
            raise SerializationError(
                f"{description} arrived, and {name} cannot be imported here: {error}",
                hint=f'in pods: kt.Image().pip_install(["{name}"]); else pip install {name}',
            ) from error

    def key(self, value: Any) -> Any:  # noqa: ANN401  # the user's own value
        """A value that will be hashed; refuses it if its hash runs code of the user."""
        kind = type(value)
        if kind is tuple:
            for item in value:
                self.key(item)
        elif kind in self._layouts or (kind in self._types and not _hashes_without_user_code(kind)):
            raise ValueError(f"a {name_of(kind)} to hash")
        elif kind in self._types and issubclass(kind, tuple):
            for item in tuple.__iter__(value):
                self.key(item)
        return value

    def keys(self, values: Iterable[Any]) -> list[Any]:
        """Values that will be hashed; refuses them if many different values have one hash.

        Python would compare each of these with all others, and hashes of numbers are no secret.
        """
        keys = [self.key(value) for value in values]
        if len(keys) > _COLLIDING_KEYS:
            hashes = [hash(value) for value in keys]
            crowds: dict[int, list[Any]] = {
                number: [] for number, count in Counter(hashes).items() if count > _COLLIDING_KEYS
            }
            for number, value in zip(hashes, keys, strict=True) if crowds else ():
                crowd = crowds.get(number)
                if crowd is not None and not any(value == crowd_key for crowd_key in crowd):
                    crowd.append(value)
                    if len(crowd) > _DIFFERENT_KEYS:
                        raise ValueError(f"{_COLLIDING_KEYS} keys or elements of one hash")
        return keys

    def find(self, module: object, qualname: object) -> type | None:
        name = expect(module, str), expect(qualname, str)
        if name not in self._classes:
            cls = self._classes[name] = find_class(*name, self.modules)
            if cls is not None:
                self._types.add(cls)
        return self._classes[name]

    def member(self, module: object, qualname: object, member: object, *plain: object) -> object:
        """A member of an enumeration; its plain value if this process has no such member."""
        cls = self.find(module, qualname)
        if is_a(cls, enum.EnumMeta):
            enum_member = _member(cls, member)
            if enum_member is not None:
                return enum_member
        if plain:
            return plain[0]
        shown = member if type(member) in (str, int) else "?"
        return self._missing(f"{expect(qualname, str)[:200]}.{shown!s:.200}", module)

    def named_tuple(self, module: object, qualname: object, items: object) -> tuple[Any, ...]:
        """A named tuple; a plain tuple if this process has no such class."""
        cls = self.find(module, qualname)
        if cls is None or not _is_named_tuple(cls):
            return tuple(expect(items, list))
        return tuple.__new__(cls, expect(items, list))

    def instance(self, module: object, qualname: object, attributes: object) -> object:
        """An instance of a dataclass or of a pydantic model."""
        cls = self.find(module, qualname)
        if cls is None:
            self._missing(f"class {expect(qualname, str)[:200]}", module)
        layout = self._layout(cls)
        if layout is None or layout.base is not object:
            raise SerializationError(f"{name_of(cls)} is no dataclass or pydantic model here")
        return layout.build(cls, expect(attributes, dict))

    def container(
        self, module: object, qualname: object, attributes: object, items: object
    ) -> object:
        """A dataclass that is a dictionary or a list; its plain items without such a class here."""
        cls = self.find(module, qualname)
        layout = None if cls is None else self._layout(cls)
        if cls is None or layout is None or layout.base is object:
            return items
        return layout.build(cls, expect(attributes, dict), items)

    def _layout(self, cls: type) -> _Layout | None:
        if cls not in self._layouts:
            self._layouts[cls] = _layout(cls)
        return self._layouts[cls]

    def _missing(self, description: str, module: object) -> NoReturn:
        raise SerializationError(
            f"a value arrived whose {description} is not in the module {module!s:.200} here",
            hint=f"import {module!s:.200} before the call, in the version of the other end",
        )


def _member(cls: enum.EnumMeta, member: object) -> object:
    """A member of an enumeration by its name, or of flags by its value."""
    space = class_attribute(cls, "__dict__")
    if type(member) is str:
        return space["_member_map_"].get(member)
    if not issubclass(cls, enum.Flag):
        return None
    enum_member = space["_value2member_map_"].get(expect(member, int))
    if enum_member is None:
        # Several flags at once; only if neither class nor metaclass overrides how members are made.
        owner = introspection.owner_of(cls, "_missing_")
        is_plain = owner is not None and introspection.module_of(owner) == "enum"
        if type(cls) is enum.EnumMeta and is_plain and space["_member_type_"] in (object, int):
            with contextlib.suppress(ValueError):  # there are no such flags
                enum_member = enum.EnumMeta.__call__(cls, member)
    return enum_member


#: The classes of handles of services, by the kind of service.
_HANDLES = {"fn": ("kubetorch.sdk.fn", "Fn"), "cls": ("kubetorch.sdk.cls", "Cls")}


def _standard(module: str, name: str) -> Any:  # noqa: ANN401  # a class
    """A class of the standard library, imported late: most values need no slow module."""
    return getattr(importlib.import_module(module), name)


def _unpack_dict(unpacker: Unpacker, pairs: object) -> dict[Any, Any]:
    items = [expect(pair, list) for pair in expect(pairs, list)]
    keys = unpacker.keys(key for key, _ in items)
    return dict(zip(keys, (value for _, value in items), strict=True))


def _unpack_defaultdict(unpacker: Unpacker, factory: object, items: object) -> object:
    """A `defaultdict` with a factory of the allowed classes; an unknown class becomes `None`."""
    cls = None if factory is None else unpacker.find(*expect(factory, list))
    if cls is not None and not _is_factory(cls):
        raise ValueError(f"{name_of(cls)} is no class to make values by")
    return defaultdict(cls, expect(items, dict))


def _unpack_counter(unpacker: Unpacker, items: object) -> object:
    del unpacker
    counter: Counter[Any] = Counter()
    dict.update(counter, expect(items, dict))
    return counter


def _unpack_deque(unpacker: Unpacker, items: object, length: object) -> object:
    del unpacker
    return deque(expect(items, list), None if length is None else expect(length, int))


def _unpack_handle(unpacker: Unpacker, kind: object, state: object) -> object:
    del unpacker
    cls: Any = _standard(*_HANDLES[expect(kind, str)])
    return cls._from_wire(expect(state, dict))


def _unpack_reference(unpacker: Unpacker, *parts: object) -> object:
    identity, creator, size, sizes, position = parts
    segments = tuple(expect(segment, int) for segment in expect(sizes, list))
    state = expect(identity, str), expect(creator, str), expect(size, int), segments
    content = None if position is None else unpacker.buffer(position)
    cls: Any = _standard("kubetorch.sdk.refs", "Ref")
    return cls._from_wire(state, content, unpacker.modules)


def _unpack_zoned(name: str) -> Callable[[Unpacker, object, object, object], object]:
    def unpack(unpacker: Unpacker, text: object, fold: object, zone: object) -> object:
        del unpacker
        cls = _standard("datetime", name)
        moment = cls.fromisoformat(expect(text, str))
        return moment.replace(tzinfo=checked_zone(zone), fold=expect(fold, int))

    return unpack


def is_zone(value: object) -> bool:
    kind = type(value)
    name = introspection.module_of(kind), introspection.name_of(kind)
    return name in (("datetime", "timezone"), ("zoneinfo", "ZoneInfo"))


def checked_zone(value: Any) -> Any:  # noqa: ANN401  # a part of a tag
    """A time zone of the standard library, or `None`."""
    if value is not None and not is_zone(value):
        raise ValueError("a time zone that is none")
    return value


def _unpack_path(unpacker: Unpacker, flavour: object, text: object) -> object:
    del unpacker
    name = expect(flavour, str)
    is_pure = name in ("PurePosixPath", "PureWindowsPath")
    return _standard("pathlib", name if is_pure else "Path")(expect(text, str))


def _unpack_timezone(unpacker: Unpacker, offset: object, *name: object) -> object:
    del unpacker
    return _standard("datetime", "timezone")(
        expect(offset, _standard("datetime", "timedelta")), *(expect(part, str) for part in name)
    )


UNPACKERS: dict[str, Callable[..., object]] = {
    "dict": _unpack_dict,
    "again": Unpacker.repeated_array,
    "tuple": lambda _, items: tuple(expect(items, list)),
    "set": lambda unpacker, items: set(unpacker.keys(expect(items, list))),
    "frozenset": lambda unpacker, items: frozenset(unpacker.keys(expect(items, list))),
    "int": lambda _, text: int(expect(text, str), 16),
    "str": lambda _, text: bytes.fromhex(expect(text, str)).decode(errors="surrogatepass"),
    "bytes": lambda unpacker, position: bytes(unpacker.buffer(position)),
    "bytearray": lambda unpacker, position: bytearray(unpacker.buffer(position)),
    "complex": lambda _, real, imag: complex(expect(real, float), expect(imag, float)),
    "date": lambda _, text: _standard("datetime", "date").fromisoformat(expect(text, str)),
    "time": _unpack_zoned("time"),
    "datetime": _unpack_zoned("datetime"),
    "timedelta": lambda _, *parts: _standard("datetime", "timedelta")(
        *(expect(i, int) for i in parts)
    ),
    "timezone": _unpack_timezone,
    "zone": lambda _, key: _standard("zoneinfo", "ZoneInfo")(expect(key, str)),
    "decimal": lambda _, text: _standard("decimal", "Decimal")(expect(text, str)),
    "uuid": lambda _, text: _standard("uuid", "UUID")(expect(text, str)),
    "path": _unpack_path,
    "enum": Unpacker.member,
    "named": Unpacker.named_tuple,
    "object": Unpacker.instance,
    "container": Unpacker.container,
    "ordered": lambda _, items: OrderedDict(expect(items, dict)),
    "counter": _unpack_counter,
    "defaultdict": _unpack_defaultdict,
    "deque": _unpack_deque,
    "handle": _unpack_handle,
    "ref": _unpack_reference,
}
