"""Servers that share work: one that fails rests, and the others take over what it had under way."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from eagle3.serving.client import RequestFailed, RequestRefused
from eagle3.serving.server import Server

log = logging.getLogger(__name__)
T = TypeVar("T")
R = TypeVar("R")
MAX_TRIES = 5
"""Of one piece of work, wherever; more means that the work is the problem."""
REST_S = 2.0
"""Before a server that failed is asked whether it is back."""


@dataclass(slots=True)
class _Member(Generic[T]):
    server: Server
    value: T
    under_way: int = 0
    resting_until: float | None = None
    """time.monotonic(), or None for one that is at work."""
    asked: bool = False
    """Whether somebody is asking it whether it is back."""
    answered: float = float("-inf")
    """When it last did a piece of work, time.monotonic()."""


class Pool(Generic[T]):
    """Runs work on the server with the least of it under way, after a failure on another one if it
    can. Safe to share between threads.

    Args:
        members: each server and what the work needs to use it.
        patience_s: how long to go on without any server that answers. A server we started ourselves
            is never waited for once its process has ended.
    """

    def __init__(self, members: Sequence[tuple[Server, T]], patience_s: float) -> None:
        assert members
        for server, _ in members:
            server.client.retry_waits_s = ()  # the pool tries again, perhaps elsewhere
        self._members = [_Member(server, value) for server, value in members]
        self._patience_s = patience_s
        self._lock = threading.Lock()

    def run(self, work: Callable[[T], R]) -> R:
        """Do one piece of work, again elsewhere if a server fails at it.

        Raises:
            RequestRefused: a server found fault with the request itself.
            RequestFailed: no server is left, or the same work failed MAX_TRIES times.
        """
        failed: Counter[str] = Counter()
        for last in (*[False] * (MAX_TRIES - 1), True):
            member = self._acquire(failed)
            try:
                result = work(member.value)
                with self._lock:  # whatever failed there before: it is at work
                    member.answered, member.resting_until = time.monotonic(), None
                return result
            except RequestRefused:
                raise
            except RequestFailed as error:
                log.warning("%s", error)
                failed[member.server.url] += 1
                with self._lock:
                    member.resting_until = time.monotonic()
                if last:
                    raise
            finally:
                with self._lock:
                    member.under_way -= 1
        raise AssertionError("unreachable")

    def _acquire(self, failed: Counter[str]) -> _Member[T]:
        """A server at work, waiting for one to come back if need be; counts the call.

        Args:
            failed: how often each server failed at this piece of work: one that fails fast is never
                busy.
        """
        arrived = time.monotonic()
        while True:
            with self._lock:
                self._ask_the_rested()
                ready = [m for m in self._members if m.resting_until is None]
                if ready:
                    member = min(ready, key=lambda m: (failed[m.server.url], m.under_way))
                    member.under_way += 1
                    return member
                gone = all(m.server.ended() for m in self._members)
                last = max(arrived, *(m.answered for m in self._members))
            if gone or time.monotonic() > last + self._patience_s:
                tails = "\n".join(m.server.last_words() for m in self._members)
                raise RequestFailed(
                    f"no server answers any more. What is committed stays; run the same command "
                    f"again to go on.\n{tails}"
                )
            time.sleep(0.2)

    def _ask_the_rested(self) -> None:
        """Have servers whose rest is over asked whether they are back, each by a thread of its own:
        one that hangs must not hold up who has work for the others. Call with the lock held."""
        now = time.monotonic()
        for member in self._members:
            rested = member.resting_until is not None and member.resting_until <= now
            if rested and not member.asked:
                member.asked = True
                threading.Thread(target=self._ask, args=[member], daemon=True).start()

    def _ask(self, member: _Member[T]) -> None:
        back = not member.server.ended() and member.server.client.answers()
        with self._lock:
            member.asked = False
            if back:
                member.resting_until = None
            elif member.resting_until is not None:  # else it has done work meanwhile
                member.resting_until = time.monotonic() + REST_S
        if back:
            log.info("%s is at work again", member.server.url)
