"""Chat templates as texts: rendered as transformers does, without importing it, and tried on a dialogue."""

import importlib.util
import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grpo_cli.models.folder import read_settings
from grpo_cli.models.source import ModelSource

if TYPE_CHECKING:
    from jinja2 import Template

Message = Mapping[str, Any]
_TOKENS = ("bos_token", "eos_token", "pad_token", "unk_token")
_NAME, _KEY, _VALUE, _RESULT = "name_a8f3e2", "key_b9d4f5", "value_d6e7a9", "result_c4f9a8"
"""Stand for the parts of a call and its result; a template that renders calls writes all four."""
_QUESTION: Message = {"role": "user", "content": "question"}
_TOLD: Message = {"role": "tool", "name": _NAME, "content": _RESULT}
_ANSWER: Message = {"role": "assistant", "content": "answer_e5b0c1"}
_REPLY: Message = {"role": "user", "content": _RESULT}
_SCHEMA = {
    "type": "function",
    "function": {
        "name": _NAME,
        "description": "A tool.",
        "parameters": {"type": "object", "properties": {_KEY: {"type": "string"}}},
    },
}
_CHANGED = "changes a call once its result follows, so the model would not read what it wrote"


def read_special_tokens(source: ModelSource) -> dict[str, str]:
    """Return the special tokens that templates may name, those of the model's folder if it has some."""
    settings = _read_tokenizer_config(source)
    tokens = {name: settings.get(name) for name in _TOKENS}
    texts = {
        name: token.get("content") if isinstance(token, dict) else token
        for name, token in tokens.items()
    }
    # Those of a model on the hub are not known here; templates join them to other texts.
    return {name: text if isinstance(text, str) else f"<{name}>" for name, text in texts.items()}


def has_response_template(source: ModelSource) -> bool:
    """Return whether the tokenizer's own files say how the model writes calls."""
    settings = _read_tokenizer_config(source)
    return bool(settings.get("response_template") or settings.get("response_schema"))


def _read_tokenizer_config(source: ModelSource) -> Mapping[str, Any]:
    if source.kind != "folder":
        return {}
    return read_settings(Path(source.location) / "tokenizer_config.json") or {}


def find_dialogue_fault(template: str, variables: Mapping[str, Any]) -> str:
    """Return why a template cannot render an answer and the user's reply to it; empty if it can.

    Args:
        template: The text of the template.
        variables: What it may name: special tokens, and `chat_template_kwargs` of the recipe.
    """
    try:
        text = render(template, [_QUESTION, _ANSWER, _REPLY], variables)
    except Exception as error:  # a template is code: it raises anything
        return f"cannot render an answer and a reply to it: {_reason(error)}"
    _, answer, after = text.partition(_ANSWER["content"])
    if not answer:
        return "leaves out the model's answers"
    return "" if _RESULT in after else "leaves out a reply to an answer"


def find_tool_fault(template: str, variables: Mapping[str, Any]) -> str:
    """Return why a template cannot render tools, calls and their results; empty if it can.

    Source: `supports_tool_calling` and `is_chat_template_prefix_preserving` (TRL 1.16).
    """
    try:
        if _NAME not in render(template, [_QUESTION], {**variables, "tools": [_SCHEMA]}):
            return "leaves out the tools"
        start, whole = _render_calls(template, variables, {_KEY: _VALUE})
    except Exception as error:  # a template is code: it raises anything
        return f"cannot render tools, calls and their results: {_reason(error)}"
    if not all(part in whole for part in (_NAME, _KEY, _VALUE)):
        return "leaves out calls"
    if _RESULT not in whole:
        return "leaves out the results of calls"
    return "" if whole.startswith(start) or _has_training_form(template) else _CHANGED


def _render_calls(
    template: str, variables: Mapping[str, Any], arguments: object
) -> tuple[str, str]:
    """Return a call, and the call with its result; some templates take arguments only as JSON."""
    function = {"type": "function", "function": {"name": _NAME, "arguments": arguments}}
    calling = {"role": "assistant", "content": "", "tool_calls": [function]}
    try:
        return (
            render(template, [_QUESTION, calling], variables),
            render(template, [_QUESTION, calling, _TOLD], variables),
        )
    except TypeError:
        if isinstance(arguments, str):
            raise
        return _render_calls(template, variables, json.dumps(arguments))


def _reason(error: Exception) -> str:
    return str(error).strip().rstrip(".") or type(error).__name__


def is_known_to_trl(template: str) -> bool:
    """Return whether TRL has this template, and so may know how the model writes calls."""
    return any(not file.stem.endswith("_training") for file in _files_of(template))


def _has_training_form(template: str) -> bool:
    """Return whether TRL has a form of this template that leaves what came before as it is.

    Source: `get_training_chat_template` (TRL 1.16).
    """
    return any(
        file.with_name(f"{file.stem}_training.jinja").is_file() for file in _files_of(template)
    )


def _files_of(template: str) -> list[Path]:
    """Return the files of TRL that hold this template."""
    spec = importlib.util.find_spec("trl")
    if spec is None or spec.origin is None:
        return []
    files = (Path(spec.origin).parent / "chat_templates").glob("*.jinja")
    return [file for file in files if file.read_text(encoding="utf-8") == template]


def render(template: str, messages: Sequence[Message], variables: Mapping[str, Any]) -> str:
    """Return messages as a template writes them, without a prompt for the next answer.

    Raises:
        jinja2.TemplateError: The template refuses them, or is not Jinja.

    Source: `render_jinja_template` (transformers 5.17).
    """
    values = {"tools": None, "documents": None, "add_generation_prompt": False, **variables}
    return _compile(template).render(messages=messages, **values)


@lru_cache(maxsize=4)
def _compile(template: str) -> "Template":
    from jinja2 import TemplateError, nodes
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """`{% generation %}`, which marks the model's own words and writes nothing."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.Scope(body, lineno=line)

    def refuse(message: str) -> None:
        raise TemplateError(message)

    def to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, **options)

    sandbox = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    sandbox.filters["tojson"] = to_json
    sandbox.globals["raise_exception"] = refuse
    sandbox.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return sandbox.from_string(template)
