"""Layer 1: no processes. Options, environment variables, fault specifications, unit tables."""

from __future__ import annotations

import math
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from odc import ConfigError, ParamSlice, RuntimeConfig, UnitSpec
from odc.liveness.faults import POINTS, FaultInjector, FaultSpec
from odc.units import segments


def test_environment_wins_over_argument_wins_over_default() -> None:
    assert RuntimeConfig.from_environment(environ={}).timeout_s == 600
    assert RuntimeConfig.from_environment(timeout_s=7, environ={}).timeout_s == 7
    assert RuntimeConfig.from_environment(timeout_s=7, environ={"ODC_TIMEOUT": "5"}).timeout_s == 5


BAD_ADDRESSES = [
    "0.0.0.0",
    "::",
    "224.0.0.1",
    "255.255.255.255",
    "node7",
    "10.0.0",
    "10.0.0.7:29500",
    "10.0.0.7/24",
    " ",
]


@pytest.mark.parametrize("address", ["10.0.0.7", "fd00::7", "127.0.0.1", ""])
def test_an_address_that_may_be_a_hosts_is_taken(address: str) -> None:
    assert RuntimeConfig.from_environment(environ={"ODC_ADDRESS": address}).address == address


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"accumulate": "mail"}, ["accumulate", "mail", "daemon"]),
        ({"accumulate_dtype": torch.bfloat16}, ["accumulate_dtype", "bfloat16", "float32"]),
        ({"timeout_s": 0}, ["timeout_s", "0"]),
        ({"timeout_s": math.inf}, ["timeout_s", "inf"]),
        *(({"address": a}, [f"ODC_ADDRESS={a!r} cannot be used", "one IP address", "10.0.0.7"]) for a in BAD_ADDRESSES),
    ],
)
def test_a_bad_option_is_named_with_its_value_and_what_was_expected(options: dict, words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        RuntimeConfig(**options)
    assert all(word in str(caught.value) for word in words)


def test_a_timeout_that_is_not_a_number_is_refused() -> None:
    with pytest.raises(ConfigError, match="ODC_TIMEOUT='soon'"):
        RuntimeConfig.from_environment(environ={"ODC_TIMEOUT": "soon"})


def test_fault_specification() -> None:
    spec = FaultSpec.parse("rank=1,point=scatter.after_chunk,at=3,do=delay:0.5")
    assert spec == FaultSpec(1, "scatter.after_chunk", "delay", 3, 0.5)
    assert FaultSpec.parse("point=*,do=raise").rank == -1


@pytest.mark.parametrize(
    "text", ["do=kill", "point=nowhere,do=kill", "point=wait,do=sing", "rank=x,point=wait,do=kill"]
)
def test_a_bad_fault_specification_is_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        FaultSpec.parse(text)


def test_faults_fire_at_the_given_pass_of_the_given_rank_only() -> None:
    mine = FaultInjector("rank=2,point=wait,at=2,do=delay:0", rank=2)
    other = FaultInjector("rank=2,point=wait,at=2,do=delay:0", rank=1)
    for injector in (mine, other):
        for _ in range(3):
            injector.hit("wait")
    assert (mine.fired, other.fired) == (1, 0)
    assert set(mine.passes) <= set(POINTS)


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(1, 9), st.booleans()), min_size=1, max_size=8))
def test_segments_cover_the_accumulator_once_and_the_push_once(params: list[tuple[int, bool]]) -> None:
    unit = UnitSpec("u", 1, torch.float32, tuple(ParamSlice(str(i), n) for i, (n, _) in enumerate(params)))
    present = [here for _, here in params]
    rows = segments(unit, present)
    covered = [row.offset + i for row in rows for i in range(row.numel)]
    assert covered == list(range(unit.grad_numel))
    sources = [row.source + i for row in rows if row.source is not None for i in range(row.numel)]
    assert sources == list(range(sum(n for n, here in params if here)))
    expected = [here for n, here in params for _ in range(n)]
    assert [row.source is not None for row in rows for _ in range(row.numel)] == expected


def test_a_unit_needs_elements() -> None:
    with pytest.raises(ValueError, match="shard_numel=0"):
        UnitSpec("u", 0, torch.float32)


@pytest.mark.parametrize(
    ("modules", "absent"),
    [
        ("odc, odc.balance", {"torch", "rich", "matplotlib"}),
        (
            "odc.minibatch.runtime, odc.kernels, odc.cli",
            {"triton", "cupy", "nvshmem", "odc.fsdp_patch", "matplotlib", "transformers"},
        ),
    ],
)
def test_import_has_no_side_effects_and_needs_no_more_than_it_uses(modules: str, absent: set[str]) -> None:
    script = (
        f"import sys, threading, os; before = set(os.environ.items()); import {modules};"
        f"found = {absent!r} & set(sys.modules); assert not found, found;"
        "assert threading.active_count() == 1; assert set(os.environ.items()) == before"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
