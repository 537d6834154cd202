"""Breaks the source tree in one place at a time, and lists the mutations that no test notices.

python tools/mutations.py --count 200 --results /tmp/mutations.jsonl
python tools/mutations.py --results /tmp/mutations.jsonl --show   # the table, without running more

A mutation negates a condition, turns a comparison round, swaps `and` with `or`, or leaves a
statement out. It is made in a copy of the checkout, which has its own environment. The tests run in
three stages, each only if the stage before did not fail: unit and contract tests of the module
itself, tests of its neighbours, and local tests that run it. An interrupted run goes on with the
next mutation.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import random
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))

from tools.house import PACKAGE, House

PACKAGES = ("specs", "wire", "manifests", "datastore", "k8s", "lib", "controller", "pod")
#: Local tests that run much of a package, by how their names begin.
LOCAL = {
    "specs": ("sdk_compute", "sdk_deploys", "cli_apply", "images"),
    "wire": ("agent_calls", "agent_results", "calls_", "workers_calls", "service", "cli_local"),
    "manifests": ("kinds", "kubernetes_", "cli_apply", "sdk_compute", "agent_in_cluster"),
    "datastore": ("transfers", "controller_blobs", "disk_full", "service", "sdk_deploys"),
    "k8s": ("k8s_", "kubernetes_", "cluster_", "reach", "forwarding", "installing"),
    "lib": ("http", "serving", "connections", "dialing", "shields", "mounts", "exit_", "service"),
    "controller": (
        "controller_",
        "service",
        "cluster_",
        "kubernetes_",
        "idle",
        "removing",
        "reach",
    ),
    "pod": ("agent_", "workers_", "images", "apps", "app_", "pod_commands", "calls_system"),
}
#: Seconds that each stage may take before its tests count as hanging.
LIMITS = (200.0, 300.0, 400.0)
#: Local test files per mutation, the likeliest first.
MAX_LOCAL = 6
_NOT_COPIED = (".git", ".venv", "__pycache__", ".*_cache", ".hypothesis", "node_modules")

_OPPOSITE: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
}
#: Statements whose absence a user does not notice.
_UNNOTICED = re.compile(r"^_?(log|logger|logging)\b|^self\._log\b|^super\(\)\.__init__\(\)$")


@dataclass(frozen=True)
class Mutation:
    """A part of a file, and the text that takes its place; offsets are in bytes."""

    file: str
    line: int
    kind: str
    start: int
    end: int
    text: str

    @property
    def key(self) -> str:
        return f"{self.file}:{self.start}:{self.kind}"


def mutations(file: str, source: str) -> list[Mutation]:
    """All mutations of a file, in its order."""
    offsets = [0]
    for line in source.encode().splitlines(keepends=True):
        offsets.append(offsets[-1] + len(line))
    file_mutations = []
    for node in _nodes(ast.parse(source)):
        for part, kind, text in _replacements(node):
            assert part.end_lineno is not None
            assert part.end_col_offset is not None
            start = offsets[part.lineno - 1] + part.col_offset
            end = offsets[part.end_lineno - 1] + part.end_col_offset
            file_mutations.append(Mutation(file, part.lineno, kind, start, end, text))
    return sorted(file_mutations, key=lambda mutation: (mutation.start, mutation.kind))


def mutated(source: str, mutation: Mutation) -> str:
    """The file with the mutation."""
    data = source.encode()
    return (data[: mutation.start] + mutation.text.encode() + data[mutation.end :]).decode()


def _nodes(node: ast.AST) -> Iterator[ast.expr | ast.stmt]:
    """The nodes below `node` that run, without asserts and `__repr__`."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Assert) or _is_for_type_checkers(child):
            continue
        if isinstance(child, ast.FunctionDef) and child.name == "__repr__":
            continue
        if isinstance(child, (ast.expr, ast.stmt)):
            yield child
        yield from _nodes(child)


def _is_for_type_checkers(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)


