"""What `values` are on the wire: what was sent once is read, and written, in the same way for ever.

`python tests/contract/test_wire_values.py` writes those down that are not there yet.
"""

from __future__ import annotations

import collections
import dataclasses
import datetime
import decimal
import enum
import json
import pathlib
import sys
import types
import uuid
import zoneinfo
from pathlib import Path
from typing import Any, NamedTuple

import numpy
import pandas
import polars
import pyarrow
import pytest

import kubetorch as kt
from kubetorch.wire import codecs, values

GOLDENS = Path(__file__).with_name("wire_values.json")
MODULE = "kt_wire_values"


class Color(enum.Enum):
    RED = 1


class Level(enum.IntEnum):
    LOW = 1


class Right(enum.Flag):
    READ = 1
    WRITE = 2


class Pair(NamedTuple):
    left: int
    right: int


@dataclasses.dataclass
class Point:
    x: int
    y: tuple[int, ...]


@dataclasses.dataclass
class Record(dict):  # type: ignore[type-arg]
    name: str = ""

    def __repr__(self) -> str:
        return f"Record({self.name!r}, {dict(self)})"


sys.modules[MODULE] = types.ModuleType(MODULE)
for _cls in (Color, Level, Right, Pair, Point, Record):
    _cls.__module__ = MODULE
    setattr(sys.modules[MODULE], _cls.__name__, _cls)

PARIS = zoneinfo.ZoneInfo("Europe/Paris")
FRAME = pandas.DataFrame(
    {
        "i": [1, 2],
        "f": [1.5, None],
        "o": pandas.Series(["a", None], dtype=object),
        "c": pandas.Categorical(["x", "y"]),
        "t": pandas.DatetimeIndex(["2020", "2021"], dtype="datetime64[ns]").tz_localize("UTC"),
        "m": pandas.array([1, None], dtype="Int64"),
        "p": pandas.PeriodIndex(["2020-01", "2020-02"], freq="M"),
        "s": pandas.array(["a", None], dtype=pandas.StringDtype("python")),
    },
    index=pandas.MultiIndex.from_tuples([("a", 1), ("b", 2)], names=["k", None]),
)
VALUES: dict[str, Any] = {
    "arguments": {"args": [3, "é", 1.5, True, None, [1], {"a": {}}], "kwargs": {"lr": 0.1}},
    "infinity": [float("inf"), float("-inf")],
    "keys": {1: "a", "1": "b", None: 1, 2.5: 3, (1, ("x",)): 4, b"b": 5},
    "flags as keys": {True: 1, False: 0},
    "key of tags": {"$": ["int", "0x1"]},
    "large integer": [2**20000, -(2**20000)],
    "surrogates": ["\ud800", {"\udc80": 1}],
    "bytes": [b"abc", b"", bytearray(b"xyz"), b"l" * 100],
    "sets": [{1}, frozenset({("a", 1)})],
    "complex": 1 + 2j,
    "dates": [
        datetime.date(2020, 1, 2),
        datetime.time(1, 2, 3, 4),
        datetime.datetime(2020, 10, 25, 2, 30, fold=1, tzinfo=PARIS),
        datetime.datetime(2020, 1, 1, tzinfo=datetime.timezone.utc),
        datetime.timezone(datetime.timedelta(hours=1), "X"),
        datetime.timedelta(-1, 2, 3),
        PARIS,
    ],
    "decimal": [decimal.Decimal("1.10"), decimal.Decimal("-Infinity")],
    "uuid": uuid.UUID(int=1),
    "paths": [pathlib.PurePosixPath("/a"), pathlib.PureWindowsPath("c:/b"), pathlib.Path("c")],
    "enumerations": [Color.RED, Level.LOW, Right.READ | Right.WRITE],
    "containers": [Record("a")],
    "classes": [Point(1, (2,)), Point(Pair(1, 2), ())],  # type: ignore[arg-type]
    "named tuple": Pair(1, (2,)),  # type: ignore[arg-type]
    "ordered": collections.OrderedDict({"b": 1, 2: [3]}),
    "counter": collections.Counter("aab"),
    "dictionaries with a default": [
        collections.defaultdict(None, a=1),
        collections.defaultdict(list, {1: [2]}),
        collections.defaultdict(Point),
    ],
    "deques": [collections.deque([1, [2]]), collections.deque("ab", maxlen=2)],
    "handles": [kt.Fn("train"), kt.Cls("counter")],
    "reference": kt.Ref._from_wire(("r" * 22, "laptop, process 7", 3, (3,)), b"[7]", {}),
    "array": numpy.arange(6, dtype="<i4").reshape(2, 3),
    "array in columns": numpy.asfortranarray(numpy.arange(6, dtype="<f8").reshape(2, 3)),
    "arrays of one": numpy.array([True]),
    "array of records": numpy.zeros(2, [("a", "<i4"), ("b", "<f8", (2,))]),
    "array of objects": numpy.array([1, "a", None], dtype=object),
    "array of moments": numpy.array(["2020-01-01"], dtype="<M8[ns]"),
    "empty array": numpy.zeros((0, 3), "<f4"),
    "scalars": [numpy.float64(1.5), numpy.int8(-1), numpy.str_("a"), numpy.bytes_(b"b")],
    "many numbers": list(numpy.arange(20, dtype="<f8")),
    "frame": FRAME,
    "series": pandas.Series([1, 2], index=pandas.RangeIndex(2, name="i"), name="n", dtype="int64"),
    "index": pandas.Index([1.5, 2.5], name="x"),
    "scalars of pandas": [
        pandas.Timestamp("2020-01-01", tz="UTC").as_unit("ns"),
        pandas.Timedelta(5, "ns"),
        pandas.NaT,
        pandas.NA,
    ],
}
#: Their streams are the libraries' own, which write them differently from version to version.
STREAMS: dict[str, Any] = {
    "table": pyarrow.table({"a": [1, None], "s": ["x", "y"]}),
    "batch": pyarrow.table({"a": [1]}).to_batches()[0],
    "arrow array": pyarrow.array([1, None]),
    "arrow chunks": pyarrow.chunked_array([[1], [2]]),
    "frame of polars": polars.DataFrame({"a": [1, None], "s": ["x", "y"]}),
    "series of polars": polars.Series("a", [1, 2]),
}
WRITTEN: dict[str, list[str]] = json.loads(GOLDENS.read_text()) if GOLDENS.exists() else {}


