"""Fixtures of the tests of debuggers."""

from __future__ import annotations

import subprocess
import sys

import pytest

import kubetorch as kt
from tests.local.debugger.sessions import TerminalProgram
from tests.local.user_project import UserProject

SOURCE = """
import asyncio
import concurrent.futures
import contextvars
import sys
import threading
import time

import kubetorch as kt

def price(units, each=2):
    total = units * each
    print("computing")
    breakpoint()
    total += 1
    print("computed")
    return total

def plain(x, y=1):
    z = x + y
    return z

def lines(count):
    for number in range(count):
        breakpoint()
    return count

def deep(mode=None):
    kt.deep_breakpoint(debug_port=6001, debug_mode=mode)
    return "went on"

async def later(x):
    await asyncio.sleep(0)
    breakpoint()
    await asyncio.sleep(0)
    return x + 1

def values(count):
    for number in range(count):
        breakpoint()
        yield number

def in_thread():
    def work():
        breakpoint()
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    return "joined"

def talk():
    begun, ended = threading.Event(), threading.Event()
    def work():
        begun.wait(60)
        print("said by the thread")
        ended.set()
    thread = threading.Thread(target=contextvars.copy_context().run, args=(work,))
    thread.start()
    breakpoint()
    thread.join()
    return "talked"

def in_threads(count):
    def work(number):
        breakpoint()
    with concurrent.futures.ThreadPoolExecutor(count) as pool:
        list(pool.map(work, range(count)))
    return "joined"

def in_pool(count):
    def work(number):
        breakpoint()
        return number
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        return sum(pool.map(work, range(count)))

def in_process():
    import multiprocessing
    process = multiprocessing.get_context("fork").Process(target=price, args=(3,))
    process.start()
    process.join()
    return process.exitcode

def divide(x, y):
    quotient = x / y
    return quotient

def spin(seconds):
    begun = time.time()
    seen = []
    while time.time() < begun + seconds:
        seen.append([])
    return len(seen) > 0

def wait(seconds):
    time.sleep(seconds)

def tick(seconds):
    for turn in range(seconds * 20):
        time.sleep(0.05)
    return turn

def count(seconds):
    turn, end = 0, time.time() + seconds
    while time.time() < end:
        turn += 1
    return turn

def traces(seconds):
    trace = sys.gettrace()
    time.sleep(seconds)
    return trace and repr(trace)

def crowded(seconds):
    if sys.version_info >= (3, 12):
        for tool in range(6):
            if sys.monitoring.get_tool(tool) is None:
                sys.monitoring.use_tool_id(tool, "another tool")
    return spin(seconds)

async def sleepy(seconds):
    for turn in range(seconds * 100):
        await asyncio.sleep(0.01)
    return turn

class Counter:
    def __init__(self):
        self.count = 0

    def add(self, step):
        self.count += step
        breakpoint()
        return self.count

class Destroyed:
    def __del__(self):
        breakpoint()

def without_debugpy():
    import importlib.metadata
    def version(name):
        raise importlib.metadata.PackageNotFoundError(name)
    importlib.metadata.version = version
    breakpoint()
    return "went on"

def destroy():
    Destroyed()
    return "destroyed"
"""


@pytest.fixture(scope="module", autouse=True)
def service(shared_service_home):
    return shared_service_home


@pytest.fixture(scope="module")
def project(service, tmp_path_factory):
    project = UserProject(tmp_path_factory.mktemp("debugger") / "shop")
    project.source = project.module(SOURCE)
    yield project
    project.forget()


@pytest.fixture(scope="module")
def deployed(project):
    """Deploys a function or class of the project, once for all tests."""
    handles = {}

    def deploy(name, *, compute=None, service=None):
        service = service or name.lower().replace("_", "-")
        if service not in handles:
            value = getattr(project.source, name)
            declare = kt.cls if isinstance(value, type) else kt.fn
            compute = compute or kt.Compute(cpus="0.1")
            handles[service] = declare(value, name=service).to(compute)
        return handles[service]

    yield deploy
    for handle in handles.values():
        handle.teardown()


@pytest.fixture
def terminal():
    """Starts programs on terminals."""
    programs = []

    def start(*words):
        programs.append(TerminalProgram(words))
        return programs[-1]

    yield start
    for program in programs:
        program.close()


@pytest.fixture
def caller(terminal, project):
    """Starts a program on a terminal that calls a deployed service."""

    def call(expression, *, service, kind="fn"):
        code = (
            f"import sys; sys.path.insert(0, {str(project.folder)!r})\n"
            "import kubetorch as kt\n"
            f"f = kt.{kind}(name={service!r}, get_if_exists=True)\n"
            f"print('result:', {expression})\n"
        )
        return terminal(sys.executable, "-c", code)

    return call


@pytest.fixture
def stopped(project):
    """Starts a program without a terminal whose call stops; returns it with its lines so far."""
    programs = []

    def start(expression, *, service, until="stopped at"):
        code = (
            f"import sys; sys.path.insert(0, {str(project.folder)!r})\n"
            "import kubetorch as kt\n"
            f"f = kt.fn(name={service!r}, get_if_exists=True)\n"
            f"print('result:', {expression}, flush=True)\n"
        )
        program = subprocess.Popen(
            [sys.executable, "-c", code],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        programs.append(program)
        program.lines = []
        for line in program.stdout:
            program.lines.append(line.rstrip("\n"))
            if until in line:
                return program
        raise AssertionError(f"it ended without {until!r}: {program.lines}")

    yield start
    for program in programs:
        program.kill()
        program.communicate()
