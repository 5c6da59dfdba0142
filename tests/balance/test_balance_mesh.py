"""Layer 3: ranks as processes. Loaders that take a mesh: ranks that compute together get the same, others their own."""

from __future__ import annotations

import functools
import json
import multiprocessing
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from loaders import known_loader, stream_loader
from process_ranks import run_ranks
from test_balance_stream import LENGTHS, Indices, Sequence, length_of, make_loader, samples_of, summary
from test_balance_stream_state import with_states
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils.data import DataLoader
from toy_modalities import COSTS, make_sample, orchestrator, split

from odc.balance import Grouping, MinibatchLoader, MultimodalLoader, QuadraticCost, StreamLoader, stream
from odc.balance.data.place import Together

DATA = ("dp_replicate", "dp_shard")
LONG = {"lengths": [8, 4, 4, 4] * 10 + [5], "max_tokens": 8, "drop_last": False}  # a last minibatch of one sample


class Drawn(Indices):
    """A sample is its number and something drawn at random where it is read."""

    def __getitem__(self, index: int) -> Any:
        return index, torch.rand(()).item()


def known(dataset: Any = None, **options: Any) -> MinibatchLoader[Any, Any]:
    given = {**LONG, "minibatch_size": 2, "cost": QuadraticCost(1.0, 0.0), "comm": "odc", **options}
    return known_loader(Indices(41) if dataset is None else dataset, given.pop("lengths"), list, **given)


def streamed(align: str, dataset: Any = None, **options: Any) -> StreamLoader[Any, Any]:
    grouping = "pack" if align == "minibatch" else "token-budget"
    return make_loader(None, None, dataset, align, grouping, **options)  # type: ignore[arg-type]


def taken_over(**options: Any) -> StreamLoader[Any, Any]:
    numbers: Any = range(len(LENGTHS))
    dataloader = DataLoader(numbers, shuffle=True, collate_fn=list)
    return stream(dataloader, grouping=Grouping("token-budget", 120, 20), length=length_of, dummy=list, **options)


def several_modalities(**options: Any) -> Any:
    samples = list(map(make_sample, range(24)))
    given = {"minibatch_size": 2, "cost": COSTS["language"], "max_tokens": 200, "comm": "odc", **options}
    loader = known_loader(samples, [len(sample["ids"]) for sample in samples], list, **given)
    group = {"mesh": options["mesh"]} if "mesh" in options else {"rank": options["rank"]}
    return MultimodalLoader(loader, split, orchestrator(4), **group)


LOADERS: dict[str, Callable[..., Any]] = {
    "known lengths": known,
    "with a worker": functools.partial(known, Drawn(41), num_workers=1, multiprocessing_context="fork"),
    **{align: functools.partial(streamed, align) for align in ("dgap", "steps", "minibatch")},
    "iterable": functools.partial(streamed, "minibatch", Sequence()),
    "taken over": taken_over,
}


@functools.cache
def make_mesh() -> DeviceMesh:
    """Partners lie between the two dimensions of the data, so these are not next to each other."""
    return init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("dp_replicate", "tp", "dp_shard"))


def given_a_mesh(rank: int, world_size: int) -> dict[str, Any]:
    """By loader: what this rank gets, and again behind the second minibatch; its place; and what is refused."""
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]  # or it has no workers
    mesh = make_mesh()
    found: dict[str, Any] = {}
    for name, make in LOADERS.items():
        torch.manual_seed(rank)
        loader = make(mesh=mesh[DATA])
        found[name], states = with_states(loader)
        loader.close()
        torch.manual_seed(100 + rank)
        resumed = make(mesh=mesh[DATA])
        resumed.load_state_dict(json.loads(states[2]))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # an iterable says how far it goes through its samples again
            found[f"{name}, resumed"] = summary(resumed)
        resumed.close()
    several = several_modalities(mesh=mesh[DATA])
    found["modalities"] = [[int(part.text["number"]) for part in one.parts] for one in several]
    several.close()
    found["place"] = loader.rank, loader.world_size
    found["refused"] = {}
    elsewhere = DeviceMesh("cpu", torch.arange(4))
    given: dict[str, dict[str, Any]] = {
        "with tp": {"mesh": mesh},
        "flattened with cp": {"mesh": mesh[DATA]._flatten("dp_cp")},
        "with a rank": {"mesh": mesh[DATA], "rank": 0},
        "with a group": {"mesh": mesh[DATA], "group": mesh["dp_shard"].get_group()},
        "nothing": {"rank": 0},
        "no mesh": {"mesh": "dp"},
        **({"elsewhere": {"mesh": elsewhere}} if rank > 3 else {}),
    }
    for name, options in given.items():
        with pytest.raises((ValueError, TypeError)) as caught:
            stream_loader(Indices(), list, max_tokens=120, length=length_of, **options)
        found["refused"][name] = f"{caught.type.__name__}: {caught.value}"
    parts = [mesh[DATA], mesh[DATA]._flatten("dp_cp"), mesh["dp_shard"], mesh["dp_replicate", "tp"], mesh]
    found["together"] = [Together.of(part) for part in parts]
    found["of a half"] = Together.of(elsewhere) if rank < 4 else None
    return found


