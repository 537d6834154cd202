"""The peers: a Ray actor, and the pod server of the earlier release on PyPI."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks import processes
from benchmarks.venvs import Environment

RAY = "Ray actor"
EARLIER = "kubetorch 0.5.0"

_NUMPY = "numpy>=1.26"
_RAY = Environment("ray", ("ray==2.60.0", _NUMPY))
_EARLIER = Environment("kubetorch", ("kubetorch[client,server]==0.5.0", _NUMPY))


@contextmanager
def ray(program: str = "ray_calls") -> Iterator[processes.Program]:
    """A driver of Ray; raises `UnavailableError` where Ray cannot be installed."""
    # Ray watches every process on the machine for its memory; that is no part of a call.
    env = {"RAY_DISABLE_IMPORT_WARNING": "1", "RAY_memory_monitor_refresh_ms": "0"}
    with processes.program(program, python=_RAY.python(), env=env) as driver:
        yield driver


def earlier_python() -> Path:
    """An interpreter that has the earlier release; raises `UnavailableError`."""
    return _EARLIER.python()


@contextmanager
def earlier_server(project: Path, function: str) -> Iterator[int]:
    """The pod server of the earlier release, with `function` of `service.py` in `project`.

    Its log streaming and metrics are off: it has nowhere to send them here, and would be slower.

    Yields:
        Its port.
    """
    env = {
        "POD_NAME": "pod",
        "POD_NAMESPACE": "default",
        "POD_IP": "127.0.0.1",
        "LOCAL_IPS": "127.0.0.1",
        "KT_ALLOWED_SERIALIZATION": "json,pickle",
        "KT_CALLABLE_TYPE": "fn",
        "KT_CLS_OR_FN_NAME": function,
        "KT_DISTRIBUTED_CONFIG": "null",
        "KT_FILE_PATH": str(project),
        "KT_INIT_ARGS": "null",
        "KT_LOG_STREAMING_ENABLED": "False",
        "KT_METRICS_ENABLED": "False",
        "KT_MODULE_NAME": "service",
        "KT_PROJECT_ROOT": str(project),
        "KT_SERVICE_NAME": "service",
    }
    app = "kubetorch.serving.http_server:app"
    command = [str(earlier_python()), "-m", "uvicorn", app, "--fd", "{fd}"]
    options = ["--log-level", "warning", *processes.KEEP_ALIVE]
    with processes.server([*command, *options], env=env) as port:
        yield port
