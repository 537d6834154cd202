"""What of a program's environment reaches the local service."""

from __future__ import annotations

from pathlib import Path

import pytest

from kubetorch.errors import ConfigError
from kubetorch.local import lifetime, process
from kubetorch.wire import podenv

HOME = Path("/home/me/.kt/local")


def test_what_belongs_to_the_machine_and_the_user_is_kept() -> None:
    environ = {"PATH": "/bin", "HOME": "/home/me", "LC_ALL": "C", "CUDA_VISIBLE_DEVICES": "0"}
    assert lifetime.service_environment(environ, HOME) == environ | {"KT_LOCAL_DIR": str(HOME)}


def test_what_belongs_to_the_program_is_not() -> None:
    environ = {"HF_TOKEN": "secret", "KT_POD_NAME": "p", podenv.MARK: "m", "KT_NAMESPACE": "n"}
    assert lifetime.service_environment(environ, HOME) == {"KT_LOCAL_DIR": str(HOME)}


def test_idle_time_is_a_setting_of_the_service() -> None:
    assert process.idle_seconds({}, 60.0) == 60.0
    assert process.idle_seconds({"KT_LOCAL_IDLE": "1.5"}, 60.0) == 1.5
    assert lifetime.service_environment({"KT_LOCAL_IDLE": "5"}, HOME)["KT_LOCAL_IDLE"] == "5"


@pytest.mark.parametrize("text", ["soon", "0", "-1", "nan", "inf"])
def test_an_impossible_idle_time_is_refused_by_whoever_starts_the_service(text: str) -> None:
    with pytest.raises(ConfigError, match="KT_LOCAL_IDLE"):
        lifetime.service_environment({"KT_LOCAL_IDLE": text}, HOME)


def test_a_spare_agent_has_the_mark_that_a_pod_has() -> None:
    assert process._MARK_VARIABLE == podenv.MARK
