"""The subset of Go's templates writes what helm writes; `tests/cluster` holds them together."""

import pytest

from kubetorch.errors import ConfigError, InstallError
from kubetorch.install.templates import Templates

VALUES = {
    "name": "web",
    "count": 3,
    "yes": True,
    "empty": {},
    "none": [],
    "list": [{"name": "one"}, {"name": "two"}],
    "map": {"b": "x", "a": 1},
    "words": ["x", "z"],
    "html": "<b>&",
}
#: Templates, and what they write with these values.
CASES = [
    ("a {{ .Values.name }} b", "a web b"),
    ("a {{- .Values.name -}} b", "awebb"),
    ("a {{- .Values.name }} b", "aweb b"),
    ("a\n  {{- /* of no interest */ -}}\n  b", "ab"),
    ("{{/* of no interest */}}a", "a"),
    ("{{ .Values.missing }}", ""),
    ("{{ .Values.count }} {{ .Values.yes }} {{ 7 }}", "3 true 7"),
    ('{{ "a\\tb" }} {{ `c\\d` }} {{ "}}" }} {{ `"{{` }}', 'a\tb c\\d }} "{{'),
    ("{{ $.Release.Name }}", "r"),
    ("{{ if .Values.yes }}y{{ else }}n{{ end }}", "y"),
    ("{{ if not .Values.yes }}y{{ else }}{{ if .Values.name }}e{{ end }}{{ end }}", "e"),
    ("{{ with .Values.empty }}y{{ else }}{{ .Values.name }}{{ end }}", "web"),
    ("{{ with .Values.map }}{{ .a }}{{ $.Values.name }}{{ end }}", "1web"),
    ("{{ range .Values.list }}{{ .name }},{{ end }}", "one,two,"),
    ("{{ range .Values.none }}x{{ else }}nothing{{ end }}", "nothing"),
    ("{{ and .Values.name .Values.missing }}|{{ or .Values.missing .Values.name }}", "|web"),
    ("{{ eq .Values.name `web` }} {{ ne .Values.name `api` }}", "true true"),
    ("{{ gt (int .Values.count) 2 }}", "true"),
    ("{{ .Values.missing | default `d` }} {{ .Values.name | default `d` | quote }}", 'd "web"'),
    ("{{ join `,` .Values.words }}", "x,z"),
    ("m:{{ toYaml .Values.words | nindent 2 }}", "m:\n  - x\n  - z"),
    ("m:{{- toYaml .Values.map | nindent 2 }}", "m:\n  a: 1\n  b: x"),
    ("{{ toJson .Values.map | quote }}", '"{\\"a\\":1,\\"b\\":\\"x\\"}"'),
    ("{{ toJson .Values.html }}", r'"\u003cb\u003e\u0026"'),
    ("{{ quote .Values.count }} {{ .Values.missing | quote }}", '"3" '),
]


def render(source, helpers="", **values):
    templates = Templates({"t.yaml": source, "_h.tpl": helpers})
    return templates.render("t.yaml", {"Values": values, "Release": {"Name": "r"}})


@pytest.mark.parametrize(("source", "written"), CASES)
def test_it_writes_what_go_writes(source, written):
    assert render(source, **VALUES) == written


def test_a_template_includes_what_another_file_defines():
    helpers = '{{- define "name" -}}\n{{ .Release.Name }}-{{ .Values.n }}\n{{- end }}'
    assert render('{{ include "name" . | quote }}', helpers, n="x") == '"r-x"'


def test_the_root_of_an_included_template_is_what_it_was_given():
    helpers = '{{ define "item" }}{{ $.a }}{{ end }}'
    assert render('{{ include "item" .Values }}', helpers, a="b") == "b"


@pytest.mark.parametrize(
    ("source", "expected_message"),
    [
        ("\n{{ nonsense 1 }}", "t.yaml:2: the function nonsense is not known"),
        ("{{ .Values.missing.deeper }}", "there is no field 'deeper' in nothing"),
        ("{{ .Values.count.deeper }}", "there is no field 'deeper' in the int 3"),
        ("{{ eq 1 `1` }}", "the int 1 is compared with the str '1'"),
        ("{{ .Values.map }}", "cannot be written as it is: use toYaml"),
        ("{{ int `a` }}", "int cannot do with the str 'a'"),
        ("{{ int 1 2 3 }}", "int cannot do with the int 1, the int 2, the int 3"),
        ('{{ include "none" . }}', "no template 'none' is defined"),
        ("{{ range .Values.count }}{{ end }}", "range needs a list"),
        ("{{ if true }}", "if has no end"),
        ("a{{ end }}", "there is nothing that end would end"),
        ("{{ if .a }}{{ else }}{{ else }}{{ end }}", "there is nothing that else would end"),
        ("{{ .A", "an action has no end"),
        ("{{ ~ }}", "this is no token: '~'"),
        ("{{ range .a }}{{ break }}{{ end }}", "the function break is not known"),
        ("{{ .a | .b }}", "behind a pipe there must be a function"),
        ("{{ .a.b 1 }}", "'1' stands where a pipe or an end is expected"),
        ("{{ else }}", "there is nothing that else would end"),
        ("{{ else if .a }}", "the function else is not known"),
        ("{{ ) }}", "')' stands where a value is expected"),
        ("{{ (1 }}", "a bracket is not closed"),
        ("{{ $x }}", "'x' stands where a pipe or an end is expected"),
        ("{{ $x := 1 }}", "this is no token"),
        ("{{ define name }}{{ end }}", "the function name is not known"),
    ],
)
def test_what_is_not_of_the_subset_or_cannot_be_carried_out_says_where_and_why(
    source, expected_message
):
    with pytest.raises(InstallError) as raised:
        render(source, count=3, map={"a": 1})
    assert "t.yaml:" in str(raised.value)
    assert expected_message in str(raised.value)


def test_a_template_may_refuse_values():
    with pytest.raises(ConfigError, match="no such thing"):
        render("{{ fail `no such thing` }}")


def test_a_template_that_includes_itself_ends():
    with pytest.raises(InstallError, match="includes itself without end"):
        render('{{ include "a" . }}', '{{ define "a" }}{{ include "a" . }}{{ end }}')
