"""Trainings on prompts with images: the same steps as TRL's, resume, and what is measured."""

import base64
import io
import json
import re
import shutil
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from PIL import Image
from transformers import (
    Idefics3Config,
    Idefics3ForConditionalGeneration,
    Idefics3Processor,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
)
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from trl import GRPOConfig, GRPOTrainer

from grpo_cli.api import export
from grpo_cli.data.build import build_datasets
from grpo_cli.errors import RecipeError, UsageError
from grpo_cli.fast.tokens import count_prompt_tokens, count_row_tokens, encode_unexpanded
from grpo_cli.launch.server_plan import find_served
from grpo_cli.models.loading import (
    add_adapters,
    build_peft_config,
    load_model,
    load_tokenizer,
)
from grpo_cli.models.processor import load_processor
from grpo_cli.recipe.loading import load_recipe
from grpo_cli.recipe.model import LoraConfig, ModelConfig
from grpo_cli.runs.run import Run
from grpo_cli.serve.chat import (
    SamplingParams,
    open_model,
    open_server,
    read_picture,
    say,
)
from grpo_cli.training.trainer import RunTrainer
from tests.integration.conftest import Workshop
from tests.integration.test_resuming import completions_of, sets, steps_of
from tests.integration.test_strategies import REWARD, assert_same
from tests.json_reply import send_json
from tests.nightly import nightly
from tests.plain_rewards import scored_by

RECIPE = """\
name: looking
model:
  path: {model}
dataset:
  kind: files
  train: rows.jsonl
  eval: held_out.jsonl
  prompt: {{images: pictures, user: "colour ?"}}
rewards:
  - {{kind: python, path: ./looks.py:looks}}
  - {{kind: exact, answer: colour}}
generation:
  num_generations: 2
  max_completion_length: 3
training:
  per_device_train_batch_size: 2
  gradient_accumulation_steps: 4
  max_steps: 4
  save_steps: 3
  learning_rate: 1e-2
  beta: 0.02
launch: {{use_cpu: true}}
"""
LOOKS = """\
def looks(completions, images, prompts, **_):
    for own, prompt in zip(images, prompts):
        assert all(image.mode == "RGB" and image.size == (8, 8) for image in own)
        places = [part["type"] for part in prompt[-1]["content"]]
        assert places == ["image"] * len(own) + ["text"]
    return [len(each[0]["content"]) + len(own) for each, own in zip(completions, images)]
"""
COLOURS = ("red", "green", "blue")
SHAPES = Path(__file__).parents[2] / "recipes" / "offline" / "shapes.yaml"


def write(folder, made, counts):
    folder.mkdir(exist_ok=True)
    for colour in COLOURS:
        Image.new("RGB", (8, 8), colour).save(folder / f"{colour}.png")
    for name, numbers in (("rows", counts), ("held_out", [0, 1, 3, 1, 0])):
        rows = [
            {
                "pictures": [f"{COLOURS[(n // 3 + each) % 3]}.png" for each in range(count)],
                "colour": "red",
            }
            for n, count in enumerate(numbers)
        ]
        lines = [json.dumps(row) + "\n" for row in rows]
        (folder / f"{name}.jsonl").write_text("".join(lines))
    (folder / "looks.py").write_text(LOOKS)
    workshop = Workshop(folder, made / "tiny-llava")
    return workshop, workshop.write(RECIPE)


