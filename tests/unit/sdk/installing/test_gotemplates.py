"""The subset of Go's templates writes what helm writes; `tests/cluster` holds them together."""

import pytest

from kubetorch.errors import ConfigError, InstallError
from kubetorch.sdk.installing.gotemplates.evaluating import Templates

VALUES = {
    "name": "web",
    "count": 3,
    "yes": True,
    "empty": {},
    "none": [],
    "list": [{"name": "one"}, {"name": "two"}],
    "map": {"b": "x", "a": 1},
    "words": ["x", "z"],
}
#: Templates, and what they write with these values.
CASES = [
    ("a {{ .Values.name }} b", "a web b"),
    ("a {{- .Values.name -}} b", "awebb"),
    ("a\n  {{- /* of no interest */ -}}\n  b", "ab"),
    ("{{/* of no interest */}}a", "a"),
    ("{{ .Values.missing }}", ""),
    ("{{ .Values.count }} {{ .Values.yes }} {{ 7 }}", "3 true 7"),
    ('{{ "a\\tb" }} {{ `c\\d` }} {{ "}}" }}', "a\tb c\\d }}"),
    ("{{ $.Release.Name }}", "r"),
    ("{{ (index .Values.list 1).name }}", "two"),
    ("{{ if .Values.yes }}y{{ else }}n{{ end }}", "y"),
    ("{{ if not .Values.yes }}y{{ else if .Values.name }}e{{ else }}n{{ end }}", "e"),
    ("{{ with .Values.empty }}y{{ else }}{{ .Values.name }}{{ end }}", "web"),
    ("{{ with .Values.map }}{{ .a }}{{ end }}", "1"),
    ("{{ with $n := .Values.name }}{{ $n }}{{ . }}{{ end }}", "webweb"),
    ("{{ range .Values.list }}{{ .name }},{{ end }}", "one,two,"),
    ("{{ range $i, $one := .Values.list }}{{ $i }}{{ $one.name }},{{ end }}", "0one,1two,"),
    ("{{ range $k, $v := .Values.map }}{{ $k }}={{ $v }};{{ end }}", "a=1;b=x;"),
    ("{{ range .Values.none }}x{{ else }}nothing{{ end }}", "nothing"),
    ("{{ $a := 1 }}{{ if true }}{{ $a = 2 }}{{ $b := 3 }}{{ $b }}{{ end }}{{ $a }}", "32"),
    ("{{ .Values.name | printf `%s-%s` `a` | quote }}", '"a-web"'),
    ("{{ and .Values.name .Values.missing }}|{{ or .Values.missing .Values.name }}", "|web"),
    ("{{ and .Values.missing (fail `never asked`) }}", ""),
    ("{{ eq .Values.name `api` `web` }} {{ ne .Values.name `api` }}", "true true"),
    ("{{ gt (int .Values.count) 2 }} {{ len .Values.list }}", "true 2"),
    ("{{ .Values.missing | default `d` }} {{ .Values.name | default `d` }}", "d web"),
    ("{{ join `,` .Values.words }} {{ `abcdef` | trunc 3 | trimSuffix `c` }}", "x,z ab"),
    ("{{ toYaml .Values.map | indent 2 }}", "  a: 1\n  b: x"),
    ("m:{{ toYaml .Values.words | nindent 2 }}", "m:\n  - x\n  - z"),
    ("{{ ternary `a` `b` .Values.yes }} {{ hasKey .Values.map `a` }}", "a true"),
    ("{{ (dict `k` `v`).k }} {{ index (list 1 2) 1 }} {{ lower `AB` }}", "v 2 ab"),
    ("{{ quote .Values.count }} {{ squote .Values.name }}", "\"3\" 'web'"),
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
    assert render('{{ include "item" (dict "a" "b") }}', helpers) == "b"


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("\n{{ nonsense 1 }}", "t.yaml:2: the function nonsense is not known"),
        ("{{ .Values.missing.deeper }}", "there is no field 'deeper' in nothing"),
        ("{{ .Values.count.deeper }}", "there is no field 'deeper' in the Figure"),
        ("{{ $x }}", "$x is not declared"),
        ("{{ if .Values.count }}{{ end }}", "the number 3 is neither true nor false"),
        ("{{ eq .Values.count 3 }}", "is compared with int only"),
        ("{{ eq 1 `1` }}", "eq compares the int 1 with the str '1'"),
        ("{{ .Values.map }}", "cannot be written as it is: use toYaml"),
        ("{{ trunc `a` `b` }}", "trunc cannot do with"),
        ('{{ include "none" . }}', "no template 'none' is defined"),
        ("{{ range .Values.count }}{{ end }}", "the number 3 is neither true nor false"),
        ("{{ range $a := 5 }}{{ end }}", "range needs a list or a mapping"),
        ("{{ printf `%x` 1 }}", "printf cannot write the int 1 as %x"),
    ],
)
def test_what_cannot_be_carried_out_says_where_and_why(source, said):
    with pytest.raises(InstallError) as raised:
        render(source, count=3, map={"a": 1})
    assert said in str(raised.value)


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("{{ if true }}", "if has no end at the end of the file"),
        ("a{{ end }}", "there is nothing that end would end"),
        ("{{ .A", "an action has no end"),
        ("{{ ~ }}", "this is no token: '~ }}'"),
        ("{{ range .a }}{{ break }}{{ end }}", "break is not known here"),
        ("{{ .a | .b }}", "behind a pipe there must be a function"),
        ("{{ .a.b 1 }}", "methods are not known"),
        ("{{ else }}", "there is nothing that else would end"),
        ("{{ define name }}{{ end }}", "define needs a name between quotes"),
        ("{{ ) }}", "')' stands where a value is expected"),
        ("{{ (1 }}", "stands where a pipe or an end is expected"),
        ('{{ "a\\xff" }}', "an escape in"),
        ("{{/* a */ x }}", "a comment must be all that stands between its braces"),
        ("{{ $ := 1 }}", "$ cannot be given a value"),
    ],
)
def test_what_is_not_of_the_subset_is_refused_where_it_stands(source, said):
    with pytest.raises(InstallError) as raised:
        Templates({"t.yaml": source})
    assert "t.yaml:1: " in str(raised.value)
    assert said in str(raised.value)


@pytest.mark.parametrize(
    "source", ["{{ fail `no such thing` }}", "{{ required `no such thing` .a }}"]
)
def test_a_template_may_refuse_values(source):
    with pytest.raises(ConfigError, match="no such thing"):
        render(source)


def test_a_template_that_includes_itself_ends():
    with pytest.raises(InstallError, match="includes itself without end"):
        render('{{ include "a" . }}', '{{ define "a" }}{{ include "a" . }}{{ end }}')
