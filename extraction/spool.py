"""The spool: a private folder through which a capturing server hands samples to the extract
process.

    secret           token that a request's rid must carry to be captured
    session          the client at work, if any, and the codec it wants; the server drops what
                     others asked for
    capture.json     what the server's plugin is set up to capture; written once it is
    error.json       why the plugin refused to work
    <session>-<number>.<attempt>.safetensors   one captured sample
    <session>-<number>.<attempt>.json          or why there is none

A sample's tensors: input_ids [T]; the codec's aux.* and final.*, T rows each; range [T, 4], the
smallest and largest value of a row's aux and final states before encoding; last [1, H], the last
row's final state as it was. Files appear under their name only when whole. Nothing is pickled;
names come from integers only.

`extract` makes the spools of the servers it starts. For a server of your own:

    python -m extraction.spool /dev/shm/eagle3 2,16,29

makes one and prints the environment and flags to start that server with.
"""

from __future__ import annotations

import json
import re
import secrets
import shutil
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from eagle3.errors import UserError
from eagle3.lock import exclusive
from eagle3.manifest import write_json
from eagle3.store import codecs, safetensors_file
from eagle3.store.codecs import Codec

SPOOL_VARIABLE = "EAGLE3_CAPTURE_SPOOL"
LAYERS_VARIABLE = "EAGLE3_CAPTURE_LAYERS"
_RID = re.compile(r"e3-([0-9a-f]{32})-([0-9a-f]{8})-(\d{1,12})-(\d{1,6})-(\d{1,9})")
KEPT = {"secret", "capture.json", "error.json"}
"""Files of the server, which no client removes."""


class CaptureFailed(RuntimeError):
    """The server could not capture one sample; another attempt may do better."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Ticket:
    """Identity of one capture; a retry is another attempt."""

    session: str
    number: int
    attempt: int
    num_tokens: int

    def rid(self, secret: str) -> str:
        """The request id that asks a server to capture."""
        return f"e3-{secret}-{self.session}-{self.number}-{self.attempt}-{self.num_tokens}"

    @property
    def stem(self) -> str:
        return f"{self.session}-{self.number}.{self.attempt}"

    @classmethod
    def parse(cls, rid: str, secret: str) -> Ticket | None:
        """Ticket of a request id, or None where it does not carry the secret."""
        match = _RID.fullmatch(rid)
        if match is None or not secrets.compare_digest(match[1], secret):
            return None
        return cls(
            session=match[2],
            number=int(match[3]),
            attempt=int(match[4]),
            num_tokens=int(match[5]),
        )


@dataclass(frozen=True, slots=True)
class Session:
    """A client's time at a spool, and how it wants its samples encoded."""

    name: str
    codec: Codec


