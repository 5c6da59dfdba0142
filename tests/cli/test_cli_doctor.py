"""Layer 1: no ranks. ``odc doctor``: transports and options, its report, and that it always says something."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from cli_calls import call, printed
from doctor_rows import ERROR, H200, MISSING, NOT_NEEDED, OK, WARNING, says

from odc.cli.doctor import checks as doctor_transports
from odc.cli.doctor.checks import CHECKS, Check, examine
from odc.cli.doctor.command import verdict
from odc.cli.doctor.cuda import CudaDevice, CudaDriver
from odc.cli.doctor.finding import Finding, Status, error
from odc.cli.doctor.nvshmem import RdmaPort
from odc.cli.doctor.software import Facts, TorchBuild
from odc.config import foreign_variables
from odc.transports import registry


def run(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """The command as a process of its own, perhaps with further variables."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("ODC_")}
    return subprocess.run(
        [sys.executable, "-m", "odc", "doctor", *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**clean, **environ},
    )


def call_limited(which: int, most: int, *arguments: str, **environ: str) -> tuple[int, str]:
    """Exit code and output of the command in a fork, which need not import torch, under a limit."""
    ours, theirs = os.pipe()
    child = os.fork()
    if not child:
        try:
            os.dup2(theirs, 3)
            os.closerange(4, os.sysconf("SC_OPEN_MAX"))  # an interpreter that starts has few descriptors
            os.environ.update(environ)
            resource.setrlimit(which, (most, most))
            result = call("doctor", *arguments)
            with open(3, "w") as pipe:
                pipe.write(result.stdout)
            os._exit(result.exit_code)
        finally:
            os._exit(70)
    os.close(theirs)
    with open(ours) as pipe:
        printed = pipe.read()
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), printed


def rows(text: str) -> dict[str, dict[str, str]]:
    return {row["check"]: row for row in json.loads(text)["rows"]}


# Transports and options