@pytest.fixture(autouse=True)
def _skip_old(request: pytest.FixtureRequest) -> None:
    name = getattr(request.node, "callspec", None) and request.node.callspec.params["name"]
    if name == "frame" and pandas.__version__ < "3":
        pytest.skip("columns have a dtype of their own for names from pandas 3 on")


def _encoded(value: Any) -> list[str]:
    text, *area = codecs.encode("values", value)
    return [bytes(text).decode(), *(b"".join(codecs.join([segment])).hex() for segment in area)]


def _read(name: str) -> Any:
    text, *area = WRITTEN[name]
    segments = [text.encode(), *(memoryview(bytearray.fromhex(segment)) for segment in area)]
    return codecs.decode("values", segments)


@pytest.mark.parametrize("name", VALUES)
def test_a_value_is_written_as_it_always_was(name: str) -> None:
    assert _encoded(VALUES[name]) == WRITTEN[name]


@pytest.mark.parametrize("name", [*VALUES, *STREAMS])
def test_what_was_written_once_is_read(name: str) -> None:
    read_value, value = _read(name), {**VALUES, **STREAMS}[name]
    assert type(read_value) is type(value)
    if name == "large integer":
        assert read_value == value
    elif name.startswith("arrow"):
        assert read_value.equals(value)
    else:
        assert repr(read_value) == repr(value)


def test_each_kind_of_value_is_written_down() -> None:
    written = "".join(text for text, *_ in WRITTEN.values())
    kinds = {*values.UNPACKERS} - {"torch.tensor", "np.strings", "again"}
    assert {kind for kind in kinds if f'"$":["{kind}"' not in written} == set()


if __name__ == "__main__":
    written_values = {name: _encoded(value) for name, value in {**VALUES, **STREAMS}.items()}
    GOLDENS.write_text(
        json.dumps({**written_values, **WRITTEN}, indent=1, ensure_ascii=True) + "\n"
    )
