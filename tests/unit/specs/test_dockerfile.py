"""Dockerfiles: reading instructions."""

import pytest

from kubetorch.errors import SpecError
from kubetorch.specs.dockerfile import assignments, command, expand, flags, parse, words


def read(text):
    return [(item.keyword, item.text) for item in parse(text, path="Dockerfile")]


def test_continued_lines_are_joined_and_comments_inside_them_dropped():
    assert read("run a && \\\n  # why\n\n  b\nENV A=1") == [("RUN", "a && b"), ("ENV", "A=1")]


def test_comments_are_kept():
    assert read("# hello\nFROM x") == [("#", "# hello"), ("FROM", "x")]


def test_the_escape_directive_is_honoured():
    assert read("# escape=`\nRUN a `\n b")[-1] == ("RUN", "a b")


def test_a_here_document_belongs_to_its_instruction():
    assert read("RUN <<EOF\necho a\nEOF\nUSER x") == [
        ("RUN", "<<EOF\necho a\nEOF"),
        ("USER", "x"),
    ]


@pytest.mark.parametrize(
    "text",
    [
        "RUN cat <<EOF && \\\n  b\na\nEOF",
        "RUN cat <<A <<'B-b'\na\nA\nb\nB-b",
        "RUN 3<<-EOF cat\n\ta\n EOF\n# b \\\n\tEOF",
    ],
)
def test_here_documents_are_there_once_and_end_where_they_say(text):
    whole = text.removeprefix("RUN ").replace("\\\n  b", "b", 1)
    assert read(f"{text}\nUSER x") == [("RUN", whole), ("USER", "x")]


@pytest.mark.parametrize(
    "text",
    [
        'RUN python -c "print(1<<2)"',
        "RUN python -c 'print(1 <<2)' <<<\"hello\"",
        "RUN echo $((1 << 2)) \\<<EOF",
        "ENV A=1 B='x <<y'",
        "CMD cat <<EOF",
    ],
)
def test_what_only_looks_like_a_here_document_is_none(text):
    keyword, _, rest = text.partition(" ")
    assert read(f"{text}\nUSER x") == [(keyword, rest), ("USER", "x")]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("FROM x\nONBUILD RUN a", "line 2: 'ONBUILD' is not supported; supported are FROM"),
        ("FROM", "line 1: FROM needs an argument"),
        ("RUN a \\", "does not end"),
        ("RUN <<EOF\na", "does not end"),
    ],
)
def test_what_is_wrong_is_named_with_its_line(text, message):
    with pytest.raises(SpecError, match=message):
        read(text)


def instruction(text):
    return parse(text, path="Dockerfile")[0]


def test_both_forms_of_env_are_understood():
    assert assignments(instruction("ENV A=1 B='x y'"), path="D") == [("A", "1"), ("B", "x y")]
    assert assignments(instruction("ENV A 1 2"), path="D") == [("A", "1 2")]
    with pytest.raises(SpecError, match="needs a value"):
        assignments(instruction("ENV A"), path="D")


def test_both_forms_of_a_command_are_understood():
    assert command(instruction('CMD ["a", "b c"]'), path="D") == ("a", "b c")
    assert command(instruction("CMD a b"), path="D") == "a b"
    for broken in ('CMD ["a"', "CMD [1]", "CMD []"):
        with pytest.raises(SpecError, match="line 1"):
            command(instruction(broken), path="D")


def test_words_and_flags_are_split_as_a_shell_does():
    assert words(r"""a "b c" 'd "e' f\ g ''""") == ["a", "b c", 'd "e', "f g", ""]
    assert flags("--chown=a:b --from=x src dst") == ({"chown": "a:b", "from": "x"}, "src dst")


def test_variables_are_expanded_and_unknown_ones_stay():
    variables = {"A": "1", "E": ""}
    assert expand("$A ${A} $B ${B:-x} ${E:-y} ${A:+z} \\$A", variables) == "1 1 $B x y z $A"


def test_a_word_may_have_variables_with_words_of_their_own():
    assert expand("${B:-${C:-$A}}${A:+<${A:-x}>}", {"A": "1"}) == "1<1>"


def test_what_depends_on_variables_that_are_known_later_stays():
    text = "$A $B ${B:-$A} ${B:+:$B} ${B:-${C:-$A}} ${A:+y}"
    assert (
        expand(text, {"A": "1"}, keep_unknown_defaults=True)
        == "1 $B ${B:-1} ${B:+:$B} ${B:-${C:-1}} y"
    )
