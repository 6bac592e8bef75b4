"""Server side: from the rows of single forwards to whole samples in the spool.

A request's rows may come in pieces (chunked prefill). Each piece is encoded on the device into
memory of its own, in the forward's stream: the next forward may overwrite what it was given (SGLang
reuses its input buffers). From there it is copied to pinned memory on another stream, beside the
forward. One thread joins the pieces of a request by their prefix, in the order they come; once all
rows of a sample are there, one of a few others writes it.
"""

from __future__ import annotations

import logging
import queue
import threading
import traceback
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from eagle3.store.codecs import Codec
from extraction.spool import Session, Spool, Ticket

log = logging.getLogger(__name__)
QUEUE_SIZE = 64
"""Pieces on their way before a forward has to wait for the spool."""
WRITERS = 8
"""Threads that write samples. One would spend its time waiting for Python's lock, which the
scheduler's thread keeps for up to 5 ms at each of a sample's some twenty system calls. As many
samples again may wait for a writer. How many bytes that is, the client bounds: it asks for no more
samples at a time than a spool has room for.
"""


@dataclass(slots=True)
class Piece:
    """Rows prefix .. prefix + n of one request, encoded, on their way to the host.

    copied: torch.cuda.Event, or None on a CPU.
    """

    ticket: Ticket
    prefix: int
    tensors: dict[str, Tensor]
    copied: Any

    @property
    def end(self) -> int:
        return self.prefix + len(self.tensors["input_ids"])


@dataclass(slots=True)
class Whole:
    """A sample whose rows are all on the host: its columns, each in one piece or several."""

    ticket: Ticket
    columns: dict[str, list[Tensor]]


class Assembler:
    """Takes pieces from the forward, writes samples to the spool."""

    def __init__(self, spool: Spool) -> None:
        self.spool = spool
        self._session: Session | None = None
        self._queue: queue.Queue[Piece] = queue.Queue(maxsize=QUEUE_SIZE)
        self._whole: queue.Queue[Whole] = queue.Queue(maxsize=WRITERS)
        self._stream: Any = None
        self._unfinished: dict[Ticket, list[Piece]] = {}

    def start(self) -> None:
        """Start the threads that join and write."""
        for work in (self._join_all, *[self._write_all] * WRITERS):
            threading.Thread(target=work, daemon=True).start()

    def add(
        self, ticket: Ticket, prefix: int, input_ids: Tensor, aux: list[Tensor], final: Tensor
    ) -> None:
        """Take n rows: input_ids [n], aux states [n, ...] to be laid side by side, final [n, H].

        Rows of a client that is gone are dropped.
        """
        if self._session is None or self._session.name != ticket.session:
            self._session = self.spool.current_session()
        if self._session is None or self._session.name != ticket.session:
            return
        codec = self._session.codec
        encoded = _encoded(codec, input_ids, aux, final)
        if not final.is_cuda:
            self._queue.put(Piece(ticket, prefix, encoded, None))
            return
        if self._stream is None:
            self._stream = torch.cuda.Stream(final.device)
        self._stream.wait_stream(torch.cuda.current_stream(final.device))
        with torch.cuda.stream(self._stream):
            copies = {k: _to_pinned(v) for k, v in encoded.items()}
            copied = torch.cuda.Event(blocking=True)  # waiting for it takes no processor time
            copied.record(self._stream)
        for tensor in encoded.values():
            tensor.record_stream(self._stream)  # not to be reused before it is copied
        self._queue.put(Piece(ticket, prefix, copies, copied))

    def _join_all(self) -> None:
        while True:
            self._join(self._queue.get())

    def _write_all(self) -> None:
        while True:
            self._write(self._whole.get())

    def _join(self, piece: Piece) -> None:
        """Add a piece to those of its sample; hands the sample on if it was the last."""
        try:
            if piece.copied is not None:
                piece.copied.synchronize()
            known = self._take(piece)
            if piece.end == piece.ticket.num_tokens:
                del self._unfinished[piece.ticket]
                self._whole.put(Whole(piece.ticket, _columns(known)))
        except Exception:
            self._unfinished.pop(piece.ticket, None)
            self._give_up(piece.ticket)

    def _take(self, piece: Piece) -> list[Piece]:
        """The pieces of this one's sample so far, itself the last."""
        for old in [t for t in self._unfinished if _superseded(t, piece.ticket)]:
            del self._unfinished[old]
        known = self._unfinished.setdefault(piece.ticket, [])
        if piece.prefix == 0:
            known.clear()  # a retracted request starts over
        known.append(piece)
        return known

    def _write(self, whole: Whole) -> None:
        """Write a sample, unless its client is gone."""
        try:
            session = self.spool.current_session()
            if session is not None and session.name == whole.ticket.session:
                self.spool.write(whole.ticket, whole.columns)
        except Exception:
            self._give_up(whole.ticket)

    def _give_up(self, ticket: Ticket) -> None:
        """Tell the client of the exception being handled."""
        log.exception("sample %s", ticket)
        try:
            self.spool.fail(ticket, traceback.format_exc(limit=-3))
        except OSError:  # no room even for that: the client will notice that nothing comes
            log.exception("sample %s: cannot be reported", ticket)


def _superseded(old: Ticket, new: Ticket) -> bool:
    """Whether nobody waits for the old one any more: its client is gone, or tries again."""
    retried = old.number == new.number and old.attempt < new.attempt
    return old.session != new.session or retried


def _encoded(
    codec: Codec, input_ids: Tensor, aux: list[Tensor], final: Tensor
) -> dict[str, Tensor]:
    """Everything of a piece, in memory that is not the forward's."""
    side_by_side = aux[0] if len(aux) == 1 else torch.cat(aux, dim=-1)
    states = codec.encode(aux=side_by_side, final=final)
    encoded = {
        "input_ids": input_ids.to(torch.int32),
        "range": row_range(side_by_side, final),
        "last": final[-1:],
        **states,
    }
    theirs = {t.untyped_storage().data_ptr() for t in (input_ids, *aux, final)}
    return {
        key: tensor.clone() if tensor.untyped_storage().data_ptr() in theirs else tensor
        for key, tensor in encoded.items()
    }


def row_range(aux: Tensor, final: Tensor) -> Tensor:
    """Smallest and largest value of each row of aux and of final [T, 4]: nan where any value is."""
    ends = [*aux.aminmax(dim=-1), *final.aminmax(dim=-1)]
    return torch.stack([end.float() for end in ends], dim=-1)


def _columns(pieces: list[Piece]) -> dict[str, list[Tensor]]:
    """One sample's tensors, in the pieces they came in; every row once."""
    expected = 0
    for piece in pieces:
        if piece.prefix != expected:
            raise RuntimeError(f"rows {expected}..{piece.prefix} of {piece.ticket} were not seen")
        expected = piece.end
    columns = [piece.tensors for piece in pieces]
    return {key: [c[key] for c in columns] for key in columns[0]} | {"last": [columns[-1]["last"]]}


def _to_pinned(tensor: Tensor) -> Tensor:
    """Start a copy to pinned memory on the current stream."""
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)
