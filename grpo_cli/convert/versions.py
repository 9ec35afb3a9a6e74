"""What a config of TRL leaves to defaults that changed from version to version.

Source: `GRPOConfig` of trl 0.14 to 1.16.
"""

from grpo_cli.convert.key_report import KeyReport, find, read_keys
from grpo_cli.convert.trl import find_home

_UNCUT = "dataset.max_prompt_length"


def note_versions(report: KeyReport) -> None:
    """Record the defaults that the config may have relied on, by the versions of TRL it can be for."""
    keys = {*report.tree.value}
    appeared, removed = read_keys("trl-appeared"), read_keys("trl-removed")
    oldest = max(
        (_parse(version) for version, names in appeared.items() if keys & {*names.split()}),
        default=(0,),
    )
    signs = {
        key: version for version, names in removed.items() for key in names.split() if key in keys
    }
    for name, (version, before, today) in read_keys("trl-changed-defaults").items():
        home = find_home(name) or _UNCUT
        is_set = name in keys or find(report.recipe, home) is not None or home in report.to_do
        is_read = not {home.partition(".")[0], "training"} & report.unread
        needs_vllm = name.startswith("vllm_") and not report.is_on("use_vllm")
        if is_read and not is_set and not needs_vllm and oldest < _parse(version):
            report.notes[home] = f"{today} ({before} before TRL {version})"
    length = report.get("max_prompt_length")
    if length is not None:
        report.notes[_UNCUT] = (
            f"{length} (TRL cut longer prompts from the left; a recipe drops them)"
        )
    if report.notes and signs:
        sign, version = min(signs.items(), key=lambda item: _parse(item[1]))
        report.notes[sign] = f"is of TRL before {version}"


def _parse(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in str(version).split("."))
