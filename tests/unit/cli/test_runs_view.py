import io
import json
import re
from pathlib import Path
from types import SimpleNamespace

from rich.console import Console
from rich.table import Table
from rich.text import Text

from grpo_cli.checks.recipe import check_recipe
from grpo_cli.cli import check, summary
from grpo_cli.cli.output import print_json, print_marked, print_problems, print_words, stdout
from grpo_cli.cli.runs_view import print_overview
from grpo_cli.issues import Issue
from grpo_cli.report.summary import RunReport
from grpo_cli.runs.files import write_json
from tests.recipe_texts import GOOD, write_recipe
from tests.run_folders import make_finished_run, make_run


def test_a_summary_says_accuracy_before_and_after_and_where_the_model_is(tmp_path, capsys):
    folder = make_run(tmp_path)
    folder.evaluations.mkdir()
    folder.model.mkdir()
    for when, accuracy, mean in (("before", 0.25, 0.25), ("after", 0.75, 0.8)):
        result = {
            "prompts": 4,
            "rewards": {"math": mean, "length": -1.0},
            "accuracy": {"math": accuracy},
        }
        (folder.evaluations / f"{when}.json").write_text(json.dumps(result))
    summary.print_summary(RunReport(folder))
    printed = " ".join(capsys.readouterr().out.split())
    assert "held-out accuracy (math) 0.250 → 0.750 4 held-out prompts" in printed
    assert "held-out mean (math) 0.250 → 0.800" in printed
    assert "held-out mean (length) −1.000 → −1.000" in printed
    assert str(folder.model) in printed


def test_a_summary_says_whether_the_run_lies_where_it_is_expected(tmp_path, capsys):
    block = {
        "metrics": [
            {"metric": "reward", "step": 40, "band": [0.4, 0.6], "window": 4},
            {"metric": "accuracy/math", "step": 40, "band": [0.9623, 1.0]},
            {"metric": "kl", "step": 40, "band": [0, 1]},
        ],
        "measured": {"runs": ["sums/1"], "versions": {"trl": "1.15.0"}},
    }
    folder = make_finished_run(tmp_path, expect=block)
    summary.print_summary(RunReport(folder))
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    at = lines.index("expected reward at step 40: 0.500, inside 0.400 to 0.600")
    assert lines[at + 1 : at + 5] == [
        "expected accuracy/math at step 40: 0.8000, OUTSIDE 0.9623 to 1.0000",
        "expected kl at step 40: not logged",
        "measured with other versions (trl 1.15.0, here 1.16.0)",
        "the bands come from one run: a guess at its own noise, not at what another seed changes",
    ]
    told = RunReport(folder).summary_json()["expected"]
    assert [each["outcome"] for each in told["metrics"]] == ["inside", "outside", "not logged"]
    assert told["differs"] == {"versions": ["trl 1.15.0, here 1.16.0"]}


def test_a_summary_of_a_recipe_that_expects_nothing_says_nothing_of_it(tmp_path, capsys):
    folder = make_finished_run(tmp_path)
    summary.print_summary(RunReport(folder))
    assert "expected" not in capsys.readouterr().out
    assert RunReport(folder).summary_json()["expected"] is None


def test_a_run_that_stopped_early_has_not_reached_its_band(tmp_path, capsys):
    block = {"metrics": [{"metric": "reward", "step": 40, "band": [0.4, 0.6]}]}
    folder = make_finished_run(tmp_path, rewards=[0.5] * 20, state="stopped", expect=block)
    summary.print_summary(RunReport(folder))
    assert "expected  reward at step 40: not reached (20 of 40)" in capsys.readouterr().out


def test_text_breaks_at_words_on_a_terminal_and_not_at_all_in_a_file():
    told = Text("word " * 60 + "end")
    shown = {}
    for terminal in (True, False):
        out = io.StringIO()
        print_words(Console(file=out, width=40, force_terminal=terminal), told)
        shown[terminal] = out.getvalue().splitlines()
    assert shown[False] == [told.plain]
    assert max(map(len, shown[True])) <= 40
    assert {word for line in shown[True] for word in line.split()} == {"word", "end"}


def test_findings_stand_under_the_mark_of_their_level(capsys):
    print_marked(stdout(), [("error", Text("bad")), ("warning", Text("less")), ("note", Text("x"))])
    assert capsys.readouterr().out == "✗ bad\n! less\n· x\n"


def test_nothing_that_a_terminal_obeys_is_printed(capsys):
    shown = Table("column \x1b[2J")
    shown.add_row("می\u200cخواهم \x9b31m\u202e", Text("ends\x07"))
    stdout().print(shown)
    print_problems([Issue("was \x1b]52;c;x\x07", "mend \x1b[A it")])
    print_json({"text": "\x1b[2J \x9b31m"})
    printed = capsys.readouterr()
    assert "می\u200cخواهم 31m" in printed.out
    assert "mend [A it" in printed.err
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202e]", printed.out + printed.err)
    assert json.loads(printed.out[printed.out.index("{") :]) == {"text": "\x1b[2J \x9b31m"}


def test_names_of_users_are_printed_as_they_are(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    text = GOOD.replace('answer: "4"}', 'answer: "4", ":x:[red]": 1}')
    path = write_recipe(Path(), text, "a:100:[i]b.yaml")
    check._print_check(check_recipe(path), there=False)
    printed = capsys.readouterr().out
    for name in ("✓ a:100:[i]b.yaml passes", ":x:[red]"):
        assert name in printed


def test_prompts_of_a_mixture_are_those_of_an_epoch(tmp_path, capsys):
    run = make_finished_run(tmp_path)
    sources = {"counts": {"train_rows": 16}, "words": {"train_rows": 8}}
    data = {"train_rows": 62, "eval_rows": 18, "sources": sources}
    write_json(run.manifest, {**run.read_manifest(), "data": data})
    print_overview(RunReport(run))
    assert "inline: 62 prompts an epoch, 18 held out" in capsys.readouterr().out
    mixture = SimpleNamespace(shares={"counts": 0.25, "words": 0.75})
    shown = check._describe_sources(mixture, SimpleNamespace(sources=(16, 8), train_rows=62))
    assert (
        shown == "counts 25% (16 rows, each about once), words 75% (8 rows, each about 5.8 times)"
    )


def test_an_overview_says_which_parts_of_the_fast_step_were_on(tmp_path, capsys):
    run = make_finished_run(tmp_path)
    print_overview(RunReport(run))
    assert "fast " not in capsys.readouterr().out
    for left_off, line in (
        ({}, "no_signal, shared_prompts, sampling"),
        (
            {"sampling": "its numbers differ"},
            "no_signal, shared_prompts; off: sampling (its numbers differ)",
        ),
    ):
        write_json(run.manifest, {**run.read_manifest(), "fast": {"left_off": left_off}})
        print_overview(RunReport(run))
        lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
        assert f"fast {line}" in lines
