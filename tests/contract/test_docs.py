"""The documents say what is so: code compiles, links lead somewhere, references are complete."""

import functools
import inspect
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import typer
import yaml

import documents
import kubetorch
from documents import DOCUMENTS, PAGES, ROOT
from kubetorch import errors
from kubetorch.cli.main import COMMANDS, app, load

CLI_PAGE = ROOT / "docs/cli.md"
WIDEST = 140
PAGE_IDS = [str(page.relative_to(ROOT)) for page in PAGES]
#: What a block may be; one without a language is a drawing.
LANGUAGES = {"", "python", "shell", "text", "yaml", "json", "toml"}


def code(page, language):
    """The blocks of a language."""
    return [block for block in documents.blocks(page) if block.language == language]


def test_no_line_of_a_document_is_too_long():
    too_long = [
        f"{page.relative_to(ROOT)}:{number}"
        for page in DOCUMENTS
        for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1)
        if len(line) > WIDEST
    ]
    assert not too_long


@pytest.mark.parametrize("page", PAGES, ids=PAGE_IDS)
def test_a_block_is_of_a_language_that_is_checked(page):
    for block in documents.blocks(page):
        is_of_the_site = block.language.startswith("{")
        assert block.language in LANGUAGES or is_of_the_site, block
        assert block.language in documents.COMMANDS or not block.needs, f"{block} does not run"
        if block.language == "python":
            compile("\n" * (block.line - 1) + block.code, page.name, "exec")
        elif block.language == "shell":
            subprocess.run(["bash", "-n", "-c", block.code], check=True)
        elif block.language == "yaml":
            list(yaml.safe_load_all(block.code))
        elif block.language == "json":
            json.loads(block.code)


def test_python_blocks_use_only_names_that_are_there(tmp_path):
    for number, page in enumerate(PAGES):
        for block in code(page, "python"):
            for name in set(re.findall(r"\bkt\.([A-Za-z_]+)", block.code)):
                assert hasattr(kubetorch, name), f"{block}: there is no kt.{name}"
            program = tmp_path / f"{number}-{page.stem}-{block.line}.py"
            program.write_text(block.code, encoding="utf-8")
    command = [Path(sys.executable).with_name("ruff"), "check", "--isolated", "--select=F", "."]
    completed = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert completed.returncode == 0, completed.stdout


@pytest.mark.parametrize("page", PAGES, ids=PAGE_IDS)
def test_relative_links_lead_somewhere(page):
    text = page.read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", text):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


@pytest.mark.parametrize("page", PAGES, ids=PAGE_IDS)
def test_shell_blocks_use_commands_and_options_that_kt_has(page):
    for block in code(page, "shell"):
        joined = block.code.replace("\\\n", " ")
        for words in re.findall(r"(?:^|[(|&;])[ ]*kt ([^|&;)#\n]*)", joined, re.MULTILINE):
            command, *rest = words.split()
            if command.startswith("-"):
                continue
            assert command in COMMANDS, f"{block}: there is no kt {command}"
            known_options = set().union(*(options(member) for member in family(load(command))))
            used = {word for word in rest if re.fullmatch(r"--?[a-z][a-z-]*", word)}
            assert used <= known_options, f"{block}: kt {command} has no {used - known_options}"


# ------------------------------------------------------------------------------------ references


def test_the_page_of_computes_has_all_parameters_and_properties():
    text = (ROOT / "docs/compute.md").read_text(encoding="utf-8")
    public = [name for name in dir(kubetorch.Compute) if name[0] != "_"]
    attributes = [
        name for name in public if not inspect.isroutine(getattr(kubetorch.Compute, name))
    ]
    documented = set(re.findall(r"`([a-z_]+)(?:\([^`]*)?`", text))
    missing = {*inspect.signature(kubetorch.Compute).parameters, *attributes} - documented
    assert missing == {"chosen_name", "unknown"}


def test_the_index_of_examples_has_each_of_them_once_with_a_sentence():
    text = (ROOT / "docs/examples.md").read_text(encoding="utf-8")
    rows = re.findall(r"^- \[(.*)\]\(\.\./examples/\1\): .+\.$", text, re.MULTILINE)
    files = [path.name for path in (ROOT / "examples").iterdir() if path.is_file()]
    assert sorted(rows) == sorted(files)


def test_the_pages_of_the_api_have_every_public_name():
    texts = [path.read_text(encoding="utf-8") for path in (ROOT / "docs/api").glob("*.md")]
    documented_names = set(
        re.findall(r"^\.\. auto\w+:: kubetorch\.(\w+)", "\n".join(texts), re.MULTILINE)
    )
    missing = set(kubetorch.__all__) - documented_names - {"EXCEPTION_REGISTRY", "__version__"}
    assert not missing, "add it to a page of docs/api"


def options(command):
    """The options of a command, in all spellings, without the help that every command has."""
    parameters = [param for param in command.params if "--help" not in param.opts]
    return {name for param in parameters for name in param.opts if name.startswith("-")}


def family(command):
    """A command, and the commands in it."""
    return [command, *getattr(command, "commands", {}).values()]


