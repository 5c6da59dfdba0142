"""Fine-tune a tiny omni-modal model (text, images, sound) with FSDP2, each phase balanced over the ranks, or not.

    torchrun --nproc-per-node 2 examples/multimodal_sft.py --comm collective --balance none --out runs/none
    torchrun --nproc-per-node 2 examples/multimodal_sft.py --comm collective --balance all --out runs/all
    torchrun --nproc-per-node 2 examples/multimodal_sft.py --comm odc --balance all --out runs/odc

It runs on CPU ranks; weights are random and samples are made on the spot (``omni_data.py``), so nothing is downloaded.
For one seed every run starts from the same weights and sees the same minibatches, whatever the options, so their losses
can be compared.

--balance none: every rank trains on the samples that it has drawn. language: the language model's cost is shared out,
and encoders run where their sample is. all: each encoder's items are shared out, too, and what they make is moved.
"""

from __future__ import annotations

import argparse
import itertools
import json
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import omni_data
import torch
import torch.distributed as dist
from omni_data import Image, OmniDataset, Sample
from omni_model import OmniModel, costs, shard, tiny_config, tiny_omni
from run_record import Formatter, Progress, RunRecord, add_output, check_run, endless, leave, start_timeline
from torch.distributed.device_mesh import init_device_mesh

import odc
from odc.balance import MinibatchLoader, MinibatchSampler
from odc.balance.multimodal import (
    Encoder,
    InStep,
    ItemLengths,
    MultimodalLoader,
    MultimodalMinibatch,
    OnDemand,
    Orchestrator,
    Phase,
    SampleLengths,
    SampleParts,
    channels_of,
    run_minibatch,
)
from odc.timeline import Timeline

POLICIES = {"collective": "lb-micro-global", "odc": "lb-mini"}
"""Which samples the language model of each rank gets where it is balanced."""


