"""From a row to a prompt: sandboxed Jinja templates, and the rules for chat and plain text."""

import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal

from grpo_cli.data.images import MARK, image_values, is_stored_image
from grpo_cli.data.rows import Row, show, show_names, suggest
from grpo_cli.errors import RecipeError, recipe_error
from grpo_cli.recipe.dataset import PromptConfig
from grpo_cli.templating import environment, is_unreadable
from grpo_cli.units import count_noun

if TYPE_CHECKING:
    from jinja2 import Template

Style = Literal["chat", "text"]
Prompt = str | list[dict[str, Any]]
"""Plain text, or messages with `role` and `content`, which is a list of parts if prompts may hold images."""

_MARK_AS_TEXT = "{{ image }}"
_HOLE = "\0image\0"
"""What `{{ image }}` prints, until the text is cut there."""
_INSIDE = ("image", "url", "path", "base64")
"""Keys by which a part of a message may hold its image itself."""
SYSTEM_ROLES = ("system", "developer")
_SHAREGPT_ROLES = {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "bot": "assistant"}
"""Names of roles in ShareGPT's format, which chat templates print as they come, and theirs."""
_PLAIN_COLUMN = re.compile(r"\{\{-?\s*([A-Za-z_]\w*)\s*-?\}\}")
_NOT_COLUMNS = frozenset(
    "true false none True False None range dict cycler joiner namespace self".split()
)
"""Names that mean something of their own in a template."""
_PRINTED = {str, int, float, bool}
"""Types whose values Jinja prints as `str` does."""
_JSON_MESSAGES = re.compile(r"""\s*\[\s*\{\s*["'](role|content)["']\s*:""")
USER = "dataset.prompt.user"
SYSTEM = "dataset.prompt.system"
STYLE = "dataset.prompt.style"
IMAGES = "dataset.prompt.images"


def is_plain(text: str) -> bool:
    """Return whether a template does no more than name columns, as most do.

    Such a template needs no Jinja to be checked, whose import takes as long as all other checks.
    """
    rest = _PLAIN_COLUMN.sub("", text)
    names = set(_PLAIN_COLUMN.findall(text))
    return not names & _NOT_COLUMNS and not any(mark in rest for mark in ("{{", "{%", "{#", "}}"))


def template_columns(text: str, path: str = USER) -> frozenset[str]:
    """Return the columns a template reads; `path` is its place in the recipe. Raises `RecipeError`."""
    if is_plain(text):
        return frozenset(_PLAIN_COLUMN.findall(text))
    from jinja2 import TemplateSyntaxError, meta

    sandbox = environment()
    try:
        found = meta.find_undeclared_variables(sandbox.parse(text))
        return frozenset(found - sandbox.globals.keys())
    except TemplateSyntaxError as error:
        reason = (error.message or "").rstrip(".")
        message = f"line {error.lineno} of the template is wrong: {reason}"
        fix = "correct the template; columns are written {{ name }}"
        raise recipe_error(message, fix, path) from error


def resolve_style(prompt: PromptConfig, has_chat_template: bool) -> Style:
    """Return whether prompts are messages or plain text, or raise `RecipeError`."""
    if prompt.style == "text":
        return "text"
    if has_chat_template:
        return "chat"
    if prompt.style == "chat":
        message = "`chat` needs a chat template, and the tokenizer has none"
        raise recipe_error(message, "set model.chat_template, or style: text", STYLE)
    if prompt.system is not None:
        message = "a system message needs a chat template, and the tokenizer has none"
        raise recipe_error(
            message, "set model.chat_template, or move the text to dataset.prompt.user", SYSTEM
        )
    return "text"


