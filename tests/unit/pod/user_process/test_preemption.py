"""What user code wants to be done before its pod ends."""

from __future__ import annotations

import threading
from types import SimpleNamespace

from kubetorch.pod.user_process.current_call import Callbacks, current


def ran(callbacks: Callbacks) -> None:
    ended = threading.Event()
    callbacks.run(ended.set)
    assert ended.wait(60)


def test_callbacks_run_once_each_in_the_order_of_their_registration():
    calls: list[int] = []
    callbacks = Callbacks()
    for callback in (first := lambda: calls.append(1), lambda: calls.append(2), first):
        callbacks.add(callback)
    ran(callbacks)
    assert calls == [1, 2]


def test_a_method_is_one_callback_however_often_it_is_looked_up():
    saves: list[int] = []
    callbacks = Callbacks()

    class Checkpoint:
        def save(self):
            saves.append(1)

        def __eq__(self, compared: object) -> bool:
            raise RuntimeError("the truth of an array is ambiguous")

        __hash__ = object.__hash__
        __call__ = save

    first, second = Checkpoint(), Checkpoint()
    for callback in (first.save, first.save, second.save, first, second, first):
        callbacks.add(callback)
    ran(callbacks)
    assert len(saves) == 4


def test_a_callback_runs_in_the_call_that_registered_it_and_is_forgotten_with_it():
    call_numbers: list[int] = []
    callbacks = Callbacks()
    token = current.set(SimpleNamespace(number=7))  # type: ignore[arg-type]
    callbacks.add(lambda: call_numbers.append(current.get().number))  # type: ignore[union-attr]
    current.reset(token)
    ran(callbacks)
    callbacks.forget(7)
    callbacks.forget(8)
    ran(callbacks)
    assert call_numbers == [7]


def test_one_that_fails_does_not_keep_others_from_running(capsys):
    runs: list[int] = []
    callbacks = Callbacks()
    callbacks.add(lambda: 1 / 0)
    callbacks.add(lambda: runs.append(1))
    ran(callbacks)
    assert runs == [1]
    assert "ZeroDivisionError" in capsys.readouterr().err
