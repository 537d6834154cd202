"""What user code prints and logs: captured whole, once, in order, before the result."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest

from kubetorch.errors import WorkerDiedError
from tests.local.worker_harness import DEADLINE, Agent, agent, run

SHOP = """
import asyncio, atexit, contextlib, ctypes, io, logging, logging.config, multiprocessing
import os, subprocess, sys, threading, time

print("while importing")
log = logging.getLogger("shop")

def mixed():
    print("one")
    os.write(1, b"two\\n")
    subprocess.run([sys.executable, "-c", "print('three')"], check=True)
    log.info("four")
    os.system("echo five")
    print("six", file=sys.stderr)
    ctypes.CDLL(None).puts(b"seven")
    ctypes.CDLL(None).fflush(None)
    sys.stdout.buffer.write(b"eight\\n")
    os.write(2, b"nine\\n")
    log.warning("ten")

def many(n, text):
    for i in range(n):
        print(text, i)

def parts():
    print("a", end="")
    print("b", end="", flush=True)
    sys.stdout.write("c")
    print()
    print("unfinished", end="")

def raw_part():
    os.write(1, b"no end")

def unicode():
    print("grüße 😀" * 400)
    data = "😀 ünïcode\\n".encode()
    for byte in data:
        os.write(1, bytes([byte]))
    os.write(1, b"\\xff\\xfe\\n")
    print("\\ud800")

def huge(n):
    print("x" * n)
    os.write(1, b"y" * n + b"\\n")

def levels():
    log.debug("debug")
    log.info("info")
    log.error("error %s", 1)
    try:
        1 / 0
    except ZeroDivisionError:
        log.exception("failed")

def own_handler():
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("own %(message)s"))
    log.info("before")
    log.addHandler(handler)
    log.info("below the level of the root logger")
    log.warning("once")
    logging.getLogger("other").info("not configured")
    log.removeHandler(handler)
    log.info("after")

def reconfigured():
    logging.basicConfig(force=True, level="INFO", stream=sys.stdout, format="mine %(message)s")
    log.info("still here")
    log.debug("below the level")

def with_dictionary():
    logging.config.dictConfig({
        "version": 1,
        "disable_existing_loggers": False,
        "formatters": {"short": {"format": "%(levelname).1s %(name)s %(message)s"}},
        "handlers": {"out": {"class": "logging.StreamHandler", "formatter": "short"}},
        "loggers": {"shop": {"level": "DEBUG", "handlers": ["out"], "propagate": False}},
    })
    log.debug("of the dictionary")
    logging.getLogger("other").info("not configured")

def into_a_file(path):
    logging.basicConfig(filename=path)
    log.info("below the level")
    log.warning("in the file")

def levels_of_a_program():
    root = logging.getLogger()
    levels = [root.level, root.getEffectiveLevel(), root.handlers]
    root.setLevel(logging.WARNING)
    log.info("below the level that was set")
    log.setLevel("INFO")
    log.info("of a level that was set")
    logging.getLogger("quiet").addHandler(logging.NullHandler())
    logging.getLogger("quiet").error("of a library, whose program does not want it")
    return levels

def printed_and_logged():
    logging.basicConfig(stream=sys.stderr, format="mine %(message)s")
    print("to stdout")
    log.error("to stderr")

def c_output(end):
    libc = ctypes.CDLL(None)
    libc.puts(b"a line of C")
    print("a line of Python")
    libc.printf(b"no end of C")
    if end == "crash":
        ctypes.string_at(0)
    if end == "fork":
        pid = os.fork()
        if pid == 0:
            return
        os.waitpid(pid, 0)

def at_exit():
    atexit.register(lambda: ctypes.CDLL(None).printf(b"last of C"))

def redirected(path):
    print("before")
    saved = os.dup(1)
    with open(path, "w") as file:
        os.dup2(file.fileno(), 1)
        print("into the file")
        os.dup2(saved, 1)
    os.close(saved)
    print("after")
    with contextlib.redirect_stdout(io.StringIO()) as text:
        print("into memory")
    return text.getvalue()

