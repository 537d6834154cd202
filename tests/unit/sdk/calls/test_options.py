"""Options of calls, and which keywords of a call are whose."""

from __future__ import annotations

import functools
import json
import math
import pickle
from dataclasses import replace
from typing import Any

import pytest

from kubetorch.errors import SpecError
from kubetorch.sdk.calls.options import CallOptions, declared_parameters
from kubetorch.sdk.debugger.breakpoints import DebugConfig


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("timeout", 0),
        ("timeout", -1),
        ("timeout", math.nan),
        ("timeout", math.inf),
        ("timeout", "5"),
        ("timeout", True),
        ("retries", -1),
        ("retries", 1.5),
        ("retries", True),
        ("backoff", -1),
        ("max_backoff", math.nan),
        ("serialization", "yaml"),
        ("serialization", 3),
        ("stream_logs", "yes"),
        ("async_", 1),
        ("idempotency_key", ""),
        ("idempotency_key", 3),
        ("request_id", ""),
        ("on_progress", "print"),
    ],
)
def test_an_impossible_value_is_refused_by_name(name: str, value: object) -> None:
    with pytest.raises(SpecError, match=f"^{name} is "):
        CallOptions().with_changes({name: value})


def test_a_timeout_that_is_too_long_is_told_how_long_it_may_be() -> None:
    with pytest.raises(SpecError, match="above 0, and at most 100000000"):
        CallOptions(timeout=10**9)


def test_possible_values_are_taken() -> None:
    changes: dict[str, Any] = {
        "timeout": 0.5,
        "retries": 3,
        "serialization": "pickle",
        "stream_logs": False,
        "async_": True,
        "idempotency_key": "k",
        "request_id": "r",
        "on_progress": print,
    }
    options = CallOptions().with_changes(changes)
    assert {name: getattr(options, name) for name in changes} == changes


def test_an_unknown_option_names_the_nearest() -> None:
    with pytest.raises(TypeError, match=r"no call option 'time_out'\nhint: did you mean timeout\?"):
        CallOptions().with_changes({"time_out": 3})
    with pytest.raises(TypeError, match="the options are async_, backoff, debug, idempotency_key"):
        CallOptions().with_changes({"zzz": 3})


def test_bare_keywords_are_options_and_the_rest_is_the_users() -> None:
    keywords = {"stream_logs": False, "serialization": "none", "async_": True, "timeout": 3, "x": 1}
    options, user_keywords = CallOptions().take_from(keywords, frozenset())
    assert user_keywords == {"timeout": 3, "x": 1}
    assert (options.stream_logs, options.serialization, options.async_) == (False, "none", True)
    assert options.timeout is None


def test_a_keyword_that_the_user_declares_is_the_users() -> None:
    options, user_keywords = CallOptions().take_from(
        {"serialization": 3, "workers": [1]}, frozenset({"serialization", "workers"})
    )
    assert user_keywords == {"serialization": 3, "workers": [1]}
    assert options == CallOptions()


def test_debug_is_true_or_settings() -> None:
    config = DebugConfig(port=6000)
    assert CallOptions().take_from({"debug": True}, frozenset())[0].debug == DebugConfig()
    assert CallOptions(debug=config).debug == config
    assert CallOptions().with_changes({"debug": config, "post_mortem": True}).post_mortem is True
    for wrong in ("x", 1, {"mode": "pdb"}):
        with pytest.raises(ValueError, match=r"it must be True, False or a kt\.DebugConfig"):
            CallOptions().take_from({"debug": wrong}, frozenset())
    with pytest.raises(SpecError, match="post_mortem is 'yes'"):
        CallOptions(post_mortem="yes")  # type: ignore[arg-type]  # wrong on purpose


def test_pdb_is_an_earlier_name_of_debug() -> None:
    for value, config in ((True, DebugConfig()), (6001, DebugConfig(port=6001))):
        with pytest.warns(DeprecationWarning, match="earlier name of debug="):
            assert CallOptions().take_from({"pdb": value}, frozenset())[0].debug == config
    both = CallOptions().with_changes({"pdb": 6001, "debug": DebugConfig(port=6002)})
    assert both.debug == DebugConfig(port=6002)