@pytest.mark.slow
def test_rows_of_no_one_and_three_images_train_and_resume_to_the_bit(tmp_path, made, capsys):
    workshop, recipe = write(tmp_path / "run", made, [0, 1, 3] * 6)
    done = workshop.grpo("train", recipe)
    assert done.returncode == 0, done.stderr
    assert (workshop.run / "model" / "processor_config.json").is_file()
    left_off = json.loads((workshop.run / "manifest.json").read_text())["fast"]["left_off"]
    assert {"no_signal", "shared_prompts", "sampling"} <= left_off.keys()
    (after,) = [each for each in workshop.records("measure") if each["when"] == "after"]
    assert after["prompts"] == 5
    # Copies of the three pictures are kept once, and named where they were sampled for.
    finished = Run(workshop.run)
    copies = finished.thumbnails
    (sample, *_) = [each for each in finished.samples("before") if each["row"] == 2]
    shown = sample["prompt"][-1]["content"][:3]
    assert {part["thumbnail"] for part in shown} == copies.keys()
    assert [Path(part["path"]).name for part in shown] == ["red.png", "green.png", "blue.png"]
    run, before = workshop.run, (steps_of(workshop), completions_of(workshop))
    weights = (run / "model" / "model.safetensors").read_bytes()
    shutil.rmtree(run / "model")
    shutil.rmtree(run / "checkpoints" / "checkpoint-4")
    done = workshop.grpo("train", recipe, "--resume-from", run / "checkpoints" / "checkpoint-3")
    assert done.returncode == 0, done.stderr
    assert "from step 3" in done.stderr
    assert (steps_of(workshop), completions_of(workshop)) == before
    assert (run / "model" / "model.safetensors").read_bytes() == weights
    done = workshop.grpo("export", run, "--to", tmp_path / "shipped", "--json")
    assert done.returncode == 0, done.stderr
    verified = json.loads(done.stdout)["verification"]
    assert verified["greedy_same"] == verified["prompts"] == 4
    assert verified["difference"]["largest"] < 1e-5
    assert (tmp_path / "shipped" / "processor_config.json").is_file()
    chat = open_model(find_served(run, None), SamplingParams(temperature=0, max_tokens=3))
    picture = read_picture(str(tmp_path / "run" / "red.png"))
    answers = {"".join(chat([say("colour ?", [picture] * count)])) for count in (0, 1, 3)}
    assert all(isinstance(answer, str) for answer in answers)
    with pytest.raises(UsageError, match="`<image>` in a question"):
        chat([say("colour <image> ?", [picture])])
    with pytest.raises(UsageError, match="which does not exist"):
        read_picture("gone.png")
    (tmp_path / "run" / "blue.png").rename(tmp_path / "run" / "gone.png")
    phases: list[str] = []
    with pytest.raises(RecipeError, match=r"blue\.png, which does not"):
        export(run, tmp_path / "again", on_progress=phases.append)
    assert phases == ["reading the prompts of the verification"]
    card = (tmp_path / "shipped" / "README.md").read_text()
    assert "pipeline_tag: image-text-to-text" in card
    (example,) = re.findall(r"```python\n(.*?)```", card, re.DOTALL)
    places = {"PATH_OR_REPO": tmp_path / "shipped", "picture.png": tmp_path / "run" / "red.png"}
    for name, place in places.items():
        example = example.replace(name, str(place))
    capsys.readouterr()
    exec(example, {})
    assert capsys.readouterr().out.endswith("\n")


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({}, marks=pytest.mark.slow),
        nightly(
            {
                "dataset.prompt.images": "[]",
                "warmup": "{answer: '{{ colour }}', learning_rate: 1e-2, max_steps: 2}",
            }
        ),
        nightly({"model.lora": "{r: 4, target_modules: [q_proj]}"}),
    ],
    ids=["images", "text", "adapters"],
)
def test_two_processes_learn_what_one_does(tmp_path, made, settings):
    # In two of three steps one of the processes has no images, which must not keep the other waiting.
    counts = [0, 0, 1, 3, 1, 3, 0, 0, 3, 0, 0, 1]
    text = RECIPE.replace("training:\n", "training:\n  fast: {{sampling: false}}\n")
    own = {"evaluation.limit": 0, **settings}
    shared = sets(max_steps=3, optim="sgd", shuffle_dataset="false", gradient_accumulation_steps=2)
    done = []
    for processes in (1, 2):
        workshop, _ = write(tmp_path / f"of_{processes}", made, counts)
        (workshop.folder / "looks.py").write_text(REWARD.replace("def spread", "def looks"))
        flags = [*shared, *sets(per_device_train_batch_size=4 // processes)]
        own["launch.num_processes"] = processes
        if "warmup" in settings:
            own["warmup.per_device_train_batch_size"] = 4 // processes
        for key, value in own.items():
            flags += ["--set", f"{key}={value}"]
        trained = workshop.process("train", workshop.write(text), *flags)
        assert trained.returncode == 0, trained.stderr
        done.append(workshop)
    alone, both = done
    assert (both.run / "model" / "processor_config.json").is_file()
    assert_same(both, alone, "ddp", adapters="model.lora" in settings)


def count_letters(completions, **_):
    return [float(len(each[0]["content"])) for each in completions]


def train(trainer_class, recipe, data, folder, lora=False, own=None):
    """Train two steps; return the trainer and the records. `own` is another model with its processor."""
    settings = GRPOConfig(
        output_dir=str(folder),
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        num_generations=2,
        max_completion_length=3,
        max_steps=2,
        learning_rate=0.1,
        shuffle_dataset=False,
        optim="sgd",
        logging_steps=1,
        report_to=[],
        save_strategy="no",
        use_cpu=True,
        bf16=False,
        disable_tqdm=True,
    )
    model, processor = own or (
        load_model(recipe.model, device_is_cuda=False),
        load_processor(recipe.model),
    )
    trainer = trainer_class(
        model=model,
        args=settings,
        processing_class=processor,
        train_dataset=data,
        **scored_by(trainer_class, count_letters),
        peft_config=build_peft_config(LoraConfig(r=4), model) if lora else None,
    )  # fmt: skip
    trainer.train()
    return trainer, [each for each in trainer.state.log_history if "loss" in each]


@pytest.mark.parametrize("lora", [False, True], ids=["all weights", "lora"])
def test_steps_are_those_of_trl(tmp_path, made, lora):
    # Without a row of no images, which TRL (1.16) cannot have beside others.
    _, path = write(tmp_path, made, [1, 3] * 6)
    recipe = load_recipe(path)
    data = build_datasets(recipe, has_chat_template=True, count_tokens=None).train
    plain, expected = train(GRPOTrainer, recipe, data, tmp_path / "plain", lora)
    ours, records = train(RunTrainer, recipe, data, tmp_path / "ours", lora)
    for name in ("loss", "grad_norm", "reward"):
        assert [each[name] for each in records] == pytest.approx(
            [each[name] for each in expected], abs=1e-5
        )
    assert sum(each["grad_norm"] for each in records) > 0
    own = ours.model.state_dict()
    for name, weight in plain.model.state_dict().items():
        torch.testing.assert_close(own[name], weight, atol=1e-5, rtol=0)


def make_idefics(made):
    """A model whose processor pads images to equally many for each row; the words are those of the tiny Llava."""
    tokenizer = load_processor(ModelConfig(path=str(made / "tiny-llava"))).tokenizer
    tokenizer.add_special_tokens(
        {
            "additional_special_tokens": [
                "<fake_token_around_image>",
                "<global-img>",
                "<end_of_utterance>",
            ]
        }
    )
    text = {"vocab_size": len(tokenizer), "hidden_size": 32, "intermediate_size": 64}
    heads = {"num_hidden_layers": 1, "num_attention_heads": 2}
    ids = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id}
    config = Idefics3Config(
        text_config={"model_type": "llama", "num_key_value_heads": 2, **text, **heads, **ids},
        vision_config={
            "hidden_size": 32,
            "intermediate_size": 64,
            "image_size": 16,
            "patch_size": 4,
            **heads,
        },
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        pad_token_id=tokenizer.pad_token_id,
    )
    edge = {"longest_edge": 16}
    images = Idefics3ImageProcessorPil(size=edge, max_image_size=edge, do_image_splitting=False)
    processor = Idefics3Processor(
        images, tokenizer, image_seq_len=4, chat_template=tokenizer.chat_template
    )
    return Idefics3ForConditionalGeneration(config), processor


def test_images_that_a_processor_pads_by_row_may_be_as_many_as_rows(tmp_path, made):
    _, path = write(tmp_path, made, [0, 2] * 6)
    data = build_datasets(load_recipe(path), has_chat_template=True, count_tokens=None).train
    # A generation batch has two rows: with none and two images, TRL would take rows for images.
    _, records = train(RunTrainer, None, data, tmp_path / "rows", own=make_idefics(made))
    assert len(records) == 2


def test_texts_are_shown_by_a_template_of_parts(made, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(made / "tiny-llava", folder)
    tokenizer = load_tokenizer(ModelConfig(path=str(folder)))
    messages = [{"role": "user", "content": "red"}, {"role": "assistant", "content": "blue"}]
    messages += [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "?"}]}]
    shown = tokenizer.apply_chat_template(messages, tokenize=False)
    assert shown == "red blue <|im_end|><image> ? "
    tokenizer.save_pretrained(folder)
    again = load_tokenizer(ModelConfig(path=str(folder)))
    assert again.chat_template == tokenizer.chat_template


