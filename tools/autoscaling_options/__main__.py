"""Tries each option of `autoscale()` on each engine, for the page docs/autoscaling_options.md.

python -m tools.autoscaling_options                         # all options on all engines
python -m tools.autoscaling_options --engine local          # on this machine alone
python -m tools.autoscaling_options --only concurrency=1    # one option
python -m tools.autoscaling_options --write                 # changes the page

The engines `deployments` and `knative` need KUBECONFIG, a cluster with Knative and metrics-server,
and Kubetorch in it, which is told what scales and tries with `kt upgrade`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import secrets
import shutil
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TypedDict

from benchmarks import ours
from tools.autoscaling_options.options import OPTIONS

PAGE = Path(__file__).parents[2] / "docs/autoscaling_options.md"
#: Names for readers, by the name of an engine.
ENGINES = {
    "local": "This machine",
    "deployments": "Cluster without Knative",
    "knative": "Cluster with Knative",
}
#: What `autoscaling.engine` of the chart is.
_SETTINGS = {"deployments": "kubetorch", "knative": "knative"}
_PROJECT = Path(__file__).parent / "project"
_WIDTH = 130
_HEAD = """\
# Options of autoscaling, tried

`python -m tools.autoscaling_options --write` has deployed a service with each option, called it,
and watched its pods: processes of a machine, a Deployment that Kubetorch scales, and a Knative
Service. [Autoscaling](autoscaling.md) explains the options.
"""


class Result(TypedDict):
    """What an option should do on an engine, whether it does, and what it did."""

    name: str
    expectation: str
    is_right: bool
    observation: str


def main() -> int:
    """The exit status: 1 if an option does something else than it should."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--engine", choices=ENGINES, action="append", help="all, if not given")
    parser.add_argument("--only", action="append", default=[], help="an option; all, if not given")
    parser.add_argument("--write", action="store_true", help="change the page")
    parser.add_argument("--jobs", type=int, default=6, help="options that are tried at one time")
    arguments = parser.parse_args()
    failures = 0
    for engine in arguments.engine or ENGINES:
        results = _attempts(engine, arguments.only, arguments.jobs)
        if arguments.write:
            _write(engine, results)
        right = sum(result["is_right"] for result in results)
        sys.stdout.write(f"{ENGINES[engine]}: {right} of {len(results)} as expected\n")
        failures += len(results) - right
    return 1 if failures else 0


def _attempts(engine: str, names: list[str], jobs: int) -> list[Result]:
    with _environment(engine) as variables, tempfile.TemporaryDirectory() as folder:
        project, results_file = Path(folder) / "project", Path(folder) / "results"
        shutil.copytree(_PROJECT, project)
        (project / "pyproject.toml").touch()
        command = [sys.executable, "-m", "tools.autoscaling_options.attempts", engine]
        completed = subprocess.run(
            [*command, str(project), str(jobs), str(results_file), *names],
            env={**os.environ, **variables, "KT_USERNAME": "", "KT_STREAM_LOGS": "false"},
        )
        if completed.returncode:
            sys.exit(completed.returncode)
        results: list[Result] = json.loads(results_file.read_text(encoding="utf-8"))
        return results


# ----------------------------------------------------------------------------------- environment


def _environment(engine: str) -> AbstractContextManager[dict[str, str]]:
    """A local service, or a namespace of the cluster, for these options alone."""
    return ours.home() if engine == "local" else _namespace(engine)


@contextlib.contextmanager
def _namespace(engine: str) -> Iterator[dict[str, str]]:
    namespace = f"kt-options-{secrets.token_hex(3)}"
    _set_engine(_SETTINGS[engine])
    try:
        subprocess.run(["kubectl", "create", "namespace", namespace], check=True)
        yield {"KT_BACKEND": "kubernetes", "KT_NAMESPACE": namespace}
        everything = ["kubetorchworkloads", "--all", "-n", namespace]
        subprocess.run(["kubectl", "delete", *everything, "--wait=true"], check=True)
    finally:
        subprocess.run(["kubectl", "delete", "namespace", namespace, "--wait=false"], check=True)
        _set_engine("auto")


def _set_engine(engine: str) -> None:
    command = [
        sys.executable,
        "-m",
        "kubetorch",
        "upgrade",
        "--set",
        f"autoscaling.engine={engine}",
    ]
    subprocess.run(command, check=True)


# ------------------------------------------------------------------------------------------ page


def _write(engine: str, results: list[Result]) -> None:
    """Change the lines of this engine in the page; those of another engine stay."""
    lines_by_option = _read()
    for result in results:
        lines = lines_by_option.setdefault(result["name"], {})
        expectation, answer = result["expectation"], "as expected"
        if not result["is_right"]:
            answer = "**otherwise**"
        # What is of one run alone says nothing to a reader.
        words = " ".join(result["observation"].split())
        words = re.sub(r"option-\d+[\w-]*|kt-options-\w+", "NAME", words)
        lines[""] = f"{expectation[0].upper()}{expectation[1:]}."
        lines[ENGINES[engine]] = f"{answer}: {words}"
    parts = [_HEAD]
    for name in (option.name for option in OPTIONS if option.name in lines_by_option):
        lines = {**dict.fromkeys(ENGINES.values(), "not tried yet"), **lines_by_option[name]}
        parts.append(f"## `{name}`\n\n{lines['']}\n")
        items = [f"- {title}: {lines[title]}" for title in ENGINES.values()]
        parts.append("\n".join(_wrapped(item) for item in items) + "\n")
    PAGE.write_text("\n".join(parts), encoding="utf-8")


def _wrapped(item: str) -> str:
    return textwrap.fill(
        item, _WIDTH, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
    )


def _read() -> dict[str, dict[str, str]]:
    """The lines of the page, by option and title; that of the expectation is the empty one."""
    if not PAGE.exists():
        return {}
    lines_by_option: dict[str, dict[str, str]] = {}
    for section in PAGE.read_text(encoding="utf-8").split("\n## ")[1:]:
        heading, expectation, items = section.split("\n\n", 2)
        lines = lines_by_option[heading.strip("`")] = {"": " ".join(expectation.split())}
        for item in items.strip().removeprefix("- ").split("\n- "):
            title, _, words = " ".join(item.split()).partition(": ")
            lines[title] = words
    return lines_by_option


if __name__ == "__main__":
    sys.exit(main())
