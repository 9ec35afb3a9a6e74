import os

import pytest

from grpo_cli.machine import (
    count_cores,
    has_bfloat16,
)


def set_up_topology(folder, siblings):
    for cpu, text in siblings.items():
        place = folder / f"cpu{cpu}" / "topology"
        place.mkdir(parents=True)
        (place / "thread_siblings_list").write_text(f"{text}\n")
    return folder


@pytest.fixture
def four_cpus(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2, 3}, raising=False)


@pytest.mark.usefixtures("four_cpus")
@pytest.mark.parametrize(
    ("siblings", "expected"),
    [
        ({0: "0", 1: "1", 2: "2", 3: "3"}, 4),
        ({0: "0,2", 1: "1,3", 2: "0,2", 3: "1,3"}, 2),
        # One of a core's two threads is enough to use it.
        ({0: "0,4", 1: "1,5", 2: "2,6", 3: "3,7"}, 4),
        ({}, 4),
    ],
)
def test_two_threads_of_a_core_are_one_core(tmp_path, siblings, expected):
    topology = set_up_topology(tmp_path / "cpu", siblings)
    assert count_cores(tmp_path / "none", topology) == expected


@pytest.mark.usefixtures("four_cpus")
@pytest.mark.parametrize(
    ("limit", "expected"),
    [
        ("max 100000", 4),
        ("200000 100000", 2),
        ("250000 100000", 2),
        ("50000 100000", 1),
        ("900000 100000", 4),
    ],
)
def test_a_container_uses_no_more_than_its_quota(tmp_path, limit, expected):
    (tmp_path / "cpu.max").write_text(f"{limit}\n")
    assert count_cores(tmp_path, tmp_path / "none") == expected


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ("processor\t: 0\nflags\t\t: fpu avx2 avx512f avx512_bf16", True),
        ("flags\t\t: fpu avx2 amx_bf16 amx_tile", True),
        ("flags\t\t: fpu avx2 avx512f avx512_vnni", False),
        ("Features\t: fp asimd bf16 i8mm", True),
        ("Features\t: fp asimd", False),
        ("model name\t: something else", None),
    ],
)
def test_a_processor_tells_whether_it_has_bfloat16(tmp_path, lines, expected):
    path = tmp_path / "cpuinfo"
    path.write_text(f"{lines}\n")
    assert has_bfloat16(path) is expected
    assert has_bfloat16(tmp_path / "none") is None
