"""Microbatches whose samples are known by their indices: read, collated and checked. (Needs torch.)"""

from __future__ import annotations

from collections.abc import Callable, Sized
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from torch.utils import data as torch_data

from odc.balance.checks import IntArray
from odc.balance.data.loss_tokens import check_labels, check_tokens
from odc.balance.data.reader import name_samples

SampleT = TypeVar("SampleT")
SampleT_co = TypeVar("SampleT_co", covariant=True)
BatchT = TypeVar("BatchT")


class Dataset(Protocol[SampleT_co]):
    """Anything that gives samples."""

    def __getitem__(self, index: int, /) -> SampleT_co:
        """The sample of an index."""


@dataclass(frozen=True, eq=False)
class MicrobatchDataset(torch_data.Dataset[BatchT], Generic[SampleT, BatchT]):
    """A dataset of microbatches: its "index" is the list of the samples of one, its item their batch.

    Errors keep their type and are told which samples they are about.

    Raises:
        ValueError: there is not one length for each sample.
    """

    dataset: Dataset[SampleT]
    collate: Callable[[list[SampleT]], BatchT]

    num_loss_tokens: IntArray | None
    """Tokens of each sample that have a loss, to compare labels with; None: labels are not looked at."""

    lengths: IntArray
    """Tokens of each sample, as they were planned with."""

    max_tokens: int | None
    """Most tokens in one microbatch; None: the user gave no limit."""

    def __post_init__(self) -> None:
        if isinstance(self.dataset, Sized) and len(self.dataset) != self.lengths.size:
            raise ValueError(
                f"{self.lengths.size} lengths for a dataset of {len(self.dataset)} samples: expected one for each "
                "sample; to train on some of them give a torch.utils.data.Subset and the lengths of these"
            )

    def __getitem__(self, samples: list[int]) -> BatchT:
        read = [self._read(sample) for sample in samples]
        try:
            batch = self.collate(read)
        except Exception as error:
            name_samples(error, f"when samples {samples} were collated")
            raise
        if self.max_tokens is not None:
            check_tokens(batch, samples, read, self.lengths, self.max_tokens)
        if self.num_loss_tokens is not None:
            check_labels(batch, samples, int(self.num_loss_tokens[samples].sum()))
        return batch

    def _read(self, sample: int) -> SampleT:
        try:
            return self.dataset[sample]
        except Exception as error:
            name_samples(error, f"when sample {sample} was read")
            raise
