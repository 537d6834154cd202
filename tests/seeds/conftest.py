"""The list of examples, printed after the tests; packages that they install."""

from __future__ import annotations

import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

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


@pytest.fixture(scope="session")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that pip and uv find the stand-ins in."""
    folder = tmp_path_factory.mktemp("wheels")
    for name, code in PACKAGES.items():
        info = f"{name}-1.0.dist-info"
        files = {
            f"{name}.py": code,
            f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n",
            f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        }
        record = "".join(f"{path},,\n" for path in [*files, f"{info}/RECORD"])
        with zipfile.ZipFile(folder / f"{name}-1.0-py3-none-any.whl", "w") as wheel:
            for path, text in {**files, f"{info}/RECORD": record}.items():
                wheel.writestr(path, text)
    return folder


@pytest.fixture(scope="module")
def offline(wheels: Path) -> Iterator[None]:
    """Installers take packages from that folder, and from nowhere else."""
    with pytest.MonkeyPatch.context() as patch:
        for tool in ("PIP", "UV"):
            patch.setenv(f"{tool}_FIND_LINKS", str(wheels))
            patch.setenv(f"{tool}_NO_INDEX", "1")
        yield


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """One line for each example that was run, in the order of the documents."""
    lines = []
    for outcome in ("passed", "failed", "error", "skipped"):
        for report in terminalreporter.getreports(outcome):
            found = dict(report.user_properties).get("example")
            if found is not None:
                lines.append((*found, outcome))
    if lines:
        terminalreporter.section(f"{len(lines)} examples of the documents")
    for _, name, about, outcome in sorted(lines):
        terminalreporter.write_line(f"{outcome:7} {name:42} {about}")
