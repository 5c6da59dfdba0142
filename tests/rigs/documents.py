"""What the examples of the documents take as given: ``model``, ``dataset``, ``lengths`` and the like, small and real.

An example is run as it stands, on each of two ranks. A name that it uses and does not make is made here, when it is
first used.
"""

from __future__ import annotations

import doctest
import importlib
import inspect
import io
import itertools
import multiprocessing
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method

import odc
from odc.balance import ItemLengths, QuadraticCost, SampleLengths, SampleParts, count_loss_tokens

WIDTH, VOCABULARY, PIXELS, NUM_SAMPLES = 8, 32, 6, 32


class Output(NamedTuple):
    """As of a transformers model."""

    logits: torch.Tensor
    loss: torch.Tensor | None = None


def transformers_model() -> Any:
    """What :class:`LanguageModel` is called like."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    shape = {"hidden_size": WIDTH, "intermediate_size": WIDTH, "num_attention_heads": 2, "num_key_value_heads": 2}
    with torch.random.fork_rng(), torch.device("cpu"):
        return Qwen2ForCausalLM(Qwen2Config(vocab_size=VOCABULARY, num_hidden_layers=1, **shape))


def assert_told_apart(model: Any, input_ids: torch.Tensor, position_ids: torch.Tensor, **options: Any) -> None:
    """That ``model``, called so, computes for the samples of a packed row what it does for them one by one."""
    starts = (position_ids[0] == 0).nonzero()[:, 0].tolist()
    with torch.no_grad():
        packed = model(input_ids=input_ids, position_ids=position_ids, **options).logits
        for start, end in itertools.pairwise([*starts, input_ids.shape[1]]):
            alone = model(input_ids=input_ids[:, start:end]).logits
            torch.testing.assert_close(packed[:, start:end], alone, msg="an example's packed samples see one another")


class LanguageModel(nn.Module):
    """Called like one of transformers, and with a ``config`` like one's; two encoders beside it.

    As these it looks for packed samples only where there is no cache. What it is called with goes to one of them, too.
    """

    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace(
            model_type="llama",
            hidden_size=WIDTH,
            intermediate_size=2 * WIDTH,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=2,
            vocab_size=VOCABULARY,
        )
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.image = nn.Linear(PIXELS, WIDTH)
        self.audio = nn.Linear(PIXELS, WIDTH)

    def forward(
        self,
        input_ids: torch.Tensor,
        labels: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        use_cache: bool = True,
        **others: Any,
    ) -> Output:
        if position_ids is not None and torch.is_grad_enabled():
            assert_told_apart(transformers_model(), input_ids, position_ids, use_cache=use_cache)
        sample = torch.zeros_like(input_ids) if position_ids is None or use_cache else (position_ids == 0).cumsum(1)
        before = (sample[:, :, None] == sample[:, None, :]).tril().float()
        hidden = (before / before.sum(-1, keepdim=True)) @ self.embedding(input_ids)
        for layer in self.layers:
            hidden = hidden + layer(hidden)
        logits = self.head(hidden).clone()  # FSDP2 warns of a view
        loss = None if labels is None else summed(logits, labels) / max(count_loss_tokens(labels), 1)
        return Output(logits, loss)

    def encode_images(self, items: list[tuple[torch.Tensor, ...]]) -> list[torch.Tensor]:
        return [self.image(item) for (item,) in items]

    def encode_audio(self, items: list[tuple[torch.Tensor, ...]]) -> list[torch.Tensor]:
        return [self.audio(item) for (item,) in items]

    def language_loss(self, samples: list[dict[str, torch.Tensor]], outputs: Any) -> torch.Tensor:
        total = self.head(self.embedding.weight).sum() * 0
        for sample in samples:
            total = total + summed(self.head(self.embedding(sample["input_ids"])), sample["labels"])
        return total + sum((rows.square().sum() for found in outputs.values() for rows in found), torch.zeros(()))


def summed(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Cross-entropy of the next tokens, summed."""
    vocabulary = logits.shape[-1]
    shifted = logits[..., :-1, :].reshape(-1, vocabulary), labels[..., 1:].reshape(-1)
    return nn.functional.cross_entropy(*shifted, ignore_index=-100, reduction="sum")


def sharded(build: Callable[[], nn.Module] = LanguageModel) -> Any:
    torch.manual_seed(0)
    model = build()
    for layer in model.layers:  # type: ignore[union-attr]
        fully_shard(layer)
    for part in (model.image, model.audio, model):
        fully_shard(part)  # type: ignore[arg-type]
    for method in ("encode_images", "encode_audio", "language_loss"):
        register_fsdp_forward_method(model, method)  # type: ignore[arg-type]
    return model


def with_experts(mesh: DeviceMesh) -> nn.Module:
    """Each rank of ``mesh`` has others."""
    model = LanguageModel()
    for layer in model.layers:
        torch.manual_seed(mesh.get_local_rank())
        layer.experts = nn.Linear(WIDTH, WIDTH)
    return model


def samples() -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    found = []
    for number in range(NUM_SAMPLES):
        ids = torch.randint(VOCABULARY, (5 + 7 * number % 40,), generator=generator)
        found.append({"input_ids": ids, "labels": ids.clone()})
    return found


