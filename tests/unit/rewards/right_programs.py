"""Right programs in the styles of tests that datasets have: name, style, program, tests, parameters."""

# ruff: noqa
# fmt: off
RIGHT = []


def add(name, style, program, tests, **extra):
    RIGHT.append((name, style, program.strip("\n") + "\n", tests.strip("\n") + "\n" if isinstance(tests, str) else tests, extra))


# ---------------------------------------------------------------- HumanEval
add("he-close-elements", "humaneval", '''
from typing import List


def has_close_elements(numbers: List[float], threshold: float) -> bool:
    """ Check if any two numbers are closer than threshold. """
    numbers = sorted(numbers)
    return any(b - a < threshold for a, b in zip(numbers, numbers[1:]))
''', '''
METADATA = {
    'author': 'jt',
    'dataset': 'test'
}


def check(candidate):
    assert candidate([1.0, 2.0, 3.9, 4.0, 5.0, 2.2], 0.3) == True
    assert candidate([1.0, 2.0, 3.9, 4.0, 5.0, 2.2], 0.05) == False
    assert candidate([1.0, 2.0, 5.9, 4.0, 5.0], 0.95) == True
    assert candidate([1.1, 2.2, 3.1, 4.1, 5.1], 0.5) == False, "This prints if this assert fails"
''', function="has_close_elements")
add("he-truncate", "humaneval", "def truncate_number(number: float) -> float:\n    return number % 1.0\n", '''
def check(candidate):
    assert candidate(3.5) == 0.5
    assert abs(candidate(1.33) - 0.33) < 1e-6
    assert abs(candidate(123.456) - 0.456) < 1e-6
''', function="truncate_number")
add("he-mad", "humaneval", "def mad(numbers):\n    m = sum(numbers) / len(numbers)\n    return sum(abs(x - m) for x in numbers) / len(numbers)\n", '''
def check(candidate):
    assert abs(candidate([1.0, 2.0, 3.0]) - 2.0/3.0) < 1e-6
    assert abs(candidate([1.0, 2.0, 3.0, 4.0]) - 1.0) < 1e-6
''', function="mad")
add("he-poly", "humaneval", '''
def poly(xs, x):
    return sum(c * x ** i for i, c in enumerate(xs))


def find_zero(xs):
    lo, hi = -1.0, 1.0
    while poly(xs, lo) * poly(xs, hi) > 0:
        lo, hi = lo * 2, hi * 2
    while hi - lo > 1e-10:
        mid = (lo + hi) / 2
        if poly(xs, lo) * poly(xs, mid) > 0:
            lo = mid
        else:
            hi = mid
    return lo
''', '''
def check(candidate):
    import math
    import random
    rng = random.Random(42)
    import copy
    for _ in range(20):
        ncoeff = 2 * rng.randint(1, 3)
        coeffs = []
        for _ in range(ncoeff):
            coeff = rng.randint(-10, 10)
            if coeff == 0:
                coeff = 1
            coeffs.append(coeff)
        solution = candidate(copy.deepcopy(coeffs))
        assert math.fabs(poly(coeffs, solution)) < 1e-3
''', function="find_zero")
add("he-encode-decode", "humaneval", '''
def encode_cyclic(s: str):
    groups = [s[3 * i:min(3 * i + 3, len(s))] for i in range((len(s) + 2) // 3)]
    return "".join(g[1:] + g[0] if len(g) == 3 else g for g in groups)


def decode_cyclic(s: str):
    return encode_cyclic(encode_cyclic(s))
''', '''
def check(candidate):
    from random import randint, choice
    import string

    letters = string.ascii_lowercase
    for _ in range(30):
        str = ''.join(choice(letters) for i in range(randint(10, 20)))
        encoded_str = encode_cyclic(str)
        assert candidate(encoded_str) == str
''', function="decode_cyclic")
add("he-none-tuple", "humaneval", '''
def largest_smallest_integers(lst):
    neg = [x for x in lst if x < 0]
    pos = [x for x in lst if x > 0]
    return (max(neg) if neg else None, min(pos) if pos else None)
''', '''
def check(candidate):

    # Check some simple cases
    assert candidate([2, 4, 1, 3, 5, 7]) == (None, 1)
    assert candidate([-6, -4, -4, -3, 1]) == (-3, 1)
    assert candidate([]) == (None, None)

    # Check some edge cases that are easy to work out by hand.
    assert True
''', function="largest_smallest_integers")
add("he-tuple-loop", "humaneval", "def add(x, y):\n    return x + y\n", '''
def check(candidate):
    import random

    assert candidate(0, 1) == 1
    assert candidate(2, 3) == 5
    for i in range(50):
        x, y = random.randint(0, 1000), random.randint(0, 1000)
        assert candidate(x, y) == x + y
''', function="add")
add("he-keyword", "humaneval", "def scale(xs, *, factor=2, offset=0):\n    return [x * factor + offset for x in xs]\n", '''
def check(candidate):
    assert candidate([1, 2]) == [2, 4]
    assert candidate([1, 2], factor=3) == [3, 6]
    assert candidate(xs=[1], **{"offset": 5}) == [7]
    assert candidate(*[[4]]) == [8]
''', function="scale")
add("he-lambda-name", "humaneval", "triple = lambda n: 3 * n\n", "def check(candidate):\n    assert candidate(2) == 6\n    assert [candidate(i) for i in range(3)] == [0, 3, 6]\n", function="triple")
add("he-evalplus", "humaneval", "def common(l1, l2):\n    return sorted(set(l1) & set(l2))\n", '''
import math

def is_floats(x) -> bool:
    if isinstance(x, float):
        return True
    if isinstance(x, (list, tuple)) and x:
        return all(isinstance(i, float) for i in x)
    return False

def assertion(out, exp, atol):
    exact_match = out == exp
    if atol == 0 and is_floats(exp):
        atol = 1e-6
    if not exact_match and atol != 0:
        assert all(math.isclose(a, b, abs_tol=atol) for a, b in zip(out, exp))
    else:
        assert exact_match

inputs = [[[1, 4, 3], [3, 4, 9]], [[5], [6]], [[], []]]
results = [[3, 4], [], []]

def check(candidate):
    for i, (inp, exp) in enumerate(zip(inputs, results)):
        assertion(candidate(*inp), exp, 0)
''', function="common")

# ---------------------------------------------------------------- MBPP: asserts, a string or a list
add("mbpp-list", "mbpp", "def similar_elements(a, b):\n    return tuple(set(a) & set(b))\n", [
    "assert set(similar_elements((3, 4, 5, 6),(5, 7, 4, 10))) == set((4, 5))",
    "assert set(similar_elements((1, 2, 3, 4),(5, 4, 3, 7))) == set((3, 4))",
    "assert set(similar_elements((11, 12, 14, 13),(17, 15, 14, 13))) == set((13, 14))"])
add("mbpp-setup", "mbpp", "import heapq\n\ndef heap_queue_largest(nums, n):\n    return heapq.nlargest(n, nums)\n", [
    "data = [25, 35, 22, 85, 14, 65, 75, 22, 58]", "import math",
    "assert heap_queue_largest(data, 3) == [85, 75, 65]", "assert math.prod(heap_queue_largest(data, 2)) == 85 * 75"])
add("mbpp-math", "mbpp", "import math\ndef lateralsurface_cone(r, h):\n    return math.pi * r * math.hypot(r, h)\n", [
    "import math", "assert math.isclose(lateralsurface_cone(5,12), 204.20352248333654, rel_tol=0.001)",
    "assert math.isclose(lateralsurface_cone(10,15), 566.3586699569488, rel_tol=0.001)"])
add("mbpp-class-node", "mbpp", '''
class Node:
    def __init__(self, data):
        self.data, self.left, self.right = data, None, None
def max_height(node):
    return 0 if node is None else 1 + max(max_height(node.left), max_height(node.right))
''', ["root = Node(1)\nroot.left = Node(2)\nroot.right = Node(3)\nroot.left.left = Node(4)\nroot.left.right = Node(5)",
      "assert max_height(root) == 3", "assert max_height(None) == 0", "assert (max_height(root.left)) == 2"])
add("mbpp-string", "asserts", "def is_prime(n):\n    return n > 1 and all(n % d for d in range(2, int(n ** 0.5) + 1))\n",
    "assert is_prime(7)\nassert not is_prime(8)\nassert is_prime(2) is True\nassert [n for n in range(20) if is_prime(n)] == [2, 3, 5, 7, 11, 13, 17, 19]")
add("mbpp-counter", "mbpp", "from collections import Counter\ndef freq(xs):\n    return Counter(xs)\n", [
    "assert freq([10, 10, 20]) == ({10: 2, 20: 1})", "assert freq('aab')['a'] == 2", "assert freq([])['x'] == 0"])
add("string-json-list", "mbpp", "def double(n):\n    return 2 * n\n", '["assert double(2) == 4", "assert double(-1) == -2"]')
add("asserts-message", "asserts", "def area(r):\n    return 3.14 * r * r\n", "r = area(2)\nassert r == 12.56, f'got {r}'\nassert f'{area(1):.1f}' == '3.1', 'format'\nassert '%.2f' % area(1) == '3.14'")

# ---------------------------------------------------------------- LiveCodeBench, LeetCode, APPS
SOLUTION = '''
class Solution:
    def twoSum(self, nums: list[int], target: int) -> list[int]:
        seen = {}
        for i, n in enumerate(nums):
            if target - n in seen:
                return [seen[target - n], i]
            seen[n] = i
'''
add("lcb-calls", "calls", SOLUTION, [{"input": [[2, 7, 11], 9], "output": [0, 1]}, {"input": [[3, 2, 4], 6], "output": [1, 2]}], function="twoSum")
add("lcb-asserts", "solution", SOLUTION, "assert Solution().twoSum([2, 7, 11], 9) == [0, 1]\nassert Solution().twoSum(nums=[3, 3], target=6) == [0, 1]")
add("lcb-instance", "solution", SOLUTION, "solution = Solution()\nassert solution.twoSum([3, 2, 4], 6) == [1, 2]\nassert sorted(solution.twoSum([3, 3], 6)) == [0, 1]")
add("lcb-method-candidate", "humaneval", SOLUTION, "def check(candidate):\n    assert candidate(nums=[2, 7], target=9) == [0, 1]\n    assert candidate([3, 3], 6) == [0, 1]\n", function="Solution().twoSum")
add("leetcode-tree", "solution", '''
from typing import Optional
class TreeNode:
    def __init__(self, val=0, left=None, right=None):
        self.val, self.left, self.right = val, left, right
class Solution:
    def invertTree(self, root: Optional[TreeNode]) -> Optional[TreeNode]:
        if root:
            root.left, root.right = self.invertTree(root.right), self.invertTree(root.left)
        return root
''', '''
def build(values):
    return TreeNode(values[0], TreeNode(values[1]), TreeNode(values[2]))

r = Solution().invertTree(build([1, 2, 3]))
assert (r.val, r.left.val, r.right.val) == (1, 3, 2)
assert r.left.left is None
assert Solution().invertTree(None) is None
''')
add("leetcode-linked-list", "solution", '''
class ListNode:
    def __init__(self, val=0, next=None):
        self.val = val
        self.next = next
def reverse(head):
    prev = None
    while head:
        head.next, prev, head = prev, head, head.next
    return prev
''', '''
def to_list(node):
    out = []
    while node:
        out.append(node.val)
        node = node.next
    return out

assert to_list(reverse(ListNode(1, ListNode(2, ListNode(3))))) == [3, 2, 1]
assert to_list(reverse(None)) == []
''')
add("leetcode-lru", "class", '''
from collections import OrderedDict
class LRUCache:
    def __init__(self, capacity: int):
        self.d, self.c = OrderedDict(), capacity
    def get(self, key):
        if key not in self.d:
            return -1
        self.d.move_to_end(key)
        return self.d[key]
    def put(self, key, value):
        self.d[key] = value
        self.d.move_to_end(key)
        if len(self.d) > self.c:
            self.d.popitem(last=False)
''', "c = LRUCache(2)\nc.put(1, 1)\nc.put(2, 2)\nfirst = c.get(1)\nc.put(3, 3)\nassert first == 1\nassert c.get(2) == -1 and c.get(3) == 3\nassert c.get(1) == 1")
add("apps-fn", "apps", "def add(a, b):\n    return a + b\n", {"inputs": [[1, 2], [-1, 1], ["a", "b"]], "outputs": [3, 0, "ab"], "fn_name": "add"})
add("apps-stdin", "apps", "n = int(input())\nprint(sum(map(int, input().split()[:n])))\n", {"inputs": ["3\n1 2 3\n", "1\n-5\n"], "outputs": ["6\n", "-5\n"]})
add("calls-nested", "calls", "def transpose(m):\n    return [list(r) for r in zip(*m)]\n", [{"input": [[[1, 2], [3, 4]]], "output": [[1, 3], [2, 4]]}, {"input": [[]], "output": []}], function="transpose")
add("calls-bool-none-str", "calls", "def first(xs):\n    return xs[0] if xs else None\n", [{"input": [[True]], "output": True}, {"input": [[]], "output": None}, {"input": ["é∀"], "output": "é"}], function="first")
add("calls-dict", "calls", "def invert(d):\n    return {v: k for k, v in d.items()}\n", [{"input": [{"a": "x"}], "output": {"x": "a"}}], function="invert")
add("calls-prints-too", "calls", "def add(a, b):\n    print('adding', a, b)\n    return a + b\n", [{"input": [1, 2], "output": 3}], function="add")
add("calls-float", "calls", "def mean(xs):\n    return sum(xs) / len(xs)\n", [{"input": [[1, 2]], "output": 1.5}, {"input": [[0.1, 0.2]], "output": 0.15}], function="mean", compare="numbers")

