"""Layer 2: ranks as threads. What set-up agrees on, and how it says what differs."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from process_ranks import run_ranks
from thread_ranks import ThreadExchange, run_threads, values
from torch.distributed.distributed_c10d import _get_default_store

from odc import ParamSlice, Runtime, RuntimeConfig, SetupError, UnitSpec, limits
from odc.liveness.threads import HelperThread
from odc.setup.agreement import ProcessGroupExchange, gather_json, raise_together, require_agreement, setup_timeout_s


def test_json_arrives_in_rank_order() -> None:
    rows = values(run_threads(3, lambda ex: gather_json(ex, {"rank": ex.rank})))
    assert rows == [[{"rank": 0}, {"rank": 1}, {"rank": 2}]] * 3


def test_one_ranks_failure_is_every_ranks_error() -> None:
    def body(exchange: ThreadExchange) -> None:
        raise_together(exchange, ValueError("no mesh") if exchange.rank == 1 else None)

    results = run_threads(3, body)
    assert isinstance(results[1], ValueError)
    for rank in (0, 2):
        assert isinstance(results[rank], SetupError)
        assert "rank 1: ValueError: no mesh" in str(results[rank])


def test_set_up_is_not_in_a_hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ODC_TIMEOUT", "5")
    assert setup_timeout_s() == 600.0
    monkeypatch.setenv("ODC_TIMEOUT", "3600")
    assert setup_timeout_s() == 3600.0
    assert setup_timeout_s(1200.0) == 1200.0


LONELY = """
import sys, time, logging
import torch.distributed as dist
from odc.setup import agreement as exchange
from odc import limits
limits.FIRST_REMINDER_S = 1e-6
rank = int(sys.argv[1])
dist.init_process_group("gloo", init_method="file://" + sys.argv[2], rank=rank, world_size=2)
if rank == 1:
    sys.stdin.read()
