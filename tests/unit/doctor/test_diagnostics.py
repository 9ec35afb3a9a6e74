"""The doctor's checks on machines with something wrong: small real stand-ins for each mistake."""

import http.server
import os
import socket
import threading
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import pynvml
import pytest
from huggingface_hub import constants

from grpo_cli.doctor import child_checks, diagnostics
from grpo_cli.doctor.child_checks import ChildResult, run_checks
from grpo_cli.doctor.diagnostics import MachineReport
from grpo_cli.issues import Issue


def levels(issues):
    return {issue.subject: issue.level for issue in issues}


def only(issues, subject):
    (found,) = [issue for issue in issues if issue.subject == subject]
    return found


def test_a_report_counts_and_prints_what_was_found():
    bad = Issue("no room.", "make some", subject="disk: runs")
    report = MachineReport((Issue("3.12", level="ok", subject="python"), bad), 1.26)
    assert report.at("error") == [bad]
    values = report.as_json()
    assert (values["healthy"], values["errors"], values["warnings"]) == (False, 1, 0)
    assert values["seconds"] == 1.3
    assert values["findings"][1] == bad.as_json()


# --- packages ----------------------------------------------------------------------------------


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Puts metadata of made-up distributions first on the path."""
    site = tmp_path / "site"
    site.mkdir()
    monkeypatch.syspath_prepend(str(site))

    def write(name, version):
        folder = site / f"{name.replace('-', '_')}-{version}.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        )

    return write


def test_the_packages_of_this_environment_fit():
    found = list(diagnostics.check_packages())
    assert {issue.level for issue in found} == {"ok"}
    assert only(found, "package trl").seen.endswith("(required: >=1.16,<1.17)")


def test_a_package_every_training_needs_outside_its_range_is_an_error(install):
    install("transformers", "4.57.0")
    found = only(diagnostics.check_packages(), "package transformers")
    assert found.level == "error"
    assert "4.57.0 is installed, but grpo-cli requires >=5.17,<6" in found.seen
    assert found.fix == 'pip install "transformers>=5.17,<6"'


def test_a_package_of_an_extra_outside_its_range_is_a_warning(install):
    install("vllm", "0.40.0")
    found = only(diagnostics.check_packages(), "package vllm")
    assert found.level == "warning"
    assert "grpo-cli requires >=0.22,<0.32" in found.seen


# --- GPUs --------------------------------------------------------------------------------------

H100, GIB = "NVIDIA H100 80GB HBM3", 2**30


@pytest.fixture
def nvidia(monkeypatch):
    """Stands in for NVIDIA's driver: each GPU is total and used GiB and the processes on it."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    def provide(*gpus, error=None):
        def initialize():
            if error:
                raise error

        def memory(index):
            if gpus[index][0] is None:
                raise pynvml.NVMLError_NotSupported
            return SimpleNamespace(total=gpus[index][0] * GIB, used=gpus[index][1] * GIB)

        stand_ins = {
            "nvmlInit": initialize,
            "nvmlShutdown": lambda: None,
            "nvmlSystemGetDriverVersion": lambda: "570.86",
            "nvmlDeviceGetCount": lambda: len(gpus),
            "nvmlDeviceGetHandleByIndex": lambda index: index,
            "nvmlDeviceGetName": lambda index: H100,
            "nvmlDeviceGetMemoryInfo": memory,
            "nvmlDeviceGetComputeRunningProcesses": lambda index: [
                SimpleNamespace(pid=pid) for pid in gpus[index][2:]
            ],
        }
        for name, stand_in in stand_ins.items():
            monkeypatch.setattr(pynvml, name, stand_in)

    return provide


def test_free_and_busy_gpus(nvidia):
    nvidia((80, 1), (80, 60, 4242), (80, 60))
    found = list(diagnostics.check_gpus())
    assert only(found, "GPU 0").seen == f"{H100}, 80 GiB, driver 570.86"
    busy = only(found, "GPU 1 memory")
    assert busy.level == "warning"
    assert "60.0 of 80.0 GiB are in use by processes 4242:" in busy.seen
    assert "kill 4242;" in busy.fix
    assert "kill" not in only(found, "GPU 2 memory").fix
    assert "GPU 0 memory" not in levels(found)


