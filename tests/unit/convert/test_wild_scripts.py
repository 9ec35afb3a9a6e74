"""Python of any kind ends in an account or in one message, and all that a script does is in the account."""

import ast
import random
import sysconfig
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_cli.convert.conversion import translate
from grpo_cli.convert.key_report import write_recipe
from grpo_cli.errors import ProblemsError
from tests.nightly import scale

LIBRARY = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
HEAD = "import sys, random\nfrom trl import GRPOConfig, GRPOTrainer\n"
VALUES = (
    "1",
    "0.5",
    "'text'",
    "None",
    "unknown()",
    "sys.argv[1]",
    "f'{x}'",
    "2 ** 3",
    "[1, y]",
    "flag or 2",
)
FIELDS = (
    "learning_rate",
    "beta",
    "max_steps",
    "num_generations",
    "output_dir",
    "no_such_field",
    "bf16",
)


@pytest.mark.parametrize(
    "path", random.Random(0).sample(LIBRARY, scale(5, len(LIBRARY))), ids=lambda path: path.stem
)
def test_any_python_file_is_read_without_a_traceback(path):
    text = path.read_text(encoding="utf-8", errors="replace")
    with pytest.raises(ProblemsError):
        translate(text, path)
    script = f"{text}\nGRPOTrainer('m/x', 'r/m', GRPOConfig(**vars), load_dataset('d/x'))\n"
    with suppress(ProblemsError):
        assert write_recipe(translate(script, path), path.name)


@pytest.mark.parametrize(
    "text",
    [
        "\0",
        "(" * 500,
        "x" + ".a" * 3000,
        "-" * 5000 + "1",
        "f(" * 90 + ")" * 90,
        "def f(): f()\nf()",
        "x = x = [x]\nx.append(x)",
    ],
)
def test_python_beyond_reason_ends_in_one_message(text):
    with pytest.raises(ProblemsError):
        translate(text, Path("train.py"))


SETTING = st.tuples(st.sampled_from(FIELDS), st.sampled_from(VALUES))
STATEMENT = st.one_of(
    SETTING.map(lambda pair: f"args.{pair[0]} = {pair[1]}"),
    SETTING.map(lambda pair: f"if flag:\n    args.{pair[0]} = {pair[1]}"),
    SETTING.map(lambda pair: f"for each in many:\n    args.{pair[0]} = {pair[1]}"),
    SETTING.map(lambda pair: f"def change(a):\n    a.{pair[0]} = {pair[1]}\nchange(args)"),
    st.sampled_from(["tune(args)", "args.freeze(1)", "rows = rows.map(f)", "rows = rows.odd(3)"]),
)


@settings(max_examples=scale(40, 400), deadline=None)
@given(
    st.dictionaries(st.sampled_from(FIELDS), st.sampled_from(VALUES)),
    st.lists(STATEMENT, max_size=4),
)
def test_each_setting_is_in_the_account_with_its_line(arguments, statements):
    given_lines = [f"    {name}={value}," for name, value in arguments.items()]
    body = ["rows = load_dataset('d/x')", "args = GRPOConfig(", *given_lines, ")", *statements]
    text = HEAD + "\n".join([*body, "GRPOTrainer('m/x', 'r/m', args, rows).train()", ""])
    report = translate(text, Path("train.py"))
    lines = {entry.location.line for entry in report.entries}
    left = " ".join(report.to_do.values())
    account = {
        *lines,
        *(line for line in range(1, 60) if f"train.py:{line} " in left or f"line {line}:" in left),
    }
    tree = ast.parse(text)
    last = {}
    for node in ast.walk(tree):
        match node:
            case ast.keyword(arg=name, value=value):
                last[name] = max(value.lineno, last.get(name, 0))
            case ast.Expr(value=ast.Call()):
                last[ast.unparse(node)] = node.lineno
            case ast.Assign(targets=[ast.Attribute(attr=name)]):
                last[name] = max(node.lineno, last.get(name, 0))
    for name, line in last.items():
        is_change = name.startswith("change(")
        assert is_change or line in account, (name, line, text)
