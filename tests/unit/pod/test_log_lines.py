"""Lines out of records and raw bytes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kubetorch.pod.logs import Assembler, Line
from kubetorch.pod.tuning import LIMITS
from kubetorch.pod.user_process import protocol
from kubetorch.pod.user_process.protocol import LOGGER, STDERR, STDOUT, Origin

NONCE = b"\x1eKT" + bytes(range(13))


def record(text: bytes, *, call: int = 1, source: int = STDOUT, **options: int) -> bytes:
    writer = options.pop("writer", 100)
    level = b"INFO" if source == LOGGER else b""
    return protocol.pack_record(
        Origin(NONCE, writer, call, source, level), text, time=5.0, **options
    )


def texts(lines: Iterator[Line]) -> list[str]:
    return [line.text for line in lines]


def test_a_record_is_a_line_of_its_call() -> None:
    assembler = Assembler(NONCE)
    assert list(assembler.feed(record(b"hello\n", call=7, source=STDERR))) == [
        Line("hello", "stderr", None, 5.0, 7)
    ]


def test_raw_bytes_belong_to_the_latest_call_or_to_none() -> None:
    assembler = Assembler(NONCE, clock=lambda: 9.0)
    assert list(assembler.feed(b"early\n")) == [Line("early", "stdout", None, 9.0, None)]
    assembler.latest = 3
    assert next(assembler.feed(b"late\n")).call == 3
    assert next(assembler.feed(record(b"thread\n", call=0))).call == 3


def test_records_and_raw_bytes_keep_their_order() -> None:
    assembler = Assembler(NONCE)
    data = record(b"one\n") + b"two\nthree\n" + record(b"four\nfive\n") + b"six\n"
    assert texts(assembler.feed(data)) == ["one", "two", "three", "four", "five", "six"]


def test_whoever_sorts_lines_by_time_finds_them_in_the_order_of_the_pipe() -> None:
    assembler = Assembler(NONCE, clock=lambda: 9.0)
    lines = list(assembler.feed(b"read late\n" + record(b"written early\n")))
    assert [line.time for line in lines] == [9.0, 9.0]


def test_lines_of_different_calls_and_processes_are_put_together_apart() -> None:
    assembler = Assembler(NONCE)
    data = (
        record(b"a", call=1)
        + record(b"b", call=2)
        + record(b"c", call=1, writer=101)
        + record(b"d", call=1, source=STDERR)
        + record(b"1\n", call=1)
        + record(b"2\n", call=2)
        + record(b"3\n", call=1, writer=101)
        + record(b"4\n", call=1, source=STDERR)
    )
    assert texts(assembler.feed(data)) == ["a1", "b2", "c3", "d4"]


def test_the_end_of_a_call_delivers_its_unfinished_lines_alone() -> None:
    assembler = Assembler(NONCE)
    assembler.latest = 1
    list(assembler.feed(record(b"mine", call=1) + record(b"other", call=2) + b"raw"))
    assert sorted(texts(assembler.finish(1))) == ["mine", "raw"]
    assert texts(assembler.finish(1)) == []
    assert texts(assembler.close()) == ["other"]


def test_raw_bytes_that_look_like_the_begin_of_a_record_are_not_lost() -> None:
    assembler = Assembler(NONCE)
    assembler.latest = 1
    assert texts(assembler.feed(b"text\n" + NONCE[:5])) == ["text"]
    assert texts(assembler.finish(1)) == ["\x1eKT\x00\x01"]


@given(
    pieces=st.lists(
        st.one_of(
            st.tuples(st.just("raw"), st.text("ab\n\x1eKTé", max_size=20)),
            st.tuples(st.integers(1, 3), st.text("xy\n😀", max_size=20)),
        ),
        max_size=20,
    ),
    cuts=st.lists(st.integers(1, 60), max_size=40),
)
def test_it_does_not_matter_how_the_bytes_arrive(
    pieces: list[tuple[object, str]], cuts: list[int]
) -> None:
    data = b"".join(
        text.encode() if kind == "raw" else record(text.encode(), call=int(str(kind)))
        for kind, text in pieces
    )
    whole = Assembler(NONCE, clock=lambda: 1.0)
    expected = [*whole.feed(data), *whole.close()]
    cut = Assembler(NONCE, clock=lambda: 1.0)
    lines: list[Line] = []
    for size in cuts:
        lines += cut.feed(data[:size])
        data = data[size:]
    lines += cut.feed(data)
    lines += cut.close()
    assert lines == expected


def test_every_byte_of_text_is_delivered() -> None:
    assembler = Assembler(NONCE)
    data = ("ü" * 200_000).encode()
    line_texts = texts(assembler.feed(data + b"\n"))
    assert "".join(line_texts) == "ü" * 200_000
    assert all(len(text.encode()) <= LIMITS.line_bytes for text in line_texts)


@pytest.mark.security
@pytest.mark.parametrize("size", [5000, 1 << 31])
def test_a_record_that_claims_more_than_there_may_be_is_text(size: int) -> None:
    assembler = Assembler(NONCE, clock=lambda: 9.0)
    forged = protocol._RECORD_HEADER.pack(NONCE, STDOUT, 0, 0, size, 1, 1, 5.0)
    lines = [*assembler.feed(forged + b"x\n"), *assembler.feed(record(b"next\n"))]
    assert any(line.text.endswith("x") for line in lines)
    assert lines[-1].text == "next"
    assert not assembler.has_unfinished


@pytest.mark.parametrize("when", [float("nan"), float("inf"), -1.0])
def test_a_time_that_is_none_is_replaced(when: float) -> None:
    data = protocol.pack_record(Origin(NONCE, 1, 1, STDOUT, b""), b"hello\n", time=when)
    assert [line.time for line in Assembler(NONCE, clock=lambda: 9.0).feed(data)] == [9.0]


def test_invalid_utf8_is_replaced() -> None:
    assert texts(Assembler(NONCE).feed(b"a\xffb\n")) == ["a\ufffdb"]


def test_a_message_of_a_logger_is_one_line_with_its_level() -> None:
    assembler = Assembler(NONCE)
    data = (
        record(b"first\nsec", source=LOGGER)
        + record(b"other\n", source=STDOUT)
        + record(b"ond", source=LOGGER, flags=protocol.END_OF_MESSAGE)
    )
    lines = list(assembler.feed(data))
    assert [line.text for line in lines] == ["other", "first\nsecond"]
    assert (lines[1].source, lines[1].level) == ("logger", "INFO")


def test_unfinished_lines_are_bounded() -> None:
    assembler = Assembler(NONCE)
    line_texts = []
    for call in range(1, 1000):
        line_texts += texts(assembler.feed(record(b"%d" % call, call=call)))
    assert len(line_texts) == 999 - LIMITS.unfinished_lines
    assert line_texts[0] == "1"


class TestProgressBars:
    def setup_method(self) -> None:
        self.now = 100.0
        self.assembler = Assembler(NONCE, clock=lambda: self.now)

    def feed(self, text: bytes) -> list[str]:
        return texts(self.assembler.feed(record(text, source=STDERR)))

    @pytest.mark.parametrize("form", [b"\r%d%%", b"%d%%\r"])
    def test_states_are_shown_now_and_then_and_the_last_one_always(self, form: bytes) -> None:
        shown = []
        for i in range(101):
            self.now += 0.1
            shown += self.feed(form % i)
        shown += self.feed(b"\n")
        assert shown[0] == "0%"
        assert shown[-1] == "100%"
        assert 15 <= len(shown) <= 25
        assert len(set(shown)) == len(shown)

    def test_windows_line_ends_are_line_ends(self) -> None:
        assert self.feed(b"one\r\ntwo\r\n") == ["one", "two"]

    def test_text_behind_a_bar_replaces_it(self) -> None:
        assert self.feed(b"\r10%") == ["10%"]
        assert self.feed(b"\rdone\nnext\n") == ["done", "next"]

    def test_an_endless_bar_needs_no_memory(self) -> None:
        for i in range(10_000):
            self.feed(b"\r%d" % i)
        assert sum(len(unfinished.data) for unfinished in self.assembler._unfinished.values()) < 100
