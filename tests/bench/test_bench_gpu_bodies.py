"""Layers 1 to 3. The bodies of ``odc bench gpu``, without a GPU.

They run on CPU ranks over the transports of ``bench/fake``: that shows that they do what they say and can fail, not
that a device does. What is CUDA's alone (the kernels' compiled form, events, sync debugging) stays unrun.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from gpu_settings import HERE, LONG_BUSY_S, STREAMS, WITHIN
from kernel_cases import interpreted
from kernel_recorder import launched_variant, record_launches, variants

from odc.bench.gpu import bandwidth, kernels, protocol, speed, training, transport, uneven, waiting
from odc.bench.gpu.bandwidth import transfer_report
from odc.bench.gpu.setting import CheckFailedError, Setting, run_ranks
from odc.bench.gpu.streams import Case, RandomRun, Streams
from odc.bench.harness.ranks import Rank
from odc.bench.harness.results import markdown
from odc.engines.base import TransferTable
from odc.kernels import aot_list

pytestmark = pytest.mark.usefixtures("server_of_all_tests", "ranks_find_the_settings")


# Bodies over streams that lag behind the host


def test_protocol() -> None:
    report = protocol.check_protocol(STREAMS)
    assert report.data["2 ranks"]["cases"] == 2 * 3
    assert report.data["2 ranks"]["comparisons"] > 20
    assert report.data["violations seen without order"] > 0


def test_protocol_sees_a_lost_order() -> None:
    with pytest.raises(CheckFailedError, match="gather of unit|sum of unit"):
        run_ranks(replace(STREAMS, prepare=f"{HERE}:lose_every_order"), 2, run_adversary)


def run_adversary(rank: Rank) -> None:
    for seed in range(5):  # a machine that holds up the fast rank for long enough hides what is missing
        case = Case(counts=((1, 1),) * 4, seed=seed, slow_rank=1, longest_delay_s=0.03)
        failures = RandomRun(case, rank).run()
        if rank.largest(len(failures)):
            break
    if failures:
        raise CheckFailedError(failures[0])


def test_items() -> None:
    report = protocol.check_items(replace(STREAMS, worlds=(2, 3)))
    assert report.figures.startswith("16 rounds, ")
    assert min(rank["comparisons"] for rank in report.data["3 ranks"]) > 10
    assert all(rank["memory_bytes"] > 2 * protocol.CAPACITY_BYTES for ranks in report.data.values() for rank in ranks)


def test_soak() -> None:
    report = protocol.check_soak(replace(STREAMS, worlds=(2, 4)))
    assert report.data["ranks"] == 4
    assert report.figures.startswith("3 clients, 8 minibatches")


@pytest.mark.parametrize(
    "setting", [STREAMS, pytest.param(WITHIN, marks=pytest.mark.extended)], ids=lambda setting: str(setting.transport)
)
def test_transport(setting: Setting) -> None:
    report = transport.check(replace(setting, worlds=(3,)))
    assert report.data["3 ranks"]["parts"] == [part.__name__ for part in transport.PARTS]


def test_uneven_minibatches_are_measured_beside_their_computation() -> None:
    plan = uneven.Plan("tiny", (1, 3), (0.004, 0.001))
    for mode in uneven.MODES:
        row = uneven.measure_plan(STREAMS, plan, mode, 2)
        assert min(row["fast_s"]["median"], row["fast_alone_s"]["median"]) > 3 * uneven.NUM_UNITS * 0.001
        assert row["total_s"]["median"] >= row["longest_s"] == pytest.approx(uneven.NUM_UNITS * 0.004)
        assert row["lockstep_s"] == pytest.approx(uneven.NUM_UNITS * (0.004 + 2 * 0.001))
        assert row["of_own"] > 0


def launches_alone_and_in_a_minibatch(rank: Rank, mode: str) -> list[int]:
    """What the stream of the computation is given, first beside nothing, then by ODC."""
    compute, counts = uneven._compute, list[int]()

    def counted(rank: Rank, plan: uneven.Plan, streams: Any, *operations: uneven.Operation) -> Any:
        before = streams.engine.num_launches()
        seconds = compute(rank, plan, streams, *operations)
        counts.append(streams.engine.num_launches() - before)
        return seconds

    uneven._compute = counted
    uneven.run(rank, uneven.Plan("tiny", (1, 2), (0.001, 0.0005)), mode, 1)
    return counts


@pytest.mark.parametrize("mode", ["daemon", pytest.param("direct", marks=pytest.mark.extended)])
def test_a_minibatch_is_compared_with_as_many_launches(mode: str) -> None:
    """Ranks that share a GPU take turns on it: launches that only one of the two has would be taken for waiting."""
    for counts in run_ranks(STREAMS, 2, launches_alone_and_in_a_minibatch, mode):
        assert len(counts) == 2 * (uneven.WARM_UP + 1)
        assert len(set(counts)) == 1, counts


@pytest.mark.extended
def test_ranks_in_lockstep_exceed_the_limits() -> None:
    plan = uneven.Plan("one rank 10x slower", (2, 2), (0.02, 0.002))
    row = uneven.measure_plan(replace(STREAMS, prepare=f"{HERE}:be_in_lockstep"), plan, "direct", 2)
    assert row["of_own"] > 3 * uneven.MOST_OF_OWN


@pytest.mark.parametrize(("of_own", "of_longest"), [(1.31, 1.0), (1.0, 1.16)])
def test_a_device_that_waits_for_a_slow_one_is_seen(
    of_own: float, of_longest: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    def measured(setting: Setting, plan: uneven.Plan, mode: str, repetitions: int) -> dict[str, Any]:
        ratios = (of_own, of_longest) if mode == "daemon" else (1.0, 1.0)
        summary = {"median": 1.0, "p20": 1.0, "p80": 1.0}
        found = {"plan": plan.name, "accumulate": mode, "fast_s": summary, "total_s": summary, "lockstep_s": 1.0}
        return {**found, "of_own": ratios[0], "of_longest": ratios[1]}

    monkeypatch.setattr(uneven, "measure_plan", measured)
    with pytest.raises(CheckFailedError) as failure:
        uneven.check_uneven(STREAMS)
    late = [f"{plan.name}, daemon: {of_own:.2f} and {of_longest:.2f}" for plan in uneven.plans(2)]
    assert str(failure.value).endswith(f"at most 1.15: {'; '.join(late)}")
    assert len(failure.value.data[failure.value.tables[0].rows]) == 4
    of_own = of_longest = 1.0
    assert "at most 1.00 times" in uneven.check_uneven(STREAMS).figures


def test_hosts_run_ahead() -> None:
    report = waiting.check_no_host_sync(replace(STREAMS, prepare=f"{HERE}:be_busy_until_the_host_waits"))
    assert all(float(report.data[mode]) < LONG_BUSY_S for mode in ("direct", "deterministic"))


def survive_when_awaited(marker: str, rank: Rank) -> dict[str, Any]:
    """``waiting.survive``, where rank 1 dies when rank 0's host waits for its stream, however long that takes."""
    synchronize, calls = Streams.synchronize, list[int]()

    def tell_and_synchronize(self: Streams) -> None:
        calls.append(1)
        if len(calls) == 2:
            Path(marker).touch()
        synchronize(self)

    def sleep(_: float) -> None:
        while not Path(marker).exists():
            time.sleep(0.01)

    Streams.synchronize = tell_and_synchronize  # type: ignore[method-assign]
    waiting.time = SimpleNamespace(sleep=sleep, monotonic=time.monotonic)  # type: ignore[assignment]
    return waiting.survive(rank)


