"""The README.md of a drafter: what it is for, what it was made from, how well it guesses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

from jaxspec import __version__
from jaxspec.drafters.dflash_config import DFlashConfig
from jaxspec.drafters.eagle_config import EagleConfig

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
    drafter: DFlashConfig | EagleConfig
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
    what, layout = _described(facts.drafter)
    lines = [
        f"# {facts.name}",
        "",
        f"{what.format(target=facts.target)}, which the target then verifies in one pass of its "
        "own. Text is the target's, whatever the drafter guesses.",
        "",
        *([facts.remark, ""] if facts.remark else []),
        f'    jaxspec generate --model {facts.target} --drafter PATH_OF_THIS_FOLDER "..."',
        "",
        "| | |",
        "| --- | --- |",
        f"| size | {facts.num_parameters / 1e6:.1f} M parameters, layers: "
        f"{facts.drafter.num_layers} of width {facts.drafter.hidden_size} |",
        *(f"| {name} | {value} |" for name, value in layout.items()),
        "",
        *_data_lines(facts.data),
        *_run_lines(facts),
        *_measured_lines(facts),
    ]
    return "\n".join(lines).rstrip() + "\n"


def _described(drafter: DFlashConfig | EagleConfig) -> tuple[str, dict[str, str]]:
    """How a drafter works, and what its checkpoint is."""
    if isinstance(drafter, EagleConfig):
        return "An EAGLE-3 head for {target}: it guesses a token a pass", {
            "layout": "EAGLE-3 as SpecForge and SGLang store it, bfloat16",
            "reads": f"the target's layers {_listed(drafter.feature_layers)}",
            "drafts from": f"{drafter.draft_vocab_size} of the target's {drafter.vocab_size} "
            "tokens",
        }
    count = drafter.block_size - 1
    return f"A DFlash drafter for {{target}}: it guesses {count} tokens in one pass", {
        "layout": f"DFlash as z-lab stores it, block {drafter.block_size}, bfloat16",
        "reads": f"the target's layers {_listed(drafter.target_layer_ids)}",
        "mask token": str(drafter.mask_token_id),
    }


def _listed(layers: Sequence[int]) -> str:
    return ", ".join(map(str, layers))


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