class Renderer:
    """Makes prompts of rows by one recipe's rules."""

    def __init__(
        self,
        prompt: PromptConfig,
        style: Style,
        *,
        may_be_empty: bool = False,
        in_parts: bool = False,
    ) -> None:
        """Check the templates; raises `RecipeError` if one has a syntax error, or plain text has a system message.

        A prompt `may_be_empty` if an environment adds to it, and is `in_parts` if any source has images.
        """
        if style == "text" and prompt.system is not None:
            message = "plain text has no system message; it needs style: chat and a chat template"
            fix = "move the text to dataset.prompt.user, or set dataset.prompt.style: chat"
            raise recipe_error(message, fix, SYSTEM)
        if style == "text" and in_parts:
            message = "images need a chat template, which says where they are in a prompt"
            fix = "remove `style: text`, and set model.chat_template if the model has none"
            raise recipe_error(message, fix, IMAGES)
        named = {
            path: template_columns(text, path)
            for text, path in ((prompt.user, USER), (prompt.system, SYSTEM))
            if text is not None
        }
        self.columns = (
            frozenset().union(*named.values())
            if named and all(map(is_plain, filter(None, (prompt.user, prompt.system))))
            else None
        )
        """The columns that the templates print; None if they may do more, or if rows have prompts of their own."""
        self.style = style
        self._prompt = prompt
        self._may_be_empty = may_be_empty
        self.in_parts = in_parts
        self._templated = prompt.user is not None
        self._has_marks = bool(prompt.images) and MARK in named.get(USER, ())

    def render(self, row: Row, where: str = "the row") -> Prompt:
        """Return the prompt of one row, which messages call `where`, or raise `RecipeError`."""
        if self._templated:
            values = {**row, MARK: _HOLE} if self._has_marks else row
            filled = render_template(self._prompt.user or "", values, where, USER)
            is_text = self.style == "text"
            prompt: Prompt = filled if is_text else [*self._system(row, where), _user(filled)]
        else:
            prompt = self._own(row, where)
        text = prompt if isinstance(prompt, str) else prompt[-1]["content"]
        is_empty = not (text.strip() if isinstance(text, str) else text)
        if is_empty and not self._may_be_empty:
            path = USER if self._templated else "dataset.prompt"
            raise recipe_error(
                f"{where} has an empty prompt", "fill its columns or drop the row", path
            )
        if self.in_parts and not isinstance(prompt, str):
            return self._with_images(prompt, row, where)
        return prompt

    def render_block(
        self, columns: Mapping[str, Sequence[Any]], size: int
    ) -> dict[str, list[str]] | None:
        """Return the texts of each role's message in `size` rows; None if rows must be rendered one by one."""
        if self.in_parts or not self._templated:
            return None
        made = {}
        for role, text in (("system", self._prompt.system), ("user", self._prompt.user)):
            if text is not None:
                texts = _fill_plain(text, columns, size)
                if texts is None:
                    return None
                made[role] = texts
        is_whole = self._may_be_empty or all(map(str.strip, made["user"]))
        return made if is_whole else None

    def _own(self, row: Row, where: str) -> Prompt:
        """Return the row's own `prompt` column: text, or messages."""
        prompt = row.get("prompt")
        if isinstance(prompt, str):
            if _JSON_MESSAGES.match(prompt):
                message = f"{where} has messages written as text: {show(prompt)}"
                fix = 'parse it into a list, or set dataset.prompt.user: "{{ prompt }}" if it is the text to send'
                raise recipe_error(message, fix, "dataset.prompt")
            wrap = self._prompt.style == "chat" or self._prompt.system is not None or self.in_parts
            return [*self._system(row, where), _user(prompt)] if wrap else prompt
        if not isinstance(prompt, list):
            raise _no_prompt(row, where)
        if self.style == "text":
            message = f"{where} has a prompt of messages, which need a chat template"
            fix = "set model.chat_template and style: chat, or write dataset.prompt.user"
            raise recipe_error(message, fix, STYLE)
        messages = [_check_message(message, where, self.in_parts) for message in prompt]
        is_asked = any(each["role"] not in SYSTEM_ROLES for each in messages)
        if not is_asked or messages[-1]["role"] == "assistant":
            message = f"{where} has a prompt that ends with {show(prompt[-1:])}"
            raise recipe_error(message, "let the last message be the user's", "dataset.prompt")
        has_system = messages[0]["role"] in SYSTEM_ROLES
        return messages if has_system else [*self._system(row, where), *messages]

    def _with_images(
        self, messages: list[dict[str, Any]], row: Row, where: str
    ) -> list[dict[str, Any]]:
        if not self._templated and any(_MARK_AS_TEXT in str(each["content"]) for each in messages):
            fix = "write parts: [{type: image}, {type: text, text: …}]"
            seen = f"{where} has the mark `{_MARK_AS_TEXT}` in its messages, which are not template"
            raise recipe_error(seen, fix, "dataset.prompt")
        messages = [{**each, "content": _as_parts(each["content"])} for each in messages]
        count = len(image_values(row, self._prompt.images))
        marks = sum(part["type"] == "image" for each in messages for part in each["content"])
        if count and not marks and not self._has_marks:
            first = next((each for each in messages if each["role"] == "user"), messages[-1])
            first["content"] = [*([_IMAGE] * count), *first["content"]]
        elif marks != count:
            raise self._wrong_count(row, count, marks, where)
        return messages

    def _wrong_count(self, row: Row, count: int, marks: int, where: str) -> RecipeError:
        mark = f"`{_MARK_AS_TEXT}` mark" if self._templated else "image part"
        images, columns = count_noun(count, "image"), show_names(self._prompt.images)
        message = f"{where} has {images} in {columns}, and its prompt {count_noun(marks, mark)}"
        fix = "write a part {type: image} for each image of the row"
        if self._templated:
            fix = "write one for each image; `{% if column %}{{ image }}{% endif %}` is for rows without one"
        text = [name for name in self._prompt.images if isinstance(row.get(name), str)]
        if self._templated and text and marks > count:
            fix += f"; a `for` over `{text[0]}` needs a list there, and it is text"
        return recipe_error(message, fix, USER if self._templated else "dataset.prompt")

    def _system(self, row: Row, where: str) -> list[dict[str, Any]]:
        text = self._prompt.system
        if text is None:
            return []
        return [{"role": "system", "content": render_template(text, row, where, SYSTEM)}]


