"""Changes encoded values, decodes them, and uses what comes of that.

    python -m tests.local.value_fuzzer            # without an end; prints what it finds
    python -m tests.local.value_fuzzer 7 1234     # input 1234 of the seed 7 alone

An input is a value of `SAMPLES` as it is encoded, whose text and bytes are changed. A process of
its own decodes it; prints, indexes, copies, compares and writes what was decoded; and sends it on.
It is a finding if that process dies, needs a gigabyte or ten seconds, if decoding or encoding
raises anything but a `SerializationError`, or if what encodes is not decoded.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import datetime
import decimal
import enum
import io
import json
import os
import random
import resource
import signal
import subprocess
import sys
import traceback
import uuid
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy
import pandas
import polars
import pyarrow

from kubetorch.errors import SerializationError
from kubetorch.wire import codecs

UTC = datetime.timezone.utc
THIS_MODULE = "tests.local.value_fuzzer"
ROOT = Path(__file__).parents[2]
#: Bytes and seconds of the processor that the use of one input may take.
MEMORY, SECONDS = 1 << 30, 10
#: Rows and items that are looked at one by one.
_SOME = 500


@dataclasses.dataclass
class Point:
    x: int
    more: Any = None


class Color(enum.Flag):
    RED = 1
    BLUE = 2


class Finding(NamedTuple):
    """What is wrong with an input, whose number it has."""

    number: int
    problem: str


# -------------------------------------------------------------------------------------- samples


def _arrow_arrays() -> dict[str, Any]:
    texts = pyarrow.array(["a", None, "größer" * 5])
    lists = pyarrow.array([[1, 2], None, []], pyarrow.list_(pyarrow.int32()))
    codes, offsets = pyarrow.array([0, 1, 0], "i1"), pyarrow.array([0, 0, 1], "i4")
    parts = [pyarrow.array([1, 2]), pyarrow.array(["u"])]
    sparse = [pyarrow.array([1, 2, 3]), texts]
    return {
        "integers": pyarrow.array([1, None, 3]),
        "flags": pyarrow.array([True, None, False]),
        "texts": texts,
        "large texts": texts.cast(pyarrow.large_string()),
        "views": pyarrow.array(["x" * 20, None, "y"], pyarrow.string_view()),
        "lists": lists,
        "large lists": lists.cast(pyarrow.large_list(pyarrow.int32())),
        "list views": pyarrow.array([[1, 2], None, [3]], pyarrow.list_view(pyarrow.int8())),
        "fixed lists": pyarrow.array([[1, 2], None], pyarrow.list_(pyarrow.int16(), 2)),
        "fixed bytes": pyarrow.array([b"abc", None], pyarrow.binary(3)),
        "structs": pyarrow.array([{"a": 1, "b": "x"}, None]),
        "maps": pyarrow.array([[("a", 1)], None], pyarrow.map_(pyarrow.string(), pyarrow.int8())),
        "dictionaries": texts.dictionary_encode(),
        "dictionaries in lists": pyarrow.ListArray.from_arrays(
            [0, 2, 3], texts.dictionary_encode()
        ),
        "dense": pyarrow.UnionArray.from_dense(codes, offsets, parts),
        "sparse": pyarrow.UnionArray.from_sparse(codes, sparse),
        "runs": pyarrow.RunEndEncodedArray.from_arrays([2, 5], ["a", "b"]),
        "nulls": pyarrow.nulls(4),
        "decimals": pyarrow.array([decimal.Decimal("1.10"), None]),
        "moments": pyarrow.array([datetime.datetime(2020, 1, 1), None]),
        "zoned": pyarrow.array([1, None], pyarrow.timestamp("us", "Europe/Berlin")),
        "days": pyarrow.array([86_400_000, None], pyarrow.date64()),
        "times": pyarrow.array([1, None], pyarrow.time64("ns")),
        "durations": pyarrow.array([1, None], pyarrow.duration("s")),
        "intervals": pyarrow.array([(1, 2, 3), None], pyarrow.month_day_nano_interval()),
        "halves": pyarrow.array(numpy.array([1.5], "f2")),
    }


def _numpy_values() -> dict[str, Any]:
    dtypes = "?bBhHiIqQefdgFDG"
    fields = numpy.dtype([(("title", "a"), "<i4"), ("b", "<f8", (2, 2)), ("c", [("d", "<U3")])])
    return {
        **{f"array {char}": numpy.arange(4).astype(char) for char in dtypes},
        "square": numpy.arange(6.0).reshape(2, 3),
        "columns": numpy.asfortranarray(numpy.arange(6.0).reshape(2, 3)),
        "big": numpy.arange(4, dtype=">i4"),
        "empty": numpy.zeros((0, 3)),
        "texts": numpy.array(["a", "bcd"]),
        "bytes": numpy.array([b"a", b"bcd"]),
        "voids": numpy.zeros(2, "V3"),
        "days": numpy.array(["2020-01-01", "NaT"], "M8[D]"),
        "spans": numpy.array([1, 2], "m8[25us]"),
        "fields": numpy.zeros(3, fields),
        "one with fields": numpy.zeros(3, fields)[0],
        "objects": numpy.array([1, "a", None, (1,)], object),
        "strings": numpy.array(["a", "größer"], numpy.dtypes.StringDType()),
        "scalars": [numpy.float32(1), numpy.int8(2), numpy.str_("a"), numpy.bytes_(b"b")],
        "moments": [numpy.datetime64("2020-01-01"), numpy.timedelta64(1, "ns")],
        "numbers": [numpy.float64(number) for number in range(20)],
        "twice": [numpy.arange(9)] * 2,
    }


def _pandas_values() -> dict[str, Any]:
    days = pandas.date_range("2020-01-01", periods=3, tz="Europe/Berlin")
    columns = {
        "numbers": [1.5, None, 3.0],
        "texts": ["a", None, "c"],
        "python": pandas.array(["a", None, "c"], pandas.StringDtype("python")),
        "arrow": pandas.array(["a", None, "c"], pandas.StringDtype("pyarrow")),
        "category": pandas.Categorical(["u", "v", None], ordered=True),
        "masked": pandas.array([1, None, 3], "Int16"),
        "flags": pandas.array([True, None, False], "boolean"),
        "days": days,
        "spans": days - days[0],
        "periods": pandas.period_range("2020-01", periods=3, freq="M"),
        "intervals": pandas.interval_range(0, 3),
        "lists": pandas.array([[1], None, []], pandas.ArrowDtype(pyarrow.list_(pyarrow.int8()))),
        "objects": [1, "a", (2,)],
    }
    pairs = pandas.MultiIndex.from_tuples([("p", 1), ("q", 2), ("q", 3)], names=["k", "l"])
    frame = pandas.DataFrame({"a": [1, 2, 3], "b": [4, 5, 6], "c": ["x", None, "y"]}, index=pairs)
    return {
        **{f"series {name}": pandas.Series(values) for name, values in columns.items()},
        **{f"index {name}": pandas.Index(columns[name]) for name in columns if name != "lists"},
        "frame": frame,
        "whole": pandas.DataFrame({**columns, "n": range(3)}),
        "pairs": pairs,
        "range": pandas.RangeIndex(2, 10, 3),
        "weeks": pandas.date_range("2020-01-01", periods=4, freq="W"),
        "quarters": pandas.period_range("2020-01", periods=3, freq="Q-MAR"),
        "hours": pandas.period_range("2020-01", periods=3, freq="h"),
        "business": pandas.Series(pandas.PeriodIndex.from_ordinals([1, 2], freq="W-TUE")),
        "moment": [pandas.Timestamp("2020-01-01", tz="UTC"), pandas.Timedelta(5), pandas.NaT],
    }


def _polars_values() -> dict[str, Any]:
    columns = {
        "numbers": [1, None, 3],
        "texts": ["a", None, "größer" * 5],
        "flags": [True, None, False],
        "lists": [[1], None, []],
        "structs": [{"a": 1}, None, {"a": 2}],
        "days": [datetime.date(2020, 1, 1), None, None],
        "moments": [datetime.datetime(2020, 1, 1), None, None],
        "spans": [datetime.timedelta(1), None, None],
        "decimals": [decimal.Decimal("1.5"), None, None],
        "bytes": [b"a", None, b"b" * 20],
        "nulls": [None] * 3,
    }
    series = {f"pl {name}": polars.Series(name, values) for name, values in columns.items()}
    series["pl category"] = polars.Series(["a", "b", "a"], dtype=polars.Categorical)
    series["pl enum"] = polars.Series(["a", "b"], dtype=polars.Enum(["a", "b"]))
    series["pl arrays"] = polars.Series([[1, 2], None], dtype=polars.Array(polars.Int8, 2))
    return {**series, "pl frame": polars.DataFrame(columns)}


def _torch_values() -> dict[str, Any]:
    if "torch" not in sys.modules:
        return {}
    torch = sys.modules["torch"]
    kinds = ("float32", "float16", "bfloat16", "bool", "int64", "complex64", "uint8", "uint16")
    tensors = {f"torch {kind}": torch.ones(2, 3).to(getattr(torch, kind)) for kind in kinds}
    strided = torch.arange(6.0).reshape(2, 3).T
    return {**tensors, "strided": strided, "parameter": torch.nn.Parameter(torch.ones(3))}


def _samples() -> list[Any]:
    arrays = _arrow_arrays()
    batch = pyarrow.record_batch({"a": arrays["integers"], "b": arrays["texts"]})
    batches = [batch, batch.slice(1), batch]
    plain = {
        "a": [1, 2.5, None, True, "größer", b"bytes" * 3, bytearray(b"x"), 2**80, 1j],
        "b": {1: (2,), None: {1.5, "a"}, (1, 2): frozenset([3])},
        "c": [datetime.datetime(2020, 1, 1, tzinfo=UTC), datetime.time(1), datetime.date(1, 1, 1)],
        "d": [decimal.Decimal("1.5"), uuid.UUID(int=5), Path("/a"), datetime.timedelta(1, 2, 3)],
        "e": [Point(1, [Point(2, (3,))]), Color.RED | Color.BLUE, Color.RED],
    }
    return [
        plain,
        *arrays.values(),
        *(pyarrow.table({"": array}) for array in arrays.values()),
        pyarrow.Table.from_batches(batches),
        batch,
        pyarrow.chunked_array([[1], [2, 3]]),
        *_numpy_values().values(),
        *_pandas_values().values(),
        *_polars_values().values(),
        *_torch_values().values(),
    ]


# -------------------------------------------------------------------------------------- changes

_NUMBERS = [0, 1, 2, 3, 7, 8, 15, 16, 255, 256, 2**15, 2**20, 2**24]
_NUMBERS += [2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**40, 2**62, 2**63 - 1, 2**63, 2**64, 10**30]
_NUMBERS += [-1, -2, -(2**31), -(2**63)]
_TEXTS = [
    "",
    "|u1",
    "<i4",
    ">i8",
    "<f8",
    "<f16",
    "?",
    "|b1",
    "<U3",
    "<U0",
    "|S9",
    "|V5",
    "<c32",
    "O",
]
_TEXTS += ["<M8[ns]", "<M8", "<m8[0s]", "<M8[999999999Y]", "<m8[25as]", "<M8[W]", "F", "C", "A"]
_TEXTS += ["array", "category", "zoned", "text", "string", "arrow", "masked", "period", "interval"]
_TEXTS += ["range", "multi", "values", "ns", "s", "NA", "nan", "NaT", "both", "neither", "Int64"]
_TEXTS += [
    "period[D]",
    "period[B]",
    "period[W-TUE]",
    "period[ns]",
    "period[3Q-MAR]",
    "D",
    "W",
    "ME",
]
_TEXTS += ["bool", "float32", "bfloat16", "complex128", "uint16", "qint8", "bits8", "UTC", "1e999"]


class Changer:
    """Makes inputs of encoded samples; the same ones for the same seed."""

    def __init__(self) -> None:
        self.pairs = [_encode(sample) for sample in _samples()]

    def make(self, seed: int, number: int) -> list[bytearray]:
        chance = random.Random(f"{seed} {number}")
        if chance.random() < 0.2:
            return _fields(chance)
        text, area = chance.choice(self.pairs)
        tree = json.loads(text)
        area = bytearray(area)
        for _ in range(chance.choice((1, 1, 1, 2, 3, 5))):
            if area and chance.random() < 0.5:
                self._change_bytes(chance, area)
            else:
                tree = self._change_tree(chance, tree)
        return [bytearray(b"$" + json.dumps(tree).encode()), area]

    def _change_bytes(self, chance: random.Random, area: bytearray) -> None:
        offset = chance.randrange(len(area))
        draw = chance.random()
        if draw < 0.3:
            area[offset] ^= 1 << chance.randrange(8)
        elif draw < 0.8:
            size = chance.choice((1, 2, 4, 4, 4, 8, 8))
            offset -= offset % size
            number = chance.choice(_NUMBERS) + chance.choice((0, 0, 0, 1, -1))
            area[offset : offset + size] = (number % 256**size).to_bytes(size, "little")
        elif draw < 0.9:
            to, size = chance.randrange(len(area)), chance.randrange(1, 65)
            piece = area[offset : offset + size]
            area[to : to + len(piece)] = piece
        elif draw < 0.95:
            area += bytes(chance.randrange(1, 65))
        else:
            area[offset:] = b""

    def _change_tree(self, chance: random.Random, tree: Any) -> Any:
        containers: list[Any] = []
        places: list[tuple[Any, Any]] = []
        containers.append(tree)
        for node in containers:
            keys = node if isinstance(node, dict) else range(len(node))
            for key in keys:
                places.append((node, key))
                if isinstance(node[key], (dict, list)) and node[key]:
                    containers.append(node[key])
        if not places:
            return tree
        node, key = chance.choice(places)
        node[key] = self._other_value(chance, node[key])
        return tree

    def _other_value(self, chance: random.Random, value: Any) -> Any:
        draw = chance.random()
        if draw < 0.05:
            text, _ = chance.choice(self.pairs)
            return json.loads(text)
        if draw < 0.1:
            return _dtype(chance)
        if isinstance(value, (int, float)) and draw < 0.9:
            near = value + chance.choice((-1, 1, 8, -8)) if abs(value) < 2**70 else 0
            return chance.choice([near, *_NUMBERS])
        if isinstance(value, str) and draw < 0.9:
            return _dtype(chance) if chance.random() < 0.2 else chance.choice(_TEXTS)
        if isinstance(value, list) and value and draw < 0.9:
            copied = list(value)
            index, to = chance.randrange(len(value)), chance.randrange(len(value))
            if draw < 0.4:
                copied[index], copied[to] = copied[to], copied[index]
            elif draw < 0.65:
                copied.insert(index, copied[to])
            else:
                del copied[index]
            return copied
        return chance.choice([None, True, 1.5, "", [], {}, chance.choice(_NUMBERS), [0, 8]])


def _fields(chance: random.Random) -> list[bytearray]:
    """An array or a scalar with fields, most of which make no sense."""
    size = chance.choice((8, 16, 24))
    dtype, area = _dtype(chance), bytearray(chance.randbytes(size * chance.randrange(1, 3)))
    if chance.random() < 0.7:
        dtype["itemsize"] = size
    count = len(area) // size
    tag = ["np.array", dtype, [count], "C", [0, len(area)]]
    if chance.random() < 0.2:
        tag, area = ["np.scalar", dtype, area[:size].hex()], bytearray()
    return [bytearray(b"$" + json.dumps({"$": tag}).encode()), area]


def _dtype(chance: random.Random, depth: int = 0) -> Any:
    """A dtype with fields, most of which make no sense."""
    draw = chance.random() if depth < 3 else 0.0
    small = [0, 1, 1, 2, 4]
    if draw < 0.5 and depth:
        return chance.choice(_TEXTS[:23] if chance.random() < 0.2 else ["|u1", "<i4", "<U1", "<f8"])
    if draw < 0.7 and depth:
        counts = chance.choices(small * 6 + _NUMBERS, k=chance.randrange(1, 3))
        return [_dtype(chance, depth + 1), counts]
    count = chance.randrange(1, 4)
    return {
        "names": [f"f{number}" for number in range(count)],
        "titles": [chance.choice([None] * 8 + ["t", "f0"]) for _ in range(count)],
        "formats": [_dtype(chance, depth + 1) for _ in range(count)],
        "offsets": [chance.choice(small * 6 + _NUMBERS) for _ in range(count)],
        "itemsize": chance.choice((8, 8, 8, 16, 16, 24, *_NUMBERS)),
    }


def _encode(value: Any) -> tuple[bytes, bytes]:
    head, *rest = (b"".join(codecs.join([segment])) for segment in codecs.encode("values", value))
    return head.removeprefix(b"$"), b"".join(rest)


# ------------------------------------------------------------------------------------------ use


def check(segments: list[bytearray]) -> str | None:
    """Decode an input and use what it is; what is wrong with that."""
    try:
        value = codecs.decode("values", segments)
    except SerializationError as error:
        # A library that lacks memory says so in its own way.
        return "memory: decoding" if "MemoryError" in str(error) else None
    except BaseException as error:
        return f"decoding raises {type(error).__name__}: {error}"
    for use in (_print, _copy, _compare, _walk, _write):
        try:
            use(value)
        except MemoryError as error:
            return f"memory: {use.__name__} of {type(value).__name__}: {error}"
        except KeyboardInterrupt:
            raise
        except BaseException:  # what makes no sense may be refused by its library at any time
            continue
    return _send_on(value)


def _send_on(value: Any) -> str | None:
    try:
        segments = codecs.encode("values", value)
    except SerializationError:
        return None
    except BaseException as error:
        return f"encoding raises {type(error).__name__}: {error}"
    try:
        codecs.decode(
            "values", [bytearray(b"".join(codecs.join([segment]))) for segment in segments]
        )
    except BaseException as error:
        return f"encodes but does not decode: {error}"
    return None


def _print(value: Any) -> None:
    str(value)
    repr(value)


def _copy(value: Any) -> None:
    copy.copy(value)
    copy.deepcopy(value)


def _compare(value: Any) -> None:
    copied = copy.copy(value)
    bool(numpy.all(value == copied))


def _walk(value: Any) -> None:
    """Look at the parts of a value, by all that its library has for that."""
    uses: list[Callable[[], object]] = []
    if isinstance(value, dict):
        uses = [lambda part=part: _use(part) for part in [*value.values()][:_SOME]]
    elif isinstance(value, (list, tuple)):
        uses = [lambda part=part: _use(part) for part in value[:_SOME]]
    elif isinstance(value, (numpy.ndarray, numpy.void)):
        uses = _uses_of_array(value)
    elif isinstance(value, (pandas.Series, pandas.Index, pandas.DataFrame)):
        uses = _uses_of_pandas(value)
    elif type(value).__module__.startswith("pyarrow"):
        uses = _uses_of_arrow(value)
    elif isinstance(value, (polars.Series, polars.DataFrame)):
        uses = _uses_of_polars(value)
    elif type(value).__module__.startswith("torch"):
        uses = [value.sum, value.tolist, value.contiguous, value.nonzero, lambda: value[value > 0]]
    elif isinstance(value, Point):
        uses = [lambda: _use(value.x), lambda: _use(value.more)]
    for use in uses:
        try:
            use()
        except (MemoryError, KeyboardInterrupt):
            raise
        except BaseException:
            continue


def _use(value: Any) -> None:
    _print(value)
    _walk(value)


def _uses_of_array(value: Any) -> list[Callable[[], object]]:
    names = value.dtype.names or ()
    fields = [lambda name=name: _use(value[name]) for name in names]
    if isinstance(value, numpy.void):
        return [*fields, value.item, value.tobytes]
    return [
        *fields,
        value.tobytes,
        value.tolist,
        lambda: value.reshape(-1)[0],
        lambda: value.reshape(-1)[-1],
        lambda: numpy.sort(value, axis=None),
        lambda: numpy.unique(value),
        lambda: value[value],
        lambda: value.astype(str),
        lambda: value.sum(axis=0),
    ]


def _uses_of_pandas(value: Any) -> list[Callable[[], object]]:
    rows = value if isinstance(value, pandas.Index) else value.iloc
    uses: list[Callable[[], object]] = [
        lambda: rows[0],
        lambda: rows[-1],
        lambda: [rows[row] for row in range(min(len(value), _SOME))],
        value.copy,
        value.isna,
        value.memory_usage,
        value.to_numpy,
        lambda: value.equals(value.copy()),
        lambda: value.astype(str),
        lambda: value.take([0, -1]),
    ]
    if isinstance(value, pandas.Index):
        uses += [value.unique, value.factorize, value.sort_values, value.to_series]
        uses += [lambda: value.get_indexer(value), lambda: _use(value.array), value.to_frame]
    else:
        uses += [value.sort_index, value.reset_index, value.describe, lambda: _use(value.index)]
    if isinstance(value, pandas.Series):
        uses += [value.unique, value.factorize, value.value_counts, value.sort_values]
        uses += [lambda: value.groupby(value, observed=False).size(), lambda: _print(value.array)]
        uses += [lambda: value.dt.year, lambda: value.dt.to_timestamp(), value.sum]
    if isinstance(value, pandas.DataFrame):
        uses += [lambda: [_use(value.iloc[:, column]) for column in range(min(value.shape[1], 20))]]
        uses += [lambda: value.groupby(list(value.columns[:1])).size(), value.T.head]
    return uses


def _uses_of_arrow(value: Any) -> list[Callable[[], object]]:
    return [
        lambda: value.validate(full=True),
        lambda: value.slice(0, _SOME).to_pylist(),
        lambda: value.slice(max(len(value) - 2, 0)).to_pylist(),
        lambda: value.equals(value),
        lambda: value.take(pyarrow.array([0, len(value) - 1])),
        lambda: value.to_pandas(),
        lambda: value.nbytes,
        lambda: value.cast(pyarrow.string()),
        lambda: value.sum(),
        lambda: value.sort(),
        lambda: value.unique(),
        lambda: value.dictionary_encode(),
        lambda: value.flatten(),
        lambda: polars.from_arrow(value),
        lambda: [value.column(column).to_pylist() for column in range(value.num_columns)],
    ]


def _uses_of_polars(value: Any) -> list[Callable[[], object]]:
    return [
        lambda: value.head(_SOME).to_pandas(),
        lambda: value.to_arrow(),
        lambda: value.head(_SOME).rows() if hasattr(value, "rows") else value.head(_SOME).to_list(),
        value.clone,
        lambda: value.equals(value),
        lambda: value.sort(value.columns) if hasattr(value, "columns") else value.sort(),
        value.describe,
        value.null_count,
        lambda: value.write_ipc_stream(io.BytesIO()),
        lambda: value.unique(),
        lambda: value.gather([0]) if hasattr(value, "gather") else value[0],
        lambda: value.cast(polars.String),
    ]


def _write(value: Any) -> None:
    """Write to all that can be written."""
    if isinstance(value, dict):
        value = [*value.values()]
    if isinstance(value, (list, tuple)):
        for part in value[:_SOME]:
            with contextlib.suppress(Exception):
                _write(part)
    elif isinstance(value, numpy.ndarray):
        for name in value.dtype.names or ():
            value[name] = value[name].copy()
        value[...] = value.copy()
    elif isinstance(value, (pandas.Series, pandas.DataFrame)):
        value.iloc[0] = value.iloc[-1]
    elif type(value).__module__.startswith("torch"):
        value += 1


# -------------------------------------------------------------------------------------- processes


def _begin_child() -> Changer:
    """Load all libraries, and limit what comes then."""
    warnings.simplefilter("ignore")
    with contextlib.suppress(ImportError):
        __import__("torch")
    changer = Changer()
    for text, area in changer.pairs:
        wrong = check([bytearray(b"$" + text), bytearray(area)])
        assert wrong is None, (text, wrong)
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + MEMORY,) * 2)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    return changer


def _run_child(seed: int, first: int, last: int) -> None:
    changer = _begin_child()
    out = os.dup(1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # what libraries say when they panic
    for number in range(first, last):
        os.write(out, b"%d\n" % number)
        signal.setitimer(signal.ITIMER_PROF, SECONDS)
        wrong = check(changer.make(seed, number))
        signal.setitimer(signal.ITIMER_PROF, 0)
        if wrong is not None:
            os.write(out, f"{number} {wrong}\n".replace("\n", " ", wrong.count("\n")).encode())


def run(seed: int, first: int, last: int) -> Iterator[Finding]:
    """Try these inputs of a seed; what is found."""
    while first < last:
        command = [sys.executable, "-m", THIS_MODULE, "--child", str(seed), str(first), str(last)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as child:
            assert child.stdout is not None
            reached = -1
            for line in child.stdout:
                number, _, wrong = line.rstrip("\n").partition(" ")
                reached = int(number)
                if wrong:
                    yield Finding(reached, wrong)
        if child.returncode == 0:
            return
        if reached < 0:
            raise RuntimeError("the process of the fuzzer does not begin")
        yield Finding(reached, f"the process ended with {child.returncode}")
        first = reached + 1


def _show(seed: int, number: int) -> None:
    changer = _begin_child()
    segments = changer.make(seed, number)
    print(
        bytes(segments[0])[:3000].decode(),
        len(segments[1]),
        bytes(segments[1])[:300].hex(),
        flush=True,
    )
    try:
        value = codecs.decode("values", [bytearray(segment) for segment in segments])
        print(type(value), flush=True)
    except SerializationError:
        traceback.print_exc()
    print(check(segments))


def main(arguments: list[str]) -> None:
    if arguments[:1] == ["--child"]:
        _run_child(*map(int, arguments[1:]))
    elif len(arguments) == 2:
        _show(*map(int, arguments))
    else:
        seed = int(arguments[0]) if arguments else random.randrange(2**32)
        step, count = 5000, 0
        for first in range(0, sys.maxsize, step):
            for number, problem in run(seed, first, first + step):
                count += 1
                print(f"seed {seed} input {number}: {problem[:500]}", flush=True)
            print(f"seed {seed}: {first + step} inputs, {count} findings", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