def _replacements(node: ast.expr | ast.stmt) -> Iterator[tuple[ast.expr | ast.stmt, str, str]]:
    """The parts of a node that may be replaced, with the kind of mutation and the new text."""
    match node:
        case ast.If(test=test) | ast.While(test=test) | ast.IfExp(test=test):
            if isinstance(test, (ast.Name, ast.Attribute, ast.Call)):
                yield test, "condition", f"(not {ast.unparse(test)})"
        case ast.UnaryOp(op=ast.Not()):
            yield node, "condition", f"({ast.unparse(node.operand)})"
        case ast.Compare(ops=[operator]) if type(operator) in _OPPOSITE:
            turned = ast.Compare(node.left, [_OPPOSITE[type(operator)]()], node.comparators)
            yield node, "comparison", f"({ast.unparse(turned)})"
        case ast.BoolOp():
            opposite = ast.Or() if isinstance(node.op, ast.And) else ast.And()
            yield node, "and/or", f"({ast.unparse(ast.BoolOp(opposite, node.values))})"
        case ast.Return(value=ast.Constant(value=bool(value))):
            yield node, "answer", f"return {not value}"
        case ast.Raise() | ast.Continue() | ast.Break() | ast.AugAssign() | ast.Delete():
            yield node, "left out", "pass"
        case ast.Assign(targets=[ast.Attribute() | ast.Subscript()]):
            yield node, "left out", "pass"
        case ast.Expr(value=ast.Call() | ast.Await() as value):
            if not _UNNOTICED.search(ast.unparse(value)):
                yield node, "left out", "pass"


