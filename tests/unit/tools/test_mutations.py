"""Mutations of a file, and which tests should notice them."""

import ast
from pathlib import Path

import pytest

from tools.mutations import Suite, chosen, mutated, mutations

SOURCE = '''"""Words."""
import logging

log = logging.getLogger(__name__)


def é(n, known):
    if n == 3 and known:
        log.info("n=%d", n)
        known.clear()
    while known:
        raise ValueError(n)
    return True
'''


def test_each_mutation_changes_one_place_and_is_still_python():
    made_mutations = mutations("é.py", SOURCE)
    assert [(mutation.line, mutation.kind) for mutation in made_mutations] == [
        (8, "and/or"),
        (8, "comparison"),
        (10, "left out"),
        (11, "condition"),
        (12, "left out"),
        (13, "answer"),
    ]
    texts = [mutated(SOURCE, mutation) for mutation in made_mutations]
    assert len({ast.dump(ast.parse(text)) for text in (*texts, SOURCE)}) == 7
    assert "if (n != 3) and known:" in texts[1]


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    files = {
        "src/kubetorch/pod/reload.py": SOURCE,
        "src/kubetorch/pod/agent.py": "import kubetorch.pod.reload\n",
        "tests/unit/pod/test_reload.py": "",
        "tests/unit/pod/test_logs.py": "",
        "tests/unit/wire/test_calls.py": "from kubetorch.pod import agent\n",
        "tests/local/agent/test_call_frames.py": "import kubetorch.pod.agent\n",
        "tests/local/cli/test_cli.py": "import kubetorch.pod.reload\n",
        "tests/local/test_http.py": "",
    }
    for name in ("specs", "wire", "manifests", "datastore", "k8s", "lib", "controller"):
        files[f"src/kubetorch/{name}/it.py"] = SOURCE
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path


def test_its_own_tests_run_first_then_those_around_then_local_ones(tree):
    assert Suite(tree).stages("src/kubetorch/pod/reload.py") == [
        ["tests/unit/pod/test_reload.py"],
        ["tests/unit/pod/test_logs.py", "tests/unit/wire/test_calls.py"],
        ["tests/local/cli/test_cli.py", "tests/local/agent/test_call_frames.py"],
    ]


def test_a_seed_chooses_the_same_mutations_of_all_packages(tree):
    chosen_mutations = chosen(tree, 16, seed=13)
    assert chosen_mutations == chosen(tree, 16, seed=13)
    assert len({mutation.key for mutation in chosen_mutations}) == 16
    assert len({Path(mutation.file).parent for mutation in chosen_mutations[:8]}) == 8
