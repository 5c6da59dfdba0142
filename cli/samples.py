"""Which of the samples that were read are used, and whether they will do."""

from __future__ import annotations

import numpy as np

from odc.balance import law_names
from odc.balance.checks import IntArray
from odc.balance.random_numbers import random_generator


def shuffled(num_samples: int, seed: int) -> IntArray:
    """The indices of all samples in random order."""
    return np.argsort(random_generator("some", seed).random_raw(num_samples), kind="stable")


def draw(num_samples: int, most: int, seed: int) -> IntArray:
    """The indices of at most so many of the samples, drawn at random, rising."""
    if num_samples <= most:
        return np.arange(num_samples)
    return np.sort(shuffled(num_samples, seed)[:most])


def some_of(lengths: IntArray, most: int, seed: int) -> IntArray:
    """At most so many of the samples, drawn at random."""
    return lengths[draw(lengths.size, most, seed)]


def cut(lengths: IntArray, max_tokens: int | None, *, truncate: bool) -> IntArray:
    """The lengths, none above ``max_tokens``.

    Raises:
        ValueError: a sample is longer and is not to be truncated, or there is nothing to truncate to.
    """
    if max_tokens is None:
        if truncate:
            raise ValueError("--truncate needs --max-tokens: the length to cut samples to")
        return lengths
    if truncate:
        return np.minimum(lengths, max_tokens)
    if too_long := int((lengths > max_tokens).sum()):
        raise ValueError(
            f"{too_long:,} of {lengths.size:,} samples are longer than --max-tokens {max_tokens}: raise --max-tokens "
            f"to {lengths.max()}, the longest sample, or cut them with --truncate"
        )
    return lengths


def check_enough(num_samples: int, source: str, minibatch_size: int, world_size: int, wanted_by: str = "") -> None:
    """Check that there is at least one minibatch.

    Args:
        num_samples: how many there are.
        source: where they are from: of a law, there can be more.
        minibatch_size: samples per rank.
        world_size: number of ranks.
        wanted_by: which of many settings wants so many, for people.

    Raises:
        ValueError: there is none.
    """
    if num_samples < minibatch_size * world_size:
        more = ", or raise --samples" if source in law_names() else ""
        raise ValueError(
            f"{num_samples} samples make no minibatch of {minibatch_size} samples on each of {world_size} ranks"
            f"{wanted_by}: lower --minibatch-size or --world-size{more}"
        )


def describe(lengths: IntArray) -> str:
    """How many, and how long."""
    shortest, median, longest = np.percentile(lengths, [0, 50, 100]).astype(int)
    return (
        f"{lengths.size:,} samples, {lengths.sum():,} tokens; shortest {shortest:,}, median {median:,}, longest "
        f"{longest:,}"
    )