def closed():
    os.close(1)
    os.close(2)
    print("still printed")
    return 1

def replaced():
    sys.stdout = open(os.devnull, "w")
    sys.stderr = None
    return 1

def wrapped():
    stream = io.TextIOWrapper(sys.stdout.buffer, encoding="utf-8", line_buffering=True)
    stream.write("through a wrapper\\n")
    del stream
    print("and still here")

def like_files():
    out = sys.stdout
    out.reconfigure(line_buffering=True, errors="replace")
    return [out.fileno(), out.isatty(), out.writable(), out.readable(), out.encoding, out.name,
            sys.stderr.fileno(), out.closed, sys.__stdout__ is out]

def bar(n):
    for i in range(n + 1):
        print(f"\\r{i}%", end="", file=sys.stderr, flush=True)
        time.sleep(0.01)
    print(file=sys.stderr)
    for i in range(3):
        print(f"{i} of 3", end="\\r")
    print("done")

async def named(name, n):
    for i in range(n):
        print(name, i)
        await asyncio.sleep(0.001)

def named_sync(name, n):
    for i in range(n):
        print(name, i)
        time.sleep(0.001)

def thread():
    t = threading.Thread(target=print, args=("from a thread",))
    t.start(); t.join()

def background(n):
    def work():
        for i in range(n):
            print("background", i)
            time.sleep(0.01)
    threading.Thread(target=work, daemon=True).start()

def child():
    process = multiprocessing.get_context("fork").Process(target=print, args=("from a child",))
    process.start(); process.join()
    pid = os.fork()
    if pid == 0:
        print("half ", end="")
        print("a line of a fork")
        os._exit(0)
    os.waitpid(pid, 0)

def crash():
    print("just before", end="", flush=True)
    os._exit(1)

def spam(n):
    line = "z" * 1000
    for i in range(n):
        print(line)
    return "done"
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "shop.py").write_text(SHOP)
    return tmp_path


async def _lines(a: Agent, name: str, *args: object, **options: object) -> list[str]:
    worker = await a.worker(name, **options)
    call = a.open(worker, *args)
    await call.result()
    return call.texts


def test_prints_raw_writes_children_c_code_and_loggers_keep_their_order(folder: Path) -> None:
    async def main() -> None:
        async with agent(folder) as a:
            worker = await a.worker("mixed")
            call = a.open(worker)
            await call.result()
            words = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]
            assert call.texts == words
            sources = {line.text: (line.source, line.level) for line in call.lines}
            assert sources["one"] == ("stdout", None)
            assert sources["six"] == ("stderr", None)
            assert sources["four"] == ("logger", "INFO")
            assert sources["ten"] == ("logger", "WARNING")

    run(main())


def test_lines_that_are_written_while_loading_belong_to_no_call(folder: Path) -> None:
    async def main() -> None:
        async with agent(folder) as a:
            await a.worker("mixed")
            assert a.texts == ["while importing"]
            assert a.lines[0].call is None

    run(main())


def test_every_line_of_a_call_arrives_once_and_before_its_result(folder: Path) -> None:
    async def main() -> None:
        async with agent(folder) as a:
            worker = await a.worker("many")
            for _ in range(20):
                call = a.open(worker, 500, "line")
                await call.result()
                assert call.texts == [f"line {i}" for i in range(500)]
            assert len(a.lines) == 20 * 500 + 1

    run(main())


def test_partial_lines_are_joined_and_the_last_one_is_delivered(folder: Path) -> None:
    async def main() -> None:
        async with agent(folder) as a:
            assert await _lines(a, "parts") == ["abc", "unfinished"]
            assert await _lines(a, "raw_part") == ["no end"]

    run(main())