def sections(page, depth):
    """Text below each heading that begins with `kt`, up to the next heading of any depth."""
    text = page.read_text(encoding="utf-8")
    parts = re.split(r"^(#+) (.*)$", text, flags=re.MULTILINE)
    return {
        title: body
        for marks, title, body in zip(parts[1::3], parts[2::3], parts[3::3], strict=True)
        if title.split()[0] == "kt" and len(marks) <= depth
    }


@functools.cache
def all_commands():
    """Every command by the words that run it."""
    commands = {"kt": typer.main.get_command(app)}
    for name in COMMANDS:
        command = load(name)
        commands[f"kt {name}"] = command
        for sub, inner in getattr(command, "commands", {}).items():
            commands[f"kt {name} {sub}"] = inner
    return commands


def test_the_reference_of_kt_has_a_section_for_every_command_and_for_nothing_else():
    assert set(sections(CLI_PAGE, 3)) == set(all_commands())


@pytest.mark.parametrize("words", sorted(sections(CLI_PAGE, 3)))
def test_the_reference_of_kt_has_the_options_of_each_command(words):
    body = sections(CLI_PAGE, 3)[words]
    rows = re.findall(r"^\| (`-[^|]*`) \|", body, re.MULTILINE)
    documented = {name for row in rows for name in re.findall(r"`(-[^`\s]+)", row)}
    assert documented == options(all_commands()[words])


@pytest.mark.parametrize("name", COMMANDS)
def test_the_list_of_commands_says_what_the_help_of_each_says(name):
    command = load(name)
    assert (command.help or "").splitlines()[0] == COMMANDS[name][1]


def test_the_reference_of_errors_has_every_error_once_with_its_bases_code_and_status():
    text = (ROOT / "docs/errors.md").read_text(encoding="utf-8")
    rows = re.findall(r"^- \*\*`(\w+)`\*\*(?: \(`(\w+)`\))? · (\w+) · (\d+)\.$", text, re.MULTILINE)
    documented = {name: (base or None, code, int(status)) for name, base, code, status in rows}
    assert len(documented) == len(rows)
    assert documented == {
        name: (builtin_base(cls), cls.code, cls.status)
        for name, cls in errors.EXCEPTION_REGISTRY.items()
    }


def builtin_base(cls):
    """The built-in class that an error derives from besides `Exception`."""
    builtin_bases = [
        base.__name__
        for base in cls.__mro__
        if base.__module__ == "builtins" and base not in (Exception, BaseException, object)
    ]
    return builtin_bases[0] if builtin_bases else None


# --------------------------------------------------------------------- names of modules and files

SOURCES = ROOT / "src/kubetorch"
PACKAGES = {path.parent.name for path in SOURCES.glob("*/__init__.py")}
FOLDERS = PACKAGES | {"benchmarks", "deploy", "docs", "examples", "src", "tests", "tools"}
#: Looks like a module of the package `pod`, and is a field of Kubernetes.
FIELDS = {"pod.metadata.name"}
#: In the runtime's folder, not in the repository.
BUILT = {"lib/loader"}
OF_CODE = [page for page in DOCUMENTS if page.name != "CHANGELOG.md"]


@pytest.mark.parametrize("page", OF_CODE, ids=[str(page.relative_to(ROOT)) for page in OF_CODE])
def test_a_module_or_file_that_a_page_names_exists(page):
    text = page.read_text(encoding="utf-8")
    drawn = [block.code for block in code(page, "")]
    drawn += re.findall(r"^ {4}\S.*$", text, re.MULTILINE)
    words = {*re.findall(r"`([^`\s]+)`", text), *re.findall(r"[a-z_.]+\w", " ".join(drawn))}
    words -= FIELDS | BUILT
    modules = {word for word in words if is_dotted_name(word) and not has_module(word)}
    files = {word for word in words if is_path(word) and not has_file(word)}
    assert not modules | files


def is_dotted_name(word):
    """A name such as `wire.calls.pack_outcome`, with or without `kubetorch.` before it."""
    parts = word.removeprefix("kubetorch.").split(".")
    return len(parts) > 1 and parts[0] in PACKAGES and all(part.isidentifier() for part in parts)


def has_module(word):
    """A module that exists and, if the name goes on after the module, says the next part."""
    parts = word.removeprefix("kubetorch.").split(".")
    path = SOURCES
    while parts and (path / parts[0]).is_dir():
        path /= parts.pop(0)
    if parts and (path / f"{parts[0]}.py").exists():
        path /= f"{parts.pop(0)}.py"
    if not parts:
        return True
    text = (path / "__init__.py" if path.is_dir() else path).read_text(encoding="utf-8")
    return all(re.search(rf"\b{part}\b", text) for part in parts)


def is_path(word):
    """A name such as `sdk/image`, `pod/http/` or `src/kubetorch/chart`."""
    first, slash, rest = word.removeprefix("kubetorch/").partition("/")
    return bool(slash and rest) and first in FOLDERS and re.fullmatch(r"[\w./-]+", rest) is not None


def has_file(word):
    path = word.removeprefix("kubetorch/").rstrip("/")
    return any((base / f"{path}{end}").exists() for base in (ROOT, SOURCES) for end in ("", ".py"))