@pytest.mark.parametrize("name", ["debug", "pdb"])
@pytest.mark.parametrize("off", [None, False])
def test_debuggers_that_are_off_ask_for_nothing(name: str, off: bool | None) -> None:
    assert CallOptions().take_from({name: off, "x": 1}, frozenset()) == (CallOptions(), {"x": 1})
    user_keywords = CallOptions().take_from({name: off}, frozenset({name}))[1]
    assert user_keywords == {name: off}
    assert CallOptions().with_changes({name: off, "retries": 1}) == CallOptions(retries=1)


@pytest.mark.parametrize("workers", ["any", "10.0", [0], ["1", "10.0.0.7"], (0, 1), range(2)])
def test_ranks_nodes_are_named_by_numbers_and_text(workers: object) -> None:
    options, user_keywords = CallOptions().take_from(
        {"workers": workers, "restart_procs": True}, frozenset()
    )
    assert user_keywords == {}
    assert options.restart_procs is True
    assert options.wire_workers == (workers if isinstance(workers, str) else tuple(workers))


@pytest.mark.parametrize("workers", [2.5, 0, -1, "", [], [-1], [2.5], [True], True, [None], {}])
def test_ranks_nodes_that_cannot_be_are_refused(workers: object) -> None:
    with pytest.raises(SpecError, match="Invalid worker specification"):
        CallOptions().with_changes({"workers": workers}).check_ranks("f", is_distributed=True)


@pytest.mark.parametrize(
    "changes", [{"workers": "ready"}, {"workers": [0]}, {"restart_procs": True}]
)
def test_ranks_options_of_a_service_that_is_not_distributed_are_refused(
    changes: dict[str, object],
) -> None:
    CallOptions(restart_procs=False).check_ranks("train", is_distributed=False)
    CallOptions(workers="any").check_ranks("train", is_distributed=False)
    with pytest.raises(SpecError, match="belongs to distributed services, and train is none"):
        CallOptions().with_changes(changes).check_ranks("train", is_distributed=False)


def test_the_callers_keywords_are_not_changed() -> None:
    keywords = {"stream_logs": True, "x": 1}
    CallOptions().take_from(keywords, frozenset())
    assert keywords == {"stream_logs": True, "x": 1}


def test_declared_parameters_are_read_off_functions_methods_and_wrappers() -> None:
    def plain(workers: int, *, async_: bool, batch_size: int) -> None:
        serialization = batch_size  # noqa: F841  # a local, no parameter

    @functools.wraps(plain)
    def wrapped(*args: object, **kwargs: object) -> None: ...

    class Owner:
        def method(self, debug: bool) -> None: ...

    assert declared_parameters(plain) == {"workers", "async_"}
    assert declared_parameters(wrapped) == {"workers", "async_"}
    assert declared_parameters(Owner().method) == {"debug"}
    assert declared_parameters(len) == frozenset()


@pytest.mark.parametrize("value", [3, (), "ConnectionError", int, [ValueError("x")], "a..b"])
def test_what_is_no_class_of_exceptions_cannot_be_retried_on(value: object) -> None:
    with pytest.raises(SpecError, match=r"^retry_on "):
        CallOptions(retry_on=value)


def test_errors_to_retry_on_are_kept_by_name() -> None:
    named = (OSError, "torch.cuda.OutOfMemoryError", json.JSONDecodeError)
    options = CallOptions(retry_on=named)
    assert options.retry_names == (
        *("builtins.OSError", "torch.cuda.OutOfMemoryError", "json.decoder.JSONDecodeError"),
    )
    assert pickle.loads(pickle.dumps(options)) == options
    assert replace(options, retries=1).retry_names == options.retry_names


def test_nodes_of_a_service_without_ranks_are_refused_without_a_look_at_them() -> None:
    class Nodes(list[int]):
        def __eq__(self, other: object) -> bool:
            raise RuntimeError("the truth of an array is ambiguous")

        __hash__ = None  # type: ignore[assignment]  # as of lists

    with pytest.raises(SpecError, match="belongs to distributed services"):
        CallOptions(workers=Nodes([0])).check_ranks("f", is_distributed=False)


def test_an_object_that_answers_to_every_name_declares_nothing() -> None:
    class Echo:
        def __getattr__(self, name: str) -> Echo:
            return self

    assert declared_parameters(Echo()) == frozenset()
