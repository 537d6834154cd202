"""`kt logs`: lines of pods, followed over restarts of the local service."""

import json
import os
import signal
import subprocess
import sys
import threading
from queue import Empty, Queue

import pytest

from tests.local import commands

#: A test runs `kt` many times.
pytestmark = pytest.mark.timeout(300)
SOURCE = """
def say(*words):
    for word in words:
        print(word)
"""


def kt(*arguments, cwd=None):
    completed = commands.kt(*arguments, cwd=cwd, NO_COLOR="1")
    assert completed.returncode == 0, completed.stdout + completed.stderr
    return completed.stdout


def say(*words, service="say"):
    kt("call", service, "-a", json.dumps(words))


def pods(service):
    return [pod["name"] for pod in json.loads(kt("status", service, "--json"))["pods"]]


class Follower:
    """`kt logs -f` in another terminal."""

    def __init__(self, *arguments):
        self.process = subprocess.Popen(
            [sys.executable, "-m", "kubetorch", "logs", "-f", *arguments],
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._lines = Queue()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()
        self._drain = threading.Thread(target=self.process.stderr.read)
        self._drain.start()

    def _read(self):
        for line in self.process.stdout:
            self._lines.put(line.rstrip("\n"))

    def take(self, count):
        return [self._lines.get(timeout=60) for _ in range(count)]

    def rest(self):
        lines = []
        try:
            while True:
                lines.append(self._lines.get_nowait())
        except Empty:
            return lines

    def interrupt(self):
        self.process.send_signal(signal.SIGINT)
        return self.end()

    def end(self):
        status = self.process.wait(timeout=60)
        self._reader.join()
        self._drain.join()
        self.process.stdout.close()
        self.process.stderr.close()
        return status


@pytest.fixture(scope="module")
def deployed(shared_service_home, tmp_path_factory):
    folder = tmp_path_factory.mktemp("project")
    (folder / "talk.py").write_text(SOURCE + "\n\ndef pair(*words):\n    say(*words)\n")
    kt("deploy", "talk.py:say", "--compute", '{"cpus": "0.1"}', cwd=folder)
    kt("deploy", "talk.py:pair", "--compute", '{"cpus": "0.1", "replicas": 2}', cwd=folder)
    return shared_service_home


@pytest.fixture
def follower():
    started = []

    def follow(*arguments):
        started.append(Follower(*arguments))
        return started[-1]

    yield follow
    for running in started:
        if running.process.poll() is None:
            running.process.kill()
            running.end()


def test_the_last_lines_are_printed_as_they_were_written(deployed):
    say("one", "two", "three")
    assert kt("logs", "say", "-t", "2").splitlines() == ["two", "three"]
    assert kt("logs", "say", "-t", "0") == ""


def test_all_that_is_within_the_range_can_be_asked_for(deployed):
    say("far")
    assert "far" in kt("logs", "say", "-t", "100000").splitlines()
    assert "0<=x<=100000" in kt("logs", "--help")


def test_lines_are_json_objects_when_asked(deployed):
    say("for programs")
    (line,) = kt("logs", "say", "-t", "1", "--json").splitlines()
    line_fields = json.loads(line)
    assert (line_fields["text"], line_fields["pod"], line_fields["source"]) == (
        "for programs",
        pods("say")[0],
        "stdout",
    )


def test_several_pods_are_told_apart(deployed):
    program = "import kubetorch as kt; list(kt.fn(name='pair').map(range(8)))"
    subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, timeout=60)
    lines = kt("logs", "pair").splitlines()
    assert {line.partition(" ")[0] for line in lines} == {f"({pod})" for pod in pods("pair")}


def test_one_pod_is_chosen_by_name_or_index(deployed):
    by_index = kt("logs", "pair", "-p", "1")
    assert by_index == kt("logs", "pair", "-p", pods("pair")[1])
    assert "(pair-" not in by_index


@pytest.mark.parametrize(
    ("pod", "message"),
    [
        ("7", "Pod index 7 is out of range"),
        ("other-0", "does not have an associated pod called other-0"),
    ],
)
def test_a_pod_that_is_not_there_is_an_error(deployed, pod, message):
    with pytest.raises(AssertionError, match=message):
        kt("logs", "pair", "-p", pod)


def test_following_shows_lines_as_they_come_until_interrupted(deployed, follower):
    say("before")
    following = follower("say", "-t", "1")
    assert following.take(1) == ["before"]
    say("during")
    assert following.take(1) == ["during"]
    assert following.interrupt() == 130


def test_following_survives_a_killed_local_service_without_gap_or_repetition(deployed, follower):
    say("first")
    following = follower("say", "-t", "1")
    assert following.take(1) == ["first"]
    for number in range(3):
        service = json.loads(kt("local", "status", "--json"))
        os.kill(service["pid"], signal.SIGKILL)
        say(f"after kill {number}")
        assert following.take(1) == [f"after kill {number}"]
    assert following.interrupt() == 130
    assert following.rest() == []


def test_following_ends_when_the_service_is_torn_down(deployed, follower, tmp_path):
    (tmp_path / "brief.py").write_text("def brief(): print('here')\n")
    kt("deploy", "brief.py:brief", "--compute", "{}", cwd=tmp_path)
    kt("call", "brief")
    following = follower("brief")
    assert following.take(1) == ["here"]
    kt("teardown", "brief", "-y")
    assert following.end() == 0


def test_a_reader_that_leaves_ends_the_command_quietly(deployed):
    say(*(f"line {number}" for number in range(200)))
    command = f"{sys.executable} -m kubetorch logs say | head -1"
    completed = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=60)
    assert len(completed.stdout.splitlines()) == 1
    assert "Traceback" not in completed.stderr and "BrokenPipe" not in completed.stderr