def test_transports(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ODC_TRANSPORT", raising=False)
    says(doctor_transports.for_cpu(), OK, "shm")
    says(doctor_transports.for_cuda(has_gpu=False), NOT_NEEDED, "no CUDA device")
    monkeypatch.setenv("ODC_TRANSPORT", "pigeon")
    says(doctor_transports.for_cpu(), ERROR, "pigeon", "unset ODC_TRANSPORT")


@pytest.mark.parametrize(
    ("names", "status", "found", "advice"),
    [
        (["shm"], MISSING, "the model is on cuda", "cupy"),
        (["shm", "other"], MISSING, "the model is on cuda", "cupy"),
        (["shm", "able"], OK, "able", ""),
    ],
)
def test_cuda_transports(names, status: Status, found: str, advice: str, monkeypatch: pytest.MonkeyPatch) -> None:
    shm = registry.load("shm")
    able = type("Able", (shm,), {"name": "able", "unavailable": classmethod(lambda *_: None)})
    monkeypatch.setattr(registry, "_LOCATIONS", dict.fromkeys(names, ""))
    monkeypatch.setattr(registry, "load", lambda name: able if name == "able" else shm)
    says(doctor_transports.for_cuda(has_gpu=True), status, found, advice)


@pytest.mark.parametrize(
    ("name", "value", "status", "found", "advice"),
    [
        ("ODC_TIMEOUT", "60", OK, "timeout 60 s", ""),
        ("ODC_TIMEOUT", "soon", ERROR, "'soon'", "unset"),
        ("ODC_ACCUMULATE", "mail", ERROR, "'mail'", "unset"),
        ("ODC_FAULT", "point=wait,do=kill", WARNING, "a fault will be injected", "unset ODC_FAULT"),
        ("ODC_FAULT", "do=sing", ERROR, "sing", "unset"),
        ("ODC_HOST_ID", "other", WARNING, "other", "unset ODC_HOST_ID"),
    ],
)
def test_variables(name, value, status: Status, found: str, advice: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in [name for name in os.environ if name.startswith("ODC_")]:
        monkeypatch.delenv(variable)
    monkeypatch.setenv(name, value)
    says(doctor_transports.variables(), status, found, advice)


def test_an_error_that_only_gpus_have_is_no_word_on_cpu_training() -> None:
    refused = [Check("options", lambda _: error("refused", "unset it"), gpus_only=True)]
    fine = [Check("torch", lambda _: Finding(OK, "fine"), required=True)]
    report = examine([*fine, *refused], Facts())
    assert (report.ok, report.cpu_works) == (False, True)
    assert verdict(report) == "This machine can train on CPU ranks. It cannot train on GPUs.\nDo (options): unset it"
    both = examine([Check("torch", failing, required=True), *refused], Facts())
    assert (both.ok, both.cpu_works) == (False, False)
    first, *to_do = verdict(both).splitlines()
    assert first == "This machine cannot train on CPU ranks or GPUs."
    assert [line.partition(":")[0] for line in to_do] == ["Do (torch)", "Do (options)"]


def test_a_variable_that_set_up_refuses_is_a_red_row(gpus: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NVSHMEM_IB_ENABLE_IBGDA", "1")
    result = call("doctor", "--json")
    row = rows(result.stdout)["NVSHMEM options"]
    assert (row["status"], result.exit_code) == ("error", 1)
    assert "NVSHMEM_IB_ENABLE_IBGDA='1' lets GPUs drive the network card" in row["found"]
    assert row["advice"] == "On all hosts: unset NVSHMEM_IB_ENABLE_IBGDA"


def test_foreign_variables() -> None:
    assert foreign_variables({"NVSHMEM_HOME": "/n", "HOME": "/root"}) == {"NVSHMEM_HOME": "/n"}


# The report


def failing(_: Facts) -> Finding:
    raise ZeroDivisionError("the check's own fault")


@pytest.mark.parametrize(("required", "status"), [(True, ERROR), (False, WARNING)])
def test_a_check_that_fails_is_a_row(required: bool, status: Status) -> None:
    after = Check("after", lambda _: Finding(OK, "fine"))
    report = examine([Check("bad", failing, required), after], Facts())
    assert [row.check for row in report.rows] == ["bad", "after"]
    says(report.rows[0].finding, status, "ZeroDivisionError: the check's own fault", "report this")
    assert report.ok is not required


@pytest.mark.parametrize("fact", ["versions", "torch", "cuda", "rdma", "variables"])
def test_facts_that_cannot_be_had(fact: str) -> None:
    class Broken(Facts):
        pass

    setattr(Broken, fact, property(lambda _: 1 / 0))
    found = examine(facts=Broken()).rows
    assert [row.check for row in found] == [check.name for check in CHECKS]
    broken = [row.finding for row in found if "ZeroDivisionError" in row.finding.found]
    assert broken
    assert len(broken) < len(found) / 2


def test_names_are_short_and_unique() -> None:
    names = [check.name for check in CHECKS]
    assert len(set(names)) == len(names)
    assert max(map(len, names)) <= 16


def test_rows_about_gpus_are_explained() -> None:
    names = [check.name for check in CHECKS]
    about = ["torch", "ODC variables", *names[names.index("CUDA driver") : names.index("CUDA transport") + 1]]
    lines = (Path(__file__).parents[2] / "docs/gpu.md").read_text().splitlines()
    explained = {name for line in lines for name in line.partition("|")[2].partition("|")[0].strip().split(", ")}
    assert len(about) > 12
    assert [name for name in about if name not in explained] == []


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sixteen devices of two kinds, half of them out of reach, and no CUDA library."""
    mig = CudaDevice("NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition", 96 << 30, (12, 0), mig=True)
    apart = frozenset((a, b) for a in range(16) for b in range(16) if (a < 8) != (b < 8))
    driver = CudaDriver("580.65.06", "13.0", (H200,) * 8 + (mig,) * 8, apart)
    monkeypatch.setattr("odc.cli.doctor.software.read_driver", lambda: driver)
    monkeypatch.setattr("odc.cli.doctor.software.installed", dict)
    port = RdmaPort("mlx5_0", "1", "InfiniBand", "400 Gb/sec (4X NDR)", True)
    monkeypatch.setattr("odc.cli.doctor.nvshmem.read_ports", lambda: (port,) * 8)


@pytest.mark.usefixtures("gpus")
def test_a_machine_with_gpus_and_nothing_installed() -> None:
    found = rows(printed("doctor", "--json"))
    for name in ("triton", "cupy", "nvshmem4py", "CUDA IPC", "CUDA transport"):
        assert (found[name]["status"], bool(found[name]["advice"])) == ("missing", True)
    assert "odc-fsdp[cuda13]" in found["cupy"]["advice"]
    assert found["CUDA devices"]["status"] == found["peer access"]["status"] == "warning"


@pytest.mark.usefixtures("gpus")
def test_nvshmem_is_not_asked_for_where_there_is_no_network_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("odc.cli.doctor.nvshmem.read_ports", tuple)
    monkeypatch.setattr("odc.cli.doctor.nvshmem.find_host", lambda *_: None)
    monkeypatch.setattr("odc.cli.doctor.nvshmem.find_bitcode", lambda *_: None)
    found = rows(printed("doctor", "--json"))
    for name in ("nvshmem4py", "NVSHMEM library", "NVSHMEM bitcode"):
        assert found[name]["status"] == "not needed"
        assert found[name]["advice"].startswith("For GPUs of several hosts: pip install ")
    assert found["cupy"]["status"] == "missing"


@pytest.mark.usefixtures("gpus")
def test_the_table_fits_80_columns() -> None:
    text = printed("doctor")
    lines = text.splitlines()
    assert max(map(len, lines)) <= 80
    assert any("15: ........xxxxxxx- " in line for line in lines)
    assert sum("-> pip install 'odc-fsdp[cuda13]'" in line for line in lines) >= 3
    words = " ".join(text.split())
    assert words.startswith("This machine can train on CPU ranks. It cannot train on GPUs. Do (")
    assert "cupy, CUDA IPC" in words.partition("): pip install 'odc-fsdp[cuda13]'")[0]  # once for all that it mends
    assert "Warnings, see below: " in words.partition("┏")[0]


def test_what_is_not_needed_is_shown_on_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("odc.cli.doctor.software.read_driver", CudaDriver)
    few, everything = printed("doctor"), printed("doctor", "--all")
    assert few.startswith("This machine can train on CPU ranks. It cannot train on GPUs: it has none.")
    assert "not needed" not in few
    assert everything.count("not needed") > 3
    assert f"{everything.count('not needed')} rows more" in few
    assert json.loads(printed("doctor", "--json"))["trains"] == {"cpu": True, "gpu": False}


def test_gpus_work_where_a_transport_serves_them() -> None:
    rows = [Check(name, lambda _: Finding(OK, "fine")) for name in ("torch", "CUDA transport")]
    assert examine(rows, Facts()).gpus_work
    assert verdict(examine(rows, Facts())) == "This machine can train on CPU ranks and GPUs."
    assert not examine([*rows, Check("options", lambda _: error("refused", "unset it"))], Facts()).gpus_work


def test_text_from_outside_is_not_markup(monkeypatch: pytest.MonkeyPatch) -> None:
    device = CudaDevice("[red]H200[/nonsense]", 1 << 30, (9, 0))
    monkeypatch.setattr("odc.cli.doctor.software.read_driver", lambda: CudaDriver("580", "13.0", (device,)))
    assert "[red]H200[/nonsense]" in printed("doctor")


def test_status_1_if_something_required_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("odc.cli.doctor.software.read_torch", lambda: TorchBuild("2.8.0"))
    result = call("doctor", "--json")
    assert (result.exit_code, json.loads(result.stdout)["ok"]) == (1, False)
    result = call("doctor")
    assert result.exit_code == 1
    assert result.stdout.startswith("This machine cannot train on CPU ranks or GPUs")
    assert "Do (torch): " in result.stdout


def test_no_cuda_call_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of these may make a context, or fill a cache that a script relies on."""
    calls = []
    for name in ("init", "_lazy_init", "is_available", "device_count", "get_device_properties", "mem_get_info"):
        monkeypatch.setattr(torch.cuda, name, lambda *_, name=name: calls.append(name))
    examine()
    assert not calls


def test_the_command_here() -> None:
    done = run("--json")
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout)
    assert report.keys() == {"odc", "ok", "trains", "rows"}
    assert report["ok"] is True
    assert all(row.keys() == {"check", "status", "found", "advice"} for row in report["rows"])
    assert [row["check"] for row in report["rows"]] == [check.name for check in CHECKS]
    assert {row["status"] for row in report["rows"]} <= {status.value for status in Status}
    assert not [row for row in report["rows"] if "could not be checked" in row["found"]]


def test_few_descriptors_and_a_small_address_space() -> None:
    code, printed = call_limited(resource.RLIMIT_NOFILE, 38, "--json")
    found = rows(printed)["open files"]
    assert (code, found["status"]) == (1, "error")
    assert "nofile=" in found["advice"]
    code, printed = call_limited(resource.RLIMIT_AS, 1 << 40, "--json", LOCAL_WORLD_SIZE="9999")
    found = rows(printed)
    assert (code, found["address space"]["status"]) == (0, "warning")
    assert "LOCAL_WORLD_SIZE=9999" in found["CPU cores"]["found"]


def test_a_torch_that_cannot_be_imported(tmp_path: Path) -> None:
    """Every row is there all the same, and says what is wrong."""
    (tmp_path / "torch.py").write_text("raise OSError('libcudart.so.13: cannot open shared object file')")
    done = run("--json", PYTHONPATH=str(tmp_path))
    assert done.returncode == 1, done.stderr
    found = rows(done.stdout)
    assert found.keys() == {check.name for check in CHECKS}
    assert found["torch"]["status"] == found["shared memory"]["status"] == "error"
    assert "libcudart.so.13" in found["torch"]["found"]
    assert found["Python"]["status"] == "ok"


def test_help_teaches() -> None:
    text = printed("doctor", "--help")
    examples = [line for line in text.splitlines() if "odc doctor" in line and "Usage" not in line]
    assert len(examples) == 2
    assert max(map(len, map(str.rstrip, examples))) < 70
    assert "doctor" in printed("--help")