# ---------------------------------------------------------------- stdin and stdout
add("stdin-lines", "stdin", "n = int(input())\nfor i in range(1, n + 1):\n    print(i, i * i)\n", [{"input": "2\n", "output": "1 1\n2 4\n"}, {"input": "3", "output": "1 1\n2 4\n3 9"}])
add("stdin-whitespace", "stdin", "import sys\ndata = sys.stdin.read().split()\nprint(' '.join(sorted(data)), end=' \\n\\n')\n", [{"input": "b  a\n\n c \n", "output": "a b c\n"}, {"input": "\n", "output": ""}])
add("stdin-eof-loop", "stdin", "import sys\nfor line in sys.stdin:\n    a, b = map(int, line.split())\n    print(a + b)\n", [{"input": "1 2\n3 4\n", "output": "3\n7\n"}])
add("stdin-main-guard", "stdin", "def main():\n    name = input()\n    print(f'Hello, {name}!')\n\n\nif __name__ == '__main__':\n    main()\n", [{"input": "Zoë\n", "output": "Hello, Zoë!\n"}])
add("stdin-exit", "stdin", "import sys\nn = int(sys.stdin.readline())\nif n < 0:\n    print('negative')\n    sys.exit(0)\nprint('ok')\nexit()\n", [{"input": "-1\n", "output": "negative\n"}, {"input": "1\n", "output": "ok\n"}])
add("stdin-fast-io", "stdin", "import sys, os\ninput = sys.stdin.buffer.readline\nt = int(input())\nout = []\nfor _ in range(t):\n    n = int(input())\n    out.append(n * (n + 1) // 2)\nsys.stdout.write('\\n'.join(map(str, out)))\n", [{"input": "2\n3\n4\n", "output": "6\n10\n"}])
add("stdin-eof-error", "stdin", "total = 0\nwhile True:\n    try:\n        total += int(input())\n    except EOFError:\n        break\nprint(total)\n", [{"input": "1\n2\n3", "output": "6"}])
add("stdin-recursion-thread", "stdin", "import sys, threading\nsys.setrecursionlimit(20000)\ndef depth(n):\n    return 0 if n == 0 else 1 + depth(n - 1)\ndef main():\n    print(depth(int(input())))\nthreading.stack_size(64 * 1024 * 1024)\nt = threading.Thread(target=main)\nt.start()\nt.join()\n", [{"input": "5000\n", "output": "5000\n"}])
add("stdin-numbers", "stdin", "import math\nprint(math.sqrt(float(input())))\n", [{"input": "2\n", "output": "1.4142136\n"}], compare="numbers")
add("stdin-exact", "stdin", "n = int(input())\nfor i in range(n):\n    print(' ' * (n - i - 1) + '*' * (2 * i + 1))\n", [{"input": "3\n", "output": "  *\n ***\n*****\n"}], compare="exact")
add("stdin-big", "stdin", "n = int(input())\nprint(*range(n))\n", [{"input": "3000\n", "output": " ".join(map(str, range(3000))) + "\n"}])

# ---------------------------------------------------------------- pytest functions
add("pytest-plain", "pytest", "def slugify(s):\n    return '-'.join(s.lower().split())\n", "def test_basic():\n    assert slugify('Hello World') == 'hello-world'\n\n\ndef test_empty():\n    assert slugify('') == ''\n    assert '-' not in slugify('one')\n")
add("pytest-raises", "pytest", "def parse_age(s):\n    n = int(s)\n    if n < 0:\n        raise ValueError(f'age must not be negative: {n}')\n    return n\n", '''
import pytest


def test_value():
    assert parse_age("42") == 42


def test_raises():
    with pytest.raises(ValueError):
        parse_age("x")


def test_match():
    with pytest.raises(ValueError, match=r"must not be negative: -\\d"):
        parse_age("-1")


def test_info():
    with pytest.raises(ValueError) as info:
        parse_age("-2")
    assert str(info.value) == "age must not be negative: -2"
    assert info.type is ValueError
''')
add("pytest-approx", "pytest", "def stats(xs):\n    m = sum(xs) / len(xs)\n    return {'mean': m, 'var': sum((x - m) ** 2 for x in xs) / len(xs)}\n", '''
import pytest
from pytest import approx


def test_mean():
    assert stats([0.1, 0.2])["mean"] == pytest.approx(0.15)


def test_dict():
    assert stats([1, 2, 4]) == approx({"mean": 7 / 3, "var": 14 / 9})


def test_tolerance():
    assert stats([1, 2])["mean"] == approx(1.49, abs=0.1)
''')
add("pytest-class", "pytest", "def rot13(s):\n    import codecs\n    return codecs.encode(s, 'rot13')\n", "class TestRot:\n    word = 'Hello'\n\n    def helper(self, s):\n        return rot13(rot13(s))\n\n    def test_once(self):\n        assert rot13(self.word) == 'Uryyb'\n\n    def test_twice(self):\n        assert self.helper(self.word) == self.word\n")

# ---------------------------------------------------------------- unittest
BANK = '''
class InsufficientFunds(Exception):
    """Raised when there is too little money."""

    def __init__(self, missing):
        super().__init__(f"{missing} missing")
        self.missing = missing


class Account:
    count = 0

    def __init__(self, owner, balance=0):
        self.owner = owner
        self._balance = balance
        Account.count += 1

    @property
    def balance(self):
        return self._balance

    @balance.setter
    def balance(self, value):
        if value < 0:
            raise ValueError("negative")
        self._balance = value

    def withdraw(self, amount):
        if amount > self._balance:
            raise InsufficientFunds(amount - self._balance)
        self._balance -= amount
        return self

    @classmethod
    def empty(cls, owner):
        return cls(owner, 0)

    @staticmethod
    def valid(amount):
        return amount > 0
'''
add("unittest-bank", "unittest", BANK, '''
import unittest


class TestAccount(unittest.TestCase):
    def setUp(self):
        self.account = Account("Ann", 100)

    def tearDown(self):
        self.account = None

    def test_balance(self):
        self.assertEqual(self.account.balance, 100)
        self.account.withdraw(30).withdraw(20)
        self.assertEqual(self.account.balance, 50)

    def test_funds(self):
        with self.assertRaises(InsufficientFunds) as cm:
            self.account.withdraw(150)
        self.assertEqual(str(cm.exception), "50 missing")
        self.assertEqual(cm.exception.missing, 50)

    def test_setter(self):
        self.account.balance = 7
        self.assertEqual(self.account.balance, 7)
        with self.assertRaisesRegex(ValueError, "neg"):
            self.account.balance = -1

    def test_static(self):
        self.assertTrue(Account.valid(1))
        self.assertFalse(Account.valid(-1))
        self.assertIsInstance(Account.empty("Bob"), Account)
        self.assertRaises(InsufficientFunds, Account.empty("Bob").withdraw, 1)


if __name__ == "__main__":
    unittest.main()
''')
add("unittest-math", "unittest", "import math\ndef circle(r):\n    if r < 0:\n        raise ValueError('negative radius')\n    return math.pi * r ** 2\n", '''
import unittest
import math


class TestCircle(unittest.TestCase):
    def test_almost(self):
        self.assertAlmostEqual(circle(1), math.pi)
        self.assertAlmostEqual(circle(2), 12.566, places=3)
        self.assertAlmostEqual(circle(2), 12.5, delta=0.1)

    def test_raises(self):
        self.assertRaises(ValueError, circle, -1)
        with self.assertRaises(TypeError):
            circle("x")

    def test_order(self):
        self.assertGreater(circle(2), circle(1))
        self.assertNotEqual(circle(2), 0)
        self.assertLessEqual(circle(0), 0)
''')
add("unittest-collections", "unittest", "def group(words):\n    out = {}\n    for w in words:\n        out.setdefault(len(w), []).append(w)\n    return out\n", '''
import unittest


class TestGroup(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.words = ["a", "bb", "c"]

    def test_dict(self):
        self.assertDictEqual(group(self.words), {1: ["a", "c"], 2: ["bb"]})
        self.assertIn(2, group(self.words))
        self.assertCountEqual(group(self.words)[1], ["c", "a"])
        self.assertListEqual(group(["bb"])[2], ["bb"])
        self.assertIsNone(group([]).get(1))

    def test_sub(self):
        for n in range(1, 4):
            with self.subTest(n=n):
                self.assertEqual(group(["x" * n]), {n: ["x" * n]})
''')

# ---------------------------------------------------------------- classes with state, operators, protocols
add("class-stack-sequence", "class", "class Stack:\n    def __init__(self):\n        self.items = []\n    def push(self, x):\n        self.items.append(x)\n    def pop(self):\n        if not self.items:\n            raise IndexError('pop from empty stack')\n        return self.items.pop()\n    def is_empty(self):\n        return not self.items\n    def __len__(self):\n        return len(self.items)\n    def __contains__(self, x):\n        return x in self.items\n",
    "def test_stack():\n    s = Stack()\n    assert s.is_empty()\n    s.push(1)\n    s.push(2)\n    assert len(s) == 2\n    assert 2 in s and 5 not in s\n    assert s.pop() == 2\n    assert s.pop() == 1\n    assert s.is_empty()\n    try:\n        s.pop()\n        assert False\n    except IndexError as e:\n        assert 'empty' in str(e)\n")
add("class-vector", "class", '''
class Vector:
    def __init__(self, x, y):
        self.x, self.y = x, y
    def __add__(self, o): return Vector(self.x + o.x, self.y + o.y)
    def __sub__(self, o): return Vector(self.x - o.x, self.y - o.y)
    def __mul__(self, k): return Vector(self.x * k, self.y * k)
    __rmul__ = __mul__
    def __neg__(self): return Vector(-self.x, -self.y)
    def __eq__(self, o): return isinstance(o, Vector) and (self.x, self.y) == (o.x, o.y)
    def __hash__(self): return hash((self.x, self.y))
    def __repr__(self): return f"Vector({self.x}, {self.y})"
    def __iter__(self): return iter((self.x, self.y))
    def __getitem__(self, i): return (self.x, self.y)[i]
    def __len__(self): return 2
    def __bool__(self): return any(self)
    def __abs__(self): return (self.x ** 2 + self.y ** 2) ** 0.5
    def __lt__(self, o): return abs(self) < abs(o)
''', '''
assert Vector(1, 2) + Vector(3, 4) == Vector(4, 6)
assert Vector(1, 2) != Vector(2, 1)
assert 2 * Vector(1, 2) == Vector(1, 2) * 2 == Vector(2, 4)
assert -Vector(1, 2) == Vector(-1, -2)
assert abs(Vector(3, 4)) == 5.0
assert list(Vector(1, 2)) == [1, 2]
x, y = Vector(7, 8)
assert (x, y) == (7, 8)
assert str(Vector(1, 2)) == "Vector(1, 2)" and repr([Vector(1, 2)]) == "[Vector(1, 2)]"
assert len({Vector(1, 2), Vector(1, 2)}) == 1
assert Vector(1, 2)[1] == 2 and len(Vector(0, 0)) == 2
assert not Vector(0, 0) and Vector(0, 1)
assert sorted([Vector(3, 4), Vector(1, 0)]) == [Vector(1, 0), Vector(3, 4)]
assert max(Vector(3, 4), Vector(1, 0)).x == 3
assert Vector(1, 2) in [Vector(0, 0), Vector(1, 2)]
''')
add("class-inherit", "class", '''
class Shape:
    def area(self):
        raise NotImplementedError
    def describe(self):
        return f"{type(self).__name__} with area {self.area()}"
class Square(Shape):
    def __init__(self, s): self.s = s
    def area(self): return self.s ** 2
''', '''
assert Square(3).describe() == "Square with area 9"
assert issubclass(Square, Shape) and isinstance(Square(1), Shape)
assert type(Square(1)).__name__ == "Square"
assert hasattr(Square(2), "s") and not hasattr(Square(2), "t")
assert getattr(Square(2), "s") == 2
try:
    Shape().area()
    raised = False
except NotImplementedError:
    raised = True
assert raised
''')
add("class-test-subclasses", "class", "class Animal:\n    def __init__(self, name):\n        self.name = name\n    def speak(self):\n        return '...'\n    def intro(self):\n        return f'{self.name} says {self.speak()}'\n",
    "class Dog(Animal):\n    def speak(self):\n        return 'Woof'\n\nassert Dog('Rex').intro() == 'Rex says Woof'\nassert Animal('X').intro() == 'X says ...'")
add("class-context", "class", '''
class Resource:
    log = []
    def __enter__(self):
        self.log.append("open")
        return self
    def __exit__(self, kind, error, tb):
        self.log.append("close" if kind is None else kind.__name__)
        return False
''', '''
def test_normal():
    r = Resource()
    with r as inner:
        assert inner is r
    assert r.log[-2:] == ["open", "close"]


def test_error():
    r = Resource()
    try:
        with r:
            raise KeyError("x")
    except KeyError:
        pass
    assert r.log[-1] == "KeyError"
''')
add("class-context-suppresses", "class", "class Ignore:\n    def __init__(self, *kinds):\n        self.kinds = kinds\n    def __enter__(self):\n        return self\n    def __exit__(self, kind, error, tb):\n        return kind is not None and issubclass(kind, self.kinds)\n",
    "done = []\nwith Ignore(ZeroDivisionError):\n    done.append(1)\n    1 / 0\n    done.append(2)\nassert done == [1]")
