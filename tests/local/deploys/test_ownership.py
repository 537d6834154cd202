"""Whose service it is: two projects and two users on one controller, as their programs see it."""

import json
import os
import pickle
import pty
import select
import subprocess
import sys
import textwrap
import time

import pytest

import kubetorch as kt
from kubetorch.wire.messages import Creator
from tests.local import commands

PROGRAM = """
import sys
import kubetorch as kt

def train(x):
    return f"PROJECT {x}"

def other(x):
    return f"other of PROJECT {x}"

class Model:
    def where(self):
        return "PROJECT"

def deploy(function=train, name=None, replace=False):
    return kt.fn(function, name=name).to(kt.Compute(cpus="0.1"), replace=replace)

if __name__ == "__main__":
    print(eval(" ".join(sys.argv[1:])) if sys.argv[1:] else deploy()(1))
"""


#: What `kt list` says of an app whose command has ended.
ENDED = ("Succeeded", "Failed")


class Project:
    """A project of somebody, with a program."""

    def __init__(self, folder):
        self.folder = folder
        folder.mkdir()
        (folder / "pyproject.toml").touch()
        (folder / "train.py").write_text(PROGRAM.replace("PROJECT", folder.name))

    def run(self, *arguments, code=0, **environ):
        """Run a command in it; its standard output and its standard error."""
        if arguments[:2] == ("-m", "kubetorch"):
            completed = commands.kt(*arguments[2:], cwd=self.folder, **environ)
        else:
            completed = commands.python(*arguments, cwd=self.folder, timeout=60, **environ)
        assert completed.returncode == code, completed.stdout + completed.stderr
        where = "kubetorch: pods run on this machine (the setting backend is local)\n"
        return completed.stdout.strip(), completed.stderr.replace(where, "")

    def does(self, *expression, **environ):
        """What the program prints."""
        return self.run("train.py", *expression, **environ)[0].splitlines()[-1]

    def refused(self, *arguments, **environ):
        """The error of a program, or command, that is refused."""
        errors = self.run(*arguments, code=1, **environ)[1]
        assert "Traceback" not in errors or "ServiceTakenError" in errors
        return errors

    def kt(self, *arguments, code=0, **environ):
        """Run the command line."""
        return self.run("-m", "kubetorch", *arguments, code=code, **environ)


@pytest.fixture(autouse=True)
def service(emptied_home):
    return emptied_home


@pytest.fixture
def shop(tmp_path):
    return Project(tmp_path / "shop")


@pytest.fixture
def lab(tmp_path):
    return Project(tmp_path / "lab")


def view(name):
    return kt.globals.controller_client().get_workload("default", name)


def names():
    return sorted(view.spec.name for view in kt.globals.controller_client().list_workloads())


# ------------------------------------------------------------------------- 1: whose code answers


def test_ones_own_service_is_replaced_and_a_line_says_what_went(shop, lab):
    assert shop.does() == "shop 1"
    out, err = lab.run("train.py")
    assert out == "lab 1"
    line = next(line for line in err.splitlines() if "this deploy replaces the service" in line)
    assert "the service train in namespace default ran train.py:train of project" in line
    assert "/shop, last used " in line
    # A file that was renamed, a folder that was moved, a copy.
    (lab.folder / "train.py").rename(lab.folder / "main.py")
    assert "ran train.py:train of project" in lab.run("main.py")[1]
    lab.folder = lab.folder.rename(lab.folder.parent / "attic")
    out, err = lab.run("main.py")
    assert out == "lab 1" and "/lab, last used" in err


