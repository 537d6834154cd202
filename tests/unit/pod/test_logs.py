import asyncio
import json
import logging

import pytest

from clock_loop import run
from kubetorch.pod.logs import AgentLines, LogLine, PodLog
from kubetorch.pod.tuning import LIMITS


def log_line(text: str) -> LogLine:
    return LogLine(1.0, "demo-0", text)


def texts(lines) -> list[str]:
    return [json.loads(line)["text"] for line in lines]


def scenario(function):
    run(function())


def test_lines_are_kept_in_order_and_read_back(tmp_path):
    async def act():
        log = PodLog(tmp_path / "log", stdout=None)
        for i in range(10):
            log.write(log_line(f"line {i}"))
        log.flush()
        assert texts(log.tail(3)) == ["line 7", "line 8", "line 9"]
        assert len(log.tail(100)) == 10
        assert log.tail(0) == []
        log.close()

    scenario(act)


def test_only_two_segments_are_kept(tmp_path):
    async def act():
        log = PodLog(tmp_path, stdout=None, segment_bytes=1000)
        for i in range(200):
            log.write(log_line(f"line {i:03}"))
            log.flush()
        kept_texts = texts(log.tail(1000))
        assert kept_texts == [f"line {i:03}" for i in range(200 - len(kept_texts), 200)]
        assert 15 < len(kept_texts) < 45
        assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= 2000
        log.close()

    scenario(act)


def test_a_log_goes_on_after_its_process_was_killed_in_the_middle_of_a_line(tmp_path):
    async def act():
        log = PodLog(tmp_path, stdout=None)
        log.write(log_line("before"))
        log.close()
        with (tmp_path / "current.jsonl").open("ab") as file:
            file.write(b'{"time": 1.0, "te')
        log_after_restart = PodLog(tmp_path, stdout=None)
        log_after_restart.write(log_line("after"))
        log_after_restart.flush()
        assert texts(log_after_restart.tail(10)) == ["before", "after"]
        log_after_restart.close()

    scenario(act)


def test_many_lines_are_found_from_the_end_of_a_large_segment(tmp_path):
    async def act():
        log = PodLog(tmp_path, stdout=None)
        for i in range(5000):
            log.write(log_line(f"{i:0200}"))
        log.flush()
        for count in (1, 100, 1000, 4999, 5000, 6000):
            assert texts(log.tail(count)) == [f"{i:0200}" for i in range(5000)][-count:]
        log.close()

    scenario(act)


def test_a_full_disk_drops_lines_and_counts_them(tmp_path):
    async def act():
        (tmp_path / "current.jsonl").symlink_to("/dev/full")
        log = PodLog(tmp_path, stdout=None)
        for _ in range(3):
            log.write(log_line("lost"))
        log.flush()
        assert log.dropped == 3
        (tmp_path / "current.jsonl").unlink()
        log.close()

    scenario(act)


def test_a_folder_that_cannot_be_made_drops_lines(tmp_path):
    async def act():
        (tmp_path / "log").write_text("in the way")
        log = PodLog(tmp_path / "log", stdout=None)
        log.write(log_line("lost"))
        log.flush()
        assert log.dropped == 1
        assert log.tail(5) == []
        log.close()

    scenario(act)


def test_a_long_line_is_cut(tmp_path):
    async def act():
        log = PodLog(tmp_path, stdout=None)
        log.write(log_line("x" * (LIMITS.log_text_characters + 100)))
        log.flush()
        assert texts(log.tail(1)) == ["x" * LIMITS.log_text_characters + "…"]
        log.close()

    scenario(act)


@pytest.mark.parametrize(("echo", "expected"), [(True, b"one\n"), (False, b"")])
def test_lines_are_repeated_on_the_agents_own_output(tmp_path, echo, expected):
    async def act():
        with (tmp_path / "out").open("wb") as out:
            log = PodLog(tmp_path / "log", stdout=out.fileno())
            log.write(log_line("one"), echo=echo)
            log.close()
        assert (tmp_path / "out").read_bytes() == expected

    scenario(act)


def test_the_agents_own_output_is_bounded_where_it_is_a_file(tmp_path):
    async def act():
        output = tmp_path / "output"
        with output.open("ab") as file:
            log = PodLog(tmp_path / "log", stdout=file.fileno(), output=output, segment_bytes=100)
            for number in range(5):
                log.write(log_line(f"{number}" * 40))
                log.flush()
            log.close()
        assert output.read_text() == "3" * 40 + "\n" + "4" * 40 + "\n"
        before = output.with_name("output.1").read_text()
        assert before == "".join(f"{number}" * 40 + "\n" for number in range(3))

    scenario(act)


def test_a_follower_gets_the_last_lines_and_then_each_new_one_once(tmp_path):
    async def act():
        log = PodLog(tmp_path, stdout=None)
        for i in range(5):
            log.write(log_line(f"old {i}"))
        follower = log.follow(2)
        log.write(log_line("new"))
        got = []

        async def read():
            async for piece in follower:
                got.extend(texts(piece.splitlines()))

        reading = asyncio.ensure_future(read())
        while len(got) < 3:
            await asyncio.wait([reading], timeout=0.1)
        log.write(log_line("newer"))
        while len(got) < 4:
            await asyncio.wait([reading], timeout=0.1)
        log.close()
        await reading
        assert got == ["old 3", "old 4", "new", "newer"]

    scenario(act)


def test_a_follower_that_does_not_read_loses_the_oldest_lines_and_holds_nobody_up(tmp_path):
    async def act():
        log = PodLog(tmp_path, stdout=None)
        follower = log.follow(0)
        for i in range(10_050):
            log.write(log_line(str(i)))
        follower.close()
        got = []
        async for piece in follower:
            got.extend(texts(piece.splitlines()))
        assert got == [str(i) for i in range(50, 10_050)]
        log.close()

    scenario(act)


def test_lines_of_the_agent_have_the_traceback_and_a_bad_one_is_left_out(tmp_path, capsys):
    async def act():
        log = PodLog(tmp_path, stdout=None)
        logger = logging.getLogger("tests.agent_lines")
        logger.propagate = False
        handler = AgentLines(log, "demo-0", asyncio.get_running_loop())
        logger.addHandler(handler)
        logger.error("%d calls", "no number")
        try:
            raise ValueError("reason")
        except ValueError:
            logger.exception("failed")
        logger.removeHandler(handler)
        await asyncio.sleep(0)
        log.flush()
        (text,) = texts(log.tail(5))
        assert text.startswith("failed\nTraceback")
        assert text.endswith("ValueError: reason")
        log.close()

    scenario(act)
    assert "no number" in capsys.readouterr().err
