from __future__ import annotations

import pytest

from benchmarks import processes, venvs


def test_what_configures_kubetorch_for_the_developer_reaches_no_measurement(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("KT_CACHE_DIR", "/home/me/cache")
    monkeypatch.setenv("LANG", "C.UTF-8")
    env = processes.environment({"KT_LOCAL_DIR": "/tmp/home"})
    assert {name for name in env if name.startswith("KT_")} == {"KT_LOCAL_DIR"}
    assert env["LANG"] == "C.UTF-8"


def test_the_reason_is_what_pip_says_is_wrong_and_not_what_it_advertises() -> None:
    printed = (
        "WARNING: Retrying\n"
        "ERROR: Could not find a version that satisfies the requirement ray\n"
        "ERROR: No matching distribution found for ray\n"
        "\n"
        "[notice] A new release of pip is available: 23.0 -> 25.0\n"
    )
    assert venvs.reason(printed) == "ERROR: No matching distribution found for ray"
    assert venvs.reason("Killed\n") == "Killed"
    assert venvs.reason("")
