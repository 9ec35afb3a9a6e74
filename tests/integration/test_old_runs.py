"""Run folders that an earlier version wrote; `first_run.json` holds the files of one of the very first."""

import json
import shutil
from pathlib import Path

import pytest

from tests.integration.conftest import Workshop
from tests.tiny_models import make_tiny_model

FIRST = json.loads((Path(__file__).parent / "first_run.json").read_text(encoding="utf-8"))


@pytest.fixture
def old(tmp_path, chat_model):
    """The first run, as if it had been trained here."""
    workshop = Workshop(tmp_path, chat_model)
    run = tmp_path / "runs" / "tiny" / "1"
    for name, text in FIRST.items():
        path = run / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text.replace("{run}", str(run)).replace("{folder}", str(tmp_path)))
    shutil.copytree(chat_model, tmp_path / "model")
    make_tiny_model(run / "model", seed=1)
    return workshop


def test_a_run_of_the_first_version_is_summed_up(old):
    recipe = old.run / "resolved.json"
    done = old.grpo("train", recipe, "--resume-from", old.run)
    assert done.returncode == 0, done.stderr
    assert "nothing to resume" in done.stderr
    assert "completed: 2/2 steps" in done.stdout
    assert "held-out mean (length)  −0.400 → −0.200" in done.stdout


def test_a_run_of_the_first_version_is_measured(old):
    done = old.grpo("eval", old.run, "--json")
    assert done.returncode == 0, done.stderr
    assert list(json.loads(done.stdout)["subjects"]) == ["final", "base"]


def test_a_run_of_a_later_version_is_refused(old):
    told = json.loads((old.run / "resolved.json").read_text())
    (old.run / "resolved.json").write_text(json.dumps({**told, "schema_version": 99}))
    done = old.grpo("eval", old.run)
    assert done.returncode == 2
    assert "is of version 99" in done.stderr
