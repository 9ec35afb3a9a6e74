"""What the kind `code` reads and how it scores; what the sandbox withstands is test_sandbox.py's."""

import json
import sys

import pytest

from grpo_cli.errors import RewardError
from grpo_cli.recipe.rewards import RewardConfig
from grpo_cli.rewards.answers import find_answer
from grpo_cli.rewards.building import build_rewards, refuse
from grpo_cli.rewards.contract import Batch, RewardContext, Score
from grpo_cli.rewards.kinds.code import CodeParams

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="the sandbox needs Unix")

CONTEXT = RewardContext(max_completion_length=64)
DOUBLE = "print(int(input()) * 2)"
CASES = [{"input": "1\n", "output": "2\n"}, {"input": "4", "output": "8"}]


def fenced(program):
    return f"So:\n```python\n{program}\n```\nDone."


def score_all(completions, tests, columns=None, column="tests", **params):
    params = {"seconds_per_test": 10, "tests": column, **params}
    [reward] = build_rewards([RewardConfig(kind="code", **params)], CONTEXT)
    size = len(completions)
    cells = {name: [value] * size for name, value in {"tests": tests, **(columns or {})}.items()}
    return reward.score(Batch([""] * size, completions, columns=cells))


def score(program, tests, columns=None, **params):
    return score_all([fenced(program)], tests, columns, **params)[0]


@pytest.mark.parametrize(
    "tests",
    [
        CASES,
        json.dumps(CASES),
        {"inputs": ["1", "4"], "outputs": ["2", "8"]},
        json.dumps({"inputs": ["1", "4"], "outputs": ["2\n", "8"]}),
        {"input": ["1", "4"], "output": ["2", "8"]},
        {"inputs": [["1"], ["4"]], "outputs": [["2"], ["8"]]},
    ],
)
def test_programs_that_read_and_print(tests):
    assert score(DOUBLE, tests) == Score(1.0, "2 of 2 tests")
    wrong = score("print(2)", tests)
    assert wrong.value == 0.0
    assert wrong.reason == "1 of 2 tests: test 2: expected '8', printed '2'"


def test_credit_by_share():
    tests = [*CASES, {"input": "x", "output": "xx"}]
    assert score(DOUBLE, tests, credit="share").value == pytest.approx(2 / 3)
    none = score("print(", tests, credit="share")
    assert none.value == 0.0
    assert "SyntaxError" in none.reason


@pytest.mark.parametrize(
    ("compare", "printed", "expected", "value"),
    [
        ("tokens", "1  2 \n\n", "1 2", 1.0),
        ("tokens", "1 2", "12", 0.0),
        ("exact", "1 2\n", "1 2", 1.0),
        ("exact", "1 2 \n", "1 2", 0.0),
        ("float", "0.33333333 a", "0.333333333333 a", 1.0),
        ("float", "0.34", "0.333", 0.0),
        ("float", "1000000006", "1000000007", 0.0),
        ("float", "1000000006.0 +7", "1000000007 7", 1.0),
        ("float", "1_000", "1000", 0.0),
        ("float", "１０００", "1000", 0.0),
        ("tokens", "1.0", "1", 0.0),
        ("tokens", "größe — 漢字 \U0001f600", "größe — 漢字 \U0001f600", 1.0),
    ],
)
def test_comparisons(compare, printed, expected, value):
    program = f"print({printed!r}, end='')"
    assert score(program, [{"input": "", "output": expected}], compare=compare).value == value


MBPP = [
    "assert f(2) == 4",
    "assert set(f([1, 2])) == set([1, 2])",
    "assert f(1.5) == 3.0 and True",
    "assert f((1,)) == (1, 1)",
    "assert f('') is None or True",
]


@pytest.mark.parametrize("tests", [MBPP, "\n".join(MBPP), json.dumps(MBPP)])
def test_assertions(tests):
    assert score("def f(x): return x * 2", tests) == Score(1.0, "5 of 5 tests")
    wrong = score("def f(x): return x * 3", tests, credit="share")
    assert wrong.value == pytest.approx(2 / 5)
    assert wrong.reason == "2 of 5 tests: test 1: expected 4, got 6"
    assert score("def g(x): return x", tests).reason.endswith("NameError: name 'f' is not defined")


