"""Dockerfiles as images of live pods."""

import tarfile

import pytest

import kubetorch as kt


@pytest.fixture
def write(tmp_path):
    def write(text):
        path = tmp_path / "Dockerfile"
        path.write_text(text)
        return path

    return write


def body(image):
    return image.contents.splitlines()


def test_the_usual_instructions(write, tmp_path):
    (tmp_path / "app").mkdir()
    image = kt.Image.from_dockerfile(
        write(
            '# comment\nfrom python:3.12 AS base\nRUN a \\\n  && b\nENV A=1 B="two words"\n'
            "ENV C three words\nCOPY app /app\nWORKDIR /app\nUSER me\n"
            'ENTRYPOINT ["python"]\nCMD ["-m", "x"]\n'
        ),
        name="mine",
    )
    assert (image.name, image.image_id) == ("mine", "python:3.12")
    assert body(image) == [
        "FROM python:3.12",
        "RUN a && b",
        "ENV A 1",
        "ENV B two words",
        "ENV C three words",
        f"COPY {tmp_path}/app /app",
        "WORKDIR /app",
        "USER me",
        'ENTRYPOINT ["python"]',
        'CMD ["-m", "x"]',
    ]
    assert image.dockerfile_command == ("python", "-m", "x")


def test_options_that_mean_a_build_are_said_to_have_no_effect(write):
    path = write("FROM --platform=linux/arm64 a:1\nRUN --mount=type=cache,target=/x make\n")
    with pytest.warns(UserWarning) as caught_warnings:
        image = kt.Image.from_dockerfile(path)
    first, second = (str(warning.message) for warning in caught_warnings)
    assert "line 1: FROM --platform has no effect" in first
    assert "line 2: RUN --mount has no effect" in second
    assert body(image) == ["FROM a:1", "RUN make"]


def test_the_name_of_a_stage_is_no_part_of_the_base(write):
    assert kt.Image.from_dockerfile(write("FROM a/b:1 AS y\n")).image_id == "a/b:1"


def test_options_and_several_sources_of_copy(write, tmp_path):
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).touch()
    image = kt.Image.from_dockerfile(write("FROM x\nCOPY --chown=me:us a.txt b.txt /etc/kt/\n"))
    assert body(image)[1:] == [
        f"COPY {tmp_path}/a.txt /etc/kt/a.txt",
        "RUN chown -R me:us /etc/kt/a.txt",
        f"COPY {tmp_path}/b.txt /etc/kt/b.txt",
        "RUN chown -R me:us /etc/kt/b.txt",
    ]


def test_variables_with_an_equals_sign(write):
    image = kt.Image.from_dockerfile(
        write("FROM x\nENV O=/opt\nENV KT_PYTHON_PATH=$O/py\nENV A=1\n")
    )
    assert image.python_path == "/opt/py"
    assert body(image)[1:] == ["ENV KT_PYTHON_PATH /opt/py", "ENV O /opt", "ENV A 1"]


def test_paths_are_relative_to_the_dockerfile(write, tmp_path, monkeypatch):
    (tmp_path / "data").mkdir()
    monkeypatch.chdir("/")
    image = kt.Image.from_dockerfile(write("FROM x\nCOPY data data\n"))
    assert body(image)[1] == f"COPY {tmp_path}/data data"


def test_arguments_have_defaults_and_reach_the_base_and_commands(write):
    image = kt.Image.from_dockerfile(
        write("ARG V=3.12\nFROM python:${V}-slim\nARG NAME=a\nRUN echo $NAME\n")
    )
    assert image.image_id == "python:3.12-slim"
    assert body(image)[1] == "RUN export NAME=a; echo $NAME"
    with pytest.raises(kt.SpecError, match="ARG V has no default"):
        kt.Image.from_dockerfile(write("ARG V\nFROM python:$V\n"))