def test_adapters_leave_the_vision_part_alone(made):
    model = load_model(ModelConfig(path=str(made / "tiny-llava")), device_is_cuda=False)
    from peft import get_peft_model

    adapted = get_peft_model(model, build_peft_config(LoraConfig(r=2), model))
    names = {name for name, _ in adapted.named_parameters() if ".lora_A." in name}
    assert len(names) == 14
    assert all("language_model" in name for name in names)
    named = LoraConfig(r=2, target_modules=("q_proj",))
    model = load_model(ModelConfig(path=str(made / "tiny-llava")), device_is_cuda=False)
    adapted = get_peft_model(model, build_peft_config(named, model))
    names = {name for name, _ in adapted.named_parameters() if ".lora_A." in name}
    assert any("vision_tower" in name for name in names)


def test_tokens_of_images_are_counted_as_the_processor_makes_them(tmp_path, made):
    _, path = write(tmp_path, made, [0, 1, 3, 1])
    recipe = load_recipe(path)
    processor = load_processor(recipe.model)
    count = SimpleNamespace(total=0)

    def count_tokens(prompt, images):
        count.total += 1
        return count_prompt_tokens(processor, prompt, images=images)

    data = build_datasets(recipe, has_chat_template=True, count_tokens=count_tokens)
    lengths = count_row_tokens(processor, data.train, None)
    assert count.total == 4 + 5
    assert lengths == [3 + 16 * len(images) for images in data.train["images"]]
    # As vLLM takes them, each image is still one token.
    short = [encode_unexpanded(processor, prompt) for prompt in data.train["prompt"]]
    assert [len(each) for each in short] == [3 + len(images) for images in data.train["images"]]


