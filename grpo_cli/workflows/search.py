"""A search over ranges with Optuna: which cell to try next, and which run to end early."""

from typing import Any

from grpo_cli.analysis.cells import last_reward, read_score
from grpo_cli.errors import SetupError, install_extra
from grpo_cli.runs.run import Run
from grpo_cli.workflows.sweep_plan import Cell, Settings, Sweep, SweepRequest

_FEWEST_CELLS = 4
"""Finished cells before a run is ended early."""
_WARMUP_SHARE = 0.3
"""Of the steps: before that, rewards say little."""


class Search:
    """Optuna's study of a sweep, kept in memory; `sweep.json` and the runs are its memory on disk.

    Raises:
        SetupError: Optuna is not installed.
    """

    def __init__(self, request: SweepRequest) -> None:
        try:
            import optuna
        except ImportError as error:
            raise SetupError(f"optuna is not installed. Fix: {install_extra('sweep')}") from error
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        self._optuna = optuna
        self._seed = request.seeds[0]
        self._space: dict[str, Any] = {
            key: optuna.distributions.CategoricalDistribution(values)
            for key, values in request.choices().items()
        }
        self._ranges = request.limits()
        for key, each in self._ranges.items():
            kind = (
                optuna.distributions.IntDistribution
                if each.whole
                else optuna.distributions.FloatDistribution
            )
            low, high = (int(each.low), int(each.high)) if each.whole else (each.low, each.high)
            self._space[key] = kind(low, high, log=each.log)
        self._trials: dict[int, Any] = {}
        self._study = self._make_study(0)

    def _make_study(self, cells: int) -> Any:
        optuna = self._optuna
        # A resumed search draws on, not again.
        sampler = optuna.samplers.TPESampler(seed=self._seed + cells)
        pruner = optuna.pruners.MedianPruner(n_startup_trials=_FEWEST_CELLS)
        return optuna.create_study(direction="maximize", sampler=sampler, pruner=pruner)

    def ask(self, number: int) -> Settings:
        """Return the settings of the next cell."""
        trial = self._study.ask(self._space)
        self._trials[number] = trial
        return {
            key: value if isinstance(value, str) else f"{value:.6g}"
            for key, value in trial.params.items()
        }

    def recall(self, sweep: Sweep) -> None:
        """Tell the study of all cells of an earlier attempt."""
        self._study = self._make_study(len(sweep.cells))
        for cell in sweep.cells:
            params = {key: self._read(key, text) for key, text in cell.settings.items()}
            self._study.enqueue_trial(params)
            self._trials[cell.number] = self._study.ask(self._space)
            if all(run.state not in ("waiting", "running") for run in cell.runs):
                self._report(cell.number, Run(sweep.run_folder(cell.runs[0])))
                self.tell(sweep, cell)

    def _read(self, key: str, text: str) -> str | int | float:
        if key not in self._ranges:
            return text
        return int(text) if self._ranges[key].whole else float(text)

    def should_prune(self, number: int, run: Run) -> bool:
        """Return whether a run's training reward is below the median of earlier cells at its step."""
        newest = self._report(number, run)
        total = run.total_steps or 0
        return newest >= max(_WARMUP_SHARE * total, 1) and bool(self._trials[number].should_prune())

    def _report(self, number: int, run: Run) -> int:
        """Report the smoothed training reward at each step that is new; return the newest step."""
        points = [
            (step, value) for step, value in run.series.get("reward", []) if value is not None
        ]
        trial = self._trials[number]
        known = self._study.trials[trial.number].last_step or 0
        for place, (step, _) in enumerate(points, start=1):
            if step > known:
                trial.report(last_reward([value for _, value in points[:place]]), step)
        return points[-1][0] if points else 0

    def tell(self, sweep: Sweep, cell: Cell) -> None:
        """Tell the study how a cell ended: the mean over its finished seeds."""
        states = self._optuna.trial.TrialState
        scores = [
            score
            for run in cell.runs
            if run.state == "completed"
            and (score := read_score(Run(sweep.run_folder(run)))) is not None
        ]
        trial = self._trials[cell.number]
        if cell.pruned:
            self._study.tell(trial, state=states.PRUNED)
        elif scores:
            self._study.tell(trial, sum(scores) / len(scores))
        else:
            self._study.tell(trial, state=states.FAIL)
