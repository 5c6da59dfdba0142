"""Layer 2: ranks as threads. What set-up agrees on, and how it says what differs."""

from __future__ import annotations

import pytest
import torch
from thread_ranks import ThreadExchange, run_threads, values

from odc import ParamSlice, Runtime, RuntimeConfig, SetupError, UnitSpec
from odc.exchange import gather_json, raise_together, require_agreement


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
        Runtime.create(exchange, [spec], RuntimeConfig(host_id=f"host-{exchange.rank}")).close()

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
