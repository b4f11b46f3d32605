"""Draws figures of runs: accept lengths, speed, step times against their floor, bandwidth."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jaxspec.pictures.picture import Picture, blank

_GAIN, _PLAIN = "#4c78a8", "#bbbbbb"


def accept_length_picture(
    histograms: Mapping[str, Mapping[int, float]], title: str = "accept lengths"
) -> Picture:
    """Draws how often a verify step committed 1, 2, 3 ... tokens, and the mean.

    histograms: by name, how often each accept length came; counts or shares.
    """
    picture, (axes,) = blank(6, 3)
    lengths = sorted({length for counts in histograms.values() for length in counts})
    width = 0.8 / len(histograms)
    for index, (name, counts) in enumerate(histograms.items()):
        total = sum(counts.values())
        mean = sum(length * count for length, count in counts.items()) / total
        places = [length - 0.4 + (index + 0.5) * width for length in lengths]
        shares = [100 * counts.get(length, 0) / total for length in lengths]
        axes.bar(places, shares, width, label=f"{name}, mean {mean:.2f}")
    axes.set_xticks(lengths)
    axes.set_xlabel("accept length: right drafts and one token of the model's own")
    axes.set_ylabel("% of verify steps")
    axes.set_title(title, loc="left", fontsize=9)
    axes.legend(fontsize=8, frameon=False)
    return picture


def speed_picture(tokens_per_s: Mapping[str, float], title: str = "") -> Picture:
    """Draws tokens a second of several ways; the first is what the others are held against."""
    picture, (axes,) = blank(6, 0.8 + 0.5 * len(tokens_per_s))
    names, plain = list(tokens_per_s), next(iter(tokens_per_s.values()))
    speeds = list(tokens_per_s.values())
    bars = axes.barh(names, speeds, color=[_PLAIN] + [_GAIN] * (len(names) - 1))
    labels = [f" {speed:,.0f}  ({speed / plain:.2f}x)" for speed in speeds]
    axes.bar_label(bars, labels, fontsize=8)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.25 * max(speeds))
    axes.set_xlabel("tokens/s")
    axes.set_title(title, loc="left", fontsize=9)
    return picture


def sweep_picture(rows: Sequence[Mapping[str, Any]], title: str = "") -> Picture:
    """Draws how far steps are from the least they could take, by context and batch size.

    rows: as of `floor_picture`, with "context" and "ratio".
    """
    steps = list(dict.fromkeys(row["step"] for row in rows))
    picture, panels = blank(4.5 * len(steps), 3, len(steps))
    for axes, step in zip(panels, steps, strict=True):
        some = sorted((row for row in rows if row["step"] == step), key=lambda row: row["context"])
        for batch in sorted({row["batch"] for row in some}):
            mine = [row for row in some if row["batch"] == batch]
            contexts, ratios = [row["context"] for row in mine], [row["ratio"] for row in mine]
            axes.plot(contexts, ratios, marker="o", markersize=3, label=f"batch {batch}")
        axes.set_xscale("log", base=2)
        axes.set_xlabel("context, tokens")
        axes.set_ylabel("step / floor")
        axes.set_ylim(bottom=1)
        axes.set_title(f"{title}, {step}" if axes is panels[0] else step, loc="left", fontsize=9)
        axes.legend(fontsize=8, frameon=False)
    return picture


def floor_picture(rows: Sequence[Mapping[str, Any]], title: str = "") -> Picture:
    """Draws the steps of `jaxspec bench roofline --json` beside the least they could take.

    rows: with "step", "batch", "ms" and "floor_ms".
    """
    steps = list(dict.fromkeys(row["step"] for row in rows))
    picture, panels = blank(4.5 * len(steps), 3, len(steps))
    for axes, step in zip(panels, steps, strict=True):
        some = [row for row in rows if row["step"] == step]
        places = range(len(some))
        bars = axes.bar(places, [row["ms"] for row in some], color=_GAIN, label="a step")
        floors = [row["floor_ms"] for row in some]
        axes.bar(places, floors, color=_PLAIN, label="floor: memory and arithmetic")
        ratios = [f"{row['ms'] / row['floor_ms']:.2f}x" for row in some]
        axes.bar_label(bars, ratios, fontsize=8)
        axes.set_xticks(places, [f"batch {row['batch']}" for row in some], fontsize=8)
        axes.set_ylabel("ms")
        axes.set_title(f"{step} {title}", loc="left", fontsize=9)
        axes.margins(y=0.15)
        axes.legend(fontsize=7, frameon=False, loc="upper left")
    return picture


def kernel_picture(rows: Sequence[Mapping[str, Any]], title: str = "") -> Picture:
    """Draws the rows of a kernel's bench: this kernel beside XLA, share of bandwidth where known.

    rows: with "case", "implementation", and "us" or "share_of_copy_bandwidth".
    """
    has_shares = all("share_of_copy_bandwidth" in row for row in rows)
    key, factor = ("share_of_copy_bandwidth", 100) if has_shares else ("us", 1)
    cases = list(dict.fromkeys(row["case"] for row in rows))
    names = list(dict.fromkeys(row["implementation"] for row in rows))
    picture, (axes,) = blank(8, 1.0 + 0.35 * len(cases))
    height = 0.8 / len(names)
    for index, name in enumerate(names):
        found = {row["case"]: factor * row[key] for row in rows if row["implementation"] == name}
        places = [
            at - 0.4 + (index + 0.5) * height for at, case in enumerate(cases) if case in found
        ]
        colour = _PLAIN if name == "xla" else _GAIN
        axes.barh(places, [found[c] for c in cases if c in found], height, color=colour, label=name)
    axes.set_yticks(range(len(cases)), cases, fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel("% of the copy bandwidth" if has_shares else "us")
    axes.set_title(title, loc="left", fontsize=9)
    axes.legend(fontsize=8, frameon=False)
    return picture
