import json

from grpo_cli.cli import views
from grpo_cli.report.summary import read_summary
from tests.run_folders import make_run


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
    views.print_summary(read_summary(folder))
    printed = " ".join(capsys.readouterr().out.split())
    assert "held-out accuracy (math) 0.250 → 0.750 4 held-out prompts" in printed
    assert "held-out mean (math) 0.250 → 0.800" in printed
    assert "held-out mean (length) -1.000 → -1.000" in printed
    assert str(folder.model) in printed