def test_text_is_decoded_right_however_it_was_cut(folder: Path) -> None:
    async def main() -> None:
        async with agent(folder) as a:
            assert await _lines(a, "unicode") == [
                "grüße 😀" * 400,
                "😀 ünïcode",
                "��",
                "\\ud800",
            ]

    run(main())


def test_huge_lines_arrive_whole_in_pieces(folder: Path) -> None:
    async def main() -> None:
        async with agent(folder) as a:
            lines = await _lines(a, "huge", 300_000)
            xs = [line for line in lines if line.startswith("x")]
            ys = [line for line in lines if line.startswith("y")]
            assert "".join(xs) == "x" * 300_000
            assert "".join(ys) == "y" * 300_000
            assert max(map(len, lines)) == 64 * 1024

    run(main())


def test_loggers_are_filtered_by_the_level_of_the_workload(folder: Path) -> None:
    async def main() -> None:
        async with agent(folder) as a:
            lines = await _lines(a, "levels")
            assert lines[:2] == ["info", "error 1"]
            assert lines[2].startswith("failed\nTraceback")
            assert lines[2].endswith("ZeroDivisionError: division by zero")
            assert await _lines(a, "levels", log_level="debug", generation=2) == [
                "debug",
                *lines,
            ]
            assert (await _lines(a, "levels", log_level="error"))[0] == "error 1"

    run(main())


def test_messages_are_written_as_the_program_configures_it(folder: Path) -> None:
    async def main() -> None:
        async with agent(folder) as a:
            lines = await _lines(a, "own_handler")
            assert lines == ["before", "own once", "not configured", "after"]
            assert await _lines(a, "reconfigured") == ["mine still here"]
            lines = await _lines(a, "with_dictionary")
            assert lines == ["D shop of the dictionary", "not configured"]
            assert await _lines(a, "into_a_file", str(folder / "log")) == []
            assert (folder / "log").read_text() == "WARNING:shop:in the file\n"

    run(main())


def test_a_program_finds_the_root_logger_as_at_home_and_sets_levels(folder: Path) -> None:
    async def main() -> None:
        async with agent(folder) as a:
            call = a.open(await a.worker("levels_of_a_program"))
            assert await call.result() == [30, 20, []]
            assert call.texts == ["of a level that was set"]

    run(main())


def test_prints_have_a_level_where_the_programs_own_handlers_print(folder: Path) -> None:
    async def main() -> None:
        async with agent(folder) as a:
            call = a.open(await a.worker("printed_and_logged"))
            await call.result()
            levels = [(line.text, line.source, line.level) for line in call.lines]
            assert levels == [
                ("to stdout", "stdout", "INFO"),
                ("mine to stderr", "stderr", "ERROR"),
            ]

    run(main())


C_LINES = ["a line of C", "a line of Python", "no end of C"]


@pytest.mark.parametrize("end", ["return", "fork"])
def test_what_c_code_prints_is_written_line_by_line_and_when_its_call_ends(
    folder: Path, end: str
) -> None:
    async def main() -> None:
        async with agent(folder) as a:
            worker = await a.worker("c_output")
            for _ in range(2):
                call = a.open(worker, end)
                await call.result()
                assert call.texts == C_LINES

    run(main())


def test_whole_lines_of_c_code_outlive_a_crash(folder: Path) -> None:
    async def main() -> None:
        async with agent(folder) as a:
            call = a.open(await a.worker("c_output"), "crash")
            with pytest.raises(WorkerDiedError):
                await call.result()
            assert call.texts[:2] == C_LINES[:2]

    run(main())


def test_what_c_code_prints_last_of_all_is_written_at_exit(folder: Path) -> None:
    async def main() -> None:
        async with agent(folder) as a:
            worker = await a.worker("at_exit")
            await a.open(worker).result()
            await worker.drain(DEADLINE)
            assert a.texts == ["while importing", "last of C"]

    run(main())


