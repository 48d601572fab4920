"""Charts of results: one look for all, and files that are the same when the figures are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

#: x, y, and how far the error bar reaches to either side.
Point = tuple[float, float, float]


def draw_lines(
    path: Path,
    series: Mapping[str, Sequence[Point]],
    *,
    title: str,
    x: str,
    y: str,
    limit: float | None = None,
    logarithmic: str = "",
    from_zero: bool = False,
) -> None:
    """One line a name. ``limit`` is a promise, drawn as a dashed line; ``logarithmic`` names axes ("x", "y", "xy")."""
    pyplot = _pyplot()
    from matplotlib.ticker import FuncFormatter, NullLocator

    figure, axes = pyplot.subplots(figsize=(6.4, 3.6), layout="constrained")
    for marker, (name, points) in zip("osD^vPX<>", series.items(), strict=False):
        at, means, reaches = zip(*points, strict=True)
        axes.errorbar(at, means, yerr=reaches, label=name, marker=marker, markersize=4, linewidth=1.2, capsize=2)
    if limit is not None:
        axes.axhline(limit, color="black", linewidth=0.8, linestyle="--")
    axes.set(title=title, xlabel=x, ylabel=y)
    for each in logarithmic:
        getattr(axes, f"set_{each}scale")("log")
    ticks = sorted({point[0] for points in series.values() for point in points})
    axes.set_xticks(ticks)
    axes.xaxis.set_major_formatter(
        FuncFormatter(lambda at, _: f"{at:g}" if at < 1e4 else f"{at:.0e}".replace("e+0", "e"))
    )
    axes.xaxis.set_minor_locator(NullLocator())
    if from_zero:
        axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    _save(figure, path)


def draw_bars(path: Path, groups: Mapping[str, Mapping[str, float]], *, title: str, x: str) -> None:
    """A panel for each group, with a bar for each name in it."""
    pyplot = _pyplot()
    figure, panels = pyplot.subplots(
        1, len(groups), figsize=(3.6 * len(groups), 3.6), layout="constrained", squeeze=False, sharey=True
    )
    for axes, (group, bars) in zip(panels[0], groups.items(), strict=True):
        colours = ["tab:blue" if name.startswith("fleet") else "tab:gray" for name in bars]
        drawn = axes.barh(list(bars), list(bars.values()), color=colours)
        axes.bar_label(drawn, fmt="%.3g", padding=2, fontsize=8)
        axes.set(title=group, xlabel=x)
        axes.margins(x=0.15)
        axes.grid(axis="x", alpha=0.3)
    panels[0][0].invert_yaxis()
    figure.suptitle(title, fontsize=10)
    _save(figure, path)


def draw_stacks(path: Path, groups: Mapping[str, Mapping[str, Mapping[str, float]]], *, title: str, x: str) -> None:
    """A panel for each group, with a bar for each name in it that is made of parts. All bars have the same parts."""
    pyplot = _pyplot()
    figure, panels = pyplot.subplots(
        len(groups), 1, figsize=(6.4, 0.8 + 2.6 * len(groups)), layout="constrained", squeeze=False
    )
    for (axes,), (group, bars) in zip(panels, groups.items(), strict=True):
        ends = dict.fromkeys(bars, 0.0)
        for part in next(iter(bars.values())):
            sizes = [bars[name][part] for name in bars]
            drawn = axes.barh(list(bars), sizes, left=list(ends.values()), label=part)
            widest = max(sum(bar.values()) for bar in bars.values())
            shown = [f"{size:,.0f}" if size > 0.06 * widest else "" for size in sizes]
            axes.bar_label(drawn, shown, label_type="center", fontsize=7, color="white")
            ends = {name: end + size for (name, end), size in zip(ends.items(), sizes, strict=True)}
        axes.set(title=group, xlabel=x)
        axes.invert_yaxis()
        axes.grid(axis="x", alpha=0.3)
    figure.suptitle(title, fontsize=10)
    figure.legend(*panels[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=3, fontsize=8)
    _save(figure, path)


def _pyplot() -> Any:
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams.update({"svg.hashsalt": "fleet", "svg.fonttype": "none", "font.size": 9})
    from matplotlib import pyplot

    return pyplot


def _save(figure: Any, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150, metadata={"Date": None} if path.suffix == ".svg" else None)
    _pyplot().close(figure)
