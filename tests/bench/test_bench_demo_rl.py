"""Layer 4: the demo of reinforcement learning as a user types it, small; and its script's own parts."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from odc.bench.training.demo_rl import CONFIGURATIONS
from odc.cli.app import app

ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")


@pytest.mark.extended
def test_three_ways_have_the_same_rewards_and_losses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = ["--minibatches", "4", "--max-completion", "28", "--hidden-size", "64", "--num-layers", "1"]
    monkeypatch.chdir(ROOT)
    done = CliRunner().invoke(app, ["bench", "demo-rl", "--out", str(tmp_path), "--repetitions", "1", *sizes])
    assert done.exit_code == 0, done.output
    runs = json.loads((tmp_path / "summary.json").read_text())["runs"]
    assert [row["name"] for row in runs] == [configuration.name for configuration in CONFIGURATIONS]
    for row in runs:
        assert row["losses"] == pytest.approx(runs[0]["losses"], rel=1e-5, abs=1e-6)
        assert row["rewards"] == pytest.approx(runs[0]["rewards"], abs=1e-9)
        assert 0 <= row["bubble_rate"] < 1
        assert row["moved_bytes_per_step"] == sum(row["moved_bytes"]) / 4 > 0
    for picture in ("losses.png", "timeline.png"):
        assert (tmp_path / picture).stat().st_size > 10_000


@pytest.fixture
def grpo(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    import grpo

    return grpo


def options(**changed: Any) -> Any:
    sizes = {"hidden_size": 64, "num_layers": 1, "max_completion": 100, "prompts": 4, "group_size": 6}
    return SimpleNamespace(**{**sizes, **changed})


def test_rollouts_spread_and_their_log_probabilities_are_the_models(grpo: Any) -> None:
    torch.manual_seed(0)
    model = grpo.build_model(options(), "sdpa", CPU, sharded=False).eval()
    rollouts = grpo.make_rollouts(options(), model, seed=[0, 1, 2])
    lengths = [rollout["input_ids"].numel() - grpo.PROMPT for rollout in rollouts]
    assert len(rollouts) == 24
    assert max(lengths) > 4 * min(lengths)
    advantages = torch.tensor([rollout["advantage"] for rollout in rollouts]).view(4, 6)
    torch.testing.assert_close(advantages.sum(dim=1), torch.zeros(4), atol=1e-5, rtol=0)
    for rollout in rollouts[:3]:
        ids = rollout["input_ids"]
        logps = model(ids[None]).logits[0, :-1].log_softmax(-1).gather(1, ids[1:, None])[grpo.PROMPT - 1 :, 0]
        torch.testing.assert_close(rollout["logps"], logps, atol=1e-4, rtol=1e-4)
        assert (ids[grpo.PROMPT : -1] != grpo.END).all()
    again = grpo.make_rollouts(options(), model, seed=[0, 1, 2])
    assert all(torch.equal(a["input_ids"], b["input_ids"]) for a, b in zip(rollouts, again, strict=True))


def test_a_packed_loss_is_that_of_its_rollouts(grpo: Any) -> None:
    """At the first step every ratio is 1: its gradient is that of the policy, its value minus the mean advantage."""
    torch.manual_seed(0)
    model = grpo.build_model(options(), grpo.packed_attention.register(), CPU, sharded=False)
    generator = grpo.build_model(options(), "sdpa", CPU, sharded=False)
    generator.load_state_dict(model.state_dict())
    rollouts = grpo.make_rollouts(options(prompts=1), generator, seed=[0])
    weights = torch.linspace(0.1, 0.6, 6)
    expected = 0.0
    for rollout, weight in zip(rollouts, weights, strict=True):
        expected -= float(weight) * rollout["advantage"] * (rollout["input_ids"].numel() - grpo.PROMPT)
    loss = grpo.policy_loss(model, rollouts, weights, CPU)
    assert loss.item() == pytest.approx(expected, rel=1e-4)
    apart = sum(grpo.policy_loss(model, [r], w[None], CPU) for r, w in zip(rollouts, weights, strict=True))
    torch.testing.assert_close(apart, loss, rtol=1e-4, atol=1e-5)
    assert grpo.policy_loss(model, [], torch.zeros(0), CPU).item() == 0.0
