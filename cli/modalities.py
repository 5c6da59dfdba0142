"""Reads ``--modality``, and the lengths of samples of several modalities and of their items."""

from __future__ import annotations

import contextlib
import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Annotated, get_args

import numpy as np

from odc.balance import CostModel, QuadraticCost, fit_cost
from odc.balance.checks import IntArray, as_lengths
from odc.balance.layout import Layout
from odc.balance.multimodal import ItemLengths, Items, Phase, SampleLengths
from odc.cli.costs import read_timings
from odc.cli.keys import COUNT, FLAG, NOT_NEGATIVE, one_of, read_keys
from odc.cli.lengths import RECORDS, holds_records, in_range, read_records
from odc.cli.records import RecordReader, item_fields
from odc.errors import shorten, shown

LANGUAGE = "language"
"""Name of the language model's phase."""

_EXAMPLE = '{"length": 812, "vision": [[1024, 256], [576, 144]]}'
_NEEDS = f"--modality needs samples, {_EXAMPLE} each, in {RECORDS}"
_PATCH = 14 * 14 * 3  # bytes of the pixels of a patch; two frames of sound, of 80 numbers each, have about as many
_LONGEST_NUMBER = 40  # characters
_COSTS = "its encoder's layers=, hidden= and ffn=, or linear= and quadratic= (FLOPs), or timings=FILE"


def _above_0(text: str) -> Fraction:
    """Exact, so that 3 / 0.1 rows are 30."""
    with contextlib.suppress(ValueError, ZeroDivisionError, OverflowError):
        value = Fraction(text)
        if 0 < float(value) < math.inf and len(text) <= _LONGEST_NUMBER:
            return value
    raise ValueError("expected a finite number above 0")


_SIZES, _COEFFICIENTS = ("layers", "hidden", "ffn"), ("linear", "quadratic")
_LAYOUTS: dict[str, Layout] = {layout: layout for layout in get_args(Layout)}


@dataclass(frozen=True)
class _Encoder:
    """The keys of ``--modality``."""

    layers: Annotated[int | None, COUNT] = None
    hidden: Annotated[int | None, COUNT] = None
    ffn: Annotated[int | None, COUNT] = None
    linear: Annotated[float | None, NOT_NEGATIVE] = None
    quadratic: Annotated[float | None, NOT_NEGATIVE] = None
    timings: Annotated[Path | None, Path] = None
    rate: Annotated[Fraction | None, _above_0] = None
    bytes: Annotated[float, _above_0] = _PATCH
    layout: Annotated[Layout, one_of(_LAYOUTS)] = "packed"
    max_tokens: Annotated[int | None, COUNT] = None
    gated: Annotated[bool, FLAG] = False
    frozen: Annotated[bool, FLAG] = False

    def says(self, keys: Sequence[str]) -> list[str]:
        """Those of these keys that were said."""
        return [key for key in keys if getattr(self, key) is not None]


@dataclass(frozen=True)
class Modality:
    """What one ``--modality`` says."""

    phase: Phase
    """Its encoder; costs in seconds."""

    about: str
    """Where the costs come from, for people."""

    rate: Fraction | None = None
    """Tokens in the encoder per row that comes out of it, for items of which only the first is known."""

    microbatch_s: float = 0.0
    """Seconds of a microbatch besides its items."""

    token_bytes: float = _PATCH
    """Bytes of an item before it is encoded, per token in its encoder."""

    @property
    def name(self) -> str:
        """The field of samples that holds its items."""
        return self.phase.name


@dataclass(frozen=True, eq=False)
class Dataset:
    """The lengths of all samples of a file."""

    tokens: IntArray
    """Of each sample's whole interleaved sequence, (num_samples,)."""

    items: dict[str, Items]
    """Of each modality."""

    about: str
    """Where the lengths come from, and how they were counted, for people."""

    def sample(self, number: int) -> SampleLengths:
        """The lengths of one sample."""
        found = {}
        for name, items in self.items.items():
            first, last = np.searchsorted(items.sample, [number, number + 1])
            pairs = zip(items.encoder[first:last].tolist(), items.output[first:last].tolist(), strict=True)
            found[name] = [ItemLengths(*pair) for pair in pairs]
        return SampleLengths(int(self.tokens[number]), found)


def parse_modalities(given: Sequence[str], flops_per_s: float) -> list[Modality]:
    """What the options say, in their order.

    Args:
        given: ``NAME:KEY=VALUE,...`` each.
        flops_per_s: what an encoder achieves.

    Raises:
        ValueError: a key is not known or said twice, a value is not what it should be, the cost is missing or said in
            two ways, or two modalities have one name.
        OSError: a file of timings cannot be read.
    """
    found = [_parse(text, flops_per_s) for text in given]
    names = [modality.name for modality in found]
    if twice := [name for name in names if names.count(name) > 1]:
        raise ValueError(f"--modality {twice[0]} is given twice: expected each modality once, with all that it needs")
    return found