class Holder:
    """A program of a project that goes on until it is told to end."""

    def __init__(self, project, expression):
        code = f"from train import *; r = {expression}; print(r(1), flush=True); input()"
        self.process = subprocess.Popen(
            [sys.executable, "-c", code],
            cwd=project.folder,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.end()

    def end(self):
        """End it; its errors."""
        if self.process.returncode is None:
            self.errors = self.process.communicate("\n", timeout=120)[1]
        return self.errors


@pytest.mark.parametrize(
    "expression", ["deploy()", "kt.fn(name='train')"], ids=["deploys", "finds"]
)
def test_a_service_that_another_program_has_open_is_not_replaced(shop, lab, expression):
    shop.does()
    with Holder(shop, expression) as holder:
        assert holder.process.stdout.readline() == "shop 1\n"
        error = lab.refused("train.py")
        assert f"and the program {holder.process.pid} has it open; this deploy would run" in error
        assert "ServiceTakenError: the service train in namespace default runs train.py:tr" in error
        assert shop.does() == "shop 1"  # an edit is one, whoever has it open
        # Each way out works.
        assert lab.does("deploy(name='mine')(1)") == "lab 1"
        assert lab.does(KT_USERNAME="bob") == "lab 1"
        assert names() == ["bob-train", "mine", "train"]
        assert "this deploy replaces" in lab.run("train.py", "deploy(replace=True)(1)")[1]
        assert lab.does() == "lab 1"
        assert shop.does(KT_REPLACE="1") == "shop 1"
        lab.kt("teardown", "train", "-y")
        assert lab.does() == "lab 1"
    assert shop.does() == "shop 1"


def test_a_service_on_which_a_call_runs_is_not_replaced(shop, lab):
    def calls():
        return sum(pod.calls for pod in view("train").pods)  # as its agent has reported

    program = """
    import time
    from pathlib import Path
    import kubetorch as kt

    def train(file):
        while not Path(file).exists():
            time.sleep(0.05)

    if __name__ == "__main__":
        kt.fn(train).to(kt.Compute(cpus="0.1")).spawn(str(Path("go").absolute()))
    """
    (shop.folder / "long.py").write_text(textwrap.dedent(program))
    shop.run("long.py")
    while not calls():
        time.sleep(0.05)
    assert "and a call runs on it; this deploy would run train.py:train" in lab.refused("train.py")
    (shop.folder / "go").touch()
    while calls():
        time.sleep(0.05)
    assert lab.does() == "lab 1"


def test_the_command_of_an_app_that_runs_is_not_replaced(shop, lab):
    for project in (shop, lab):
        (project.folder / "app.py").write_text(
            "import sys\nimport kubetorch as kt\nkt.app(cpus='0.1')\n"
            "import time\nfrom pathlib import Path\n"
            "while not Path(sys.argv[1]).exists(): time.sleep(0.05)\n"
        )
    go = str(shop.folder.parent / "go")
    shop.kt("run", "--detach", "python", "app.py", go)
    assert "and its command runs; this deploy would run app.py of project" in lab.refused(
        "-m", "kubetorch", "run", "--detach", "python", "app.py", go
    )
    (shop.folder.parent / "go").touch()
    while kt.globals.controller_client().get_workload("default", "app").status not in ENDED:
        time.sleep(0.05)
    lab.kt("run", "--detach", "python", "app.py", go)


def test_names_that_are_one_for_a_service_are_refused_while_both_are_there(shop):
    file = shop.folder / "names.py"
    program = """
    import kubetorch as kt
    def train_model(x): return x
    def trainmodel(x): return -x
    """
    file.write_text(textwrap.dedent(program))
    deploy = "import kubetorch as kt, names; print(kt.fn(names.{}).to(kt.Compute(cpus=.1))(1))"
    out, err = shop.run("-c", deploy.format("train_model"))
    assert out == "1"
    assert err.count("kubetorch: train_model is deployed as the service trainmodel\n") == 1
    error = shop.refused("-c", deploy.format("trainmodel"))
    assert (
        "names.py:trainmodel would be the service trainmodel, which names.py:train_model" in error
    )
    assert 'hint: give one of them a name of its own, such as kt.fn(trainmodel, name="' in error
    file.write_text(textwrap.dedent(program).replace("def train_model(x): return x\n", ""))
    out, err = shop.run("-c", deploy.format("trainmodel"))
    assert out == "-1" and "ran names.py:train_model of project" in err
    assert "is deployed as" not in err


MANIFEST = """
apiVersion: apps/v1
kind: Deployment
metadata: {name: web}
spec:
  selector: {matchLabels: {app: web}}
  template:
    metadata: {labels: {app: web}}
    spec: {containers: [{name: c, image: x, command: [sleep, inf]}]}
"""


@pytest.mark.parametrize(
    ("command", "name", "known_as", "says"),
    [
        (
            ("deploy", "train.py:train", "-c", '{"cpus": "0.1"}'),
            "train",
            "train.py:train",
            "this deploy replaces the service",
        ),
        (("run", "python", "app.py"), "app", "app.py", "this deploy replaces the service"),
        (("apply", "web.yaml"), "web", "web", "and its command runs"),
    ],
    ids=["deploy", "run", "apply"],
)
def test_the_commands_replace_what_nobody_uses(shop, lab, command, name, known_as, says):
    for project in (shop, lab):
        app = "import kubetorch as kt\nkt.app(cpus='0.1')\nprint('done')\n"
        (project.folder / "app.py").write_text(app)
        (project.folder / "web.yaml").write_text(MANIFEST)
    shop.kt(*command)
    shop.kt(*command)
    assert says in lab.kt(*command, code=int(name == "web"))[1]
    shop.kt(*command)
    verb, *rest = command
    lab.kt(verb, "--replace", *rest)
    lab.kt(*command)
    assert view(name).spec.origin.callable == known_as


def test_a_callable_is_the_same_run_deployed_or_imported_and_after_edits(shop):
    assert shop.does() == "shop 1"
    shop.kt("deploy", "train.py:train", "-c", '{"cpus": "0.1"}')
    file = shop.folder / "train.py"
    file.write_text(file.read_text().replace('f"shop', 'f"edited'))
    imported = "import train; print(train.deploy()(3))"
    assert shop.run("-c", imported)[0] == "edited 3"
    # A program below the project's folder, by a link to it.
    (shop.folder.parent / "link").symlink_to(shop.folder)
    assert shop.run(str(shop.folder.parent / "link/train.py"))[0] == "edited 1"


def test_a_chosen_name_replaces_another_callable_of_the_project(shop):
    (shop.folder / "serve.py").write_text("import kubetorch as kt\ndef train(x): return x\n")
    deploy = "import kubetorch as kt, serve; print(kt.fn(serve.train{}).to(kt.Compute(cpus=.1))(1))"
    with Holder(shop, "deploy()") as holder:
        assert holder.process.stdout.readline() == "shop 1\n"
        error = shop.refused("-c", deploy.format(""))
        assert "runs train.py:train" in error and "this deploy would run serve.py:train" in error
        out, err = shop.run("-c", deploy.format(", name='train'"))
    assert "ran train.py:train of project" in err and out == "1"


def test_other_machines_of_a_repository_deploy_over_each_other(shop, lab):
    for project, url in ((shop, "git@git.co:a/b.git"), (lab, "https://me:pw@git.co/a/b")):
        project.run("-c", f"import os; os.system('git init -q && git remote add origin {url}')")
    assert shop.does() == "shop 1"
    assert lab.does() == "lab 1"
    assert view("train").spec.origin.name == "git.co/a/b"
    assert "pw" not in json.dumps(vars(view("train").spec.origin))


def test_of_two_deploys_at_once_one_has_the_service(shop, lab):
    shop.does("deploy(other)(1)")  # the local service is there
    with Holder(shop, "deploy()") as shop_holder, Holder(lab, "deploy()") as lab_holder:
        lines = {
            project: holder.process.stdout.readline()
            for project, holder in ((shop, shop_holder), (lab, lab_holder))
        }
        errors = [holder.end() for holder in (shop_holder, lab_holder)]
    won = [project for project, line in lines.items() if line == f"{project.folder.name} 1\n"]
    assert len(won) == 1
    assert sum("ServiceTakenError" in error for error in errors) == 1
    assert won[0].does("kt.fn(train)(2)") == f"{won[0].folder.name} 2"


def test_a_second_module_of_one_compute_is_a_second_service_and_says_so(shop):
    program = """
    from train import *
    compute = kt.Compute(cpus="0.1")
    one = kt.fn(train).to(compute)
    two = kt.fn(other).to(compute)
    two = kt.fn(other).to(compute)
    print(one(1), two(2))
    named = kt.Compute(cpus="0.1")
    named.service_name = "one-name"
    kt.fn(train).to(named)
    print(kt.fn(other).to(named)(3))
    """
    out, err = shop.run("-c", textwrap.dedent(program))
    assert "shop 1 other of shop 2" in out
    assert err.count("kubetorch: other is a second service, with pods of its own") == 1
    assert "one-name in namespace default ran train.py:train" in err
    assert out.endswith("other of shop 3")
    assert names() == ["one-name", "other", "train"]


def test_a_handle_says_once_that_its_service_runs_other_code(shop, lab):
    program = """
    from train import *
    import subprocess, sys
    remote = deploy()
    print(remote(1), flush=True)
    lab = [sys.executable, sys.argv[1], sys.argv[2]]
    subprocess.run(lab, check=True, stdout=subprocess.DEVNULL)
    print(remote(2), remote(3), list(remote.map([4])), remote.spawn(5).result())
    """
    file = str(lab.folder / "train.py")
    out, err = shop.run("-c", textwrap.dedent(program), file, "deploy(replace=True)")
    assert out.splitlines() == ["shop 1", "lab 2 lab 3 ['lab 4'] lab 5"]
    assert err.count("kubetorch: train now runs train.py:train of project") == 1
    assert err.count("/lab, which is not what this program deployed or found") == 1

    # A callable of another name answers nothing: the error is said, and so is whose code it is.
    replaced = "deploy(other, name='train', replace=True)"
    end = shop.run(
        "-c",
        textwrap.dedent(program).replace("deploy()", "deploy(replace=True)"),
        file,
        replaced,
        code=1,
    )[1]
    assert "CallableNotFoundError" in end
    assert end.count("kubetorch: train now runs train.py:other of project") == 1


def test_an_edit_or_a_deploy_of_ones_own_is_no_news(shop):
    program = """
    from train import *
    import subprocess, sys
    remote = deploy()
    subprocess.run([sys.executable, "train.py"], check=True)
    remote(1)
    """
    assert "kubetorch:" not in shop.run("-c", textwrap.dedent(program))[1]


def test_a_handle_that_found_a_bare_name_says_whose_it_calls(shop, lab):
    shop.does()
    runs = "runs train.py:train of project"
    for call in (
        "kt.fn(train)(1)",
        "kt.fn(name='train')(1)",
        "kt.fn(train).to(kt.Compute(), get_if_exists=True)(1)",
    ):
        out, err = lab.run("train.py", call)
        assert out == "shop 1"
        assert err.count(f"kubetorch: train in namespace default is your service, and {runs}") == 1
    _, err = lab.run("train.py", "kt.fn(train)(1)", KT_USERNAME="bob")
    assert "is a service of somebody without a user name, and " in err
    # One's own prefix says whose it is.
    shop.does(KT_USERNAME="bob")
    _, err = lab.run("train.py", "kt.fn(train)(1)", KT_USERNAME="bob")
    assert " service" not in err


def test_a_call_of_code_that_was_edited_after_its_deploy_says_so(shop):
    shop.does("deploy()(1)")
    shop.does("kt.cls(Model).to(kt.Compute(cpus='0.1')).where()")
    file, stale = shop.folder / "train.py", "is not what train.py has since 20"
    file.write_text(file.read_text() + "\n# A line that is of neither.\n")
    calls = ("kt.fn(train)(1), kt.fn(train)(2)", "kt.cls(Model).where()")
    for call in calls:
        assert stale not in shop.run("train.py", call)[1]
    file.write_text(file.read_text().replace("shop", "edited"))
    for call, name in zip(calls, ("train", "Model"), strict=True):
        out, err = shop.run("train.py", call)
        assert "edited" not in out
        assert err.count(f"{name.lower()} runs {name} as it was deployed at 20") == 1
        assert err.count(f"{stale}") == err.count("; .to(...) deploys it\n") == 1
    assert stale not in shop.run("train.py", "deploy()(1)")[1]
    assert stale not in shop.run("train.py", "kt.fn(train)(1)")[1]


# --------------------------------------------------------------------------- 2: pods know the user

NESTED = """
import os
import kubetorch as kt

def embed(x):
    return os.environ["KT_SERVICE_NAME"], os.environ.get("KT_USERNAME")

def outer(x):
    remote = kt.fn(embed).to(kt.Compute(cpus="0.1"))
    return remote(x), kt.config.username, kt.config.namespace, kt.config.backend

if __name__ == "__main__":
    print(kt.fn(outer).to(kt.Compute(cpus="0.1", namespace="team"))(1))
    print(kt.fn(embed).to(kt.Compute(cpus="0.1", namespace="team"))(1))
"""


def test_what_a_pod_deploys_is_its_deployers(shop):
    (shop.folder / "nested.py").write_text(NESTED)
    shop.run("nested.py", KT_USERNAME="alice")
    views = kt.globals.controller_client().list_workloads()
    assert [service_view.spec.name for service_view in views] == ["alice-embed", "alice-outer"]
    embed, outer = (service_view for service_view in views)
    assert embed.creator == outer.creator == Creator("", "alice")
    assert embed.spec.origin.project == outer.spec.origin.project
    assert embed.spec.origin.callable == "nested.py:embed"
    out, _ = shop.run("nested.py", KT_USERNAME="alice")  # the pod's deploy is one from here
    nested_output = "[['alice-embed', 'alice'], 'alice', 'team', 'local']"
    assert nested_output in out and out.endswith("['alice-embed', 'alice']")
    shop.kt("teardown", "-a", "-y", "-n", "team", KT_USERNAME="alice")
    assert kt.globals.controller_client().list_workloads() == []


def test_who_has_no_name_has_pods_without_one_and_the_user_may_give_another(shop, service_home):
    (shop.folder / "nested.py").write_text(NESTED)
    # The local service was started by somebody who has a name.
    shop.does("deploy()(1)", KT_USERNAME="alice")
    assert "[['embed', None], None, 'team'," in shop.run("nested.py")[0]
    shop.kt("teardown", "--namespace-wide", "-y", "--count", "2", "-n", "team")
    source = NESTED.replace('cpus="0.1", namespace', 'env_vars={"KT_USERNAME": "bot"}, namespace')
    (shop.folder / "nested.py").write_text(source)
    assert "[['bot-embed', 'bot'], 'bot'," in shop.run("nested.py", KT_USERNAME="alice")[0]


def test_a_pod_leaves_the_user_name_out_as_its_deployer_does(shop):
    (shop.folder / "nested.py").write_text(NESTED)
    shop.run("nested.py", KT_USERNAME="alice", KT_PREFIX_USERNAME="false")
    assert names() == ["embed", "outer"]
    embed = kt.globals.controller_client().get_workload("team", "embed")
    assert embed.creator == Creator("", "alice")
    shop.run("nested.py", KT_USERNAME="alice")
    assert names() == ["alice-embed", "alice-outer", "embed", "outer"]


def test_what_the_script_of_an_app_deploys_is_its_deployers(shop):
    (shop.folder / "jobs").mkdir()
    (shop.folder / "jobs/work.py").write_text(NESTED.replace(', namespace="team"', ""))
    app = "import kubetorch as kt; kt.app('python jobs/work.py', name='work')"
    shop.run("-c", f"{app}.to(kt.Compute(cpus=.1)).follow()", KT_USERNAME="alice")
    assert names() == ["alice-embed", "alice-outer", "alice-work"]
    embed, work = view("alice-embed").spec.origin, view("alice-work").spec.origin
    assert (embed.project, embed.callable) == (work.project, "jobs/work.py:embed")
    # From here it is the same function.
    shop.run("jobs/work.py", KT_USERNAME="alice")


# ------------------------------------------------------------------------------------ 3: teardown


def test_teardown_all_deletes_what_its_caller_deployed(shop):
    shop.does("deploy()(1)")
    for user in ("alice", "bob"):
        shop.does("deploy()(1)", KT_USERNAME=user)
    out, err = shop.kt("teardown", "-a", "-y")
    assert "Deleting all services of yours in default namespace..." in out
    assert "Not yours in default namespace: alice-train (of alice), bob-train (of bob)" in err
    assert names() == ["alice-train", "bob-train"]
    shop.kt("teardown", "--all", "-y", KT_USERNAME="bob")
    assert names() == ["alice-train"]
    # Its own file means its own services.
    assert "No services found" in shop.kt("teardown", "-a", "-y")[0]
    shop.kt("teardown", "train.py", "-y")
    assert names() == ["alice-train"]


def test_a_whole_namespace_takes_its_number(shop):
    for user in ("alice", "bob"):
        shop.does("deploy()(1)", KT_USERNAME=user)
    for arguments in (["-y"], ["-y", "--count", "1"], ["-y", "--count", "3"]):
        _, err = shop.kt("teardown", "--namespace-wide", *arguments, code=1)
        assert "nothing was deleted" in err and "namespace default has 2" in err
    assert "--count is for" in shop.kt("teardown", "-a", "--count", "2", code=1)[1]
    for typed, code in (("y\n", 1), ("3\n", 1), ("", 1), ("2\n", 0)):
        assert names() == ["alice-train", "bob-train"]
        words = ("teardown", "-a", "--namespace-wide")
        completed = commands.kt(*words, stdin=typed, cwd=shop.folder)
        assert completed.returncode == code, completed.stderr
        assert "• deployment alice-train (of alice)" in completed.stdout
        assert "Type the number of services" in completed.stderr
    assert names() == []


# ------------------------------------------------------------------------------ what stays up


def end_of(project, expression, **environ):
    """What a program of a project writes on the terminal that is its standard error."""
    ours, theirs = pty.openpty()
    program = [sys.executable, "train.py", *expression.split()]
    child = subprocess.Popen(
        program, cwd=project.folder, env={**os.environ, **environ}, stderr=theirs
    )
    shown = b""
    # The terminal stays open: its local service may have been started by the program.
    while child.poll() is None or select.select([ours], [], [], 0)[0]:
        if select.select([ours], [], [], 0.1)[0]:
            shown += os.read(ours, 65536)
    os.close(ours)
    os.close(theirs)
    assert child.returncode == 0, shown
    return shown.decode()


def test_a_program_on_a_terminal_says_at_its_end_what_stays_up(shop, service_home):
    screen = end_of(shop, "deploy()(1)")
    assert screen.count("kubetorch: train (1 pod) stays up; kt teardown train deletes it") == 1
    many = "(deploy(other), kt.cls(Model).to(kt.Compute(cpus=.1,gpus=2,replicas=2)))"
    screen = end_of(shop, many, KT_LOCAL_GPUS="pretend")
    assert "2 services stay up: other (1 pod), model (2 pods, 4 GPUs); kt teardown other" in screen


def test_nothing_is_said_of_what_stays_up_where_there_is_nothing_or_nobody_asks(shop, service_home):
    assert "up;" not in end_of(shop, "[deploy(),deploy().teardown()]")
    assert "up;" not in end_of(shop, "deploy()(1)", KT_QUIET="true")
    assert "up;" not in end_of(shop, "kt.fn(train)(2)")
    assert "up;" not in shop.run("train.py")[1]


# --------------------------------------------------------------------------- 5: unpickled handles


def test_an_unpickled_handle_is_deployed_again_where_its_code_can_be_imported(shop, lab):
    make = """
    from train import *
    import pickle, sys
    model = kt.cls(Model, name="model").to(kt.Compute(cpus="0.1"))
    function = deploy()
    pickle.dump((model, function), open("handles", "wb"))
    """
    shop.run("-c", textwrap.dedent(make))
    redeploy_source = """
    import pickle
    import kubetorch as kt
    model, again = pickle.load(open({file!r}, "rb"))
    again.compute.image.set_env_vars({{"STAGE": "two"}})
    again.to(again.compute)
    print(again(1), again.to(kt.Compute(cpus="0.1"), sync_dir=".")(2))
    model.to(model.compute, init_args={{}})
    print(model.where(), len(again.compute.image.to_spec().steps))
    """
    file = shop.folder / "handles"
    out, err = shop.run("-c", textwrap.dedent(redeploy_source.format(file=str(file))))
    assert out.splitlines()[-2:] == ["shop 1 shop 2", "shop 0"]
    assert "kubetorch:" not in err
    # Elsewhere another module may have the name: it is not the same code.
    out, err = lab.run("-c", textwrap.dedent(redeploy_source.format(file=str(file))))
    assert out.splitlines()[-2:] == ["lab 1 lab 2", "lab 0"]
    assert err.count("this deploy replaces the service") == 2
    (lab.folder / "train.py").unlink()
    error = lab.run("-c", textwrap.dedent(redeploy_source.format(file=str(file))), code=1)[1]
    assert "the code of train, train:train, cannot be imported here: No module named" in error


def test_a_handle_is_deployed_again_in_a_pod_that_has_its_code(shop):
    (shop.folder / "pyproject.toml").unlink()
    (shop.folder / ".git").mkdir()  # the marker, which does not travel
    (shop.folder / "helper.py").write_text("def double(x): return 2 * x\n")
    (shop.folder / "jobs.py").write_text(
        textwrap.dedent("""
        import kubetorch as kt
        import helper

        def work(x):
            return helper.double(x)

        def redeploy(handle):
            handle.compute.image.set_env_vars({"A": "1"})
            return handle.to(handle.compute)(4)

        if __name__ == "__main__":
            handle = kt.fn(work).to(kt.Compute(cpus="0.1"))
            remote = kt.fn(redeploy)
            remote.serialization = "pickle"
            remote.to(kt.Compute(cpus="0.1", allowed_serialization=["pickle"]))
            print(remote(handle))
        """)
    )
    assert shop.run("jobs.py")[0].endswith("8")


def test_an_app_is_deployed_again(shop):
    (shop.folder / "app.py").write_text(
        "import kubetorch as kt\nweb = kt.app('echo one; echo two')\n"
    )
    make = "import app, kubetorch as kt, pickle; app.web.to(kt.Compute(cpus='0.1')); "
    shop.run("-c", make + "pickle.dump(app.web, open('app.pickle', 'wb'))")
    redeploy_source = (
        "import pickle; a = pickle.load(open('app.pickle', 'rb')); print(a.to(a.compute).follow())"
    )
    assert shop.run("-c", redeploy_source)[0].endswith("0")


def test_the_image_of_a_compute_is_empty_where_none_was_given(tmp_path):
    compute = kt.Compute(cpus="0.1")
    assert compute == kt.Compute(cpus="0.1", image=kt.Image())
    assert compute.image.to_spec().steps == ()
    copied = pickle.loads(pickle.dumps(compute))
    (tmp_path / "data").mkdir()
    copied.image.copy(str(tmp_path / "data"))
    assert len(copied.to_spec().image.steps) == 1
    assert compute.to_spec().image is None
    assert "image" not in repr(compute)