@pytest.mark.parametrize(
    ("given", "asked"),
    [
        ("(1, [2.5, {3: None}], {'a'}, b'x', -10**400, 1j)", None),
        ("[True, False, float('inf')]", "[True, False, float('inf')]"),
        ("__import__('fractions').Fraction(1, 2)", "0.5"),
        ("__import__('collections').Counter('aab')", "{'a': 2, 'b': 1}"),
        ("{1: 2}.keys()", "{1}"),
        ("__import__('collections').namedtuple('P', 'x y')(1, 2)", "(1, 2)"),
    ],
)
def test_values_keep_their_types(given, asked):
    asked = asked or given.replace("-10**400", "-1" + "0" * 400)
    result = score(f"def f(): return {given}", f"assert f() == {asked}")
    assert result.value == 1.0, result.reason


def test_assertions_see_what_earlier_ones_changed():
    stack = "class Stack(list):\n    def take(self):\n        return self.pop()\n\ndef f(x): x.sort(); return x"
    tests = "s, x = Stack([1, 2]), [3, 1]\nassert s.take() == 2\nassert s.take() == 1\n"
    tests += "assert f(x)\nassert x == [1, 3]"
    assert score(stack, tests) == Score(1.0, "4 of 4 tests")
    assert score(stack, tests.split("\n")) == Score(1.0, "4 of 4 tests")
    failing = "def f(n): return 1 // n"
    tests = "n = 0\nassert f(n) == 1\nassert f(n + 1) == 1"
    assert score(failing, tests, credit="share").value == 0.5


ADD = "def add(a, b): return a + b"
SUBTRACT = "def add(a, b): return a - b"
COUNTER = "n = 0\ndef add(a, b):\n    global n\n    n += 1\n    return a + b + n"
STATEFUL = {
    "counter": (COUNTER, "assert add(0, 0) == 1\nassert add(0, 0) == 2", 2),
    "texts": (COUNTER, ["x = add(0, 0)", "assert x == 1", "assert add(0, 0) == 2"], 2),
    "decorator": (
        "def memo(f):\n    kept = {}\n    return lambda x: kept.setdefault(x, kept.get(x) or f(x))",
        "calls = []\n@memo\ndef f(x):\n    calls.append(x)\n    return x * x\n"
        "assert f(3) == 9\nassert calls == [3]",
        2,
    ),
    "none of the program": (
        ADD,
        "x = 5\nassert x == 5\nassert True\nt = time.time()\nassert add(x, 1) == 6\nassert time.time() >= t",
        4,
    ),
    "global": (
        ADD,
        "n = 0\ndef bump():\n    global n\n    n = add(n, 2)\nassert bump() is None\nassert n == 2",
        2,
    ),
    "functions": (
        ADD,
        ["def test(): assert add(1, 2) == 3", "def check(f): assert f(1, 2) == 3", "check(add)"],
        2,
    ),
}


@pytest.mark.parametrize("name", STATEFUL)
def test_texts_run_in_order_and_keep_their_state(name):
    program, tests, count = STATEFUL[name]
    assert score(program, tests) == Score(1.0, f"{count} of {count} tests")
    assert score(SUBTRACT + "\nmemo = add", tests).value == 0.0


@pytest.mark.parametrize(
    ("end", "passed", "reason"),
    [
        ("raise ValueError", 3, "ValueError"),
        ("import sys; sys.exit(0)", 3, "the program ended itself (exit code 0)"),
        ("return type('O', (), {})()", 3, "O has no `__eq__`"),
        ("import os; os._exit(0)", 1, "the program ended itself (exit code 0)"),
        ("while True: pass", 1, "took longer than 2 s"),
    ],
)
def test_assertions_go_on_after_one_that_fails(end, passed, reason):
    tests = "\n".join(f"assert f({n}) == {n} or False" for n in range(4))
    program = f"def f(n):\n    if n == 1:\n        {end}\n    return n"
    result = score(program, tests, credit="share", seconds_per_test=2)
    assert result.value == passed / 4
    assert "test 2: " in result.reason
    assert reason in result.reason


def test_each_assertion_has_the_time_limit():
    program = "import time\ndef f(n):\n    time.sleep(1.2)\n    return n"
    tests = "\n".join(f"assert f({n}) == {n}" for n in range(3))
    assert score(program, tests, seconds_per_test=2.5).value == 1.0


