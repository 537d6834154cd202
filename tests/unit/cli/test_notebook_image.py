"""The image of `kt notebook`: what a pod lacks is installed there, whatever is installed here."""

import pytest

from kubetorch.cli import notebook


@pytest.mark.parametrize(
    ("reference", "is_local", "steps"), [(None, False, 1), (None, True, 0), ("own", False, 0)]
)
def test_pods_of_a_cluster_install_jupyterlab_though_this_environment_has_it(
    reference, is_local, steps
):
    image = notebook._image(reference, is_local=is_local)
    assert len(image.to_spec().steps) == steps
