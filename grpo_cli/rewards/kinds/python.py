"""The reward `python`: a function of the user's, its signature read from source, called with TRL's arguments."""

import ast
import atexit
import copy
import hashlib
import inspect
import random
import sys
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import cache, cached_property
from typing import TYPE_CHECKING, Any

from pydantic import Field, field_validator
from pydantic_core import PydanticCustomError

from grpo_cli.errors import RewardError, nearest
from grpo_cli.issues import Issue
from grpo_cli.recipe.dataset import IMAGES
from grpo_cli.rewards.contract import (
    Batch,
    Columns,
    Meta,
    RewardContext,
    RewardParams,
    Score,
    Scorer,
)
from grpo_cli.user_code import (
    ANY_SIGNATURE,
    Function,
    SourceError,
    bindings,
    load_name,
    parse_source,
    signature_of,
    source_file,
)
from grpo_cli.user_imports import find_missing_imports

if TYPE_CHECKING:
    import asyncio

TRL_PARAMETERS = (
    "prompts",
    "completions",
    "completion_ids",
    "trainer_state",
    "log_extra",
    "log_metric",
    "environments",
)
"""What TRL passes to every reward function beside the dataset's columns.

Source: `GRPOTrainer._calculate_rewards` (TRL 1.16).
"""
_SINGULARS = {"prompt": "prompts", "completion": "completions"}
_OTHER_TOOLS = {
    "verl": ({"solution_str"}, "one text (`solution_str`)"),
    "OpenRLHF": ({"queries", "labels"}, "prompt and completion as one text (`queries`)"),
    "verifiers": ({"completion", "state"}, "one completion and the `state` of its rollout"),
    "slime": ({"args", "sample"}, "one `sample`"),
    "AReaL": ({"prompt", "completions", "prompt_ids"}, "one completion (`completions`)"),
}
"""Other tools, the arguments that their reward functions need, and what these get in place of a batch."""
_NOT_COPIED = frozenset({"trainer_state", "log_extra", "log_metric", "environments"})
"""What TRL passes besides lists."""


