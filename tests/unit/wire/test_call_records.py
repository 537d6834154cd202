"""Records of calls as bytes, and bytes that are none."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from msgspec.structs import replace

from kubetorch.errors import ProtocolError
from kubetorch.wire import calls, exceptions
from kubetorch.wire.calls import Record

RECORD = Record("train", "fit", "values", (3, 2), b"abc" + bytes(61) + b"de", b"", "")


def test_a_record_comes_back_as_it_was() -> None:
    data = b"".join(calls.pack_record(RECORD))

    unpacked = calls.unpack_record(data)

    assert bytes(unpacked.arguments) == RECORD.arguments
    assert (unpacked.callable, unpacked.method, unpacked.sizes) == ("train", "fit", (3, 2))
    assert unpacked.outcome == "returned"


@pytest.mark.security
def test_how_a_call_ended_is_said_without_an_import_of_what_the_record_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "kt_imported_by_a_record.py").write_text("class Error(Exception): pass")
    monkeypatch.syspath_prepend(tmp_path)
    names = {"module": "kt_imported_by_a_record", "qualname": "Error", "error_type": "Error"}
    failure = exceptions.Failure(**names, message="diverged", args=[]).to_json()

    assert replace(RECORD, failure=failure).outcome == "raised Error: diverged"
    assert "kt_imported_by_a_record" not in sys.modules


def test_a_record_without_arguments_says_why() -> None:
    record = Record("train", None, "json", (5,), b"", b"", "too large")

    assert calls.unpack_record(b"".join(calls.pack_record(record))).omission == "too large"


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"KTO1" + bytes(60),
        b"KTR1\xff\xff\xff\xff",
        b"KTR1\0\0\0\x02[]",
        b"KTR1\0\0\0\x02{}",
        b"".join(calls.pack_record(RECORD))
        .replace(b'"",', rb'"\ud800",')
        .replace(b" " * 6, b"", 1),
        b"".join(calls.pack_record(RECORD))[:-1],
    ],
)
def test_other_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(ProtocolError):
        calls.unpack_record(data)
