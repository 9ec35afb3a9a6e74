"""`grpo doctor`: every check of a machine, in the order a person would ask for them.

Owns what is looked at and what runs side by side. A check that breaks becomes a finding.
"""

import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from grpo_cli.doctor import (
    accelerators,
    environment,
    network,
    packages,
    processes,
    rendezvous,
    resources,
    verdicts,
)
from grpo_cli.doctor import subprocess_checks as trials
from grpo_cli.doctor.result import Examination
from grpo_cli.issues import Finding

_Progress = Callable[[str], None]
_HUB_TIMEOUT_S = 15.0


def diagnose_machine(
    runs: Path, *, quick: bool = False, on_progress: _Progress = lambda text: None
) -> Examination:
    """Looks at this machine. Changes nothing on it.

    Args:
        runs: Where run folders go.
        quick: Leave out what starts processes: imports, a training step, two processes, the hub.
        on_progress: Told what is being looked at, from several threads.
    """
    began = time.monotonic()
    gpus, broken = _read_gpus()
    visible = accelerators.count_visible(gpus)
    with ThreadPoolExecutor() as pool:
        # Started first: they take seconds, the rest takes milliseconds.
        tried = (
            []
            if quick
            else [pool.submit(_collect, check) for check in _trials(visible, on_progress)]
        )
        looked = [
            finding for check in _looks(runs, gpus, broken, visible) for finding in _collect(check)
        ]
        results = [finding for future in tried for finding in future.result()]
    return Examination((*looked, *results), time.monotonic() - began)


def _read_gpus() -> tuple[list[accelerators.Gpu], list[Finding]]:
    """The devices, or what keeps the driver from telling them."""
    try:
        return accelerators.read_gpus(), []
    except accelerators.DriverError as error:
        return [], [accelerators.explain_driver(error)]


def _looks(
    runs: Path, gpus: list[accelerators.Gpu], broken: list[Finding], visible: int
) -> list[Callable[[], Iterable[Finding]]]:
    """What needs no process of its own."""
    return [
        packages.check_packages,
        lambda: broken or accelerators.check_gpus(gpus),
        resources.check_memory,
        lambda: resources.check_shared_memory(visible),
        resources.check_processors,
        lambda: resources.check_folders(runs),
        environment.check_environment,
        environment.check_launcher_config,
        environment.check_open_files,
        processes.check_processes,
        network.check_ports,
    ]


class _Board:
    """What is being tried right now, on one line, from several threads."""

    def __init__(self, show: _Progress) -> None:
        self._show = show
        self._running: dict[str, str] = {}
        self._lock = threading.Lock()

    def begin(self, place: str, text: str) -> None:
        """Puts what one thread is doing in the place of what it did before; empty takes it away."""
        with self._lock:
            self._running[place] = text
            self._show("trying: " + " · ".join(filter(None, self._running.values())))


def _trials(visible: int, on_progress: _Progress) -> list[Callable[[], Iterable[Finding]]]:
    """What is tried in processes of its own, side by side."""
    board = _Board(on_progress)
    tried: dict[str, Callable[[_Progress], Iterable[Finding]]] = {
        "installation": lambda tell: _try_installation(visible, tell),
        "processes": lambda tell: rendezvous.check_rendezvous(visible, tell),
        "hub": _try_hub,
    }

    def watch(place: str) -> list[Finding]:
        try:
            return list(tried[place](lambda text: board.begin(place, text)))
        finally:
            board.begin(place, "")

    return [partial(watch, place) for place in tried]


def _try_installation(visible: int, on_progress: _Progress) -> Iterator[Finding]:
    imports = [f"import:{name}" for name in trials.list_imports()]
    if "import:torch" not in imports:
        # That torch is missing is the packages' finding.
        return
    steps = ["step:cpu", *(["step:cuda"] if visible else [])]
    results = trials.run_trials([*imports, "devices", *steps], on_progress)
    yield from verdicts.explain_imports(results)
    yield from verdicts.explain_devices(results.get("devices"), visible)
    for step in steps:
        yield from verdicts.explain_step(results.get(step))
    yield from verdicts.explain_vllm(results.get("import:vllm"))


def _try_hub(on_progress: _Progress) -> Iterator[Finding]:
    result = trials.run_trials(["hub"], on_progress, _HUB_TIMEOUT_S)["hub"]
    return network.explain_hub(result.value, result.error)


def _collect(check: Callable[[], Iterable[Finding]]) -> list[Finding]:
    """All findings of one check; one that breaks must not cost the others."""
    try:
        return list(check())
    except Exception as error:
        if os.environ.get("GRPO_DEBUG") == "1":
            raise
        seen = f"a check broke off: {type(error).__name__}: {error}"
        return [
            Finding("doctor", "warning", seen, "run it with GRPO_DEBUG=1 and report what it says")
        ]
