"""Where an export may go, and what it may take the place of."""

import json

import pytest

from grpo_cli.errors import UsageError
from grpo_cli.exporting import exporting
from grpo_cli.exporting.exporting import KIND, RECORD, ExportPlan, check_free, give_name
from grpo_cli.exporting.request import ExportRequest
from grpo_cli.models import shards
from grpo_cli.recipe.recipe import Recipe
from tests.run_folders import PLAIN


def exported(folder, text="old"):
    folder.mkdir()
    (folder / RECORD).write_text(json.dumps({"kind": KIND}))
    (folder / "weights").write_text(text)
    return folder


@pytest.mark.parametrize("force", [False, True])
def test_only_exports_are_replaced_and_only_when_forced(tmp_path, force):
    (tmp_path / "empty").mkdir()
    check_free(tmp_path / "empty", force=force)
    check_free(tmp_path / "new", force=force)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("a")
    with pytest.raises(UsageError, match="not an export by grpo"):
        check_free(tmp_path / "mine", force=force)
    (tmp_path / "file").write_text("x")
    with pytest.raises(UsageError, match="is a file"):
        check_free(tmp_path / "file", force=force)
    old = exported(tmp_path / "old")
    if force:
        check_free(old, force=True)
    else:
        with pytest.raises(UsageError, match="or --force"):
            check_free(old, force=False)


def test_a_finished_export_takes_the_place_of_the_old_one(tmp_path):
    old, new = exported(tmp_path / "old"), exported(tmp_path / "new", "new")
    give_name(new, old, force=True)
    assert (old / "weights").read_text() == "new"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["old"]


def test_what_came_to_be_there_in_the_meantime_stays(tmp_path):
    new = exported(tmp_path / "new", "new")
    (tmp_path / "target").mkdir()
    (tmp_path / "target" / "thesis.txt").write_text("a")
    for force in (False, True):
        with pytest.raises(UsageError):
            give_name(new, tmp_path / "target", force=force)
    assert (tmp_path / "target" / "thesis.txt").read_text() == "a"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["new", "target"]


def test_weights_gathered_from_shards_keep_the_template_of_the_training(tmp_path, monkeypatch):
    monkeypatch.setattr(exporting, "is_sharded", lambda _: True)
    monkeypatch.setattr(shards, "merge_shards", lambda *_, **__: None)
    (tmp_path / "chat_template.jinja").write_text("trained")
    about = {"name": "checkpoint-2", "is_adapter": False, "format": "safetensors", "is_text": False}
    about |= {"dtype": "float32", "gguf_type": None, "max_shard_size": "5GB"}
    recipe = Recipe.model_validate(PLAIN)
    request = ExportRequest(run=tmp_path, recipe=recipe, trained=tmp_path, **about)
    flags = {"force": False, "verify": False, "may_refine": False, "converter": None}
    plan = ExportPlan(request, tmp_path / "out", **flags)
    with exporting.whole_request(plan, print) as whole:
        assert whole.trained != tmp_path
        assert whole.tokenizer.chat_template == "trained"
