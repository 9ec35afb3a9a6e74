"""The user's own reward function: `python`.

Owns loading it and calling it with TRL's arguments. Reads its source through `signatures.py`;
what it raises or returns wrongly is reported by `scoring.py`.
"""

import atexit
import copy
import hashlib
import importlib
import importlib.util
import random
import sys
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import Field, field_validator
from pydantic_core import PydanticCustomError

from grpo_cli.errors import RewardError
from grpo_cli.rewards.contract import Batch, RewardContext, RewardParams, Score, Scorer
from grpo_cli.rewards.kinds.signatures import (
    TRL_PARAMETERS,
    Signature,
    SourceError,
    find_state,
    is_file,
    read_signature,
)

if TYPE_CHECKING:
    import asyncio

_SINGULARS = {"prompt": "prompts", "completion": "completions"}
_NOT_COPIED = frozenset({"trainer_state", "log_extra", "log_metric", "environments"})
"""What TRL passes besides lists."""
_STATE_METHODS = ("state_dict", "load_state_dict")


class PythonParams(RewardParams):
    """Rewards what a function of yours rewards.

    Formula: the function's own. It is called as TRL calls reward functions, once a batch:
    `f(prompts, completions, **columns)`, every argument by name and every value a list with one
    entry a completion; `completion_ids`, `trainer_state`, `log_extra` and `log_metric` are there
    too. Prompts and completions are texts, or lists of messages where the prompt is a
    conversation. Unlike in TRL, a function without `**kwargs` is given only what it names. It
    returns one number a completion, or None for rows it does not apply to, and may be `async`.
    Range: any; finite numbers up to 1e18.

    Source: `GRPOTrainer._calculate_rewards` (TRL 1.16).
    """

    kind: ClassVar[str] = "python"

    path: str
    """`file.py:function`, relative to the recipe, or `package.module:function`; an object that can be called
    does as well."""
    kwargs: dict[str, Any] = Field(default_factory=dict)
    """More arguments for the function; they win over columns of the same name."""

    @classmethod
    def default_name(cls, params: Mapping[str, Any]) -> str:
        """The function's name, as TRL calls it in its metrics."""
        function = str(params.get("path", "")).rpartition(":")[2]
        return function if function.isidentifier() else cls.kind

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

    def required_columns(self) -> tuple[str, ...]:
        """The function's parameters that have no default and that TRL does not pass itself."""
        signature = self._signature()
        known = {*TRL_PARAMETERS, *_SINGULARS, *self.kwargs}
        return tuple(name for name in signature.required if name not in known)

    def problems(self) -> list[tuple[str, str, str]]:
        """Reports a missing file or function, and a signature that cannot be called."""
        try:
            signature = read_signature(self.source, self.function) or Signature()
        except SourceError as error:
            return [("path", error.message, error.fix)]
        return [*self._parameter_problems(signature), *self._kwargs_problems(signature)]

    def _signature(self) -> Signature:
        try:
            return read_signature(self.source, self.function) or Signature()
        except SourceError:
            return Signature()

    def _parameter_problems(self, signature: Signature) -> list[tuple[str, str, str]]:
        where = f"{self.function}()"
        wrong = [
            ("path", f"{where} needs {name!r}, which TRL does not pass", f"name it {plural!r}")
            for name, plural in _SINGULARS.items()
            if name in signature.required and name not in self.kwargs
        ]
        if signature.positional_only:
            names = ", ".join(signature.positional_only)
            message = f"{where} takes {names} by position only; TRL passes arguments by name"
            wrong.append(("path", message, f"take the `/` out of the signature of {where}"))
        return wrong

    def _kwargs_problems(self, signature: Signature) -> list[tuple[str, str, str]]:
        taken = [name for name in self.kwargs if name in TRL_PARAMETERS]
        unknown = [name for name in self.kwargs if not signature.accepts(name)]
        return [
            *((f"kwargs.{name}", f"TRL passes {name!r} itself", "rename it") for name in taken),
            *(
                (
                    f"kwargs.{name}",
                    f"{self.function}() takes no argument {name!r}",
                    f"remove it, or add {name!r} to the signature",
                )
                for name in unknown
            ),
        ]

    def waits(self, *, limited: bool) -> bool:
        """Where the function is `async`, or a time limit has other processes run it."""
        return limited or self._signature().is_async

    def reads_tokens(self) -> bool:
        """Where the function names `completion_ids`."""
        return "completion_ids" in self._signature().required

    def lost_state(self) -> list[str]:
        """Return the variables of the function's file that calls change and no checkpoint holds."""
        try:
            return find_state(self.source)
        except SourceError:
            return []

    def build(self, context: RewardContext) -> Scorer:
        """Imports the user's module; what that raises passes through.

        Raises:
            RewardError: There is no such function, or it offers half of what keeps a state.
        """
        function = load_function(self.source, self.function)
        accepts = _acceptance(function)
        run = _Awaiter()

        def score(batch: Batch) -> Sequence[Score]:
            given = {**_arguments(batch), **self.kwargs}
            # Copies: a function that changes its arguments must not change those of another call.
            own = {
                name: value if name in _NOT_COPIED else copy.deepcopy(value)
                for name, value in given.items()
                if accepts(name)
            }
            with _seeded(batch):
                values = function(**own)
                return _as_scores(run(values) if isinstance(values, Awaitable) else values)

        for name in self._state_methods(function):
            setattr(score, name, getattr(function, name))
        return score

    def _state_methods(self, function: Callable[..., Any]) -> tuple[str, ...]:
        """Return the methods by which checkpoints keep a function's state; none if it offers none."""
        lacking = [name for name in _STATE_METHODS if not callable(getattr(function, name, None))]
        if len(lacking) == 1:
            raise RewardError(
                f"{self.function} offers a state without {lacking[0]}(), so no checkpoint can keep it. "
                f"Fix: add {lacking[0]}(), or remove the other method"
            )
        return () if lacking else _STATE_METHODS


