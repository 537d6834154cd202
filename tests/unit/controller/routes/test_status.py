from kubetorch._version import __version__
from kubetorch.controller.routes import status


def test_what_there_is_none_of_is_0_rather_than_missing():
    text = status.metrics_text([], started=12.5)
    assert f'kubetorch_controller_build_info{{version="{__version__}"}} 1' in text
    assert 'kubetorch_controller_workloads{status="Failed"} 0' in text
    assert "kubetorch_controller_pods_ready 0" in text
    assert "kubetorch_controller_start_time_seconds 12.5" in text


def test_each_figure_says_what_it_is_and_the_text_ends_with_a_line_end():
    lines = status.metrics_text([], started=1).split("\n")
    names = {line.split("{")[0].split(" ")[0] for line in lines if line and line[0] != "#"}
    for name in names:
        assert any(line.startswith(f"# HELP {name} ") for line in lines)
        assert f"# TYPE {name} gauge" in lines
    assert lines[-1] == ""
