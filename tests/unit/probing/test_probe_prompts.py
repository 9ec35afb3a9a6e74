"""What the probe finds in a tokenizer and its chat template."""

import pytest

from grpo_cli.probing.prompts import check_generation_prompt

BODY = "{% for m in messages %}<{{ m.role }}>{{ m.content }}</s>{% endfor %}"


class Tokenizer:
    """Fills a chat template."""

    def __init__(self, template):
        self.chat_template = template

    def apply_chat_template(self, messages, tokenize, add_generation_prompt=False):
        from jinja2 import Template

        options = {"add_generation_prompt": add_generation_prompt}
        return Template(self.chat_template).render(messages=messages, **options)


@pytest.mark.parametrize(
    ("template", "found"),
    [
        (BODY, True),
        (BODY + "{% if add_generation_prompt %}<assistant>{% endif %}", False),
        ("{% for m in messages %}{{ m.content }} {% endfor %}", False),
    ],
)
def test_a_template_without_a_generation_prompt_is_found(template, found):
    prompt = [{"role": "user", "content": "1 + 1?"}]
    issues = list(check_generation_prompt(Tokenizer(template), prompt, None))
    assert [("'<assistant>'" in each.seen, each.level) for each in issues] == (
        [(True, "warning")] if found else []
    )
