"""Why a worker ended, in words and as a type."""

from __future__ import annotations

import signal

import pytest

from kubetorch.errors import OutOfMemoryError, WorkerDiedError
from kubetorch.pod.worker_process import worker


class Kills:
    """A counter of the kernel's that has risen, or has not."""

    def __init__(self, *, risen: bool, limit: int | None = 300) -> None:
        self._risen = risen
        self.limit, self.peak = limit, 299

    def has_risen(self) -> bool:
        return self._risen


@pytest.mark.parametrize(
    ("status", "words"),
    [
        (0, "ended with exit code 0"),
        (3, "ended with exit code 3"),
        (-11, "was killed by SIGSEGV"),
        (-60, "was killed by signal 60"),
        (None, "ended"),
    ],
)
def test_a_status_is_said_in_words(status: int | None, words: str) -> None:
    assert worker.describe_exit(status) == words


def test_only_a_kill_with_a_risen_counter_is_out_of_memory() -> None:
    def kind(status: int, *, risen: bool) -> type[WorkerDiedError]:
        return type(
            worker.death_error(status, pod_name="pod-0", service="shop", kills=Kills(risen=risen))
        )

    assert kind(-signal.SIGKILL, risen=True) is OutOfMemoryError
    assert kind(-signal.SIGKILL, risen=False) is WorkerDiedError
    assert kind(-signal.SIGSEGV, risen=True) is WorkerDiedError
    assert kind(137, risen=True) is WorkerDiedError


def test_a_lack_of_memory_names_the_limit_if_there_is_one() -> None:
    def error(limit: int | None) -> WorkerDiedError:
        kills = Kills(risen=True, limit=limit)
        return worker.death_error(-signal.SIGKILL, pod_name="pod-0", service="shop", kills=kills)

    limited = error(300 * 1024 * 1024)
    assert limited.message.endswith("its pod may use 300Mi")
    assert "resources.limits.memory" in str(limited.hint)
    assert "its machine had no more" in str(error(None).hint)


def test_the_error_names_pod_and_code() -> None:
    error = worker.death_error(
        3, pod_name="pod-0", service="shop", kills=Kills(risen=False), doing=" while it slept"
    )
    assert error.message == "the worker of shop in pod-0 ended with exit code 3 while it slept"
    assert (error.pod_name, error.exit_code) == ("pod-0", 3)
