import json
import logging
import threading
import time
from pathlib import Path

import pytest
from pydantic import ValidationError

from grpo_cli.rewards.answers import is_explosive, parse_number
from grpo_cli.rewards.contract import Batch, RewardContext
from grpo_cli.rewards.kinds.math import MathParams, compare, read_gold

GSM8K = Path(__file__).parents[3].parent / "shared/data/gsm8k/train.jsonl"


def score(gold, completion, **params):
    scorer = MathParams(**params).build(RewardContext(max_completion_length=64))
    [result] = scorer(Batch(prompts=[""], completions=[completion], columns={"answer": [gold]}))
    return result.value


RIGHT = [
    # what TRL's own accuracy reward scores 0 (FIELD.md, 5)
    ("72", "72"),
    ("72", "#### 72"),
    ("72", "The answer is 72"),
    ("72", "$72$"),
    ("72", r"\boxed{72}"),
    ("72", "<answer>72</answer>"),
    ("72", "<answer>\n  The answer is 72.\n</answer>"),
    ("72", "The answer is 72."),
    ("72", "**72**"),
    ("72", "48+24=72"),
    ("72", "#### 72\n\nQuestion: how many are 5 and 6?"),
    ("72", "#### Step 1\nAdd 48 and 24.\n\nThe answer is 72"),
    ("72", "#### Step 1\nAdd.\n#### 72"),
    ("72", r"First \boxed{5}, no: \boxed{72}"),
    ("72", r"It is 72. \boxed{}"),
    ("72", r"\boxed{72 \text{ clips}}"),
    ("72", "#### 72 clips"),
    ("72", "$72.00"),
    ("72", "<think>Is it \\boxed{5}?</think>The answer is 72"),
    ("72", "<think>\\boxed{72}</think>\\boxed{72}"),
    ("72", r"\boxed{48+24}"),
    ("72", r"\boxed{x = 72}"),
    (72, "72"),
    (72.0, "72"),
    ("#### 72", "72"),
    ("48/2 = <<48/2=24>>24 clips in May.\n#### 72", "72"),
    (r"So it is $\boxed{72}$.", "72"),
    ("1,000", "1000"),
    ("1000", "1,000"),
    ("1000", r"\boxed{1{,}000}"),
    ("1000", r"\boxed{1\,000}"),
    ("1,234,567", "It costs $1,234,567."),
    ("$12", "12"),
    ("12", "$12"),
    ("12", r"\boxed{\$12}"),
    ("50%", "50%"),
    ("50%", "0.5"),
    ("50", r"\boxed{50\%}"),
    ("0.5", "50 percent is #### 50%"),
    ("3/4", r"\boxed{\frac{3}{4}}"),
    ("3/4", "0.75"),
    ("0.75", r"so \dfrac{3}{4}"),
    ("-5", "The result is -5"),
    ("-5", r"\boxed{-5}"),
    ("-5", "−5"),
    ("5", "10-5"),
    ("0.5", ".5"),
    ("1.5", "1 1/2"),
    (r"\frac{1}{2}", "1/2"),
    (r"\frac{1}{2}", r"\boxed{\frac12}"),
    (r"\frac{1}{3}", "0.333333"),
    ("12 apples", "12"),
    ("12 apples", r"\boxed{12}"),
    ("12", r"\boxed{12\text{ cm}^2}"),
    ("12", r"\boxed{12 m}"),
    ("12", r"\boxed{12 m^2}"),
    ("12", r"\boxed{12m^2}"),
    ("12", r"\boxed{12~\mathrm{m}^2}"),
    ("12", r"\boxed{12 cm²}"),
    ("12", r"\boxed{12 sq. ft.}"),
    ("12", r"\boxed{12 N\cdot m}"),
    ("12", r"\boxed{12 m/s^2}"),
    ("12 m^2", r"\boxed{12}"),
    ("12", r"\boxed{\approx 12}"),
    ("12", "\\boxed{12\u200b}"),
    ("1/3", r"\boxed{0.\overline{3}}"),
    ("-7/6", r"\boxed{-1.1\overline{6}}"),
    (r"0.\overline{142857}", "1/7"),
    ("1/2", "#### ½"),
    ("5/2", r"\boxed{2½}"),
    (r"\emptyset", r"\boxed{\varnothing}"),
    ("x^2+1", r"\boxed{x² + 1}"),
    ("10^{-3}", r"\boxed{10⁻³}"),
    (r"2\sqrt{3}", r"\boxed{2√3}"),
    (r"(0,\infty)", r"\boxed{(0, ∞)}"),
    ("3 million", "3,000,000"),
    ("1500", r"\boxed{1.5 \times 10^{3}}"),
    ("90", r"\boxed{90^\circ}"),
    ("x+1", r"\boxed{1+x}"),
    (r"\sqrt{8}", r"\boxed{2\sqrt{2}}"),
    (r"\frac{\sqrt{3}}{2}", r"\boxed{\dfrac{\sqrt 3}{2}}"),
    (r"\{1,2\}", r"\boxed{\{2,1\}}"),
    ("(1, 2)", r"\boxed{(1,2)}"),
    (
        r"\begin{pmatrix} 1/2 \\ 3 \end{pmatrix}",
        r"\boxed{\begin{bmatrix}\frac{1}{2}\\3\end{bmatrix}}",
    ),
    ("Monday", r"\boxed{\text{monday}}"),
    ("B", r"\boxed{(B)}"),
    (r"\{2,3\}", r"\boxed{3,2}"),
    ("1010_2", r"\boxed{1010_{2}}"),
    ("5,5", r"\boxed{5, 5}"),
    ("no", r"\boxed{\text{No}}"),
    ("xy", r"\boxed{yx}"),
    ("2020-01-02", r"\boxed{\text{2020-01-02}}"),
    ("7", r"\boxed{10-2-1}"),
    ("1,2", r"\boxed{x=1 \text{ or } x=2}"),
    ("1000000", r"\boxed{1\,000\,000}"),
    ("0.67", r"\boxed{\frac{2}{3}=0.67}"),
    ("220", r"\boxed{12+8(26)=220}"),
    ("7", r"\boxed{2 + 1 1/2 + 3 1/2 = 7}"),
]
WRONG = [
    ("72", ""),
    ("72", "I do not know"),
    ("72", "73"),
    ("72", "72.5"),
    ("72", "72.0000001"),
    ("72", "-72"),
    ("72", "172"),
    ("72", "7,2"),
    ("72", r"\boxed{73} and 72"),
    ("2017", r"\boxed{2020-01-02}"),
    ("2020-01-02", "#### 2017"),
    ("2020-01-02", "#### 2020-01-03"),
    ("72", r"\boxed{72 \text{ or any number}}"),
    (r"\sqrt{2}", r"\boxed{\sqrt{2} \text{ or more}}"),
    ("23", r"\boxed{2\,3}"),
    ("4", r"\boxed{3=4}"),
    ("3", r"\boxed{1+1=3}"),
    ("72", "<think>72</think>"),
    ("72", "<think>72</think>73"),
    ("72", r"\boxed{72 or 73}"),
    ("72", r"\boxed{72x}"),
    ("72", r"\boxed{72x^2}"),
    ("72", r"\boxed{72 x}"),
    ("3m^2", r"\boxed{3}"),
    ("y=5", r"\boxed{x=5}"),
    ("0.3", r"\boxed{0.\overline{3}}"),
    ("72", r"\boxed{9⁹⁹⁹⁹⁹⁹}"),
    ("72", r"\boxed{9^{9^{9^9}}}"),
    ("72", "#### 9**9**9**9"),
    ("72", r"\boxed{99999999!}"),
    ("72", r"\boxed{\frac{1}{0}}"),
    ("72", "1e999"),
    ("72", r"\boxed{" + "1" * 900 + "}"),
    ("1/3", "0.33"),
    ("0.0000001", "0"),
    ("x+1", r"\boxed{x+2}"),
    ("Monday", r"\boxed{dayMon}"),
    ("Monday", "72"),
    ("B", r"\boxed{C}"),
    (r"\{2,3\}", r"\boxed{(2,3)}"),
    (r"\left[2,\frac{7}{2}\right]", r"\boxed{\{2,\frac{7}{2}\}}"),
    ("1010_2", r"\boxed{1010_3}"),
    ("no", r"\boxed{on}"),
    ("IV", r"\boxed{VI}"),
    ("5", r"\boxed{5,5}"),
    (r"\sqrt{2}, \sqrt{2}", r"\boxed{\sqrt{2}}"),
]