def _parse(text: str, flops_per_s: float) -> Modality:
    name, _, rest = text.partition(":")
    name, option = name.strip(), f"--modality {shorten(text)}"
    if not name or "=" in name or "," in name:
        raise ValueError(f"{option}: expected a name first, e.g. --modality vision:layers=24,hidden=1024,ffn=4096")
    if name == LANGUAGE:
        raise ValueError(f"{option}: {LANGUAGE!r} is what the language model is called here: rename the field")
    parts = [part.strip() for part in rest.split(",") if part.strip()]
    keys = [part.partition("=")[0].strip() for part in parts]
    if twice := [key for key in keys if keys.count(key) > 1]:
        raise ValueError(f"{option}: {twice[0]} is said twice")
    encoder = read_keys(_Encoder, option, parts)
    cost, microbatch_s, about = _cost_of(option, encoder, flops_per_s)
    phase = Phase(name, cost, encoder.layout, encoder.max_tokens, frozen=encoder.frozen)
    extra = (f", {encoder.layout}" if encoder.layout != "packed" else "") + (", frozen" if encoder.frozen else "")
    return Modality(phase, f"{about}{extra}", encoder.rate, microbatch_s, float(encoder.bytes))


def _cost_of(option: str, encoder: _Encoder, flops_per_s: float) -> tuple[CostModel, float, str]:
    """Cost of an item in seconds, seconds of a microbatch besides, and where they come from."""
    ways = [keys for keys in (_SIZES, _COEFFICIENTS, ("timings",)) if encoder.says(keys)]
    if len(ways) != 1:
        said = " and ".join(encoder.says(keys)[0] for keys in ways)
        raise ValueError(f"{option} says {said or 'nothing'} of what it costs: expected one of {_COSTS}")
    if encoder.gated and ways[0] is not _SIZES:
        raise ValueError(f"{option}: gated goes with the sizes of an encoder: layers=, hidden= and ffn=")
    if encoder.timings is not None:
        fit = fit_cost(*read_timings(encoder.timings))
        return fit.cost, fit.microbatch_s, f"fitted to {shorten(str(encoder.timings))}"
    if ways[0] is _SIZES:
        layers, hidden, ffn = encoder.layers, encoder.hidden, encoder.ffn
        if layers is None or hidden is None or ffn is None:
            missing = next(key for key in _SIZES if key not in encoder.says(_SIZES))
            raise ValueError(f"{option} has no {missing}=: expected layers=, hidden= and ffn= of the encoder")
        cost = encoder_flops(layers, hidden, ffn, gated=encoder.gated)
        about = f"FLOPs of {layers} layers of {hidden} and {ffn}"
    else:
        if not encoder.linear and not encoder.quadratic:
            raise ValueError(f"{option}: linear and quadratic are 0: expected one of them to be more")
        cost, about = QuadraticCost(encoder.quadratic or 0.0, encoder.linear or 0.0), "FLOPs by its coefficients"
    return QuadraticCost(cost.a / flops_per_s, cost.b / flops_per_s), 0.0, about


def encoder_flops(layers: int, hidden: int, ffn: int, *, gated: bool = False) -> QuadraticCost:
    """FLOPs of the matrix products of one forward and backward of a transformer encoder, by an item's length.

    Counted as :class:`~odc.balance.TransformerCost` does, but every token attends to all of its item, and there is no
    output head. Four matrices of attention, ``hidden`` wide; two in an MLP, three if it is gated. Not counted: what
    makes patches of pixels or frames of sound, and the connector.
    """
    weights = 4 * hidden * hidden + (3 if gated else 2) * hidden * ffn
    # 2 per multiply-add; the backward as two forwards; a score, and its part of the weighted sum of values.
    return QuadraticCost(a=6.0 * layers * 2 * hidden, b=6.0 * layers * weights)


