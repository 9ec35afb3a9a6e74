"""What is known of a model without loading it: a fingerprint of its weights, and its licence."""

import os
import struct

import pytest

from grpo_cli.exporting.card import read_licence
from grpo_cli.models.source import fingerprint_model
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


def text(value):
    return struct.pack("<Q", len(value)) + value.encode()


def test_a_gguf_file_says_it_in_its_metadata(tmp_path):
    head = b"GGUF" + struct.pack("<IQQ", 3, 0, 2)
    other = text("general.name") + struct.pack("<I", 8) + text("general")
    said = text("general.license") + struct.pack("<I", 8) + text("apache-2.0")
    path = tmp_path / "model.gguf"
    path.write_bytes(head + other + said)
    assert read_licence(ModelConfig(path=str(path))) == "apache-2.0"
    path.write_bytes(head + other)
    assert read_licence(ModelConfig(path=str(path))) is None


@pytest.mark.parametrize(
    ("card", "licence"),
    [
        ("---\nlicense: mit\n---\n# A model", "mit"),
        ("# A model", None),
        ("---\nlicense: [mit]\n---\n", None),
        ("---\n: {\n---\n", None),
        (None, None),
    ],
)
def test_a_folder_says_it_in_its_card(tmp_path, card, licence):
    (tmp_path / "config.json").write_text("{}")
    if card is not None:
        (tmp_path / "README.md").write_text(card)
    assert read_licence(ModelConfig(path=str(tmp_path))) == licence


def test_a_model_that_was_never_fetched_says_nothing():
    assert read_licence(ModelConfig(path="org/not-here")) is None
