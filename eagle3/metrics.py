"""Metrics go to a JSON Lines file and, if wanted, to wandb; more trackers are siblings of these."""

from __future__ import annotations

import json
import os
import secrets
from pathlib import Path
from typing import Any, Protocol

from eagle3.errors import UserError
from eagle3.manifest import write_text


class Tracker(Protocol):
    """Receives metrics by step."""

    def log(self, step: int, values: dict[str, Any]) -> None: ...

    def close(self) -> None: ...


class JsonLines:
    """metrics.jsonl: one object a line with `step`. On resume, lines after `step` are dropped."""

    def __init__(self, path: Path, resume_step: int = 0) -> None:
        self.path = path
        kept = [line for line in lines(path) if line["step"] <= resume_step]
        write_text(path, "".join(json.dumps(line) + "\n" for line in kept))

    def log(self, step: int, values: dict[str, Any]) -> None:
        try:
            with self.path.open("a") as file:
                file.write(json.dumps({"step": step, **values}) + "\n")
        except OSError as error:
            raise UserError(
                f"{self.path} cannot be written: {error}. Make room and run the same command, "
                "which resumes from the last checkpoint"
            ) from error

    def close(self) -> None:
        return None


MODES = ("online", "offline", "disabled")


class Wandb:
    """A wandb run whose id is kept beside the metrics, so that a resumed run stays one run.

    Args:
        mode: one of MODES; None takes WANDB_MODE's, else online with a key and offline without.
        resume: go on with the run that the folder's id names, if there is one.

    Raises:
        UserError: wandb is not installed, has no such mode, or cannot start.
    """

    def __init__(
        self,
        folder: Path,
        *,
        project: str,
        group: str | None,
        name: str,
        mode: str | None,
        config: dict[str, Any],
        job_type: str = "train",
        resume: bool = True,
    ) -> None:
        try:
            import wandb
        except ImportError as error:
            raise UserError("wandb is not installed: install it, or set logger=jsonl") from error
        default = "online" if os.environ.get("WANDB_API_KEY") else "offline"
        mode = mode or os.environ.get("WANDB_MODE") or default
        if mode not in MODES:
            raise UserError(f"logger.mode={mode} is not one of {list(MODES)}")
        folder.mkdir(parents=True, exist_ok=True)
        id_file = folder / f"wandb-{job_type}-id"
        if not (resume and id_file.exists()):
            id_file.write_text(secrets.token_hex(4))
        try:
            self.run = wandb.init(
                project=project,
                group=group,
                name=name,
                id=id_file.read_text(),
                resume="allow",
                mode=mode,  # type: ignore[arg-type]
                dir=str(folder),
                config=config,
                job_type=job_type,
                # a sweep's job that failed may have left a run open, which init would give again
                settings=wandb.Settings(silent=True, reinit="create_new"),
            )
        except wandb.Error as error:
            raise UserError(
                f"wandb does not start: {error}. Set logger.mode=offline, or logger=jsonl"
            ) from error

    def log(self, step: int, values: dict[str, Any]) -> None:
        self.run.log(values, step=step)

    def close(self) -> None:
        self.run.finish()


class Metrics:
    """Every value to every tracker. Only rank 0 has trackers; the others call it all the same."""

    def __init__(self, trackers: list[Tracker]) -> None:
        self.trackers = trackers

    def log(self, step: int, values: dict[str, Any]) -> None:
        for tracker in self.trackers:
            tracker.log(step, values)

    def close(self) -> None:
        for tracker in self.trackers:
            tracker.close()


def lines(path: Path) -> list[dict[str, Any]]:
    """Whole lines of a metrics file; a torn last line is dropped.

    Raises:
        UserError: another line is damaged.
    """
    if not path.exists():
        return []
    try:
        text = path.read_text()
        found = [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines() if line]
        return [{**line, "step": line["step"]} for line in found]
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"{path} is damaged ({error!r}): correct the line, or remove it, it only keeps figures"
        ) from error
