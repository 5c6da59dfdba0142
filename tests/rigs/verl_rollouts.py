"""verl's rollouts on a CPU, in place of vLLM's: one server samples with a copy of the model, and the actor's weights.

verl imports it by itself where ``VERL_USE_EXTERNAL_MODULES`` names it; then ``rollout.name=transformers`` is this.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import ray
import torch
import verl_cpu
from verl.workers.rollout.base import _ROLLOUT_REGISTRY, BaseRollout
from verl.workers.rollout.replica import RolloutReplica, RolloutReplicaRegistry, TokenOutput

verl_cpu.enter_engine()
NAME = "rollouts"
LONGEST = 24
"""Tokens of a prompt and its answer."""


class Server:
    """An actor of Ray's. What it answers to the n-th request for a prompt depends on the weights and n alone."""

    def __init__(self, path: str) -> None:
        from transformers import AutoModelForCausalLM

        self._model = AutoModelForCausalLM.from_pretrained(path)
        self._step = 0
        self._asked: Counter[tuple[int, ...]] = Counter()

    async def load(self, weights: dict[str, torch.Tensor], step: int) -> None:
        self._model.load_state_dict(weights)
        self._step = step

    async def generate(self, request_id: str, prompt_ids: list[int], **_: Any) -> TokenOutput:
        """At temperature 1, to a length that is drawn first: few fill a microbatch."""
        asked = (self._step, *prompt_ids)
        self._asked[asked] += 1
        generator = torch.Generator().manual_seed(hash((*asked, self._asked[asked])) % 2**31)
        is_long = bool(torch.rand((), generator=generator) < 0.1)
        length = LONGEST if is_long else int(torch.randint(9, 12, (), generator=generator))
        ids, log_probs = [*prompt_ids], []
        while len(ids) < length:
            with torch.no_grad():
                logits = self._model(torch.tensor([ids])).logits[0, -1].float().log_softmax(-1)
            ids.append(int(torch.multinomial(logits.exp(), 1, generator=generator)))
            log_probs.append(float(logits[ids[-1]]))
        said = {"global_steps": self._step}
        tokens = ids[len(prompt_ids) :]
        return TokenOutput(token_ids=tokens, log_probs=log_probs, stop_reason="completed", extra_fields=said)

    async def sleep(self) -> None: ...


class Replica(RolloutReplica):  # type: ignore[misc]
    """All ranks have one server."""

    async def launch_servers(self) -> None:
        self._server_address = NAME
        self._server_handle = ray.remote(Server).options(name=NAME).remote(self.model_config.path)
        self.servers = [self._server_handle]


class Rollout(BaseRollout):  # type: ignore[misc]
    """A rank's side of it."""

    async def resume(self, tags: list[str]) -> None: ...

    async def release(self) -> None: ...

    async def update_weights(self, weights: Any, global_steps: int = 0, **_: Any) -> None:
        full = {name: tensor.detach().clone() for name, tensor in weights}
        if torch.distributed.get_rank() == 0:
            await ray.get_actor(NAME).load.remote(full, global_steps)


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: Any, **_: Any) -> float:
    """The part of the words that are even numbers."""
    words = [int(word) for word in solution_str.split() if word.isdigit()]
    return sum(word % 2 == 0 for word in words) / max(len(words), 1)


_ROLLOUT_REGISTRY["transformers", "async"] = f"{__name__}.Rollout"
RolloutReplicaRegistry.register("transformers", lambda: Replica)
