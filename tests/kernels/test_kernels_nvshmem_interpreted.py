"""Layer 1: no processes. The NVSHMEM kernels in Triton's interpreter, on the CPU, between fake PEs in one process.

No GPU. This shows which transfers a kernel asks for, how many are under way at a time, and that the signal comes after
all of them. It cannot show that NVSHMEM carries them out, nor that what one thread has completed others may rely on.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from kernel_cases import FakePes, interpreted, numbers, only_program, view

FP32 = torch.float32


@pytest.fixture(scope="module")
def k() -> Iterator[SimpleNamespace]:
    with interpreted() as modules:
        yield modules


class FakeModules:
    """Launches like `KernelModules`, without NVSHMEM's library."""

    def launch(self, kernel: Any, grid: tuple[int, ...], *arguments: object, **options: object) -> None:
        kernel[grid](*arguments, **options)


class TestNvshmemGather:
    @pytest.mark.parametrize("rank", range(3))
    @pytest.mark.parametrize("numel", [1, 3, 16, 1023])
    @pytest.mark.parametrize(("num_programs", "in_flight"), [(1, 1), (2, 3), (7, 2), (100, 4)])
    def test_data_and_plan(
        self,
        k: SimpleNamespace,
        monkeypatch: pytest.MonkeyPatch,
        rank: int,
        numel: int,
        num_programs: int,
        in_flight: int,
    ) -> None:
        pes = [2, 0, 1]  # ranks are not PEs
        fake = FakePes(3, 32768, me=pes[rank])
        fake.install(k.transfer, monkeypatch)
        data = [fake.tensor(pes[r], 64, numel, FP32).copy_(numbers(numel, FP32, r)) for r in range(3)]
        out = fake.tensor(fake.me, 8192, 3 * numel, FP32)
        how = {"rank": rank, "chunk_bytes": 256, "num_programs": num_programs}
        table = torch.tensor(pes, dtype=torch.int32)
        k.transfer.gather_from_pes(FakeModules(), out, data[rank], table, chunks_in_flight=in_flight, **how)
        assert torch.equal(out, torch.cat(data))
        assert not any(fake.pending.values())
        assert fake.most_pending <= in_flight
        gets = [entry for entry in fake.log if entry[1] == "get"]
        base = data[rank].data_ptr()
        for program, plan in enumerate(k.transfer.gather_plan(world_size=3, nbytes=numel * 4, **how)):
            done = [(pes.index(pe), low - base, nbytes) for p, _, pe, low, nbytes in gets if p == program]
            assert done == plan

    def test_own_row_in_place(self, k: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
        fake = FakePes(2, 4096, me=1)
        fake.install(k.transfer, monkeypatch)
        source = fake.tensor(1, 0, 10, FP32)
        fake.tensor(0, 0, 10, FP32).fill_(3)
        out = fake.tensor(1, 1024, 20, FP32).fill_(-7)
        pes = torch.tensor([0, 1], dtype=torch.int32)
        k.transfer.gather_from_pes(FakeModules(), out, source, pes, rank=1, own_in_place=True, chunk_bytes=16)
        assert out.tolist() == [3.0] * 10 + [-7.0] * 10


class TestNvshmemPut:
    def prepare(self, k: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, numel: int) -> tuple[FakePes, Any]:
        fake = FakePes(2, 32768, me=0)
        fake.install(k.transfer, monkeypatch)
        source = fake.tensor(0, 0, numel, FP32).copy_(numbers(numel, FP32))
        slot, signal = fake.tensor(0, 8192, numel, FP32), fake.tensor(0, 16384, 1, torch.int64)
        ticket = torch.zeros(1, dtype=torch.int32)
        return fake, (source, slot, signal, 7, ticket)

    @pytest.mark.parametrize("numel", [1, 3, 64, 65, 1023])
    @pytest.mark.parametrize(("num_programs", "in_flight"), [(1, 1), (2, 3), (7, 2), (100, 4)])
    def test_data_signal_and_plan(
        self, k: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, numel: int, num_programs: int, in_flight: int
    ) -> None:
        fake, arguments = self.prepare(k, monkeypatch, numel)
        how = {"chunk_bytes": 256, "num_programs": num_programs}
        k.transfer.put_with_signal(FakeModules(), *arguments, pe=1, chunks_in_flight=in_flight, **how)
        source, slot, signal, value, ticket = arguments
        assert torch.equal(fake.tensor(1, 8192, numel, FP32), source)
        assert fake.tensor(1, 16384, 1, torch.int64).item() == value
        assert not slot.any()  # only the owner's
        assert not signal.any()
        assert ticket.item() == 0  # ready for the next launch
        assert fake.most_pending <= in_flight
        plain, final = k.transfer.put_plan(nbytes=numel * 4, **how)
        puts = [entry for entry in fake.log if entry[1] == "put"]
        for program, plan in enumerate(plain):
            assert [(low - slot.data_ptr(), nbytes) for p, _, _, low, nbytes in puts if p == program] == plan
        (signalled,) = [entry for entry in fake.log if entry[1] == "signal"]
        assert (signalled[3] - slot.data_ptr(), signalled[4]) == final
        assert signalled[5] == 9  # NVSHMEM_SIGNAL_SET

    @pytest.mark.parametrize("order", [(0, 1, 2, 3), (3, 1, 0, 2), (2, 3, 1, 0)])
    def test_half_a_put_is_not_signalled(
        self, k: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, order: tuple[int, ...]
    ) -> None:
        fake, (source, slot, signal, value, ticket) = self.prepare(k, monkeypatch, 1023)
        for position, program in enumerate(order):
            assert fake.tensor(1, 16384, 1, torch.int64).item() == 0
            with only_program(program, 4):
                addresses = (source.data_ptr(), slot.data_ptr(), 4092, signal.data_ptr(), value, 1, ticket)
                k.transfer._nvshmem_put_signal_kernel[(1,)](*addresses, 256, 2)
            assert ticket.item() == (position + 1) % 4
        assert fake.tensor(1, 16384, 1, torch.int64).item() == value
        assert torch.equal(fake.tensor(1, 8192, 1023, FP32), source)


class TestNvshmemSignals:
    def run(
        self,
        k: SimpleNamespace,
        monkeypatch: pytest.MonkeyPatch,
        signals: list[int],
        expected: list[int],
        arrives: dict[int, tuple[int, int]],
    ) -> tuple[list[int], list[tuple[int, int]], int]:
        """What was observed, NVSHMEM's own waits, and the time at the end; ``arrives``: time -> (signal, value)."""
        words, observed = torch.tensor(signals), torch.full((len(signals),), -1)
        clock, waits = 0, []

        def globaltimer() -> int:
            nonlocal clock
            clock += 100
            if clock in arrives:
                index, value = arrives[clock]
                view(words.data_ptr(), len(signals), torch.int64)[index] = value
            return clock

        def signal_wait_until(address: Any, comparison: Any, value: Any) -> None:
            index = (int(address.handle.data.item()) - words.data_ptr()) // 8
            assert comparison.value == 5  # NVSHMEM_CMP_GE
            waits.append((index, int(value.handle.data.item())))

        monkeypatch.setattr(k.signals, "globaltimer", globaltimer)
        monkeypatch.setattr(k.signals, "signal_wait_until", signal_wait_until)
        k.signals.wait_for_signals(FakeModules(), words, torch.tensor(expected), observed, timeout_s=2e-6)
        return observed.tolist(), waits, clock

    def test_already_there(self, k: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
        observed, waits, clock = self.run(k, monkeypatch, [3, 9], [3, 5], {})
        assert (observed, waits) == ([3, 9], [(0, 3), (1, 5)])
        assert clock < 1000

    def test_arrives(self, k: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
        observed, waits, _ = self.run(k, monkeypatch, [2], [3], {500: (0, 4)})
        assert (observed, waits) == ([4], [(0, 3)])

    def test_time_is_over(self, k: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
        observed, waits, clock = self.run(k, monkeypatch, [3, 2], [3, 3], {})
        twin = torch.zeros(2, dtype=torch.int64)
        assert k.signals.wait_for_signals_reference(torch.tensor([3, 2]), torch.tensor([3, 3]), twin)
        assert observed == twin.tolist() == [3, 2]
        assert waits == [(0, 3)]  # NVSHMEM's endless wait is not entered for the missing one
        assert 2000 <= clock < 3000