@pytest.mark.parametrize(
    ("visible", "level"),
    [(None, None), ("", "warning"), ("-1", "warning"), ("1", "note"), ("0,5", "error")],
)
def test_what_hides_gpus(nvidia, monkeypatch, visible, level):
    nvidia((80, 1), (80, 1))
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert levels(diagnostics.check_gpus()).get("GPU visibility") == level


def test_a_driver_that_does_not_match_its_library(nvidia):
    nvidia(error=pynvml.NVMLError(pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH))
    (found,) = diagnostics.check_gpus()
    assert (found.subject, found.level) == ("GPU driver", "error")
    assert "version mismatch" in found.seen


def test_memory_that_the_driver_does_not_tell(nvidia):
    nvidia((None, None))
    (found,) = diagnostics.check_gpus()
    assert (found.level, found.seen) == ("ok", f"{H100}, driver 570.86")


def test_a_machine_without_a_driver(nvidia):
    nvidia(error=pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND))
    assert levels(diagnostics.check_gpus()) == {"GPU": "ok"}


def torch_seen(**changes):
    value = {
        "version": "2.13.0+cu130",
        "built_for": "CUDA 13.0",
        "available": True,
        "why": "",
        "capabilities": [[9, 0]],
    }
    return ChildResult({**value, **changes})


@pytest.mark.parametrize(
    ("changes", "gpus", "subject", "level", "words"),
    [
        ({}, 1, "torch devices", "ok", "sees 1 GPU through CUDA 13.0"),
        ({"built_for": None, "available": False}, 0, "torch devices", "ok", "the CPU only"),
        ({"built_for": None, "available": False}, 2, "torch devices", "error", "(2 visible)"),
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
    ],
)
def test_torch_against_the_devices(changes, gpus, subject, level, words):
    found = only(child_checks.explain_devices(torch_seen(**changes), gpus), subject)
    assert found.level == level
    assert words in found.seen
    assert bool(found.fix) == (level != "ok")


def test_an_old_driver_is_told_apart_from_a_forbidden_device():
    old = torch_seen(available=False, why="The NVIDIA driver on your system is too old")
    assert (
        "update the NVIDIA driver"
        in only(child_checks.explain_devices(old, 1), "torch devices").fix
    )
    other = torch_seen(available=False, why="CUDA unknown error")
    assert "/dev/nvidia" in only(child_checks.explain_devices(other, 1), "torch devices").fix


@pytest.mark.parametrize(
    ("losses", "error", "level", "fix"),
    [
        ([4.2, 4.0], None, "ok", ""),
        ([4.2, float("nan")], None, "error", "test the device itself"),
        (None, "RuntimeError: CUDA error: no kernel image is available", "error", "built for this"),
        (None, "OutOfMemoryError: CUDA out of memory.", "error", "end what else runs"),
    ],
)
def test_a_training_step_on_a_device(losses, error, level, fix):
    result = ChildResult({"losses": losses, "seconds": 0.1}, error)
    (found,) = child_checks.explain_step("step:cuda:0", result)
    assert (found.subject, found.level) == ("training step (cuda:0)", level)
    assert fix in found.fix


def test_a_vllm_without_a_device():
    found = child_checks.explain_imports({"import:vllm": ChildResult("")})
    assert only(found, "vLLM").level == "error"
    assert levels(child_checks.explain_imports({"import:vllm": ChildResult("cpu")})) == {
        "imports": "ok"
    }


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


