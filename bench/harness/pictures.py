"""The picture of a result (``--plot``). This module alone needs matplotlib."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from odc.bench.harness.benchmark import Column, Entries, Picture, Row, parts

_COLOURS = ("#1f3b5c", "#5aa469", "#c9a227", "#d1495b", "#7a9cc6", "#a56cc1")


def draw(path: Path, picture: Picture, document: Entries, title: str) -> None:
    """Draw the picture and save it; the suffix of ``path`` chooses the format."""
    figure = Figure(figsize=(9, 5), layout="constrained")
    axes = figure.add_subplot()
    series: dict[str, list[Row]] = {}
    for row in document[picture.rows]:
        if picture.value.value(row) is not None:
            series.setdefault(", ".join(str(row[key]) for key in picture.series), []).append(row)
    (_draw_bars if picture.x is None else _draw_lines)(axes, picture, series)
    axes.set_ylabel(picture.value.heading)
    axes.set_title(title, fontsize=11)
    axes.grid(alpha=0.3)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def _draw_lines(axes: Axes, picture: Picture, series: Mapping[str, list[Row]]) -> None:
    assert picture.x is not None
    colours = iter(_COLOURS * 10)
    for name, rows in series.items():
        x = [picture.x.value(row) * picture.x.scale for row in rows]
        middle, low, high = zip(*(_scaled(picture.value, row) for row in rows), strict=True)
        if picture.is_limit(rows[0]):
            axes.plot(x, middle, "--", color="#9a9a9a", label=f"{name} (limit)")
            continue
        colour = next(colours)
        axes.plot(x, middle, marker="o", markersize=3, color=colour, label=name)
        axes.fill_between(x, low, high, color=colour, alpha=0.15)
    axes.set_xscale("log", base=2)
    axes.set_xlabel(picture.x.heading)
    axes.set_ylim(bottom=0)
    axes.legend()


def _draw_bars(axes: Axes, picture: Picture, series: Mapping[str, list[Row]]) -> None:
    labels, at = [], 0
    for name, rows in series.items():
        for row in rows:
            middle, low, high = _scaled(picture.value, row)
            errors = [[max(0.0, middle - low)], [max(0.0, high - middle)]]
            axes.bar(at, middle, yerr=errors, color=_COLOURS[0], capsize=3)
            labels.append(name)
            at += 1
    axes.set_xticks(range(at), labels, rotation=30, ha="right", fontsize=8)


def _scaled(column: Column, row: Row) -> tuple[float, float, float]:
    middle, low, high = parts(column.value(row))
    return middle * column.scale, low * column.scale, high * column.scale
