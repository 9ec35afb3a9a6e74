"""Calls of tools and environments, side by side on threads, each under a time limit; and what they return."""

import asyncio
import copy
import ctypes
import hashlib
import inspect
import json
import math
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

from grpo_cli.data.images import ImageError, as_picture
from grpo_cli.environments.contract import Environment, EpisodeError, Failure, Reward, Tool
from grpo_cli.recipe.dataset import IMAGES
from grpo_cli.rewards.scoring import as_float

T = TypeVar("T")
Content = str | list[dict[str, Any]]
"""What a message says: text, or parts with images in them."""
_OWN = str(Path(__file__).parents[1])
MOST_LEFT = 500
"""Threads of late calls that may still run; a container often allows a few thousand."""
_left: list[threading.Thread] = []
_loop_lock = threading.Lock()


@dataclass
class Outcome:
    """What became of a call."""

    value: Any = None
    error: BaseException | None = None
    is_late: bool = False
    """Whether it had not returned in time; it may still run."""
    seconds: float = 0.0

    @property
    def failure(self) -> Failure:
        """How it failed; empty if it did not."""
        return "late" if self.is_late else "failed" if self.error is not None else ""

    @property
    def fault(self) -> str:
        """Why there is no value, in one line; empty if there is one."""
        if self.is_late:
            return f"it took longer than {self.seconds:g} s"
        if self.error is not None:
            return (
                f"{type(self.error).__name__}: {as_text(str(self.error)).strip() or 'no message'}"
            )
        return ""


Chain = Generator[Callable[[], Any], Outcome, T]
"""Calls that depend on one another: yields one, is sent its outcome, and returns a result at the end."""


def run_chains(chains: Sequence[Chain[T]], *, parallel: int, timeout_s: float) -> list[T]:
    """Run chains of calls side by side; return what each returned.

    The chains run on this thread; each of their calls, at most `parallel` at a time, has a thread of its own.
    Nothing that a call raises, `SystemExit` included, reaches the caller. One that takes longer than `timeout_s`
    is left behind: its thread is asked to end, and does not keep the process alive.

    Raises `EpisodeError` if too many late calls still run.
    """
    results: list[Any] = [None] * len(chains)
    waiting: deque[tuple[int, Callable[[], Any]]] = deque()
    running: dict[threading.Thread, tuple[int, float]] = {}
    finished: SimpleQueue[tuple[threading.Thread, Outcome]] = SimpleQueue()

    def advance(number: int, outcome: Outcome | None) -> None:
        try:
            waiting.append((number, chains[number].send(outcome)))  # type: ignore[arg-type]
        except StopIteration as end:
            results[number] = end.value

    _left[:] = [thread for thread in _left if thread.is_alive()]
    if len(_left) > MOST_LEFT:
        raise EpisodeError(
            f"{len(_left)} calls that took too long still run",
            "give what tools and environments wait for (requests, processes) a time limit of its own",
        )
    for number in range(len(chains)):
        advance(number, None)
    while waiting or running:
        while waiting and len(running) < parallel:
            number, function = waiting.popleft()
            args = function, finished
            thread = threading.Thread(target=_run, args=args, name="grpo-call", daemon=True)
            running[thread] = number, time.monotonic() + timeout_s
            thread.start()
        thread, (_, deadline) = next(iter(running.items()))  # the oldest is the first to be late
        try:
            thread, outcome = finished.get(timeout=max(deadline - time.monotonic(), 0))
        except Empty:
            # Python code ends at once, a call into C when it returns.
            _left.append(thread)
            ident = ctypes.c_ulong(thread.ident or 0)
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ident, ctypes.py_object(SystemExit))
            outcome = Outcome(is_late=True, seconds=timeout_s)
        if thread in running:  # or it was late
            advance(running.pop(thread)[0], outcome)
    return results


