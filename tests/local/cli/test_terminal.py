"""What `kt` and programs show on a terminal, and what of it comes through a pipe."""

import contextlib
import json
import os
import pty
import re
import socket
import subprocess
import sys

import pytest

import kubetorch as kt
from tests.local import commands
from tests.local.calling import until

PROGRAM = """
import time
import kubetorch as kt

def train(epochs):
    for epoch in range(epochs):
        kt.progress(epoch + 1, epochs, f"epoch {epoch + 1}")
        time.sleep(0.2)
    time.sleep(600)
"""


@pytest.fixture(scope="module", autouse=True)
def service(shared_service_home):
    return shared_service_home


@pytest.fixture(scope="module")
def jobs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("jobs")
    (folder / "jobs.py").write_text(PROGRAM)
    sys.path.insert(0, str(folder))
    import jobs

    return jobs


def run_kt(*words, **environ):
    completed = commands.kt(*words, **environ)
    assert completed.returncode == 0, completed.stderr
    return completed.stdout


def test_all_namespaces_ages_and_time_zones(jobs):
    compute = kt.Compute(cpus="0.1")
    kt.fn(jobs.train).to(compute)
    elsewhere = kt.fn(jobs.train, name="elsewhere").to(kt.Compute(cpus="0.1", namespace="research"))
    assert "elsewhere" not in run_kt("list")
    header, *rows = run_kt("list", "-A", TZ="Asia/Tokyo").splitlines()
    assert header.split()[:2] == ["NAMESPACE", "RESOURCE"]
    row_by_name = {row.split()[1]: row for row in rows}
    assert row_by_name["elsewhere"].startswith("research ")
    assert row_by_name["train"].startswith("default ")
    assert re.search(r"  \d+s  .* \d{4}-\d\d-\d\d \d\d:\d\d:\d\d JST  ", row_by_name["train"])
    assert {
        listed_service["namespace"] for listed_service in json.loads(run_kt("list", "-A", "--json"))
    } == {*("default", "research")}
    assert re.search(r"Created: .* JST \(\d+s ago\)", run_kt("describe", "train", TZ="Asia/Tokyo"))
    elsewhere.teardown()


def shown_call(call):
    return json.loads(run_kt("calls", "show", call.id, "--json"))


def test_progress_is_shown_among_the_calls(jobs):
    call = kt.fn(jobs.train).to(kt.Compute(cpus="0.1")).spawn(4)
    expected_progress = {"current": 4, "total": 4, "message": "epoch 4"}
    # The last report, too, which comes less than a second after the one before.
    until(lambda: shown_call(call)["progress"] == expected_progress, 60)
    header, row = run_kt("calls").splitlines()
    assert dict(zip(header.split(), row.split(), strict=True))["PROGRESS"] == "100%"
    assert "Progress: 100% 4/4 epoch 4\n" in run_kt("calls", "show", call.id)
    call.cancel()
    call.wait(60)
    # Its pod reports the end of a call once its result is stored.
    until(lambda: shown_call(call)["ended"] is not None, 60)
    assert [shown_call(call)[key] for key in ("state", "progress")] == ["cancelled", None]


# ------------------------------------------------------------------------------------------- bars

SHOWN = """
import logging, sys, time
import kubetorch as kt

def square(n):
    time.sleep(0.3)
    return n * n

def fit(epochs):
    for epoch in range(epochs):
        kt.progress(epoch + 1, epochs, f"epoch {epoch + 1}")
        time.sleep(0.05)
        print("line", epoch)
    time.sleep(0.5)

def build(x):
    return x

if __name__ == "__main__":
    what, compute = sys.argv[1], kt.Compute(cpus="0.1")
    if what == "map":
        for value in kt.fn(square).to(compute).map(range(30), window=5):
            print("value", value)
    elif what == "call":
        kt.fn(fit).to(compute)(40)
    elif what == "deploy":
        first, second, name = sys.argv[2:]
        image = kt.Image().run_bash(f"{first}; echo first", force=True)
        image.run_bash(f"{second}; echo second", force=True)
        kt.fn(build, name=f"build{name}").to(kt.Compute(cpus="0.1", image=image))
"""


@pytest.fixture(scope="module")
def shown(tmp_path_factory):
    folder = tmp_path_factory.mktemp("shown")
    (folder / "shown.py").write_text(SHOWN)
    (folder / "pyproject.toml").touch()
    return folder / "shown.py"


class Step:
    """A step of an image that ends once a program has written what matches a pattern.

    It sees no file that is made after its pod has started, so a connection tells it to end.
    """

    def __init__(self, pattern):
        self._pattern, self.is_over = re.compile(pattern, re.MULTILINE), False
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.settimeout(60)
        self.command = f"cat < /dev/tcp/127.0.0.1/{self._listener.getsockname()[1]}"

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._listener.close()

    def read(self, text):
        if not self.is_over and self._pattern.search(text):
            self._listener.accept()[0].close()
            self.is_over = True


