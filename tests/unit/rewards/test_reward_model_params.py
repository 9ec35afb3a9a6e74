"""What can be told of a reward model without loading it; this runs without torch."""

import json
import math

import pytest
from pydantic import ValidationError

from grpo_cli.rewards.kinds.model import ModelParams, _transform

LLAMA = {"architectures": ["LlamaForSequenceClassification"], "id2label": {"0": "LABEL_0"}}
THREE = {**LLAMA, "id2label": {"0": "bad", "10": "good", "2": "neutral"}}


def faults_of(folder, config=None, **params):
    if config is not None:
        folder.mkdir(exist_ok=True)
        text = config if isinstance(config, str) else json.dumps(config)
        (folder / "config.json").write_text(text)
    return ModelParams(path=str(folder), **params).problems()


def only(faults):
    [issue] = faults
    return issue.path, f"{issue.seen}. Fix: {issue.fix}"


def test_a_reward_models_folder_is_fine(tmp_path):
    assert faults_of(tmp_path / "rm", LLAMA) == []
    assert faults_of(tmp_path / "rm", THREE, label="good", output="softmax") == []
    assert faults_of(tmp_path / "rm", THREE, label=2) == []
    assert faults_of(tmp_path / "rm", {**LLAMA, "architectures": None}) == []


@pytest.mark.parametrize("path", ["gpt2", "Skywork/Skywork-Reward-V2-Qwen3-0.6B", "a/b_c.d"])
def test_hub_ids_are_left_to_the_hub(path):
    assert ModelParams(path=path, revision="main").problems() == []


@pytest.mark.parametrize("path", ["a/b/c", "a b", "hf://a/b", "a/", "-a/b"])
def test_what_is_neither_folder_nor_hub_id_is_refused(path):
    assert only(ModelParams(path=path).problems())[0] == "path"


def test_missing_folders_are_told_apart(tmp_path):
    (tmp_path / "reward_model").mkdir()
    path, text = only(faults_of(tmp_path / "reward_modle"))
    assert path == "path"
    assert "there is no folder" in text
    assert "did you mean reward_model?" in text
    assert "there is no folder" in only(ModelParams(path="./nowhere/at/all").problems())[1]
    assert "holds no config.json" in only(faults_of(tmp_path / "reward_model"))[1]
    (tmp_path / "reward_model" / "adapter_config.json").write_text("{}")
    assert "LoRA adapter" in only(faults_of(tmp_path / "reward_model"))[1]
    (tmp_path / "rm.bin").write_text("")
    assert "holds no config.json" in only(faults_of(tmp_path / "rm.bin"))[1]


@pytest.mark.parametrize("config", ["{", "[]", "\0"])
def test_broken_config_is_refused(tmp_path, config):
    assert "is not JSON" in only(faults_of(tmp_path / "rm", config))[1]


def test_a_language_model_is_refused(tmp_path):
    path, text = only(faults_of(tmp_path / "lm", {"architectures": ["LlamaForCausalLM"]}))
    assert path == "path"
    assert "LlamaForCausalLM" in text
    assert "random weights" in text


def test_own_code_needs_consent(tmp_path):
    config = {
        "architectures": ["GatedReward"],
        "auto_map": {"AutoModelForSequenceClassification": "gated.GatedReward"},
        "num_labels": 1,
    }
    path, text = only(faults_of(tmp_path / "rm", config))
    assert path == "trust_remote_code"
    assert "trust_remote_code: true" in text
    assert faults_of(tmp_path / "rm", config, trust_remote_code=True) == []


@pytest.mark.parametrize(
    ("params", "path", "words"),
    [
        ({}, "label", "3 labels (bad, neutral, good); none is chosen"),
        ({"label": 3}, "label", "none is 3. Fix: use a name, or 0 to 2"),
        ({"label": -1}, "label", "none is -1"),
        ({"label": "Good"}, "label", "none is 'Good'. Fix: label: good"),
        ({"label": "xyz"}, "label", "(bad, neutral, good)"),
    ],
)
def test_labels_are_checked_against_the_config(tmp_path, params, path, words):
    found, text = only(faults_of(tmp_path / "rm", THREE, **params))
    assert found == path
    assert words in text


def test_transformers_leaves_two_default_labels_out(tmp_path):
    config = {"architectures": LLAMA["architectures"]}
    assert "2 labels (LABEL_0, LABEL_1)" in only(faults_of(tmp_path / "rm", config))[1]
    assert faults_of(tmp_path / "rm", config, label="LABEL_1") == []


def test_softmax_over_one_label_is_refused(tmp_path):
    path, text = only(faults_of(tmp_path / "rm", LLAMA, output="softmax"))
    assert path == "output"
    assert "always 1" in text


@pytest.mark.parametrize(
    "params",
    [
        {"batch_size": 0},
        {"batch_size": True},
        {"max_length": 0},
        {"device": "gpu"},
        {"dtype": "int8"},
        {"label": True},
        {"label": 0.5},
        {"output": "probability"},
        {"path": ""},
        {"max_lenght": 5},
    ],
)
def test_parameters_out_of_range_are_refused(params):
    with pytest.raises(ValidationError):
        ModelParams.model_validate({"path": "a/b", **params})


@pytest.mark.parametrize(("written", "read"), [(1, 1), ("1", "1"), ("good", "good"), (None, None)])
def test_labels_keep_their_type(written, read):
    assert ModelParams(path="a/b", label=written).label == read


@pytest.mark.parametrize("logit", [-2000.0, -1.5, 0.0, 1.5, 2000.0])
def test_outputs_do_not_overflow(logit):
    assert _transform([logit], 0, "logit") == logit
    sigmoid = _transform([logit], 0, "sigmoid")
    assert 0 <= sigmoid <= 1
    assert _transform([logit, 0.0], 0, "softmax") == pytest.approx(sigmoid)
    assert sigmoid + _transform([-logit], 0, "sigmoid") == pytest.approx(1)


@pytest.mark.parametrize("output", ["logit", "sigmoid", "softmax"])
def test_nan_stays_nan(output):
    assert math.isnan(_transform([math.nan, 0.0], 0, output))