add("class-iterator", "class", "class Countdown:\n    def __init__(self, n):\n        self.n = n\n    def __iter__(self):\n        return self\n    def __next__(self):\n        if self.n == 0:\n            raise StopIteration\n        self.n -= 1\n        return self.n + 1\n",
    "assert list(Countdown(3)) == [3, 2, 1]\nassert sum(Countdown(4)) == 10\nit = iter(Countdown(2))\na, b = next(it), next(it)\nassert (a, b, next(it, 'end')) == (2, 1, 'end')\nassert [x * 2 for x in Countdown(2)] == [4, 2]\nassert max(Countdown(5)) == 5 and 3 in Countdown(3)")
add("class-mapping", "class", "class Matrix:\n    def __init__(self):\n        self.d = {}\n    def __setitem__(self, k, v):\n        self.d[k] = v\n    def __getitem__(self, k):\n        return self.d[k]\n    def __delitem__(self, k):\n        del self.d[k]\n    def __call__(self, k):\n        return self.d.get(k)\n    def __len__(self):\n        return len(self.d)\n",
    "m = Matrix()\nm[1, 2] = 5\nm['a'] = [1]\ndel m['a']\nm[1, 2] += 1\nassert m[1, 2] == 6\nassert len(m) == 1 and m((0, 0)) is None\ntry:\n    m['zz']\n    missing = False\nexcept KeyError:\n    missing = True\nassert missing")
add("class-attributes", "class", BANK, "a = Account('Ann', 5)\na.owner = 'Bob'\na.extra = [1]\na.extra.append(2)\nassert a.owner == 'Bob' and a.extra == [1, 2]\nassert Account.count >= 1 and a.balance == 5\ntry:\n    a.withdraw(9)\n    assert False, 'no error'\nexcept InsufficientFunds as e:\n    error = e\nassert error.missing == 4 and error.args == ('4 missing',)\nassert InsufficientFunds.__doc__.startswith('Raised')")
add("class-enum", "class", "from enum import Enum, IntEnum\nclass Color(Enum):\n    RED = 1\n    BLUE = 2\nclass Level(IntEnum):\n    LOW = 1\n    HIGH = 3\ndef other(c):\n    return Color.BLUE if c is Color.RED else Color.RED\n",
    "assert other(Color.RED) == Color.BLUE\nassert other(Color.RED) is Color.BLUE\nassert other(Color.BLUE).name == 'RED' and Color(2).value == 2\nassert Level.HIGH > Level.LOW and Level.HIGH == 3\nassert [c.name for c in Color] == ['RED', 'BLUE'] and len(Color) == 2")
add("class-two-instances", "class", "class Counter2:\n    def __init__(self):\n        self.n = 0\n    def inc(self, by=1):\n        self.n += by\n        return self.n\n", "a, b = Counter2(), Counter2()\na.inc()\na.inc(by=5)\nb.inc()\nassert (a.n, b.n) == (6, 1)\nassert a is not b and a.inc() == 7")

# ---------------------------------------------------------------- results of many types
add("result-generator", "results", "def fib():\n    a, b = 0, 1\n    while True:\n        yield a\n        a, b = b, a + b\ndef firsts(n):\n    from itertools import islice\n    return islice(fib(), n)\n",
    "from itertools import islice, takewhile\nassert list(islice(fib(), 6)) == [0, 1, 1, 2, 3, 5]\nassert list(takewhile(lambda x: x < 9, fib())) == [0, 1, 1, 2, 3, 5, 8]\ng = fib()\nassert [next(g) for _ in range(3)] == [0, 1, 1]\nassert list(firsts(3)) == [0, 1, 1]\nassert sum(firsts(5)) == 7")
add("result-generator-send", "results", "def averager():\n    total, n, mean = 0, 0, None\n    while True:\n        x = yield mean\n        total, n = total + x, n + 1\n        mean = total / n\n", "g = averager()\nnext(g)\na, b = g.send(2), g.send(4)\nassert (a, b) == (2.0, 3.0)\ng.close()\nassert next(averager()) is None")
add("result-collections", "results", '''
from collections import Counter, defaultdict, OrderedDict, deque, namedtuple
P = namedtuple("P", "x y")
def count(s): return Counter(s)
def groups(ws):
    d = defaultdict(list)
    for w in ws: d[w[0]].append(w)
    return d
def ordered(): return OrderedDict([("b", 1), ("a", 2)])
def last(xs, n): return deque(xs, maxlen=n)
def point(x, y): return P(x, y)
''', '''
from collections import Counter, deque, OrderedDict, defaultdict
assert count("abca") == Counter("aabc")
assert count("abca").most_common(1) == [("a", 2)]
assert groups(["ab", "ac", "b"]) == {"a": ["ab", "ac"], "b": ["b"]}
assert dict(groups(["x"])) == {"x": ["x"]}
assert isinstance(groups([]), defaultdict) and isinstance(groups([]), dict)
assert list(ordered()) == ["b", "a"] and ordered() == OrderedDict([("b", 1), ("a", 2)])
assert last([1, 2, 3], 2) == deque([2, 3])
assert list(last([1, 2, 3], 2)) == [2, 3] and last([1], 2)[0] == 1
assert point(1, 2) == (1, 2) and point(1, 2).y == 2
x, y = point(3, 4)
assert x * y == 12
assert point(1, 2)._asdict() == {"x": 1, "y": 2}
''')
add("result-numbers", "results", '''
from decimal import Decimal
from fractions import Fraction
def half(x): return x / 2
def dec(s): return Decimal(s) * 2
def frac(a, b): return Fraction(a, b)
def roots(): return (1 + 2j, 1 - 2j)
def big(n): return 2 ** n
def inf(): return float("inf")
def nan(): return float("nan")
''', '''
from decimal import Decimal
from fractions import Fraction
import math
assert half(3) == 1.5 and half(Decimal("1")) == Decimal("0.5") and half(Fraction(1, 2)) == Fraction(1, 4)
assert dec("1.10") == Decimal("2.20") and str(dec("1.10")) == "2.20"
assert frac(2, 4) == Fraction(1, 2) and frac(1, 2) == 0.5 and frac(1, 3).denominator == 3
assert roots()[0] * roots()[1] == 5 and roots()[0].imag == 2 and abs(3 + 4j) == 5
assert big(200) == 1 << 200 and len(str(big(200))) == 61
assert math.isinf(inf()) and inf() > 10 ** 9
assert math.isnan(nan()) and nan() != nan()
assert isinstance(half(3), float) and type(big(2)) is int
assert round(half(2.468), 2) == 1.23 and math.floor(half(3)) == 1
''')
add("result-datetime", "results", "from datetime import date, datetime, timedelta\ndef later(d, days):\n    return d + timedelta(days=days)\ndef parse(s):\n    return datetime.strptime(s, '%Y-%m-%d')\n",
    "from datetime import date, datetime, timedelta\nassert later(date(2024, 2, 28), 1) == date(2024, 2, 29)\nassert parse('2024-01-02') == datetime(2024, 1, 2)\nassert (later(date(2024, 1, 1), 5) - date(2024, 1, 1)).days == 5\nassert parse('2024-01-02').isoformat() == '2024-01-02T00:00:00' and parse('2024-01-02') - datetime(2024, 1, 1) == timedelta(days=1)")
add("result-sets-bytes", "results", "def letters(s):\n    return set(s)\ndef frozen(xs):\n    return frozenset(xs)\ndef raw(s):\n    return s.encode()\ndef nothing():\n    pass\ndef nested():\n    return {'a': [(1, {2, 3}), None], (1, 2): {'b': b'x'}}\ndef power(xs):\n    xs = list(xs)\n    return {frozenset(x for i, x in enumerate(xs) if m >> i & 1) for m in range(2 ** len(xs))}\n",
    "assert letters('aab') == {'a', 'b'}\nassert frozen([1, 1]) == frozenset({1}) and frozen([1]) == {1}\nassert letters('ab') | {'c'} == set('abc') and 'a' in letters('a')\nassert letters('ab').issubset('abc') and {'a'} <= letters('ab')\nassert raw('é') == b'\\xc3\\xa9'\nassert nothing() is None\nassert nested() == {'a': [(1, {3, 2}), None], (1, 2): {'b': b'x'}}\nassert isinstance(letters(''), set) and not letters('')\nassert power([1, 2]) == {frozenset(), frozenset({1}), frozenset({2}), frozenset({1, 2})}")
add("result-dataclass", "results", "from dataclasses import dataclass, field\n@dataclass(order=True, frozen=True)\nclass Point:\n    x: int\n    y: int = 0\n@dataclass\nclass Bag:\n    items: list = field(default_factory=list)\ndef mirror(p):\n    return Point(p.y, p.x)\ndef bag(*xs):\n    return Bag(list(xs))\n",
    "from dataclasses import asdict, replace\nassert mirror(Point(1, 2)) == Point(2, 1)\nassert mirror(Point(1)).y == 1 and Point(1, 2) < Point(2, 0)\nassert repr(Point(1, 2)) == 'Point(x=1, y=2)'\nassert bag(1, 2).items == [1, 2] and bag() == Bag()\nassert bag(1) != bag(2)\nassert sorted([Point(2), Point(1)])[0] == Point(1)\nassert len({Point(1), Point(1)}) == 1")
add("result-function", "results", "def adder(n):\n    return lambda x: x + n\ndef compose(*fs):\n    def g(x):\n        for f in reversed(fs):\n            x = f(x)\n        return x\n    return g\ndef counter():\n    n = 0\n    def inc():\n        nonlocal n\n        n += 1\n        return n\n    return inc\n",
    "assert adder(3)(4) == 7\nassert list(map(adder(1), [1, 2])) == [2, 3]\nassert compose(adder(1), lambda x: x * 10)(2) == 21\nassert compose(str, len)('abc') == '3'\nc = counter()\nfirst = c()\nassert (first, c()) == (1, 2)\nassert callable(adder(1))")
add("result-text", "results", "def shout(s):\n    return s.upper() + '!'\ndef lines():\n    return 'a\\nb\\n\\ttab \\u2603 \\U0001F600 \"q\" \\\\'\n",
    "assert shout('a').startswith('A') and shout('a').endswith('!')\nassert 'A' in shout('a') and len(shout('abc')) == 4\nassert shout('a b').split() == ['A', 'B!']\nassert shout('x')[0] == 'X' and shout('x')[::-1] == '!X'\nassert lines() == 'a\\nb\\n\\ttab \\u2603 \\U0001F600 \"q\" \\\\'\nimport re\nassert re.fullmatch(r'[A-Z]+!', shout('abc'))\nassert lines().splitlines()[1] == 'b' and '-'.join(shout('ab')) == 'A-B-!'")
add("result-looks", "results", "def evens(xs):\n    return [x for x in xs if x % 2 == 0]\n",
    "from itertools import chain\nassert sorted(evens([4, 1, 2])) == [2, 4] and len(evens(range(10))) == 5\nassert isinstance(evens([]), list) and evens([]) == []\nassert type(evens([])) == list and not evens([1])\nassert all(x % 2 == 0 for x in evens(range(50))) and any(x > 40 for x in evens(range(50)))\nassert evens((2, 3, 4))[-1] == 4 and evens([2, 4])[:1] == [2]\nassert list(chain(evens([2]), [1])) == [2, 1]\na, *b = evens([2, 4, 6])\nassert a == 2 and b == [4, 6]\nfor got, want in zip(evens([1, 2, 4]), [2, 4]):\n    assert got == want\nassert set(evens([2, 2])) == {2} and sum(evens([2, 4])) == 6 and max(evens([2, 4])) == 4\nassert evens(iter([1, 2])) == [2] and evens(x for x in [2]) == [2]")

# ---------------------------------------------------------------- functions as arguments, changes in place, helpers
add("args-functions", "callbacks", "def apply(f, xs, key=None):\n    return [f(x) for x in sorted(xs, key=key)]\ndef fold(f, xs, start):\n    for x in xs:\n        start = f(start, x)\n    return start\n",
    "import operator, math\nassert apply(lambda x: x * 2, [3, 1]) == [2, 6]\nassert apply(abs, [-3, 1]) == [3, 1]\nassert apply(str, [1, 2], key=lambda x: -x) == ['2', '1']\nassert fold(operator.add, [1, 2], 0) == 3 and fold(max, [4, 2], 0) == 4\nassert fold(lambda a, b: a + [b], [1, 2], []) == [1, 2]\nassert apply(math.sqrt, [4]) == [2.0]\ndef inc(x):\n    return x + 1\nassert apply(inc, [1]) == [2]")
add("args-callback-record", "callbacks", "class Emitter:\n    def __init__(self):\n        self.handlers = {}\n    def on(self, name, f):\n        self.handlers.setdefault(name, []).append(f)\n    def emit(self, name, *args, **kw):\n        return [f(*args, **kw) for f in self.handlers.get(name, [])]\n",
    "got = []\ne = Emitter()\ne.on('x', got.append)\ne.on('x', lambda v, **k: got.append((v, k)) if k else 'plain')\nresults = e.emit('x', 5)\nassert got == [5]\nassert results == [None, 'plain'] and e.emit('y') == []")