def load_function(source: str, name: str) -> Callable[..., Any]:
    """Imports a file or module and returns a function of it.

    Raises:
        RewardError: There is no such function. What the import itself raises passes through.
    """
    module = _load_file(Path(source)) if is_file(source) else importlib.import_module(source)
    function = getattr(module, name, None)
    if function is None:
        raise RewardError(
            f"{source} has no function {name!r}. Fix: define it, or name another", "path"
        )
    if not callable(function):
        kind = type(function).__name__
        raise RewardError(
            f"{name!r} in {source} is a {kind} that cannot be called. Fix: name a function, or give "
            f"class {kind} a `__call__(self, completions, **kwargs)`",
            "path",
        )
    return function


def _load_file(path: Path) -> ModuleType:
    """Imports a file once a process; its folder goes to the end of `sys.path`, for its imports."""
    path = path.resolve()
    digest = hashlib.sha256(str(path).encode()).hexdigest()[:8]
    name = f"grpo_own_{digest}_{path.stem}"
    if name in sys.modules:
        return sys.modules[name]
    if not path.is_file():
        raise RewardError(f"there is no file {path}. Fix: correct `path`", "path")
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise RewardError(f"{path} is not a Python file. Fix: let its name end in .py")
    module = importlib.util.module_from_spec(spec)
    # Registered before it runs, as dataclasses and pickle look their module up by name.
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _acceptance(function: Callable[..., Any]) -> Callable[[str], bool]:
    """Tells which argument names a function takes; all where its signature cannot be read."""
    import inspect

    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return lambda name: True
    if any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters.values()):
        return lambda name: True
    return parameters.__contains__


def _arguments(batch: Batch) -> dict[str, Any]:
    """TRL's arguments; the ones it passes itself win over columns of the same name."""
    return {
        **batch.columns,
        "trainer_state": None,
        "log_extra": _log_nothing,
        "log_metric": _log_nothing,
        **batch.extra,
        "prompts": batch.prompts,
        "completions": batch.completions,
        "completion_ids": batch.completion_ids,
    }


@contextmanager
def _seeded(batch: Batch) -> Iterator[None]:
    """Have what is drawn inside follow from the batch's seed, and leave the process's random state as it was."""
    if batch.seed is None:
        yield
        return
    digest = hashlib.sha256(f"{batch.seed}:{batch.places}".encode()).digest()
    number = int.from_bytes(digest[:4])
    numpy: Any = sys.modules.get("numpy")
    torch: Any = sys.modules.get("torch")
    before = random.getstate(), numpy and numpy.random.get_state()
    devices = [torch.cuda.current_device()] if torch and torch.cuda.is_initialized() else []
    with torch.random.fork_rng(devices) if torch else nullcontext():
        random.seed(number)
        if numpy:
            numpy.random.seed(number)
        if torch:
            torch.random.default_generator.manual_seed(number)
        if devices:
            torch.cuda.manual_seed(number)
        try:
            yield
        finally:
            random.setstate(before[0])
            if numpy:
                numpy.random.set_state(before[1])


def _log_nothing(name: str, value: Any) -> None:
    """Stands for TRL's loggers where there is no trainer."""


def _as_scores(values: Any) -> list[Score]:
    if not isinstance(values, Iterable) or isinstance(values, str | Mapping):
        kind = type(values).__name__
        raise RewardError(f"the function returned {kind}, not a list with one number a completion")
    return [Score(value) for value in values]


class _Awaiter:
    """Runs coroutines to their end, all on one loop: HTTP clients stay bound to the first."""

    def __init__(self) -> None:
        self._runner: asyncio.Runner | None = None

    def __call__(self, values: Any) -> Any:
        import asyncio

        if self._runner is None:
            self._runner = asyncio.Runner()
            atexit.register(self._runner.close)
        return self._runner.run(_awaited(values))


def _awaited(values: Any) -> Coroutine[Any, Any, Any]:
    async def wait() -> Any:
        return await values

    return wait()