def test_waiting_for_a_device_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting, "survive", partial(survive_when_awaited, str(tmp_path / "waiting")))
    report = waiting.check_hangs(STREAMS)
    assert report.data["killed_peer"]["how"] == "synchronize returned"
    assert report.data["killed_peer"]["seconds"] < waiting.FREED_LIMIT_S
    assert "PeerDiedError" in report.data["killed_peer"]["next"]


# Bodies that need a model, or times


@pytest.mark.extended
def test_sft() -> None:
    report = training.check_sft(WITHIN)
    assert len(report.data["errors"]) == 4
    assert 0 < max(report.data["errors"].values()) < 1e-2


@pytest.mark.extended
def test_forms(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is right, and one whose reference does something else."""
    wrong = training.Form(training.shard, end=training.step_and_change)
    monkeypatch.setattr(training, "FORMS", {"float8 travels": training.FORMS["float8 travels"], "wrong": wrong})
    with pytest.raises(CheckFailedError, match="^wrong: losses .*: off by ") as failed:
        training.check_forms(WITHIN)
    assert failed.value.data["errors"]["float8 travels"] < 1e-4


@pytest.mark.extended  # what each form does has tests of its own
def test_all_forms() -> None:
    assert training.check_forms(WITHIN).figures.startswith("6 forms; ")


@pytest.mark.extended
def test_late_binding() -> None:
    report = uneven.check_late_binding(WITHIN)
    assert report.data["2 ranks"]["taken"] > 0


FAKE_HAS_FAILED = (
    r"FakeDeviceError: a stream of the fake has failed: the fake's stream '\w+' waits for \d+ in the word at"
)


@pytest.mark.parametrize(
    ("check", "setting", "fault", "message"),
    [
        (waiting.check_no_host_sync, STREAMS, "wait_in_finish", "the host took .* as long as its stream was busy"),
        *(
            pytest.param(*row, marks=pytest.mark.extended)
            for row in (
                (protocol.check_items, STREAMS, "lose_every_order", "ranks: item .* of round"),
                (protocol.check_items, STREAMS, "lose_the_words_of_a_signal", FAKE_HAS_FAILED),  # no finding of items
                (protocol.check_soak, STREAMS, "lose_a_push", "daemon: .* elements of sums"),
                (transport.check, STREAMS, "lose_every_order", "after turn"),
                (training.check_sft, WITHIN, "lose_a_push", "fsdp. fp32, 2 ranks: losses .* off by"),
                (uneven.check_late_binding, WITHIN, "take_and_leave", "2 ranks: a sample was computed twice"),
            )
        ),
    ],
)
def test_a_fault_is_seen(check: Callable[[Setting], object], setting: Setting, fault: str, message: str) -> None:
    with pytest.raises(CheckFailedError, match=message):
        check(replace(setting, prepare=f"{HERE}:{fault}"))


def test_sft_has_ranks_without_a_microbatch() -> None:
    counts = [training.counts_of(step, 4) for step in range(8)]
    assert all(row.count(0) == 1 and max(row) <= 3 for row in counts)
    assert len({tuple(row) for row in counts}) > 4


def test_bandwidth() -> None:
    report = bandwidth.check_shared(WITHIN)
    operations = {"gather", "push, direct", "push, daemon", "copy", "add", "all_gather", "reduce_scatter"}
    assert {row["operation"] for row in report.data["rows"]} == operations
    assert {row["wrong"] for row in report.data["rows"] if row["by"] != "torch"} == {0}
    assert "| x collective |" in markdown(bandwidth.TABLE, report.data["rows"], {})
    assert "transfers not compared" in report.figures


def test_measured_transfers_become_a_table(tmp_path: Path) -> None:
    measured = {"sizes": [1 << 20, 1 << 22], "seconds": {"kernel": [1e-5, 5e-5], "copy_engine": [2e-5, 4e-5]}}
    rows, text = transfer_report(measured, str(tmp_path / "table.json"), "daemon")
    assert [row["faster"] for row in rows] == ["kernel", "copy_engine"]
    assert text == "gathers by kernel up to 2 MB, copy_engine beyond; additions: daemon"
    assert TransferTable.load(tmp_path / "table.json") == TransferTable(
        ((1 << 21, "kernel"), (0, "copy_engine")), "daemon"
    )


def test_matmuls_beside_transfers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Interpreted; one after the other, so neither is slower. What a GPU makes of it stays open."""
    monkeypatch.setitem(speed.LAYERS, "7B", (8, 8, 16))
    monkeypatch.setattr(speed, "SIDE", 16)
    monkeypatch.setattr(speed, "WIDTHS", ((2, 8),))
    with interpreted() as k:
        monkeypatch.setattr(kernels, "PartRows", k.parts.PartRows)
        for name in ("gather_parts", "scatter_accumulate_parts", "PeerTable"):
            monkeypatch.setattr(speed, name, getattr(k.parts, name))
        rows = speed.measure_overlap(SimpleNamespace(device=torch.device("cpu")), 1)  # type: ignore[arg-type]
    assert [(row["owners"], row["transfer"]) for row in rows] == [
        ("device", "gather"),
        ("device", "push"),
        ("host", "gather"),
    ]
    assert all(row["bytes_per_s"] > 0 and row["loss"] > 0 for row in rows)


def of_speed(ratio: float, judged: bool = True) -> dict[str, Any]:
    row = {"kernel": "accumulate", "num_bytes": 1 << 26, "moved_bytes": 3 << 26, "floor_s": {"median": 1.0}}
    return {**row, "ratio": ratio, "judged": judged}


def test_kernels_are_judged_by_their_floor() -> None:
    assert "at most 1.10" in speed.kernels_report([of_speed(1.1), of_speed(2.0, judged=False)]).figures
    with pytest.raises(CheckFailedError, match="accumulate at 64 MB: 1.20") as failure:
        speed.kernels_report([of_speed(1.1), of_speed(1.2)])
    assert [row["ratio"] for row in failure.value.data["rows"]] == [1.1, 1.2]


@pytest.mark.parametrize("name", [candidate.name for candidate in speed.candidates()])
def test_bytes_that_a_kernel_must_move(name: str) -> None:
    candidate = next(c for c in speed.candidates() if c.name == name)
    per_element = {"accumulate fp32": 12, "accumulate bf16": 10, "fill": 4}
    per_element |= {f"scatter_accumulate_parts, {count}": 10 for count in (1, 12)}
    expected = per_element.get(name, 6 if "bf16" in name else 8)
    assert candidate.moved_bytes(10) == 10 * expected


HOMES = {
    "fill": "fill",
    "copy_cast": "fill",
    "accumulate": "accumulate",
    "SlotRow": "slots",
    "write_rows": "slots",
    "accumulate_slots": "slots",
    "PartRows": "parts",
    "gather_parts": "parts",
    "scatter_accumulate_parts": "parts",
    "scatter_parts": "parts",
}
"""Kernels, and what belongs to them, with the modules they come from."""


@pytest.mark.extended
def test_kernels_in_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    with interpreted() as loaded:
        for name, home in HOMES.items():
            monkeypatch.setattr(kernels, name, getattr(getattr(loaded, home), name))
        monkeypatch.setattr(kernels, "QUICK_SIZES", (7,))
        report = kernels.check(WITHIN)
    assert set(report.data["cases"]) == {part.__name__.strip("_") for part in kernels.PARTS}
    assert "beyond 2**31 not run" in report.figures


def test_a_quick_run_launches_every_kernel_aligned_and_not(monkeypatch: pytest.MonkeyPatch) -> None:
    listed = variants(entry for entry in aot_list.entries() if not entry.nvshmem)
    launches = record_launches(monkeypatch)
    monkeypatch.setattr(kernels, "require", lambda *_: None)  # nothing is computed
    kernels.check(replace(WITHIN, quick=True))
    assert listed <= {launched_variant(kernel, arguments) for kernel, arguments, _ in launches}


@pytest.mark.parametrize("name", ["fill", "copy_cast", "accumulate"])
def test_a_wrong_kernel_is_seen(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def nearly(out: torch.Tensor, *arguments: Any, **options: Any) -> None:
        getattr(kernels, f"{name}_reference")(out, *arguments, **options)
        out[-1:] += 1.0

    monkeypatch.setattr(kernels, name, nearly)
    part = getattr(kernels, f"_{name}")
    with pytest.raises(CheckFailedError, match=f"{name} of 7"):
        list(part(torch.device("cpu"), (7,)))


@pytest.mark.parametrize("name", ["accumulate_slots", "gather_parts", "scatter_accumulate_parts", "scatter_parts"])
def test_a_kernel_that_does_nothing_is_seen(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, name, lambda *arguments, **options: None)
    part = getattr(kernels, f"_{name}")
    with pytest.raises(CheckFailedError, match=r" of (7|\[7\]) x"):
        list(part(torch.device("cpu"), (7,)))


def test_a_kernel_that_writes_too_far_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def far(out: torch.Tensor, value: float) -> None:
        out.as_strided((out.numel() + 1,), (1,)).fill_(value)

    monkeypatch.setattr(kernels, "fill", far)
    with pytest.raises(CheckFailedError, match="wrote outside of its output"):
        list(kernels._fill(torch.device("cpu"), (7,)))
