"""What ran: package versions, git commit, machine, content hashes."""

from __future__ import annotations

import hashlib
import json
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

PACKAGES = (
    "sglang",
    "torch",
    "transformers",
    "deepspeed",
    "speculators",
    "datasets",
    "hydra-core",
    "wandb",
)


def versions() -> dict[str, str]:
    """Installed version of every package that can change a result, plus Python's."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    return found


def git_commit(folder: Path | None = None) -> str:
    """Commit of the checkout this code runs from, `-dirty` if it has changes, or `unknown`."""
    folder = folder or Path(__file__).resolve().parent

    def git(*args: str) -> str:
        done = subprocess.run(
            ["git", *args], cwd=folder, capture_output=True, text=True, check=True
        )
        return done.stdout.strip()

    try:
        return git("rev-parse", "HEAD") + ("-dirty" if git("status", "--porcelain", "-uno") else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def machine() -> dict[str, Any]:
    """Processor, core count and GPUs, for the head of every result file."""
    import os

    import torch

    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {"cpu": _cpu_name(), "cores": os.cpu_count(), "gpus": gpus}


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def hash_file(path: Path) -> str:
    """sha256 of a file's bytes, hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def hash_json(value: Any) -> str:
    """sha256 of a JSON value, independent of key order, hex."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
