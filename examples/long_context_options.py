"""The options of long_context_sft.py, and what can be said against them before anything is loaded."""

from __future__ import annotations

import argparse
import importlib.util
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers.utils import is_flash_attn_2_available

from odc.balance import law_names, policy_names, preset_names

DEFAULTS: dict[str, Any] = {"max_tokens": 32_768, "minibatch_size": 4, "steps": 1000, "lr": 1e-5, "warmup_steps": 50}
TINY: dict[str, Any] = {"max_tokens": 640, "minibatch_size": 3, "steps": 6, "lr": 1e-3, "warmup_steps": 2}
TINY_MODEL: dict[str, Any] = {
    "model_type": "qwen2",
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "tie_word_embeddings": True,
}


def parse_args(description: str | None, words: Sequence[str] | None = None) -> argparse.Namespace:
    """The options, checked; ``words`` are those of the command line by default."""
    parser = build_parser(description)
    args = parser.parse_args(words)
    for name, value in (TINY if args.tiny else DEFAULTS).items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    args.policy = args.policy or ("lb-mini" if args.odc else "lb-micro")
    args.tokenizer = args.tokenizer or args.weights
    if problem := problem_of(args):
        parser.error(problem)
    return args


def build_parser(description: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)

    def default(name: str) -> str:
        return f"(default: {DEFAULTS[name]}; with --tiny: {TINY[name]})"

    switch = argparse.BooleanOptionalAction
    model = parser.add_argument_group("model")
    model.add_argument("--model", default="qwen2.5-1.5b", metavar="NAME", help="configuration, as in odc plan --model")
    model.add_argument(
        "--weights", type=Path, help="folder of a model of transformers, in place of --model; else random"
    )
    model.add_argument("--dtype", choices=["bfloat16", "float32"], help="of compute (default: bfloat16 on GPUs)")
    model.add_argument(
        "--attention",
        choices=["auto", "flash", "flex", "sdpa"],
        default="auto",
        help="flash: variable-length flash attention, of flash-attn where it is installed, else torch's. flex: "
        "flex_attention. sdpa: sample by sample. auto: flash on GPUs with flash-attn, else sdpa",
    )
    model.add_argument("--checkpointing", action=switch, default=True, help="recompute activations in the backward")
    model.add_argument(
        "--tiny", action="store_true", help="a model and data of its own that two CPU cores train at once"
    )

    data = parser.add_argument_group("data")
    data.add_argument(
        "--data", nargs="+", help=".jsonl files, a folder of Dataset.save_to_disk, NAME[:SPLIT], or law:longalign"
    )
    data.add_argument("--eval-data", nargs="+", help="the same, for evaluation")
    data.add_argument("--tokenizer", type=Path, help="folder (default: that of --weights)")
    data.add_argument("--chat-template", help="file of a Jinja template, or chatml (default: the tokenizer's own)")
    data.add_argument("--max-tokens", type=int, help=f"most tokens of a microbatch {default('max_tokens')}")
    data.add_argument("--minibatch-size", type=int, help=f"samples of a rank and step {default('minibatch_size')}")
    data.add_argument("--workers", type=int, default=0, help="processes of a rank that read samples")
    data.add_argument("--seed", type=int, default=0, help="of random weights and of the order of the samples")

    how = parser.add_argument_group("how the ranks work together")
    how.add_argument("--odc", action=switch, default=True, help="--no-odc: FSDP2's own collectives")
    how.add_argument("--policy", choices=policy_names(), help="(default: lb-mini; with --no-odc lb-micro)")
    how.add_argument("--online", action="store_true", help="tokenize while training: a stream in place of --policy")
    how.add_argument("--pool-size", type=int, default=64, help="with --online, samples of a rank to choose from")
    how.add_argument(
        "--share-in-host", choices=["auto", "on", "off"], default="auto", help="with --odc, see odc run --share-in-host"
    )
    how.add_argument(
        "--hybrid", action="store_true", help="on several hosts: shard in each, replicas over them (HSDP); takes memory"
    )
    how.add_argument("--deterministic", action="store_true", help="with --odc: the same bits whatever the timing")

    training = parser.add_argument_group("training")
    training.add_argument("--steps", type=int, help=f"optimizer steps {default('steps')}")
    training.add_argument("--lr", type=float, help=f"highest learning rate {default('lr')}")
    training.add_argument(
        "--warmup-steps", type=int, help=f"then the learning rate is a cosine {default('warmup_steps')}"
    )
    training.add_argument("--weight-decay", type=float, default=0.0)
    training.add_argument("--max-grad-norm", type=float, default=1.0)

    out = parser.add_argument_group("output")
    out.add_argument("--out", type=Path, default=Path("runs/long-context"), help="folder, seen by all hosts")
    out.add_argument("--eval-every", type=int, default=0, help="steps between evaluations, 0: at the end only")
    out.add_argument("--save-every", type=int, default=0, help="steps between checkpoints, 0: none")
    out.add_argument("--keep", type=int, default=2, help="checkpoints to keep")
    out.add_argument("--stop-after", type=int, help="end after this step, as if out of time; --steps keeps its meaning")
    out.add_argument(
        "--resume",
        nargs="?",
        const="latest",
        help="go on from a checkpoint's folder; without a value from the newest in --out, or at the beginning",
    )
    return parser


