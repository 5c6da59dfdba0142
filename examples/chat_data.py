"""Conversations as training samples: JSONL or Hugging Face data, a chat template, loss on the assistant's turns only.

    python examples/chat_data.py chats.jsonl --tokenizer models/qwen2.5-1.5b   # how long samples are, what has a loss

A record is ``{"messages": [{"role": ..., "content": ...}, ...]}``, ``{"prompt": ..., "completion": ...}`` or
``{"text": ...}``. ``law:longalign`` stands for random tokens of that law's lengths (``odc plan`` lists the laws): what
a machine can do shows without data. The template is the tokenizer's own; one without a template gets ChatML.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from stdlib_text import stdlib_pairs

from odc.balance import sample_lengths

IGNORED = -100  # label of a token without loss
NUM_TINY_RECORDS = 160
NUM_LAW_RECORDS = 2000

Record = Mapping[str, Any]
Sample = dict[str, npt.NDArray[np.int64]]
Messages = Sequence[Mapping[str, str]]


class ByteTokenizer:
    """A token per byte, so that ``--tiny`` needs no file."""

    chat_template = None
    eos_token = "\0"
    name_or_path = "bytes"

    def __len__(self) -> int:
        return 256

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        return list(text.encode())


class JsonlRecords:
    """The records of JSONL files, each parsed when it is read."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self._lines: list[tuple[Path, int, bytes]] = []
        for path in paths:
            with path.open("rb") as file:
                self._lines += [(path, number, line) for number, line in enumerate(file, 1) if line.strip()]

    def __len__(self) -> int:
        return len(self._lines)

    def __getitem__(self, index: int) -> Record:
        path, number, line = self._lines[index]
        try:
            record = json.loads(line)
        except ValueError as error:
            raise ValueError(f"{path}, line {number}: not JSON: {error}") from None
        if not isinstance(record, dict):
            raise ValueError(f"{path}, line {number}: expected an object, found {type(record).__name__}")
        return record


def open_records(sources: Sequence[str]) -> Any:
    """JSONL files, one folder of ``Dataset.save_to_disk``, or one name on the Hugging Face Hub (``name:split``).

    Raises:
        FileNotFoundError: a file is missing.
    """
    if sources[0].startswith("law:"):
        lengths = sample_lengths(sources[0].removeprefix("law:"), NUM_LAW_RECORDS)
        return [{"num_tokens": int(length), "seed": seed} for seed, length in enumerate(lengths)]
    files = [Path(source) for source in sources]
    if all(file.suffix in (".jsonl", ".json") for file in files):
        if missing := [str(file) for file in files if not file.is_file()]:
            raise FileNotFoundError(f"no such data: {', '.join(missing)}")
        return JsonlRecords(files)
    if len(sources) > 1:
        raise ValueError(f"{' '.join(sources)}: expected several .jsonl files, or one data set of Hugging Face")
    import datasets

    if files[0].is_dir():
        return datasets.load_from_disk(sources[0])
    name, _, split = sources[0].partition(":")
    return datasets.load_dataset(name, split=split or "train")


def tiny_records(seed: int = 0) -> list[Record]:
    """Short conversations about Python's standard library, of very different lengths."""
    return [
        {"messages": [{"role": "user", "content": pair.prompt}, {"role": "assistant", "content": pair.answer}]}
        for pair in stdlib_pairs(NUM_TINY_RECORDS, seed)
    ]


def encode(record: Record, tokenizer: Any, max_tokens: int | None = None) -> Sample:
    """``input_ids`` and ``labels`` of a record, both (num_tokens,); ``max_tokens``: what is beyond is cut off.

    Segments with and without loss are tokenized apart, so that the border between them is exact.

    Raises:
        ValueError: the record has none of the three forms, or its template cannot tell where answers begin.
    """
    if "num_tokens" in record:
        ids = np.random.default_rng(record["seed"]).integers(0, len(tokenizer), record["num_tokens"])
        mask = np.ones(ids.size, dtype=bool)
    elif "messages" in record and "{% generation" in (tokenizer.chat_template or "").replace("{%-", "{%"):
        # The template itself marks the assistant's tokens.
        made = tokenizer.apply_chat_template(
            record["messages"],
            tools=record.get("tools"),
            tokenize=True,
            return_dict=True,
            return_assistant_tokens_mask=True,
        )
        ids, mask = np.array(made["input_ids"]), np.array(made["assistant_masks"], dtype=bool)
    else:
        parts = [(tokenizer.encode(text, add_special_tokens=False), loss) for text, loss in segments(record, tokenizer)]
        ids = np.concatenate([np.array(part, dtype=np.int64) for part, _ in parts])
        mask = np.repeat([loss for _, loss in parts], [len(part) for part, _ in parts])
    ids, mask = ids[:max_tokens].astype(np.int64), mask[:max_tokens]
    return {"input_ids": ids, "labels": np.where(mask, ids, IGNORED)}


def segments(record: Record, tokenizer: Any) -> Iterator[tuple[str, bool]]:
    """The text of a record in pieces, and whether each has a loss."""
    end = tokenizer.eos_token or ""
    if "messages" in record:
        yield from _turns(record["messages"], _renderer(tokenizer, record.get("tools")))
    elif {"prompt", "completion"} <= set(record):
        yield record["prompt"], False
        yield record["completion"] + end, True
    elif "text" in record:
        yield record["text"] + end, True
    else:
        raise ValueError(f'a record has {sorted(record)}: expected "messages", "prompt" and "completion", or "text"')