def main() -> None:
    args = parse_args()
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(args.seed)
    config = tiny_config(args.hidden_size)
    mesh = init_device_mesh("cpu", (world_size,))
    model = shard(tiny_omni(args.seed, config), mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    orchestrator = build_orchestrator(args, config, world_size)
    session = odc.patch_fsdp(model) if args.comm == "odc" else None
    items = None
    if session is not None and world_size > 1:
        items = session.exchange_items(channels_of(orchestrator.modalities), capacity_bytes=1 << 20)
    mover = OnDemand(items, rank) if items else InStep()
    timeline = start_timeline(model, session) if args.timeline else None
    if timeline and items:
        items.start_timeline(timeline)
    record = RunRecord(args.untimed, timeline)
    encoders = {
        "image": Encoder(
            lambda found: model.encode_images([Image(*item) for item in found]), args.hidden_size, dummy=dummy_image
        ),
        "audio": Encoder(
            lambda found: model.encode_audio([features for (features,) in found]), args.hidden_size, dummy=dummy_audio
        ),
    }

    loader = MultimodalLoader(build_loader(args, config, rank, world_size), split, orchestrator, rank)
    with Progress(args.minibatches) as progress:
        for minibatch in itertools.islice(endless(loader), args.minibatches):
            with record.minibatch_of(minibatch.num_samples, num_tokens(minibatch)):
                with session.minibatch() if session else nullcontext():
                    losses = run_minibatch(
                        minibatch, encoders, language(model, minibatch), mover=mover, span=spans(timeline)
                    )
                loss = torch.stack([torch.zeros(()), *losses]).sum()
                with record.span("finish", "loss"):
                    dist.all_reduce(loss)
                torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
                if len(record.losses) + 1 == args.minibatches and args.gradients:
                    save_gradients(model, args.out)
                optimizer.step()
                optimizer.zero_grad()
            record.losses.append(loss.item() / world_size)
            progress.show(record.losses)

    record.save(args.out)
    save_moves(args.out, mover, loader)
    for part in (loader, items, session):
        if part is not None:
            part.close()
    leave()


def language(model: OmniModel, minibatch: MultimodalMinibatch) -> Any:
    """What runs one microbatch of the language model: the loss, scaled so that all add up to the mean over tokens."""

    def loss(samples: list[dict[str, torch.Tensor]], outputs: dict[str, list[torch.Tensor]]) -> torch.Tensor:
        if not samples:  # under collectives every rank goes through as many microbatches
            return model.language([omni_data.dummy_sequence()], {}) * 0
        return model.language([sample["sequence"] for sample in samples], outputs) * minibatch.loss_scale

    return loss


def split(sample: Sample) -> SampleParts:
    """A sample as the orchestrator wants it: its sequence, what encoders read, and the lengths of all that."""
    measured = omni_data.lengths(sample)
    items = {"image": [tuple(image) for image in sample.images], "audio": [(features,) for features in sample.audio]}
    lengths = {name: [ItemLengths(*item) for item in found] for name, found in measured.items.items()}
    return SampleParts({"sequence": sample.sequence}, items, SampleLengths(measured.length, lengths))


def dummy_image() -> tuple[torch.Tensor, ...]:
    return tuple(omni_data.dummy_image())


def dummy_audio() -> tuple[torch.Tensor, ...]:
    return (omni_data.dummy_audio(),)


def num_tokens(minibatch: MultimodalMinibatch) -> int:
    """Of this rank's samples."""
    return sum(part.lengths.length for part in minibatch.parts)


def build_orchestrator(args: argparse.Namespace, config: Any, world_size: int) -> Orchestrator:
    """Phases and their costs in FLOPs. The loader shares out the language model's samples."""
    cost = costs(config)
    row_bytes = 4 * args.hidden_size  # float32
    phases = [
        Phase(name, cost[name], max_tokens=args.max_encoder_tokens, row_bytes=row_bytes) for name in ("image", "audio")
    ]
    return Orchestrator(
        phases,
        Phase("language", cost["language"], max_tokens=args.max_tokens),
        world_size,
        policy="local" if args.balance == "none" else None,
        balance_encoders=args.balance == "all",
        comm=args.comm,
    )


def build_loader(args: argparse.Namespace, config: Any, rank: int, world_size: int) -> MinibatchLoader[Any, Any]:
    dataset = OmniDataset(args.samples, args.seed)
    measured = [dataset.lengths(index).length for index in range(args.samples)]
    answers = [len(dataset.recipe(index).answer) + 1 for index in range(args.samples)]
    sampler = MinibatchSampler(
        measured,
        world_size=world_size,
        minibatch_size=args.minibatch_size,
        cost=costs(config)["language"],
        policy="none" if args.balance == "none" else POLICIES[args.comm],
        max_tokens=args.max_tokens,
        seed=args.seed,
    )
    return MinibatchLoader(dataset, sampler, list, rank, num_loss_tokens=answers)


def spans(timeline: Timeline | None) -> Any:
    """Records the phases in the timeline."""

    def span(kind: str, name: str) -> AbstractContextManager[object]:
        return timeline.span("phase", f"{kind} {name}") if timeline else nullcontext()

    return span


def save_gradients(model: OmniModel, folder: Path) -> None:
    """All gradients of this step, whole, for comparisons. Collective."""
    folder.mkdir(parents=True, exist_ok=True)
    whole = {
        name: parameter.grad.full_tensor()  # type: ignore[attr-defined]
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }
    if dist.get_rank() == 0:
        torch.save(whole, folder / "gradients.pt")


def save_moves(folder: Path, mover: InStep | OnDemand, loader: MultimodalLoader[Any]) -> None:
    """Exchanges and bytes of this rank, by channel, and what planning took in the loader's thread."""
    moved = {"cargoes": mover.moved.cargoes, "received_bytes": mover.moved.received_bytes}
    document = {**moved, "planning_s": loader.planning_s}
    (folder / f"moved-rank{mover.rank}.json").write_text(json.dumps(document))


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=Formatter)
    how = parser.add_argument_group("how the ranks work together")
    how.add_argument("--comm", choices=["collective", "odc"], default="odc", help="FSDP2 as it is, or ODC")
    how.add_argument("--balance", choices=["none", "language", "all"], default="all", help="which phases are balanced")
    data = parser.add_argument_group("data")
    data.add_argument("--minibatches", type=int, default=20, help="optimizer steps to run")
    data.add_argument("--minibatch-size", type=int, default=4, help="samples per rank and step")
    data.add_argument("--samples", type=int, default=2000, help="samples of an epoch")
    data.add_argument("--max-tokens", type=int, default=2048, help="of a language microbatch")
    data.add_argument("--max-encoder-tokens", type=int, default=8192, help="of an encoder's")
    model = parser.add_argument_group("model and optimizer")
    model.add_argument("--hidden-size", type=int, default=64, help="a multiple of 32")
    model.add_argument("--lr", type=float, default=3e-4, help="learning rate")
    model.add_argument("--seed", type=int, default=0, help="of the weights and of the samples")
    out = add_output(parser, "runs/multimodal_sft")
    out.add_argument("--gradients", action="store_true", help="also write all gradients of the last step: gradients.pt")
    args = parser.parse_args()
    check_run(parser, args)
    return args


if __name__ == "__main__":
    main()
