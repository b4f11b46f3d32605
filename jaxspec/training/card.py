"""The README.md of a drafter: what it is for, what it was made from, how well it guesses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

from jaxspec import __version__
from jaxspec.drafters.dflash_config import DFlashConfig

_PACKAGES = ("jax", "optax", "flax")


@dataclass(frozen=True, slots=True)
class CardFacts:
    """What a card says.

    data: the meta file of the training data. settings: of the run. held_out: ratios of the last
    measurement, see `report.ratios`. device: that it was trained on. acceptance: rows of a table
    of measured accept lengths, keyed by column. remark: what else to know, a paragraph.
    """

    name: str
    target: str
    drafter: DFlashConfig
    data: Mapping[str, Any]
    settings: Mapping[str, Any]
    num_parameters: int
    steps: int
    seconds: float
    device: str
    held_out: Mapping[str, Any] | None = None
    acceptance: Sequence[Mapping[str, Any]] = ()
    remark: str = ""


def model_card(facts: CardFacts) -> str:
    """Writes the card in markdown."""
    drafter = facts.drafter
    features = ", ".join(map(str, drafter.target_layer_ids))
    lines = [
        f"# {facts.name}",
        "",
        f"A DFlash drafter for {facts.target}: it guesses {drafter.block_size - 1} tokens in one "
        "pass, which the target then verifies in one of its own. Text is the target's, whatever "
        "the drafter guesses.",
        "",
        *([facts.remark, ""] if facts.remark else []),
        f'    jaxspec generate --model {facts.target} --drafter PATH_OF_THIS_FOLDER "..."',
        "",
        "| | |",
        "| --- | --- |",
        f"| layout | DFlash as z-lab stores it, block {drafter.block_size}, bfloat16 |",
        f"| size | {facts.num_parameters / 1e6:.1f} M parameters, {drafter.num_layers} layers of "
        f"width {drafter.hidden_size} |",
        f"| reads | the target's layers {features} |",
        f"| mask token | {drafter.mask_token_id} |",
        "",
        *_data_lines(facts.data),
        *_run_lines(facts),
        *_measured_lines(facts),
    ]
    return "\n".join(lines).rstrip() + "\n"


def _data_lines(data: Mapping[str, Any]) -> list[str]:
    return [
        "## Data",
        "",
        *[f"* {key.replace('_', ' ')}: {value}" for key, value in data.items()],
        "",
    ]


def _run_lines(facts: CardFacts) -> list[str]:
    versions = [f"jaxspec {__version__}", *(f"{name} {version(name)}" for name in _PACKAGES)]
    return [
        "## Training",
        "",
        f"{facts.steps} steps in {facts.seconds / 60:.1f} minutes on {facts.device} "
        f"({', '.join(versions)}).",
        "",
        *[f"* {key.replace('_', ' ')}: {value}" for key, value in facts.settings.items()],
        "",
    ]


def _measured_lines(facts: CardFacts) -> list[str]:
    lines = ["## Accept length", ""]
    if facts.held_out is not None:
        slots = ", ".join(f"{100 * x:.1f}" for x in facts.held_out["slot_accuracy"])
        lines += [
            f"On held-out greedy answers, as training measures it: "
            f"{facts.held_out['simulated_accept_length']:.2f} tokens a verify step. Slots right, "
            f"one by one, at all positions: {slots} %.",
            "",
        ]
    if facts.acceptance:
        columns = list(facts.acceptance[0])
        lines += [
            "Served by jaxspec; tokens a verify step, the bonus token included:",
            "",
            "| " + " | ".join(columns) + " |",
            "| " + " | ".join("---" for _ in columns) + " |",
            *[
                "| " + " | ".join(_cell(row[column]) for column in columns) + " |"
                for row in facts.acceptance
            ],
            "",
        ]
    return lines


def _cell(value: Any) -> str:
    return f"{value:.2f}" if isinstance(value, float) else str(value)
