"""Layers 1 and 4: the long-context example, its chat data and its attention; then whole runs of it on two ranks."""

from __future__ import annotations

import importlib
import inspect
import itertools
import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.nn.attention.flex_attention import create_block_mask
from transformers import AutoConfig, AutoModelForCausalLM

from odc.bench.harness.warm_launch import WarmLauncher, output_of

pytest.importorskip("transformers", reason="the examples need transformers (extra: examples)")
pytest.importorskip("accelerate", reason="the examples need accelerate (extra: examples)")

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
sys.path.append(str(EXAMPLES))  # the examples import each other as scripts do
chat_data: Any = importlib.import_module("chat_data")
options: Any = importlib.import_module("long_context_options")
packed_attention: Any = importlib.import_module("packed_attention")

LIMIT_S = 300.0
Launch = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module")
def launch(trainer_launcher: WarmLauncher) -> Launch:
    """Runs a script of the examples on two ranks; returns what it wrote."""

    def run(out: Path, *words: str, script: str = "long_context_sft") -> dict[str, Any]:
        out.mkdir(exist_ok=True)
        codes = trainer_launcher.run(
            [str(EXAMPLES / f"{script}.py"), "--out", str(out), *words], out, ends_at_once=True
        )
        assert codes == [0, 0], output_of(out, 0).read_text() + output_of(out, 1).read_text()
        result: dict[str, Any] = json.loads((out / "result.json").read_text())
        return result

    return run


def weights(checkpoint: Path, folder: Path) -> dict[str, torch.Tensor]:
    dcp_to_torch_save(checkpoint / "sharded", folder / "whole.pt")
    model: dict[str, torch.Tensor] = torch.load(folder / "whole.pt", weights_only=True)["model"]
    return model


def test_it_trains_the_same_with_and_without_odc_and_resumes_bit_equal(launch: Launch, tmp_path: Path) -> None:
    words = ["--tiny", "--steps", "4", "--save-every", "2"]
    plain = launch(tmp_path / "plain", *words, "--no-odc")
    ours = launch(tmp_path / "odc", *words, "--deterministic")
    assert len(ours["losses"]) == 4
    assert ours["losses"] == pytest.approx(plain["losses"], rel=1e-5)
    assert ours["eval_losses"] == pytest.approx(plain["eval_losses"], rel=1e-5)
    resume = ["--resume", str(tmp_path / "odc" / "step-000002")]
    resumed = launch(tmp_path / "resumed", *words, "--deterministic", *resume)
    assert resumed["losses"] == ours["losses"][2:]
    first, second = (weights(tmp_path / name / "step-000004", tmp_path) for name in ("odc", "resumed"))
    assert len(first) > 10
    assert [name for name in first if not torch.equal(first[name], second[name])] == []


