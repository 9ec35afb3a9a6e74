"""Templates that would make too much: refused before the memory is taken, whatever makes it."""

import resource

import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment

from grpo_cli.templating import MOST_SIZE, TemplateLimitError, environment

DOUBLED = "{%% set ns = namespace(x='x') %%}{%% for i in range(60) %%}%s{%% endfor %%}{{ ns.x }}"
TOO_MUCH = (
    "{{ 'x' * 10000000000 }}",
    "{{ ((1,) * 10000000000) | length }}",
    "{{ 10000000000 * [1] }}",
    "{{ ['x' * 1000000] * 1000000 }}",
    "{{ 'x'.center(10000000000) }}",
    "{{ 'x' | attr('ljust')(10000000000) }}",
    "{{ '%*d' % (10000000000, 1) }}",
    "{{ '%.10000000000f' | format(1) }}",
    "{{ '{:>10000000000}'.format(1) }}",
    "{{ '{:{}}'.format(1, 10000000000) }}",
    "{{ ('x' * 1000000) | replace('x', 'y' * 1000000) }}",
    "{{ ('x' * 1000000).replace('', 'y' * 1000000) }}",
    "{{ ['x'] | map('center', 10000000000) | list }}",
    "{{ (('x' * 9999) | list) | join('y' * 9999) }}",
    "{{ ('\\t' * 100000).expandtabs(100000) }}",
    "{{ 1.5 | round(1000000000, 'ceil') }}",
    "{{ 2 ** 10000000000 }}",
    "{% filter center(10000000000) %}x{% endfilter %}",
    DOUBLED % "{% set ns.x = ns.x + ns.x %}",
    DOUBLED % "{% set ns.x = ns.x ~ ns.x %}",
    DOUBLED % "{% set ns.x = [ns.x, ns.x] %}",
    DOUBLED % "{% set both %}{{ ns.x }}{{ ns.x }}{% endset %}{% set ns.x = both %}",
    "{% for i in range(99999) %}{%- for j in range(99999) -%}{%- endfor -%}{% endfor %}",
    "{% for i in range(99999) %}{% set y = 'x' * 1000000 %}{% endfor %}",
    "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
)
SAME = (
    "{{ q | upper }} {{ q[:3] }} {% for c in q %}{{ loop.index }}/{{ loop.length }}{{ c }}{% endfor %}",
    "{{ ['a', 'b'] | join(', ') }} {{ 'a' ~ 1 ~ none }} {{ 'x' * 3 }} {{ '%s-%05.2f' % (q, 3.14159) }}",
    "{{ '{:>5}|{}'.format(q, 1) }} {{ {'a': 1}.a }} {{ (1, 2) | sum }} {{ q.replace('l', 'L') }}",
    "{% for a, b in {'x': 1}.items() %}{{ a }}={{ b }}{% else %}no{% endfor %}{{ -3 // 2 }}",
    "{% for i in [[1, [2]], 3] recursive %}{{ loop(i) if i is iterable else i }}{% endfor %}",
    "{% set ns = namespace(n=0) %}{% for i in range(10) if i %}{% set ns.n = ns.n + i %}{% endfor %}{{ ns.n }}",
    "{{ '{:,} of %d'.format(12345678) % 123456789 }} {{ 2.5 * 1000000000 }} {{ 'a\tb'.expandtabs(4) }}",
    "{{ q | tojson }} {{ 2.567 | round(1) }} {{ q.split('l') | map('upper') | join('-') }} {{ 'l' in q }}",
    "{% macro m(x, y=2) %}{{ x }}:{{ y }}{% endmacro %}{{ m(1) }} {{ m(q, y=3) }} {{ q.center(11, '*') }}",
)


@pytest.fixture
def little_memory():
    """A quarter of a gigabyte above what is in use: what is not refused fails here, not on the machine."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    with open("/proc/self/statm") as status:
        used = int(status.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + 2**28, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


@pytest.mark.usefixtures("little_memory")
@pytest.mark.parametrize("template", TOO_MUCH)
def test_a_template_that_makes_too_much_is_refused(template):
    with pytest.raises(TemplateLimitError):
        environment().from_string(template).render(q="hello")


@pytest.mark.parametrize("template", SAME)
def test_other_templates_give_what_jinja_gives(template):
    plain = ImmutableSandboxedEnvironment().from_string(template).render(q="hello")
    assert environment().from_string(template).render(q="hello") == plain


def test_a_chat_template_has_the_same_limits(tmp_path):
    from grpo_cli.errors import RecipeError
    from grpo_cli.fast.tokens import encode_prompt
    from grpo_cli.models.loading import load_tokenizer
    from grpo_cli.recipe.model import ModelConfig
    from tests.tiny_models import make_tiny_model

    make_tiny_model(tmp_path)
    messages = [{"role": "user", "content": "hello"}]
    usual = load_tokenizer(ModelConfig(path=str(tmp_path)))
    assert "hello" in usual.apply_chat_template(messages, tokenize=False)
    for template in ("{{ 'x' * 10000000000 }}", "{{ messages[0].content | indent(10000000000) }}"):
        tokenizer = load_tokenizer(ModelConfig(path=str(tmp_path), chat_template=template))
        with pytest.raises(RecipeError, match=f"more than {MOST_SIZE:,} characters"):
            encode_prompt(tokenizer, messages)