@pytest.mark.parametrize(("gold", "completion"), RIGHT)
def test_right_answers_score_one(gold, completion):
    assert score(gold, completion) == 1.0


@pytest.mark.parametrize(("gold", "completion"), WRONG)
def test_wrong_answers_score_zero(gold, completion):
    assert score(gold, completion) == 0.0


@pytest.mark.parametrize(
    "gold", [None, "", "   ", "\\", "She has 12 apples and 3 pears", "9^{9^{9^9}}"]
)
def test_unreadable_gold_does_not_apply(gold):
    assert score(gold, "12") is None


def test_order_of_places_is_the_recipes():
    completion = r"\boxed{1} <answer>2</answer> and 3"
    assert score("1", completion) == 1.0
    assert score("2", completion, extract=["answer_tag", "boxed"]) == 1.0
    assert score("3", completion, extract="last_number") == 1.0
    assert score("3", "3", extract=["boxed"]) == 0.0


@pytest.mark.parametrize("extract", [[], ["box"], "text"])
def test_unknown_places_are_refused(extract):
    with pytest.raises(ValidationError):
        MathParams(extract=extract)


def test_the_column_can_be_named():
    params = MathParams(answer="solution")
    assert params.columns().required == ("solution",)
    scorer = params.build(RewardContext(64))
    assert scorer(Batch([""], ["7"], columns={"solution": ["7"]}))[0].value == 1.0


