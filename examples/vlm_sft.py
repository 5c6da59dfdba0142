"""Fine-tune a vision-language model on samples of which some have an image. It knows nothing of ODC.

    odc run --nproc-per-node 2 examples/vlm_sft.py --tiny                  # ranks without an image skip the encoder
    torchrun --nproc-per-node 2 examples/vlm_sft.py --tiny --dummies       # plain FSDP2: they encode an empty image
    odc run --nproc-per-node 8 examples/vlm_sft.py --model Qwen2.5-VL-3B --data samples.jsonl

FSDP2's collectives need all ranks: where one has an image and another has none, the other must run the encoder on an
empty image, or both wait for ever. With on-demand communication a rank gathers what it uses. A step in which no rank
has an image leaves the encoder as it is, as in one process; empty images would give it gradients of zero, and AdamW
would move it.

A line of the data is ``{"text": "...", "image": "cat.png"}``, with or without the image, whose path is relative to
the file. Each sample is a microbatch; the image comes before the text, and the loss is on the text.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from PIL import Image
from run_record import leave
from stdlib_text import stdlib_pairs
from torch.distributed.fsdp import fully_shard
from torch.nn.utils import clip_grad_norm_

TINY_IDS = {"image_token_id": 290, "vision_start_token_id": 291, "vision_end_token_id": 292, "video_token_id": 293}
IGNORED = -100
Sample = dict[str, torch.Tensor]


def make_data(folder: Path, num_samples: int = 64) -> Path:
    """Pairs of the standard library's texts; every fourth has a picture, but none of the last quarter."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = []
    for number, pair in enumerate(stdlib_pairs(num_samples)):
        record = {"text": pair.answer[: 40 + 13 * number % 200]}
        if number % 4 == 0 and number < 0.75 * num_samples:
            record["image"] = f"{number}.png"
            size = 28 * random.Random(number).randint(3, 12)
            Image.effect_noise((size, size), 60.0).convert("RGB").save(folder / record["image"])
        lines.append(json.dumps(record))
    path = folder / "data.jsonl"
    path.write_text("\n".join(lines))
    return path


def tiny_model(depth: int, width: int) -> Any:
    heads = {"hidden_size": width, "intermediate_size": 2 * width}
    rotary = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
    language = {"num_hidden_layers": depth, "num_attention_heads": width // 16, "num_key_value_heads": width // 32}
    language |= {"vocab_size": 300, "rope_parameters": rotary, "bos_token_id": None, "eos_token_id": None}
    vision = {"depth": 2 * depth, "num_heads": width // 16, "out_hidden_size": width, "fullatt_block_indexes": [1]}
    config = transformers.Qwen2_5_VLConfig(text_config=heads | language, vision_config=heads | vision, **TINY_IDS)
    return transformers.Qwen2_5_VLForConditionalGeneration(config)


class Samples:
    """The data, each sample encoded when it is asked for."""

    def __init__(self, path: Path, model: str | None, config: Any, dummies: bool) -> None:
        self._folder = path.parent
        self._records = [json.loads(line) for line in path.read_text().splitlines()]
        self._config, self._dummies = config, dummies
        self._tokenizer = transformers.AutoTokenizer.from_pretrained(model) if model else None
        kind = transformers.AutoImageProcessor
        self._images = kind.from_pretrained(model) if model else transformers.Qwen2VLImageProcessorPil()

    def __len__(self) -> int:
        return len(self._records)

    def text(self, index: int) -> list[int]:
        text = self._records[index]["text"]
        return self._tokenizer(text)["input_ids"] if self._tokenizer else list(text.encode())

    def __getitem__(self, index: int) -> Sample:
        text, name = self.text(index), self._records[index].get("image")
        if name is None and not self._dummies:
            return {"input_ids": torch.tensor([text]), "labels": torch.tensor([text])}
        image = Image.new("RGB", (28, 28)) if name is None else Image.open(self._folder / name).convert("RGB")
        pixels = self._images(images=[image], return_tensors="pt")
        num_tokens = int(pixels["image_grid_thw"].prod()) // self._images.merge_size**2
        config = self._config
        seen = [config.vision_start_token_id, *[config.image_token_id] * num_tokens, config.vision_end_token_id]
        # An empty image comes last, where no token sees it.
        ids = text + seen if name is None else seen + text
        ignored = [IGNORED] * len(seen)
        labels = text + ignored if name is None else [*ignored, IGNORED, *text[1:]]
        return {"input_ids": torch.tensor([ids]), "labels": torch.tensor([labels]), **pixels}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="a tiny model, and data that are made in --out")
    parser.add_argument("--model", help="a folder or a name on the Hugging Face Hub, of Qwen2.5-VL or like it")
    parser.add_argument("--data", type=Path, help="JSONL")
    parser.add_argument("--freeze-encoder", action="store_true", help="train the language model only")
    parser.add_argument("--dummies", action="store_true", help="an empty image for samples without one")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--samples-per-step", type=int, default=8, help="of all ranks")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--width", type=int, default=64, help="of the tiny model")
    parser.add_argument("--out", type=Path, default=Path("runs/vlm"))
    args = parser.parse_args()
    if args.tiny == bool(args.model and args.data):
        parser.error("expected --tiny, or --model and --data")
    dist.init_process_group()
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if args.tiny and rank == 0:
        make_data(args.out)
    dist.barrier()
    torch.manual_seed(0)
    device = torch.device("cuda", rank % torch.cuda.device_count()) if torch.cuda.is_available() else "cpu"
    kind = transformers.AutoModelForImageTextToText
    model = (tiny_model(2, args.width) if args.tiny else kind.from_pretrained(args.model)).to(device)
    model.model.visual.requires_grad_(not args.freeze_encoder)
    samples = Samples(args.data or args.out / "data.jsonl", args.model, model.config, args.dummies)
    for block in (*model.model.visual.blocks, *model.model.language_model.layers):
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], lr=args.lr)
    losses, started_s = [], 0.0
    for step in range(args.steps):
        chosen = [(step * args.samples_per_step + k) % len(samples) for k in range(args.samples_per_step)]
        num_tokens = sum(len(samples.text(index)) - 1 for index in chosen)
        total = torch.zeros((), device=device)
        for index in chosen[rank::world_size]:
            sample = {name: column.to(device) for name, column in samples[index].items()}
            loss = model(**sample, use_cache=False, num_items_in_batch=num_tokens).loss
            (loss * world_size).backward()  # FSDP takes the mean over ranks
            total += loss.detach()
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(total)
        losses.append(total.item())
        started_s = started_s or time.perf_counter()  # behind the first step, in which FSDP sets up
        if rank == 0:
            print(f"step {step + 1}/{args.steps}: loss {losses[-1]:.6f}", flush=True)
    if rank == 0:
        per_s = (args.steps - 1) * args.samples_per_step / (time.perf_counter() - started_s)
        print(json.dumps({"losses": losses, "samples_per_s": per_s}))
    leave()


if __name__ == "__main__":
    main()
