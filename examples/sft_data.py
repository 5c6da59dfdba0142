"""The fine-tuning data: a tokenizer and tokenized samples, made on the spot in seconds and kept in a folder.

    python examples/sft_data.py --data runs/data      # optional: sft.py makes what it does not find

The text is that of ``stdlib_text.py``. Of all pairs, samples are picked so that the lengths are long-tailed
like those of real fine-tuning sets: each doubling of the length has ``TAIL`` times as many samples as the one
before.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from stdlib_text import Pair, stdlib_pairs
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

IGNORED = -100  # label of a token without loss
END = "<|end|>"  # closes an answer
TAIL = 0.5
SHORTEST = 32  # tokens

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True)
class DataConfig:
    """What the data depends on; equal configurations give equal data on one version of Python."""

    num_samples: int = 600
    max_length: int = 512
    """Longest sample in tokens; longer ones are left out."""
    vocab_size: int = 8192
    num_candidates: int = 10_000
    """Pairs to pick the samples from."""
    seed: int = 0
    python: str = platform.python_version()


class SftDataset:
    """Tokenized samples. ``dataset[i]`` has ``input_ids`` and ``labels``; prompts have no label."""

    def __init__(self, ids: IntArray, lengths: IntArray, prompt_lengths: IntArray) -> None:
        self._ids = ids
        self._ends = np.cumsum(lengths)
        self._prompt_lengths = prompt_lengths
        self.lengths = lengths
        self.num_loss_tokens = lengths - prompt_lengths

    def __len__(self) -> int:
        return int(self.lengths.size)

    def __getitem__(self, index: int) -> dict[str, IntArray]:
        end = self._ends[index]
        ids = self._ids[end - self.lengths[index] : end]
        labels = ids.copy()
        labels[: self._prompt_lengths[index]] = IGNORED
        return {"input_ids": ids, "labels": labels}

    def describe(self) -> str:
        """The distribution of lengths in one line."""
        median, p90 = np.percentile(self.lengths, [50, 90])
        return (
            f"{len(self)} samples, {self.lengths.sum()} tokens; tokens per sample: median {median:.0f}, "
            f"90th percentile {p90:.0f}, max {self.lengths.max()}"
        )


def pad_collate(samples: Sequence[Mapping[str, IntArray]]) -> dict[str, torch.Tensor]:
    """A padded batch, (num_samples, longest); of no samples one without loss."""
    if not samples:
        ids = torch.zeros(1, 2, dtype=torch.int64)
        return {"input_ids": ids, "labels": torch.full_like(ids, IGNORED), "attention_mask": torch.ones_like(ids)}
    lengths = torch.tensor([sample["input_ids"].size for sample in samples])
    ids, labels = ([torch.from_numpy(sample[name]) for sample in samples] for name in ("input_ids", "labels"))
    pad = torch.nn.utils.rnn.pad_sequence
    return {
        "input_ids": pad(ids, batch_first=True),
        "labels": pad(labels, batch_first=True, padding_value=IGNORED),
        "attention_mask": (torch.arange(int(lengths.max())) < lengths[:, None]).long(),
    }


def train_tokenizer(pairs: Sequence[Pair], vocab_size: int) -> Tokenizer:
    """A byte-level BPE tokenizer for this text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((pair.prompt + pair.answer for pair in pairs), trainer)
    return tokenizer


def tokenize(tokenizer: Tokenizer, pairs: Sequence[Pair]) -> SftDataset:
    """Prompt and answer are tokenized apart, so that the border between them is exact."""
    prompts = [encoding.ids for encoding in tokenizer.encode_batch([pair.prompt for pair in pairs])]
    answers = [encoding.ids for encoding in tokenizer.encode_batch([pair.answer for pair in pairs])]
    end = tokenizer.token_to_id(END)
    samples = [[*prompt, *answer, end] for prompt, answer in zip(prompts, answers, strict=True)]
    return SftDataset(
        np.array([token for sample in samples for token in sample], dtype=np.int64),
        np.array([len(sample) for sample in samples], dtype=np.int64),
        np.array([len(prompt) for prompt in prompts], dtype=np.int64),
    )


def pick_long_tailed(lengths: IntArray, num_samples: int, max_length: int, seed: int) -> IntArray:
    """Indices of ``num_samples`` samples of up to ``max_length`` tokens, ``TAIL`` times as many per doubling.

    Raises:
        ValueError: there are not enough samples of some length.
    """
    borders = [SHORTEST]
    while borders[-1] < max_length:
        borders.append(2 * borders[-1])
    borders[-1] = max_length + 1
    weights = TAIL ** np.arange(len(borders) - 1)
    quotas = np.floor(num_samples * weights / weights.sum()).astype(int)
    quotas[0] += num_samples - quotas.sum()
    generator = np.random.default_rng(seed)
    picked = []
    for low, high, quota in zip(borders, borders[1:], quotas, strict=False):
        found = np.flatnonzero((lengths >= low) & (lengths < high))
        if found.size < quota:
            raise ValueError(
                f"only {found.size} candidates have {low} to {high - 1} tokens, {quota} are needed: "
                "lower num_samples or raise num_candidates"
            )
        picked.append(generator.choice(found, quota, replace=False))
    return np.sort(np.concatenate(picked))


def make_data(config: DataConfig) -> tuple[Tokenizer, SftDataset]:
    """Read, train the tokenizer, tokenize, pick."""
    pairs = stdlib_pairs(config.num_candidates, config.seed)
    tokenizer = train_tokenizer(pairs[:2000], config.vocab_size)
    lengths = tokenize(tokenizer, pairs).lengths
    chosen = pick_long_tailed(lengths, config.num_samples, config.max_length, config.seed)
    return tokenizer, tokenize(tokenizer, [pairs[i] for i in chosen])


def prepare(folder: Path, config: DataConfig) -> None:
    """Write the data into ``folder`` unless the same is there. One process at a time."""
    meta = folder / "data_config.json"
    if meta.exists() and json.loads(meta.read_text()) == asdict(config):
        return
    folder.mkdir(parents=True, exist_ok=True)
    meta.unlink(missing_ok=True)
    tokenizer, dataset = make_data(config)
    tokenizer.save(str(folder / "tokenizer.json"))
    ids = np.concatenate([dataset[i]["input_ids"] for i in range(len(dataset))])
    prompt_lengths = dataset.lengths - dataset.num_loss_tokens
    np.savez(folder / "samples.npz", ids=ids, lengths=dataset.lengths, prompt_lengths=prompt_lengths)
    # Last and in one step: whoever finds it finds the rest complete.
    partial = folder / "data_config.json.partial"
    partial.write_text(json.dumps(asdict(config), indent=1))
    os.replace(partial, meta)


def load(folder: Path) -> SftDataset:
    """What :func:`prepare` wrote."""
    with np.load(folder / "samples.npz", allow_pickle=False) as arrays:
        return SftDataset(arrays["ids"], arrays["lengths"], arrays["prompt_lengths"])


def main() -> None:
    parser = argparse.ArgumentParser(description="Make the data of sft.py from the standard library's source.")
    parser.add_argument("--data", type=Path, default=Path("runs/data"), help="folder to write (default: runs/data)")
    parser.add_argument("--max-length", type=int, default=DataConfig.max_length, help="longest sample, tokens")
    args = parser.parse_args()
    prepare(args.data, DataConfig(max_length=args.max_length))
    print(load(args.data).describe())


if __name__ == "__main__":
    main()
