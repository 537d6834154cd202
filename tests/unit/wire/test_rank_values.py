"""The values of several ranks as one payload."""

import pytest

from kubetorch.errors import ProtocolError
from kubetorch.wire import rank_values
from kubetorch.wire.rank_values import Entry


def test_entries_come_back_in_rank_order():
    entries = [Entry(3, "pickle", [b"a", b"bc"]), Entry(1, "json", [b"1"], True)]

    unpacked_entries = rank_values.unpack(rank_values.pack(entries))

    assert [
        (rank_value.rank, rank_value.codec, list(rank_value.segments), rank_value.is_streamed)
        for rank_value in unpacked_entries
    ] == [
        (1, "json", [b"1"], True),
        (3, "pickle", [b"a", b"bc"], False),
    ]


@pytest.mark.parametrize(
    "segments",
    [
        [],
        [b"x"],
        [b"[1]"],
        [b'[[0,"json",2,false]]', b"1"],
        [b'[[Infinity,"json",0,false]]'],
        [b"[" * 100_000],
    ],
)
def test_other_payloads_are_refused(segments):
    with pytest.raises(ProtocolError):
        rank_values.unpack(segments)
