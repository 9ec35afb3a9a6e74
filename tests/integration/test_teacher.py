"""Training towards a teacher: the KL falls, answers become the teacher's, and a broken run goes on exactly."""

import json
import shutil
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import chain

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from grpo_cli.checks.recipe import check_recipe
from grpo_cli.errors import RecipeError, SetupError
from grpo_cli.machine import Hardware
from grpo_cli.models.teacher import compare_vocabularies
from grpo_cli.models.teacher_server import TeacherServer
from tests.integration.conftest import LORA, RECIPE, Workshop
from tests.integration.test_resuming import DEADLY, assert_same, train
from tests.tiny_models import make_tiny_model

TAUGHT, STUDENT = 120, 25
"""Steps of supervised training that make the teacher, and the student that it teaches."""
RECIPE_WITH_TEACHER = """\
name: taught
seed: 1
model: {{path: {model}, dtype: float32}}
teacher: {{path: TEACHER, weight: 1}}
dataset:
  kind: inline
  prompt: {{user: "{{{{ question }}}}"}}
  rows:
{rows}
  eval_rows:
{rows}
generation: {{num_generations: 4, max_completion_length: 6}}
training: {{per_device_train_batch_size: 32, max_steps: 60, learning_rate: 2e-3, gradient_checkpointing: false}}
evaluation: {{temperature: 1.0, samples_per_prompt: 8}}
launch: {{use_cpu: true}}
"""


@pytest.fixture(scope="session")
def pair(once):
    """A folder with a model that answers `count 3` with `ddd`, and one at the beginning of learning that."""
    return once("pair", _make_pair)


def _make_pair(folder):
    make_tiny_model(folder / "student")
    tokenizer = AutoTokenizer.from_pretrained(folder / "student")
    model = AutoModelForCausalLM.from_pretrained(folder / "student", dtype=torch.float32)
    rows = []
    for number, letter in enumerate("abcdefgh"):
        asked = [{"role": "user", "content": f"count {number}"}]
        prompt = tokenizer.apply_chat_template(asked, add_generation_prompt=True, tokenize=False)
        rows.append(tokenizer(f"{prompt}{letter * 3}<|im_end|>")["input_ids"])
    ids = torch.tensor(rows)
    labels = ids.clone()
    labels[:, :-4] = -100
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(TAUGHT + 1):
        if step in (STUDENT, TAUGHT):
            model.save_pretrained(folder / ("student" if step == STUDENT else "teacher"))
        model(ids, labels=labels).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    tokenizer.save_pretrained(folder / "teacher")


@pytest.fixture
def taught(tmp_path, pair):
    """A workshop with a recipe that has a teacher and no rewards."""
    workshop = Workshop(tmp_path, pair / "student")
    workshop.write(RECIPE_WITH_TEACHER.replace("TEACHER", str(pair / "teacher")))
    return workshop


def answers_of(workshop, when):
    lines = (workshop.run / "eval" / f"{when}.jsonl").read_text().splitlines()
    return [json.loads(line)["text"] for line in lines]


def test_a_student_comes_to_answer_as_its_teacher(taught):
    done = taught.grpo("train", "recipe.yaml")
    assert done.returncode == 0, done.stderr
    records = taught.records("train")
    kl = [record["kl"] for record in records]
    asked = [letter for letter in "abcdefgh" for _ in range(8)]
    assert sum(kl[-5:]) < 0.4 * sum(kl[:5])
    before, after = (
        sum(answer == letter * 3 for answer, letter in zip(answers, asked, strict=True))
        for answers in (answers_of(taught, "before"), answers_of(taught, "after"))
    )
    assert before + 10 < after
    assert not [name for name in chain(*records) if name.startswith(("reward", "frac_reward"))]
    assert "KL to the teacher" in done.stdout
    # Nothing that is said of the run is about rewards.
    found = json.loads(taught.grpo("diagnose", taught.run, "--json").stdout)
    assert not {each["rule"] for each in found["symptoms"]} & {"no_signal", "kl_runaway"}
    manifest = json.loads((taught.run / "manifest.json").read_text())
    assert len(manifest["teacher"]) == 32
    measured = taught.grpo("eval", taught.run)
    assert "no reward that scores a new answer" in measured.stderr