add("args-decorator", "callbacks", "import functools\ndef memoize(f):\n    cache = {}\n    @functools.wraps(f)\n    def g(*a):\n        if a not in cache:\n            cache[a] = f(*a)\n        return cache[a]\n    g.cache = cache\n    return g\ndef retry(times):\n    def deco(f):\n        def g(*a, **k):\n            for i in range(times):\n                try:\n                    return f(*a, **k)\n                except ValueError:\n                    if i == times - 1:\n                        raise\n        return g\n    return deco\n",
    "calls = []\n@memoize\ndef fib(n):\n    calls.append(n)\n    return n if n < 2 else fib(n - 1) + fib(n - 2)\nresult = fib(20)\nassert result == 6765\nassert len(calls) == 21 and fib.__name__ == 'fib'\nassert (5,) in fib.cache\ntries = []\n@retry(3)\ndef flaky():\n    tries.append(1)\n    if len(tries) < 3:\n        raise ValueError('no')\n    return 'ok'\nvalue = flaky()\nassert value == 'ok' and len(tries) == 3\n@retry(2)\ndef never():\n    raise ValueError('never')\ntry:\n    never()\n    message = None\nexcept ValueError as e:\n    message = str(e)\nassert message == 'never'")
add("args-callback-raises", "callbacks", "def safe(f, default=None):\n    try:\n        return f()\n    except (ZeroDivisionError, KeyError) as e:\n        return default if default is not None else type(e).__name__\n",
    "assert safe(lambda: 1 / 0) == 'ZeroDivisionError'\nassert safe(lambda: {}['x'], 5) == 5\nclass Odd(Exception):\n    pass\ndef boom():\n    raise Odd('x')\ntry:\n    safe(boom)\n    seen = None\nexcept Odd as e:\n    seen = str(e)\nassert seen == 'x'")
add("args-in-place", "mutation", "def sort_in_place(xs):\n    xs.sort()\ndef remove_dups(xs):\n    seen = set()\n    k = 0\n    for x in xs:\n        if x not in seen:\n            seen.add(x)\n            xs[k] = x\n            k += 1\n    del xs[k:]\n    return k\ndef fill(d, s, m):\n    d['a'] = [1]\n    d['a'].append(2)\n    s.add(9)\n    m[0][1] = 7\n",
    "xs = [3, 1, 2]\nr = sort_in_place(xs)\nassert r is None and xs == [1, 2, 3]\nys = [1, 1, 2]\nk = remove_dups(ys)\nassert k == 2 and ys[:k] == [1, 2]\nd, s, m = {}, set(), [[0, 0]]\nfill(d, s, m)\nassert d == {'a': [1, 2]}\nassert s == {9} and m == [[0, 7]]")
add("args-not-mutated", "mutation", "def sort_copy(xs):\n    return sorted(xs)\ndef same(xs):\n    return xs\n", "xs = [3, 1, 2]\nys = sort_copy(xs)\nassert ys == [1, 2, 3] and xs == [3, 1, 2]\nassert sort_copy(xs) is not xs and sort_copy(xs) == sorted(xs)\nassert same(xs) == xs\nassert same(xs) is xs")
add("args-test-class", "callbacks", "def total(cart):\n    return sum(i.price * i.n for i in cart.items)\ndef discount(item, share):\n    item.price = item.price * (1 - share)\n    return item\n",
    "class Item:\n    def __init__(self, price, n=1):\n        self.price, self.n = price, n\nclass Cart:\n    def __init__(self, *items):\n        self.items = list(items)\nassert total(Cart(Item(2, 3), Item(5))) == 11\ni = Item(10)\nr = discount(i, 0.5)\nassert i.price == 5.0 and r is i")
add("helpers-random", "helpers", "def insertion_sort(xs):\n    out = []\n    for x in xs:\n        i = len(out)\n        while i and out[i - 1] > x:\n            i -= 1\n        out.insert(i, x)\n    return out\n",
    "import random\n\ndef reference(xs):\n    return sorted(xs)\n\nrandom.seed(7)\nCASES = [[random.randint(-9, 9) for _ in range(random.randrange(8))] for _ in range(15)]\nfor case in CASES:\n    assert insertion_sort(list(case)) == reference(case), case\nassert all(insertion_sort(c) == reference(c) for c in CASES)")
add("helpers-imports", "helpers", "def perms(s):\n    if len(s) < 2:\n        return [s]\n    return [c + p for i, c in enumerate(s) for p in perms(s[:i] + s[i + 1:])]\ndef choose(n, k):\n    return 1 if k in (0, n) else choose(n - 1, k - 1) + choose(n - 1, k)\n",
    "import itertools\nimport math\nfrom collections import Counter\nassert sorted(perms('abc')) == sorted(''.join(p) for p in itertools.permutations('abc'))\nassert Counter(perms('ab')) == Counter(['ab', 'ba'])\nassert all(choose(n, k) == math.comb(n, k) for n in range(8) for k in range(n + 1))")
add("helpers-validator", "helpers", "def topo(graph):\n    done, out = set(), []\n    def go(n):\n        if n in done:\n            return\n        done.add(n)\n        for m in graph.get(n, ()):\n            go(m)\n        out.append(n)\n    for n in graph:\n        go(n)\n    return out[::-1]\n",
    "def valid(order, graph):\n    at = {n: i for i, n in enumerate(order)}\n    return set(order) == set(graph) and all(at[a] < at[b] for a in graph for b in graph[a])\n\nG = {'a': ['b', 'c'], 'b': ['d'], 'c': ['d'], 'd': []}\nassert valid(topo(G), G)\nassert len(topo(G)) == 4 and topo({}) == []")
add("helpers-test-own-eq", "helpers", "def origin():\n    return (0, 0)\n", "class Near:\n    def __init__(self, v):\n        self.v = v\n    def __eq__(self, o):\n        return all(abs(a - b) < 1e-6 for a, b in zip(self.v, o))\nassert origin() == Near((0, 0))\nassert Near((0, 1)) != origin()")
add("recursion", "asserts", "import sys\nsys.setrecursionlimit(5000)\ndef ack(m, n):\n    return n + 1 if m == 0 else ack(m - 1, 1) if n == 0 else ack(m - 1, ack(m, n - 1))\ndef flatten(x):\n    return [z for y in x for z in (flatten(y) if isinstance(y, list) else [y])]\ndef hanoi(n, a='A', b='B', c='C'):\n    return [] if n == 0 else hanoi(n - 1, a, c, b) + [(a, c)] + hanoi(n - 1, b, a, c)\n",
    "assert ack(2, 3) == 9\nassert flatten([1, [2, [3, []]]]) == [1, 2, 3]\nassert len(hanoi(5)) == 31 and hanoi(1) == [('A', 'C')]")
add("two-functions-named-builtin", "asserts", "def max(xs):\n    m = xs[0]\n    for x in xs:\n        m = x if x > m else m\n    return m\ndef sum(xs):\n    t = 0\n    for x in xs:\n        t += x\n    return t\n", "assert max([1, 3, 2]) == 3\nassert sum([1, 2]) == 3")
add("module-variables", "asserts", "TABLE = {'a': 1}\nPI = 3.14\ndef lookup(k, default=0):\n    return TABLE.get(k, default)\n", "assert PI == 3.14 and TABLE == {'a': 1}\nassert lookup('a') == 1 and lookup('b', default=-1) == -1\nassert lookup('b') == 0")
add("program-prints-and-main", "asserts", "def square(n):\n    return n * n\nprint('square of 3 is', square(3))\nif __name__ == '__main__':\n    print(square(4))\n", "assert square(5) == 25\nassert square(-1) == 1")
add("exception-hierarchy", "exceptions", "class AppError(Exception):\n    pass\nclass NotFound(AppError, KeyError):\n    def __init__(self, key, code=404):\n        super().__init__(key)\n        self.key, self.code = key, code\n    def __str__(self):\n        return f'{self.key} not found ({self.code})'\ndef find(d, k):\n    try:\n        return d[k]\n    except KeyError as e:\n        raise NotFound(k) from e\n",
    "import pytest\n\n\ndef test_found():\n    assert find({'a': 1}, 'a') == 1\n\n\ndef test_base():\n    with pytest.raises(AppError):\n        find({}, 'x')\n    with pytest.raises(KeyError) as info:\n        find({}, 'x')\n    assert info.value.code == 404 and str(info.value) == 'x not found (404)'\n    assert isinstance(info.value, NotFound)\n    assert isinstance(info.value.__cause__, KeyError)\n")
add("exception-try-else", "exceptions", "def div(a, b):\n    if b == 0:\n        raise ZeroDivisionError('b is zero')\n    if not isinstance(a, (int, float)):\n        raise TypeError\n    return a / b\n",
    "def error(f, *a):\n    try:\n        f(*a)\n    except Exception as e:\n        return type(e), str(e)\n    else:\n        return None\n\nassert error(div, 1, 0) == (ZeroDivisionError, 'b is zero')\nassert error(div, 'x', 1)[0] is TypeError\nassert error(div, 1, 2) is None and div(1, 2) == 0.5")
add("assertion-by-program", "exceptions", "def positive(n):\n    assert n > 0, 'not positive'\n    return n\n", "import pytest\n\n\ndef test_it():\n    assert positive(3) == 3\n    with pytest.raises(AssertionError, match='not positive'):\n        positive(-1)\n")

# ---------------------------------------------------------------- globals that a call changes
LOG = "LOG = []\nn = 0\nCACHE = None\ndef do(x):\n    global n\n    n += 1\n    LOG.append(x)\n    return x\ndef reset():\n    global LOG\n    LOG = []\ndef init():\n    global CACHE\n    CACHE = {'a': [1]}\ndef fail(x):\n    LOG.append(x)\n    raise ValueError(x)\ndef items():\n    for x in (1, 2):\n        LOG.append(x)\n        yield x\nclass Job:\n    def go(self):\n        LOG.append('go')\n        return self\n"
add("globals-bare", "asserts", LOG, "do(1)\nassert LOG == [1]\nassert n == 1\ndo(2)\nkept = LOG\ndo(3)\nassert kept == [1, 2, 3]\nreset()\nassert LOG == [] and CACHE is None\ninit()\nassert CACHE == {'a': [1]}")
add("globals-module", "pytest", LOG, "import pytest\nimport solution\n\ndef test_module():\n    solution.do(5)\n    assert solution.n == 1 and solution.LOG == [5]\n\ndef test_raises():\n    with pytest.raises(ValueError):\n        solution.fail(6)\n    assert solution.LOG[-1] == 6\n")
add("globals-imported", "unittest", LOG, "import unittest\nfrom solution import LOG as log, do, Job, items\n\nclass TestLog(unittest.TestCase):\n    def setUp(self):\n        log.clear()\n\n    def test_do(self):\n        do(1)\n        self.assertEqual(log, [1])\n\n    def test_again(self):\n        Job().go().go()\n        self.assertEqual(log, ['go', 'go'])\n\n    def test_items(self):\n        each = items()\n        self.assertEqual(log, [])\n        self.assertEqual(next(each), 1)\n        self.assertEqual(log, [1])\n")
add("globals-set-by-test", "globals", "limit = 3\nusers = {}\ndef add_user(name):\n    if len(users) >= limit:\n        raise OverflowError\n    users[name] = len(users)\n    return users[name]\n", "import solution\n\ndef setup_function(function):\n    solution.users.clear()\n\ndef test_first():\n    assert solution.add_user('a') == 0\n    assert solution.users == {'a': 0}\n\ndef test_limit():\n    solution.limit = 1\n    assert solution.add_user('b') == 0\n    try:\n        solution.add_user('c')\n        assert False\n    except OverflowError:\n        pass\n")
add("arguments-of-collections", "mutation", "def rotate(q, n):\n    q.rotate(n)\ndef count(c, xs):\n    for x in xs:\n        c[x] += 1\n", "from collections import Counter, defaultdict, deque\nq = deque([1, 2, 3])\nrotate(q, 1)\nassert q == deque([3, 1, 2])\nc, d = Counter('a'), defaultdict(lambda: 5)\ncount(c, 'ab')\ncount(d, 'a')\nassert c == {'a': 2, 'b': 1} and d == {'a': 6} and d['z'] == 5")
add("result-defaultdict-lambda", "results", "from collections import defaultdict\ndef group(words):\n    d = defaultdict(lambda: defaultdict(list))\n    for w in words:\n        d[w[0]][len(w)].append(w)\n    return d\n", "assert group(['ab', 'a']) == {'a': {2: ['ab'], 1: ['a']}}\nr = group(['ab'])\nassert r['a'][2] == ['ab'] and r['z'][0] == []")

# ---------------------------------------------------------------- pytest's hooks, and what a program reads of a function
add("pytest-hooks", "hooks", "def double(x):\n    return 2 * x\n", "log = []\n\ndef setup_module(module):\n    module.TWO = 2\n\ndef setup_function(function):\n    log.append(function.__name__)\n\nclass TestDouble:\n    @classmethod\n    def setup_class(cls):\n        cls.three = 3\n\n    def setup_method(self, method):\n        self.name = method.__name__\n\n    def teardown_method(self, method):\n        assert self.name == method.__name__\n\n    @classmethod\n    def teardown_class(cls):\n        log.append(cls.__name__)\n\n    def test_three(self):\n        assert double(self.three) == 6 and self.name == 'test_three'\n\ndef test_two():\n    assert double(TWO) == 4 and log == ['TestDouble', 'test_two']\n")
add("callback-signature", "signatures", "import functools, inspect\ndef names(f):\n    return list(inspect.signature(f).parameters)\ndef defaults(f):\n    return {n: p.default for n, p in inspect.signature(f).parameters.items() if p.default is not p.empty}\ndef curry(f):\n    count = f.__code__.co_argcount\n    def g(*a):\n        return f(*a) if len(a) >= count else lambda *b: g(*a, *b)\n    return g\ndef typed(f):\n    @functools.wraps(f)\n    def g(*a, **k):\n        for x, (name, kind) in zip(a, f.__annotations__.items()):\n            if not isinstance(x, kind):\n                raise TypeError(name)\n        return f(*a, **k)\n    return g\n",
    "def f(a, /, b=[1], *c, d, e='x', **k):\n    pass\n@typed\ndef times(n: int, s: str, sep=''):\n    'Repeat.'\n    return sep.join([s] * n)\nassert names(f) == ['a', 'b', 'c', 'd', 'e', 'k'] and names(lambda: 0) == []\nassert defaults(f) == {'b': [1], 'e': 'x'}\nassert curry(lambda a, b, c: a + b + c)(1)(2)(3) == 6\nassert times(2, 'a', sep='-') == 'a-a' and (times.__name__, times.__doc__) == ('times', 'Repeat.')\ntry:\n    times('a', 2)\n    error = None\nexcept TypeError as e:\n    error = str(e)\nassert error == 'n'")