def test_of_several_stages_the_last_counts_and_files_of_others_are_refused(write):
    image = kt.Image.from_dockerfile(write("FROM a:1 AS build\nRUN make\nFROM b:1\nRUN x\n"))
    assert body(image) == ["FROM b:1", "RUN x"]
    with pytest.raises(kt.SpecError, match="another build stage"):
        kt.Image.from_dockerfile(write("FROM a AS b\nFROM c\nCOPY --from=b /x /x\n"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("FROM x\nONBUILD RUN a\n", "line 2: 'ONBUILD' is not supported"),
        ("FROM x\nSHELL /bin/bash\n", "line 2: SHELL /bin/bash must be a list"),
        ("FROM x\nADD https://x.org/a /a\n", "line 2: ADD https://x.org/a is no local file"),
        ("FROM x\nADD git@github.com:a/b.git /a\n", "line 2: ADD git@.* is no local file"),
        ("FROM x\nADD nothing /a\n", "line 2: ADD nothing: there is no"),
        ("FROM x\nRUN\n", "line 2: RUN needs an argument"),
        ('FROM x\nCMD ["a"\n', "line 2"),
        ("RUN a\n", "no FROM"),
        ("RUN a\nFROM x\n", "RUN stands before FROM"),
        ("FROM x\nCOPY nothing /x\n", "there is no"),
        ("FROM x\nRUN a \\\n", "does not end"),
    ],
)
def test_what_cannot_be_followed_is_named_with_its_line(write, text, message):
    with pytest.raises(ValueError, match=message):
        kt.Image.from_dockerfile(write(text))


def test_a_file_that_is_not_there_is_not_found(tmp_path):
    with pytest.raises(FileNotFoundError):
        kt.Image.from_dockerfile(tmp_path / "Dockerfile")


def test_a_here_document_alone_is_a_script_that_is_run(write):
    image = kt.Image.from_dockerfile(write("FROM x\nRUN <<EOF\necho a\necho b\nEOF\nRUN c\n"))
    assert body(image) == ["FROM x", 'RUN ["/bin/bash", "-c", "echo a\\necho b"]', "RUN c"]


def test_a_here_document_whose_tabs_do_not_count_is_run_without_them(write):
    image = kt.Image.from_dockerfile(write("FROM x\nRUN <<-END-IT\n\techo a\n  b\n\tEND-IT\n"))
    assert body(image) == ["FROM x", 'RUN ["/bin/bash", "-c", "echo a\\n  b"]']


def test_a_here_document_for_a_command_is_run_as_it_is(write):
    image = kt.Image.from_dockerfile(write("FROM x\nRUN cat <<EOF >a\nb\nEOF\n"))
    assert body(image)[1] == 'RUN ["/bin/bash", "-c", "cat <<EOF >a\\nb\\nEOF"]'


def test_variables_of_the_image_are_known_where_one_may_be_missing(write):
    image = kt.Image.from_dockerfile(
        write("FROM x\nARG W=1\nENV B=hello\nENV A=${B:-word} P=/x${P:+:$P}\nENV C=${D:-$W}\n")
    )
    assert body(image)[1:] == [
        "ENV B hello",
        "ENV A ${B:-word}",
        "ENV P /x${P:+:$P}",
        "ENV C ${D:-1}",
    ]


def test_a_variable_wins_over_an_argument_of_its_name(write):
    image = kt.Image.from_dockerfile(
        write("FROM x\nARG V=1\nENV V=${V}2\nENV X=$V\nRUN echo $V\nWORKDIR /$V/$X\n")
    )
    assert body(image)[1:] == ["ENV V 12", "ENV X $V", "RUN echo $V", "WORKDIR /12/12"]


def test_commands_have_the_arguments_of_their_stage_whether_they_name_them_or_not(write):
    image = kt.Image.from_dockerfile(
        write("ARG A=1\nARG B=2\nFROM x\nARG B\nARG DEBIAN_FRONTEND=noninteractive\nRUN make $A\n")
    )
    assert body(image)[1:] == ["RUN export B=2; export DEBIAN_FRONTEND=noninteractive; make $A"]


