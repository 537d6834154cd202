"""A limit of a manifest is kept: whoever uses more is ended, and told so."""

import pytest

import kubetorch as kt
from kubetorch.errors import OutOfMemoryError
from tests.local.user_project import UserProject

SOURCE = """
import os, subprocess, sys, time

def fill(mebibytes, seconds=0):
    data = bytearray(mebibytes * 1024 * 1024)
    for i in range(0, len(data), 4096):
        data[i] = 1
    time.sleep(seconds)
    return os.getpid()

def fill_in_a_child(mebibytes):
    code = f"import time; data = b'x' * ({mebibytes} * 1024 * 1024); time.sleep(60)"
    return subprocess.run([sys.executable, "-c", code]).returncode
"""
LIMIT = {
    "spec": {
        "template": {
            "spec": {
                "containers": [{"name": "kubetorch", "resources": {"limits": {"memory": "256Mi"}}}]
            }
        }
    }
}


@pytest.fixture(scope="module", autouse=True)
def service(shared_service_home):
    return shared_service_home


@pytest.fixture(scope="module")
def jobs(service, tmp_path_factory):
    project = UserProject(tmp_path_factory.mktemp("limits") / "shop")
    yield project.module(SOURCE)
    project.forget()


@pytest.mark.parametrize(("name", "arguments"), [("fill", [600, 60]), ("fill_in_a_child", [600])])
def test_a_worker_that_exceeds_the_limit_is_ended_and_replaced(jobs, name, arguments):
    remote = kt.fn(getattr(jobs, name)).to(kt.Compute(cpus="0.1", service_template=LIMIT))
    try:
        with pytest.raises(OutOfMemoryError, match="its limit is 256Mi") as caught:
            remote(*arguments)
        error = caught.value
        assert error.limit_bytes == 256 * 2**20
        assert error.used_bytes > error.limit_bytes
        assert error.pod_name == remote.service_config["pods"][0]["name"]
        if name == "fill":
            assert remote(20) != 0  # a new worker serves
    finally:
        remote.teardown()


def test_a_worker_within_the_limit_goes_on(jobs):
    remote = kt.fn(jobs.fill, name="within").to(kt.Compute(cpus="0.1", service_template=LIMIT))
    try:
        assert remote(60, 1.0) == remote(60)
    finally:
        remote.teardown()


def test_what_is_requested_limits_nothing(jobs):
    remote = kt.fn(jobs.fill, name="requested").to(kt.Compute(cpus="0.1", memory="64Mi"))
    try:
        assert remote(200, 0.5)
    finally:
        remote.teardown()