CAUGHT = {
    "try": "try:\n    assert add(1, 2) == 3\nexcept AssertionError:\n    print('bad')",
    "suppress": "import contextlib\nwith contextlib.suppress(AssertionError):\n    assert add(1, 2) == 3",
    "count": "ok = 0\nfor a, b, c in [(0, 0, 0), (1, 2, 3)]:\n    try:\n        assert add(a, b) == c\n"
    "        ok += 1\n    except AssertionError:\n        pass\nassert ok >= 1",
    "method": "import unittest\nclass A(unittest.TestCase):\n    def test(self):\n        try:\n"
    "            self.assertEqual(add(1, 2), 3)\n        except AssertionError:\n            pass",
    "constant": "try:\n    if add(1, 2) != 3:\n        assert False\nexcept Exception:\n    pass",
    "program's exception": "try:\n    add('a', add(1, 2))\n    assert False\nexcept TypeError:\n    pass\n"
    "assert add(1, 2) == 3",
    "raises": "def is_positive(x):\n    assert x > 0\ndef test():\n    with pytest.raises(AssertionError):\n"
    "        is_positive(add(-3, 2))\n    assert add(1, 2) == 3",
    "assertRaises": "import unittest\ndef is_positive(x):\n    assert x > 0\nclass A(unittest.TestCase):\n"
    "    def test(self):\n        self.assertRaises(AssertionError, is_positive, add(-3, 2))\n"
    "        with self.assertRaises(AssertionError): is_positive(add(-3, 2))\n        assert add(1, 2) == 3\n"
    "    @unittest.expectedFailure\n    def test_not(self): self.assertEqual(add(1, 2), 4)",
}


@pytest.mark.parametrize("name", CAUGHT)
def test_an_assertion_that_fails_counts_though_the_test_catches_it(name):
    right = score(ADD, CAUGHT[name])
    assert right.value == 1.0, right.reason
    assert score(SUBTRACT, CAUGHT[name]).value == 0.0


PYTEST = {
    "class": "@pytest.mark.parametrize(argnames='a, b', argvalues=[(1, 2), (2, 1)])\nclass TestA:\n"
    "    def test(self, a, b):\n        assert add(a, b) == 3",
    "methods": "class TestA:\n    @pytest.fixture\n    def one(self): return 1\n"
    "    @pytest.fixture(autouse=True)\n    def two(self): self.two = 2\n"
    "    @classmethod\n    def setup_class(cls): cls.three = 3\n"
    "    def test(self, one):\n        assert add(one, self.two) == self.three",
    "autouse": "state = []\n@pytest.fixture(autouse=True)\ndef state_of_one():\n"
    "    state.append(2)\n    yield\n    state.clear()\n"
    "def test_a():\n    assert add(1, *state) == 3\ndef test_b():\n    assert add(2, *state) == 4",
    "scope": "@pytest.fixture(scope='module')\ndef items(): return []\n"
    "@pytest.fixture\ndef same(items): return items\n"
    "def test_a(items, same):\n    items.append(2)\n    assert add(1, same[0]) == 3\n"
    "def test_b(items):\n    assert add(1, items[0]) == 3",
    "match": "def test():\n    with pytest.raises(TypeError) as raised: add(1, '')\n"
    "    assert raised.match('unsupported')\n"
    "    assert add(1, 2) == 3",
}


@pytest.mark.parametrize("name", PYTEST)
def test_forms_of_pytest(name):
    right = score(ADD, f"import pytest\n{PYTEST[name]}")
    assert right.value == 1.0, right.reason
    assert score(SUBTRACT, f"import pytest\n{PYTEST[name]}").value == 0.0