@pytest.mark.parametrize(
    ("text", "command"),
    [
        ("", None),
        ('CMD ["python", "m.py"]', ("python", "m.py")),
        ("CMD python m.py && echo done", "python m.py && echo done"),
        ('ENTRYPOINT ["python"]\nCMD ["m.py", "a b"]', ("python", "m.py", "a b")),
        ('CMD ["m.py"]\nENTRYPOINT ["python"]', ("python", "m.py")),
        ('ENTRYPOINT ["run"]\nCMD echo x', ("run", "/bin/sh", "-c", "echo x")),
        ("ENTRYPOINT exec serve\nCMD ignored", "exec serve"),
        ("CMD first\nCMD second", "second"),
        ("CMD first\nFROM b", None),
    ],
)
def test_the_command_is_what_docker_would_run(write, text, command):
    assert kt.Image.from_dockerfile(write(f"FROM a\n{text}\n")).dockerfile_command == command


def test_the_last_working_directory_is_that_of_the_image(write):
    image = kt.Image.from_dockerfile(write("FROM a\nWORKDIR /app\nRUN x\nWORKDIR sub\nRUN y\n"))
    assert image.to_spec().workdir == "/app/sub"
    assert kt.Image().to_spec().workdir is None


@pytest.mark.parametrize(
    ("line", "instead"),
    [
        ("EXPOSE 8000/tcp", "port="),
        ("LABEL a=b", "kt.Compute(labels=)"),
        ("HEALTHCHECK --interval=5s CMD curl -f http://localhost/", "health_check="),
        ("HEALTHCHECK NONE", "health_check="),
        ("VOLUME /data", "kt.Compute(volumes=)"),
        ('VOLUME ["/data"]', "kt.Compute(volumes=)"),
    ],
)
def test_what_has_no_effect_is_a_warning_with_what_has_it(write, line, instead):
    with pytest.warns(
        UserWarning, match=f"line 2: {line.split()[0]} has no effect"
    ) as caught_warnings:
        image = kt.Image.from_dockerfile(write(f"FROM a:1\n{line}\nRUN x\n"))
    assert instead in str(caught_warnings[0].message)
    assert body(image) == ["FROM a:1", "RUN x"]


@pytest.mark.parametrize(
    ("shell", "run"),
    [
        ('["/bin/bash", "-o", "pipefail", "-c"]', "set -o pipefail; a | b"),
        ('["/bin/bash", "-eo", "pipefail", "-c"]', "set -eo pipefail; a | b"),
        ('["/bin/sh", "-c"]', "a | b"),
        ('["/bin/bash", "-lc"]', "/bin/bash -lc 'a | b'"),
        ('["python", "-c"]', "python -c 'a | b'"),
    ],
)
def test_the_shell_of_what_follows(write, shell, run):
    image = kt.Image.from_dockerfile(
        write(f'FROM x\nRUN first\nSHELL {shell}\nRUN a | b\nRUN ["c", "d e"]\nCMD serve it\n')
    )
    assert body(image)[1:4] == ["RUN first", f"RUN {run}", "RUN c 'd e'"]
    assert image.dockerfile_command[-1] == "serve it"


def test_local_files_are_added_and_archives_unpacked(write, tmp_path):
    (tmp_path / "app").mkdir()
    (tmp_path / "a.txt").touch()
    with tarfile.open(tmp_path / "data.tar.gz", "w:gz") as archive:
        archive.add(tmp_path / "a.txt", "a.txt")
    image = kt.Image.from_dockerfile(
        write("FROM x\nADD app /app\nADD --chown=me a.txt /etc/\nADD data.tar.gz /data\n")
    )
    assert body(image)[1:] == [
        f"COPY {tmp_path}/app /app",
        f"COPY {tmp_path}/a.txt /etc/a.txt",
        "RUN chown -R me /etc/a.txt",
        f"COPY {tmp_path}/data.tar.gz /data/data.tar.gz",
        "RUN tar -xf /data/data.tar.gz -C /data && rm /data/data.tar.gz",
    ]
