"""What imports load: `import kubetorch` stands in every user module, and so in every worker.

These are not timings. What the lists name costs more to import than a start of Python does.
"""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

ROOT = Path(__file__).parents[2]

SERVERS = {"uvloop", "httptools"}
#: What deploys and calls need, but declaring does not.
VERBS = {
    "asyncio",
    "blake3",
    "concurrent.futures",
    "http.client",
    "msgspec",
    "multiprocessing",
    "pathspec",
    "socket",
    "sqlite3",
    "ssl",
    "subprocess",
    "yaml",
    "zstandard",
}
TERMINAL = {"rich", "typer", "click"}


def _loaded_by(code: str, *, installed: bool = True) -> set[str]:
    """The modules that an interpreter has after `code`, above a bare one.

    Args:
        code: Statements.
        installed: Whether it finds installed distributions; the standard library alone if not.
    """
    paths = [str(ROOT / "src"), *([sysconfig.get_path("purelib")] if installed else [])]
    program = f"import sys; bare = set(sys.modules)\n{code}\nprint(*sys.modules.keys() - bare)"
    completed = subprocess.run(
        [sys.executable, "-S", "-c", program],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert completed.returncode == 0, completed.stderr
    return set(completed.stdout.split())


def test_importing_kubetorch_loads_nothing_but_its_version() -> None:
    assert _loaded_by("import kubetorch") == {"kubetorch", "kubetorch._version"}


def test_declaring_a_function_loads_nothing_that_only_verbs_need() -> None:
    declaration = "import kubetorch as kt\nf = kt.fn(len, name='f')\nc = kt.Compute(cpus='0.1')"
    assert _loaded_by(declaration) & (VERBS | SERVERS | TERMINAL) == set()


def test_a_program_that_calls_loads_neither_servers_nor_a_terminal_library() -> None:
    loaded = _loaded_by("import kubetorch.sdk.fn, kubetorch.sdk.backend, kubetorch.local.lifetime")
    assert loaded & (SERVERS | TERMINAL | {"sqlite3", "yaml"}) == set()


def test_a_deploy_loads_no_event_loop() -> None:
    loaded = _loaded_by(
        "import kubetorch as kt\nkt.fn, kt.Compute\n"
        "import kubetorch.sdk.deploys.deploy, kubetorch.sdk.controller, kubetorch.lib.http_client"
    )
    assert "asyncio" not in loaded


def test_the_help_of_the_cli_loads_no_server_and_no_wire() -> None:
    program = (
        "import contextlib, io, sys; sys.argv = ['kt', '--help']\n"
        "from kubetorch.cli.main import main\n"
        "with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit): main()"
    )
    assert _loaded_by(program) & (SERVERS | {"asyncio", "msgspec", "http.client"}) == set()


def test_only_a_terminal_has_rich_imported() -> None:
    table = "from kubetorch.cli.output import Output\nOutput().table([{'A': '1'}])"
    program = "import contextlib, io, sys\nwith contextlib.redirect_stdout({}): \n    {}"
    piped, terminal = (
        _loaded_by(program.format(stream, table.replace("\n", "; ")))
        for stream in ("io.StringIO()", "type('', (io.StringIO,), {'isatty': lambda _: True})()")
    )
    assert "rich" not in piped
    assert "rich" in terminal


def test_a_worker_runs_without_any_installed_distribution() -> None:
    worker = ROOT / "src" / "kubetorch" / "pod" / "user_process"
    names = sorted(f"kubetorch.pod.user_process.{path.stem}" for path in worker.glob("[!_]*.py"))
    assert names, "nothing to check"
    _loaded_by("\n".join(f"import {name}" for name in names), installed=False)