add("callback-identity", "callbacks", "LISTENERS = []\ndef on(f):\n    LISTENERS.append(f)\n    return f\ndef off(f):\n    LISTENERS.remove(f)\ndef emit(x):\n    return [f(x) for f in LISTENERS]\n", "def g(x):\n    return x + 1\nassert on(g) is g\nassert emit(1) == [2]\noff(g)\nassert emit(1) == []")

# ---------------------------------------------------------------- exceptions that a test asks for
ROOT = "def root(x):\n    if x < 0:\n        raise ValueError('negative')\n    return x ** 0.5\n"
add("must-raise", "must-raise", ROOT, "import pytest\n\ndef test_raises():\n    with pytest.raises(ValueError):\n        assert root(-1) == 0\n    try:\n        assert root(-1) == 0\n        assert False, 'no error'\n    except ValueError:\n        pass\n    try:\n        root(-2)\n        pytest.fail('no error')\n    except ValueError as error:\n        assert str(error) == 'negative'\n    try:\n        root(-4)\n    except Exception as error:\n        assert isinstance(error, ValueError)\n    else:\n        assert False\n    assert root(4) == 2\n")
add("must-raise-unittest", "unittest", ROOT, "import unittest\n\nclass TestRoot(unittest.TestCase):\n    def test_negative(self):\n        with self.assertRaises(ValueError):\n            self.assertEqual(root(-1), 3)\n        try:\n            self.assertEqual(root(-1), 3)\n            self.fail('no error')\n        except ValueError:\n            pass\n        self.assertEqual(root(9), 3)\n")
add("error-as-result", "exceptions", ROOT, "def run(x):\n    try:\n        return root(x)\n    except Exception as error:\n        return str(error)\n\nassert run(-1) == 'negative'\nassert run(4) == 2\nfor x in (0, 1):\n    try:\n        assert root(x) == x\n    except Exception as error:\n        print(error)\n        raise")
add("callback-bind", "signatures", "import inspect\ndef bind(f, *a, **k):\n    b = inspect.signature(f).bind(*a, **k)\n    b.apply_defaults()\n    return dict(b.arguments)\ndef show(f):\n    return f'{f.__name__}{inspect.signature(f)}'\n", "def g(a, b=2, *rest, c=3):\n    pass\nassert bind(g, 1) == {'a': 1, 'b': 2, 'rest': (), 'c': 3}\nassert show(g) == 'g(a, b=2, *rest, c=3)'")
add("result-tree", "results", "from collections import defaultdict\ndef tree():\n    return defaultdict(tree)\ndef build(words):\n    root = tree()\n    for w in words:\n        node = root\n        for c in w:\n            node = node[c]\n        node['$'] = True\n    return root\n", "assert build(['ab']) == {'a': {'b': {'$': True}}}\nt = build(['a'])\nassert '$' in t['a'] and 'x' not in t")
add("either-is-judged", "exceptions", ROOT, "def test_all():\n    for x in (-1, 4):\n        try:\n            result = root(x)\n            assert result == 2\n        except Exception as error:\n            assert isinstance(error, ValueError) and x < 0\n")

# ---------------------------------------------------------------- what crosses in either direction
add("slices", "slices", "class Row:\n    def __init__(self, items):\n        self.items = items\n    def __getitem__(self, at):\n        return self.items[at]\ndef cut(items, part):\n    return items[part]\n", "assert Row([5, 6, 7])[1:] == [6, 7]\nassert cut('abc', slice(None, None, -1)) == 'cba'\n")
add("keyword-in-place", "in-place", "class Solution:\n    def move(self, nums, *, last=None):\n        nums.sort(key=lambda n: n == 0)\n        return nums\n", "a = [0, 1, 0, 3]\nassert Solution().move(nums=a) is a\nassert a == [1, 3, 0, 0]\n")
add("seed", "random", "import random\ndef roll():\n    return [random.random() for _ in range(9)]\n", "import random\nrandom.seed(7)\nfirst = roll()\nrandom.seed(7)\nassert roll() == first\nrandom.seed(7)\nassert first[0] == random.random()\n")
add("mock-argument", "mocks", "def notify(service, text):\n    service.send(text)\n    return service.status(), len(service)\n", "from unittest.mock import MagicMock, call\nm = MagicMock()\nm.status.return_value = 'ok'\nm.__len__.return_value = 3\nassert notify(m, 'x') == ('ok', 3)\nm.send.assert_called_once_with('x')\nassert m.send.call_args_list == [call('x')]\n")
add("named-like-library", "names", "class Counter:\n    def __init__(self):\n        self.n = 0\n    def inc(self):\n        self.n += 1\n    def value(self):\n        return self.n\ndef twice(n):\n    return 2 * n\n", "c = Counter()\nc.inc()\nassert c.value() == 1\nassert twice(2) == 4\n")
add("decorated-method", "decorators", "def twice(f):\n    def call(*args):\n        return f(*args) * 2\n    return call\n", "class A:\n    def __init__(self, n):\n        self.n = n\n    @twice\n    def times(self, x):\n        return x * self.n\nassert A(5).times(3) == 30\n")
add("path-of-tests", "pytest", "def square(n):\n    return n * n\n", "import os, sys\nsys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))\nfrom solution import square\n\ndef test_square():\n    assert square(3) == 9\n")
add("tokens", "results", "from enum import Enum\nfrom collections import namedtuple\nKind = Enum('Kind', 'NUMBER SIGN')\nToken = namedtuple('Token', 'kind text')\ndef tokens(text):\n    return [Token(Kind.NUMBER if c.isdigit() else Kind.SIGN, c) for c in text]\n", "assert tokens('1+') == [Token(Kind.NUMBER, '1'), Token(Kind.SIGN, '+')]\nassert tokens('1')[0].kind is Kind.NUMBER\n")
add("attribute-in-place", "in-place", "def fill(box, n):\n    for i in range(n):\n        box.items.append(i)\n        box.index[i] = len(box.items)\n    box.log('filled')\n    row = box.rows[0]\n    box.rows[1].append(n)\n    row.append(len(box.rows))\n    items = box.items\n    items.reverse()\n    return items is box.items\n", "class Box:\n    def __init__(self, items):\n        self.items, self.index, self.sizes = items, {}, []\n        self.rows = [[], []]\n    def log(self, text):\n        self.sizes.append((text, len(self.items)))\nitems = []\nb = Box(items)\nassert fill(b, 3)\nassert items == [2, 1, 0] and b.items is items\nassert b.index == {0: 1, 1: 2, 2: 3}\nassert b.sizes == [('filled', 3)] and b.rows == [[2], [3]]\n")

# ---------------------------------------------------------------- ordinary programs and tests
QUICK = "list-unnamed-while result-asdict namedtuple-methods generator-throw node-append-attr shared-row".split()


def ordinary(name, program, tests, **extra):
    add(name, name if name in QUICK else "ordinary", program, tests, **extra)