class _Column:
    """The items of one modality, as they are read: 24 bytes each."""

    def __init__(self, modality: Modality) -> None:
        self.modality = modality
        self.sample, self.encoder, self.output = array("q"), array("q"), array("q")

    def add(self, sample: int, given: object, where: str) -> int:
        """Read the items of a sample; returns the rows that they put into its sequence."""
        if given is None:
            return 0
        place = f"{where}, modality {shown(self.modality.name)}"
        if not isinstance(given, list):
            raise ValueError(
                f"{place} is {shown(given)}: expected a list of items, [encoder length, rows that come out] each, e.g. "
                "[[1024, 256]] for one image"
            )
        rows = 0
        for number, item in enumerate(given):
            encoder, output = self._read(item, f"{place}, item {number}")
            self.sample.append(sample)
            self.encoder.append(encoder)
            self.output.append(output)
            rows += output
        return rows

    def _read(self, item: object, where: str) -> tuple[int, int]:
        name, rate = self.modality.name, self.modality.rate
        if type(item) is int:
            if rate is None:
                raise ValueError(
                    f"{where} is {shown(item)}, one integer: expected [encoder length, rows that come out], or "
                    f"--modality {name}:rate=4,... for one row out of 4 tokens (one image is [[1024, 256]])"
                )
            encoder, output = item, -1
        elif isinstance(item, list) and len(item) == 2 and all(type(number) is int for number in item):
            encoder, output = item
            if output < 0:
                raise ValueError(f"{where} puts {shown(output)} rows into the sequence: expected at least 0")
            in_range(max(1, output), f"{where}, the second number")
        else:
            expected = "" if rate is None else ", or its encoder length alone"
            raise ValueError(
                f"{where} is {shown(item)}, which says no lengths: expected [encoder length, rows that come out]"
                f"{expected}"
            )
        in_range(encoder, f"{where}, the encoder length")
        limit = self.modality.phase.max_tokens
        if limit is not None and encoder > limit:
            raise ValueError(f"{where} has {encoder:,} tokens: expected at most max-tokens={limit}; raise that")
        return encoder, math.ceil(encoder / rate) if rate is not None and output < 0 else output

    def items(self) -> Items:
        """All of them."""
        columns = (self.sample, self.encoder, self.output)
        sample, encoder, output = (np.array(values, dtype=np.int64) for values in columns)
        return Items(sample, as_lengths(encoder), as_lengths(output, minimum=0), np.zeros_like(encoder))


def read_dataset(source: str, modalities: Sequence[Modality], reader: RecordReader) -> Dataset:
    """The lengths of samples of several modalities.

    Each object has its length, that of the whole interleaved sequence (``reader`` counts it as of text alone), and
    its items in a field for each modality, which may be missing. Where the length is counted from text, the rows that
    encoders make are added to it.

    Raises:
        ValueError: it is no such file, or something in it is not as it should be: line, modality and item are named.
        OSError: the file cannot be read.
    """
    path, named = Path(source), shorten(source)
    if not path.exists():
        raise ValueError(f"{shown(source)} is no file: {_NEEDS}")
    if not holds_records(path):
        raise ValueError(f"{named} holds no items of modalities: {_NEEDS}")
    columns = [_Column(modality) for modality in modalities]
    tokens = array("q")
    for record, where in read_records(path):
        length = in_range(reader.length(record, where), f"{where}, {reader.place}")
        assert isinstance(record, dict)  # or it had no length
        _check_known(record, modalities, where)
        rows = {c.modality.name: c.add(len(tokens), record.get(c.modality.name), where) for c in columns}
        if reader.counts_text:
            length += sum(rows.values())
        elif sum(rows.values()) > length:
            raise ValueError(f"{where}: {_too_many_rows(length, rows)}")
        tokens.append(length)
    if not tokens:
        raise ValueError(f"{named} holds no samples: expected at least one")
    items = {column.modality.name: column.items() for column in columns}
    _check_any(items, len(tokens), named, reader.columns)
    about = reader.about + (", and rows of encoders" if reader.counts_text else "")
    return Dataset(as_lengths(np.array(tokens, dtype=np.int64)), items, about)


def _check_known(record: dict[str, object], modalities: Sequence[Modality], where: str) -> None:
    known = [modality.name for modality in modalities]
    if unknown := [name for name in item_fields(record) if name not in known]:
        raise ValueError(
            f"{where}, modality {shown(unknown[0])}: no --modality is called so, only {', '.join(map(shown, known))}; "
            f"add --modality {shorten(unknown[0])}:..., or leave the field out"
        )


def _too_many_rows(length: int, rows: dict[str, int]) -> str:
    parts = ", ".join(f"modality {shown(name)} {number:,}" for name, number in rows.items() if number)
    return (
        f"a sequence of {length:,} tokens, into which items put {sum(rows.values()):,} rows ({parts}): expected the "
        "length of the whole interleaved sequence, text and rows"
    )


def _check_any(items: dict[str, Items], num_samples: int, source: str, fields: Sequence[str]) -> None:
    if empty := [name for name in items if not items[name].number]:
        what = " or ".join(map(shown, empty))
        raise ValueError(
            f"{source} has no items of {what} in any of its {num_samples:,} samples, whose fields are "
            f"{shorten(', '.join(map(shown, fields)))}: expected e.g. {_EXAMPLE}; without such items leave out "
            f"{' and '.join(f'--modality {name}' for name in empty)}"
        )