def chosen(root: Path, count: int, seed: int) -> list[Mutation]:
    """So many mutations, of each package as many, in an order that mixes packages."""
    sources = root / "src" / PACKAGE
    per_package = []
    for package in PACKAGES:
        package_mutations: list[Mutation] = []
        for path in sorted((sources / package).rglob("*.py")):
            package_mutations += mutations(str(path.relative_to(root)), path.read_text())
        share = -(-count // len(PACKAGES))
        per_package.append(random.Random(f"{seed} {package}").sample(package_mutations, share))
    return [mutation for group in zip(*per_package, strict=True) for mutation in group][:count]


# ------------------------------------------------------------------------------------ the tests


class Suite:
    """The tests of a checkout, by the modules whose changes they should notice."""

    def __init__(self, root: Path) -> None:
        self.root = root
        house = House(root)
        self._module_of = {str(m.path.relative_to(root)): n for n, m in house.modules.items()}
        self._importers = house.importers
        self._imported: dict[str, set[str]] = {}
        for path in sorted((root / "tests").rglob("*.py")):
            name = str(path.relative_to(root))
            self._imported[name] = set(_imported(ast.parse(path.read_text()), house.modules))

    def stages(self, file: str) -> list[list[str]]:
        """The test files of each stage for a change of `file`."""
        module = self._module_of[file]
        near_modules = [module, *self._importers[module]]
        own_tests = self._tests(("unit", "contract"), [module])
        neighbour_tests = self._tests(("unit", "contract"), near_modules)
        package = Path(file).parts[2]
        folder = self.root / "tests/unit" / package
        package_tests = [
            str(path.relative_to(self.root)) for path in sorted(folder.rglob("test_*.py"))
        ]
        own_tests |= {name for name in package_tests if Path(file).stem in Path(name).stem}
        return [
            sorted(own_tests),
            sorted((neighbour_tests | set(package_tests)) - own_tests),
            self._local(file, module, near_modules)[:MAX_LOCAL],
        ]

    def _tests(self, tiers: Iterable[str], modules: Iterable[str]) -> set[str]:
        wanted_modules = set(modules)
        return {
            name
            for name, imported in self._imported.items()
            if Path(name).parts[1] in tiers
            and Path(name).name.startswith("test_")
            and imported & wanted_modules
        }

    def _local(self, file: str, module: str, near: Iterable[str]) -> list[str]:
        words = {Path(file).stem, Path(file).parent.name}
        beginnings = tuple(f"test_{name}" for name in LOCAL[Path(file).parts[2]])
        direct, close = self._tests(("local",), [module]), self._tests(("local",), near)
        scores = {}
        for name in self._tests(("local",), self._module_of.values()):
            stem = Path(name).stem
            score = 4 * (name in direct) + 2 * (name in close)
            score += 3 * any(word.rstrip("s") in stem for word in words)
            scores[name] = score + 2 * stem.startswith(beginnings)
        likely = [name for name, score in scores.items() if score]
        return sorted(likely, key=lambda name: (-scores[name], name))


def _imported(tree: ast.AST, known_modules: Iterable[str]) -> Iterator[str]:
    modules = set(known_modules)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            while name not in modules and "." in name:
                name = name.rpartition(".")[0]
            if name in modules:
                yield name


# -------------------------------------------------------------------------------------- a run


class Copy:
    """A copy of a checkout with an environment whose `kubetorch` it is."""

    def __init__(self, root: Path, folder: Path) -> None:
        self.root = folder / "tree"
        shutil.copytree(root, self.root, ignore=shutil.ignore_patterns(*_NOT_COPIED), symlinks=True)
        venv = folder / "venv"
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", venv], check=True)
        self._bin = venv / "bin"
        (site,) = venv.glob("lib/python*/site-packages")
        packages = sysconfig.get_path("purelib")
        (site / "copy.pth").write_text(f"{self.root / 'src'}\n{packages}\n")
        for name in ("kt", "kubetorch"):
            script = self._bin / name
            text = "import sys\nfrom kubetorch.cli.main import main\nsys.exit(main())\n"
            script.write_text(f"#!{self._bin / 'python'}\n{text}")
            script.chmod(0o755)

    def fails(self, arguments: Iterable[str], limit: float) -> list[str] | None:
        """The tests that fail first; `["…"]` when they hang; `None` when all pass."""
        command = [self._bin / "python", "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider"]
        environ = {k: v for k, v in os.environ.items() if not k.startswith(("KT_", "KUBE"))}
        environ["PATH"] = f"{self._bin}{os.pathsep}{environ['PATH']}"
        environ.pop("PYTHONPATH", None)
        environ.pop("PYTHONDONTWRITEBYTECODE", None)
        process = subprocess.Popen(
            [*command, *arguments],
            cwd=self.root,
            env=environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        try:
            output, _ = process.communicate(timeout=limit)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)
            process.communicate()
            return ["hangs"]
        if process.returncode in (0, 5):
            return None
        failed = re.findall(r"^(?:FAILED|ERROR) (\S+?\.py(?:::.*?)?)(?: - .*)?$", output, re.M)
        return failed or [f"exit {process.returncode}"]

    def noticed(self, mutation: Mutation, stages: Iterable[list[str]]) -> str:
        """The test that fails because of a mutation; empty when none does."""
        path = self.root / mutation.file
        source = path.read_text()
        try:
            for limit, tests in zip(LIMITS, stages, strict=True):
                path.write_text(mutated(source, mutation))
                is_local = any(name.startswith("tests/local/") for name in tests)
                options = ["-n", "3", "--dist", "loadfile"] if is_local else ["-n", "0"]
                failed = self.fails([*options, *tests], limit) if tests else None
                path.write_text(source)
                # A test may fail without the mutation on a busy machine.
                if failed and not self._fails_anyway(failed, limit):
                    return failed[0]
        finally:
            path.write_text(source)
        return ""

    def _fails_anyway(self, failed: list[str], limit: float) -> bool:
        tests = [name for name in failed if name.startswith("tests/local/")]
        return bool(tests) and self.fails(["-n", "0", *tests], limit) is not None


def run(root: Path, tried_mutations: Iterable[Mutation], results: Path) -> None:
    """Try each mutation whose result is not known."""
    known_keys = {result["key"] for result in read(results)}
    with tempfile.TemporaryDirectory(prefix="kt-mutations-", dir="/tmp") as folder:
        copy, suite = Copy(root, Path(folder)), Suite(root)
        for mutation in tried_mutations:
            if mutation.key not in known_keys:
                failed_test = copy.noticed(mutation, suite.stages(mutation.file))
                with results.open("a") as file:
                    file.write(
                        json.dumps({"key": mutation.key, "by": failed_test, **asdict(mutation)})
                        + "\n"
                    )


def read(results: Path) -> list[dict[str, str]]:
    """The results so far."""
    text = results.read_text() if results.exists() else ""
    return [json.loads(line) for line in text.splitlines()]


def table(root: Path, results: list[dict[str, str]]) -> str:
    """The share that was noticed, per package, and the survivors."""
    lines = ["| package | mutations | noticed |", "|---|--:|--:|"]
    for package in (*PACKAGES, ""):
        package_results = [
            result for result in results if result["file"].startswith(f"src/{PACKAGE}/{package}")
        ]
        if package_results:
            share = sum(1 for result in package_results if result["by"]) / len(package_results)
            lines.append(f"| {package or 'all'} | {len(package_results)} | {share:.1%} |")
    lines += ["", "Survivors:"]
    for result in results:
        if not result["by"]:
            data = (root / result["file"]).read_bytes()[int(result["start"]) : int(result["end"])]
            before = " ".join(data.decode(errors="replace").split())
            position = f"{result['file']}:{result['line']}"
            lines.append(f"  {position}: {result['kind']}: {before} → {result['text']}")
    return "\n".join(lines)


def main() -> None:
    """Run what is left to run, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("root", nargs="?", type=Path, default=Path(__file__).parents[1])
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=13)
    parser.add_argument("--results", type=Path, required=True, help="file that keeps the results")
    parser.add_argument("--show", action="store_true", help="run nothing")
    options = parser.parse_args()
    root = options.root.resolve()
    if not options.show:
        run(root, chosen(root, options.count, options.seed), options.results)
    sys.stdout.write(table(root, read(options.results)) + "\n")


if __name__ == "__main__":
    main()