class Spool:
    """Both ends of the spool folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @classmethod
    def create(cls, folder: Path) -> Spool:
        """Make the folder, private to the user, with a fresh secret; an old spool's files go.

        Raises:
            UserError: the folder holds something that is not a spool, is a spool with a client at
                work, or cannot be made.
        """
        if folder.is_dir() and any(folder.iterdir()) and not (folder / "secret").exists():
            raise UserError(f"{folder} is not empty and no spool: choose another extract.spools")
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            folder.chmod(0o700)
        except OSError as error:
            raise UserError(
                f"cannot make the spool: {error}; choose another extract.spools"
            ) from None
        spool = cls(folder)
        with exclusive(folder):
            spool._sweep({"secret"})
            secret = folder / "secret"
            secret.unlink(missing_ok=True)
            secret.touch(mode=0o600)
            secret.write_text(secrets.token_hex(16))
        return spool

    def remove(self) -> None:
        """Remove the folder, if it is there; the secret last, so that a kill leaves what is known
        as a spool."""
        with suppress(FileNotFoundError):
            self._sweep({"secret"})
        shutil.rmtree(self.folder, ignore_errors=True)

    @contextmanager
    def session(self, codec: Codec) -> Iterator[Session]:
        """Be the one client of this spool; leftovers of earlier ones go, and ours at the end.

        Raises:
            UserError: another process is the client.
        """
        with exclusive(self.folder):
            session = Session(secrets.token_hex(4), codec)
            write_json(self.folder / "session", {"name": session.name, "codec": codec.name})
            self._sweep({*KEPT, "session"})
            try:
                yield session
            finally:
                (self.folder / "session").unlink(missing_ok=True)
                self._sweep(KEPT)

    def current_session(self) -> Session | None:
        """Server side: whose requests to serve."""
        found = self._read("session")
        return None if found is None else Session(found["name"], codecs.get(found["codec"]))

    def _sweep(self, kept: set[str]) -> None:
        for path in self.folder.iterdir():
            if path.name not in kept:
                path.unlink(missing_ok=True)

    @property
    def secret(self) -> str:
        return (self.folder / "secret").read_text().strip()

    def path(self, ticket: Ticket) -> Path:
        return self.folder / f"{ticket.stem}.safetensors"

    def write(self, ticket: Ticket, columns: dict[str, list[Tensor]]) -> None:
        """Server side: publish a whole sample, each tensor in one piece or several.

        Safe to call from several threads, even for the same sample: the last one's stays.
        """
        temporary = self.path(ticket).with_suffix(f".{threading.get_native_id()}.tmp")
        try:
            safetensors_file.write(temporary, columns)
            temporary.rename(self.path(ticket))
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise

    def fail(self, ticket: Ticket, reason: str) -> None:
        """Server side: say that a sample will not come."""
        write_json(self.folder / f"{ticket.stem}.json", reason)

    def take(self, ticket: Ticket) -> dict[str, Tensor] | None:
        """Client side: read a sample and remove it; None if it is not there (yet).

        Raises:
            CaptureFailed: it will not come.
        """
        from safetensors.torch import load_file

        path = self.path(ticket)
        if path.exists():
            # copied: mapped tensors would keep the file's memory in the spool until they are stored
            tensors = {key: tensor.clone() for key, tensor in load_file(path).items()}
            path.unlink()
            return tensors
        if (reason := self._read(f"{ticket.stem}.json")) is not None:
            (self.folder / f"{ticket.stem}.json").unlink()
            raise CaptureFailed(reason)
        return None

    def publish_capture(self, facts: dict[str, Any]) -> None:
        """Server side: say that capturing is set up, and how; an earlier server's error is past.

        A rank that fails to set up ends its server before that answers, whatever another rank says.
        """
        (self.folder / "error.json").unlink(missing_ok=True)
        write_json(self.folder / "capture.json", facts)

    def capture(self) -> dict[str, Any] | None:
        """Client side: what the server captures, None if its plugin never got that far."""
        return self._read("capture.json")

    def publish_error(self, message: str) -> None:
        """Server side: report why nothing can be captured; the first reason stays."""
        if not (self.folder / "error.json").exists():
            write_json(self.folder / "error.json", message)

    def error(self) -> str | None:
        """Client side: why the server captures nothing, if its plugin said so."""
        return self._read("error.json")

    def _read(self, name: str) -> Any:
        try:
            return json.loads((self.folder / name).read_text())
        except FileNotFoundError:
            return None


def environment(folder: Path, aux_layers: list[int]) -> dict[str, str]:
    """Variables that make a server capture into a spool."""
    return {
        SPOOL_VARIABLE: str(folder),
        LAYERS_VARIABLE: json.dumps(aux_layers, separators=(",", ":")),
    }


def main() -> None:
    """Make a spool for a server that somebody else starts, on this host."""
    if len(sys.argv) != 3 or not re.fullmatch(r"\d+(,\d+)*", sys.argv[2]):
        sys.stderr.write("usage: python -m extraction.spool FOLDER LAYER,LAYER,...\n")
        raise SystemExit(2)
    folder = Path(sys.argv[1]).resolve()
    try:
        Spool.create(folder)
    except UserError as error:
        sys.stderr.write(f"error: {error}\n")
        raise SystemExit(2) from None
    layers = [int(part) for part in sys.argv[2].split(",")]
    variables = [f"{k}={v}" for k, v in environment(folder, layers).items()]
    sys.stdout.write(
        f"export SGLANG_PLUGINS=eagle3_capture {' '.join(variables)}\n"
        "# python -m sglang.launch_server ... --disable-radix-cache --disable-cuda-graph\n"
        "# python -m extraction.extract ... "
        f"'server.urls=[http://HOST:PORT]' 'extract.spools=[{folder}]'\n"
    )


if __name__ == "__main__":
    main()