def test_a_killed_run_with_a_run_as_its_teacher_goes_on_exactly(tmp_path, chat_model, lora_run):
    (run,) = (lora_run / "runs").glob("*/*")
    text = RECIPE.replace("dtype: float32", LORA).replace(
        "rewards:\n",
        f"teacher: {run}\nrewards:\n  - {{{{kind: python, path: ./deadly.py:brief, name: brief, weight: 0}}}}\n",
    )

    def make(name, die_at=None):
        workshop = Workshop(tmp_path / name, chat_model)
        workshop.folder.mkdir()
        wish = workshop.folder / "die"
        if die_at is not None:
            wish.write_text(str(die_at))
        (workshop.folder / "deadly.py").write_text(DEADLY.format(wish=str(wish)))
        workshop.write(text)
        return workshop

    flags = ["--set", "training.save_steps=2"]
    unbroken, broken = make("unbroken"), make("broken", die_at=3)
    train(unbroken, *flags, steps=4)
    train(broken, *flags, steps=4, code=1)
    done = train(broken, *flags, "--resume", steps=4)
    assert "from step 2" in done.stderr
    assert_same(broken, unbroken)
    assert all(record["kl"] > 0 for record in broken.records("train"))


@pytest.fixture
def serving(pair):
    """The address of a server that answers as vLLM's does, with the teacher of the pair."""
    tokenizer = AutoTokenizer.from_pretrained(pair / "teacher")
    model = AutoModelForCausalLM.from_pretrained(pair / "teacher", dtype=torch.float32)

    def score(ids):
        with torch.no_grad():
            log_probs = model(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
        told = [
            {str(token): {"logprob": float(row[token])}}
            for token, row in zip(ids[1:], log_probs, strict=True)
        ]
        return {"prompt_logprobs": [None, *told]}

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            self.reply({"data": [{"id": "the-teacher"}]})

        def do_POST(self):
            asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
            if self.path == "/detokenize":
                self.reply({"prompt": tokenizer.decode(asked["tokens"])})
            else:
                self.reply({"choices": [score(ids) for ids in asked["prompt"]]})

        def reply(self, answer):
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps(answer).encode())

        def log_message(self, *args):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()


def test_a_teacher_on_a_server_teaches_as_one_of_this_machine(tmp_path, pair, serving):
    def train_towards(name, teacher):
        workshop = Workshop(tmp_path / name, pair / "student")
        workshop.folder.mkdir()
        workshop.write(RECIPE_WITH_TEACHER.replace("path: TEACHER", teacher))
        done = train(workshop, steps=4)
        return workshop, done

    here, _ = train_towards("here", f"path: {pair / 'teacher'}")
    there, _ = train_towards("there", f"base_url: {serving}")
    manifest = json.loads((there.run / "manifest.json").read_text())
    assert manifest["teacher"] == "the-teacher"
    for own, served in zip(here.records("train"), there.records("train"), strict=True):
        assert served["kl"] == pytest.approx(own["kl"], rel=1e-4)
        assert served["loss"] == pytest.approx(own["loss"], rel=1e-4, abs=1e-7)


def test_a_server_with_another_teacher(pair, serving, tmp_path):
    with pytest.raises(SetupError, match="no vLLM server with the teacher answers"):
        TeacherServer("http://127.0.0.1:9")
    another_vocabulary("", pair, tmp_path)
    other = AutoTokenizer.from_pretrained(tmp_path / "other")
    with pytest.raises(SetupError, match="has another tokenizer than the model"):
        TeacherServer(serving).check_tokenizer(other)


def no_teacher(text, pair, folder):
    return text.replace(str(pair / "teacher"), str(folder / "nowhere"))


