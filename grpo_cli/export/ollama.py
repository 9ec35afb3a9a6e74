"""The `Modelfile` with which Ollama runs an exported GGUF file.

Owns the passage from a chat template in Jinja to one in Go. It is found by trying: the template is
rendered with marks in the place of texts, and what stands around them becomes the Go template. Where
that does not give every conversation back as Jinja does, no template is written, and Ollama takes the
one in the GGUF file.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_cli.export.request import ExportRequest
from grpo_cli.runs.files import write_text

Message = dict[str, str]
Render = Callable[[Sequence[Message], bool], str]
_MARK = "\x02{}\x03"


@dataclass(frozen=True)
class TurnTemplate:
    """A chat template as what stands before and after the text of each role."""

    start: str
    """Before the first turn."""
    around: dict[str, tuple[str, str]]
    """Role → (before, after)."""
    answer: str
    """What opens the answer."""
    default_system: str | None
    """The system message the template gives a conversation that has none."""

    def render(self, messages: Sequence[Message]) -> str:
        """A conversation, as Ollama's Go template will put it."""
        if self.default_system is not None and messages[0]["role"] != "system":
            messages = [_say("system", self.default_system), *messages]
        turns = [
            f"{before}{message['content']}{after}"
            for message in messages
            for before, after in [self.around[message["role"]]]
        ]
        return f"{self.start}{''.join(turns)}{self.answer}"

    def as_go(self) -> str:
        """The template in Go's language, as Ollama's `TEMPLATE` takes it."""
        branches = [
            f'{{{{ {"if" if place == 0 else "else if"} eq .Role "{role}" }}}}'
            f"{before}{{{{ .Content }}}}{after}"
            for place, (role, (before, after)) in enumerate(self.around.items())
        ]
        turns = f"{{{{ range .Messages }}}}{''.join(branches)}{{{{ end }}}}{{{{ end }}}}"
        return f"{self.start}{turns}{self.answer}"


def find_turns(render: Render) -> TurnTemplate | None:
    """The turns of a chat template; None where it is more than turns side by side.

    Args:
        render: Renders messages, with the opening of an answer behind them or without.
    """
    user, answer, system = _say("user", "a"), _say("assistant", "b"), _say("system", "s")
    trials = [
        [user],
        [system, user],
        [user, answer, _say("user", "c")],
        [system, user, answer, _say("user", "c")],
    ]
    try:
        found = _find(render)
        if all(found.render(trial) == render(trial, True) for trial in trials):
            return found
    except ValueError:
        # Marks that came out changed, twice, or not at all.
        return None
    return None


def _find(render: Render) -> TurnTemplate:
    """Reads what stands around marked texts.

    Raises:
        ValueError: A mark is not there once.
    """
    user, again = _MARK.format("user"), _MARK.format("again")
    system, answer = _MARK.format("system"), _MARK.format("assistant")
    prefix, after_user = render([_say("user", user)], False).split(user)
    opened = render([_say("user", user)], True).split(user)[1]
    exchange = [_say("user", user), _say("assistant", answer)]
    _, rest = render(exchange, False).split(user)
    before_answer, after_answer = rest.split(answer)
    longer = render([*exchange, _say("user", again)], False).split(answer)[1]
    before_user = longer.split(again)[0].removeprefix(after_answer)
    head, rest = render([_say("system", system), _say("user", user)], False).split(system)
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


def _say(role: str, content: str) -> Message:
    return {"role": role, "content": content}


def write_modelfile(request: ExportRequest, folder: Path) -> None:
    """Writes `Modelfile` beside the GGUF file of a folder."""
    from grpo_cli.fast.completions import all_eos_token_ids
    from grpo_cli.models.loading import load_generation_config, load_tokenizer

    (file,) = folder.glob("*.gguf")
    tokenizer = load_tokenizer(request.tokenizer)
    stops = all_eos_token_ids(load_generation_config(request.recipe.model), tokenizer)
    lines = [f"FROM ./{file.name}"]
    turns = _turns_of(tokenizer, request)
    if turns is not None:
        # Ollama puts the beginning-of-sequence token there itself.
        go = turns.as_go().removeprefix(tokenizer.bos_token or "")
        lines.append(_quote("TEMPLATE", go))
    elif tokenizer.chat_template:
        lines.append("# The chat template is the one in the GGUF file.")
    else:
        lines.append('TEMPLATE "{{ .Prompt }}"')
    system = request.recipe.dataset.prompt.fixed_system or (
        turns.default_system if turns is not None else None
    )
    if system is not None:
        lines.append(_quote("SYSTEM", system))
    lines += [f'PARAMETER stop "{token}"' for token in tokenizer.convert_ids_to_tokens(stops)]
    # As in training: without these Ollama cuts the distribution and punishes repetition.
    temperature = request.recipe.generation.temperature
    plain = {"temperature": temperature, "top_k": 0, "top_p": 1, "repeat_penalty": 1}
    lines += [f"PARAMETER {name} {value:g}" for name, value in plain.items()]
    write_text(folder / "Modelfile", "\n".join(lines) + "\n")


def _quote(instruction: str, text: str) -> str:
    """An instruction with a text of several lines, which cannot hold three quotation marks."""
    if '"""' in text:
        return f'# {instruction} is left out: its text holds """, which a Modelfile cannot quote.'
    return f'{instruction} """{text}"""'


def _turns_of(tokenizer: Any, request: ExportRequest) -> TurnTemplate | None:
    if not tokenizer.chat_template:
        return None
    kwargs = request.recipe.generation.extras.get("chat_template_kwargs") or {}
    return find_turns(
        lambda messages, opened: tokenizer.apply_chat_template(
            list(messages), tokenize=False, add_generation_prompt=opened, **kwargs
        )
    )