def problem_of(args: argparse.Namespace) -> str | None:
    """What is wrong with the options, or None."""
    checks = (_problem_of_numbers, _problem_of_ranks, _problem_of_files, _problem_of_device)
    return next((problem for check in checks if (problem := check(args))), None)


def _problem_of_numbers(args: argparse.Namespace) -> str | None:
    for name in ("max_tokens", "minibatch_size", "steps", "keep", "pool_size"):
        if getattr(args, name) < 1:
            return f"--{name.replace('_', '-')} {getattr(args, name)}: expected at least 1"
    for name in ("warmup_steps", "eval_every", "save_every", "workers"):
        if getattr(args, name) < 0:
            return f"--{name.replace('_', '-')} {getattr(args, name)}: expected at least 0"
    if args.online and args.pool_size < 4 * args.minibatch_size:
        return f"--pool-size {args.pool_size}: expected at least four times --minibatch-size {args.minibatch_size}"
    return None


def _problem_of_ranks(args: argparse.Namespace) -> str | None:
    uneven = "gives ranks different numbers of microbatches, and collectives would wait for ever"
    if not args.odc and args.policy == "lb-mini":
        return f"--policy lb-mini {uneven}: leave out --no-odc, or take --policy lb-micro"
    if not args.odc and args.online:
        return f"--online {uneven}: leave out --no-odc"
    if not args.odc and args.deterministic:
        return "--deterministic is an option of ODC: leave out --no-odc"
    here, everywhere = (int(os.environ.get(name, 1)) for name in ("LOCAL_WORLD_SIZE", "WORLD_SIZE"))
    if args.hybrid and "RANK" in os.environ and (here == everywhere or everywhere % here):
        return f"--hybrid has replicas on other hosts: expected several with as many ranks, not {here} of {everywhere}"
    return None


def _problem_of_files(args: argparse.Namespace) -> str | None:
    if not args.tiny and not args.data:
        return "no data: give --data chats.jsonl, or --tiny to see it work"
    if not args.tiny and args.tokenizer is None and not all(source.startswith("law:") for source in args.data):
        return "no tokenizer: give --tokenizer FOLDER, or --weights FOLDER that has one"
    if args.tiny and (args.data or args.eval_data or args.weights or args.tokenizer):
        return "--tiny has a model, data and a tokenizer of its own: leave out the others, or --tiny"
    if args.weights is None and args.model.lower() not in preset_names():
        return f"--model {args.model}: expected one of {', '.join(preset_names())}; any other by --weights FOLDER"
    for name, file in (("weights", "config.json"), ("tokenizer", "tokenizer_config.json")):
        folder = getattr(args, name)
        if folder is not None and not (folder / file).is_file():
            return f"--{name} {folder}: there is no {file} in it"
    for source in [*(args.data or ()), *(args.eval_data or ())]:
        if source.startswith("law:"):
            if source.removeprefix("law:") not in law_names():
                return f"{source}: expected law: and one of {', '.join(law_names())}"
        elif source.endswith((".jsonl", ".json")):
            if not os.path.isfile(source):
                return f"{source}: no such file"
        elif importlib.util.find_spec("datasets") is None:
            return f"{source}: this needs datasets (pip install datasets)"
    if args.chat_template not in (None, "chatml") and not os.path.isfile(args.chat_template):
        return f"--chat-template {args.chat_template}: no such file"
    if args.resume not in (None, "latest") and not os.path.isfile(os.path.join(args.resume, "rank0.pt")):
        return f"--resume {args.resume}: not the folder of a checkpoint, such as {args.out}/step-000100"
    return None


def _problem_of_device(args: argparse.Namespace) -> str | None:
    cuda, local_rank = torch.cuda.is_available(), int(os.environ.get("LOCAL_RANK", "0"))
    if cuda and local_rank >= (num_gpus := torch.cuda.device_count()):
        return (
            f"rank {local_rank} of this host, which has {num_gpus} GPUs: start as many ranks, or hide the GPUs by "
            "CUDA_VISIBLE_DEVICES="
        )
    if cuda and args.dtype != "float32" and not torch.cuda.is_bf16_supported(including_emulation=False):
        return "this GPU has no bfloat16: give --dtype float32"
    if args.attention == "flash" and (not cuda or args.dtype == "float32"):
        return "--attention flash needs a GPU and bfloat16: take sdpa, which computes the same"
    is_older = tuple(map(int, torch.__version__.split(".")[:2])) < (2, 12)
    if args.attention == "flash" and is_older and not is_flash_attn_2_available():
        return f"--attention flash needs flash-attn, or torch 2.12 in place of {torch.__version__}: or flex, or sdpa"
    return None