def test_each_import_that_breaks_costs_itself_alone_and_a_crash_the_rest(provide):
    provide("peft", "raise ImportError('cannot import name LoraLayer\\nfrom peft.tuners')")
    provide("bitsandbytes", "raise SystemExit('no GPU here')")
    provide("datasets", "import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)")
    provide("trl", "class GRPOTrainer: pass")
    names = [f"import:{name}" for name in ("bitsandbytes", "peft", "trl", "datasets", "vllm")]
    found = list(child_checks.explain_imports(run_checks(names)))
    assert only(found, "import peft").seen == "ImportError: from peft.tuners"
    assert only(found, "import peft").fix.startswith("pip install --force-reinstall --no-deps peft")
    assert "SIGSEGV" in only(found, "import datasets").seen
    assert only(found, "import bitsandbytes").level == "warning"
    assert only(found, "imports").seen == "trl can be imported"


def test_an_import_that_hangs_is_ended(provide):
    provide("peft", "import time\ntime.sleep(60)")
    results = run_checks(["import:peft", "import:trl"], timeout_s=1.5)
    assert results["import:peft"].error == "no end within 1.5 s"
    assert list(results) == ["import:peft"]


def test_what_prints_while_it_is_imported_does_not_spoil_the_answers(provide):
    provide("peft", "import os\nprint('{')\nos.write(1, b'hello')")
    assert run_checks(["import:peft"])["import:peft"].error is None


def test_without_torch_nothing_else_is_blamed(provide):
    provide("torch", "raise OSError('libcudart.so.13: cannot open shared object file')")
    results = run_checks(["import:torch", "import:trl"])
    (found,) = child_checks.explain_imports(results)
    assert found.subject == "import torch"
    assert found.seen.endswith("libcudart.so.13: cannot open shared object file")


def test_the_first_of_several_that_fail_alike_is_blamed(provide):
    provide("torchvision", "raise RuntimeError('operator torchvision::nms does not exist')")
    text = "try:\n    import torchvision\nexcept RuntimeError as error:\n"
    provide("peft", f"{text}    raise ImportError('could not import') from error")
    results = run_checks(["import:torchvision", "import:peft"])
    found = list(child_checks.explain_imports(results))
    assert levels(found) == {"import torchvision": "warning", "import peft": "error"}
    uninstall = "pip uninstall -y torchvision (built for another torch)"
    assert only(found, "import torchvision").fix == uninstall
    assert only(found, "import peft").fix == f"fix the import of torchvision first: {uninstall}"


def test_a_package_that_misses_another(provide):
    provide("peft", "import a_package_nobody_has.part")
    found = only(child_checks.explain_imports(run_checks(["import:peft"])), "import peft")
    assert found.fix == "pip install a_package_nobody_has"


# --- memory, processors, disk ------------------------------------------------------------------


@pytest.mark.parametrize(("gib", "level"), [(16, "ok"), (2, "warning"), (0.5, "error")])
def test_memory(tmp_path, gib, level):
    meminfo = tmp_path / "meminfo"
    meminfo.write_text(f"MemTotal: 99999999 kB\nMemAvailable: {int(gib * 2**20)} kB\n")
    (found,) = diagnostics.check_memory(meminfo, cgroup=tmp_path)
    assert found.level == level


def test_a_container_with_less_memory_than_its_machine(tmp_path):
    meminfo = tmp_path / "meminfo"
    meminfo.write_text(f"MemAvailable: {64 * 2**20} kB\n")
    (tmp_path / "memory.max").write_text(f"{4 * 2**30}\n")
    (tmp_path / "memory.current").write_text(f"{3 * 2**30}\n")
    (tmp_path / "memory.stat").write_text(f"anon 5\ninactive_file {2**30}\n")
    (found,) = diagnostics.check_memory(meminfo, cgroup=tmp_path)
    assert found.level == "warning"
    assert found.seen.startswith("2.0 GiB available within the limit of this container")
    (tmp_path / "memory.max").write_text("max\n")
    (found,) = diagnostics.check_memory(meminfo, cgroup=tmp_path)
    assert found.level == "ok"


def test_memory_that_cannot_be_read(tmp_path):
    (found,) = diagnostics.check_memory(tmp_path / "none", cgroup=tmp_path)
    assert found.level == "note"


