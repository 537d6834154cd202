"""Two users, two projects, one cluster: whose code answers, whose pods deploy, whose is deleted.

`-s` shows what each of them types, and reads.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml

from cluster.conftest import Installed, Kubectl

PROGRAM = """
import os, subprocess, sys
import kubetorch as kt

def train(x):
    return f"PROJECT {x}"

def embed(x):
    return os.environ["KT_SERVICE_NAME"]

def outer(x):
    return kt.fn(embed).to(kt.Compute(cpus="10m"))(x)

def deploy(function=train, **given):
    return kt.fn(function).to(kt.Compute(cpus="10m"), **given)

def loop(meanwhile):
    remote = deploy()
    print(remote(1))
    subprocess.run(meanwhile, shell=True, check=True)
    print(remote(2), remote(3))

if __name__ == "__main__":
    print(eval(sys.argv[1]))
"""


class User:
    """Somebody with a service account, a project, and a terminal."""

    def __init__(self, name: str, folder: Path, environ: dict[str, str]) -> None:
        self.name = name
        self.folder = folder
        self.environ = environ
        folder.mkdir()
        (folder / "pyproject.toml").touch()
        (folder / "train.py").write_text(PROGRAM.replace("PROJECT", folder.name))

    def types(self, *command: str, status: int = 0, **variables: str) -> str:
        """Run a command; all that it prints."""
        shown = " ".join([*(f"{k}={v}" for k, v in variables.items()), *command])
        program = {"python": [sys.executable], "kt": [sys.executable, "-m", "kubetorch"]}
        first, *rest = command
        completed = subprocess.run(
            [*program[first], *rest],
            cwd=self.folder,
            env={**os.environ, **self.environ, **variables},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=150,
        )
        print(f"\n{self.name}:~/{self.folder.name}$ {shown}\n{completed.stdout.rstrip()}")
        assert completed.returncode == status, completed.stdout
        return completed.stdout

    def runs(self, expression: str, status: int = 0, **variables: str) -> str:
        return self.types("python", "train.py", expression, status=status, **variables)


@pytest.fixture
def person(
    kubectl: Kubectl, installed: Installed, tmp_path: Path
) -> Iterator[Callable[[str, str], User]]:
    """Somebody who may deploy in the namespace, like everybody else there."""
    bindings: list[str] = []

    def make(name: str, project: str) -> User:
        namespace, account = installed.namespace, f"{installed.namespace}:{name}"
        kubectl("create", "serviceaccount", name, "-n", namespace)
        role = ("--clusterrole", "kubetorch-edit", "--serviceaccount", account)
        kubectl("create", "rolebinding", name, "-n", namespace, *role)
        # The way to the controller: `rbac.reachGroups` of the chart gives it to groups.
        bindings.append(f"{namespace}-{name}")
        kubectl("create", "rolebinding", bindings[-1], "-n", "kubetorch", *role)
        config = yaml.safe_load(Path(os.environ["KUBECONFIG"]).read_text())
        config["users"][0]["user"] = {
            "token": kubectl("create", "token", name, "-n", namespace).strip()
        }
        file = tmp_path / f"{name}.yaml"
        file.write_text(yaml.safe_dump(config))
        environ = {**installed.environ, "KUBECONFIG": str(file), "KT_REPLACE": "0"}
        return User(name, tmp_path / project, environ)

    yield make
    for binding in bindings:
        kubectl("delete", "rolebinding", binding, "-n", "kubetorch")


@pytest.mark.timeout(300)
def test_two_users_and_two_projects_share_a_cluster(
    person: Callable[[str, str], User], installed: Installed
) -> None:
    ann, bob = person("ann", "shop"), person("bob", "lab")
    namespace = installed.namespace

    # 1. Neither has a user name, which is the default, and both have a function `train`.
    assert "shop 1" in ann.runs("deploy()(1)")
    refused = bob.runs("deploy()(1)", status=1)
    assert f"belongs to user system:serviceaccount:{namespace}:ann" in refused
    assert f"this deploy is by user system:serviceaccount:{namespace}:bob" in refused
    assert "lab 1" in bob.runs("deploy()(1)", KT_USERNAME="bob")
    call_output = bob.runs("kt.fn(train)(2)")
    assert (
        f"is a service of system:serviceaccount:{namespace}:ann, and runs train.py" in call_output
    )
    assert "shop 2" in call_output
    (ann.folder / "other.py").write_text((ann.folder / "train.py").read_text())
    moved = ann.types("python", "other.py", "deploy()(1)", status=1)
    assert (
        "runs train.py:train of project" in moved
        and "this deploy would run other.py:train" in moved
    )

    # In the middle of a loop of Ann's, Bob takes the service; Ann is told, once.
    variables = {"BOBS": str(bob.folder), "KUBECONFIG_OF_BOB": bob.environ["KUBECONFIG"]}
    bobs = "cd $BOBS && KUBECONFIG=$KUBECONFIG_OF_BOB python train.py 'deploy(replace=True)(0)'"
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    loop_output = ann.runs(f"loop({bobs!r})", **variables, PATH=path)
    assert "ran train.py:train of project" in loop_output and "lab 2 lab 3" in loop_output
    assert loop_output.count("kubetorch: train now runs train.py:train of project") == 1
    # It is Bob's now.
    assert "lab 4" in bob.runs("deploy()(4)")
    assert "ServiceTakenError" in ann.runs("deploy()(1)", status=1)

    # 2. What a pod deploys is its deployer's, also where nobody has a user name.
    assert "ann-embed" in ann.runs("deploy(outer)(1)", KT_USERNAME="ann")
    assert "embed" in bob.runs("deploy(outer)(1)")
    listed = ann.types("kt", "list", "--json")
    creators = {
        service["name"]: service["creator"]
        for service in yaml.safe_load(listed[listed.index("[") :])
    }
    bobs_account = f"system:serviceaccount:{namespace}:bob"
    assert creators == {
        "ann-embed": "ann",
        "ann-outer": "ann",
        "bob-train": "bob",
        "embed": bobs_account,
        "outer": bobs_account,
        "train": bobs_account,
    }
    ann.types("kt", "list")

    # 3. `-a` is what its caller deployed, and what the pods of that did.
    teardown_output = bob.types("kt", "teardown", "-a", "-y")
    assert "all services of yours" in teardown_output and "Not yours in" in teardown_output
    assert [
        deployment
        for deployment in ("embed", "outer", "train")
        if f"deployment {deployment}\n" not in teardown_output
    ] == []
    assert "ann-embed (of ann), ann-outer (of ann), bob-train (of bob)" in teardown_output
    teardown_output = bob.types("kt", "teardown", "--all", "-y", KT_USERNAME="bob")
    assert "Deleted deployment bob-train" in teardown_output
    assert "nothing was deleted" in bob.types("kt", "teardown", "--namespace-wide", "-y", status=1)
    wrong = bob.types("kt", "teardown", "--namespace-wide", "-y", "--count", "3", status=1)
    assert "nothing was deleted: the count is 3, and namespace" in wrong
    teardown_output = ann.types("kt", "teardown", "-a", "-y", KT_USERNAME="ann")
    assert (
        "Deleted deployment ann-embed" in teardown_output
        and "Deleted deployment ann-outer" in teardown_output
    )
    bob.runs("deploy()(1)")
    teardown_output = ann.types("kt", "teardown", "--namespace-wide", "-y", "--count", "1")
    assert "Deleted deployment train" in teardown_output
