"""Draws what host and device did, step by step, with and without overlap."""

from __future__ import annotations

from collections.abc import Mapping

from matplotlib.axes import Axes

from jaxspec.pictures.picture import Picture, blank
from jaxspec.pictures.record_timeline import Span, Timeline

_STEP_COLOURS = ("#4c78a8", "#f58518", "#54a24b", "#b279a2")
_WAIT_COLOUR, _OTHER_COLOUR = "#e8e8e8", "#bbbbbb"
_ROOM_FOR_NUMBER = 0.02  # of the width; narrower spans carry none


def timeline_picture(timelines: Mapping[str, Timeline], title: str = "") -> Picture:
    """Draws timelines below each other on one scale: a row for the host, one for the device.

    A colour is a step: on the host's row its dispatch and its commit, grey where the host waits.
    """
    picture, (axes,) = blank(10, 0.9 + 1.1 * len(timelines))
    longest = max(span.end_us for line in timelines.values() for span in line.spans)
    rows: list[str] = []
    for name, timeline in timelines.items():
        for who in ("host", "device"):
            for span in timeline.spans:
                if (span.what == "device") == (who == "device"):
                    _draw(axes, -len(rows), span, longest)
            rows.append(f"{name}\n{who}" if who == "host" else who)
        text = f"{timeline.step_ms:.2f} ms a step, device busy {timeline.device_share:.0%}"
        axes.text(0, 2.4 - len(rows), text, va="center", fontsize=8)
    axes.set_yticks([-row for row in range(len(rows))], rows, fontsize=8)
    axes.set_ylim(0.6 - len(rows), 0.6)
    axes.set_xlim(0, 1.01 * longest / 1e3)
    axes.set_xlabel("ms (a colour is a step; solid: dispatch, hatched: commit, grey: host waits)")
    axes.set_title(title, loc="left", fontsize=9)
    return picture


def _draw(axes: Axes, y: float, span: Span, longest: float) -> None:
    width = (span.end_us - span.start_us) / 1e3
    waits = span.what == "wait"
    colour = _STEP_COLOURS[span.step % len(_STEP_COLOURS)] if span.step >= 0 else _OTHER_COLOUR
    axes.barh(
        y,
        width,
        left=span.start_us / 1e3,
        height=0.42,
        color=_WAIT_COLOUR if waits else colour,
        edgecolor="white",
        linewidth=0.4,
        hatch="///" if span.what == "commit" else None,
    )
    if width > _ROOM_FOR_NUMBER * longest / 1e3 and not waits and span.step >= 0:
        axes.text(
            span.start_us / 1e3 + width / 2,
            y,
            str(span.step),
            ha="center",
            va="center",
            fontsize=7,
            color="white",
        )
