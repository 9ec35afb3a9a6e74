"""The reward `math`: a mathematically right answer."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any

from pydantic import Field

from grpo_cli.issues import Issue
from grpo_cli.recipe.base import OneOrMany
from grpo_cli.rewards.answers import (
    Place,
    Quantity,
    canonical_answer,
    find_answer,
    is_explosive,
    parse_number,
    same_quantity,
    tidy,
    unwrap,
)
from grpo_cli.rewards.contract import Batch, Gold, Meta, RewardParams, Score, TimeLimit
from grpo_cli.rewards.expressions import parse_expression, same_expression, spell
from grpo_cli.rewards.gold import make_gold, suggest_extraction

_WORDS = re.compile(r"[A-Za-z][A-Za-z' ,.-]*")
_WORD = re.compile(r"(?<![\\A-Za-z])(?<!\\begin\{)(?<!\\end\{)[A-Za-z]{3,}")
_SENTENCE = 5
"""Words that an answer may have before it looks like a solution."""
_FUNCTIONS = frozenset("sin cos tan cot sec csc sqrt log exp arcsin arccos arctan det".split())
_LITERAL = re.compile(r"\\[A-Za-z]+|[0-9]+\s*!")
"""A lone symbol or factorial, which is compared as text if it cannot be read or computed."""
_SPACE = re.compile(r"(?<![0-9])\s+|\s+(?![0-9])")
"""White space without meaning; between two digits it has one: `2 3` is not `23`."""
_DECIMAL_COMMA = re.compile(r"[-+]?(?:[0-9]{1,3}(?:\.[0-9]{3})+,[0-9]+|[0-9]+,[0-9]{1,2}\s?€)")
"""Without points or a currency, `1,25` may be a list of answers."""
_ASSIGNED = re.compile(r"([A-Za-z])\s*=")
_GLUED = re.compile(r"(?<=[0-9])(?=[kcdm]?m\s*\^)")
"""Between a number and a unit that math-verify would read as a variable: `72m^2`."""
_SHORT_WORDS = re.compile(r"(?i:no|on|up|in|am|pm|ii)|[IVX]{2,}")
"""Words, and Roman numerals, that would be read as products of letters."""
_BETWEEN = re.compile(r"(?:\s*(?:[,;]|\b(?:and|or)\b))+\s*")
"""Between the items of a list: `A and C`, `A, B, or C`."""
_DATE = re.compile(r"(?=.*[0-9]{4})[0-9]{1,4}([-/])[0-9]{1,2}\1[0-9]{1,4}")
_OPEN = re.compile(r"\bor\s+[A-Za-z]{2,}[A-Za-z\s.]*$")
"""An end that may stand for any answer: `72 or more`."""
_SHAPES = {
    "point or interval": re.compile(r"[(\[][^()\[\]]*,[^()\[\]]*[)\]]"),
    "set": re.compile(r"\\\{(?!.*(?:\\\}.|\\(?:mid|in|[lg]eq?)\b|[|:<>])).*,.*\}"),
}
"""Of what math-verify compares by its members alone."""
_END = re.compile(r"(?<!\\)[.,;\s]+\Z")
_OPTION = re.compile(
    r"(?:\\(?:text|textbf|mathrm|mathbf)\s?\{)?\s?\(?([A-E])\s?(?:\\ )?\)\s?(?:\}|:)?(?:\\[ ,;:]|[\s~])*"
    r"(?=[-+]?\s?[\w\\$.({\[])(?!\(?[A-E]\)|(?:\\text\s?\{)?\s*(?:and|or)\b)"
)
r"""The letter before the value of a choice: `B) 94`, `\textbf{(B)}\ 94`."""
_LETTERED = re.compile(r"\(([A-Za-z])\)\.?")


class MathParams(RewardParams):
    r"""Rewards a mathematically correct answer.

    Formula: 1 if the answer found in the completion equals the gold, else 0. Numbers are compared exactly
    (1,000 = 1000, 3/4 = 0.75, 2^{10} = 1024, 50% = 50 = 0.5; units are ignored), except that a decimal
    meets a number without a finite decimal (1/3, \pi, e^{-50}) if they differ by at most a millionth of it.
    Words and dates are compared as text, and anything else in the form that math-verify reads. A set is
    not a point or an interval, but a list (`2,3`) equals either; letters that are not a word are a product
    (`AB` = `BA`). 30^\circ is 30 and \pi/6, and i the imaginary unit. `101_2` equals only a number of base 2.
    `B) 94` is met by `94` and `B`; vectors are tuples, not sums of unit vectors. The gold may be `72`,
    `#### 72`, `\boxed{72}` or a solution that ends in one of these. No answer found, or one too long or too
    explosive to evaluate (`9**9**9**9`), scores 0. If the gold cannot be read in full, or is missing, the
    reward does not apply to the row.
    Range: {0, 1}.

    Source: `math_verify.verify` (math-verify 0.9); GSM8K's `####` (Cobbe et al. 2021,
    arXiv:2110.14168).
    """

    kind = "math"
    meta = Meta((0.0, 1.0), right_answer=1.0)

    answer: str = "answer"
    """The column with the gold answer."""
    extract: OneOrMany[Place] = Field(
        default=("boxed", "hashes", "answer_tag", "last_number"), min_length=1
    )
    """Where to look for the answer, in this order; the first match counts."""

    def time_limit(self) -> TimeLimit:
        """Return one, as some short expressions keep sympy busy forever; these are not right."""
        return TimeLimit(5.0, 0.0, partial(self._judge, evaluate=False))

    def gold(self, batch: Batch, row: int) -> Gold | Issue:
        """Return the gold answer; `issue` tells if only an answer that is written alike equals it."""
        cell = batch.cell(self.answer, row)
        read = _read_text(cell)
        vote = partial(canonical_answer, places=self.extract)
        gold = make_gold(read.text if read else None, cell, self.answer, vote)
        if read is None or isinstance(gold, Issue):
            return gold
        issue = gold.issue or self._find_literal(read)
        return replace(gold, issue=issue, is_readable=lambda: read_gold(cell) is not None)

    def _find_literal(self, gold: "Reference") -> Issue | None:
        """Return why a gold answer is compared as text that models write differently."""
        if gold.quantity is not None:
            return None
        alike = f"the gold {gold.text!r:.60} is compared as text:"
        plain = re.sub(r"\\[{}]", "", gold.text)
        if _DECIMAL_COMMA.fullmatch(gold.text):
            why, fix = "it has a decimal comma", "write it with a point, such as 1234.50"
        elif len(words := _WORD.findall(gold.text)) > _SENTENCE:
            why, fix = f"it has {len(words)} words", suggest_extraction(self.answer)
        elif plain.count("{") != plain.count("}"):
            why = "it has a brace without its partner"
            fix = "correct it in the data, or the `regex` that takes it out of a solution"
        else:
            return None
        return Issue(f"{alike} {why}", fix, "answer", level="warning")

    def score(self, batch: Batch, row: int) -> Score:
        return self._judge(batch, row) or Score(None)

    def _judge(self, batch: Batch, row: int, *, evaluate: bool = True) -> Score | None:
        cell = batch.cell(self.answer, row)
        gold = read_gold(cell)
        if gold is None:
            return Score(None, f"gold cannot be read: {cell!r:.60}")
        return compare(gold, batch.texts[row], self.extract, evaluate=evaluate)


@dataclass(frozen=True)
class Reference:
    """A reference answer, read once for all completions of its prompt."""

    text: str
    quantity: Quantity | None
    """The plain number it is, if it is one."""
    option: str | None = None
    """The letter of the choice that `text` is the value of, if the gold has both."""


def read_gold(cell: Any) -> Reference | None:
    r"""Read a gold answer: a number, an expression, words, or a solution with `####` or `\boxed`."""
    gold = _read_text(cell)
    if gold is None or gold.quantity is not None or is_words(gold.text):
        return gold
    return gold if _LITERAL.fullmatch(gold.text) or parse_expression(gold.text) else None


def _read_text(cell: Any) -> Reference | None:
    """Return the gold, unless its text alone rules it out."""
    return None if isinstance(cell, list | dict | None) else _read_written(str(cell))


@lru_cache(maxsize=8192)
def _read_written(written: str) -> Reference | None:
    found = find_answer(written, ("boxed", "hashes", "answer_tag", "text"))
    if found is None:
        return None
    option, text = _read_choice(found.text)
    quantity = parse_number(text)
    plain = quantity is not None or is_words(text) or _LITERAL.fullmatch(text) is not None
    if not plain and (_is_prose(text) or is_explosive(text)):
        return None
    return Reference(text, quantity, option)


def _read_choice(text: str) -> tuple[str | None, str]:
    """Return the letter, if any, and the value of an answer: `B` and `94` of `B) 94.`."""
    text = spell(unwrap(_END.sub("", text)))
    match = _OPTION.match(text)
    if match is None:
        return None, text
    value = text[match.end() :]
    return match[1], unwrap(value.replace("}", "", value.count("}") > value.count("{")))


def compare(
    gold: Reference, completion: str, places: Sequence[Place], *, evaluate: bool = True
) -> Score | None:
    """Return 1 for the right answer, else 0; None if only evaluating it can tell, and it must not be."""
    answer = find_answer(completion, places)
    if answer is None:
        return Score(0.0, "no answer found")
    same = _is_plainly_same(gold, answer.text)
    if same is None:
        if not evaluate:
            return None
        same = same_expression(gold.text, _read_choice(answer.text)[1])
    shown = f"{answer.text[:60]!r} from {answer.place}"
    return Score(1.0, shown) if same else Score(0.0, f"{shown}, not {gold.text[:60]!r}")


def is_words(text: str) -> bool:
    """Return whether a text is language (`Monday`, `2024-01-31`) and not a product of variables (`xy`)."""
    plain = tidy(text)
    if _DATE.fullmatch(plain) or (_OPEN.search(plain) and re.search("[0-9]", plain)):
        return True
    items = _BETWEEN.split(plain)
    has_word = any(re.search("[A-Za-z]{3}", each) or _SHORT_WORDS.fullmatch(each) for each in items)
    return bool(_WORDS.fullmatch(plain) and has_word)


def _is_prose(text: str) -> bool:
    """Sentences must be recognized: math-verify would read one as a product of its letters."""
    words = _WORD.findall(text)
    return len([word for word in words if word.lower() not in _FUNCTIONS]) > 1


def _is_plainly_same(gold: Reference, text: str) -> bool | None:
    """Return whether two answers are equal; None if only evaluating them can tell."""
    option, text = _read_choice(text)
    if bool(gold.option) != bool(option):
        letters = (gold.option or _folded(gold.text)), (option or _folded(text))
        if letters[0].casefold() == letters[1].casefold():
            return True
    quantity = gold.quantity and parse_number(_GLUED.sub(" ", text))
    if gold.quantity is not None and quantity is not None:
        names = (_ASSIGNED.match(tidy(each)) for each in (gold.text, text))
        same_name = len({name[1].lower() for name in names if name}) < 2
        return same_quantity(gold.quantity, quantity) and same_name
    if _folded(gold.text) == _folded(text):
        return True
    if is_words(gold.text) or is_words(text) or is_explosive(gold.text) or is_explosive(text):
        return False
    return False if _are_unlike(tidy(gold.text), tidy(text)) else None


def _are_unlike(gold: str, text: str) -> bool:
    """Return whether two answers differ in what math-verify does not read: shape, repeated items."""
    shapes = {
        name for each in (gold, text) for name, shape in _SHAPES.items() if shape.fullmatch(each)
    }
    items = [re.sub(r"\s", "", each).split(",") for each in (gold, text)]
    is_repeated = any(len(each) > len({*each}) == 1 for each in items)
    return len(shapes) > 1 or (is_repeated and len(items[0]) != len(items[1]))


def _folded(text: str) -> str:
    """Return the text as compared literally: no white space, no case, `B` for `(B)`."""
    plain = _BETWEEN.sub(",", tidy(text).rstrip("."))
    lettered = _LETTERED.fullmatch(plain)
    return _SPACE.sub("", lettered[1] if lettered else plain).casefold()