def test_messages_are_read_as_text():
    assert score("72", [{"role": "assistant", "content": "It is 72."}]) == 1.0


@pytest.mark.parametrize(
    "text", ["3x", "12 or 13", "5:30", "1/0", "5 pi", "two", "", "1,00", "3 4 5"]
)
def test_not_plain_numbers(text):
    assert parse_number(text) is None


@pytest.mark.parametrize("text", ["x^2+y^2", "(x+1)^{2}(3x+1)", "e^{2x}", "2^{10}", "x**2*3", "5!"])
def test_ordinary_expressions_are_not_explosive(text):
    assert not is_explosive(text)


@pytest.mark.parametrize(
    "text",
    [
        "9^{9^9}",
        "9**9**9",
        "2^{100000}",
        "9^{(9)^9}",
        "((9^9)^{9})^9",
        "9^{999*999}",
        "12345!",
        "3!!",
    ],
)
def test_explosive_expressions(text):
    assert is_explosive(text)


def test_other_threads_work_without_warnings(caplog):
    results = []
    with caplog.at_level(logging.WARNING):
        thread = threading.Thread(
            target=lambda: results.append(score(r"\sqrt{18}", r"\boxed{3\sqrt{2}}"))
        )
        thread.start()
        thread.join()
    assert results == [1.0]
    assert not caplog.records


def test_hostile_completions_are_fast():
    hostile = [r"\boxed{" * 100_000, "1," * 10_000, "<answer>" * 3000, "9" * 30_000, "-" * 30_000]
    started = time.process_time()
    assert [score("72", text) for text in hostile] == [0.0] * len(hostile)
    assert time.process_time() - started < 5


@pytest.mark.slow
@pytest.mark.skipif(not GSM8K.is_file(), reason="GSM8K is not here")
def test_every_gsm8k_gold_is_read_and_met():
    rows = [json.loads(line) for line in GSM8K.read_text().splitlines()]
    solutions = [row["answer"] for row in rows]
    finals = [solution.rpartition("####")[2].strip() for solution in solutions]
    assert len(rows) == 7473
    assert all(read_gold(gold) for gold in [*solutions, *finals])
    scorer = MathParams().build(RewardContext(64))
    for form in ("#### {}", r"\boxed{{{}}}", "<answer>{}</answer>", "The answer is {}."):
        for golds in (solutions, finals):
            batch = Batch(finals, [form.format(n) for n in finals], columns={"answer": golds})
            assert [s.value for s in scorer(batch)] == [1.0] * len(rows)
    off = Batch(finals, [f"#### {n}1" for n in finals], columns={"answer": finals})
    assert {s.value for s in scorer(off)} == {0.0}


