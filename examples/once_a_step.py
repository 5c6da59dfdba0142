"""Communication once a step, not once a microbatch, where memory allows: the fine-tuning of sft.py.

    torchrun --nproc-per-node 2 examples/once_a_step.py --policy lb-mini --out runs/fsdp2-once
    torchrun --nproc-per-node 2 examples/once_a_step.py --odc --policy lb-mini --out runs/odc-once
    torchrun --nproc-per-node 2 examples/once_a_step.py --ddp --policy lb-mini --out runs/ddp
    torchrun --nproc-per-node 2 examples/once_a_step.py --compute-alone --policy lb-mini --out runs/alone

All other options are those of sft.py, but for --comm and --stream; weights, minibatches and result.json are its, too,
so losses and times can be compared. Within a step each rank has whole parameters and whole gradients: memory that FSDP
and ODC do not need, and that a model which must be sharded does not leave. Ranks then meet in the first forward and in
the last backward of a step only, so they may run different numbers of microbatches (one at least). --odc is the same
FSDP2 model with ODC in it: it communicates as little, and no rank waits for another before the step ends.
"""

from __future__ import annotations

import argparse
import itertools
from contextlib import AbstractContextManager, nullcontext

import sft
import torch
import torch.distributed as dist
from run_record import Progress, RunRecord, endless, leave, start_timeline
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LambdaLR

import odc
from odc.balance import pack_collate
from odc.timeline import Timeline


def main() -> None:
    own, args = parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(args.seed)  # the same weights on every rank and in every run

    model = sft.build_model(args, sharded=not (own.ddp or own.compute_alone))
    config = model.config
    trained = DistributedDataParallel(model) if own.ddp else model
    session = odc.patch_fsdp(model) if own.odc else None
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.01)
    scheduler = LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / args.warmup_steps))
    # To the loader "odc" means that ranks meet once per step, in whichever way.
    minibatches = endless(sft.build_loader(args, config, comm="odc"))

    timeline = None
    if args.timeline:  # DDP's communication goes beside its backward, and shows as part of it
        timeline = start_timeline(model, session) if isinstance(model, FSDPModule) else Timeline(dist.get_rank())
    sft.warm_up(trained, session, args.max_tokens)
    record = RunRecord(args.untimed, timeline)

    with Progress(args.minibatches) as progress:
        for minibatch in itertools.islice(minibatches, args.minibatches):
            with record.minibatch(minibatch):
                loss_sum = torch.zeros(())
                microbatches = minibatch.microbatches or [pack_collate([])]  # without loss, but with the collectives
                for number, microbatch in enumerate(record.microbatches(microbatches), 1):
                    with synchronized(trained, last=number == len(microbatches)):
                        loss = sft.answer_loss(trained, microbatch)
                        (loss * minibatch.loss_scale).backward()
                    loss_sum += loss.detach()
                with record.span("finish", "loss"):
                    dist.all_reduce(loss_sum)
                torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            record.losses.append(loss_sum.item() / minibatch.num_loss_tokens)
            progress.show(record.losses)
            if args.samples and record.num_samples >= args.samples:
                break

    minibatches.close()
    record.save(args.out)
    if session:
        session.close()
    leave()


def synchronized(model: torch.nn.Module, *, last: bool) -> AbstractContextManager[None]:
    """Around a microbatch: gradients are reduced, and parameters sharded again, in the last of a step only."""
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(last)
        model.set_reshard_after_forward(False)
        model.set_reshard_after_backward(last)
    elif isinstance(model, DistributedDataParallel) and not last:
        return model.no_sync()
    return nullcontext()


def parse_args() -> tuple[argparse.Namespace, argparse.Namespace]:
    """This script's own options, and those of sft.py."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    way = parser.add_mutually_exclusive_group()
    way.add_argument("--odc", action="store_true", help="on-demand communication in place of FSDP2's collectives")
    way.add_argument("--ddp", action="store_true", help="DistributedDataParallel with no_sync in place of FSDP2")
    way.add_argument(
        "--compute-alone",
        action="store_true",
        help="each rank trains a model of its own: what the work takes without communication, but for the sum of the "
        "loss. Losses are others",
    )
    own, others = parser.parse_known_args()
    args = sft.parse_args(others)
    if args.comm != "odc" or args.stream:
        parser.error("--comm and --stream are for sft.py; here ranks meet once a step, with --odc over ODC")
    return own, args


if __name__ == "__main__":
    main()
