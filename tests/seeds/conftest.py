"""The list of examples, printed after the tests; packages that they install."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks import wheels as builder
from tests.local import commands

#: Stand-ins for packages of hundreds of megabytes: what the examples use of them.
PACKAGES = {
    "transformers": (
        "class AutoModel:\n"
        "    def __init__(self, name):\n"
        "        self.name = name\n\n"
        "    @classmethod\n"
        "    def from_pretrained(cls, name):\n"
        "        return cls(name)\n\n"
        "    def __call__(self, inputs):\n"
        "        return f'{self.name} says {inputs}'\n"
    ),
    "accelerate": "",
    "datasets": "",
}


@pytest.fixture(scope="session", autouse=True)
def _commands(_environment: None) -> Iterator[None]:
    """As those of the tier `local`."""
    with commands.serving():
        yield


@pytest.fixture(scope="session")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that pip and uv find the stand-ins in."""
    folder = tmp_path_factory.mktemp("wheels")
    for name, code in PACKAGES.items():
        builder.build(folder, name, "1.0", code)
    return folder


@pytest.fixture(scope="module")
def offline(wheels: Path) -> Iterator[None]:
    """Installers take packages from that folder, and from nowhere else."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("UV_FIND_LINKS", str(wheels))
        patch.setenv("UV_OFFLINE", "1")
        yield


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """One line for each example that was run, in the order of the documents."""
    lines = []
    for outcome in ("passed", "failed", "error", "skipped"):
        for report in terminalreporter.getreports(outcome):
            example = dict(getattr(report, "user_properties", ())).get("example")
            if example is not None:
                lines.append((*example, outcome))
    if lines:
        terminalreporter.section(f"{len(lines)} examples of the documents")
    for _, name, about, outcome in sorted(lines):
        terminalreporter.write_line(f"{outcome:7} {name:42} {about}")
