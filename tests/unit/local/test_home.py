"""The folder of a local service is the user's alone."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from kubetorch.errors import ConfigError
from kubetorch.lib import processes
from kubetorch.local.home import Home, Running
from kubetorch.local.tuning import LIMITS


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.fixture
def home(tmp_path: Path) -> Home:
    service_home = Home(tmp_path / "parent" / "home")
    service_home.create()
    return service_home


def test_it_is_made_for_the_user_alone(home: Home) -> None:
    assert mode(home.path) == 0o700
    home.secret_bytes(home.token)
    assert mode(home.token) == 0o600


def test_a_secret_is_made_once_and_read_again(home: Home) -> None:
    first = home.secret_bytes(home.token)
    assert len(first) == 64
    assert home.secret_bytes(home.token) == first
    assert home.read_token() == first.decode()


def test_a_folder_that_others_can_use_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    with pytest.raises(ConfigError, match="can be used by others") as caught:
        Home(tmp_path).create()
    assert f"chmod 700 {tmp_path}" in str(caught.value)
    assert mode(tmp_path) == 0o755, "a folder that is not ours alone is not changed either"


def test_a_token_that_others_can_read_is_refused(home: Home) -> None:
    home.secret_bytes(home.token)
    home.token.chmod(0o640)
    for look in (home.read_token, home.check):
        with pytest.raises(ConfigError, match="can be used by others") as caught:
            look()
        assert f"chmod 600 {home.token}" in str(caught.value)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_a_folder_of_another_user_is_refused(home: Home) -> None:
    os.chown(home.path, 12345, -1)
    with pytest.raises(ConfigError, match="belongs to user 12345"):
        home.create()


def test_a_folder_that_cannot_be_made_names_the_way_out(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="KT_LOCAL_DIR"):
        Home(tmp_path / "file" / "home").create()


def test_a_service_is_running_while_its_process_lives(home: Home) -> None:
    this_process = Running(
        os.getpid(), processes.start_time(os.getpid()) or "", 1.0, "http://h:1", "0"
    )
    home.write_running(this_process)
    assert home.running() == this_process
    assert home.controller_url.read_text() == "http://h:1"


def test_another_process_with_its_id_is_not_the_service(home: Home) -> None:
    home.write_running(Running(os.getpid(), "another time", 1.0, "http://h:1", "0"))
    assert home.running() is None


@pytest.mark.parametrize("text", ["", "no json", "[]", '{"pid": 1}'])
def test_a_damaged_service_file_is_no_service(home: Home, text: str) -> None:
    home.service.write_text(text)
    assert home.running() is None


def test_a_long_log_is_begun_anew(home: Home) -> None:
    home.log.write_bytes(b"x" * (LIMITS.service_log_bytes + 1))
    home.rotate_log()
    assert not home.log.exists()
    assert home.log.with_suffix(".log.1").stat().st_size == LIMITS.service_log_bytes + 1
