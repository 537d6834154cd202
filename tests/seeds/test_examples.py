"""Every example of the documents that say what users write, as a program that asserts their words.

A program in `programs` has its example between comments: `# --- the example` and `# --- what is
said of it`. Before and between stand the names that the document leaves out; after it assertions,
on the manifest, and on the running service where the embedded backend can show it.
"""

import os
import re
import shutil
import sys
from pathlib import Path

import pytest
import yaml

from tests.local import commands

SEEDS_FOLDER = Path(__file__).parent
PROGRAMS = SEEDS_FOLDER / "programs"
INDEX = yaml.safe_load((SEEDS_FOLDER / "index.yaml").read_text())
EXAMPLES = [
    (f"{document}/{name}", about)
    for document, examples in INDEX.items()
    for name, about in examples.items()
]
#: The documents, where a checkout has them beside it.
DOCUMENTS = next(
    (
        folder / "shared/seeds"
        for folder in SEEDS_FOLDER.parents
        if (folder / "shared/seeds").is_dir()
    ),
    None,
)
#: How many examples each document has.
COUNTS = {
    "000_compute": 12,
    "001_primitives": 7,
    "002_reference": 46,
    "003_scaling": 2,
    "004_autoscaling": 12,
}
#: How a statement of an example begins, once `words` has read it.
STATEMENTS = re.compile(
    r"ktCompute(cpus|memory|gpu|image|replicas|selector|queue|label|from_manifestmanifest)"
    r"|remote_\w{0,8}kt(fn|cls)|fnktfn"
)


def test_no_example_is_left_out():
    assert {document: len(examples) for document, examples in INDEX.items()} == COUNTS
    files = {str(path.relative_to(PROGRAMS).with_suffix("")) for path in PROGRAMS.rglob("*.py")}
    assert files == {name for name, _ in EXAMPLES}


@pytest.fixture(scope="module", autouse=True)
def service(offline, shared_service_home):
    commands.begin_file()
    return shared_service_home


@pytest.mark.parametrize(
    ("number", "name", "about"),
    [(number, *example) for number, example in enumerate(EXAMPLES)],
    ids=[name for name, _ in EXAMPLES],
)
def test_the_example_does_what_its_document_says(number, name, about, tmp_path, record_property):
    record_property("example", (number, name, about))
    program = shutil.copy(PROGRAMS / f"{name}.py", tmp_path)
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    completed = commands.python("-W", "error", program, cwd=tmp_path, timeout=110, PATH=path)
    assert completed.returncode == 0, completed.stdout + completed.stderr


# -------------------------------------------------------------- the programs and the documents


def words(text):
    """A text without what layout and formatters change, names of results, and what is left out."""
    text = re.sub(r"\b\w+ = (?=kt\.Compute|compute\.logs)|\*\*left_out", "", text)
    return re.sub(r"[^A-Za-z0-9_]", "", text)


def examples_of(program):
    """The parts of a program that are the document's."""
    text = program.read_text()
    parts = re.findall(
        r"^ *# --- the example\n(.*?)(?=^ *# --- what is said of it$|\Z)", text, re.M | re.S
    )
    return [words(part) for part in parts]


@pytest.mark.skipif(DOCUMENTS is None, reason="the documents are not beside this checkout")
@pytest.mark.parametrize("document", INDEX)
def test_the_examples_are_those_of_the_document(document):
    text = words(next(DOCUMENTS.glob(f"{document[:3]}_*")).read_text())
    for name in INDEX[document]:
        for example in examples_of(PROGRAMS / document / f"{name}.py"):
            if name == "constructor":  # a signature, which is no program: only its names are
                continue
            assert example in text, f"{document}/{name}: {example}"
            text = text.replace(example, " ", 1)
    remaining_statement = STATEMENTS.search(text)
    assert remaining_statement is None, text[
        remaining_statement.start() : remaining_statement.start() + 200
    ]


@pytest.mark.skipif(DOCUMENTS is None, reason="the documents are not beside this checkout")
def test_every_block_of_the_reference_is_an_example():
    text = next(DOCUMENTS.glob("002_*")).read_text()
    blocks = re.findall(r"^```python\n(.*?)^```$", text, re.M | re.S)
    assert len(blocks) == COUNTS["002_reference"]
    signature, *rest = map(words, blocks)
    reference_examples = [
        example
        for name in INDEX["002_reference"]
        for example in examples_of(PROGRAMS / "002_reference" / f"{name}.py")
    ]
    assert all(any(example in block for example in reference_examples) for block in rest)
    assert all(name in signature for name in re.findall(r"^    (\w+):", blocks[0], re.M))