def on_a_terminal(program, *words, interrupt_at=None, step=None, **environ):
    """All that a program writes on a terminal of 80 columns."""
    pid, terminal = pty.fork()
    if pid == 0:
        variables = {**os.environ, "TERM": "xterm", "COLUMNS": "80", "LINES": "40", **environ}
        variables = {name: value for name, value in variables.items() if value != ""}
        os.execve(sys.executable, [sys.executable, str(program), *words], variables)
    text = ""
    with contextlib.suppress(OSError):  # its end
        while data := os.read(terminal, 65536):
            text += data.decode(errors="replace")
            if step is not None:
                step.read(text)
            if interrupt_at is not None and interrupt_at in text:
                interrupt_at = None
                os.write(terminal, b"\x03")
    os.close(terminal)
    os.waitpid(pid, 0)
    return text


def screen(text):
    """The lines that a terminal shows in the end."""
    lines, row, column = [""], 0, 0
    for code in re.findall(r"\x1b\[[0-9;]*[A-Za-z]|\r|\n|[^\x1b\r\n]+", text):
        if code == "\r":
            column = 0
        elif code == "\n":
            row += 1
            lines += [""] * (row + 1 - len(lines))
        elif code.startswith("\x1b[") and code.endswith("K"):
            lines[row] = lines[row][:column]
        elif code.startswith("\x1b[") and code.endswith("A"):
            row -= int(code[2:-1] or 1)
        elif not code.startswith("\x1b["):
            before = lines[row].ljust(column)
            lines[row] = before[:column] + code + before[column + len(code) :]
            column += len(code)
    return [line for line in lines if line]


def test_values_of_a_map_stand_above_its_bar_and_are_whole(shown):
    text = on_a_terminal(shown, "map", NO_COLOR="1")
    assert re.search(r"square +━*─* +\d+ of 30 calls ended +\d+s", text)
    assert [line for line in screen(text) if not line.startswith(("kubetorch:", "(square)"))] == [
        f"value {n * n}" for n in range(30)
    ]


def test_lines_of_a_call_stand_above_its_progress_and_are_whole(shown):
    text = on_a_terminal(shown, "call", NO_COLOR="1")
    assert re.search(r"fit-\S+ +━*─* +\d+% \d+/40 epoch \d+ +\d+s", text)
    lines = [line for line in screen(text) if " line " in line]
    assert [line.partition(") ")[2] for line in lines] == [f"line {n}" for n in range(40)]
    assert "epoch" not in "\n".join(screen(text))


def test_a_deploy_has_a_bar_for_its_upload_and_its_steps(shown):
    # Something to upload, which does not shrink on the way.
    weights = shown.with_name("weights.bin")
    weights.write_bytes(os.urandom(150 * 2**20))
    with Step(r"step 1/2: RUN cat < .* +\d+s") as first:
        text = on_a_terminal(shown, "deploy", first.command, "true", "a", step=first, NO_COLOR="")
    assert first.is_over
    weights.unlink()
    assert re.search(r"uploading \d+\.\d of 150\.\d MiB", text)
    assert "\x1b[38" in text or "\x1b[3" in text
    lines = screen(re.sub(r"\x1b\[[0-9;]*m", "", text))
    assert [line for line in lines if line.startswith("(builda)")][-2:] == [
        "(builda) first",
        "(builda) second",
    ]
    assert "━" not in "\n".join(lines)


def test_ctrl_c_takes_the_bar_away(shown):
    words = ("deploy", "true", "sleep 60", "b")
    text = on_a_terminal(shown, *words, interrupt_at="step 2/2", NO_COLOR="1")
    lines = screen(text)
    assert (
        lines[-1]
        == "Interrupted. The deploy of buildb goes on: kt status buildb, kt teardown buildb."
    )
    assert lines[-2] == "(buildb) first"
    run_kt("teardown", "buildb", "-y")


@pytest.mark.parametrize("is_dumb", [False, True])
def test_where_there_are_no_bars_a_line_says_what_a_deploy_waits_for(shown, is_dumb):
    name = "c" if is_dumb else "d"
    with Step(r"^\(\w+\) step 2/2: RUN cat < .*, \d+s\r?$") as second:
        words = ("deploy", "true", second.command, name)
        if is_dumb:
            text = on_a_terminal(shown, *words, step=second, TERM="dumb")
        else:
            text = errors_of([sys.executable, str(shown), *words], second)
    assert "\x1b" not in text
    assert second.is_over
    command = f"RUN {second.command}; echo second # force"
    assert f"(build{name}) step 2/2: {command}" in text.splitlines()


def errors_of(command, step):
    """All that a program writes to its standard error."""
    text = ""
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as program, step:
        for line in program.stderr:
            text += line
            step.read(text)
    assert program.returncode == 0
    return text


def test_a_program_that_is_quiet_has_no_such_line(shown):
    quiet = subprocess.run(
        [sys.executable, str(shown), "deploy", "true", "sleep 5.5", "e"],
        env={**os.environ, "KT_QUIET": "true"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert "RUN" not in quiet.stderr
