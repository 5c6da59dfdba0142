"""verl on CPU ranks: a tiny model on disk, its SFT trainer, its workers of actor and critic.

What a CPU does not have is replaced: verl's platform (:mod:`verl_cpu`), flash attention (``attn_implementation``
"sdpa"), and in FSDP1 the moves of a model to a GPU. All else is verl's own.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from typing import Any

import torch
from verl_samples import VOCAB_SIZE

FOLDER = os.environ.get("ODC_TEST_VERL", "")
IS_INSTALLED = bool(FOLDER) or importlib.util.find_spec("verl") is not None


def enter_verl(rank: int, world_size: int) -> None:
    """Make verl importable, and give it the CPU as its platform, before any of its modules asks for a device."""
    if FOLDER and FOLDER not in sys.path:
        sys.path.insert(0, FOLDER)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world_size), "LOCAL_RANK": str(rank)}
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "0"}  # workers ask for them; the ranks have met already
    import verl_cpu

    verl_cpu.enter_engine()


def save_model(folder: Path) -> Path:
    """A tiny Llama and its tokenizer, as `model.path`. In a rank: of the transformers that verl has."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    words = ["<pad>", "<eos>", *map(str, range(2, VOCAB_SIZE))]
    made = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<pad>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="<eos>")
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }} {% endfor %}"
    tokenizer.save_pretrained(folder)
    return folder


def save_prompts(folder: Path, count: int) -> None:
    """What `main_ppo` needs besides: prompts of 3 to 6 words, and a critic whose head is the same in each run."""
    import numpy as np
    import pandas as pd
    from transformers import AutoTokenizer, LlamaConfig, LlamaForTokenClassification

    config = LlamaConfig.from_pretrained(folder / "model", num_labels=1)
    LlamaForTokenClassification(config).save_pretrained(folder / "critic")
    AutoTokenizer.from_pretrained(folder / "model").save_pretrained(folder / "critic")
    rng = np.random.default_rng(2)
    words = [" ".join(map(str, rng.integers(2, VOCAB_SIZE, int(rng.integers(3, 7))))) for _ in range(count)]
    rows = {"prompt": [[{"role": "user", "content": text}] for text in words]}
    common = {"data_source": "even", "reward_model": {"style": "rule", "ground_truth": ""}}
    pd.DataFrame(rows | {name: [value] * count for name, value in common.items()}).to_parquet(
        folder / "prompts.parquet"
    )


def overrides(folder: Path) -> list[str]:
    """The command line of `python -m verl.trainer.sft_trainer`."""
    return [
        f"model.path={folder / 'model'}",
        "+model.override_config.attn_implementation=sdpa",
        "engine.use_torch_compile=False",
        "+engine.mixed_precision={param_dtype: fp32, reduce_dtype: fp32, buffer_dtype: fp32}",
        "optim.lr=1e-2",
        "data.train_batch_size=8",
        "data.max_token_len_per_gpu=24",
        "data.num_workers=0",
        "data.train_files=none",
        f"data.custom_cls.path={Path(__file__).with_name('verl_samples.py')}",
        "data.custom_cls.name=Samples",
        f"trainer.default_local_dir={folder / 'checkpoints'}",
        "trainer.logger=[]",
        "trainer.device=cpu",
        "trainer.total_epochs=2",
        "trainer.resume_mode=disable",
    ]


def sft_config(folder: Path, *more: str) -> Any:
    """What verl makes of that."""
    import hydra
    import verl.trainer

    config = Path(verl.trainer.__file__).parent / "config"
    with hydra.initialize_config_dir(str(config), version_base=None):
        return hydra.compose("sft_trainer_engine", [*overrides(folder), *more])


def training_worker(folder: Path, kind: str, loss: Any, *more: str) -> Any:
    """What updates an actor (``kind`` "language_model") or a critic ("value_model")."""
    from verl.utils.config import omega_conf_to_dataclass
    from verl.workers.config import TrainingWorkerConfig
    from verl.workers.engine_workers import TrainingWorker

    config = sft_config(folder, "optim.total_training_steps=8", *more)
    names = {"model": "model", "engine": "engine", "optimizer": "optim", "checkpoint": "checkpoint"}
    parts = {f"{name}_config": omega_conf_to_dataclass(config[key]) for name, key in names.items()}
    parts["engine_config"].max_token_len_per_gpu = parts["engine_config"].infer_max_token_len_per_gpu = 24
    worker = TrainingWorker(TrainingWorkerConfig(model_type=kind, **parts))
    worker.reset()
    worker.set_loss_fn(loss)
    return worker


def rollouts(rank: int, world_size: int, lengths: list[int], **common: Any) -> Any:
    """This rank's part of a batch of rollouts, as verl's trainer sends it: prompts of 4 tokens, padded on the left, and
    responses, padded on the right."""
    from verl.utils import tensordict_utils as tu
    from verl.workers.utils.padding import left_right_2_no_padding

    generator = torch.Generator().manual_seed(0)
    longest, prompt, count = max(lengths) - 4, 6, len(lengths)

    def numbers() -> torch.Tensor:
        return torch.randn(count, longest, generator=generator)

    mask = torch.zeros(count, prompt + longest, dtype=torch.int64)
    for i, length in enumerate(lengths):
        mask[i, prompt - 4 : prompt + length - 4] = 1
    ids = torch.randint(2, VOCAB_SIZE, mask.shape, generator=generator) * mask
    columns = {
        "input_ids": ids,
        "prompts": ids[:, :prompt],
        "responses": ids[:, prompt:],
        "attention_mask": mask,
        "response_mask": mask[:, prompt:],
        "position_ids": (mask.cumsum(1) - 1).clamp(min=0),
        "old_log_probs": 0.3 * numbers() - 4,
        "advantages": numbers(),
        "values": numbers(),
        "returns": numbers(),
    }
    size = count // world_size
    mine = {name: column[rank * size : (rank + 1) * size].clone() for name, column in columns.items()}
    mine["uid"] = [f"rollout {i}" for i in range(rank * size, (rank + 1) * size)]  # type: ignore[assignment]
    return left_right_2_no_padding(tu.get_tensordict(mine, {"temperature": 1.0, "compute_loss": True, **common}))