@pytest.mark.extended  # two launchers, whose ranks start cold
def test_ranks_of_two_launchers_that_pose_as_two_hosts_train_the_same(launch: Launch, tmp_path: Path) -> None:
    words = ["--tiny", "--steps", "3"]
    expected = launch(tmp_path / "one", *words, "--no-odc")
    with socket.socket() as chosen:
        chosen.bind(("127.0.0.1", 0))
        port = chosen.getsockname()[1]
    rendezvous = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}"]
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1", *rendezvous]
    command += [str(EXAMPLES / "long_context_sft.py"), "--out", str(tmp_path / "two"), *words]
    own = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    launchers = [
        subprocess.Popen(
            command,
            env={**os.environ, **own, "ODC_HOST_ID": f"host-{number}"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for number in range(2)
    ]
    try:
        said = [launcher.communicate(timeout=LIMIT_S)[0] for launcher in launchers]
    finally:
        for launcher in launchers:
            launcher.kill()
    assert [launcher.returncode for launcher in launchers] == [0, 0], said
    assert "transport tcp" in "".join(said)
    result = json.loads((tmp_path / "two" / "result.json").read_text())
    assert result["losses"] == pytest.approx(expected["losses"], rel=1e-5)


@pytest.mark.extended  # five more runs; `odc bench demo --alternatives` shows the differences
def test_communication_once_a_step_trains_as_the_demo_does(launch: Launch, tmp_path: Path) -> None:
    sizes = ["--minibatches", "3", "--hidden-size", "64", "--num-layers", "1", "--policy", "lb-mini"]
    words = [*sizes, "--data", str(tmp_path / "data")]
    expected = launch(tmp_path / "odc", *words, script="sft")["losses"]
    for name, more in (("fsdp2", []), ("odc-once", ["--odc"]), ("ddp", ["--ddp"])):
        assert launch(tmp_path / name, *words, *more, script="once_a_step")["losses"] == pytest.approx(
            expected, rel=1e-5
        )
    rounded = launch(tmp_path / "bf16", *words, "--dtype", "bf16", script="sft")["losses"]
    assert expected != rounded == pytest.approx(expected, rel=1e-3)
    ddp = launch(tmp_path / "ddp-bf16", *words, "--ddp", "--dtype", "bf16", script="once_a_step")["losses"]
    assert expected != ddp == pytest.approx(rounded, rel=1e-3)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("", "no data: give --data"),
        ("--tiny --no-odc --policy lb-mini", "collectives would wait for ever"),
        ("--tiny --no-odc --online", "leave out --no-odc"),
        ("--data nowhere.jsonl --tokenizer .", "there is no tokenizer_config.json"),
        ("--data law:nothing", "expected law: and one of"),
        ("--tiny --resume nowhere", "not the folder of a checkpoint"),
        ("--tiny --max-tokens 0", "expected at least 1"),
    ],
)
def test_wrong_options_are_refused(words: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        options.parse_args("", words.split())
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(("version", "is_refused"), [("2.11.0+cu130", True), ("2.12.1", False)])
def test_flash_attention_of_a_torch_without_it_is_refused(
    version: str, is_refused: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(options, "is_flash_attn_2_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: True)
    monkeypatch.setattr(torch, "__version__", version)
    words = ["--tiny", "--attention", "flash"]
    if not is_refused:
        assert options.parse_args("", words).attention == "flash"
        return
    with pytest.raises(SystemExit):
        options.parse_args("", words)
    assert "or torch 2.12 in place of 2.11.0+cu130: or flex" in capsys.readouterr().err
    monkeypatch.setenv("LOCAL_RANK", "2")
    with pytest.raises(SystemExit):
        options.parse_args("", ["--tiny"])
    assert "rank 2 of this host, which has 2 GPUs: start as many ranks, or hide the GPUs" in capsys.readouterr().err


def test_only_answers_have_a_loss() -> None:
    roles = [("system", "s"), ("user", "q"), ("assistant", "one"), ("user", "r"), ("assistant", "two"), ("user", "x")]
    record = {"messages": [{"role": role, "content": content} for role, content in roles]}
    sample = chat_data.encode(record, chat_data.ByteTokenizer())
    text = bytes(sample["input_ids"].tolist()).decode()
    learned = bytes(sample["labels"][sample["labels"] != chat_data.IGNORED].tolist()).decode()
    assert text.startswith("<|im_start|>system\ns<|im_end|>\n<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\none")
    assert learned == "one<|im_end|>\ntwo<|im_end|>\n"
    assert text.endswith("two<|im_end|>\n")


def test_what_a_template_shows_beside_the_messages_is_there_or_refused() -> None:
    tokenizer, tools = chat_data.ByteTokenizer(), [{"name": "f"}]
    messages: list[dict[str, Any]] = [{"role": "user", "content": "2+2"}, {"role": "assistant", "content": "4"}]
    called = [*messages[:1], {**messages[1], "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}]
    for record in ({"messages": messages, "tools": tools}, {"messages": called}):
        with pytest.raises(ValueError, match="ChatML has no place for tools, their calls, and reasoning"):
            chat_data.encode(record, tokenizer)
    tokenizer.chat_template = "own"
    tokenizer.apply_chat_template = lambda told, tools, **_: f"{tools}" + "".join(m["content"] for m in told)
    shown = bytes(chat_data.encode({"messages": messages, "tools": tools}, tokenizer)["input_ids"].tolist()).decode()
    assert shown == f"{tools}2+24"


def test_flex_attention_computes_what_sdpa_does() -> None:
    torch.manual_seed(0)
    query, key, value = torch.randn(1, 4, 9, 16), torch.randn(1, 2, 9, 16), torch.randn(1, 2, 9, 16)
    bounds = torch.tensor([0, 4, 9], dtype=torch.int32)
    args = (torch.nn.Module(), query, key, value, None)
    expected, _ = packed_attention.FUNCTIONS["sdpa"](*args, cu_seqlens=bounds)
    found, _ = packed_attention.FUNCTIONS["flex"](*args, cu_seqlens=bounds)
    torch.testing.assert_close(found, expected)
    leaking, _ = packed_attention.FUNCTIONS["flex"](*args)
    assert not torch.allclose(leaking, expected)


@pytest.mark.parametrize("lengths", [(1,), (128,), (129, 127), (5, 300, 84, 7), (40,) * 9, (512, 1, 511), (1000, 24)])
def test_blocks_of_flex_attention_are_those_that_torch_finds_in_a_whole_mask(lengths: tuple[int, ...]) -> None:
    found = packed_attention._block_mask(lengths, torch.device("cpu"))
    total = sum(lengths)
    expected = create_block_mask(found.mask_mod, None, None, total, total, device="cpu")
    assert found.shape == expected.shape
    for kind in ("kv", "full_kv", "q", "full_q"):
        counts, indices = (
            [getattr(mask, f"{kind}_{what}") for mask in (found, expected)] for what in ("num_blocks", "indices")
        )
        torch.testing.assert_close(*counts)
        for row, count in enumerate(counts[0][0, 0].tolist()):
            torch.testing.assert_close(*(each[0, 0, row, :count] for each in indices))


def tiny_model(attention: str) -> Any:
    """As transformers make it, which have functions and rules of their own for some names."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(**options.TINY_MODEL)
    config._attn_implementation = packed_attention.register(attention)
    return AutoModelForCausalLM.from_config(config).eval()


def test_flash_attention_is_called_as_torch_declares_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its kernel needs a GPU: here each sample's part is computed by SDPA, from the arguments that torch's takes."""
    varlen = pytest.importorskip("torch.nn.attention.varlen", reason="torch 2.10 and newer have it")
    declared = inspect.signature(varlen.varlen_attn)
    if "enable_gqa" not in declared.parameters:
        pytest.skip("torch 2.12 and newer have it as it is called")

    def on_cpu(*args: Any, **kwargs: Any) -> torch.Tensor:
        call = declared.bind(*args, **kwargs).arguments
        assert call["window_size"] == (-1, 0)
        assert call["cu_seq_q"].dtype == torch.int32
        bounds = call["cu_seq_q"].tolist()
        assert call["max_q"] == call["max_k"] == max(b - a for a, b in itertools.pairwise(bounds))
        parts = [
            F.scaled_dot_product_attention(
                *(call[name][a:b].transpose(0, 1)[None] for name in ("query", "key", "value")),
                is_causal=True,
                scale=call["scale"],
                enable_gqa=call["enable_gqa"],
            )
            for a, b in itertools.pairwise(bounds)
        ]
        return torch.cat(parts, dim=2)[0].transpose(0, 1)

    monkeypatch.setattr(varlen, "varlen_attn", on_cpu)
    monkeypatch.setattr(packed_attention, "is_flash_attn_2_available", lambda: False)
    torch.manual_seed(0)
    query, key, value = torch.randn(1, 4, 9, 16), torch.randn(1, 2, 9, 16), torch.randn(1, 2, 9, 16)
    args = (torch.nn.Module(), query, key, value, None)
    bounds = torch.tensor([0, 4, 9], dtype=torch.int32)
    expected, _ = packed_attention.FUNCTIONS["sdpa"](*args, cu_seqlens=bounds, scaling=0.3)
    found, _ = packed_attention.FUNCTIONS["flash"](*args, cu_seqlens=bounds, scaling=0.3)
    torch.testing.assert_close(found, expected)
    logits = [tiny_model(name)(torch.arange(9)[None], cu_seqlens=bounds).logits for name in ("flash", "sdpa")]
    torch.testing.assert_close(*logits)
    with pytest.raises(ValueError, match="dropout=0.1"):
        packed_attention.FUNCTIONS["flash"](*args, dropout=0.1)
