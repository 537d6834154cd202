import pytest

from kubetorch.pod.apps import process
from kubetorch.pod.apps.process import AppExit, AppExitFile


@pytest.mark.parametrize(("status", "code"), [(0, 0), (3, 3), (-9, 137), (-15, 143), (None, 128)])
def test_exit_codes_are_counted_as_shells_do(status, code):
    assert process.exit_code(status) == code


def test_an_end_is_remembered_for_its_generation_alone(tmp_path):
    memory = AppExitFile(tmp_path / "app.json")
    assert memory.find(1) is None
    ended = AppExit(1, 3, 10.0, 20.0)
    memory.write(ended)

    assert AppExitFile(tmp_path / "app.json").find(1) == ended
    assert memory.find(2) is None
    assert ended.view.state == "exited"
    assert ended.view.exit_code == 3


def test_a_spoiled_record_is_none(tmp_path):
    (tmp_path / "app.json").write_text("{")
    assert AppExitFile(tmp_path / "app.json").find(1) is None
