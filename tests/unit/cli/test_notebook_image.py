"""The image and the files of `kt notebook`: what a pod lacks is brought there."""

from pathlib import Path

import pytest

from kubetorch.cli import notebook
from kubetorch.cli.output import Output


@pytest.mark.parametrize(
    ("reference", "is_local", "steps"), [(None, False, 1), (None, True, 0), ("own", False, 0)]
)
def test_pods_of_a_cluster_install_jupyterlab_though_this_environment_has_it(
    reference, is_local, steps
):
    image = notebook._image(reference, is_local=is_local)
    assert len(image.to_spec().steps) == steps


def test_pods_of_a_cluster_get_a_folder_without_a_project_but_not_the_home_folder(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.setenv("HOME", str(tmp_path))
    inner = tmp_path / "inner"
    inner.mkdir()

    assert notebook._files(inner, Output(), is_local=False) == inner
    assert capsys.readouterr().err == ""
    for folder in (tmp_path, Path("/")):
        assert notebook._files(folder, Output(), is_local=False) is False
        assert f"the files of {folder} are not sent" in capsys.readouterr().err

    (inner / "pyproject.toml").touch()
    assert notebook._files(inner, Output(), is_local=False) is None