class PythonParams(RewardParams):
    """Scores completions with your own function.

    Formula: defined by the function. It is called like TRL's reward functions, once per batch:
    `f(prompts, completions, **columns)`, every argument by name and every value a list with one
    entry per completion; `completion_ids`, `trainer_state`, `log_extra` and `log_metric` are also
    passed. What it logs in an evaluation is of all rows, in one call. Prompts and completions are
    strings, or lists of messages if the prompt is a conversation. Unlike in TRL, a function without
    `**kwargs` receives only the arguments it names. It returns one number per completion, or None
    for rows it does not apply to, and may be `async`.
    Range: any; finite numbers up to 1e18.

    Source: `GRPOTrainer._calculate_rewards` (TRL 1.16).
    """

    kind = "python"
    meta = Meta(named_by="path")

    path: str
    """`file.py:function`, relative to the recipe, or `package.module:function`; other callables
    work too."""
    kwargs: dict[str, Any] = Field(default_factory=dict)
    """More arguments for the function; they override columns of the same name."""

    @field_validator("path")
    @classmethod
    def _check_path(cls, path: str) -> str:
        source, _, function = path.rpartition(":")
        if not source or not function.isidentifier():
            raise PydanticCustomError(
                "grpo_function_path",
                "should be file.py:function or module:function, not {path}",
                {"path": repr(path)},
            )
        return path

    @property
    def source(self) -> str:
        """The file or module."""
        return self.path.rpartition(":")[0]

    @property
    def function(self) -> str:
        """The function's name."""
        return self.path.rpartition(":")[2]

    def details(self) -> Meta:
        signature = signature_of(self._definition)
        return replace(
            self.meta,
            waits=isinstance(self._definition, ast.AsyncFunctionDef),
            reads_tokens="completion_ids" in _required_names(signature),
            reads_images=_accepts(signature, IMAGES),
        )

    def columns(self) -> Columns:
        signature = signature_of(self._definition)
        named = [n for n, each in signature.parameters.items() if each.kind is not each.VAR_KEYWORD]
        required = dict.fromkeys(_required_names(signature))
        required |= dict.fromkeys(_keys_read_first(self._definition))
        if _tool_of(signature):
            required = {}  # `problems` tells
        both = ([n for n in names if not self._is_passed(n)] for names in (required, named))
        return Columns(*map(tuple, both))

    def _is_passed(self, name: str) -> bool:
        return name in TRL_PARAMETERS or name in _SINGULARS or name in self.kwargs

    def problems(self, context: RewardContext | None = None) -> list[Issue]:
        if isinstance(self._found, SourceError):
            return [Issue(self._found.seen, self._found.fix, "path")]
        signature = signature_of(self._definition)
        call, required = f"{self.function}()", _required_names(signature)
        if tool := _tool_of(signature):
            seen = f"{call} has the signature of {tool}, which passes {_OTHER_TOOLS[tool][1]}"
            fix = (
                f"write `def {self.function}(completions, answer, **kwargs)`, which returns a list of scores; "
                "`answer` stands for a column of the dataset"
            )
            return [Issue(seen, fix, "path")]
        faults = find_missing_imports(self.source)
        faults += [
            Issue(f"{call} needs {name!r}, which TRL does not pass", f"name it {plural!r}", "path")
            for name, plural in _SINGULARS.items()
            if name in required and name not in self.kwargs
        ]
        for name in self.kwargs:
            if name in TRL_PARAMETERS:
                message, fix = f"TRL passes {name!r} itself", "rename it"
            elif not _accepts(signature, name):
                message = f"{call} takes no argument {name!r}"
                close = nearest(name, set(signature.parameters) - {*TRL_PARAMETERS})
                fix = (
                    f"write {close!r}" if close else f"remove it, or add {name!r} to the signature"
                )
            else:
                continue
            faults.append(Issue(message, fix, f"kwargs.{name}"))
        return faults

    @cached_property
    def _found(self) -> ast.AST | SourceError | None:
        """What binds the function's name, read once from the source; the error if that cannot be read."""
        try:
            return _find_definition(self.source, self.function)
        except SourceError as error:
            return error

    @property
    def _definition(self) -> ast.AST | None:
        return None if isinstance(self._found, SourceError) else self._found

    def build(self, context: RewardContext) -> Scorer:
        function = self._load()
        try:
            signature = inspect.signature(function)
        except (TypeError, ValueError):
            signature = ANY_SIGNATURE

        @cache
        def runner() -> "asyncio.Runner":
            # One loop for all calls: HTTP clients stay bound to the first.
            import asyncio

            runner = asyncio.Runner()
            atexit.register(runner.close)
            return runner

        def score(batch: Batch) -> Sequence[Score]:
            # Copies: a function that changes its arguments must not change those of another call.
            arguments = {
                name: value if name in _NOT_COPIED else copy.deepcopy(value)
                for name, value in {**_trl_arguments(batch), **self.kwargs}.items()
                if _accepts(signature, name)
            }
            with _seeded(batch):
                values = function(**arguments)
                if isinstance(values, Awaitable):
                    values = runner().run(_wait(values))
                return _as_scores(values)

        for name in self._state_methods(function):
            setattr(score, name, getattr(function, name))
        return score

    def _load(self) -> Callable[..., Any]:
        """Import the function; what its file raises passes through."""
        try:
            function = load_name(self.path)
        except SourceError as error:
            raise RewardError(error.seen, error.fix, "path") from error
        if not callable(function):
            raise RewardError(
                f"{self.function!r} in {self.source} cannot be called",
                "name a function",
                path="path",
            )
        return function

    def _state_methods(self, function: Callable[..., Any]) -> list[str]:
        methods = [name for name in ("state_dict", "load_state_dict") if hasattr(function, name)]
        if len(methods) == 1:
            raise RewardError(
                f"{self.function} has {methods[0]}() alone, so no checkpoint can keep its state",
                "give it both state_dict() and load_state_dict()",
            )
        return methods


def _trl_arguments(batch: Batch) -> dict[str, Any]:
    return {
        **batch.columns,
        "trainer_state": None,
        "log_extra": lambda name, value: None,
        "log_metric": lambda name, value: None,
        **batch.extra,
        "prompts": batch.prompts,
        "completions": batch.completions,
        "completion_ids": batch.completion_ids,
    }


