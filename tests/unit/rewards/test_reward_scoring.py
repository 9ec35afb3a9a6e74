import subprocess
import sys
import textwrap
from decimal import Decimal
from fractions import Fraction

import pytest

from grpo_cli.errors import RewardError
from grpo_cli.recipe.base import field_docs
from grpo_cli.recipe.rewards import RewardConfig
from grpo_cli.rewards.building import build_rewards, name_rewards
from grpo_cli.rewards.contract import Batch, RewardContext, Score, text_of
from grpo_cli.rewards.kinds.length import LengthParams
from grpo_cli.rewards.registry import BUILT_IN, find_kind
from grpo_cli.rewards.scoring import Reward, as_float

CONTEXT = RewardContext(max_completion_length=64)
HEAVY = (
    "torch transformers trl datasets vllm accelerate peft numpy "
    "math_verify reasoning_gym sympy jinja2"
).split()


def reward(scorer, weight=1.0):
    return Reward("mine", weight, "length", LengthParams(target=1), scorer)


def returning(*values):
    return reward(lambda batch: [Score(value) for value in values])


BATCH = Batch(["p0", "p1"], ["c0", "c1"], columns={"row_id": [40, 41]})


def test_the_registry_loads_nothing_heavy():
    code = (
        "import sys, grpo_cli.rewards.registry as kinds, grpo_cli.rewards.scoring; kinds.load_kinds(); "
        "print(*sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not set(HEAVY) & set(done.stdout.split())


def test_every_kind_says_what_it_rewards():
    assert {"math", "reasoning_gym", "regex", "think_format", "length", "python"} <= set(BUILT_IN)
    for kind in BUILT_IN:
        params = find_kind(kind)
        assert params.kind == kind
        for part in ("Formula:", "Range:", "Source:"):
            assert part in params.__doc__, (kind, part)
        assert field_docs(params).keys() == params.model_fields.keys(), kind


@pytest.mark.parametrize(
    ("value", "expected"),
    [(1, 1.0), (True, 1.0), (Fraction(1, 2), 0.5), (Decimal("0.5"), 0.5), (-2.5, -2.5)],
)
def test_numbers_become_floats(value, expected):
    scores = returning(value, None).score(BATCH)
    assert scores == [Score(expected), Score(None)]
    assert type(scores[0].value) is float


def test_numpy_numbers_become_floats():
    numpy = pytest.importorskip("numpy")
    for value in (numpy.float32(1), numpy.int64(1), numpy.bool_(True), numpy.array(1.0)):
        assert as_float(value) == 1.0
    assert as_float(numpy.array([1.0])) is None


@pytest.mark.parametrize(
    ("value", "fault"),
    [
        (float("nan"), "is not finite"),
        (float("inf"), "is not finite"),
        (float("-inf"), "is not finite"),
        (1e38, "is too large"),
        (10**400, "is not finite"),
        ("1.0", "is not a number"),
        ([1.0], "is not a number"),
        (1j, "is not a number"),
    ],
)
def test_unusable_values_are_refused(value, fault):
    with pytest.raises(RewardError) as caught:
        returning(1.0, value).score(BATCH)
    message = str(caught.value)
    assert "reward 'mine'" in message
    assert "for row 42, which" in message
    assert fault in message
    assert "'p1'" in message
    assert "'c1'" in message


def test_a_weight_cannot_make_a_score_too_large():
    with pytest.raises(RewardError, match="too large"):
        reward(lambda batch: [Score(1e10)] * 2, weight=1e10).score(BATCH)


@pytest.mark.parametrize("values", [(), (1.0,), (1.0, 2.0, 3.0)])
def test_the_number_of_scores_is_checked(values):
    with pytest.raises(RewardError, match=rf"returned {len(values)} scores for 2 completions"):
        returning(*values).score(BATCH)


def own(tmp_path, source):
    path = tmp_path / "mine.py"
    path.write_text(textwrap.dedent(source))
    return build_rewards([RewardConfig(kind="python", path=f"{path}:f")], CONTEXT)[0]


def test_a_users_error_names_the_row_and_hides_our_frames(tmp_path):
    mine = own(
        tmp_path,
        """
        def inner(text):
            return 1 / (len(text) - 5)

        def f(completions, **kwargs):
            return [inner(text) for text in completions]
        """,
    )
    batch = Batch(["p"] * 3, ["ok", "x" * 5, "y" * 900], columns={"row_id": [7, 8, 9]})
    with pytest.raises(RewardError) as caught:
        mine.score(batch)
    message = str(caught.value)
    assert "failed on row 9 (rewards.0, mine.py:3): ZeroDivisionError" in message
    assert "completion: 'xxxxx'" in message
    assert "return 1 / (len(text) - 5)" in message
    assert message.count('File "') == 3  # f, its comprehension, inner
    assert "grpo_cli" not in message


@pytest.mark.parametrize(
    ("source", "fix"),
    [
        ("async def one(c): ...\ndef f(completions): return [one(c) for c in completions]",
         "make the function `async`"),
        ("import re\ndef f(completions): return [re.search('7', c).end() for c in completions]",
         "test for None first"),
        ("def f(completions): return [c[0]['content'] for c in completions]", "each is a string"),
        ("def f(completions): return [open('mine.py').read() for c in completions]",
         r"`Path\(__file__\).parent / …`"),
    ],
)  # fmt: skip
def test_a_fix_fits_what_a_function_did(tmp_path, source, fix):
    with pytest.raises(RewardError, match=fix):
        own(tmp_path, source).score(Batch(["p"], ["a"]))


def test_a_function_that_takes_messages_for_text_is_told_how_to_read_them(tmp_path):
    mine = own(
        tmp_path, "def f(completions): return [float('a' in c.lower()) for c in completions]"
    )
    chat = [[{"role": "assistant", "content": "a"}]]
    with pytest.raises(RewardError, match=r"\(rewards.0, mine.py:1\)") as caught:
        mine.score(Batch(["p"], chat))
    assert 'list of messages; read its text: `completion[-1]["content"]`' in str(caught.value)
    assert mine.score(Batch(["p"], ["A"]))[0].value == 1.0


@pytest.mark.parametrize(
    ("body", "reads_text"),
    [
        ("re.search('7', c)", True),
        ("'a' + c", True),
        ("c['content']", True),
        ("c[0].lower()", True),
        ("float(c)", True),
        ("score(c)", True),
        ("1 + 'a'", False),
        ("list(zip(c, 3))", False),
        ("1 / 0", False),
    ],
)
def test_messages_taken_for_text_are_explained(tmp_path, body, reads_text):
    source = f"""
        import re
        def score(text):
            return text.split()
        def f(completions, keys):
            return [{body} for c, k in zip(completions, keys)]
        """
    batch = Batch(["p"], [[{"role": "assistant", "content": "a"}]], columns={"keys": [["x"]]})
    with pytest.raises(RewardError) as caught:
        own(tmp_path, source).score(batch)
    assert ("list of messages" in str(caught.value)) is reads_text


@pytest.mark.parametrize(
    ("body", "reads_messages"),
    [("c[0]['content']", True), ("[m['content'] for m in c]", True), ("c.get('role')", True),
     ("float(k) + c", False)],
)  # fmt: skip
def test_text_taken_for_messages_is_explained(tmp_path, body, reads_messages):
    source = f"def f(completions, keys): return [{body} for c, k in zip(completions, keys)]"
    batch = Batch(["p"], ["ab"], columns={"keys": ["4"]})
    with pytest.raises(RewardError) as caught:
        own(tmp_path, source).score(batch)
    assert ("plain text here" in str(caught.value)) is reads_messages


def test_a_failure_of_the_whole_batch_says_so(tmp_path):
    mine = own(
        tmp_path,
        """
        def f(completions):
            if len(completions) > 1:
                raise ValueError("too many")
            return [0.0]
        """,
    )
    with pytest.raises(RewardError, match=r"batch of 2 \(rewards.0, mine.py:4\): ValueError"):
        mine.score(BATCH)


@pytest.mark.parametrize("value", ["1.0", "{'a': 1}", "'text'", "None"])
def test_what_is_no_list_is_refused(tmp_path, value):
    with pytest.raises(RewardError, match="not a list with one number a completion"):
        own(tmp_path, f"def f(completions): return {value}").score(BATCH)


def test_exit_in_a_reward_does_not_end_the_run_silently(tmp_path):
    with pytest.raises(RewardError, match="SystemExit"):
        own(tmp_path, "def f(completions): raise SystemExit(0)").score(BATCH)


def test_long_texts_are_shortened():
    batch = Batch([[{"role": "user", "content": "q" * 5000}]], ["c" * 5000])
    with pytest.raises(RewardError) as caught:
        returning(float("nan")).score(batch)
    assert len(str(caught.value)) < 1200
    assert "…" in str(caught.value)


@pytest.mark.parametrize(
    ("configs", "names"),
    [
        ([("math", None), ("length", None)], ["math", "length"]),
        ([("math", None), ("math", None), ("math", None)], ["math", "math_2", "math_3"]),
        ([("math", None), ("math", "strict")], ["math", "strict"]),
        ([("length", None), ("math", "length")], ["length_2", "length"]),
        ([("math", None), ("math", None), ("length", "math_2")], ["math", "math_3", "math_2"]),
    ],
)
def test_names_are_unique(configs, names):
    assert name_rewards([RewardConfig(kind=kind, name=name) for kind, name in configs]) == names


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"kind": "maths"}, "there is no kind 'maths'. Fix: use one of math"),
        ({"kind": "math", "anwser": "x"}, "anwser"),
        ({"kind": "length"}, "target"),
        ({"kind": "regex", "pattern": "["}, "unterminated"),
    ],
)
def test_wrong_configs_are_reward_errors(config, message):
    with pytest.raises(RewardError) as caught:
        build_rewards([RewardConfig(**config)], CONTEXT)
    assert message in str(caught.value)


def test_building_keeps_order_and_weight():
    configs = [RewardConfig(kind="length", target=3, weight=0.5), RewardConfig(kind="think_format")]
    first, second = build_rewards(configs, CONTEXT)
    assert (first.name, first.weight, first.params.target) == ("length", 0.5, 3)
    assert (second.name, second.weight) == ("think_format", 1.0)
    assert first.score(Batch([], [])) == []


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("a", "a"),
        ([], ""),
        ([{"role": "assistant", "content": "a"}, {"role": "tool", "content": "b"}], "a\nb"),
        ([{"role": "assistant", "content": None, "tool_calls": []}], ""),
        ([{"content": [{"type": "image"}, {"type": "text", "text": "a"}]}], "a"),
    ],
)
def test_texts_of_messages(value, expected):
    assert text_of(value) == expected


def test_all_rows_that_fail_are_named_at_once(tmp_path):
    mine = own(tmp_path, "def f(completions): return [1 / len(c) for c in completions]")
    batch = Batch(["p"] * 5, ["", "a", "", "b", ""], columns={"row_id": [3, 4, 3, 6, 7]})
    with pytest.raises(RewardError, match=r"failed on row 4, whose .* \(also on row 8\)"):
        mine.score(batch)
