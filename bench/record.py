"""What every result entry carries besides its figures."""

from __future__ import annotations

import shlex
import sys
from datetime import UTC, datetime
from typing import Any

import torch

from eagle3 import provenance


def facts() -> dict[str, Any]:
    """Machine, threads, versions, git commit, date and command; paths as they were given."""
    return {
        "machine": provenance.machine(),
        "threads": torch.get_num_threads(),
        "versions": provenance.versions(),
        "git_commit": provenance.git_commit(),
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "command": shlex.join(["python", *sys.argv]),
    }