def _run(
    function: Callable[[], Any], finished: SimpleQueue[tuple[threading.Thread, Outcome]]
) -> None:
    started = time.monotonic()
    value, error = None, None
    try:
        value = function()
    except BaseException as raised:  # a user's code; nothing may end this thread unseen
        error = raised
    outcome = Outcome(value, error, seconds=time.monotonic() - started)
    finished.put((threading.current_thread(), outcome))


def run_call(call: Callable[[], Any]) -> Chain[Outcome]:
    """Return a chain of a single call, which returns its outcome."""
    return (yield call)


def settle(value: Any, timeout_s: float | None = None) -> Any:
    """Return a value, or what a coroutine returns, which is cancelled after `timeout_s`.

    All coroutines run on one event loop, so that a connection opened in one can be used in the next.
    """
    if not inspect.iscoroutine(value):
        return value
    with _loop_lock:
        future = asyncio.run_coroutine_threadsafe(value, _event_loop())
    try:
        return future.result(timeout_s)
    except TimeoutError:
        future.cancel()
        raise


@cache
def _event_loop() -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="grpo-async-calls", daemon=True).start()
    return loop


def as_text(value: Any) -> str:
    """Return a result as the model reads it: text as it is, everything else as JSON."""
    try:
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError):
        text = str(value)
    # Tokenizers refuse half of a surrogate pair.
    return text.encode("utf-8", "replace").decode()


class BrokenEnvironmentError(EpisodeError):
    """A method of an environment returned what it may not: no failed call, but a mistake in its code."""


_IMAGE_TYPES = ("image", "image_url", "input_image", "video")
"""Types of parts that other interfaces have."""


@dataclass(frozen=True)
class Caller:
    """Calls tools and environments, and reads what they return as the model does.

    Raises:
        BrokenEnvironmentError: They returned what they may not, such as an image that the model cannot read.
    """

    reads_images: bool = False
    """Whether the recipe has images; without, an image part may have a text `alt` in its place."""

    def call(
        self, tool: Tool, arguments: Mapping[str, Any], timeout_s: float | None = None
    ) -> Content:
        """Return the result of a tool; a coroutine is cancelled after `timeout_s`."""
        return self._read(settle(tool.call(**arguments), timeout_s), f"{tool.name}()")

    def reset(self, environment: Environment, row: Mapping[str, Any], seed: int) -> Content:
        """Reset an environment for a row of a recipe with this seed; return what it says first."""
        # A copy: other episodes of the row begin with it too, and an environment may change its lists.
        own = copy.deepcopy(dict(row))
        digest = hashlib.sha256(f"{seed}:{row.get('row_id', 0)}".encode()).digest()
        # The same for all completions of the row.
        own_seed = row.get("seed")
        said = environment.reset(
            own, own_seed if isinstance(own_seed, int) else int.from_bytes(digest[:4]) >> 1
        )
        content = self._read("" if said is None else said, "reset()")
        if said is not None and not isinstance(said, str) and not self._are_parts(said):
            raise BrokenEnvironmentError(
                f"reset() returned {type(said).__name__}, not text or an image",
                "let it return the first observation, or None if the prompt says all",
            )
        return content

    def step(self, environment: Environment, answer: str) -> tuple[Content, bool]:
        """Give an answer to an environment; return what it says, and whether the episode is over."""
        result = environment.step(answer)
        if not isinstance(result, tuple | list) or len(result) != 2:
            raise BrokenEnvironmentError(
                f"step() returned {result!r:.100}, not (text, done)",
                "let it return a text, and whether the episode is over: `return text, done`",
            )
        said, is_done = result
        return self._read("" if said is None else said, "step()"), bool(is_done)

    def _read(self, value: Any, name: str) -> Content:
        """Return what a method returned as a message holds it: text, or parts; images are decoded, to RGB.

        In a recipe with images, what seems to be meant as an image is refused if it is none.
        """
        if self._are_parts(value):
            values = value if isinstance(value, list | tuple) else [value]
            parts = [self._read_part(each, name) for each in values]
            return (parts or "") if self.reads_images else "\n".join(each["text"] for each in parts)
        for each in filter(_may_be_image, _walk(value)) if self.reads_images else ():
            raise _no_part(each)
        return as_text(value)

    def _are_parts(self, value: Any) -> bool:
        """Return whether a value is a part, a list with some or, in a recipe with images, one of texts."""
        is_list = isinstance(value, list | tuple)
        values = value if is_list else [value]
        has_texts = self.reads_images and is_list and all(isinstance(each, str) for each in values)
        return has_texts or any(_is_picture(each) or _is_part(each) for each in values)

    def _read_part(self, value: Any, name: str) -> dict[str, Any]:
        if isinstance(value, str):
            return {"type": "text", "text": as_text(value)}
        part = {"type": "image", "image": value} if _is_picture(value) else value
        if not _is_part(part):
            raise _no_part(part)
        if part["type"] == "text":
            return {**part, "text": as_text(part["text"])}
        if self.reads_images:
            try:
                return {"type": "image", "image": as_picture(part["image"])}
            except ImageError as error:
                fix = "return a `PIL.Image.Image`; `Image.fromarray(array)` makes one of an array"
                seen = f"{name} returned an image that {error.seen}"
                raise BrokenEnvironmentError(seen, fix) from error
        if "alt" not in part:
            raise BrokenEnvironmentError(
                f"{name} returned an image, and the recipe has none",
                "set `episode.images: true`, with a vision-language model, or return text",
            )
        return {"type": "text", "text": part["alt"]}