def test_little_shared_memory_matters_with_a_gpu(tmp_path, monkeypatch):
    assert levels(diagnostics.check_shared_memory(1, tmp_path / "none")) == {}
    monkeypatch.setattr(diagnostics, "SCARCE_SHARED_GIB", 1e9)
    assert levels(diagnostics.check_shared_memory(0, tmp_path)) == {"shared memory": "note"}
    assert levels(diagnostics.check_shared_memory(1, tmp_path)) == {"shared memory": "warning"}


def test_a_folder_is_tried_without_being_made(tmp_path):
    (found,) = diagnostics.check_folder("disk", tmp_path / "runs" / "new", "elsewhere", least_gib=0)
    assert found.level == "ok"
    assert list(tmp_path.iterdir()) == []


def test_a_file_in_the_place_of_a_folder(tmp_path):
    (tmp_path / "runs").write_text("")
    (found,) = diagnostics.check_folder("disk", tmp_path / "runs", "pass --runs")
    assert (found.level, found.fix) == ("error", "pass --runs")


def test_a_full_disk(tmp_path):
    (found,) = diagnostics.check_folder("disk", tmp_path, "pass --runs", least_gib=1e9)
    assert found.level == "error"
    assert "GiB free" in found.seen


@pytest.mark.skipif(not Path("/proc/self").is_dir(), reason="needs Linux's /proc")
def test_a_folder_that_cannot_be_written():
    # Nobody writes there, not even root.
    (found,) = diagnostics.check_folder("disk", Path("/proc/self/fdinfo"), "pass --runs")
    assert found.level == "error"
    assert "cannot be written" in found.seen


# --- environment -------------------------------------------------------------------------------


def test_a_clean_shell():
    assert levels(diagnostics.check_variables({"PATH": "/bin"})) == {"environment": "ok"}


def test_variables_that_change_a_training():
    environ = {
        "RANK": "1",
        "WORLD_SIZE": "4",
        "ACCELERATE_USE_FSDP": "true",
        "NCCL_DEBUG": "INFO",
        "VLLM_API_KEY": "geheim",
        "HF_ENDPOINT": "https://ann:geheim@mirror.example",
        "HF_TOKEN": "hf_geheim",
    }
    found = list(diagnostics.check_variables(environ))
    assert levels(found) == {
        "environment: launcher": "warning",
        "environment: accelerate": "warning",
        "environment": "note",
    }
    assert only(found, "environment: launcher").fix == "unset RANK WORLD_SIZE"
    assert "NCCL_DEBUG=INFO" in only(found, "environment").seen
    assert "geheim" not in " ".join(map(str, found))


# --- ports and hub -----------------------------------------------------------------------------


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture
def hub(monkeypatch):
    """A hub on this machine that answers with some status; returns what is found of it."""
    servers = []

    def start(status):
        class Handler(http.server.BaseHTTPRequestHandler):
            def do_HEAD(self):
                self.send_response(status)
                self.end_headers()

            def log_message(self, *arguments):
                pass

        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        servers.append(server)
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.server_address[1]}")

    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: "hf_geheim")
    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


@pytest.mark.parametrize(("status", "level"), [(200, "ok"), (503, "note")])
def test_the_hub_answers(hub, status, level):
    hub(status)
    found = list(diagnostics.check_hub())
    assert levels(found) == {"hub": level, "hub token": "ok"}
    assert "geheim" not in str(found)


def test_a_hub_out_of_reach_is_no_error(hub, monkeypatch):
    monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{free_port()}")
    assert "cannot be reached" in only(diagnostics.check_hub(), "hub").seen
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: None)
    assert levels(diagnostics.check_hub()) == {"hub": "note", "hub token": "note"}


# --- all together ------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_real_training_step():
    pytest.importorskip("torch")
    results = run_checks(["import:torch", "devices", "step:cpu"])
    (found,) = child_checks.explain_step("step:cpu", results["step:cpu"])
    assert found.level == "ok", found


def test_looking_changes_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    diagnostics.diagnose_machine(Path("runs"), quick=True)
    assert list(tmp_path.iterdir()) == []
