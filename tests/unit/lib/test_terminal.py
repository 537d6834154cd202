import pytest

from kubetorch.lib.terminal import say, visible

PASSED = [
    "plain ü 漢字 🙂",
    "a\tb\nc\rd\be",
    "\x1b[31mred\x1b[0m \x1b[1;38;5;208mbold\x1b[m",
    "\r\x1b[K 40% \x1b[2K\x1b[A\x1b[3A",
]


@pytest.mark.parametrize("text", PASSED)
def test_colours_and_what_progress_bars_use_pass(text):
    assert visible(text) == text


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\x1b]0;title\x07", "\\x1b]0;title\\x07"),
        ("\x1b]8;;http://evil.example\x1b\\link", "\\x1b]8;;http://evil.example\\x1b\\link"),
        ("\x1b[2J\x1b[H", "\\x1b[2J\\x1b[H"),
        ("\x1b[6n\x1b[c\x1bc", "\\x1b[6n\\x1b[c\\x1bc"),
        ("\x1b[9999A", "\\x1b[9999A"),
        ("\x1b[?25l\x1bP1$r\x1b\\", "\\x1b[?25l\\x1bP1$r\\x1b\\"),
        ("\x9b2J\x9d\x85", "\\u009b2J\\u009d\\u0085"),
        ("\x00\x07\x0b\x0c\x0e\x7f", "\\x00\\x07\\x0b\\x0c\\x0e\\x7f"),
        ("a\u202egpj.exe\u2066\u200f\u061c", "a\\u202egpj.exe\\u2066\\u200f\\u061c"),
    ],
)
def test_all_else_that_steers_a_terminal_is_written_out(text, shown):
    assert visible(text) == shown


def test_a_line_of_our_own_is_one_line_whatever_names_are_in_it(capsys):
    say("train is a service of eve\nkubetorch: all is well\r\x1b[A\x1b[K\u202e")
    assert capsys.readouterr().err == (
        "kubetorch: train is a service of eve\\x0akubetorch: all is well"
        "\\x0d\\x1b[A\\x1b[K\\u202e\n"
    )
