"""Layer 1: no processes. Arguments of loaders by their names of before: the same minibatches, and a warning."""

from __future__ import annotations

from typing import Any

import pytest
from loaders import known_loader, stream_loader
from test_balance_stream import COST, LENGTHS, Indices, length_of, summary
from torch.utils.data import DataLoader

from odc.balance import Grouping, MinibatchLoader, MinibatchSampler, StreamLoader, stream

STREAMS: dict[str, dict[str, Any]] = {
    "all options": {
        "grouping": "pack", "pool_size": 20, "align": "minibatch", "minibatch_size": 5, "cost": COST, "comm": "odc",
        "seed": 3, "num_workers": 1, "prefetch_factor": 3, "worker_timeout_s": 20.0,
    },
    "sizes of batches": {"grouping": "pool-sort", "batch_size": 3, "shuffle": False, "gradient_accumulation_steps": 2},
    "defaults": {},
}  # fmt: skip


def warned(make: Any, *arguments: Any, **options: Any) -> tuple[Any, str]:
    """What is made, and the warning."""
    with pytest.warns(DeprecationWarning, match="this release is the last one") as caught:
        loader = make(*arguments, **options)
    (warning,) = caught
    assert warning.filename == __file__
    return loader, str(warning.message)


@pytest.mark.parametrize("options", STREAMS.values(), ids=STREAMS)
def test_a_stream_of_old_names_is_that_of_the_objects(options: dict[str, Any]) -> None:
    given = {"length": length_of, "max_tokens": 120, **options}
    old, words = warned(StreamLoader, Indices(), list, 0, 1, **given)
    kept = "" if options.get("shuffle", True) else ", shuffle=False"
    assert f"grouping=Grouping(...{kept}) for its name and sizes; align=" in words
    assert ("order=Order(...) for seed" in words) == ("seed" in options)
    assert ("read=ReadOptions(...) for num_workers, prefetch_factor" in words) == ("num_workers" in options)
    new = stream_loader(Indices(), list, 0, 1, **given)
    assert old.state_dict() == new.state_dict()
    assert summary(old) == summary(new)


def test_no_option_is_lost_that_used_to_go_with_every_alignment() -> None:
    options = {"cost": COST, "exchange_timeout_s": 5.0, "comm": "odc", "late_binding": False, "minibatch_size": None}
    given: dict[str, Any] = {"length": length_of, "max_tokens": 120, **options}
    assert warned(StreamLoader, Indices(), list, 0, 1, **given)[0].alignment.timeout_s == 5.0
    for option, value in (("join", False), ("late_binding", True), ("microbatch_cost", 1.0), ("minibatch_size", 4)):
        with pytest.raises(ValueError, match=f"{option}={value} with align='steps', which has no such option"):
            StreamLoader(Indices(), list, 0, 1, **{**given, "align": "steps", option: value})
    with pytest.raises(ValueError, match="align='all': expected one of 'dgap', 'steps', 'minibatch', 'none'"):
        StreamLoader(Indices(), list, 0, 1, align="all", **given)  # type: ignore[arg-type]


def test_a_loader_of_lengths_is_that_of_their_sampler() -> None:
    options = {"minibatch_size": 4, "cost": COST, "seed": 3, "policy": "lb-micro", "num_workers": 1}
    by_place, words = warned(MinibatchLoader, Indices(), LENGTHS, list, 1, 3, **options)
    assert "MinibatchSampler(lengths, ...)" in words
    assert "read=ReadOptions(...) for num_workers" in words
    by_name, _ = warned(
        MinibatchLoader[int, list[int]], Indices(), lengths=LENGTHS, collate=list, rank=1, world_size=3, **options
    )
    for old in (by_place, by_name):
        new = known_loader(Indices(), LENGTHS, list, 1, 3, **options)
        assert old.state_dict() == new.state_dict()
        assert [m.microbatches for m in old] == [m.microbatches for m in new]


def test_lengths_and_what_follows_them_are_given_once() -> None:
    options = {"minibatch_size": 4, "cost": COST}
    for arguments, twice in (((LENGTHS, list, 0, 1, 2), {}), ((LENGTHS, list, 0), {"rank": 0, "world_size": 1})):
        with pytest.raises(TypeError, match="positional arguments|multiple values for argument 'rank'"):
            MinibatchLoader(Indices(), *arguments, **options, **twice)


def test_a_dataloader_that_is_taken_over_gives_the_rest() -> None:
    dataloader: Any = DataLoader(Indices(), batch_size=4, collate_fn=list, num_workers=1)  # type: ignore[arg-type]
    found, _ = warned(stream, dataloader, max_tokens=1000, length=length_of, grouping="none", infinite=True)
    assert (found.grouping.batch_size, found.order.infinite, found.order.shuffle) == (4, True, False)
    assert found._reader.num_workers == 1
    found.close()


@pytest.mark.parametrize(
    ("beside", "home"),
    [
        ({"num_workers": 2}, r"read=ReadOptions\(...\)"),
        ({"world_size": 2}, r"MinibatchSampler\(...\)"),
        ({"minibatch_size": 4}, r"MinibatchSampler\(...\)"),
        ({"lengths": LENGTHS}, r"MinibatchSampler\(...\)"),
    ],
)
def test_beside_a_sampler_an_old_name_says_where_it_goes(beside: dict[str, Any], home: str) -> None:
    sampler = MinibatchSampler(LENGTHS, world_size=2, minibatch_size=4, cost=COST)
    with pytest.raises(TypeError, match=f"{next(iter(beside))}=.*, an option of {home}: give it there"):
        MinibatchLoader(Indices(), sampler, list, 0, **beside)


def test_a_world_size_behind_the_rank_says_where_it_goes() -> None:
    sampler: Any = MinibatchSampler(LENGTHS, world_size=2, minibatch_size=4, cost=COST)
    for first in (sampler, LENGTHS):
        with pytest.raises(TypeError, match=r"world_size=2, an option of MinibatchSampler"):
            MinibatchLoader(Indices(), first, list, 0, 2)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("beside", "home"),
    [
        ({"max_tokens": 120}, r"grouping=Grouping\(...\)"),
        ({"minibatch_size": 4}, r"the alignment, such as align=EqualMinibatches\(...\)"),
        ({"sampler": [1, 2]}, r"order=Order\(...\)"),
        ({"num_workers": 2}, r"read=ReadOptions\(...\)"),
    ],
)
def test_beside_a_grouping_an_old_name_says_where_it_goes(beside: dict[str, Any], home: str) -> None:
    dataloader: Any = DataLoader(Indices(), batch_size=4, collate_fn=list)  # type: ignore[arg-type]
    given: dict[str, Any] = {"length": length_of, "grouping": Grouping("pack", max_tokens=120), **beside}
    message = f"{next(iter(beside))}=.*, an option of {home}: give it there"
    with pytest.raises(TypeError, match=message):
        StreamLoader(Indices(), list, 0, 1, **given)
    with pytest.raises(TypeError, match=message):
        stream(dataloader, **given)


def test_what_a_dataloader_has_is_the_default_and_none_replaces_it() -> None:
    dataloader: Any = DataLoader(Indices(), batch_size=4, collate_fn=list, num_workers=1, prefetch_factor=3)  # type: ignore[arg-type]
    given: dict[str, Any] = {"max_tokens": 1000, "length": length_of, "grouping": "pool-sort"}
    found, words = warned(stream, dataloader, num_workers=0, prefetch_factor=None, **given)
    assert found._reader.num_workers == 0
    assert (found.order.shuffle, found.grouping.shuffle) == (False, False)
    assert "grouping=Grouping(..., shuffle=False)" in words