def _turns(messages: Messages, render: Callable[[Messages, bool], str]) -> Iterator[tuple[str, bool]]:
    """What follows the last answer has no loss, and is left out."""
    done = ""
    for i, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        prompt, whole = render(messages[:i], True), render(messages[: i + 1], False)
        if not (prompt.startswith(done) and whole.startswith(prompt)):
            raise ValueError(
                f"the chat template renders message {i} in another way once others follow it, so nobody can tell which "
                "tokens are the answer: mark them in the template with {% generation %}, or give --chat-template chatml"
            )
        yield prompt[len(done) :], False
        yield whole[len(prompt) :], True
        done = whole
    if not done:
        raise ValueError('a record has no message of the role "assistant", so there is nothing to learn from')


def _renderer(tokenizer: Any, tools: Any) -> Callable[[Messages, bool], str]:
    def own(messages: Messages, prompt: bool) -> str:
        text: str = tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, add_generation_prompt=prompt)
        return text

    def chatml(messages: Messages, prompt: bool) -> str:
        if tools or any(m.get(name) for m in messages for name in ("tool_calls", "reasoning_content", "thinking")):
            raise ValueError(
                "ChatML has no place for tools, their calls, and reasoning: give a tokenizer with a template"
            )
        text = "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in messages)
        return text + "<|im_start|>assistant\n" if prompt else text

    return own if tokenizer.chat_template else chatml


class TokenizedDataset:
    """What :func:`prepare` has written; samples are read from the disk when they are used."""

    def __init__(self, folder: Path) -> None:
        self._ids = np.load(folder / "ids.npy", mmap_mode="r")
        self._has_loss = np.load(folder / "has_loss.npy", mmap_mode="r")
        self.lengths: npt.NDArray[np.int64] = np.load(folder / "lengths.npy")
        self.num_loss_tokens: npt.NDArray[np.int64] = np.load(folder / "num_loss_tokens.npy")
        self._ends = np.cumsum(self.lengths)

    def __len__(self) -> int:
        return int(self.lengths.size)

    def __getitem__(self, index: int) -> Sample:
        part = slice(self._ends[index] - self.lengths[index], self._ends[index])
        ids = self._ids[part].astype(np.int64)
        return {"input_ids": ids, "labels": np.where(self._has_loss[part], ids, IGNORED)}


def prepare(folder: Path, records: Any, tokenizer: Any, max_tokens: int, source: str) -> None:
    """Tokenize all records into ``folder``, unless the same are there. Samples beyond ``max_tokens`` are left out.

    One process at a time.

    Raises:
        ValueError: a record cannot be used; the message has its number.
    """
    template = hashlib.sha256((tokenizer.chat_template or "").encode()).hexdigest()[:16]
    identity = {"source": source, "records": len(records), "tokenizer": tokenizer.name_or_path, "template": template}
    identity |= {"vocabulary": len(tokenizer), "max_tokens": max_tokens}
    meta = folder / "tokenized.json"
    if meta.exists() and json.loads(meta.read_text())["identity"] == identity:
        return
    folder.mkdir(parents=True, exist_ok=True)
    meta.unlink(missing_ok=True)
    samples = [sample for sample in _encoded(records, tokenizer) if sample["input_ids"].size <= max_tokens]
    if not samples:
        raise ValueError(f"all {len(records)} samples have more than {max_tokens} tokens: raise --max-tokens")
    labels = [sample["labels"] for sample in samples]
    np.save(folder / "ids.npy", np.concatenate([sample["input_ids"] for sample in samples]).astype(np.int32))
    np.save(folder / "has_loss.npy", np.concatenate(labels) != IGNORED)
    np.save(folder / "lengths.npy", np.array([label.size for label in labels]))
    # Nothing predicts the first token of a sample.
    np.save(folder / "num_loss_tokens.npy", np.array([int((label[1:] != IGNORED).sum()) for label in labels]))
    # Last and in one step: whoever finds it finds the rest complete.
    partial = folder / "tokenized.json.partial"
    partial.write_text(json.dumps({"identity": identity, "left_out": len(records) - len(samples)}, indent=1))
    os.replace(partial, meta)


def _encoded(records: Any, tokenizer: Any) -> Iterator[Sample]:
    for number in range(len(records)):
        try:
            sample = encode(records[number], tokenizer)
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"record {number} cannot be used: {type(error).__name__}: {error}") from error
        if sample["input_ids"].size:
            yield sample


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", nargs="+", help=".jsonl files, a folder, or a name on the Hub")
    parser.add_argument("--tokenizer", help="folder of the tokenizer; default: bytes")
    args = parser.parse_args()
    tokenizer: Any = ByteTokenizer()
    if args.tokenizer:
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(args.tokenizer)
    samples = list(_encoded(open_records(args.data), tokenizer))
    lengths = np.array([sample["input_ids"].size for sample in samples])
    with_loss = sum(int((sample["labels"] != IGNORED).sum()) for sample in samples)
    shown = ", ".join(f"{p} % up to {np.percentile(lengths, p):.0f}" for p in (50, 90, 99))
    print(
        f"{lengths.size} samples, {lengths.sum()} tokens, {100 * with_loss / lengths.sum():.0f} % with a loss; "
        f"tokens of a sample: {shown}, longest {lengths.max()}"
    )


if __name__ == "__main__":
    main()
