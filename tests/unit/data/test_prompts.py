import pytest

from grpo_cli.data.prompts import Renderer, resolve_style, template_columns
from grpo_cli.errors import RecipeError
from grpo_cli.recipe.dataset import PromptConfig

USER = {"role": "user", "content": "1 + 1"}
SYSTEM = {"role": "system", "content": "Be brief."}
ROW = {"question": "1 + 1", "answer": "2", "hint": None}


def render(row, resolved="chat", **keys):
    return Renderer(PromptConfig(**keys), resolved).render(row, "training row 7")


def problem_of(row, resolved="chat", **keys):
    with pytest.raises(RecipeError) as error:
        render(row, resolved, **keys)
    (problem,) = error.value.problems
    return problem


def test_a_chat_prompt_has_the_messages_asked_for() -> None:
    assert render(ROW, user="{{ question }}") == [USER]
    assert render(ROW, user="{{ question }}", system="Be brief.") == [SYSTEM, USER]


def test_system_is_a_template_too() -> None:
    assert render(ROW, user="x", system="{{ answer }}")[0]["content"] == "2"


def test_a_text_prompt_is_the_rendered_text() -> None:
    assert render(ROW, "text", user="Q: {{ question }}\n") == "Q: 1 + 1"


def test_values_are_not_rendered_again_nor_escaped() -> None:
    row = {"q": "{{ 7 * 7 }} <b> & {% if %}"}
    assert render(row, "text", user="{{ q }}") == row["q"]


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({}, "1 + 1"),
        ({"style": "chat"}, [USER]),
        ({"system": "Be brief."}, [SYSTEM, USER]),
    ],
)
def test_a_text_column_is_wrapped_only_where_asked(keys, expected) -> None:
    assert render({"prompt": "1 + 1"}, **keys) == expected


def test_a_column_of_messages_gets_a_system_message_where_it_has_none() -> None:
    assert render({"prompt": [USER]}) == [USER]
    assert render({"prompt": [USER]}, system="Be brief.") == [SYSTEM, USER]
    own = [{"role": "system", "content": "Mine."}, USER]
    assert render({"prompt": own}, system="Be brief.") == own


def test_keys_without_value_leave_messages() -> None:
    assert render({"prompt": [{**USER, "tool_calls": None}]}) == [USER]


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ([USER, {"role": "assistant", "content": "2"}], "ends with [{'role': 'assistant'"),
        ([], "ends with []"),
        ([SYSTEM], "ends with [{'role': 'system'"),
        ([{"role": "user"}], "with the message {'role': 'user'}"),
        (["hello"], "with the message 'hello'"),
        ([{"role": "user", "content": [{"type": "image"}]}], "with the message"),
        ([{"role": "user", "content": " \n"}], "has an empty prompt"),
        ("  ", "has an empty prompt"),
        (None, "`prompt` is None"),
        (7, "`prompt` is 7"),
    ],
)
def test_ill_formed_prompt_columns_name_the_row(prompt, expected) -> None:
    problem = problem_of({"prompt": prompt})
    assert problem.seen.startswith("training row 7")
    assert expected in problem.seen


def test_rows_without_prompt_are_told_which_template_to_write() -> None:
    problem = problem_of({"problem": "x", "answer": "y"})
    assert problem.path == "dataset.prompt.user"
    assert "`problem`, `answer`" in problem.seen
    assert problem.fix == 'set dataset.prompt.user: "{{ problem }}"'


def test_messages_without_chat_template_are_refused() -> None:
    assert problem_of({"prompt": [USER]}, "text").path == "dataset.prompt.style"


def test_plain_text_takes_no_system_message() -> None:
    problem = problem_of(ROW, "text", user="{{ question }}", system="x", style="text")
    assert problem.path == "dataset.prompt.system"


@pytest.mark.parametrize("user", ["", "  ", "{% if false %}x{% endif %}"])
def test_empty_templates_are_refused(user) -> None:
    problem = problem_of(ROW, user=user)
    assert (problem.path, "empty" in problem.seen) == ("dataset.prompt.user", True)


def test_a_misspelt_column_is_suggested() -> None:
    problem = problem_of(ROW, user="{{ qestion }}")
    assert "`qestion` is not a column" in problem.seen
    assert problem.fix == "write `question`"


def test_an_empty_value_is_never_printed_as_the_word_none() -> None:
    problem = problem_of(ROW, user="{{ question }} {{ hint }}")
    assert "training row 7" in problem.seen
    assert '{{ hint or "" }}' in problem.fix
    assert render(ROW, "text", user='{{ question }}{{ hint or "" }}') == "1 + 1"


@pytest.mark.parametrize(
    "user",
    [
        "{{ question.__class__.__mro__ }}",
        "{% include '/etc/passwd' %}",
        "{{ items.append(1) }}",
        "{{ 1 / 0 }}",
    ],
)
def test_the_sandbox_holds(user) -> None:
    assert problem_of({**ROW, "items": [1]}, user=user).path == "dataset.prompt.user"


def test_template_columns_are_those_it_reads() -> None:
    text = "{{ a }}{% for x in b %}{{ x.c }}{{ range(2) }}{% endfor %}{% set d = 1 %}{{ d }}"
    assert template_columns(text) == {"a", "b"}
    assert template_columns("plain") == frozenset()


@pytest.mark.parametrize(
    ("text", "line"), [("{{ a", 1), ("x\n\n{% if %}", 3), ("\n{{ a | nofilter }}", 2)]
)
def test_a_syntax_error_has_its_line(text, line) -> None:
    with pytest.raises(RecipeError) as error:
        template_columns(text, "dataset.prompt.system")
    (problem,) = error.value.problems
    assert problem.path == "dataset.prompt.system"
    assert f"line {line} of the template" in problem.seen


def test_randomness_is_not_to_be_had() -> None:
    with pytest.raises(RecipeError, match="random"):
        template_columns("{{ a | random }}")
    assert template_columns("{{ lipsum() }}") == {"lipsum"}


def test_templates_are_checked_before_any_row() -> None:
    with pytest.raises(RecipeError, match=r"dataset\.prompt\.system"):
        Renderer(PromptConfig(user="x", system="{{"), "chat")


@pytest.mark.parametrize(
    ("keys", "has_template", "expected"),
    [
        ({}, True, "chat"),
        ({}, False, "text"),
        ({"style": "text"}, True, "text"),
        ({"style": "chat"}, True, "chat"),
        ({"system": "x"}, True, "chat"),
    ],
)
def test_the_style_follows_the_tokenizer(keys, has_template, expected) -> None:
    assert resolve_style(PromptConfig(**keys), has_template) == expected


@pytest.mark.parametrize(
    ("keys", "path"),
    [({"system": "x"}, "dataset.prompt.system"), ({"style": "chat"}, "dataset.prompt.style")],
)
def test_what_needs_a_chat_template_says_so(keys, path) -> None:
    with pytest.raises(RecipeError) as error:
        resolve_style(PromptConfig(**keys), False)
    (problem,) = error.value.problems
    assert problem.path == path
    assert "model.chat_template" in problem.fix