def _user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


_IMAGE = {"type": "image", "text": None}


def _as_parts(content: str | list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a message's content as parts with the same keys, as Arrow wants them."""
    if not isinstance(content, str):
        return [_IMAGE if part["type"] == "image" else part for part in content]
    parts: list[dict[str, Any]] = []
    for place, text in enumerate(content.split(_HOLE)):
        parts += [_IMAGE] if place else []
        parts += [{"type": "text", "text": text}] if text else []
    return parts or [{"type": "text", "text": ""}]


def _are_parts(content: object) -> bool:
    """Return whether the content of a message is a list of texts and of places of images."""
    return isinstance(content, list) and all(
        isinstance(part, dict)
        and (
            (part.get("type") == "image" and not any(map(part.get, _INSIDE)))
            or (part.get("type") == "text" and isinstance(part.get("text"), str))
        )
        for part in content
    )


def _check_message(message: object, where: str, in_parts: bool) -> dict[str, Any]:
    if isinstance(message, dict):
        filled = {key: value for key, value in message.items() if value is not None}
        role = filled.get("role")
        if role in _SHAREGPT_ROLES:
            message = f"{where} has a message with the role `{role}`, which no chat template knows"
            fix = f"rename it to `{_SHAREGPT_ROLES[role]}` in the data"
            raise recipe_error(message, fix, "dataset.prompt")
        content = filled.get("content")
        if isinstance(role, str) and (
            isinstance(content, str) or (in_parts and _are_parts(content))
        ):
            return filled
    text = f"{where} has a prompt with the message {show(message)}"
    fix = "write messages as {role: user, content: text}"
    if in_parts:
        fix += ", or with parts [{type: image}, {type: text, text: …}] and images in columns of their own"
    if not in_parts and isinstance(message, dict) and _are_parts(message.get("content")):
        fix += "; if it has images, name their columns in `dataset.prompt.images`"
    raise recipe_error(text, fix, "dataset.prompt")


def _no_prompt(row: Row, where: str) -> RecipeError:
    columns = show_names(row)
    seen = f"`prompt` is {show(row['prompt'])}" if "prompt" in row else f"its columns are {columns}"
    example = next((name for name in row if name in ("question", "problem", "input")), "question")
    message = f"{where} has no prompt of its own ({seen}), and no template makes one"
    if isinstance(row.get("prompt"), dict):
        raise recipe_error(
            message, "write it as a list: [{role: user, content: text}]", "dataset.prompt"
        )
    return recipe_error(message, f'set dataset.prompt.user: "{{{{ {example} }}}}"', USER)


@lru_cache(maxsize=64)
def _plain_form(text: str) -> tuple[str, tuple[str, ...]]:
    """Return a template that only prints columns as a form for `%`, and its columns; an empty form of others."""
    # Jinja takes marks of white space, and drops a line break at the end.
    if not is_plain(text) or "{{-" in text or "-}}" in text or "\r" in text or text.endswith("\n"):
        return "", ()
    pieces = _PLAIN_COLUMN.split(text.replace("%", "%%"))
    return "%s".join(pieces[::2]), tuple(pieces[1::2])


def _fill_plain(text: str, columns: Mapping[str, Sequence[Any]], size: int) -> list[str] | None:
    """Fill a template with the rows of a block, as Jinja would in many times the time; None if only Jinja can."""
    form, names = _plain_form(text)
    if not form or not all(
        name in columns and {*map(type, columns[name])} <= _PRINTED for name in names
    ):
        return None
    if not names:
        return [form % ()] * size
    return [form % each for each in zip(*(columns[name] for name in names), strict=True)]


@lru_cache(maxsize=64)
def _compile(text: str) -> "Template":
    return environment().from_string(text)


def render_template(text: str, row: Row, where: str, path: str) -> str:
    """Fill a template with a row; messages call the row `where`, and the template by its path in the recipe.

    Raises `RecipeError` if the template fails on the row.
    """
    form, names = _plain_form(text)
    if form and all(type(row.get(name)) in _PRINTED for name in names):
        return form % tuple(row[name] for name in names)
    try:
        return _compile(text).render(row)
    except Exception as error:  # templates are a user's code: they raise anything
        raise _explain_failure(text, row, where, path, error) from error


def is_conversation(value: object) -> bool:
    """Return whether a value is a list of messages that a model can be asked to answer."""
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(each, dict) and {"role", "content"} <= each.keys() for each in value)
        and value[-1]["role"] != "assistant"
    )


