"""`kt local`: the service that runs pods here, and how `kt` looks on a terminal."""

import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time

import pytest

from tests.local import commands


def kt(*arguments, **environ):
    return commands.kt(*arguments, **{"NO_COLOR": "1", **environ})


def shown(*arguments):
    completed = kt(*arguments, "--json")
    assert completed.returncode == 0, completed.stderr
    return json.loads(completed.stdout)


def test_status_never_starts_the_service(service_home):
    assert "does not run" in kt("local", "status").stdout
    status = shown("local", "status")
    assert (status["running"], status["url"]) == (False, None)
    assert status["home"] == str(service_home)
    assert not service_home.exists()


def test_start_status_and_stop_tell_one_story(service_home):
    assert kt("local", "start").stdout.startswith("Started the local service at http://127.0.0.1:")
    status = shown("local", "status")
    assert (status["running"], status["services"]) == (True, 0)
    assert shown("local", "start")["pid"] == status["pid"]
    assert kt("local", "start").stdout.startswith("Runs already: the local service at")
    assert status["url"] in kt("local", "status").stdout
    assert kt("local", "stop").stdout == "Stopped the local service\n"
    assert kt("local", "stop").stdout == "The local service does not run\n"
    assert shown("local", "stop") == {"stopped": False}


def test_a_killed_service_is_started_again_by_the_next_command(service_home):
    before = shown("local", "start")["pid"]
    os.kill(before, signal.SIGKILL)
    assert shown("list") == []
    assert shown("local", "status")["pid"] != before


def test_a_folder_that_others_can_read_is_refused(service_home):
    service_home.mkdir(parents=True)
    service_home.chmod(0o755)
    completed = kt("list")
    assert completed.returncode == 1
    assert f"hint: chmod 700 {service_home}" in completed.stderr


# ------------------------------------------------------------------------------- on a terminal


def on_a_terminal(*arguments, columns=100, **environ):
    """What `kt` writes to a terminal, and its exit status."""
    child, screen = pty.fork()
    if child == 0:
        os.environ.update({"COLUMNS": str(columns), "TERM": "xterm", **environ})
        os.execv(sys.executable, [sys.executable, "-m", "kubetorch", *arguments])
    written = b""
    deadline = time.monotonic() + 60
    while select.select([screen], [], [], max(0.0, deadline - time.monotonic()))[0]:
        try:
            data = os.read(screen, 65536)
        except OSError:  # the other end of a pseudo-terminal was closed
            break
        if not data:
            break
        written += data
    os.close(screen)
    _, status = os.waitpid(child, 0)
    return written.decode().replace("\r\n", "\n"), os.waitstatus_to_exitcode(status)


def without_colour(text):
    return re.sub(r"\x1b\[[0-9;]*m", "", text)


def test_errors_are_red_on_a_terminal_and_end_with_a_hint(service_home):
    text, status = on_a_terminal("status", "absent")
    assert status == 1
    message = "Failed to load service absent in namespace default"
    assert f"\x1b[31m{message}\x1b[0m" in text
    assert text.rstrip().splitlines()[-1].startswith("hint: kt list")


def test_without_colour_a_terminal_shows_the_same_text(service_home):
    coloured, _ = on_a_terminal("status", "absent")
    plain, _ = on_a_terminal("status", "absent", NO_COLOR="1")
    assert plain == without_colour(coloured)
    assert "\x1b" not in plain


def test_a_service_that_was_torn_down_stays_gone_when_the_local_service_starts_again(
    service_home, tmp_path
):
    (tmp_path / "brief.py").write_text("def brief(): return 1\n")
    target = str(tmp_path / "brief.py:brief")
    assert kt("deploy", target, "--compute", "{}").returncode == 0
    assert shown("call", "brief") == 1
    assert kt("teardown", "brief", "-y").returncode == 0
    assert kt("local", "stop").returncode == 0
    assert shown("list") == []


def test_a_table_on_a_narrow_terminal_leaves_out_what_says_nothing(service_home, tmp_path):
    (tmp_path / "brief.py").write_text("def brief(): return 1\n")
    assert kt("deploy", str(tmp_path / "brief.py:brief"), "-c", '{"cpus": 0.25}').returncode == 0
    wide, _ = on_a_terminal("list", columns=150)
    narrow, _ = on_a_terminal("list", columns=80)
    assert "VOLUMES" in wide and "VOLUMES" not in narrow
    header, row = without_colour(narrow).splitlines()
    assert row.startswith("brief") and row.endswith("0.25")
    assert header.index("CPUs") == row.index("0.25")


@pytest.mark.parametrize(
    ("arguments", "unbuffered"), [("list", ""), ("list", "1"), ("config --json", "1"), ("-h", "")]
)
def test_output_that_cannot_be_written_is_one_line_on_stderr(service_home, arguments, unbuffered):
    command = f"{sys.executable} -m kubetorch {arguments} > /dev/full"
    environ = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
    completed = subprocess.run(
        command, shell=True, env=environ, capture_output=True, text=True, timeout=60
    )
    assert completed.returncode == 1
    assert completed.stderr == "stdout cannot be written: No space left on device\n"
