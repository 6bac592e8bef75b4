"""The spool: a private folder through which a capturing server hands samples to the extract
process.

    secret                       token that a request's rid must carry to be captured
    capture.json                 what the server's plugin is set up to capture; written once it is
    error.json                   the plugin's first failure, if any
    <number>.<attempt>.safetensors   one captured sample: input_ids [T], aux [T, A * H], final [T,
    H]

Files appear under their name only when whole. Nothing is pickled; names come from integers only.

`extract` makes the spool of a server it starts. For a server of your own:

    python -m extraction.spool /dev/shm/eagle3 2,16,29

makes one and prints the environment and flags to start that server with.
"""

from __future__ import annotations

import json
import re
import secrets
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from eagle3.errors import UserError
from eagle3.manifest import write_json

SPOOL_VARIABLE = "EAGLE3_CAPTURE_SPOOL"
LAYERS_VARIABLE = "EAGLE3_CAPTURE_LAYERS"
_RID = re.compile(r"e3-([0-9a-f]{32})-(\d{1,12})-(\d{1,6})-(\d{1,9})")


@dataclass(frozen=True, kw_only=True, slots=True)
class Ticket:
    """Identity of one capture; a retry is another attempt."""

    number: int
    attempt: int
    num_tokens: int

    def rid(self, secret: str) -> str:
        """The request id that asks a server to capture."""
        return f"e3-{secret}-{self.number}-{self.attempt}-{self.num_tokens}"

    @classmethod
    def parse(cls, rid: str, secret: str) -> Ticket | None:
        """Ticket of a request id, or None where it does not carry the secret."""
        match = _RID.fullmatch(rid)
        if match is None or not secrets.compare_digest(match[1], secret):
            return None
        return cls(number=int(match[2]), attempt=int(match[3]), num_tokens=int(match[4]))


class Spool:
    """Both ends of the spool folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @classmethod
    def create(cls, folder: Path) -> Spool:
        """Make the folder, private to the user, with a fresh secret; an old spool's files go.

        Raises:
            UserError: the folder holds something that is not a spool.
        """
        if folder.exists() and any(folder.iterdir()) and not (folder / "secret").exists():
            raise UserError(f"{folder} is not empty and no spool: choose another extract.spool")
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        folder.chmod(0o700)
        spool = cls(folder)
        for old in folder.iterdir():
            old.unlink()
        secret = folder / "secret"
        secret.touch(mode=0o600)
        secret.write_text(secrets.token_hex(16))
        return spool

    @property
    def secret(self) -> str:
        return (self.folder / "secret").read_text().strip()

    def path(self, ticket: Ticket) -> Path:
        return self.folder / f"{ticket.number}.{ticket.attempt}.safetensors"

    def write(self, ticket: Ticket, tensors: dict[str, Tensor]) -> None:
        """Server side: publish a whole sample."""
        from safetensors.torch import save_file

        temporary = self.path(ticket).with_suffix(".tmp")
        save_file(tensors, temporary)
        temporary.rename(self.path(ticket))

    def take(self, ticket: Ticket) -> dict[str, Tensor] | None:
        """Client side: read a sample and remove it; None if it is not there."""
        from safetensors.torch import load_file

        path = self.path(ticket)
        if not path.exists():
            return None
        tensors = load_file(path)
        path.unlink()
        return tensors

    def publish_capture(self, facts: dict[str, Any]) -> None:
        """Server side: say that capturing is set up, and how."""
        write_json(self.folder / "capture.json", facts)

    def capture(self) -> dict[str, Any] | None:
        """Client side: what the server captures, None if its plugin never got that far."""
        return self._read("capture.json")

    def publish_error(self, message: str) -> None:
        """Server side: report a failure; the first one stays."""
        if not (self.folder / "error.json").exists():
            write_json(self.folder / "error.json", {"error": message})

    def error(self) -> str | None:
        """Client side: the server's first failure."""
        data = self._read("error.json")
        return data["error"] if data else None

    def _read(self, name: str) -> dict[str, Any] | None:
        path = self.folder / name
        return json.loads(path.read_text()) if path.exists() else None


def main() -> None:
    """Make a spool for a server that somebody else starts, on this host."""
    if len(sys.argv) != 3 or not re.fullmatch(r"\d+(,\d+)*", sys.argv[2]):
        sys.stderr.write("usage: python -m extraction.spool FOLDER LAYER,LAYER,...\n")
        raise SystemExit(2)
    folder = Path(sys.argv[1]).resolve()
    Spool.create(folder)
    sys.stdout.write(
        f"export SGLANG_PLUGINS=eagle3_capture {SPOOL_VARIABLE}={folder} "
        f"{LAYERS_VARIABLE}=[{sys.argv[2]}]\n"
        "# python -m sglang.launch_server ... --disable-radix-cache --disable-cuda-graph\n"
        f"# python -m extraction.extract ... server.url=http://HOST:PORT extract.spool={folder}\n"
    )


if __name__ == "__main__":
    main()