def _explain_failure(text: str, row: Row, where: str, path: str, error: Exception) -> RecipeError:
    columns = sorted(template_columns(text, path))
    missing = [name for name in columns if name not in row]
    if missing and type(error).__name__ == "UndefinedError":
        message = f"`{missing[0]}` is not a column; {where} has {show_names(row)}"
        return recipe_error(message, suggest(missing[0], row, "name one of these columns"), path)
    fix = "correct the template"
    bad = next((name for name in columns if is_unreadable(row.get(name, ""))), None)
    if bad is not None and is_stored_image(row[bad]):
        mark = "" if bad == MARK else f", and write {_MARK_AS_TEXT} where it goes"
        fix = f"set `{IMAGES}: {bad}`{mark}"
    elif bad is not None and isinstance(row[bad], list):
        key = "content" if "content" in row[bad][-1] else next(iter(row[bad][-1]), "content")
        fix = f"name a text in it, such as {{{{ {bad}[-1].{key} }}}}"
        if bad == "prompt":
            fix = f"leave `{path}` out: messages in `prompt` are the prompt; or {fix}"
        elif is_conversation(row[bad]):
            fix = f"leave `{path}` out, and make the messages the prompt by `columns: {{prompt: {bad}}}`"
    elif bad is not None and row[bad]:
        fix = f"name one of its keys, such as {{{{ {bad}.{next(iter(row[bad]))} }}}}"
    elif bad is not None:
        fix = f'fill `{bad}`, or write {{{{ {bad} or "" }}}}'
    return recipe_error(f"{where}: {error}", fix, path)
