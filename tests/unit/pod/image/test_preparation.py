from kubetorch.pod.image.preparation import RanSteps, StepRecords
from kubetorch.specs.image import PipStep, RunStep

A, B, FORCED = PipStep("a"), PipStep("b"), RunStep("c", force=True)


def test_a_pod_that_starts_has_run_nothing_and_has_no_environments(tmp_path):
    leftover_folder = tmp_path / "own" / "1"
    leftover_folder.mkdir(parents=True)
    records = StepRecords(tmp_path)
    assert not leftover_folder.exists()
    assert records.todo(1, (A, B)).run == (A, B)


def test_what_was_run_is_not_run_again(tmp_path):
    records = StepRecords(tmp_path)
    records.last_run = RanSteps(steps=(A,), generation=1)
    assert records.todo(2, (A, B)).run == (B,)
    assert records.todo(2, (A,)).run == ()


def test_a_forced_step_runs_once_for_each_generation(tmp_path):
    records = StepRecords(tmp_path)
    records.last_run = RanSteps(steps=(A, FORCED), generation=1)
    assert records.todo(1, (A, FORCED)).run == ()
    assert records.todo(2, (A, FORCED)).run == (FORCED,)


def test_environments_go_when_no_worker_can_use_them_any_more(tmp_path):
    records = StepRecords(tmp_path)
    for _ in range(8):
        number = records.new_venv_number()
        records.private_venv(number).mkdir(parents=True)
        records.last_run = RanSteps(venv_number=number)
        records.use(records.private_venv(number))
    remaining_numbers = sorted(int(path.name) for path in (tmp_path / "own").iterdir())
    assert remaining_numbers == [5, 6, 7, 8]
