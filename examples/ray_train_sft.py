"""The loop of long_context_sft.py in Ray Train's TorchTrainer: ranks are Ray's workers, and come back when one is lost.

    pip install '.[examples,ray]'
    python examples/ray_train_sft.py --num-workers 8 --weights models/qwen2.5-1.5b --data chats.jsonl --save-every 50
    python examples/ray_train_sft.py --num-workers 2 --tiny --save-every 2   # two CPU cores, no file, no download

All other options are those of long_context_sft.py. Where a worker dies, ODC has the others raise, Ray starts them all
again, up to --max-failures times, and they go on from the newest checkpoint in --out, a folder that all of them see.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import long_context_options
import ray.train
import torch
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer, get_device


def main() -> None:
    own, args = parse_args()
    gpus = torch.cuda.is_available()
    trainer = TorchTrainer(
        train_loop,
        train_loop_config=vars(args),
        torch_config=TorchConfig(backend="cpu:gloo,cuda:nccl" if gpus else "gloo"),
        scaling_config=ScalingConfig(num_workers=own.num_workers, use_gpu=gpus),
        run_config=RunConfig(
            name=args.out.name,
            storage_path=str(args.out.parent),
            failure_config=FailureConfig(max_failures=own.max_failures),
        ),
    )
    trainer.fit()
    print(f"losses and throughput: {args.out / 'result.json'}")


def train_loop(options: Mapping[str, Any]) -> None:
    """What each worker does: Ray has made the process group."""
    import long_context_sft  # here: what it imports takes seconds, and the driver needs none of it

    args = argparse.Namespace(**options)
    print(f"rank {ray.train.get_context().get_world_rank()} is process {os.getpid()}", flush=True)
    device = get_device()
    long_context_sft.train(args, device, on_step=lambda row: ray.train.report(dict(row)))


def parse_args() -> tuple[argparse.Namespace, argparse.Namespace]:
    """This script's own options, and those of long_context_sft.py."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--num-workers", type=int, default=2, help="ranks")
    parser.add_argument("--max-failures", type=int, default=3, help="how often to start again")
    own, others = parser.parse_known_args()
    args = long_context_options.parse_args(f"{__doc__}\n{parser.format_help()}", others)
    args.out = Path(args.out).resolve()  # workers have other folders
    args.resume = args.resume or "latest"
    return own, args


if __name__ == "__main__":
    main()