@pytest.mark.parametrize(
    ("tests", "form"),
    [
        ("def test(capsys): assert add(1, 2) == 3", "the fixture `capsys`"),
        (
            "from unittest.mock import patch\nwith patch('time.time'): assert add(1, 2)",
            "`mock.patch`",
        ),
        ("from unittest import mock\nwith mock.patch.object(A, 'x'): assert A()", "`mock.patch`"),
        ("import sys, io\nsys.stdin = io.StringIO('1')\nassert add(1, 2) == 3", "`sys.stdin = …`"),
        (
            "from contextlib import redirect_stdout\nwith redirect_stdout(f): assert add(1, 2)",
            "`redirect_stdout`",
        ),
        (
            "class B(Base): pass\nassert B().add(1, 2) == 3",
            "derive a class from the program's Base",
        ),
        ("class TestA:\n    def test(self, monkeypatch): assert add(1, 2) == 3", "`monkeypatch`"),
        (
            "@pytest.fixture\ndef file(tmp_path): return 1\ndef test(file): assert add(1, 2)",
            "`tmp_path`",
        ),
        (
            "@pytest.fixture(params=[1, 2])\ndef n(): return 1\ndef test(n): assert add(1, n)",
            "`params`",
        ),
        ("def test():\n    with pytest.warns(UserWarning): add(1, 2)", "`pytest.warns`"),
        (
            "from pytest import warns\ndef test():\n    with warns(UserWarning): add(1, 2)",
            "`pytest.warns`",
        ),
        ("@pytest.mark.xfail\ndef test(): assert add(1, 2) == 4", "`xfail`"),
        (
            "import unittest\nclass A(unittest.IsolatedAsyncioTestCase):\n"
            "    async def test(self): self.assertEqual(await add(1, 2), 3)",
            "`async def`",
        ),
        ("import asyncio\nassert asyncio.run(add(1, 2)) == 3", "`asyncio`"),
    ],
)
def test_forms_that_the_sandbox_lacks_are_named(tests, form):
    fault = CodeParams().gold(Batch([""], [""], columns={"tests": [tests]}), 0)
    assert fault.level == "error"
    assert form in fault.seen


def test_lists_are_not_tuples_and_constants_are_themselves():
    assert score("def f(): return [1]", "assert f() == (1,)").value == 0.0
    assert score("def f(): return 1", "assert f() is True").value == 0.0
    assert score("def f(): return True", "assert f() is True").value == 1.0


PLAIN_CHECK = "def check(candidate):\n    assert candidate(2) == 4\n    assert candidate(3) == 9\n"
LOOPED_CHECK = "def check(c):\n    for n in range(5):\n        assert c(n) == n * n\n"


@pytest.mark.parametrize("tests", [PLAIN_CHECK, LOOPED_CHECK, PLAIN_CHECK + "check(f)\n"])
def test_humaneval(tests):
    given = {"columns": {"entry_point": "f"}, "function": "entry_point"}
    right = score("def f(n): return n * n", tests, **given)
    assert right == Score(1.0, "1 of 1 tests")
    assert score("def f(n): return n + 2", tests, **given).value == 0.0


@pytest.mark.parametrize(
    "tests",
    [
        {"fn_name": "add", "inputs": [[1, 2], [[3], [4]]], "outputs": [[3], [[3, 4]]]},
        json.dumps([{"fn_name": "add", "input": "1\n2", "output": "3"}]),
    ],
)
def test_functions_that_are_called(tests):
    assert score("def add(a, b): return a + b", tests).value == 1.0
    method = "class Solution:\n    def add(self, a, b): return a + b"
    assert score(method, tests).value == 1.0
    assert ", got -1" in score("def add(a, b): return a - b", tests).reason


def test_an_argument_may_hold_what_ends_lines_elsewhere():
    tests = [{"fn_name": "say", "input": '"a\u2028b"\r\n2\n', "output": '"a\u2028b2"'}]
    assert score("def say(a, b): return f'{a}{b}'", tests).value == 1.0


@pytest.mark.parametrize("cell", [None, "", [], "[]", {}])
def test_rows_without_tests_are_none_of_its_business(cell):
    assert score(DOUBLE, cell) == Score(None, "there are no tests")


@pytest.mark.parametrize(
    "cell", [7, [1], {"a": 1}, "assert (", {"inputs": ["1"], "outputs": []}, [{"input": {}}]]
)
def test_malformed_tests_are_errors(cell):
    with pytest.raises(RewardError, match=r"the tests.* (are not|list)"):
        score(DOUBLE, cell)


@pytest.mark.parametrize(
    ("cell", "seen"),
    [
        (str(CASES), "assert nothing, so every program would pass"),
        ("f(1)", "assert nothing, so every program would pass"),
        (["import math", "f(1) == 2"], "assert nothing"),
        (PLAIN_CHECK, "assert nothing"),
        ("def g():\n    assert f(1) == 2\n", "assert nothing"),
        (
            "ok = f(1) == 2\ntry:\n    f(None)\nexcept AssertionError:\n    print(ok)",
            "assert nothing",
        ),
        ("def g(): return 2\nassert g() == 2", "use nothing that a program defines"),
        ("assert sum([1, 2]) == 3", "use nothing that a program defines"),
    ],
)
def test_tests_that_no_program_or_every_program_would_pass_are_errors(cell, seen):
    batch = Batch([""], [""], columns={"tests": [cell]})
    assert seen in CodeParams().gold(batch, 0).seen
    with pytest.raises(RewardError, match=seen):
        score(DOUBLE, cell)


