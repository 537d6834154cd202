"""A program that is forked is what it would be in a process that was started for it."""

import os
import subprocess
import sys

import pytest

from tests.local import commands

#: What a program can see of how it was started.
LOOK = """
import atexit, json, os, sys, threading, warnings
from pathlib import Path

atexit.register(print, "at the end")
thread = threading.Thread(target=lambda: print("in a thread"))
thread.start(), thread.join()
main = sys.modules["__main__"]
names = {name: str(value) for name, value in vars(main).items() if name.startswith("__")}
names.pop("__builtins__"), names.pop("__annotations__", None)
names["__loader__"] = names["__loader__"].partition(" object")[0]
print(json.dumps([names, __name__, sys.argv, sys.orig_argv[1:], sys.path, os.getcwd()]))
flags = str(sys.flags).replace("dont_write_bytecode=1", "dont_write_bytecode=0")  # as tests began
print(sys.stdin.read(), os.environ["SAYS"], flags, sys.excepthook, sys.warnoptions)
for stream in (sys.stdin, sys.stdout, sys.stderr):
    print(stream.encoding, stream.errors, stream.line_buffering, stream.fileno())
print(sys.__stdout__ is sys.stdout, os.listdir("/proc/self/fd"), threading.active_count())
sys.stdout.write("not ended")
"""
FAILS = """
import sys
import kubetorch as kt

def fail():
    try:
        1 / 0
    finally:
        raise ValueError("äöü\\udcff")

print("first", kt.Compute(cpus="0.1").replicas)
"""


@pytest.mark.parametrize(
    ("words", "source"),
    [
        (["./program.py", "a", "-b"], LOOK),
        (["../link.py"], LOOK),
        (["-c", LOOK, "a"], ""),
        (["-W", "error", "program.py"], LOOK),
        (["-W", "error", "program.py"], FAILS + "import warnings; warnings.warn('old')"),
        (["-c", FAILS + "kt.fun(fail)"], ""),
        (["program.py"], "# coding: latin-1\n" + FAILS + "print(ascii('é')); fail()"),
        (["program.py"], FAILS + "sys.exit('words')"),
        (["program.py"], FAILS + "sys.excepthook = lambda *_: print('own hook'); fail()"),
        (["program.py"], "def wrong(:"),
    ],
)
def test_a_forked_program_does_what_it_does_in_a_process_of_its_own(
    tmp_path, monkeypatch, words, source
):
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)  # a setting of the interpreter
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "program.py").write_text(source)
    (tmp_path / "link.py").symlink_to(folder / "program.py")
    real = subprocess.run(
        [sys.executable, *words],
        cwd=folder,
        input="typed",
        env={**os.environ, "SAYS": "x"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    commands.python("-c", "")  # the first one of this file
    forked = commands.python(*words, cwd=folder, stdin="typed", SAYS="x")
    assert forked.stdout == real.stdout
    assert forked.stderr == real.stderr
    assert forked.returncode == real.returncode