@pytest.fixture(scope="module")
def of_ranks() -> list[dict[str, Any]]:
    return run_ranks(8, given_a_mesh)


PLACES = [0, 1, 0, 1, 2, 3, 2, 3]
"""In row-major order of the data's dimensions, by rank."""


@pytest.mark.parametrize("name", [*LOADERS, "modalities"])
def test_partners_get_the_same_and_all_together_every_sample(name: str, of_ranks: list[dict[str, Any]]) -> None:
    by_place: dict[int, Any] = {}
    for place, found in zip(PLACES, of_ranks, strict=True):
        assert found["place"] == (place, 4)
        assert by_place.setdefault(place, found[name]) == found[name]
    groups = [by_place[place] for place in range(4)]
    if name == "modalities":
        assert sorted(number for mine in groups for one in mine for number in one) == list(range(24))
    elif name == "with a worker":
        drawn = [sample for mine in groups for one in mine for batch in one[0] for sample in batch]
        assert sorted(index for index, _ in drawn) == list(range(41))
        assert len({value for _, value in drawn}) > 30  # each group has drawn its own
    else:
        assert samples_of(groups) == list(range(41 if name == "known lengths" else len(LENGTHS)))


@pytest.mark.parametrize("name", LOADERS)
def test_a_resumed_loader_goes_on_with_the_same_on_partners_too(name: str, of_ranks: list[dict[str, Any]]) -> None:
    """A new one, from what each rank has saved behind its second minibatch. Workers draw anew, partners' the same."""
    by_place: dict[int, Any] = {}
    for place, found in zip(PLACES, of_ranks, strict=True):
        whole, rest = found[name], found[f"{name}, resumed"]
        assert by_place.setdefault(place, rest) == rest
        if name == "with a worker":
            whole, rest = map(without_what_was_drawn, (whole, rest))
        assert len(rest) > 1
        assert rest == whole[2:]


def without_what_was_drawn(summaries: list[Any]) -> list[Any]:
    return [([[index for index, _ in batch] for batch in batches], *rest) for batches, *rest in summaries]


def test_a_mesh_tells_what_numbers_would(of_ranks: list[dict[str, Any]]) -> None:
    """Uneven numbers of microbatches, and groups without any, are those of a plan for as many single ranks."""
    counts = []
    for place, rank in ((0, 0), (1, 1), (2, 4), (3, 5)):
        expected = summary(known(rank=place, world_size=4))
        assert of_ranks[rank]["known lengths"] == expected
        counts.append([len(batches) for batches, *_ in expected])
    assert len(set(map(tuple, counts))) > 1
    assert [numbers[-1] for numbers in counts].count(0) == 3


def test_partners_are_those_that_differ_in_other_dimensions_only(of_ranks: list[dict[str, Any]]) -> None:
    for rank, found in enumerate(of_ranks):
        replica, partner, place = rank // 4, rank // 2 % 2, rank % 2
        pair = [4 * replica + place, 4 * replica + 2 + place]
        expected = [pair, pair, [place, 2 + place, 4 + place, 6 + place], [rank - place, rank - place + 1], [rank]]
        assert [together.ranks for together in found["together"]] == expected
        assert [together.index for together in found["together"]] == [partner, partner, 2 * replica + partner, place, 0]
        assert found["of a half"] is None
    for wholes in zip(*([together.whole for together in found["together"]] for found in of_ranks), strict=True):
        assert len(set(wholes)) == 1


def test_what_is_no_mesh_of_data_is_refused(of_ranks: list[dict[str, Any]]) -> None:
    expected = {
        "with tp": "ValueError: the mesh has the dimension 'tp', whose ranks run the same microbatches",
        "flattened with cp": "ValueError: the mesh has the dimension 'dp_cp'",
        "with a rank": "ValueError: mesh beside rank, world_size or group",
        "with a group": "ValueError: mesh beside rank, world_size or group",
        "nothing": "ValueError: rank=0, world_size=None, mesh=None: give rank and world_size, or mesh",
        "no mesh": "TypeError: mesh='dp': expected a DeviceMesh",
        "elsewhere": "ValueError: rank 7 is not in the mesh of ranks [0, 1, 2, 3]",
    }
    for name, beginning in expected.items():
        assert of_ranks[7]["refused"][name].startswith(beginning)