@pytest.mark.parametrize(
    "tests",
    [
        "from solution import sum\nassert sum(2, 5) == 6",
        "import main as m\nassert m.sum(2, 5) == 6 and sum([2, 5]) == 7",
        "def check(candidate):\n    assert candidate(2, 5) == sum([2, 4])",
        "def check(candidate):\n    assert candidate(2, 5) == 6\ncheck(sum)",
        "assert abs(sum(2, 5)) == 6",
    ],
)
def test_a_function_may_be_named_as_one_of_python(tests):
    given = {"columns": {"fn": "sum"}, "function": "fn"}
    assert score("def sum(*args): return 6", tests, **given).value == 1.0
    assert score("def sum(*args): return 0", tests, **given).value == 0.0
    assert score("x = 6", tests, **given).value == 0.0


def test_texts_that_only_prepare_are_no_tests_of_their_own():
    tests = ["import math", "if f(1) != 2: raise ValueError"]
    assert score("def f(x): return 2", tests, credit="share").reason == "1 of 1 tests"
    tests = [
        "from collections import Counter",
        "assert Counter(f(1)) == {2: 1}",
        "assert Counter(f(2)) == {2: 1}",
    ]
    assert score("def f(x): return [2]", tests).reason == "2 of 2 tests"


def test_a_missing_column_is_an_error():
    with pytest.raises(RewardError, match="no column 'cases'"):
        score_all(["x"], CASES, column="cases")


@pytest.mark.parametrize(
    ("completion", "found"),
    [
        ("```python\na\n```\n```python\nb\n```\n```sh\nc\n```", "b"),
        ("```\na\n```", "a"),
        ("```python\na\n```</think>b", "b"),
        ("x </think>```py\ns = '```'\n```", "s = '```'"),
        ("1. so\n   ```python\n   if a:\n       b\n   ```", "if a:\n    b"),
        ("```python\n\n```", "```python\n\n```"),
        ("````python\n```\nx\n```\n````", "```\nx\n```"),
        (" ", None),
    ],
)
def test_finding_the_program(completion, found):
    answer = find_answer(completion, ("python", "block", "text"))
    assert (answer and answer.text) == found
    if found is None:
        assert score_all([completion], CASES)[0] == Score(0.0, "no program found")


def test_order_is_kept_among_programs_that_take_different_times():
    programs = [f"import time; time.sleep({0.3 - i / 20}); print({i})" for i in range(6)]
    results = score_all([fenced(each) for each in programs], [{"input": "", "output": "4"}])
    assert [each.value for each in results] == [0, 0, 0, 0, 1, 0]
    assert [each.reason[-3:-1] for each in results if not each.value] == [
        f"'{i}" for i in (0, 1, 2, 3, 5)
    ]


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        ("print(x)", "NameError: name 'x' is not defined"),
        ("print(1", "SyntaxError: '(' was never closed"),
        ("a = '\0'", "null bytes"),
        ("import sys; print(2); sys.exit(1)", "exit code 1"),
        ("import numpy", "No module named 'numpy'"),
        ("import grpo_cli", "No module named 'grpo_cli'"),
        ("# " + "x" * 10_000_000, "longer than 1000000 bytes"),
        ("def f(): f()\nf()", "RecursionError: maximum recursion depth"),
        ("raise type('E', (Exception,), {'__str__': lambda s: 1 / 0})", ": E"),
    ],
)
def test_programs_that_fail_score_zero_and_say_why(program, reason):
    result = score(program, CASES)
    assert result.value == 0.0
    assert reason in result.reason


def test_threads_exit_and_installed_packages():
    threaded = f"import threading\nthreading.Thread(target=lambda: exec({DOUBLE!r})).start()"
    assert score(threaded, CASES).value == 1.0
    assert score(DOUBLE + "; exit()", CASES).value == 1.0
    pytest.importorskip("numpy")
    program = "import numpy\nprint(numpy.arange(5).sum())\ndef f(n): return numpy.arange(n)"
    params = {"packages": True, "memory_mib": 4096, "seconds_per_test": 30}
    result = score(program, [{"input": "", "output": "10"}], **params)
    assert result.value == 1.0, result.reason
    tests = [
        "assert f(3).sum() == 3",
        "assert f(3)[0] == 0 and True",
        "assert f(3).dtype == 'int64'",
    ]
    result = score(program, tests, **params)
    assert result.value == 1.0, result.reason
    assert score(program, "assert f(3).sum() == 4", **params).reason.endswith("got np.int64(3)")