def test_redirected_descriptors_are_respected(folder: Path) -> None:
    async def main() -> None:
        async with agent(folder) as a:
            worker = await a.worker("redirected")
            call = a.open(worker, str(folder / "out"))
            assert await call.result() == "into memory\n"
            assert call.texts == ["before", "after"]
            assert (folder / "out").read_text() == "into the file\n"

    run(main())


@pytest.mark.parametrize("name", ["closed", "replaced"])
def test_calls_work_on_without_standard_streams(folder: Path, name: str) -> None:
    async def main() -> None:
        async with agent(folder) as a:
            worker = await a.worker(name)
            first = a.open(worker)
            assert await first.result() == 1
            assert first.texts == (["still printed"] if name == "closed" else [])
            assert worker.is_alive
            if name == "replaced":
                assert await a.call(worker) == 1

    run(main())


def test_the_streams_behave_like_text_files(folder: Path) -> None:
    async def main() -> None:
        async with agent(folder) as a:
            worker = await a.worker("like_files")
            assert await a.call(worker) == [
                1, False, True, False, "utf-8", "<stdout>", 2, False, True,
            ]  # fmt: skip
            assert await _lines(a, "wrapped") == ["through a wrapper", "and still here"]

    run(main())


def test_a_progress_bar_shows_now_and_then_and_at_its_end(folder: Path) -> None:
    async def main() -> None:
        async with agent(folder) as a:
            call = a.open(await a.worker("bar"), 100)
            await call.result()
            lines = call.texts
            assert lines[0] == "0%"
            assert "100%" in lines
            assert lines[-1] == "done"
            shown = 0.5 * (len(lines) - 12)  # each half second, and at the ends
            assert len(lines) >= 3
            assert shown <= call.lines[-1].time - call.lines[0].time

    run(main())


@pytest.mark.parametrize("name", ["named", "named_sync"])
def test_lines_of_concurrent_calls_are_told_apart(folder: Path, name: str) -> None:
    async def main() -> None:
        async with agent(folder) as a:
            worker = await a.worker(name)
            calls = {n: a.open(worker, n, 50) for n in ("red", "green", "blue")}
            for n, call in calls.items():
                await call.result()
                assert call.texts == [f"{n} {i}" for i in range(50)]

    run(main())


def test_threads_and_forks_of_a_call_print_into_it(folder: Path) -> None:
    async def main() -> None:
        async with agent(folder) as a:
            assert await _lines(a, "thread") == ["from a thread"]
            assert await _lines(a, "child") == ["from a child", "half a line of a fork"]

    run(main())


def test_output_between_calls_belongs_to_none(folder: Path) -> None:
    async def main() -> None:
        async with agent(folder) as a:
            worker = await a.worker("background")
            call = a.open(worker, 20)
            await call.result()
            while a.texts[-1] != "background 19":
                await asyncio.sleep(0.01)
            assert a.lines[-1].call is None

    run(main())


def test_what_a_dying_worker_printed_last_is_not_lost(folder: Path) -> None:
    async def main() -> None:
        async with agent(folder) as a:
            worker = await a.worker("crash")
            call = a.open(worker)
            with pytest.raises(Exception, match="exit code 1"):
                await call.result()
            assert call.texts == ["just before"]

    run(main())


def test_a_flood_of_output_arrives_whole(folder: Path) -> None:
    async def main() -> None:
        async with agent(folder) as a:
            lines = await _lines(a, "spam", 20_000)
            assert len(lines) == 20_000
            assert set(lines) == {"z" * 1000}

    run(main())


def test_times_of_lines_are_when_they_were_written(folder: Path) -> None:
    async def main() -> None:
        async with agent(folder) as a:
            worker = await a.worker("named_sync")
            began = time.time()
            call = a.open(worker, "t", 20)
            await call.result()
            times = [line.time for line in call.lines]
            assert times == sorted(times)
            assert times[-1] - times[0] > 0.015
            assert began <= times[0] and times[-1] <= time.time()

    run(main())
