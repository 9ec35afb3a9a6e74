"""Tokens a second, as records tell them."""

from types import SimpleNamespace

from grpo_cli.training.callbacks import RunCallback


def test_a_record_without_new_tokens_has_no_pace():
    callback = RunCallback(SimpleNamespace(recipe=None))
    callback._stepping_s = 2.0
    assert callback._tokens_per_s(100.0) == 50.0
    # Resumed in the middle of a record, whose sums the checkpoint holds, and nothing was sampled since.
    callback._stepping_s = 1.0
    assert callback._tokens_per_s(100.0) is None
