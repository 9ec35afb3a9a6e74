import logging
import re
from dataclasses import replace

from grpo_cli.analysis.diagnosis import diagnosis
from grpo_cli.analysis.diagnosis.diagnosis import RULES, diagnose, examine
from grpo_cli.analysis.diagnosis.history import History
from grpo_cli.recipe.training import StoppingRule
from tests.histories import make_history, make_recipe

SICK = {
    "reward": [0.5] * 12,
    "frac_reward_zero_std": [0.9] * 12,
    "completions/clipped_ratio": [0.95] * 12,
    "time/sampling": [99.0] * 12,
    "time/learning": [1.0] * 12,
}


def test_the_worst_comes_first():
    found = diagnose(make_history(SICK))
    assert [each.rule for each in found] == ["truncation", "no_signal", "sampling_starves"]
    assert [each.level for each in found] == ["error", "warning", "note"]


def test_some_rules_alone_can_be_applied():
    assert [each.rule for each in diagnose(make_history(SICK), {"no_signal"})] == ["no_signal"]


def test_a_symptom_carries_what_its_rule_says():
    symptom = diagnose(make_history(SICK))[0]
    rule = next(each for each in RULES if each.name == "truncation")
    assert (symptom.metric, symptom.window, symptom.why) == (rule.metric, rule.window, rule.why)
    assert (symptom.threshold, symptom.source) == (rule.threshold, rule.source)
    assert str(symptom).startswith("truncation (step 12): 95% of the completions")


def test_rules_that_could_not_look_say_why():
    found = examine(make_history(SICK))
    assert found.skipped["entropy_collapse"] == ("entropy not logged", False)
    assert found.skipped["early_peak"] == ("12 of 30 records", True)
    assert found.skipped["kl_runaway"] == ("no KL is computed with `training.beta: 0`", False)
    assert "truncation" not in found.skipped
    told = found.as_json()
    assert told["rules"] == len(RULES)
    assert told["not_looked"] == {name: skip.reason for name, skip in found.skipped.items()}
    assert told["symptoms"][0]["rule"] == "truncation"
    assert [each.rule for each in found.errors] == ["truncation"]


def test_a_symptom_arises_with_the_record_that_fills_its_window():
    history, first = History(make_recipe()), {}
    for step in range(1, 40):
        cut = 0.2 if step < 15 else 0.9
        history.metrics.extend([{"event": "train", "step": step, "completions/clipped_ratio": cut}])
        for each in diagnose(history):
            first.setdefault(each.rule, step)
    # Seven of the last ten; the share rises until the window is full of it.
    assert first == {"truncation": 19}


def test_a_rule_that_fails_takes_nothing_down_and_is_not_hidden(monkeypatch, caplog):
    def no_signal(history):
        raise ZeroDivisionError("of a bug")

    broken = replace(next(each for each in RULES if each.name == "no_signal"), check=no_signal)
    monkeypatch.setattr(diagnosis, "RULES", (broken, *RULES))
    with caplog.at_level(logging.WARNING):
        found = diagnose(make_history(SICK))
    assert [each.rule for each in found] == ["truncation", "no_signal", "sampling_starves"]
    assert "the rule no_signal failed" in caplog.text
    assert "of a bug" in caplog.text


def test_the_recipe_knows_the_rules_that_may_stop_a_run():
    idle = {"slow_reward", "slow_tool", "sampling_starves", "held_out_collapse", "held_out_loss"}
    assert {*StoppingRule.__args__} == {rule.name for rule in RULES} - idle


def test_of_one_level_causes_come_before_what_comes_of_them():
    lost = {
        "learning_rate": [1.0] * 40,
        "entropy": [6.2] + [0.001] * 39,
        "grad_norm": [20.0] * 40,
        "completions/repeated_share": [1.0] * 40,
        "completions/clipped_ratio": [1.0] * 40,
        "frac_reward_zero_std": [0.9] * 40,
        "reward": [0.1] * 40,
    }
    found = diagnose(make_history(lost, make_recipe(training={"learning_rate": 1.0})))
    assert [each.rule for each in found] == [
        "too_high_learning_rate",
        "entropy_collapse",
        "truncation",
        "gradient_spike",
        "no_signal",
        "repeated_answers",
    ]
    rates = {rate for each in found for rate in re.findall(r"learning_rate: ([^`]+)`", each.fix)}
    assert rates == {"1e-06"}, "they all propose the same"
    assert "it began at 6.2" in found[1].seen


def test_commands_name_the_run_that_is_looked_at():
    flat = {"frac_reward_zero_std": [1.0] * 10, "reward": [0.5] * 10}
    assert "`grpo rewards test RECIPE`" in diagnose(make_history(flat))[0].fix
    known = make_history(flat, source="runs/a b/1/resolved.json")
    assert "`grpo rewards test 'runs/a b/1/resolved.json'`" in diagnose(known)[0].fix


def test_every_rule_tells_its_source_or_that_it_is_ours():
    for rule in RULES:
        cited = any(
            mark in rule.source for mark in ("ours: ", "ours, ", "github.com", "by definition")
        )
        assert cited, rule.name
        assert rule.why.endswith("."), rule.name
        assert not rule.threshold.endswith("."), rule.name
        assert rule.min_records >= min(rule.window, 10), rule.name