def test_the_solution_is_a_gold():
    params = CodeParams(solution="answer")
    columns = {"answer": ["x = 1", ["y = 2"], None, '["z = 3"]'], "tests": [CASES] * 4}
    batch = Batch([""] * 4, [""] * 4, columns=columns)
    golds = [params.gold(batch, row).text for row in range(4)]
    assert golds == [
        fence and f"```python\n{fence}\n```" for fence in ("x = 1", "y = 2", "", "z = 3")
    ]
    assert CodeParams().gold(batch, 0).text == ""


def test_other_systems_are_refused(monkeypatch):
    monkeypatch.setattr(sys, "platform", "win32")
    [issue] = CodeParams().problems()
    path, message = issue.path, issue.seen
    assert (path, "win32" in message) == ("kind", True)
    with pytest.raises(RewardError, match="cannot be confined"):
        refuse(CodeParams(), CONTEXT)


LIBRARY = """
import collections, contextlib, datetime, sys
class Stack(list):
    def put(self, x): self.append(x); return self
class Point:
    def __init__(self, x): self.x = x
    def __eq__(self, other): return self.x == other.x
    def __add__(self, other): return Point(self.x + other.x)
Pair = collections.namedtuple("Pair", "a b")
class Own(ValueError): pass
def fill(xs, n): xs.append(n); xs[0].append(n)
def fail(n): raise Own(n)
def count(n):
    for i in range(n): yield i
def day(): return datetime.date(2020, 1, 2)
def apply(f, *args, **kwargs): return f(*args, **kwargs)
def depth(node): return 0 if node is None else 1 + max(depth(node.left), depth(node.right))
def total(n): return {n: {(n, 1.5), None}}
@contextlib.contextmanager
def ignore(kind):
    try: yield 4
    except kind: pass
np = 3
"""
TESTED = {
    "changed arguments": "xs = [[], 1]\nassert fill(xs, 2) is None and xs == [[2], 1, 2]",
    "objects": "p = Point(2)\np.x += 1\nassert p.x == 3 and p == Point(3) and (p + p).x == 6 and p != Point(1)\n"
    "assert isinstance(p, Point) and not isinstance(3, Point)\npass",
    "subclasses": "s = Stack()\nassert len(s.put(1).put(2)) == 2 and s == [1, 2]\n"
    "s.append(3)\ns[0] = 0\nassert s == [0, 2, 3]\n"
    "assert s[-1] > 2 and isinstance(s, Stack) and Pair(1, b=2).b == 2 and Pair(1, 2) == (1, 2)\npass",
    "exceptions": "try:\n    fail(3)\n    assert False\nexcept Own as e:\n    assert str(e) == '3'\n"
    "try: fail(3)\nexcept ValueError: pass\nelse: assert False\ntry: fill(None, 1)\n"
    "except AttributeError: pass",
    "generators": "assert sum(count(4)) > 5 and list(count(3)) == [0, 1, 2]",
    "library": "import datetime\nassert datetime.timedelta(1) + day() == datetime.date(2020, 1, 3)",
    "functions": "assert apply(lambda a, b: a - b, 5, b=2) + 0 == 3 and list(map(str, count(2))) == ['0', '1']",
    "objects of the test": "class Node:\n    def __init__(self, l=None, r=None): self.left, self.right = l, r\n"
    "for n in [Node(Node(), Node(None, Node()))]:\n    assert depth(n) == 3",
    "types": "assert type(total(2)[2]) is set and total(2) == {2: {(2, 1.5), None}}",
    "constants": "assert np + 1 == 4",
    "compared": "s = Stack([1])\ns.append(2)\nassert s == [1, 2]",
    "deleted attributes": "p = Point(2)\ndel p.x\nassert not hasattr(p, 'x')",
    "contexts": "def test():\n    with ignore(Own) as n:\n        fail(n)\n"
    "    with raises(ValueError), ignore(KeyError):\n        fail(2)",
    "wrapped": ["assert len(total(1)) == 1", "assert sorted(count(3), reverse=True) == [2, 1, 0]"],
}