def test_adapters_fit_models_whose_text_part_does_not_say_that_weights_are_tied():
    text = {"hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1, "vocab_size": 64}
    text["rope_scaling"] = {"type": "mrope", "mrope_section": [1, 1, 2]}
    vision = {"depth": 1, "embed_dim": 16, "hidden_size": 16, "num_heads": 2}
    model = Qwen2VLForConditionalGeneration(Qwen2VLConfig(text_config=text, vision_config=vision))
    adapted = add_adapters(model, LoraConfig(r=2))
    assert all(
        "visual" not in name for name, each in adapted.named_parameters() if each.requires_grad
    )


class Hearing(BaseHTTPRequestHandler):
    """An OpenAI-compatible server that keeps what it is asked."""

    def do_GET(self):
        send_json(self, {"object": "list", "data": [{"id": "m", "object": "model"}]})

    def do_POST(self):
        self.server.asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.end_headers()
        self.wfile.write(b"data: [DONE]\n\n")

    def log_message(self, *args):
        pass


def test_a_server_is_shown_pictures():
    with HTTPServer(("127.0.0.1", 0), Hearing) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}/v1"
        chat = open_server(url, None, SamplingParams(temperature=0, max_tokens=3))
        list(chat([say("colour ?", [Image.new("RGB", (8, 8), "red")])]))
        server.shutdown()
    picture, text = server.asked["messages"][0]["content"]
    assert text == {"type": "text", "text": "colour ?"}
    kept = base64.b64decode(picture["image_url"]["url"].removeprefix("data:image/png;base64,"))
    assert Image.open(io.BytesIO(kept)).getpixel((0, 0)) == (255, 0, 0)


def test_the_token_of_an_image_in_a_text_is_refused(tmp_path, made):
    _, path = write(tmp_path, made, [1, 1])
    path.write_text(path.read_text().replace("colour ?", "<image> colour ?"))
    recipe = load_recipe(path)
    data = build_datasets(recipe, has_chat_template=True, count_tokens=None).train
    with pytest.raises(RecipeError, match="has `<image>`, by which the model would look"):
        count_row_tokens(load_processor(recipe.model), data)


def test_unknown_settings_of_a_processor_are_refused(tmp_path, made):
    for settings, message in (
        ({"sizes": 3}, r"has no setting of this name\. Fix: write `size`"),
        ({"size": {"shortest_edge": "many"}}, "fails with these settings"),
        ({"size": {"foo": 3}}, "the processor cannot be made"),
        ({"image_std": [0, 0, 0]}, "not finite numbers"),
    ):
        model = ModelConfig(path=str(made / "tiny-llava"), processor=settings)
        with pytest.raises(Exception, match=message):
            load_processor(model)
    small = {"size": {"shortest_edge": 16}, "crop_size": {"height": 16, "width": 16}}
    processor = load_processor(model.model_copy(update={"processor": small}))
    assert processor.image_processor.crop_size["height"] == 16
    assert "size" not in processor.tokenizer.init_kwargs


@pytest.mark.parametrize("seed", [nightly(seed) for seed in (1, 42, 43)])
def test_colours_of_shapes_are_learned(tmp_path, made, seed):
    workshop = Workshop(tmp_path, made / "tiny-llava")
    places = {
        "model.path": made / "tiny-llava",
        "dataset.train": made / "shapes.jsonl",
        "seed": seed,
    }
    flags = [part for key, value in places.items() for part in ("--set", f"{key}={value}")]
    done = workshop.grpo("train", SHAPES, *flags)
    assert done.returncode == 0, done.stderr
    accuracy = {each["when"]: each["accuracy"]["exact"] for each in workshop.records("measure")}
    assert accuracy["before"] < 0.5
    assert accuracy["after"] > 0.9
