"""The whole road once, through the Makefile as a user would; the tests look at what it left."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
STAGES = ("respond", "extract", "train", "export", "eval")


@dataclass(frozen=True)
class Run:
    """Folder of a finished run and the console output of each stage."""

    folder: Path
    output: dict[str, str]


def make(target: str, arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    """`make <target> EXP=ci` with these overrides, in this environment."""
    command = ["make", "--no-print-directory", target, "EXP=ci", f"ARGS={arguments}"]
    command += [f"VENV={sys.prefix}"]
    env = {k: v for k, v in os.environ.items() if not k.startswith(("MAKE", "MFLAGS"))}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, env=env)
    assert not check or done.returncode == 0, f"make {target}:\n{done.stderr[-6000:]}"
    return done


@pytest.fixture(scope="session")
def ci_run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    runs = tmp_path_factory.mktemp("runs")
    output = {}
    for stage in STAGES:
        done = make(stage, f"runs_dir={runs}")
        output[stage] = done.stdout + done.stderr
    return Run(runs / "ci", output)