def another_vocabulary(text, pair, folder):
    shutil.copytree(pair / "teacher", folder / "other")
    file = folder / "other/tokenizer.json"
    settings = json.loads(file.read_text())
    vocabulary = settings["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    file.write_text(json.dumps(settings))
    return text.replace(str(pair / "teacher"), str(folder / "other"))


def with_beta(text, pair, folder):
    return text.replace("training: {{", "training: {{beta: 0.1, ")


def scored(text, pair, folder):
    (folder / "rows.jsonl").write_text(
        '{"prompt": "a", "responses": ["b", "c"], "rewards": [0, 1]}\n'
    )
    start, end = text.index("dataset:"), text.index("generation:")
    return f"{text[:start]}dataset: {{{{kind: scored, train: ./rows.jsonl}}}}\n{text[end:]}"


def unfinished(text, pair, folder):
    run = folder / "one/run"
    (run / "checkpoints/checkpoint-3").mkdir(parents=True)
    (run / "resolved.json").write_text("{}")
    (run / "checkpoints/checkpoint-3/config.json").write_text("{}")
    return text.replace(str(pair / "teacher"), str(run))


def without_teacher(text, pair, folder):
    return text.replace(f"teacher: {{{{path: {pair / 'teacher'}, weight: 1}}}}\n", "")


@pytest.mark.parametrize(
    ("change", "path", "seen"),
    [
        (no_teacher, "teacher.path", "nowhere does not exist"),
        (unfinished, "teacher.path", "has no final model"),
        (
            lambda text, pair, _: text.replace(str(pair / "teacher"), "{model}"),
            "teacher.path",
            "is the model itself",
        ),
        (with_beta, "teacher", "`training.beta` asks for both"),
        (scored, "teacher", "samples none"),
        (without_teacher, "rewards", "missing"),
        (lambda text, *rest: text.replace("weight: 1", "weight: 0"), "teacher.weight", "above 0"),
        (
            lambda text, *rest: text.replace("weight: 1", "base_url: http://127.0.0.1:9"),
            "teacher.base_url",
            "not both",
        ),
        (
            lambda text, pair, _: text.replace(
                f"path: {pair / 'teacher'}", "base_url: http://127.0.0.1:9"
            ).replace("generation: {{", "generation: {{temperature: 0.7, "),
            "generation.temperature",
            "at temperature 1 alone",
        ),
        (
            lambda text, *rest: f"{text}  strategy: zero3\n".replace("{{use_cpu: true}}", ""),
            "launch.strategy",
            "zero3 shards models",
        ),
        (
            lambda text, *rest: text.replace(
                "generation: {{", "generation: {{dynamic_sampling: {{}}, "
            ),
            "generation.dynamic_sampling",
            "no reward teaches here",
        ),
    ],
)
def test_a_teacher_that_cannot_teach(taught, pair, change, path, seen):
    text = RECIPE_WITH_TEACHER.replace("TEACHER", str(pair / "teacher"))
    recipe = taught.write(change(text, pair, taught.folder))
    try:
        problems = check_recipe(recipe, hardware=Hardware(gpus=2, cpus=2)).errors
    except RecipeError as error:
        problems = error.problems
    assert [each for each in problems if each.path == path and seen in each.seen], problems


def test_rewards_that_only_measure_are_not_judged_by_their_total(taught):
    flags = [
        "--set",
        "rewards=[{kind: exact, weight: 0}]",
        "--set",
        "generation.max_completion_length=16",
    ]
    done = taught.grpo("probe", "recipe.yaml", "--quick", *flags)
    assert "rewards" not in done.stdout[done.stdout.index("✗") :], done.stdout


def test_a_teacher_that_reads_less_than_the_model(taught, tmp_path):
    make_tiny_model(tmp_path / "short", kind="gpt2", context_length=8)
    done = taught.grpo("probe", "recipe.yaml", "--quick", "--set", f"teacher.path={tmp_path}/short")
    assert "the teacher's context is 8" in done.stdout + done.stderr
    assert done.returncode == 1


def test_a_teacher_may_know_more_tokens():
    assert compare_vocabularies({"a": 0}, {"a": 0, "b": 1}) is None
    assert "'b', with the id 1, is unknown" in compare_vocabularies({"a": 0, "b": 1}, {"a": 0}).seen