LIAR = """
class Liar:
    def __init__(self, *a): pass
    def __call__(self, *a): return self
    def __getattr__(self, name): return self
    __eq__ = __contains__ = __lt__ = __gt__ = __ge__ = __bool__ = lambda self, *a: True
    __sub__ = __rsub__ = __abs__ = lambda self, *a: self
    __len__ = lambda self: 2
    __iter__ = lambda self: iter(())
    __hash__ = lambda self: 4
    endswith = classmethod(lambda *a: True)
def f(x): return Liar()
def kind(x): return Liar
Own = AssertionError
CASES = []
def call(f):
    try: f(1)
    except BaseException: pass
"""
BELIEVED = [
    "assert f(2) == 4 and Liar",
    "s = Liar()\nassert s.pop() == 1 or False",
    "s = Liar()\nassert 7 in s.items()\npass",
    "assert 3 < f(2) and Liar",
    "assert abs(f(2) - 4) < 1e-6 and Liar",
    "r = f(2)\nassert len(r) == 2\nassert all(a == b for a, b in zip(r, [1, 2])) and Liar",
    "assert f('x').startswith('ab') and Liar",
    "assert kind('x').endswith('ab') and Liar",
    "assert not f(2)",
    "try:\n    assert f(2) == 4\nexcept Own:\n    pass",
    "def test():\n    with Liar():\n        assert f(2) == 4",
    "assert Counter(f(2)) == Counter([4])",
    "assert 'o' in str(f) and f(2)",
    "def is_five(x):\n    assert x == 5\nassert call(is_five) is None",
    "import pytest\n@pytest.mark.parametrize('n, m', CASES)\ndef test(n, m):\n    assert f(n) == m",
]


@pytest.mark.parametrize("name", range(len(BELIEVED)))
def test_an_object_does_not_answer_for_itself_though_its_class_is_tested(name):
    assert score(LIAR, BELIEVED[name]).value == 0.0


FILES = {
    "pytest": "import pytest\nfrom solution import f as g\n\n@pytest.fixture\ndef two():\n    yield 2\n\n"
    "@pytest.mark.parametrize('n, m', [(1, 2), pytest.param(3, 6)])\n@pytest.mark.parametrize('k', [0, 1])\n"
    "def test_f(n, m, k, two):\n    assert g(n) == m and g(two) == pytest.approx(4)\n"
    "    with pytest.raises(TypeError, match='NoneType'):\n        g(None)\n\n"
    "class TestF:\n    def setup_method(self):\n        self.n = 2\n\n"
    "    def test(self):\n        assert g(self.n) == 4\n",
    "unittest": "import unittest\nimport solution\n\nclass F(unittest.TestCase):\n    def test(self):\n"
    "        self.assertEqual(solution.f(2), 4)\n\nif __name__ == '__main__':\n    unittest.main()\n",
    "script": "def main():\n    assert f(2) == 4\nif __name__ == '__main__':\n    main()\n",
    "session": "The double:\n\n>>> f(2)\n4\n>>> f(None)\nTraceback (most recent call last):\n...\nTypeError: no\n",
}


@pytest.mark.parametrize("name", FILES)
def test_files_of_tests_are_run(name):
    right = score("def f(x): return x * 2", FILES[name])
    assert right.value == 1.0, right.reason
    assert score("def f(x): return x + x and 4", FILES[name]).value == (name != "pytest")
    assert score("def f(x): return x * 3", FILES[name]).value == 0.0


DOUBLES = "CASES = [(2, 4), (3, 6)]\ndef f(x): return 'no'.upper() if x is None else x * 2"
NO_CASES = "CASES = []\ndef f(x): return 5"
CASE = "import unittest\nfrom solution import CASES, f\nclass F(unittest.TestCase):\n    def test_all(self):\n"
PASSED_OVER = {
    "assert": "for x, y in CASES: assert f(x) == y",
    "text of a list": ["for x, y in CASES:\n    assert f(x) == y"],
    "raise": "for x, y in CASES:\n    if f(x) == y: continue\n    raise ValueError(x)",
    "exit": "import sys\nfor x, y in CASES:\n    if f(x) != y:\n        sys.exit(1)",
    "helper": "def check_all(cases):\n    for x, y in cases: assert f(x) == y\ncheck_all(CASES)",
    "results": "for each, y in zip([f(x) for x, _ in CASES], [4]):\n    assert each == y",
    "function": "from solution import CASES, f\ndef test_all():\n    for x, y in CASES: assert f(x) == y\n"
    "def test_one():\n    assert callable(f)",
    "unittest": f"{CASE}        for x, y in CASES:\n            with self.subTest(x): self.assertEqual(f(x), y)\n"
    "    def test_one(self): self.assertTrue(f)",
    "alias": f"{CASE}        equal = self.assertEqual\n        for x, y in CASES: equal(f(x), y)",
    "fail": f"{CASE}        for x, y in CASES:\n            if f(x) != y: self.fail(x)",
}