exchange.ProcessGroupExchange(timeout_s=2.0).all_gather(b"")
"""


def test_a_rank_that_gives_up_waiting_in_set_up_ends_though_the_other_never_comes(tmp_path: Path) -> None:
    """Gloo would keep the process until the operation under way has ended."""
    command = [sys.executable, "-c", LONELY]
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo"}
    with subprocess.Popen([*command, "1", str(tmp_path / "s")], stdin=subprocess.PIPE, env=environment) as other:
        ended = subprocess.run(
            [*command, "0", str(tmp_path / "s")],
            env=environment,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert other.poll() is None
        other.kill()
    assert ended.returncode == 1
    assert re.search(r"SetupError: rank 0 has waited \d+ s in set-up for ranks \[1\]", ended.stderr), ended.stderr
    assert re.search(r"odc: rank 0 has waited \d+ s in set-up for ranks \[1\]", ended.stderr), ended.stderr


@pytest.mark.parametrize(
    ("theirs", "words"),
    [
        ({"a": "1", "b": "3"}, ["'b'", "rank 0 has 2", "rank 1 has 3"]),
        ({"a": "1"}, ["'b'", "rank 0 has 2", "rank 1 has (absent)"]),
        ({"a": "1", "b": "2", "c": "x"}, ["'c'", "rank 0 has (absent)", "rank 1 has x"]),
        ({"b": "2", "a": "1"}, ["order of items"]),
    ],
)
def test_the_first_difference_is_named_on_all_ranks(theirs: dict[str, str], words: list[str]) -> None:
    def body(exchange: ThreadExchange) -> None:
        require_agreement(exchange, {"options": {"a": "1", "b": "2"} if exchange.rank == 0 else theirs})

    for result in run_threads(2, body):
        assert isinstance(result, SetupError)
        assert all(word in str(result) for word in ["rank 1 differs from rank 0 in options", *words])


@pytest.mark.parametrize(
    ("config", "unit", "words"),
    [
        (RuntimeConfig(deterministic=True), None, ["options", "'deterministic'", "False", "True"]),
        (RuntimeConfig(), 9, ["units", "8 x torch.float32", "9 x torch.float32"]),
    ],
)
def test_runtimes_that_differ_are_refused_on_all_ranks(
    config: RuntimeConfig, unit: int | None, words: list[str]
) -> None:
    def body(exchange: ThreadExchange) -> None:
        odd = exchange.rank == 1
        numel = unit if odd and unit else 8
        spec = UnitSpec("layer", numel, torch.float32, (ParamSlice("w", numel),))
        Runtime.create(exchange, [spec], config if odd else RuntimeConfig()).close()

    for result in run_threads(2, body):
        assert isinstance(result, SetupError)
        assert all(word in str(result) for word in words), str(result)


def test_ranks_on_other_hosts_are_refused_by_shm_with_the_reason() -> None:
    spec = UnitSpec("layer", 8, torch.float32)

    def body(exchange: ThreadExchange) -> None:
        Runtime.create(exchange, [spec], RuntimeConfig(transport="shm", host_id=f"host-{exchange.rank}")).close()

    for result in run_threads(2, body):
        assert isinstance(result, SetupError)
        assert "serves one host" in str(result)
        assert "host-1" in str(result)


def test_a_message_too_large_for_the_machine_is_an_error_before_anything_is_written() -> None:
    huge = UnitSpec("layer", 1 << 46, torch.float32)
    for result in run_threads(2, lambda exchange: Runtime.create(exchange, [huge])):
        assert isinstance(result, SetupError)
        assert "cannot reserve" in str(result)
        assert "published shards" in str(result)


def swap_sizes(rank: int, world_size: int) -> tuple[list[bytes], list[bytes], int]:
    """Two exchanges at a time over one group, messages of any length and content, and what they leave in the store."""
    one, two = ProcessGroupExchange(), ProcessGroupExchange()
    first = one.all_gather(bytes(range(256)) * rank)
    for turn in range(20):
        for group in (one, two):
            assert group.all_gather(f"{turn} {rank}".encode()) == [f"{turn} {r}".encode() for r in range(world_size)]
    return first, two.all_gather(b"\0" * 100_000 * (rank + 1)), _get_default_store().num_keys()


def test_messages_of_any_length_arrive_and_are_taken_away_again() -> None:
    for first, second, num_keys in run_ranks(3, swap_sizes):
        assert first == [bytes(range(256)) * rank for rank in range(3)]
        assert second == [b"\0" * 100_000 * (rank + 1) for rank in range(3)]
        assert num_keys < 35


def test_equal_tables_are_not_sent_around() -> None:
    sent: list[int] = []

    def body(exchange: ThreadExchange) -> None:
        table = {"units": {f"layer {i}": "x" * 100 for i in range(100)}}
        all_gather = exchange.all_gather
        exchange.all_gather = lambda payload, *rest: (sent.append(len(payload)), all_gather(payload, *rest))[1]  # type: ignore[method-assign]
        require_agreement(exchange, table)

    values(run_threads(3, body))
    assert len(sent) == 3
    assert max(sent) < 100


def waiting_without_a_thread(rank: int, world_size: int) -> str:
    """Rank 1 does not come to the second exchange."""
    group, started, said = ProcessGroupExchange(), time.monotonic(), ""
    group.all_gather(b"")

    def check() -> None:
        if time.monotonic() - started > 0.5:
            raise SetupError("told of a failure")

    if rank == 0:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(HelperThread, "start", no_more_threads)
            with pytest.raises(SetupError) as caught:
                group.all_gather(b"", check)
        said = str(caught.value)
    dist.barrier()
    return said


def no_more_threads(thread: HelperThread) -> None:
    raise SetupError("can't start new thread")


def test_a_wait_without_a_thread_can_be_ended() -> None:
    assert run_ranks(2, waiting_without_a_thread)[0] == "told of a failure"


def failing_and_going_on(rank: int, world_size: int) -> str:
    """Rank 1 fails between two exchanges, and its script goes on."""
    limits.WORDS_LOOK_S = 0.2
    group, said = ProcessGroupExchange(), ""
    group.all_gather(b"")
    if rank == 1:
        group.leave_word(LookupError("no such layer"))
    else:
        with pytest.raises(SetupError) as caught:
            group.all_gather(b"")
        said = str(caught.value)
    dist.barrier()
    return said


def test_a_rank_that_has_failed_and_goes_on_is_named() -> None:
    said = run_ranks(2, failing_and_going_on)[0]
    assert re.search(r"it failed on rank 1 \(pid \d+\): LookupError: no such layer", said), said