NEAR = [
    # exact on both sides
    (r"\frac{1}{2^{100}}", r"2^{-100}", 1),
    (r"\frac{1}{2^{100}}", r"\frac{1}{2^{99}}", 0),
    (r"\frac{1}{2^{100}}", "0", 0),
    ("10^{-20}", "10^{-21}", 0),
    ("10^{-200}", "10^{-201}", 0),
    ("2^{9999}", "2^{9999}+1", 0),
    (r"\sqrt{10^{40}+1}", "10^{20}", 0),
    (r"\sqrt{3+2\sqrt{2}}", r"1+\sqrt{2}", 1),
    (r"\pi", r"\frac{22}{7}", 0),
    (r"\pi", "3", 0),
    (r"e^{-50}", r"e^{-51}", 0),
    (r"e^{20}", "485165195", 0),
    (r"\log_2 8", "3", 1),
    (r"\sin(10^{-9})", "0", 0),
    (r"\frac{2^{2005}+1}{3 \cdot 2^{2006}}", r"\frac{1}{3 \cdot 2^{2006}}", 0),
    (r"\frac{10000001}{3}", "3333334", 0),
    # decimals
    ("0.1", "0.1000001", 0),
    ("0.1000001", "0.1", 0),
    ("1e-12", "1e-13", 0),
    ("6.63e-34", r"6.63 \times 10^{-34}", 1),
    (r"1.6 \cdot 10^{-19} \text{ C}", r"1.7 \cdot 10^{-19} \text{ C}", 0),
    (r"1.6 \cdot 10^{-19} \text{ C}", r"1.60 \cdot 10^{-19} \text{ C}", 1),
    (r"\frac{1}{3}", "0.333333", 1),
    (r"\frac{1}{3}", "0.3333", 0),
    (r"\frac{1}{3}", r"33.3333\%", 1),
    (r"\frac{1}{3 \cdot 10^{9}}", "0.000000000333333", 1),
    (r"\frac{1}{3 \cdot 10^{9}}", "0.0000000003", 0),
    (r"\frac{\pi}{4}", "0.785398", 1),
    (r"\frac{\pi}{4}", "0.7854", 0),
    (r"1000\pi", "3141.593", 1),
    (r"1000\pi", "3141.6", 0),
    (r"\sqrt{2} \cdot 10^{-12}", r"1.414214 \cdot 10^{-12}", 1),
    (r"\sqrt{2} \cdot 10^{-12}", r"1.5 \cdot 10^{-12}", 0),
    (r"1.5\pi", r"\frac{3\pi}{2}", 1),
    (r"\frac{1}{2}", r"50\%", 1),
    (r"\frac{1}{2}", r"5\%", 0),
    # inside of others
    (r"\{\frac{1}{2^{60}}, 3\}", r"\{3, \frac{1}{2^{60}}\}", 1),
    (r"\{\frac{1}{2^{60}}, 3\}", r"\{3, \frac{1}{2^{61}}\}", 0),
    (r"\{\frac{1}{3}, 2\}", r"\{2, 0.333333\}", 1),
    (r"\left[0, 10^{-20}\right]", r"\left[0, 10^{-20}\right]", 1),
    (r"\left[0, 10^{-20}\right]", r"\left[0, 10^{-21}\right]", 0),
    (r"\left(0, \frac{1}{3}\right]", r"(0, 0.333333]", 1),
    (r"\left(0, \frac{1}{3}\right]", r"[0, 0.333333]", 0),
    (r"(1, 2, 10^{-20})", r"(1, 2, 10^{-21})", 0),
    (r"\begin{pmatrix}1 & 10^{-20}\end{pmatrix}", r"\begin{pmatrix}1 & 10^{-21}\end{pmatrix}", 0),
    (
        r"\begin{pmatrix}1 & \frac{1}{3}\end{pmatrix}",
        r"\begin{pmatrix}1 & 0.333333\end{pmatrix}",
        1,
    ),
    (r"x = 10^{-20}", "10^{-20}", 1),
    (r"x = 10^{-20}", "x = 10^{-21}", 0),
    (r"x > 10^{-20}", "x > 10^{-21}", 0),
    (r"x < 10^{-20}", "10^{-20} > x", 1),
    (r"x < 10^{-20}", "10^{-21} > x", 0),
    (r"x = 10^{-20}, y = 2", "x = 10^{-20}, y = 2", 1),
    (r"x = 10^{-20}, y = 2", "x = 10^{-21}, y = 2", 0),
    (r"x > 2", r"(2, \infty)", 1),
    (r"2 < x < 3", "(2, 3)", 1),
    (r"\sin^2 x + \cos^2 x", "1", 1),
    (r"\frac{7}{10^{10}}", "7e-10", 1),
    (r"10^{-20} x", "10^{-21} x", 0),
    (r"x^2 + 10^{-20}", "x^2", 0),
    (r"y = \frac{x}{2^{60}}", r"y = \frac{x}{2^{61}}", 0),
    (r"(x+1)^2", "x^2+2x+1", 1),
    (r"x \in (0,1)", "(0,1)", 1),
    (r"(-\infty, 3)", r"(-\infty, 3)", 1),
    (r"(-\infty, 3)", r"(-\infty, 4)", 0),
    (r"\pm 2021", "2021", 0),
    ("12:00", "1:00", 0),
]


