"""A model's weights are known again, and other ones are not taken for them."""

import os

from grpo_cli.models.fingerprint import fingerprint_model
from grpo_cli.recipe.model import ModelConfig


def test_other_weights_have_another_fingerprint(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    weights = tmp_path / "model.safetensors"
    first = os.urandom(1_000_000)
    weights.write_bytes(first)
    model = ModelConfig(path=str(tmp_path))
    known = fingerprint_model(model)
    (tmp_path / "README.md").write_text("a card")
    assert fingerprint_model(model) == known
    for other in (os.urandom(1_000_000), first + b"x", first[:-1] + bytes([first[-1] ^ 1])):
        weights.write_bytes(other)
        assert fingerprint_model(model) != known


def test_a_model_on_the_hub_is_known_by_its_commit(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    model = ModelConfig(path="org/name")
    assert fingerprint_model(model) is None
