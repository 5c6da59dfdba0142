"""Layer 2: small Python processes, no ranks. The data, the attention and the child processes of the demo."""

from __future__ import annotations

import hashlib
import importlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from odc.balance import count_loss_tokens, pack_collate
from odc.bench.training.runs import ChildError, run_child

pytest.importorskip("transformers", reason="the examples need transformers and tokenizers (extra: examples)")
pytest.importorskip("tokenizers", reason="the examples need transformers and tokenizers (extra: examples)")

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
sys.path.append(str(EXAMPLES))  # the examples import each other as scripts do
stdlib_text: Any = importlib.import_module("stdlib_text")
sft_data: Any = importlib.import_module("sft_data")
packed_attention: Any = importlib.import_module("packed_attention")
sft: Any = importlib.import_module("sft")

CONFIG = sft_data.DataConfig(num_samples=150, num_candidates=4000)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made: Path = tmp_path_factory.mktemp("data")
    sft_data.prepare(made, CONFIG)
    return made


def test_a_definition_gives_its_docstring_and_its_body() -> None:
    method = '    def put(self, x: int) -> None:\n        """Put it into the box."""\n        self += [x]\n'
    source = f"class Box(list):\n{method}"
    pairs = list(stdlib_text.pairs_of_source("boxes", source))
    prompt = "# boxes\ndef put(self, x: int) -> None:\n# {}:\n"
    assert stdlib_text.Pair(prompt.format("describe"), "Put it into the box.") in pairs
    assert stdlib_text.Pair(prompt.format("write"), '"""Put it into the box."""\nself += [x]') in pairs
    assert [pair.prompt for pair in pairs if "class" in pair.prompt] == ["# boxes\nclass Box(list):\n# write:\n"]


def test_text_is_the_same_in_another_process_and_imports_nothing() -> None:
    script = (
        "import sys, hashlib, stdlib_text as s; before = set(sys.modules); p = s.stdlib_pairs(500, seed=3); "
        "print(hashlib.sha256(repr(p).encode()).hexdigest(), *set(sys.modules) - before)"
    )
    environment = {**os.environ, "PYTHONPATH": str(EXAMPLES), "PYTHONHASHSEED": "1"}
    done = subprocess.run(
        [sys.executable, "-c", script],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    )
    digest, *imported = done.stdout.split()
    pairs = stdlib_text.stdlib_pairs(500, seed=3)
    assert digest == hashlib.sha256(repr(pairs).encode()).hexdigest()
    # sysconfig loads its own data on first use.
    assert not [module for module in imported if not module.startswith("_sysconfigdata")]


def test_lengths_are_long_tailed_and_limited(folder: Path) -> None:
    lengths = sft_data.load(folder).lengths
    assert len(lengths) == CONFIG.num_samples
    assert lengths.max() <= CONFIG.max_length
    assert lengths.max() / np.median(lengths) >= 6


def test_each_doubling_of_the_length_has_its_quota() -> None:
    lengths = np.arange(1, 4000)
    picked = lengths[sft_data.pick_long_tailed(lengths, 40, 100, seed=0)]
    counts = np.histogram(picked, bins=[32, 64, 101])[0]
    assert counts.tolist() == [27, 13]  # 1 to TAIL = 0.5, nothing below 32 or above 100
    with pytest.raises(ValueError, match="only 32 candidates have 32 to 63 tokens"):
        sft_data.pick_long_tailed(lengths, 500, 100, seed=0)


def test_only_the_answer_has_a_loss() -> None:
    pairs = [stdlib_text.Pair("def add(a, b):\n# write:\n", "return a + b"), stdlib_text.Pair("x\n", "é" * 5)]
    tokenizer = sft_data.train_tokenizer(pairs, 300)
    dataset = sft_data.tokenize(tokenizer, pairs)
    for i, pair in enumerate(pairs):
        ids, labels = dataset[i]["input_ids"], dataset[i]["labels"]
        has_loss = labels != sft_data.IGNORED
        assert (labels[has_loss] == ids[has_loss]).all()
        text = tokenizer.decode(ids[has_loss].tolist(), skip_special_tokens=False)
        assert text == pair.answer + sft_data.END
        assert tokenizer.decode(ids[~has_loss].tolist()) == pair.prompt
    packed = pack_collate([dataset[0], dataset[1]])
    assert count_loss_tokens(packed["labels"]) == dataset.num_loss_tokens.sum()


def test_data_is_kept_until_its_configuration_changes(folder: Path) -> None:
    samples = folder / "samples.npz"
    before = samples.stat().st_mtime_ns
    sft_data.prepare(folder, CONFIG)
    assert samples.stat().st_mtime_ns == before
    (folder / "data_config.json").unlink()  # as if the process had died before it was done
    expected = sft_data.load(folder)[0]["input_ids"]
    sft_data.prepare(folder, CONFIG)
    assert samples.stat().st_mtime_ns != before
    assert (sft_data.load(folder)[0]["input_ids"] == expected).all()


def tiny_model(attention: str) -> Any:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=50,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        attn_implementation=attention,
    )
    return Qwen2ForCausalLM(config)


def test_packed_logits_and_gradients_are_those_of_the_samples_alone() -> None:
    generator = torch.Generator().manual_seed(1)
    samples = [{"input_ids": torch.randint(50, (length,), generator=generator)} for length in (5, 1, 9)]
    batch = pack_collate(samples)
    batch.pop("labels")
    packed_model, plain_model = tiny_model(packed_attention.register()), tiny_model("eager")
    assert packed_model.config._attn_implementation == "packed_sdpa"
    packed = packed_model(**batch, use_cache=False).logits
    alone = [plain_model(input_ids=s["input_ids"][None], use_cache=False).logits for s in samples]
    torch.testing.assert_close(packed, torch.cat(alone, dim=1), rtol=1e-4, atol=1e-5)
    packed.square().sum().backward()
    sum(logits.square().sum() for logits in alone).backward()
    for ours, theirs in zip(packed_model.parameters(), plain_model.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-4)


def test_a_dummy_microbatch_has_no_loss_and_no_gradient() -> None:
    model = tiny_model(packed_attention.register())
    loss = sft.answer_loss(model, pack_collate([]))
    loss.backward()
    assert loss.item() == 0
    assert all(parameter.grad.count_nonzero() == 0 for parameter in model.parameters())


@pytest.mark.parametrize("bounds", [[0, 3], [0, 3, 3, 4], [1, 4], [0, 5, 4]])
def test_bounds_that_do_not_cover_the_sequence_are_an_error(bounds: list[int]) -> None:
    x = torch.zeros(1, 2, 4, 8)
    with pytest.raises(ValueError, match="expected to ascend from 0 to 4"):
        packed_attention.FUNCTIONS["sdpa"](torch.nn.Module(), x, x, x, None, cu_seqlens=torch.tensor(bounds))


def test_a_failed_child_is_an_error_with_its_stderr(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "raise SystemExit('no more memory')"]
    with pytest.raises(ChildError, match="ended with 1") as failure:
        run_child(command, tmp_path)
    assert "no more memory" in str(failure.value)
    run_child([*command[:2], "pass"], tmp_path)