@pytest.mark.parametrize(("gold", "answer", "value"), NEAR)
def test_numbers_are_compared_exactly_or_to_their_own_size(gold, answer, value):
    assert compare(read_gold(gold), f"\\boxed{{{answer}}}", ("boxed",)).value == value


@pytest.mark.parametrize(("gold", "answer"), [("2 3", "23"), ("23", "2 3"), ("10 10", "1010")])
def test_white_space_between_digits_says_something(gold, answer):
    assert compare(read_gold(gold), f"\\boxed{{{answer}}}", ("boxed",)).value == 0.0


@pytest.mark.parametrize(
    "gold", [r"\star", "2004!", "99999999!", r"\operatorname{foo}", r"\mathrm{e}"]
)
def test_a_gold_that_cannot_be_computed_is_compared_as_text(gold):
    assert score(gold, rf"\boxed{{{gold}}}") == 1.0
    for wrong in ("12", "2005!", r"\clubsuit"):
        assert score(gold, rf"\boxed{{{wrong}}}") == 0.0


OF_A_KIND = [
    # numbers of another base
    ("101_2", "101", 0),
    ("101", r"101 \text{ (base 2)}", 0),
    ("101_2", "5", 0),
    ("1101_{(2)}", "01101_2", 1),
    ("-0.11_{2}", "-0.110_2", 1),
    ("2B_{12}", "B2_{12}", 0),
    ("24_{10}", "24", 1),
    (r"\{11_2, 10_2\}", r"\{10_2, 11_2\}", 1),
    # degrees
    (r"\frac{1}{2}", r"\sin 30^{\circ}", 1),
    (r"\tan 15°", r"2-\sqrt{3}", 1),
    (r"\sin 60^\circ", "1/2", 0),
    (r"45^\circ", r"\frac{\pi}{4}", 1),
    (r"\frac{\pi}{4}", "45", 0),
    (r"30^\circ, 60^\circ", "60, 30", 1),
    (r"\sin 20^\circ \cdot \cos 10^\circ", r"\cos 10^\circ \sin 20^\circ", 1),
    # complex numbers
    (r"e^{i\pi}", "-1", 1),
    ("2i", "(1+i)^2", 1),
    (r"1+i\sqrt{3}", r"2e^{i\pi/3}", 1),
    ("3-4i", "3+4i", 0),
    ("z=3+4i", "z=3+5i", 0),
    ("x^2+1", "(x+i)(x-i)", 1),
    # lists of choices, and the letter before the value of one
    (r"A \text{ and } C", "C, A", 1),
    ("A, B, D", r"\text{A, B and D}", 1),
    ("A, C", r"\text{A and D}", 0),
    ("I and III", "I, II", 0),
    (r"\textbf{(B)}\ 94", "94", 1),
    ("B) 94 feet", "(B)", 1),
    ("B", "B) 94", 1),
    (r"\text{B) 94}", "C", 0),
    (r"\text{B) 94}", "B) 95", 0),
    # vectors
    (r"\left\langle 1,2\right\rangle", "(1,2)", 1),
    (r"\begin{pmatrix}1\\2\end{pmatrix}", "<1, 2>", 1),
    (r"\begin{pmatrix}1\\2\end{pmatrix}", "(2,1)", 0),
    (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{pmatrix}1&2\end{pmatrix}", 0),
    # equations and sets of solutions
    ("3x+y=30", "y=-3x+30", 1),
    ("3x+y=30", "y=-3x+31", 0),
    ("f(1)=0", "f(1)=1", 0),
    (r"(0,1)", r"\{x|0＜x＜1\}", 1),
    (r"(-\infty,3)", r"x \le 3", 0),
    ("1.1x+0.11", "1.1(x+0.1)", 1),
]


@pytest.mark.parametrize(("gold", "answer", "value"), OF_A_KIND)
def test_notations_of_mathematics_are_read_in_full(gold, answer, value):
    assert score(gold, rf"\boxed{{{answer}}}") == value


def test_an_expression_is_read_whole_or_not_at_all():
    cases = r"\begin{cases} x=1+\frac{1}{2}t \\ y=%d \end{cases}"
    assert score("1/2", rf"\boxed{{{cases % 1}}}") == 0.0
    assert score(cases % 1, rf"\boxed{{{cases % 2}}}") is None


def test_the_last_number_keeps_its_base():
    assert score("101_2", "The answer is $101_2$.") == 1.0
    assert score("101", "The answer is $101_2$.") == 0.0
