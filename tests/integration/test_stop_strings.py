"""Completions that end at stop strings: the tokens of `generate()`, whatever samples them, and not cut off."""

import json

import pytest
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig
from trl import GRPOConfig

from grpo_cli.environments.dialogue import Dialogue
from grpo_cli.fast.completions import sample_completions
from grpo_cli.fast.decoding import decode, read_decoding
from grpo_cli.fast.graph_decoding import decode_with_graphs
from grpo_cli.fast.tokens import build_reader
from grpo_cli.recipe.training import FastConfig
from grpo_cli.training.rollout.samplers import TokenSampler
from grpo_cli.training.trainer import RunTrainer
from tests.plain_rewards import scored_by
from tests.tiny_models import make_tiny_model

PROMPTS = ["one", "two and more", "one", "three", "four: x", "five"]
MOST = 24


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model of which a token may hold all, the beginning or the end of a stop string."""
    words = ["stop", "st", "topper", "las", "ing!", "\n\n"]
    path = tmp_path_factory.mktemp("stops")
    return make_tiny_model(path / "model", chat=False, vocab_words=words, seed=3)


@pytest.fixture(scope="module")
def model(folder):
    return AutoModelForCausalLM.from_pretrained(folder).eval()


@pytest.fixture(scope="module")
def tokenizer(folder):
    return AutoTokenizer.from_pretrained(folder, padding_side="left")


@pytest.fixture(scope="module")
def config(tokenizer):
    ids = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": [tokenizer.eos_token_id]}
    return GenerationConfig(max_new_tokens=MOST, do_sample=False, **ids, disable_compile=True)


def generate(model, tokenizer, config, strings=None):
    """What `generate()` appends to the prompts, without padding, with its own way of stopping."""
    inputs = tokenizer(PROMPTS, return_tensors="pt", padding=True)
    more = {"stop_strings": strings, "tokenizer": tokenizer} if strings else {}
    rows = model.generate(**inputs, generation_config=config, **more)
    rows = rows[:, inputs["input_ids"].shape[1] :].tolist()
    return [[token for token in row if token != tokenizer.pad_token_id] for row in rows]


@pytest.fixture(scope="module")
def strings(model, tokenizer, config):
    """Texts that the model writes, in the middle of tokens and over several, at different times."""
    plain = [tokenizer.decode(row) for row in generate(model, tokenizer, config)]
    texts = [text[len(text) // 3 :][1:4] for text in plain]
    return sorted({text for text in texts if "\N{REPLACEMENT CHARACTER}" not in text and text})[:2]


@pytest.fixture(scope="module")
def expected(model, tokenizer, config, strings):
    rows = generate(model, tokenizer, config, strings)
    lengths = {len(row) for row in rows}
    assert len(lengths) > 1
    assert min(lengths) < MOST
    return rows


@pytest.mark.parametrize("sample", [decode, decode_with_graphs])
def test_the_fast_samplers_end_where_generate_does(
    model, tokenizer, config, strings, expected, sample
):
    stops = build_reader(tokenizer, [], stop_strings=strings).stop_strings
    prompts = tokenizer(PROMPTS)["input_ids"]
    sampled = sample(model, prompts, read_decoding(config, config, stops))
    assert sampled.completion_ids == expected
    assert [len(row) for row in sampled.entropies] == [len(row) for row in expected]


@pytest.mark.parametrize("fast", [True, False])
def test_what_is_measured_ends_there_and_is_not_cut_off(model, tokenizer, strings, expected, fast):
    groups = sample_completions(
        model,
        tokenizer,
        PROMPTS,
        max_new_tokens=MOST,
        temperature=0,
        stop_strings=strings,
        fast=FastConfig(sampling=fast),
    )
    assert [list(each.token_ids) for (each,) in groups] == expected
    for (each,) in groups:
        assert each.clipped == (not any(string in each.text for string in strings))


def count_tokens(completion_ids, **_):
    return [float(len(ids)) for ids in completion_ids]


def open_trainer(folder, tmp_path, strings, **settings):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    options = {"num_generations": 2, "per_device_train_batch_size": 12, "report_to": []}
    options |= {"max_completion_length": MOST, "use_cpu": True, "bf16": False, **settings}
    return RunTrainer(
        model=AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32),
        **scored_by(
            RunTrainer,
            count_tokens,
            reader=build_reader(tokenizer, [tokenizer.eos_token_id], stop_strings=strings),
        ),
        args=GRPOConfig(output_dir=str(tmp_path), **options),
        train_dataset=Dataset.from_list([{"prompt": prompt} for prompt in PROMPTS]),
        processing_class=tokenizer,
    )


@pytest.mark.parametrize("how", ["trl", "fast", pytest.param("batching", marks=pytest.mark.slow)])
def test_training_samples_the_tokens_of_generate(tmp_path, folder, strings, expected, how):
    settings = {"generation_kwargs": {"do_sample": False}}
    if how == "batching":
        settings["use_transformers_continuous_batching"] = True
    trainer = open_trainer(folder, tmp_path, strings, **settings)
    trainer._fast = FastConfig(sampling=how == "fast")
    sampler = TokenSampler(trainer, trainer.reader)
    sampled = sampler.sample(trainer._tokenizer(PROMPTS)["input_ids"], group_size=1)
    assert [list(row) for row in sampled.ids] == expected


def test_completions_that_ended_at_a_stop_string_are_counted_and_learned_from(
    tmp_path, folder, strings, expected
):
    masked = {"mask_truncated_completions": True, "generation_kwargs": {"do_sample": False}}
    trainer = open_trainer(folder, tmp_path, strings, **masked)
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = 1
    batch = trainer.make_batch([{"prompt": prompt} for prompt in PROMPTS for _ in range(2)])
    learned = (batch["completion_mask"] * batch["tool_mask"]).sum(1).tolist()
    ended = [trainer.reader.is_terminated(row) for row in expected]
    assert True in ended
    assert False in ended
    for row, (ids, end) in enumerate(zip(expected, ended, strict=True)):
        assert learned[2 * row : 2 * row + 2] == [len(ids) * end] * 2
    metrics = trainer._metrics["train"]
    assert metrics["completions/clipped_ratio"] == [pytest.approx(ended.count(False) / len(ended))]
    lengths = [len(ids) for ids, end in zip(expected, ended, strict=True) if end]
    assert metrics["completions/max_terminated_length"] == [max(lengths)]
    assert metrics["completions/mean_terminated_length"] == [
        pytest.approx(sum(lengths) / len(lengths))
    ]


def test_an_evaluation_counts_them_as_complete_too(tmp_path, folder, strings, expected):
    greedy = {"generation_kwargs": {"do_sample": False}, "per_device_eval_batch_size": 12}
    trainer = open_trainer(folder, tmp_path, strings, **greedy)
    rows = [{"prompt": prompt, "row_id": row} for row, prompt in enumerate(PROMPTS)]
    trainer.evaluate(eval_dataset=Dataset.from_list(rows))
    cut_off = [not trainer.reader.is_terminated(row) for row in expected]
    (record,) = trainer.state.log_history
    assert record["eval_completions/clipped_ratio"] == pytest.approx(sum(cut_off) / len(cut_off))


def test_a_stop_string_that_begins_in_the_prompt_or_goes_on_in_its_token(tokenizer):
    reader = build_reader(tokenizer, [], stop_strings=["stop", "a\n"])
    ids = {text: tokenizer(text, add_special_tokens=False)["input_ids"] for text in
           ("s", "t", "topper", "las", "a", "\n\n", "x")}  # fmt: skip
    row = [*ids["las"], *ids["topper"], *ids["x"]]
    assert reader.cut(row) == row[:-1]
    assert not reader.is_complete(row)
    assert reader.is_complete(row[:-1])
    assert reader.cut([*ids["\n\n"], *ids["x"]], ids["a"]) == ids["\n\n"]
    assert not reader.is_complete(ids["\n\n"])
    assert reader.is_complete(ids["\n\n"], ids["a"])


def test_an_answer_that_ended_at_a_stop_string_gets_the_end_that_it_lacks(chat_model):
    tokenizer = AutoTokenizer.from_pretrained(chat_model)
    dialogue = Dialogue(tokenizer, has_tools=False, stop_strings=["."])
    replies = [{"role": "user", "content": "3"}]
    ended = dialogue.encode_replies(replies)
    assert dialogue.encode_replies(replies, has_end=False) == [tokenizer.eos_token_id, *ended]
    answer = tokenizer("It is 4.", add_special_tokens=False)["input_ids"]
    assert dialogue.reader.is_complete(answer)
    assert dialogue.read_answer(answer, [], ()).message["content"] == "It is 4."


RECIPE = """\
name: stop
seed: 1
model: {{path: {model}}}
dataset: {{kind: inline, eval_fraction: 0.5, rows: [{{q: one}}, {{q: two}}, {{q: three}}, {{q: four}}],
  prompt: {{style: text, user: "Q: {{{{ q }}}}\\nA:"}}}}
