"""Layer 1: no processes. The NVSHMEM kernels in Triton's interpreter, on the CPU, between fake PEs in one process.

No GPU. This shows which transfers a kernel asks for, how many are under way at a time, and that the signal comes after
all of them. It cannot show that NVSHMEM carries them out, nor that what one thread has completed others may rely on.
"""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from kernel_cases import FakePes, numbers, only_program

FP32 = torch.float32


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


def test_quiet_on_stream(k: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakePes(1, 64, me=0)
    fake.install(k.signals, monkeypatch)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    k.signals.quiet_on_stream(FakeModules(), torch.device("cuda"))
    assert fake.log == [(0, "quiet")]
