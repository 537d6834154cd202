"""Ranks, apps, modules and other processes stop for a debugger, or say why they do not."""

from __future__ import annotations

import re
import subprocess
import sys
import threading

import pytest

import kubetorch as kt
from tests.local import commands
from tests.local.debugger.sessions import DEADLINE, PROMPT, attempts


def wait_for_stop(name, *words, typed="c\n"):
    """Attach as soon as something has stopped."""
    for _ in attempts():
        attached = commands.kt("debug", name, *words, stdin=typed, timeout=DEADLINE)
        if attached.returncode == 0:
            return attached.stdout
    raise AssertionError(attached.stderr)


def ranks(count, processes):
    compute = kt.Compute(cpus="0.1")
    return compute.distribute("spmd", workers=count, num_proc=processes)


def test_debug_stops_the_last_local_process_of_the_first_pod(deployed, caller):
    deployed("plain", service="ranks", compute=ranks(2, 2))
    program = caller("f(4, debug=True)", service="ranks")
    stop = program.until(PROMPT)
    assert "rank 1 has stopped" in stop
    assert "'1'" in program.command("p __import__('os').environ['RANK']")
    program.type("c\n")
    assert "result: [5, 5, 5, 5]" in program.end()


def test_a_rank_is_chosen(deployed, project):
    handle = deployed("price", service="four", compute=ranks(2, 2))
    values = []
    thread = threading.Thread(target=lambda: values.append(handle(4, stream_logs=False)))
    thread.start()
    rank = "p __import__('os').environ['RANK']\nc\n"
    assert "'3'" in wait_for_stop("four", "--rank", "3", typed=rank)
    for other in (0, 1, 2):
        assert f"'{other}'" in wait_for_stop("four", "--rank", str(other), typed=rank)
    thread.join(DEADLINE)
    assert values == [[9, 9, 9, 9]]


def test_a_command_goes_to_all_ranks_which_answer_with_their_labels(deployed):
    handle = deployed("price", service="three", compute=ranks(1, 3))
    values = []
    thread = threading.Thread(target=lambda: values.append(handle(4, stream_logs=False)))
    thread.start()
    rank = "p 'rank ' + __import__('os').environ['RANK']"
    for _ in attempts():
        orders = ("-c", rank, "-c", "!total += 1", "-c", "c")
        attached = commands.kt("debug", "three", "--all", *orders, timeout=DEADLINE)
        if attached.returncode == 0:
            break
    answers = [line for line in attached.stdout.splitlines() if "'rank " in line]
    while len(answers) < 3:  # those that had not stopped when the first were found
        typed = f"{rank}\n!total += 1\nc\n"
        attached = commands.kt("debug", "three", "--all", stdin=typed, timeout=DEADLINE)
        answers += [line for line in attached.stdout.splitlines() if "'rank " in line]
        assert thread.is_alive() or len(answers) == 3
    assert sorted(line.split()[-1] for line in answers) == ["0'", "1'", "2'"]
    for line in answers:
        label, _, answer = line.partition(") ")
        assert label.split()[-1] == answer.strip("'").split()[-1]
    thread.join(DEADLINE)
    assert values == [[10, 10, 10]]


@pytest.fixture
def running(project):
    """Starts programs of the project; returns them with what they write."""
    programs = []

    def start(source):
        programs.append(
            subprocess.Popen(
                [sys.executable, str(project.write("program.py", source))],
                cwd=project.folder,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
        return programs[-1]

    yield start
    for program in programs:
        program.kill()
        program.communicate()


def test_a_module_stops_while_it_is_imported(project, running):
    project.write("importing.py", "x = 1\nbreakpoint()\n\ndef value():\n    return x\n")
    program = running(
        """
        import sys
        import kubetorch as kt
        sys.breakpointhook = print  # here it goes on
        import importing
        print("result:", kt.fn(importing.value).to(kt.Compute(cpus="0.1"))())
        """
    )
    assert "'importing'" in wait_for_stop("value", typed="p __name__\nx = 7\nc\n")
    assert "result: 7" in program.communicate(timeout=DEADLINE)[0]


def test_an_app_of_python_stops(project, running):
    project.write("tool.py", "answer = 42\nbreakpoint()\nprint('answered', answer)\n")
    program = running(
        """
        import kubetorch as kt
        kt.app("python tool.py", name="tool").to(kt.Compute(cpus="0.1"))
        """
    )
    assert "42" in wait_for_stop("tool", typed="p answer\nanswer = 43\nc\n")
    program.communicate(timeout=DEADLINE)
    log = commands.kt("logs", "tool").stdout
    assert "--namespace default --mode pdb" in log
    assert "answered 43" in log


def test_all_at_the_prompt_of_the_caller_asks_the_other_ranks_too(deployed, caller):
    deployed("price", service="three", compute=ranks(1, 3))
    program = caller("f(4)", service="three")
    program.until(PROMPT)
    rank = "p 'rank ' + __import__('os').environ['RANK']"
    for _ in attempts():  # until all have stopped
        answers = program.command(f"all {rank}")
        if answers.count("'rank ") == 3:
            break
    assert all(f"'rank {number}'" in answers for number in range(3))
    assert "(three-" in answers
    program.command("all !total += 1")
    for _ in range(2):
        program.type("c\n")
        program.until(PROMPT)
    program.type("c\n")
    assert "result: [10, 10, 10]" in program.end()


def test_each_prompt_of_another_rank_says_whose_it_is_and_where(deployed, caller):
    deployed("price", service="pair", compute=ranks(1, 2))
    program = caller("f(4)", service="pair")
    program.until(PROMPT)
    rank = "'rank ' + __import__('os').environ['RANK']"
    for _ in attempts():  # until both have stopped
        answers = program.command(f"all p {rank}")
        if answers.count("'rank ") == 2:
            break
    speaking = re.search(r"rank \d", program.command(f"p {rank}"))[0]
    for _ in range(8):
        output = program.command("n")
        assert output.count("\n-> ") == 1  # each prompt has its position
        named = re.search(r"kubetorch: \S+ (rank \d) has stopped", output)
        speaking = named[1] if named else speaking
        assert f"'{speaking}'" in program.command(f"p {rank}")
        if named:
            break
    assert named
    program.type("c\n")
    program.until("has stopped")
    program.until(PROMPT)
    program.type("c\n")
    assert "result: [9, 9]" in program.end()


def test_all_asks_each_stopped_thread_of_a_process(deployed, caller, stopped):
    deployed("in_threads")
    program = caller("f(3)", service="in-threads")
    program.until(PROMPT)
    for _ in attempts():  # until all have stopped
        answers = program.command("all p 'number', number")
        if answers.count("('number', ") == 3:
            break
    assert sorted(re.findall(r"\('number', (\d)\)", answers)) == ["0", "1", "2"]
    labels = re.findall(r"^\((in-threads-\S+ #\d+)\) ", answers, re.MULTILINE)
    assert len(set(labels)) == 2
    program.kill()

    program = stopped("f(3)", service="in-threads")
    answers = []
    for _ in attempts():
        attached = commands.kt("debug", "in-threads", "--all", "-c", "p 'number', number")
        answers += re.findall(r"\('number', (\d)\)", attached.stdout)
        if len(answers) == 3:
            break
    assert sorted(answers) == ["0", "1", "2"]
