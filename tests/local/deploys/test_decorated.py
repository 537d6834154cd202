"""Decorated functions and classes that their own file deploys, without a guard."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.local.user_project import UserProject

#: Functions, classes and their deploys at module level.
SOURCE = """
import asyncio
import kubetorch as kt

@kt.compute(cpus="0.1")
class Counter:
    def __init__(self):
        self.n = 0

    def add(self, k):
        self.n += k
        return double(self.n)

def double(n):
    return 2 * n

{counter}

@kt.compute(cpus="0.1", name="half")
def half(n):
    return n / double(1)

{half}
print(Counter.add(2), half(3))
half.teardown()
Counter.teardown()
"""


@pytest.fixture
def project(emptied_home: Path, tmp_path: Path) -> UserProject:
    return UserProject(tmp_path / "shop")


@pytest.mark.parametrize(
    ("counter", "half"),
    [
        ("Counter.deploy()", "half.deploy()"),
        ("counter = Counter.to(kt.Compute(cpus='0.1'))", "half.to(kt.Compute(cpus='0.1'))"),
        ("asyncio.run(Counter.deploy_async())", "def main():\n    half.deploy()\nmain()"),
    ],
)
def test_a_file_deploys_what_it_decorates_without_a_guard(project, counter, half):
    project.write("work.py", SOURCE.format(counter=counter, half=half))
    for _ in range(2):
        completed = project.run("work.py")
        assert completed.returncode == 0, completed.stderr
        assert completed.stdout.splitlines()[-1] == "4 1.5"


def test_another_attribute_that_a_class_lacks_is_an_error_of_the_import(project):
    counter = "if 'POD_NAME' in os.environ:\n    Counter.declare()\nCounter.deploy()"
    project.write("work.py", "import os\n" + SOURCE.format(counter=counter, half=""))
    completed = project.run("work.py")
    assert completed.returncode == 1
    assert "type object 'Counter' has no attribute 'declare'" in completed.stderr
