"""Server side: from the rows of single forwards to whole samples in the spool.

A request's rows may come in pieces (chunked prefill). Each piece is encoded on the device into
memory of its own, in the forward's stream: the next forward may overwrite what it was given (SGLang
reuses its input buffers). From there it is copied to pinned memory on another stream, beside the
forward. A thread joins the pieces of a request by their prefix and writes the sample once all rows
are there.
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


class Assembler:
    """Takes pieces from the forward, writes samples to the spool."""

    def __init__(self, spool: Spool) -> None:
        self.spool = spool
        self._session: Session | None = None
        self._queue: queue.Queue[Piece] = queue.Queue(maxsize=QUEUE_SIZE)
        self._stream: Any = None
        self._unfinished: dict[Ticket, list[Piece]] = {}

    def start(self) -> None:
        """Start the writing thread."""
        threading.Thread(target=self._run, daemon=True).start()

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
            copied = self._stream.record_event()
        for tensor in encoded.values():
            tensor.record_stream(self._stream)  # not to be reused before it is copied
        self._queue.put(Piece(ticket, prefix, copies, copied))

    def _run(self) -> None:
        while True:
            piece = self._queue.get()
            try:
                if piece.copied is not None:
                    piece.copied.synchronize()
                self._take(piece)
            except Exception:
                log.exception("sample %s", piece.ticket)
                self._give_up(piece.ticket, traceback.format_exc(limit=-3))

    def _take(self, piece: Piece) -> None:
        ticket = piece.ticket
        for old in [t for t in self._unfinished if _superseded(t, ticket)]:
            del self._unfinished[old]
        known = self._unfinished.setdefault(ticket, [])
        if piece.prefix == 0:
            known.clear()  # a retracted request starts over
        known.append(piece)
        if piece.end == ticket.num_tokens:
            del self._unfinished[ticket]
            session = self.spool.current_session()
            if session is not None and session.name == ticket.session:
                self.spool.write(ticket, _join(known))

    def _give_up(self, ticket: Ticket, reason: str) -> None:
        self._unfinished.pop(ticket, None)
        try:
            self.spool.fail(ticket, reason)
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


def _join(pieces: list[Piece]) -> dict[str, list[Tensor]]:
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