@contextmanager
def _seeded(batch: Batch) -> Iterator[None]:
    """Seed random numbers by the batch's seed, and restore the process's random state afterwards."""
    if batch.seed is None:
        yield
        return
    digest = hashlib.sha256(f"{batch.seed}:{batch.positions}".encode()).digest()
    seed = int.from_bytes(digest[:4])
    # Only libraries that are loaded: a worker need not import torch for a function that does not.
    numpy: Any = sys.modules.get("numpy")
    torch: Any = sys.modules.get("torch")
    with ExitStack() as stack:
        stack.callback(random.setstate, random.getstate())
        random.seed(seed)
        if numpy:
            stack.callback(numpy.random.set_state, numpy.random.get_state())
            numpy.random.seed(seed)
        if torch:
            devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
            stack.enter_context(torch.random.fork_rng(devices))
            torch.random.default_generator.manual_seed(seed)
            if devices:
                torch.cuda.manual_seed(seed)
        yield


async def _wait(values: Awaitable[Any]) -> Any:
    return await values


def _as_scores(values: Any) -> list[Score]:
    if not isinstance(values, Iterable) or isinstance(values, str | Mapping):
        seen = f"the function returned {type(values).__name__}, not a list with one number a completion"
        makes = "if it makes the reward, write `reward = …()` in the file, and name that"
        raise RewardError(seen, makes if callable(values) else "")
    return [Score(value) for value in values]


def _accepts(signature: inspect.Signature, name: str) -> bool:
    takes_any = any(each.kind is each.VAR_KEYWORD for each in signature.parameters.values())
    return takes_any or name in signature.parameters


def _tool_of(signature: inspect.Signature) -> str | None:
    """Return the other tool that a reward function was written for; None if it takes what TRL passes."""
    names = set(_required_names(signature))
    # None of them passes completions as TRL does: a batch of them, with columns beside it.
    tools = (tool for tool, (needed, _) in _OTHER_TOOLS.items() if needed <= names)
    tool = next(tools, None)
    return None if tool == "OpenRLHF" and "completions" in names else tool


def _required_names(signature: inspect.Signature) -> list[str]:
    return [
        name
        for name, each in signature.parameters.items()
        if each.default is each.empty and each.kind not in (each.VAR_KEYWORD, each.VAR_POSITIONAL)
    ]


def _keys_read_first(definition: ast.AST | None) -> Iterator[str]:
    """Yield what a function reads as `kwargs["name"]` before anything may branch or change it."""
    rest = definition.args.kwarg if isinstance(definition, Function) else None
    for statement in definition.body if isinstance(definition, Function) and rest else ():
        nodes = list(ast.walk(statement))
        is_text = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
        if not (is_text or isinstance(statement, ast.Assign | ast.AnnAssign | ast.Return)):
            return
        if any(isinstance(node, ast.IfExp | ast.BoolOp | ast.Lambda) for node in nodes):
            return
        for node in nodes:
            match node:
                case ast.Subscript(ast.Name(name), ast.Constant(str(key)), ast.Load()):
                    if rest and name == rest.arg:
                        yield key
                case ast.Name(name, ast.Store()) if rest and name == rest.arg:
                    return


def _find_definition(source: str, function: str) -> ast.AST | None:
    """Return what binds a function's name, found without importing anything; None if that cannot be said.

    Raises:
        SourceError: The file, module or function does not exist, or the source does not parse.
    """
    path = source_file(source)
    if path is None:
        return None
    bound = bindings(parse_source(path))
    if function not in bound and "*" not in bound:
        functions = [name for name, node in bound.items() if isinstance(node, Function)]
        close = nearest(function, functions) or (functions[0] if len(functions) == 1 else None)
        there = f"; it has {', '.join(functions)}" if functions else ""
        fix = f"name {close}" if close else f"write `def {function}(completions, **kwargs)` there"
        raise SourceError(f"there is no function {function!r} in {path}{there}", fix)
    definition = bound.get(function)
    if isinstance(definition, ast.ClassDef):
        raise SourceError(
            f"{function} in {path} is a class, not a function",
            "name a function, such as one that calls an instance of it",
        )
    return definition
