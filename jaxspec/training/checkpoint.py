"""Keeps a run on disk, so that one that was cut off goes on as if it had not been."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import jax
import orbax.checkpoint as ocp

from jaxspec.training.config import TrainingError
from jaxspec.training.step import TrainState

_KEEP = 2
_MARGIN_BYTES = 1 << 20


class Saved(NamedTuple):
    """A checkpoint: the arrays, and what the host needs to go on (plain JSON values)."""

    state: TrainState
    notes: dict[str, Any]


class Checkpoints:
    """The checkpoints of a run in one folder; the last two are kept.

    One is complete or it is not there: orbax writes beside it and renames.
    """

    def __init__(self, folder: Path):
        self._folder = folder.absolute()
        # orbax tells of every stage of every write.
        logging.getLogger("absl").setLevel(logging.ERROR)
        try:
            self._manager = ocp.CheckpointManager(
                self._folder,
                options=ocp.CheckpointManagerOptions(
                    max_to_keep=_KEEP, enable_async_checkpointing=False, create=True
                ),
            )
        except OSError as error:
            raise TrainingError(
                f"{folder} cannot hold checkpoints ({error.strerror}); choose another output"
            ) from None

    @property
    def last_step(self) -> int | None:
        """Steps done at the last checkpoint; None where there is none."""
        return self._manager.latest_step()

    def save(self, state: TrainState, notes: dict[str, Any]) -> None:
        """Writes a checkpoint.

        Raises:
            TrainingError: it does not fit on the disk, or cannot be written; the last one stands.
        """
        step = int(state.step)
        if step == self.last_step:
            return
        needed = sum(leaf.nbytes for leaf in jax.tree.leaves(state)) + _MARGIN_BYTES
        free = shutil.disk_usage(self._folder).free
        if free < needed:
            raise self._unwritten(
                step, f"it needs {needed / 1e6:.1f} MB and {free / 1e6:.1f} MB are free"
            )
        args = ocp.args.Composite(
            state=ocp.args.StandardSave(state), notes=ocp.args.JsonSave(notes)
        )
        try:
            self._manager.save(step, args=args)
        except (OSError, ValueError) as error:  # tensorstore reports a full disk as ValueError
            raise self._unwritten(step, str(error).splitlines()[0]) from error

    def restore(self, like: TrainState) -> Saved:
        """Reads the last checkpoint; `like` has its shapes.

        Raises:
            TrainingError: there is none, or it does not fit.
        """
        step = self.last_step
        if step is None:
            raise TrainingError(
                f"{self._folder} holds no checkpoint to resume from; run without --resume"
            )
        abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, like)
        args = ocp.args.Composite(
            state=ocp.args.StandardRestore(abstract), notes=ocp.args.JsonRestore()
        )
        try:
            restored = self._manager.restore(step, args=args)
        except (OSError, ValueError, KeyError) as error:
            raise TrainingError(
                f"checkpoint {step} in {self._folder} cannot be read "
                f"({str(error).splitlines()[0]}); remove its folder to go on from the one before"
            ) from error
        return Saved(restored["state"], restored["notes"])

    def close(self) -> None:
        """Waits for whatever is being written."""
        self._manager.close()

    def _unwritten(self, step: int, why: str) -> TrainingError:
        intact = (
            "no checkpoint had been written"
            if self.last_step is None
            else f"checkpoint {self.last_step} is intact"
        )
        return TrainingError(
            f"checkpoint {step} could not be written to {self._folder}: {why}; {intact}, free "
            "some space and run again with --resume"
        )


def check_same_run(saved: dict[str, Any], now: dict[str, Any]) -> None:
    """Raises TrainingError where a resumed run would not be the one that was cut off."""
    for name, value in now.items():
        if saved.get(name) != json.loads(json.dumps(value)):
            raise TrainingError(
                f"{name} is {value!r}, but the run to resume has {saved.get(name)!r}; keep it, or "
                "start a new run in another output"
            )