def decode_row(row: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a row with its images, if it has some, as RGB `PIL.Image.Image`s."""
    return {**row, IMAGES: list(map(as_picture, row[IMAGES]))} if IMAGES in row else row


def _is_picture(value: Any) -> bool:
    """Return whether it is a `PIL.Image.Image`, which need not be imported for that."""
    return hasattr(value, "getexif")


def _is_part(value: Any) -> bool:
    if not isinstance(value, Mapping):
        return False
    if value.get("type") == "text":
        return value.keys() == {"type", "text"}
    return value.get("type") == "image" and "image" in value


def _walk(value: Any) -> Iterator[Any]:
    """Yield a value and all that lies in its lists and mappings."""
    yield value
    if isinstance(value, list | tuple | Mapping):
        for each in value.values() if isinstance(value, Mapping) else value:
            yield from _walk(each)


def _may_be_image(value: Any) -> bool:
    if isinstance(value, Mapping):
        return value.get("type") in _IMAGE_TYPES and value.keys() <= {"type", *_IMAGE_TYPES}
    return (
        _is_picture(value) or isinstance(value, bytes | bytearray) or getattr(value, "ndim", 0) >= 2
    )


def _no_part(value: Any) -> BrokenEnvironmentError:
    shown = " ".join(repr(value).split())
    return BrokenEnvironmentError(
        f"{shown:.100} was returned where an image or text is read",
        "return images (`PIL.Image.Image`), "
        "texts, or a list of these or of parts of the form `{type: image, image: …}` and `{type: text, text: …}`",
    )


def find_place(error: BaseException | None) -> str:
    """Return the file and line of the user's code in which an error was raised; empty if it was elsewhere."""
    frames = traceback.extract_tb(error.__traceback__) if error is not None else []
    others = _OWN, sys.prefix, sys.base_prefix, "<"
    own = [each for each in frames if not each.filename.startswith(others)]
    return f"{own[-1].filename}:{own[-1].lineno}" if own else ""


def as_reward(value: Any) -> Reward | None:
    """Return a reward as plain numbers; raises `TypeError` or `ValueError` if it is something else."""
    if isinstance(value, Mapping):
        return {str(name): _as_number(part) for name, part in value.items()}
    return None if value is None else _as_number(value)


def read_reward(environment: Environment) -> Reward | None:
    """Return an environment's reward as plain numbers."""
    return as_reward(environment.reward())


def _as_number(value: Any) -> float:
    number = as_float(value)
    if number is None:
        raise TypeError(f"reward() returned {value!r:.100}, not a number or a dict of numbers")
    if not math.isfinite(number):
        raise ValueError(f"reward() returned {number}")
    return number
