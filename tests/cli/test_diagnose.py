"""`grpo diagnose` on folders as runs leave them, whole and damaged."""

import json
import shutil

import pytest

from grpo_cli.analysis.diagnosis.diagnosis import RULES
from grpo_cli.cli.app import make_app, run_guarded
from grpo_cli.runs.folder import RunFolder, StatusFile
from grpo_cli.runs.metrics import append_record
from tests.histories import read_recorded
from tests.run_folders import make_finished_run


@pytest.fixture
def diagnose(capsys):
    def run(*arguments):
        words = ["diagnose", *map(str, arguments)]
        code = run_guarded(lambda: make_app()(words, standalone_mode=False))
        told = capsys.readouterr()
        return code, told.out, told.err

    return run


def make_recorded_run(tmp_path, name) -> RunFolder:
    recipe, records = read_recorded(name)
    folder = RunFolder(tmp_path / name)
    folder.path.mkdir()
    folder.write_recipe(recipe)
    for record in records:
        append_record(folder.metrics, record)
    return folder


def test_the_verdict_comes_first_and_every_finding_says_what_to_change(tmp_path, diagnose):
    run = make_recorded_run(tmp_path, "clip")
    code, out, err = diagnose(run.path)
    assert code == 0, "a warning is not an error"
    lines = out.splitlines()
    assert lines[0] == "! 1 problem"
    assert lines[2] == "! clip_share  at step 48"
    assert (
        lines[3] == "  44% of the tokens of the last 10 records had a clipped ratio (at most 30%)"
    )
    assert lines[5] == "  Fix: `training.num_iterations: 4` (it is 8)"
    assert "skipped: kl_runaway (no KL is computed with `training.beta: 0`)" in lines
    assert err == ""


def test_an_error_ends_with_1_also_of_a_folder_that_was_copied(tmp_path, diagnose):
    run = make_recorded_run(tmp_path, "constant")
    copy = shutil.copytree(run.path, tmp_path / "elsewhere" / "copy")
    code, out, _ = diagnose(copy, "--json")
    assert code == 1
    told = json.loads(out)
    assert told["run"] == str(copy)
    assert [each["rule"] for each in told["symptoms"]] == ["no_signal", "truncation"]
    assert told["symptoms"][0].keys() >= {
        "level",
        "step",
        "seen",
        "why",
        "fix",
        "threshold",
        "source",
    }
    assert told["not_looked"]["early_peak"] == "15 of 30 records"


def test_a_failed_run_is_told_with_its_fix_even_if_no_rule_finds_anything(tmp_path, diagnose):
    run = make_recorded_run(tmp_path, "quickstart_16")
    StatusFile(run.status).update(state="failed", reason="RuntimeError: nan\nFix: a lower rate")
    code, out, _ = diagnose(run.path)
    assert code == 1
    assert out.startswith("✗ failed: RuntimeError: nan\nFix: a lower rate\n")
    assert "no problems" not in out


def test_a_healthy_run_is_called_so(tmp_path, diagnose):
    code, out, _ = diagnose(make_recorded_run(tmp_path, "quickstart_16").path)
    assert code == 0
    assert out.startswith("✓ no problems found (")
    code, out, _ = diagnose(make_recorded_run(tmp_path, "learned").path)
    assert code == 0
    assert out.splitlines()[0].endswith("skipped); 1 note")


def test_a_run_that_says_one_thing_to_every_held_out_prompt_is_not_called_healthy(
    tmp_path, diagnose
):
    run = make_recorded_run(tmp_path, "quickstart_16")
    run.evaluations.mkdir()
    for when, texts in (("before", range(12)), ("after", [""] * 12)):
        rows = [
            {"group": row, "row": row, "prompt": str(row), "text": str(text), "tokens": 1,
             "clipped": False, "rewards": {"r": 0.1}, "reasons": {}, "failed": [], "answers": {},
             "total": 0.1}
            for row, text in enumerate(texts)
        ]  # fmt: skip
        (run.evaluations / f"{when}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    code, out, _ = diagnose(run.path)
    assert code == 1
    assert out.startswith("✗ 1 problem\n\n✗ held_out_collapse  at step ")
    assert "100% of the held-out answers to 12 prompts are empty" in out


def test_a_run_that_has_logged_nothing_yet_is_not_called_healthy(tmp_path, diagnose):
    run = make_finished_run(tmp_path, rewards=[])
    run.metrics.unlink(missing_ok=True)
    code, out, _ = diagnose(run.path)
    assert code == 0
    assert out.startswith("· too little was logged to check any of 36 rules\n")


def test_the_rules_are_listed_without_a_run(diagnose):
    code, out, _ = diagnose("--rules")
    assert code == 0
    assert all(rule.name in out and rule.threshold in out for rule in RULES)
    told = json.loads(diagnose("--rules", "--json")[1])
    assert [each["name"] for each in told] == [rule.name for rule in RULES]
    assert all(each["source"] and each["why"] for each in told)


def test_what_is_no_run_is_said(tmp_path, diagnose, monkeypatch):
    # Runs may lie where the tests are started.
    monkeypatch.chdir(tmp_path)
    assert diagnose()[0] == 2
    code, _, err = diagnose(tmp_path)
    assert code == 2
    assert "is not a run folder: it has no resolved.json" in err
    code, _, err = diagnose(tmp_path / "no" / "such")
    assert code == 2
    damaged = make_finished_run(tmp_path)
    damaged.resolved.write_text("{}")
    code, _, err = diagnose(damaged.path)
    assert code == 2
    assert "is damaged" in err


def test_what_a_run_says_stays_text(tmp_path, diagnose):
    run = make_recorded_run(tmp_path, "slow")
    told = json.loads(run.resolved.read_text())
    told["recipe"]["rewards"][0]["name"] = "b"
    run.resolved.write_text(json.dumps(told))
    text = run.metrics.read_text().replace("rewards/slow/", "rewards/[bold]x[/nope]/")
    run.metrics.write_text(text)
    assert "scoring with `[bold]x[/nope]` took" in diagnose(run.path)[1]
