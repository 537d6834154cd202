"""What a worker sends is bounded where it is made, whatever user code gives it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from kubetorch.pod.user_process import protocol
from kubetorch.pod.user_process.tuning import LIMITS
from kubetorch.wire import codecs, exceptions, frames
from kubetorch.wire import tuning as wire_tuning
from kubetorch.wire.frames import Body
from tests.local.worker_harness import agent, run

SHOP = """
import logging, sys
import numpy as np
import kubetorch as kt

class Page:
    body = b"content"
    media_type = "text/" + "x" * 5_000_000

class Shop:
    def report(self, text):
        kt.progress(1, 2, text)
        return "done"
    def fail(self, name):
        raise type(name, (Exception,), {"__module__": name, "__qualname__": name})("failed")
    def page(self): return Page()
    def log(self, level):
        logging.addLevelName(35, level)
        logging.getLogger("shop").log(35, "hello")
    def arrays(self, n): return [np.zeros(1) for _ in range(n)]
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "shop.py").write_text(SHOP)
    return tmp_path


def test_what_user_code_makes_too_long_is_cut_and_its_call_ends_well(folder: Path) -> None:
    async def main() -> None:
        async with agent(folder) as pod:
            worker = await pod.worker("Shop", threads=4)
            for text in ("z" * 5_000_000, "😀" * 1_000_000, "\x01" * 5_000_000, "\ud800" * 9000):
                outcome = pod.open(worker, text, method="report", codec="pickle")
                assert await outcome.result() == "done"
                [(_, _, message)] = outcome.progress
                assert message is not None
                assert 4000 < len(message.encode()) <= LIMITS.progress_message_bytes
            outcome = pod.open(worker, "short", method="report")
            assert await outcome.result() == "done"
            assert outcome.progress == [(1.0, 2.0, "short")]

            failure = await pod.failure(worker, "N" * 5_000_000, method="fail")
            assert len(failure.error_type) < wire_tuning.LIMITS.failure_name_characters + 100
            assert failure.message == "failed"

            outcome = pod.open(worker, method="page", codec="none")
            await outcome.result()
            assert len(outcome.raw[1]) == LIMITS.content_type_bytes

            outcome = pod.open(worker, "L" * 5_000_000, method="log")
            await outcome.result()
            [line] = outcome.lines
            assert line.level == "L" * LIMITS.level_name_bytes

    run(main())


def test_a_result_of_more_arrays_than_there_may_be_segments_arrives(folder: Path) -> None:
    count = 3 * wire_tuning.LIMITS.payload_segments

    async def main() -> None:
        async with agent(folder) as pod:
            worker = await pod.worker("Shop", threads=4)
            values = await pod.call(worker, count, method="arrays", codec="pickle")
            assert len(values) == count
            assert all(isinstance(array, np.ndarray) for array in values)

    run(main())


def test_the_sizes_of_the_most_segments_fit_into_one_frame() -> None:
    segments = codecs.encode(
        "pickle", [np.zeros(1) for _ in range(wire_tuning.LIMITS.payload_segments + 5)]
    )
    sizes = tuple(len(segment) for segment in segments)
    assert len(sizes) == wire_tuning.LIMITS.payload_segments
    most = Body("pickle", (2**60,) * len(sizes), 2**62)
    meta = frames.encode(frames.Kind.RESULT, 1, frames.Result(most, 1, False))
    assert len(meta) < wire_tuning.LIMITS.meta_bytes
    _, packed = protocol.pack_sizes("pickle", sizes)
    assert len(packed) <= wire_tuning.LIMITS.segment_sizes_bytes


def test_a_call_that_fails_with_long_texts_in_all_places_can_be_told() -> None:
    text = "\x01" * 5_000_000
    failure = exceptions.Failure(
        text, text, text, text, None, text, text, [text], {"a": text}, {"b": text}, text
    )
    for limit in (wire_tuning.LIMITS.failure_json_bytes, wire_tuning.LIMITS.session_failure_bytes):
        data = failure.to_json(limit)
        assert len(data) <= limit
        assert exceptions.parse_json(data).message.startswith("\x01")


def test_a_failure_with_text_that_is_no_unicode_becomes_a_message_of_a_session() -> None:
    message = exceptions.Failure("Odd", "\ud800", state={"a\ud800": ["\udfff"]}).to_message()
    assert message["message"] == "\\ud800"
    assert message["state"] == {"a\\ud800": ["\\udfff"]}