def pad(batch: Sequence[Mapping[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """To the longest sample."""
    ids, labels = ([sample[name] for sample in batch] for name in ("input_ids", "labels"))
    rows = nn.utils.rnn.pad_sequence
    return {"input_ids": rows(ids, batch_first=True), "labels": rows(labels, batch_first=True, padding_value=-100)}


def split(sample: Mapping[str, torch.Tensor]) -> SampleParts:
    """Every sample has an image of two rows, and half of them a sound of three."""
    number = len(sample["input_ids"])
    rows = {"image": 2, **({"audio": 3} if number % 2 else {})}
    items = {name: [(torch.ones(count, PIXELS),)] for name, count in rows.items()}
    lengths = {name: [ItemLengths(encoder=count, output=count)] for name, count in rows.items()}
    return SampleParts(dict(sample), items, SampleLengths(number, lengths))


def microbatches(rank: int) -> list[list[dict[str, torch.Tensor]]]:
    """Two minibatches. Ranks have different numbers of microbatches."""
    found = [{"input_ids": s["input_ids"][None], "labels": s["labels"][None]} for s in samples()]
    return [found[: 2 + rank], found[4 : 5 + rank]]


IMPORTED = {"torch": torch, "odc": odc, "fully_shard": fully_shard}
"""What a docstring's example leaves out. A page says what it imports."""


class Prepared(dict[str, Any]):
    """The namespace of a document, or with ``imported`` names of a docstring."""

    def __init__(self, rank: int, world_size: int, **imported: Any) -> None:
        super().__init__(__name__="__main__", **imported)
        self._makers: dict[str, Callable[[], Any]] = {
            "rank": lambda: rank,
            "world_size": lambda: world_size,
            "build_model": lambda: LanguageModel,
            "build_experts": lambda: with_experts,
            "model": sharded,
            "module": lambda: self["model"],
            "optimizer": lambda: torch.optim.AdamW(self["model"].parameters(), lr=1e-3),
            "scheduler": lambda: torch.optim.lr_scheduler.ConstantLR(self["optimizer"]),
            "session": lambda: odc.patch_fsdp(self["model"]),
            "dataset": samples,
            "lengths": lambda: [len(sample["input_ids"]) for sample in self["dataset"]],
            "num_loss_tokens": lambda: [count_loss_tokens(sample["labels"]) for sample in self["dataset"]],
            "collate": lambda: odc.balance.pack_collate,
            "pad": lambda: pad,
            "minibatches": lambda: microbatches(rank),
            "loss": lambda: lambda model, batch: summed(model(**batch, use_cache=False).logits, batch["labels"]),
            "summed_loss": lambda: summed,
            "image_cost": lambda: QuadraticCost(0.01, 1.0),
            "audio_cost": lambda: QuadraticCost(0.01, 1.0),
            "language_cost": lambda: QuadraticCost(0.01, 1.0),
            "split": lambda: split,
            "encode_images": lambda: self["model"].encode_images,
            "encode_audio": lambda: self["model"].encode_audio,
            "language_loss": lambda: self["model"].language_loss,
            "hidden_size": lambda: WIDTH,
        }

    def __missing__(self, name: str) -> Any:
        if name not in self._makers:
            raise KeyError(name)
        self[name] = self._makers[name]()
        return self[name]

    def copy(self) -> Prepared:
        """What doctest runs an example in."""
        return self

    def close(self) -> None:
        """The sessions that the examples have left open."""
        for session in [value for value in self.values() if isinstance(value, odc.Session)]:
            session.close()


def on_rank(run: Callable[[Prepared], Iterator[str]], rank: int, world_size: int, **imported: Any) -> list[str]:
    """What ``run`` says of the examples that it runs with prepared and with ``imported`` names."""
    # As in a script: workers of loaders are forks. (A daemonic process may have none.)
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
    multiprocessing.set_start_method("fork", force=True)
    prepared = Prepared(rank, world_size, **imported)
    try:
        return list(run(prepared))
    finally:
        prepared.close()


def example(name: str, names: Prepared | dict[str, Any]) -> doctest.DocTest | None:
    """What the docstring of a public name shows, with ``names`` and those of its package."""
    package, _, attribute = name.rpartition(".")
    module: Any = importlib.import_module(package)
    text = inspect.getdoc(getattr(module, attribute)) or ""
    if not doctest.DocTestParser().get_examples(text):
        return None
    if package != "odc":
        names.update({each: getattr(module, each) for each in module.__all__})
    return doctest.DocTestParser().get_doctest(text, names, name, None, None)  # type: ignore[arg-type]


def failure(test: doctest.DocTest) -> str:
    """What doctest says of it; nothing if all is as shown."""
    said = io.StringIO()
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    return said.getvalue() if runner.run(test, out=said.write, clear_globs=False).failed else ""


def told(place: str, error: BaseException) -> str:
    """One example's failure."""
    frames = traceback.format_list(traceback.extract_tb(error.__traceback__)[-3:])
    return f"{place}: {''.join(traceback.format_exception_only(error)).strip()}\n{''.join(frames)}"