rewards: [{{kind: regex, pattern: e}}]
generation:
  num_generations: 4
  max_completion_length: 40
  generation_kwargs: {{stop_strings: [a, e, i, o, u, "1", "2", "3", "4"]}}
training: {{per_device_train_batch_size: 8, max_steps: 2}}
logging: {{log_completions: true}}
launch: {{use_cpu: true}}
"""


def test_a_recipe_ends_completions_at_texts_everywhere(workshop):
    done = workshop.grpo("train", workshop.write(RECIPE))
    assert done.returncode == 0, done.stderr
    groups = [json.loads(line) for line in (workshop.run / "completions/rank_0.jsonl").open()]
    sampled = [
        pair
        for group in groups
        for pair in zip(group["completions"], group["clipped"], strict=True)
    ]
    ends = tuple("aeiou1234")
    assert any(text.endswith(ends) for text, _ in sampled)
    for text, clipped in sampled:
        assert not any(end in text[:-1] for end in ends)
        if text.endswith(ends):
            assert not clipped
    shares = [record["completions/clipped_ratio"] for record in workshop.records("train")]
    assert sum(shares) / 2 == pytest.approx(sum(clipped for _, clipped in sampled) / len(sampled))
    measured = [json.loads(line) for line in (workshop.run / "eval/after.jsonl").open()]
    assert all(not any(end in each["text"][:-1] for end in ends) for each in measured)
