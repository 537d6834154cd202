"""Where output goes, and that it can be read without colour."""

import io
import json

import pytest

from kubetorch.cli.output import Output, layout, narrowed, tolerate_narrow_encodings


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_reports_go_to_stdout_and_remarks_to_stderr(capsys):
    output = Output()
    output.report("✓ Deleted deployment train", "green")
    output.note("Looking for service train...")
    output.error("it failed", "try again")
    captured = capsys.readouterr()
    assert captured.out == "✓ Deleted deployment train\n"
    assert captured.err == "Looking for service train...\nit failed\nhint: try again\n"


def test_with_json_stdout_has_nothing_else(capsys):
    output = Output(as_json=True)
    output.report("Deploying train...")
    output.panel("With Curl", ["curl"])
    output.value({"name": "train", "größe": [1, None]})
    captured = capsys.readouterr()
    assert json.loads(captured.out) == {"name": "train", "größe": [1, None]}
    assert captured.err.startswith("Deploying train...\n")


def test_a_pipe_gets_no_colour_and_json_on_one_line(capsys):
    output = Output()
    output.report("done", "green")
    output.value({"a": {"b": 1}})
    assert capsys.readouterr().out == 'done\n{"a": {"b": 1}}\n'


def test_a_terminal_gets_colour_unless_it_was_refused(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setattr("sys.stdout", coloured := Terminal())
    Output().report("done", "green")
    assert coloured.getvalue() == "\033[32mdone\033[0m\n"

    for name, value in (("NO_COLOR", "1"), ("TERM", "dumb")):
        with monkeypatch.context() as patch:
            patch.setenv(name, value)
            patch.setattr("sys.stdout", bare := Terminal())
            Output().report("done", "green")
            assert bare.getvalue() == "done\n"


def test_a_table_in_a_pipe_has_every_cell_whole(capsys):
    long = "x" * 300
    Output().table([{"NAME": long, "STATUS": "Ready"}, {"NAME": "[bold]b", "STATUS": "-"}])
    lines = capsys.readouterr().out.splitlines()
    assert lines[1] == f"{long}  Ready"
    assert lines[2].split() == ["[bold]b", "-"]


def test_cells_stand_below_their_headers_and_may_have_several_lines():
    assert layout([["A", "1", "2"], ["LONG NAME", "one\ntwo", "-"], ["C", "x", "y"]]) == [
        "A  LONG NAME  C",
        "1  one        x",
        "   two",
        "2  -          y",
    ]


@pytest.mark.parametrize(
    ("width", "expected_headers"), [(10, ["A", "NONE", "B"]), (9, ["A", "B"]), (1, ["A", "B"])]
)
def test_only_where_it_is_too_wide_columns_without_values_are_left_out(width, expected_headers):
    table = [["A", "1"], ["NONE", "-"], ["B", "2"]]
    assert [header for header, _ in narrowed(table, width)] == expected_headers


def test_a_table_of_nothing_but_gaps_keeps_its_columns():
    table = [["A", "-"], ["B", "-"]]
    assert narrowed(table, 1) == table


WIDE = {"NAME": "train", "SPARE": "x" * 30, "REASON": "it waits for a node with a GPU"}


def shown_on_a_terminal(monkeypatch, row, *, width, **environ):
    for name, value in {"TERM": "xterm", "NO_COLOR": "", "COLUMNS": str(width), **environ}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("sys.stdout", terminal := Terminal())
    Output().table([row], dispensable=["SPARE"])
    return terminal.getvalue()


def test_on_a_narrow_terminal_columns_go_before_cells_are_broken_between_words(monkeypatch):
    text = shown_on_a_terminal(monkeypatch, WIDE, width=20, NO_COLOR="1")
    assert text.splitlines() == [
        "NAME   REASON",
        "train  it waits for",
        "       a node with a",
        "       GPU",
    ]
    text = shown_on_a_terminal(monkeypatch, WIDE, width=40, NO_COLOR="1")
    assert text.splitlines()[1] == "train  it waits for a node with a GPU"
    text = shown_on_a_terminal(monkeypatch, WIDE, width=80, NO_COLOR="1")
    assert "x" * 30 in text


def test_states_have_a_colour_where_there_are_colours(monkeypatch):
    row = {"NAME": "train", "STATUS": "Failed"}
    assert "\x1b[31mFailed" in shown_on_a_terminal(monkeypatch, row, width=80)
    for name, value in (("NO_COLOR", "1"), ("TERM", "dumb")):
        text = shown_on_a_terminal(monkeypatch, row, width=80, **{name: value})
        assert text == "NAME   STATUS\ntrain  Failed\n"


def test_what_would_steer_a_terminal_is_shown_in_a_table(monkeypatch):
    text = shown_on_a_terminal(monkeypatch, {"NAME": "a\x1b]0;title\x07"}, width=80)
    assert "a\\x1b]0;title\\x07" in text


def test_the_lines_of_a_panel_can_be_copied_as_they_stand(capsys):
    lines = ["curl -X POST http://127.0.0.1:40000/train \\", "  -d '" + "x" * 200 + "'"]
    Output().panel("With Curl", lines)
    printed = capsys.readouterr().out.splitlines()
    assert printed[0].startswith("── With Curl ─")
    assert printed[1:3] == lines


@pytest.mark.parametrize("text", ["✓ done", "日本"])
def test_a_terminal_that_cannot_show_a_character_does_not_fail_the_command(monkeypatch, text):
    narrow = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr("sys.stdout", narrow)
    tolerate_narrow_encodings()
    Output().report(text)
    assert b"?" in narrow.buffer.getvalue()


def test_what_json_has_not_stands_as_its_text(capsys):
    value = {1: {2.5}, (1, 2): [float("nan"), (True, None)], None: float("-inf"), b"k": {"a": 1.5}}
    Output(as_json=True).value(value)
    printed = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert printed == {
        "1": "{2.5}",
        "(1, 2)": ["nan", [True, None]],
        "null": "-inf",
        "b'k'": {"a": 1.5},
    }