LIST = '''
class ListNode:
    def __init__(self, val=0, next=None):
        self.val = val
        self.next = next
def build(xs):
    head = None
    for x in reversed(xs):
        head = ListNode(x, head)
    return head
def reverse(head):
    prev = None
    while head:
        head.next, prev, head = prev, head, head.next
    return prev
def to_list(head):
    out = []
    while head:
        out.append(head.val)
        head = head.next
    return out
class Solution:
    def reverseList(self, head):
        return reverse(head)
'''
ordinary("list-unnamed-val", LIST, "head = reverse(build([1, 2, 3]))\nassert head.val == 3\nassert head.next.val == 2\nassert head.next.next.next is None")
ordinary("list-unnamed-while", LIST, "def values(node):\n    out = []\n    while node:\n        out.append(node.val)\n        node = node.next\n    return out\nassert values(reverse(build([1, 2, 3]))) == [3, 2, 1]\nassert values(build([])) == []")
ordinary("list-named-solution", LIST, "def test_reverse():\n    head = ListNode(1, ListNode(2, ListNode(3)))\n    r = Solution().reverseList(head)\n    seen = []\n    while r:\n        seen.append(r.val)\n        r = r.next\n    assert seen == [3, 2, 1]")
ordinary("list-node-of-test", '''
def reverse(head):
    prev = None
    while head:
        head.next, prev, head = prev, head, head.next
    return prev
''', "class ListNode:\n    def __init__(self, val=0, next=None):\n        self.val = val\n        self.next = next\nr = reverse(ListNode(1, ListNode(2)))\nassert r.val == 2 and r.next.val == 1 and r.next.next is None")
TREE = '''
from collections import deque
class TreeNode:
    def __init__(self, val=0, left=None, right=None):
        self.val, self.left, self.right = val, left, right
def insert(root, v):
    if root is None:
        return TreeNode(v)
    if v < root.val:
        root.left = insert(root.left, v)
    else:
        root.right = insert(root.right, v)
    return root
def inorder(root):
    return inorder(root.left) + [root.val] + inorder(root.right) if root else []
def invert(root):
    if root:
        root.left, root.right = invert(root.right), invert(root.left)
    return root
def level_order(root):
    out, q = [], deque([root] if root else [])
    while q:
        out.append([n.val for n in q])
        q = deque(c for n in q for c in (n.left, n.right) if c)
    return out
'''
ordinary("tree-unnamed", TREE, "root = None\nfor v in [5, 3, 8, 1]:\n    root = insert(root, v)\nassert inorder(root) == [1, 3, 5, 8]\nassert root.val == 5 and root.left.val == 3 and root.right.val == 8\nassert root.right.left is None")
ordinary("tree-unnamed-recursion", TREE, "def depth(n):\n    return 0 if not n else 1 + max(depth(n.left), depth(n.right))\nroot = None\nfor v in [5, 3, 8, 1]:\n    root = insert(root, v)\nassert depth(root) == 3 and depth(None) == 0")
ordinary("tree-named", TREE, "class TestTree:\n    def test_invert(self):\n        root = TreeNode(1, TreeNode(2), TreeNode(3))\n        inv = invert(root)\n        assert inv is root\n        assert [inv.left.val, inv.right.val] == [3, 2]\n        assert level_order(inv) == [[1], [3, 2]]")
RESULT = '''
from dataclasses import dataclass, field, asdict
from typing import List, Optional
@dataclass
class Stats:
    mean: float
    count: int
    outliers: List[int] = field(default_factory=list)
    label: Optional[str] = None
    @property
    def ok(self):
        return not self.outliers
    def describe(self):
        return f"{self.label}: {self.mean:.1f} ({self.count})"
def analyze(xs, label=None):
    mean = sum(xs) / len(xs)
    return Stats(mean, len(xs), [x for x in xs if abs(x - mean) > 10], label)
'''
ordinary("result-unnamed-dataclass", RESULT, "def test_stats():\n    s = analyze([1, 2, 3])\n    assert s.mean == 2.0\n    assert s.count == 3\n    assert s.outliers == []\n    assert s.label is None\n    assert s.ok")
ordinary("result-unnamed-method", RESULT, "def test_text():\n    assert analyze([1, 2, 3], 'a').describe() == 'a: 2.0 (3)'\n    assert not analyze([0, 100]).ok")
ordinary("result-asdict", RESULT, "from dataclasses import asdict, fields, is_dataclass, replace\ns = Stats(1.0, 2)\nassert asdict(s) == {'mean': 1.0, 'count': 2, 'outliers': [], 'label': None}\nassert [f.name for f in fields(Stats)] == ['mean', 'count', 'outliers', 'label']\nassert replace(s, count=5).count == 5 and s.count == 2\nassert is_dataclass(Stats) and is_dataclass(s)")
ordinary("result-asdict-unnamed", RESULT, "from dataclasses import asdict\ndef test_dict():\n    assert asdict(analyze([2, 4], 'b')) == {'mean': 3.0, 'count': 2, 'outliers': [], 'label': 'b'}")
ordinary("dataclass-nested", '''
from dataclasses import dataclass, field
@dataclass
class Item:
    name: str
    price: float
    qty: int = 1
@dataclass
class Order:
    items: list = field(default_factory=list)
    def add(self, item):
        self.items.append(item)
        return self
    @property
    def total(self):
        return sum(i.price * i.qty for i in self.items)
''', "import dataclasses\no = Order().add(Item('a', 2.5, 2)).add(Item('b', 1))\nassert o.total == 6.0\nassert dataclasses.asdict(o) == {'items': [{'name': 'a', 'price': 2.5, 'qty': 2}, {'name': 'b', 'price': 1, 'qty': 1}]}\nassert o.items[0] == Item('a', 2.5, 2)\nassert dataclasses.astuple(Item('a', 1)) == ('a', 1, 1)")
ordinary("dataclass-frozen", "from dataclasses import dataclass\n@dataclass(frozen=True)\nclass P:\n    x: int\n    y: int\n    def moved(self, dx):\n        return P(self.x + dx, self.y)\n", "import pytest\nfrom dataclasses import FrozenInstanceError\ndef test_frozen():\n    p = P(1, 2)\n    with pytest.raises(FrozenInstanceError):\n        p.x = 5\n    assert p.moved(2) == P(3, 2)\n    assert {p: 1}[P(1, 2)] == 1")
POINT = '''
from typing import NamedTuple
class Point(NamedTuple):
    x: float
    y: float = 0.0
    def norm(self):
        return (self.x ** 2 + self.y ** 2) ** 0.5
    @classmethod
    def origin(cls):
        return cls(0, 0)
    @property
    def flipped(self):
        return Point(self.y, self.x)
    def __add__(self, other):
        return Point(self.x + other.x, self.y + other.y)
def centroid(ps):
    return Point(sum(p.x for p in ps) / len(ps), sum(p.y for p in ps) / len(ps))
'''
ordinary("namedtuple-methods", POINT, "p = Point(3, 4)\nassert p.norm() == 5\nassert p == (3, 4) and p.x == 3 and p[1] == 4\nassert p + Point(1, 1) == Point(4, 5)\nassert Point.origin() == (0, 0)\nassert p.flipped == Point(4, 3)\nx, y = p\nassert (x, y) == (3, 4) and len(p) == 2\nassert p._replace(x=1) == Point(1, 4)\nassert p._asdict() == {'x': 3, 'y': 4}\nassert Point(2).y == 0.0")
ordinary("namedtuple-methods-result", POINT, "def test_centroid():\n    c = centroid([Point(0, 0), Point(2, 4)])\n    assert c == Point(1, 2)\n    assert isinstance(c, Point)\n    assert c.norm() > 2")
ordinary("namedtuple-unnamed-method", POINT + "def read(text):\n    return Point(*map(float, text.split()))\n", "def test_read():\n    assert read('3 4') == (3.0, 4.0)\n    assert read('3 4').x == 3")
ordinary("namedtuple-plain", "from collections import namedtuple\nPair = namedtuple('Pair', 'a b')\ndef swap(p):\n    return Pair(p.b, p.a)\n", "assert swap(Pair(1, 2)) == Pair(2, 1)\nassert swap(Pair(1, 2)) == (2, 1)\nassert swap(Pair(1, 2)).a == 2\nassert Pair._fields == ('a', 'b')\nassert sorted([Pair(2, 1), Pair(1, 5)]) == [(1, 5), (2, 1)]\nassert Pair(1, 2)._replace(a=4) == (4, 2)")
ordinary("generator-close", "log = []\ndef reader():\n    try:\n        for i in range(10):\n            yield i\n    finally:\n        log.append('closed')\n", "g = reader()\nassert next(g) == 0\ng.close()\nassert log == ['closed']\nassert list(g) == []")
ordinary("generator-throw", "def worker():\n    total = 0\n    while True:\n        try:\n            x = yield total\n            total += x\n        except ValueError:\n            total = 0\n", "w = worker()\nnext(w)\nassert w.send(5) == 5\nassert w.send(3) == 8\nassert w.throw(ValueError('reset')) == 0\nassert w.send(1) == 1")
ordinary("generator-return", "def walk(n):\n    for i in range(n):\n        yield i\n    return 'done'\n", "def run(n):\n    result = yield from walk(n)\n    yield result\nassert list(run(2)) == [0, 1, 'done']\ng = walk(1)\nnext(g)\ntry:\n    next(g)\n    value = None\nexcept StopIteration as stop:\n    value = stop.value\nassert value == 'done'")
ordinary("generator-lazy", "def primes():\n    found = []\n    n = 2\n    while True:\n        if all(n % p for p in found):\n            found.append(n)\n            yield n\n        n += 1\n", "from itertools import islice, takewhile\nimport types\nassert list(islice(primes(), 5)) == [2, 3, 5, 7, 11]\nassert list(takewhile(lambda p: p < 10, primes())) == [2, 3, 5, 7]\nassert isinstance(primes(), types.GeneratorType)\ng = primes()\nassert [next(g) for _ in range(3)] == [2, 3, 5]\nassert next(iter(g)) == 7")
ordinary("iterator-class", "class Countdown:\n    def __init__(self, n):\n        self.n = n\n    def __iter__(self):\n        return self\n    def __next__(self):\n        if self.n <= 0:\n            raise StopIteration\n        self.n -= 1\n        return self.n + 1\n", "assert list(Countdown(3)) == [3, 2, 1]\nit = iter(Countdown(1))\nassert next(it) == 1\nimport pytest\nwith pytest.raises(StopIteration):\n    next(it)\nassert next(it, 'end') == 'end'")
ordinary("context-manager-class", "class Timer:\n    def __init__(self):\n        self.events = []\n    def __enter__(self):\n        self.events.append('start')\n        return self\n    def __exit__(self, kind, error, tb):\n        self.events.append('stop' if kind is None else kind.__name__)\n        return kind is KeyError\n", "t = Timer()\nwith t as inner:\n    inner.events\nassert t.events == ['start', 'stop']\nwith Timer() as u:\n    raise KeyError('x')\nassert u.events == ['start', 'KeyError']")
ordinary("contextlib-manager", "from contextlib import contextmanager\nSTACK = []\n@contextmanager\ndef pushed(x):\n    STACK.append(x)\n    try:\n        yield len(STACK)\n    finally:\n        STACK.pop()\n", "with pushed('a') as n:\n    assert n == 1 and STACK == ['a']\n    with pushed('b') as m:\n        assert m == 2\nassert STACK == []\ntry:\n    with pushed('c'):\n        raise ValueError\nexcept ValueError:\n    pass\nassert STACK == []")
ordinary("factory-unnamed", "class _Account:\n    def __init__(self, owner, balance):\n        self.owner, self.balance, self.history = owner, balance, []\n    def deposit(self, n):\n        if n <= 0:\n            raise ValueError('amount must be positive')\n        self.balance += n\n        self.history.append(('deposit', n))\n        return self.balance\n    def withdraw(self, n):\n        if n > self.balance:\n            raise ValueError('insufficient funds')\n        self.balance -= n\n        self.history.append(('withdraw', n))\n        return self.balance\ndef create_account(owner, balance=0):\n    return _Account(owner, balance)\n", "import pytest\ndef test_account():\n    a = create_account('Bob', 100)\n    assert a.deposit(50) == 150\n    assert a.balance == 150\n    with pytest.raises(ValueError, match='insufficient'):\n        a.withdraw(1000)\n    assert a.history == [('deposit', 50)]\n    assert a.owner == 'Bob'")
ordinary("factory-closure", "def make_bank(balance=0):\n    def deposit(n):\n        nonlocal balance\n        balance += n\n        return balance\n    def get():\n        return balance\n    return {'deposit': deposit, 'get': get}\n", "b = make_bank(10)\nassert b['deposit'](5) == 15\nassert b['get']() == 15\nassert set(b) == {'deposit', 'get'}")
ordinary("factory-shape", "import math\nclass Circle:\n    def __init__(self, r):\n        self.r = r\n    def area(self):\n        return math.pi * self.r ** 2\nclass Square:\n    def __init__(self, s):\n        self.s = s\n    def area(self):\n        return self.s ** 2\ndef make_shape(kind, size):\n    return {'circle': Circle, 'square': Square}[kind](size)\n", "import math, pytest\ndef test_area():\n    assert make_shape('square', 3).area() == 9\n    assert make_shape('circle', 1).area() == pytest.approx(math.pi)\n    with pytest.raises(KeyError):\n        make_shape('x', 1)")
ordinary("enum-result", "from enum import Enum, auto\nclass State(Enum):\n    OPEN = 'open'\n    CLOSED = 'closed'\n    def toggled(self):\n        return State.CLOSED if self is State.OPEN else State.OPEN\ndef toggle(s):\n    return s.toggled()\n", "assert toggle(State.OPEN) is State.CLOSED\nassert toggle(State.CLOSED) == State.OPEN\nassert State('open') is State.OPEN and State['CLOSED'].value == 'closed'\nassert [s.name for s in State] == ['OPEN', 'CLOSED']\nassert len(State) == 2 and State.OPEN in State\nassert isinstance(State.OPEN, State)")
ordinary("intenum", "from enum import IntEnum\nclass Level(IntEnum):\n    LOW = 1\n    HIGH = 3\ndef level(n):\n    return Level.HIGH if n > 10 else Level.LOW\n", "assert level(20) == Level.HIGH\nassert level(20) == 3\nassert level(5) < Level.HIGH\nassert level(5).name == 'LOW' and int(level(5)) == 1")
ordinary("enum-unnamed", "from enum import Enum\nclass Color(Enum):\n    RED = 1\n    BLUE = 2\ndef parse(text):\n    return Color[text.upper()]\n", "def test_parse():\n    assert parse('red').name == 'RED'\n    assert parse('blue').value == 2")
ordinary("lru-cache-class", "from collections import OrderedDict\nclass LRUCache:\n    def __init__(self, capacity: int):\n        self.cap, self.d = capacity, OrderedDict()\n    def get(self, key: int) -> int:\n        if key not in self.d:\n            return -1\n        self.d.move_to_end(key)\n        return self.d[key]\n    def put(self, key: int, value: int) -> None:\n        self.d[key] = value\n        self.d.move_to_end(key)\n        if len(self.d) > self.cap:\n            self.d.popitem(last=False)\n", "def test_lru():\n    c = LRUCache(2)\n    c.put(1, 1)\n    c.put(2, 2)\n    assert c.get(1) == 1\n    c.put(3, 3)\n    assert c.get(2) == -1\n    assert c.get(3) == 3")
ordinary("lru-operations", "class MinStack:\n    def __init__(self):\n        self.s = []\n    def push(self, x):\n        self.s.append((x, min(x, self.s[-1][1] if self.s else x)))\n    def pop(self):\n        self.s.pop()\n    def top(self):\n        return self.s[-1][0]\n    def getMin(self):\n        return self.s[-1][1]\n", "def run(ops, args):\n    obj, out = None, []\n    for op, a in zip(ops, args):\n        if op == 'MinStack':\n            obj = MinStack(*a)\n            out.append(None)\n        else:\n            out.append(getattr(obj, op)(*a))\n    return out\nassert run(['MinStack', 'push', 'push', 'getMin', 'pop', 'top'], [[], [2], [1], [], [], []]) == [None, None, None, 1, None, 2]")
ordinary("matrix-class", "class Matrix:\n    def __init__(self, rows):\n        self.rows = [list(r) for r in rows]\n    def __matmul__(self, o):\n        return Matrix([[sum(a * b for a, b in zip(r, c)) for c in zip(*o.rows)] for r in self.rows])\n    def __mul__(self, k):\n        return Matrix([[a * k for a in r] for r in self.rows])\n    __rmul__ = __mul__\n    def __eq__(self, o):\n        return isinstance(o, Matrix) and self.rows == o.rows\n    def __getitem__(self, ij):\n        i, j = ij\n        return self.rows[i][j]\n    @property\n    def T(self):\n        return Matrix(zip(*self.rows))\n    @property\n    def shape(self):\n        return len(self.rows), len(self.rows[0])\n    def __repr__(self):\n        return f'Matrix({self.rows})'\n", "a = Matrix([[1, 2], [3, 4]])\nassert (a @ a).rows == [[7, 10], [15, 22]]\nassert a * 2 == Matrix([[2, 4], [6, 8]]) and 2 * a == a * 2\nassert a.T[0, 1] == 3 and a.shape == (2, 2)\nassert repr(a) == 'Matrix([[1, 2], [3, 4]])' and str(a.T) == 'Matrix([[1, 3], [2, 4]])'")
ordinary("fraction-class", "from math import gcd\nfrom functools import total_ordering\n@total_ordering\nclass Rat:\n    def __init__(self, n, d=1):\n        g = gcd(n, d)\n        self.n, self.d = n // g, d // g\n    def __add__(self, o):\n        o = o if isinstance(o, Rat) else Rat(o)\n        return Rat(self.n * o.d + o.n * self.d, self.d * o.d)\n    __radd__ = __add__\n    def __eq__(self, o):\n        return (self.n, self.d) == (o.n, o.d)\n    def __lt__(self, o):\n        return self.n * o.d < o.n * self.d\n    def __float__(self):\n        return self.n / self.d\n    def __str__(self):\n        return f'{self.n}/{self.d}'\n    def __hash__(self):\n        return hash((self.n, self.d))\n", "assert Rat(1, 2) + Rat(1, 3) == Rat(5, 6)\nassert Rat(1, 2) < Rat(2, 3) and Rat(3, 4) >= Rat(1, 2)\nassert str(Rat(2, 4)) == '1/2' and float(Rat(1, 4)) == 0.25\nassert sum([Rat(1, 2), Rat(1, 2)]) == Rat(1)\nassert max(Rat(1, 2), Rat(2, 3)) == Rat(2, 3)\nassert sorted([Rat(1), Rat(1, 2)])[0] == Rat(1, 2)")
ordinary("abstract-base", "from abc import ABC, abstractmethod\nclass Shape(ABC):\n    @abstractmethod\n    def area(self): ...\n    def describe(self):\n        return f'{type(self).__name__} {self.area()}'\nclass Rect(Shape):\n    def __init__(self, w, h):\n        self.w, self.h = w, h\n    def area(self):\n        return self.w * self.h\n", "import pytest\ndef test_abstract():\n    with pytest.raises(TypeError):\n        Shape()\n    assert Rect(2, 3).describe() == 'Rect 6'\n    assert isinstance(Rect(1, 1), Shape) and issubclass(Rect, Shape)")
ordinary("property-setter", "class Temp:\n    def __init__(self, c=0):\n        self.celsius = c\n    @property\n    def celsius(self):\n        return self._c\n    @celsius.setter\n    def celsius(self, v):\n        if v < -273.15:\n            raise ValueError('below absolute zero')\n        self._c = v\n    @property\n    def fahrenheit(self):\n        return self._c * 9 / 5 + 32\n    @staticmethod\n    def parse(s):\n        return Temp(float(s.rstrip('C')))\n    @classmethod\n    def boiling(cls):\n        return cls(100)\n    count = 0\n", "import unittest\nclass T(unittest.TestCase):\n    def setUp(self):\n        self.t = Temp(25)\n    def test_set(self):\n        self.t.celsius = 30\n        self.assertEqual(self.t.fahrenheit, 86)\n        with self.assertRaises(ValueError) as cm:\n            self.t.celsius = -300\n        self.assertIn('absolute', str(cm.exception))\n    def test_made(self):\n        self.assertEqual(Temp.parse('12C').celsius, 12.0)\n        self.assertAlmostEqual(Temp.boiling().fahrenheit, 212.0)\n        self.assertIsInstance(Temp.boiling(), Temp)\n        self.assertTrue(hasattr(self.t, 'celsius'))\n        self.assertFalse(hasattr(self.t, 'kelvin'))\n        with self.assertRaises(AttributeError):\n            self.t.fahrenheit = 3")
ordinary("event-emitter", "class Bus:\n    def __init__(self):\n        self._subs = {}\n    def subscribe(self, topic, fn):\n        self._subs.setdefault(topic, []).append(fn)\n        return lambda: self._subs[topic].remove(fn)\n    def publish(self, topic, **data):\n        for fn in list(self._subs.get(topic, [])):\n            fn(**data)\n", "def test_bus():\n    seen = []\n    bus = Bus()\n    off = bus.subscribe('a', lambda **d: seen.append(d))\n    bus.publish('a', x=1)\n    assert seen == [{'x': 1}]\n    off()\n    bus.publish('a', x=2)\n    assert len(seen) == 1")
ordinary("inventory", "class Inventory:\n    def __init__(self):\n        self.items = {}\n    def add(self, name, qty=1, price=0.0):\n        it = self.items.setdefault(name, {'qty': 0, 'price': price})\n        it['qty'] += qty\n    def __len__(self):\n        return len(self.items)\n    def __contains__(self, n):\n        return n in self.items\n    def __getitem__(self, n):\n        return self.items[n]\n    def __iter__(self):\n        return iter(self.items)\n    def __bool__(self):\n        return bool(self.items)\n    def __delitem__(self, n):\n        del self.items[n]\n", "inv = Inventory()\nassert not inv and len(inv) == 0\ninv.add('bolt', 5, 0.1)\ninv.add('nut')\nassert 'bolt' in inv and 'x' not in inv\nassert inv['bolt']['qty'] == 5 and list(inv) == ['bolt', 'nut']\ndel inv['nut']\nassert len(inv) == 1 and bool(inv)\nimport pytest\nwith pytest.raises(KeyError):\n    inv['zzz']")
ordinary("graph-class", "class Graph:\n    def __init__(self, directed=False):\n        self.adj, self.directed = {}, directed\n    def add_edge(self, u, v, w=1):\n        self.adj.setdefault(u, {})[v] = w\n        self.adj.setdefault(v, {})\n        if not self.directed:\n            self.adj[v][u] = w\n    def shortest(self, s, t):\n        import heapq\n        heap, seen = [(0, s, [s])], set()\n        while heap:\n            d, u, p = heapq.heappop(heap)\n            if u == t:\n                return d, p\n            if u in seen:\n                continue\n            seen.add(u)\n            for v, w in self.adj[u].items():\n                heapq.heappush(heap, (d + w, v, p + [v]))\n        return float('inf'), []\n", "import pytest\n@pytest.fixture\ndef g():\n    g = Graph()\n    for u, v, w in [('a', 'b', 1), ('b', 'c', 2), ('a', 'c', 5)]:\n        g.add_edge(u, v, w)\n    return g\ndef test_short(g):\n    assert g.shortest('a', 'c') == (3, ['a', 'b', 'c'])\n@pytest.mark.parametrize('s,t,d', [('a', 'b', 1), ('b', 'a', 1)])\ndef test_more(g, s, t, d):\n    assert g.shortest(s, t)[0] == d\ndef test_none(g):\n    g.add_edge('x', 'y')\n    assert g.shortest('a', 'x') == (float('inf'), [])")
ordinary("in-place-matrix", "def rotate(m):\n    m[:] = [list(r) for r in zip(*m[::-1])]\ndef zeroes(m):\n    rows = {i for i, r in enumerate(m) if 0 in r}\n    cols = {j for r in m for j, x in enumerate(r) if x == 0}\n    for i, r in enumerate(m):\n        for j in range(len(r)):\n            if i in rows or j in cols:\n                r[j] = 0\n", "m = [[1, 2], [3, 4]]\nrotate(m)\nassert m == [[3, 1], [4, 2]]\nn = [[1, 0], [1, 1]]\nassert zeroes(n) is None\nassert n == [[0, 0], [1, 0]]")
ordinary("in-place-sorts", "def bubble(a):\n    for i in range(len(a)):\n        for j in range(len(a) - 1 - i):\n            if a[j] > a[j + 1]:\n                a[j], a[j + 1] = a[j + 1], a[j]\n    return a\ndef dedupe(a):\n    k = 0\n    for x in a:\n        if k == 0 or a[k - 1] != x:\n            a[k] = x\n            k += 1\n    return k\n", "import random\nfor _ in range(10):\n    xs = [random.randint(0, 99) for _ in range(20)]\n    want = sorted(xs)\n    assert bubble(xs) == want\n    assert xs == want\nnums = [1, 1, 2, 2, 3]\nk = dedupe(nums)\nassert k == 3 and nums[:k] == [1, 2, 3]")
ordinary("input-not-changed", "def top(xs, n):\n    return sorted(xs, reverse=True)[:n]\n", "def test_unchanged():\n    xs = [3, 1, 2]\n    before = list(xs)\n    assert top(xs, 2) == [3, 2]\n    assert xs == before")
ordinary("deep-copy-result", "import copy\ndef clone(d):\n    return copy.deepcopy(d)\ndef merge(a, b):\n    out = dict(a)\n    for k, v in b.items():\n        out[k] = merge(out[k], v) if isinstance(v, dict) and isinstance(out.get(k), dict) else v\n    return out\n", "a = {'x': [1, 2], 'y': {'z': 3}}\nb = clone(a)\nassert b == a and b is not a and b['x'] is not a['x']\nb['x'].append(9)\nassert a['x'] == [1, 2]\nassert merge({'a': {'b': 1}}, {'a': {'c': 2}}) == {'a': {'b': 1, 'c': 2}}")
ordinary("node-copy", "class Node:\n    def __init__(self, val, neighbors=None):\n        self.val = val\n        self.neighbors = neighbors or []\ndef clone(node, seen=None):\n    seen = {} if seen is None else seen\n    if node is None:\n        return None\n    if node in seen:\n        return seen[node]\n    seen[node] = c = Node(node.val)\n    c.neighbors = [clone(n, seen) for n in node.neighbors]\n    return c\n", "a, b = Node(1), Node(2)\na.neighbors = [b]\nb.neighbors = [a]\nc = clone(a)\nassert c is not a and c.val == 1\nassert c.neighbors[0].val == 2 and c.neighbors[0] is not b\nassert c.neighbors[0].neighbors[0] is c")
ordinary("node-append-attr", "class Node:\n    def __init__(self, name):\n        self.name = name\n        self.children = []\n    def add(self, child):\n        self.children.append(child)\n        return child\ndef names(n):\n    return [n.name] + [x for c in n.children for x in names(c)]\n", "root = Node('r')\nroot.children.append(Node('a'))\nroot.add(Node('b')).add(Node('c'))\nassert names(root) == ['r', 'a', 'b', 'c']")
ordinary("simple-namespace", "from types import SimpleNamespace\ndef config(**kw):\n    return SimpleNamespace(debug=False, **kw)\n", "c = config(port=80)\nassert c.port == 80 and c.debug is False")
ordinary("custom-exceptions", "class BankError(Exception):\n    '''Base.'''\nclass Insufficient(BankError):\n    def __init__(self, need, have):\n        self.need, self.have = need, have\n        super().__init__(f'need {need}, have {have}')\ndef pay(have, need):\n    if need > have:\n        raise Insufficient(need, have)\n    return have - need\n", "import pytest\ndef test_pay():\n    assert pay(5, 3) == 2\n    with pytest.raises(Insufficient) as e:\n        pay(1, 3)\n    assert e.value.need == 3 and e.value.have == 1\n    assert str(e.value) == 'need 3, have 1'\n    assert issubclass(Insufficient, BankError)\n    assert e.type is Insufficient")
ordinary("kodcode-functions", "def lcs(a: str, b: str) -> str:\n    dp = [['' for _ in range(len(b) + 1)] for _ in range(len(a) + 1)]\n    for i in range(len(a)):\n        for j in range(len(b)):\n            dp[i + 1][j + 1] = dp[i][j] + a[i] if a[i] == b[j] else max(dp[i][j + 1], dp[i + 1][j], key=len)\n    return dp[-1][-1]\n", "from solution import lcs\n\ndef test_basic():\n    assert lcs('abcde', 'ace') == 'ace'\n\ndef test_empty():\n    assert lcs('', 'abc') == ''\n\ndef test_none():\n    assert lcs('abc', 'xyz') == ''\n\ndef test_long():\n    assert len(lcs('a' * 50, 'a' * 40)) == 40")
ordinary("unittest-subtest", "def is_palindrome(s):\n    s = [c.lower() for c in s if c.isalnum()]\n    return s == s[::-1]\n", "import unittest\nclass TestP(unittest.TestCase):\n    CASES = [('Racecar', True), ('hello', False), ('A man, a plan, a canal: Panama', True)]\n    def test_cases(self):\n        for text, want in self.CASES:\n            with self.subTest(text=text):\n                self.assertEqual(is_palindrome(text), want)\n    def test_bool(self):\n        self.assertIs(is_palindrome(''), True)\n        self.assertIsInstance(is_palindrome('a'), bool)\nif __name__ == '__main__':\n    unittest.main()")
ordinary("humaneval-class-ish", "def make_adders():\n    return [lambda x, i=i: x + i for i in range(3)]\n", "def check(candidate):\n    fs = candidate()\n    assert [f(10) for f in fs] == [10, 11, 12]\n    assert len(fs) == 3 and all(callable(f) for f in fs)\n", function="make_adders")
ordinary("lcb-functional", "class Solution:\n    def maxProfit(self, prices, fee=0):\n        best = 0\n        for i, p in enumerate(prices):\n            for q in prices[i + 1:]:\n                best = max(best, q - p - fee)\n        return best\n", [{"input": "[7,1,5,3,6,4]", "output": "5"}, {"input": "[7,6,4]", "output": "0"}, {"input": "[1,9]\n2", "output": "6"}], function="maxProfit")
ordinary("stdin-many", "import sys\ndef main():\n    data = sys.stdin.read().split()\n    n = int(data[0])\n    print(sum(map(int, data[1:n + 1])))\n    print(*sorted(map(int, data[1:n + 1])))\nmain()\n", [{"input": "3\n3 1 2\n", "output": "6\n1 2 3\n"}, {"input": "1\n5", "output": "5\n5"}])
ordinary("observer-callbacks", "class Button:\n    def __init__(self):\n        self.handlers = []\n    def on_click(self, fn):\n        self.handlers.append(fn)\n        return fn\n    def click(self):\n        return [h(self) for h in self.handlers]\n", "b = Button()\n@b.on_click\ndef handler(btn):\n    return len(btn.handlers)\nassert b.click() == [1]\nassert handler is b.handlers[0]")
ordinary("memo-decorator", "import functools\ndef count_calls(f):\n    @functools.wraps(f)\n    def w(*a, **k):\n        w.calls += 1\n        return f(*a, **k)\n    w.calls = 0\n    return w\n", "@count_calls\ndef add(a, b=1):\n    'Add.'\n    return a + b\nassert add(1) == 2 and add(1, b=3) == 4\nassert add.calls == 2\nassert add.__name__ == 'add' and add.__doc__ == 'Add.'")
ordinary("chainable-query", "class Query:\n    def __init__(self, rows):\n        self._rows = list(rows)\n    def where(self, **kw):\n        return Query(r for r in self._rows if all(r[k] == v for k, v in kw.items()))\n    def order_by(self, key):\n        return Query(sorted(self._rows, key=lambda r: r[key]))\n    def select(self, *cols):\n        return [{c: r[c] for c in cols} for r in self._rows]\n    def count(self):\n        return len(self._rows)\n    def first(self):\n        return self._rows[0] if self._rows else None\n", "rows = [{'n': 2, 't': 'a'}, {'n': 1, 't': 'a'}, {'n': 3, 't': 'b'}]\nq = Query(rows)\nassert q.where(t='a').order_by('n').select('n') == [{'n': 1}, {'n': 2}]\nassert q.where(t='a').count() == 2 and q.where(t='z').first() is None")
ordinary("result-or-error", "class Ok:\n    def __init__(self, value):\n        self.value, self.is_ok = value, True\n    def map(self, f):\n        return Ok(f(self.value))\nclass Err:\n    def __init__(self, error):\n        self.error, self.is_ok = error, False\n    def map(self, f):\n        return self\ndef parse(s):\n    try:\n        return Ok(int(s))\n    except ValueError as e:\n        return Err(str(e))\n", "def test_ok():\n    r = parse('12')\n    assert r.is_ok\n    assert r.value == 12\n    assert r.map(lambda x: x * 2).value == 24\ndef test_err():\n    r = parse('x')\n    assert not r.is_ok\n    assert 'invalid literal' in r.error")
ordinary("tokenizer-unnamed", "import re\nclass Token:\n    def __init__(self, kind, text):\n        self.kind, self.text = kind, text\n    def __repr__(self):\n        return f'{self.kind}:{self.text}'\ndef tokenize(s):\n    return [Token('num' if t.isdigit() else 'op', t) for t in re.findall(r'\\d+|[-+*/()]', s)]\n", "def test_tokens():\n    ts = tokenize('12+3')\n    assert [t.kind for t in ts] == ['num', 'op', 'num']\n    assert [t.text for t in ts] == ['12', '+', '3']\n    assert len(ts) == 3")
ordinary("heap-class", "import heapq\nclass MedianFinder:\n    def __init__(self):\n        self.lo, self.hi = [], []\n    def addNum(self, n):\n        heapq.heappush(self.hi, -heapq.heappushpop(self.lo, -n))\n        if len(self.hi) > len(self.lo):\n            heapq.heappush(self.lo, -heapq.heappop(self.hi))\n    def findMedian(self):\n        return float(-self.lo[0]) if len(self.lo) > len(self.hi) else (self.hi[0] - self.lo[0]) / 2\n", "m = MedianFinder()\nfor i, want in [(1, 1.0), (2, 1.5), (3, 2.0)]:\n    m.addNum(i)\n    assert m.findMedian() == want")
ordinary("str-subclass-result", "class Slug(str):\n    def title_case(self):\n        return self.replace('-', ' ').title()\ndef slugify(s):\n    return Slug('-'.join(s.lower().split()))\n", "assert Slug('a-b').title_case() == 'A B'\nassert slugify('Hello World') == 'hello-world'\nassert isinstance(slugify('x'), Slug)")
ordinary("file-io", "import json, os\ndef save(path, data):\n    with open(path, 'w') as f:\n        json.dump(data, f)\ndef load(path):\n    with open(path) as f:\n        return json.load(f)\n", "save('x.json', {'a': [1]})\nassert load('x.json') == {'a': [1]}\nimport pytest\nwith pytest.raises(FileNotFoundError):\n    load('missing.json')")
ordinary("default-dict-counter", "from collections import Counter, defaultdict\ndef words(t):\n    return Counter(t.lower().split())\ndef index(ws):\n    d = defaultdict(set)\n    for i, w in enumerate(ws):\n        d[w].add(i)\n    return d\n", "assert words('a b A') == {'a': 2, 'b': 1}\nassert words('a b A').most_common(1) == [('a', 2)]\nassert index(['x', 'y', 'x']) == {'x': {0, 2}, 'y': {1}}\nassert index([])['q'] == set()")
ordinary("singleton", "class Config:\n    _inst = None\n    def __new__(cls):\n        if cls._inst is None:\n            cls._inst = super().__new__(cls)\n            cls._inst.data = {}\n        return cls._inst\n", "a, b = Config(), Config()\nassert a is b\na.data['k'] = 1\nassert b.data == {'k': 1}")
ordinary("descriptor-validated", "class Positive:\n    def __set_name__(self, o, n):\n        self.n = '_' + n\n    def __get__(self, i, o):\n        return getattr(i, self.n)\n    def __set__(self, i, v):\n        if v <= 0:\n            raise ValueError(f'{self.n[1:]} must be positive')\n        setattr(i, self.n, v)\nclass Product:\n    price = Positive()\n    def __init__(self, price):\n        self.price = price\n", "import pytest\ndef test_p():\n    p = Product(5)\n    p.price = 7\n    assert p.price == 7\n    with pytest.raises(ValueError, match='price must'):\n        Product(-1)\n    assert p.__dict__ == {'_price': 7}\n    assert vars(p) == {'_price': 7}")
ordinary("pipeline-functions", "from functools import reduce\ndef pipe(*fs):\n    return lambda x: reduce(lambda v, f: f(v), fs, x)\ndef flatmap(f, xs):\n    return [y for x in xs for y in f(x)]\n", "assert pipe(str.strip, str.upper)(' a ') == 'A'\nassert pipe(int, lambda x: x + 1, str)('41') == '42'\nassert flatmap(lambda x: [x, x], [1, 2]) == [1, 1, 2, 2]\nassert flatmap(range, [1, 2]) == [0, 0, 1]")
ordinary("shared-row", "def bump(grid):\n    grid[0][0] += 1\n    return grid\n", "row = [0, 0]\ngrid = [row, row]\nassert bump(grid) == [[1, 0], [1, 0]]\nassert row == [1, 0]")
ordinary('kept-r32-class-number-gives-number', 'class Temp:\n    def __init__(self, a): self.a = a\n    def __add__(s, o): return s.a + o\n    def __call__(s, x): return s.a * x\n    def __getitem__(s, i): return s.a + i', 'assert Temp(5) + 3 == 8')
ordinary('kept-r92-annotations-of-a-class', 'class A:\n    """Doc."""\n    x: int = 3\n    def m(self): "Mdoc"; return 1', 'assert A.__doc__ == "Doc."\nassert A.x == 3\nassert A().m.__doc__ == "Mdoc"\nassert A.__name__ == "A"\nassert hasattr(A, "m") and callable(A.m)\nassert callable(getattr(A(), "m", None))')
ordinary('kept-b-made-then-chained', 'class T:\n    def __init__(s): s.d = []\n    def add(s, x): s.d.append(x); return s\n    def __contains__(s, x): return x in s.d', 't = T()\nt.add(5).add(6)\nassert 5 in t')
ordinary('kept-b2-factory-function-classmethod-contains', 'class T:\n    def __init__(s, d): s.d = d\n    @classmethod\n    def from_list(c, d): return c(d)\n    def __contains__(s, x): return x in s.d', 't = T.from_list([5])\nassert 5 in t')
ordinary('kept-b4-set-algebra-class-result-contains', 'class MySet:\n    def __init__(s, xs=()): s.d = list(dict.fromkeys(xs))\n    def __contains__(s, x): return x in s.d\n    def __or__(s, o): return MySet(s.d + o.d)\n    def union(s, o): return s | o\n    def __len__(s): return len(s.d)\n    def __iter__(s): return iter(s.d)', 'u = MySet([1]) | MySet([2])\nassert len(u) == 2\nassert sorted(u) == [1, 2]\nassert 2 in u')
ordinary('kept-d-class-doc', 'class A:\n    """Doc."""\n    x: int = 3', 'assert A.__doc__ == "Doc."')
ordinary('kept-d2', 'class A:\n    x: int = 3', 'assert A.x == 3\nassert A.__name__ == "A"\nassert A.__annotations__ == {"x": int}')
ordinary('kept-d4-fn-annotations', 'def f(x: int) -> str: "d"; return ""', 'assert f.__doc__ == "d"\nassert f.__name__ == "f"\nassert f.__annotations__ == {"x": int, "return": str}')
ordinary('kept-d5-get_type_hints', 'def f(x: int) -> str: return ""', 'from typing import get_type_hints\nassert get_type_hints(f) == {"x": int, "return": str}')
ordinary('kept-h-bank-number-arithmetic-on-result', 'class Acc:\n    def __init__(s, b=0): s.b = b\n    def deposit(s, x): s.b += x; return s\n    def __isub__(s, x): s.b -= x; return s\n    def __int__(s): return s.b\n    def __format__(s, f): return format(s.b, f)\n    def __len__(s): return s.b', 'a = Acc()\nassert a.deposit(5).b == 5\na -= 2\nassert a.b == 3\nassert int(a) == 3\nassert f"{a:.2f}" == "3.00"\nassert int(a.deposit(5)) == 8\nassert len(a.deposit(5)) == 13')
ordinary('kept-h2-units-convertible', 'class Length:\n    def __init__(s, m): s.m = m\n    def __add__(s, o): return Length(s.m + o.m)\n    def __mul__(s, k): return Length(s.m * k)\n    def __truediv__(s, o): return s.m / o.m if isinstance(o, Length) else Length(s.m / o)\n    def __float__(s): return s.m\n    def __round__(s, n=None): return round(s.m, n)', 'assert Length(4) / Length(2) == 2\nassert (Length(4) / 2).m == 2\nassert float(Length(4.5) * 2) == 9.0\nassert round(Length(4.56) * 2, 1) == 9.1')
ordinary('kept-h3-vector-scalar-then-index-abs', 'class V:\n    def __init__(s, *c): s.c = c\n    def __mul__(s, k): return V(*(x * k for x in s.c))\n    def __iter__(s): return iter(s.c)\n    def __getitem__(s, i): return s.c[i]\n    def __len__(s): return len(s.c)\n    def __abs__(s): return sum(x * x for x in s.c) ** .5\n    def __str__(s): return "V" + str(s.c)', 'assert list(V(1, 2) * 3) == [3, 6]\nassert (V(1, 2) * 3)[1] == 6\nassert abs(V(3, 4) * 2) == 10\nassert len(V(1) * 2) == 1\nassert str(V(1, 2) * 2) == "V(2, 4)"\nassert tuple(V(1, 2) * 2) == (2, 4)')
ordinary('kept-h4-string-class-str', 'class Str:\n    def __init__(s, t): s.t = t\n    def __add__(s, o): return Str(s.t + (o.t if isinstance(o, Str) else o))\n    def __str__(s): return s.t\n    def __len__(s): return len(s.t)', 'assert str(Str("a") + "b") == "ab"\nassert len(Str("a") + "bc") == 3')
ordinary('kept-h5-modular-int', 'class Mod:\n    def __init__(s, v, m=7): s.v, s.m = v % m, m\n    def __add__(s, o): return Mod(s.v + (o.v if isinstance(o, Mod) else o), s.m)\n    def __pow__(s, e): return Mod(pow(s.v, e, s.m), s.m)\n    def __int__(s): return s.v\n    def __eq__(s, o): return s.v == (o.v if isinstance(o, Mod) else o)', 'assert int(Mod(5) + 4) == 2\nassert int(Mod(3) ** 2) == 2\nassert Mod(5) + 4 == Mod(2)')
ordinary('json-error', 'import json\ndef f(t): return json.loads(t)', "import json, pytest\ndef test_bad():\n    with pytest.raises(json.JSONDecodeError):\n        f('bad')\n    assert f('[1]') == [1]")
ordinary('path-argument', "def f(p): return p.name, p.suffix, p / 'x'", "from pathlib import Path\nassert f(Path('a.txt')) == ('a.txt', '.txt', Path('a.txt/x'))")
ordinary('approx-forms', 'def f(x): return [x, x / 3]', 'import pytest\nfrom fractions import Fraction\nassert f(1) == pytest.approx((1, 0.3333333))\nassert Fraction(1, 3) == pytest.approx(f(1)[1])\nassert f(1e6)[0] == pytest.approx(1e6 + 0.5, rel=1e-6)')
ordinary('named-nan', 'import math\ndef f(x): return math.nan if x < 0 else math.inf', "import math\nassert math.isnan(f(-1)) and not f(-1) > 0\nassert f(1) <= float('inf')")
ordinary('unreachable', "def dist(g): return {'a': 0, 'b': 3, 'c': float('inf')}", "d = dist({})\nassert d['b'] == 3 and d['c'] > 10 ** 9")
ordinary('eval-expression', "def solve(xs): return '(8 - 4) * (7 - 1)'", "assert eval(solve([8, 4, 7, 1])) == 24\nassert eval('x + 1', {'x': 2}) == 3 and solve([1])")
ordinary('own-iterator', 'class It:\n    def __init__(s, xs): s.xs = list(xs)\n    def __iter__(s): return s\n    def __next__(s):\n        if not s.xs: raise StopIteration\n        return s.xs.pop(0)\n    def peek(s): return s.xs[0]\ndef make(xs): return It(xs)', 'r = make([1, 2])\nassert next(r) == 1 and r.peek() == 2 and list(r) == [2]')
ordinary('read-file', 'import io\ndef f(t): return io.StringIO(t)', "assert f('ab').read() == 'ab'")
ordinary('number-methods', "import math\nclass N:\n    def __init__(s, v): s.v = v\n    def __pos__(s): return N(s.v)\n    def __divmod__(s, o): return divmod(s.v, o)\n    def __index__(s): return int(s.v)\n    def __ceil__(s): return math.ceil(s.v)\n    def __floor__(s): return math.floor(s.v)\n    def __trunc__(s): return math.trunc(s.v)\n    def __complex__(s): return complex(s.v)\n    def __bytes__(s): return b'n'\n", "import math\nn = N(2.5)\nassert (+n).v == 2.5\nassert divmod(n, 2) == (1.0, 0.5)\nassert hex(n) == '0x2' and [1, 2, 3][n] == 3\nassert (math.ceil(n), math.floor(n), math.trunc(n)) == (3, 2, 2)\nassert complex(n) == 2.5 and bytes(n) == b'n'")
ordinary('fixture-named-cache', 'def f(xs): return sorted(xs)', 'import pytest\n@pytest.fixture\ndef cache(): return [2, 1]\ndef test_sorted(cache):\n    assert f(cache) == [1, 2]')
