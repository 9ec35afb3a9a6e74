"""Phrases that a native reader has to decode; rooms without any stay without."""

import ast
import io
import re
import tokenize
from collections import Counter
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "grpo_cli"
PHRASES = re.compile(
    r"\b(?:(?<!there )(?<!There )(?:is|are) no|anew|so many|as many \w+ as|in the median|at your|of no|"
    r"no longer than that|from which on)\b"
)
OPENINGS = re.compile(r"(?:What|Have|Say|Whether)\b")
"""Of a function's docstring, which says what the function does."""
MOST = 153
"""Of all rooms; may only fall."""
SWEPT = {
    "analysis",
    "batch",
    "cli",
    "doctor",
    "fast",
    "launch",
    "report",
    "runs",
    "serve",
    "sweep",
    "training",
    "upstream",
}


def find_phrases(path: Path) -> list[str]:
    text = path.read_text(encoding="utf-8")
    kinds = {tokenize.STRING, tokenize.COMMENT, getattr(tokenize, "FSTRING_MIDDLE", -1)}
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    found = [
        f"{path}:{token.start[0]}: {match.group()}"
        for token in tokens
        if token.type in kinds
        for match in PHRASES.finditer(token.string)
        if "no longer" not in token.string[match.start() : match.end() + 7]
    ]
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            match = OPENINGS.match(ast.get_docstring(node) or "")
            found += (
                [f"{path}:{node.lineno}: docstring begins with {match.group()}"] if match else []
            )
    return found


def test_sentences_are_plain():
    counts: Counter[str] = Counter()
    for path in sorted(PACKAGE.rglob("*.py")):
        room, found = path.relative_to(PACKAGE).parts[0], find_phrases(path)
        assert not (found and room in SWEPT), "\n".join(found)
        counts[room] += len(found)
    assert counts.total() <= MOST, counts
