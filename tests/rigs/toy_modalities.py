"""A model of three modalities that is small enough for float64 and property tests: what the multimodal tests train."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from odc.balance import QuadraticCost
from odc.balance.multimodal import Encoder, ItemLengths, Orchestrator, Phase, SampleLengths, SampleParts

WIDTH = 6
CHANNELS = {"vision": 3, "audio": 5}
RATES = {"vision": 2, "audio": 3}
"""Tokens in an encoder for each row of its output."""
COSTS = {"vision": QuadraticCost(0.02, 1.0), "audio": QuadraticCost(0.05, 2.0), "language": QuadraticCost(0.01, 3.0)}
LAYOUTS = {"vision": "packed", "audio": "padded"}
_PLACE = {"vision": -1, "audio": -2}


def rows_of(modality: str, tokens: int) -> int:
    return tokens // RATES[modality]


def make_sample(number: int, seed: int = 0) -> dict[str, Any]:
    """Sample ``number`` of an endless data set: any number of items of either modality, or none; all in float64."""
    rng = random.Random(seed * 100003 + number)
    generator = torch.Generator().manual_seed(seed * 100003 + number)
    kind = rng.choice(["text", "images", "speech", "both", "text"])
    tokens: list[int] = [rng.randrange(1, 20) for _ in range(rng.randrange(2, 12))]
    items: dict[str, list[torch.Tensor]] = {"vision": [], "audio": []}
    for modality, wanted in (("vision", ("images", "both")), ("audio", ("speech", "both"))):
        for _ in range(rng.randrange(1, 4) if kind in wanted else 0):
            length = rng.choice([1, 2, rng.randrange(1, 40)])  # one of 1 has no row at all
            items[modality].append(torch.randn(length, CHANNELS[modality], generator=generator, dtype=torch.float64))
            at = rng.randrange(len(tokens) + 1)
            tokens[at:at] = [_PLACE[modality]] * rows_of(modality, length)
    # Where several items were put, rows stand in the order of the places: any order is as good as another here.
    return {"ids": torch.tensor(tokens), "items": items, "number": torch.tensor(number)}


def split(sample: Mapping[str, Any]) -> SampleParts:
    items = {name: [(item,) for item in found] for name, found in sample["items"].items() if found}
    lengths = {
        name: [ItemLengths(len(item), rows_of(name, len(item))) for (item,) in found] for name, found in items.items()
    }
    text = {"ids": sample["ids"], "number": sample["number"]}
    return SampleParts(text, items, SampleLengths(len(sample["ids"]), lengths))


class Toy(torch.nn.Module):
    """Two encoders and a language model."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)

        def matrix(*shape: int) -> torch.nn.Parameter:
            return torch.nn.Parameter(torch.randn(*shape, generator=generator, dtype=torch.float64) * 0.3)

        self.encoders = torch.nn.ParameterDict({name: matrix(width, WIDTH) for name, width in CHANNELS.items()})
        self.embedding, self.head = matrix(20, WIDTH), matrix(WIDTH, WIDTH)
        self.num_encoded: list[tuple[str, int]] = []

    def encode(self, modality: str, items: Sequence[tuple[torch.Tensor, ...]]) -> list[torch.Tensor]:
        self.num_encoded.append((modality, len(items)))
        found = []
        for (item,) in items:
            hidden = torch.tanh(item @ self.encoders[modality])
            hidden = hidden + hidden.mean(dim=0)  # the rows of an item depend on one another
            rate, rows = RATES[modality], rows_of(modality, len(item))
            found.append(hidden[: rows * rate].view(rows, rate, WIDTH).sum(dim=1))
        return found

    def loss(self, samples: Sequence[Mapping[str, torch.Tensor]], outputs: Mapping[str, Sequence[torch.Tensor]]) -> Any:
        """Summed over samples, whose rows do not see those of others."""
        total = self.head.sum() * 0 + self.embedding.sum() * 0
        rest = {name: list(found) for name, found in outputs.items()}
        for sample in samples:
            ids = sample["ids"]
            hidden = self.embedding[ids.clamp(min=0)]
            for modality, place in _PLACE.items():
                where = (ids == place).nonzero().flatten()
                rows: list[torch.Tensor] = []
                missing = len(where)
                while missing or (rest.get(modality) and len(rest[modality][0]) == 0):
                    rows.append(rest[modality].pop(0))
                    missing -= len(rows[-1])
                if rows:
                    hidden = hidden.index_copy(0, where, torch.cat(rows))
            total = total + (torch.tanh(hidden.cumsum(dim=0) @ self.head) ** 2).sum() * (1 + int(sample["number"]) % 3)
        assert not any(rest.values()), "outputs are left over"
        return total


def encoders(model: Toy) -> dict[str, Encoder]:
    return {
        name: Encoder(
            lambda items, name=name: model.encode(name, items),  # type: ignore[misc]
            WIDTH,
            torch.float64,
            dummy=lambda channels=channels: (torch.zeros(2, channels, dtype=torch.float64),),  # type: ignore[misc]
        )
        for name, channels in CHANNELS.items()
    }


def orchestrator(num_ranks: int, *, frozen: Sequence[str] = (), limit: int | None = 60, **options: Any) -> Orchestrator:
    phases = [
        Phase(name, COSTS[name], LAYOUTS[name], max_tokens=limit, frozen=name in frozen)  # type: ignore[arg-type]
        for name in CHANNELS
    ]
    # Microbatches that are as loaded keep the limit of their loader, if they have one.
    most = 200 if options.get("policy") else None
    return Orchestrator(phases, Phase("language", COSTS["language"], max_tokens=most), num_ranks, **options)


def reference(model: Toy, numbers: Sequence[int], seed: int, frozen: Sequence[str] = ()) -> float:
    """Forward and backward of these samples one by one, in one process; the loss."""
    total = 0.0
    for number in numbers:
        sample = make_sample(number, seed)
        outputs = {}
        for name, items in split(sample).items.items():
            found = model.encode(name, items)
            outputs[name] = [output.detach() if name in frozen else output for output in found]
        loss = model.loss([split(sample).text], outputs)
        loss.backward()
        total += float(loss.detach())
    return total