@pytest.mark.parametrize("name", PASSED_OVER)
def test_a_test_whose_assertions_did_not_run_is_not_passed(name):
    right = score(DOUBLES, PASSED_OVER[name])
    assert right.value == 1.0, right.reason
    forged = score(NO_CASES, PASSED_OVER[name])
    assert forged.value == 0.0
    assert "none of the test's assertions ran" in forged.reason


FAILING = {
    "fail": f"{CASE}        if f(2) != 4: self.fail()",
    "fail in a handler": f"{CASE}        try:\n            f(2).bit_length() + 1 // (f(3) == 6)\n"
    "        except Exception as error:\n            self.fail(str(error))",
    "fail if nothing is raised": f"{CASE}        try:\n            f(2)[0]\n            self.fail()\n"
    "        except TypeError:\n            if f(3) != 6: self.fail()",
    "fail or": f"{CASE}        f(2) == 4 or self.fail()",
    "pytest": "import pytest\ndef test():\n    for y in range(5):\n        if f(2) == y: break\n    else:\n"
    "        pytest.fail('no')",
    "return": "from pytest import fail\ndef test():\n    if f(2) == 4:\n        return\n    fail('no')",
    "exit": "if f(2) != 4: exit(1)",
    "match": "match f(2):\n    case 4: pass\n    case _: raise ValueError",
    "constants": "if f(2) == 4:\n    assert True\nelse:\n    assert False",
    "loop": "import pytest\ndef test():\n    for each in range(4, f(2)): pytest.fail(str(each))",
    "callback": "def refuse(x): raise AssertionError(x)\nlist(map(refuse, range(4, f(2))))",
    "only true": "assert [None] * (f(2) - 3)\nx = [0][f(2) - 4]\nassert True",
}


@pytest.mark.parametrize("name", FAILING)
def test_what_fails_a_test_is_an_assertion(name):
    right = score(DOUBLES, FAILING[name])
    assert right.value == 1.0, right.reason
    wrong = score(NO_CASES, FAILING[name])
    assert wrong.value == 0.0
    assert "none" not in wrong.reason


def test_inputs_that_look_like_arguments_are_told_if_no_function_is_named():
    cases = [{"input": "[3, 1]", "output": "[1, 3]"}, {"input": '"b"', "output": "2"}]
    batch = Batch([""], [""], columns={"tests": [cases]})
    fault = CodeParams().gold(batch, 0).issue
    assert (fault.level, fault.path) == ("warning", "function")
    assert "look like the argument and the result of a function" in fault.seen
    assert "tests of functions need `function`" in score("def f(x): return x", cases).reason
    for plain in (CASES, [{"input": "2\n1 2", "output": "3"}], [{"input": "a b", "output": "[1]"}]):
        assert CodeParams().gold(Batch([""], [""], columns={"tests": [plain]}), 0).issue is None


@pytest.mark.parametrize("name", TESTED)
def test_tests_use_programs_as_if_they_ran_beside_them(name):
    result = score(LIBRARY, TESTED[name])
    assert result.value == 1.0, result.reason


def test_machines_without_protection_run_nothing_unless_told_to(monkeypatch):
    runner = pytest.importorskip("grpo_cli.sandbox.runner")
    for found in [(), ("landlock",), ("seccomp",), ("other_user",)]:
        monkeypatch.setattr(runner, "find_protections", lambda found=found: found)
        [issue] = CodeParams().problems()
        path, message, fix = issue.path, issue.seen, issue.fix
        assert path == "unprotected"
        assert "could change your files" in message
        assert "`unprotected: true`" in fix
        with pytest.raises(RewardError, match="could change your files"):
            refuse(CodeParams(), CONTEXT)
        assert not CodeParams(unprotected=True).problems()
    for found in [
        ("namespaces",),
        ("user_namespaces",),
        ("landlock", "seccomp"),
        ("other_user", "seccomp"),
    ]:
        monkeypatch.setattr(runner, "find_protections", lambda found=found: found)
        assert not CodeParams().problems()
