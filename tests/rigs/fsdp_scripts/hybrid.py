"""Hybrid sharding: 4 ranks on what is told to be 2 hosts."""

from __future__ import annotations

from training import loss_of, tokens, use_up

from fsdp_scripts.run import STEPS, Run, train


def plain(run: Run) -> None:
    model = run.patch(run.net())
    train(run, model)


def without_microbatches(run: Run) -> None:
    """In one minibatch a whole host has nothing to do."""
    model, optimizer = run.start()
    for step in range(STEPS):
        idle = run.rank == 1 if step % 2 else run.rank >= 2
        if not idle:
            run.backward(model, step)
        elif not run.patched:
            (loss_of(model, tokens(step, run.rank, 0)) * 0.0).backward()
        use_up(optimizer, model)
