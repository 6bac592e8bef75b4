"""Servers that die, stall or come back while they share work."""

import threading
import time
from collections import Counter

import pytest

from eagle3.serving import pool as pools
from eagle3.serving.client import Client, RequestFailed, RequestRefused, in_order
from eagle3.serving.pool import MAX_TRIES, Pool
from eagle3.serving.server import Server


class Fake(Client):
    """A server that works until it is told not to."""

    def __init__(self, name: str) -> None:
        super().__init__(f"http://{name}")
        self.up = True
        self.done: Counter[int] = Counter()
        self.under_way = 0
        self.most = 0

    def answers(self) -> bool:
        return self.up

    def work(self, item: int) -> int:
        self.under_way += 1
        self.most = max(self.most, self.under_way)
        time.sleep(0.002)
        self.under_way -= 1
        if not self.up:
            raise RequestFailed(f"{self.url}: connection refused")
        self.done[item] += 1
        return item * 10


def pool_of(*fakes: Fake, patience_s: float = 5.0) -> Pool[Fake]:
    return Pool([(Server(url=f.url, client=f), f) for f in fakes], patience_s)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pools, "REST_S", 0.05)


def test_work_goes_to_the_least_busy() -> None:
    a, b = Fake("a"), Fake("b")
    pool = pool_of(a, b)
    list(in_order(lambda n: pool.run(lambda s: s.work(n)), range(100), 8))
    assert sum(a.done.values()) + sum(b.done.values()) == 100
    assert abs(sum(a.done.values()) - sum(b.done.values())) < 40
    assert a.most <= 5 and b.most <= 5


def test_what_a_dead_server_had_under_way_is_done_by_the_others() -> None:
    a, b, c = fakes = [Fake(name) for name in "abc"]
    pool = pool_of(*fakes)

    def work(item: int) -> int:
        if item == 30:
            b.up = False
        return pool.run(lambda s: s.work(item))

    assert list(in_order(work, range(120), 9)) == [n * 10 for n in range(120)]
    done = a.done + b.done + c.done
    assert sorted(done) == list(range(120)) and set(done.values()) == {1}
    assert sum(b.done.values()) < 40


def test_a_server_that_comes_back_gets_work_again() -> None:
    a = Fake("a")
    pool = pool_of(a)
    a.up = False
    threading.Timer(0.5, lambda: setattr(a, "up", True)).start()
    assert pool.run(lambda s: s.work(7)) == 70


def test_a_server_that_hangs_does_not_hold_up_the_work_of_others() -> None:
    """Neither does asking it whether it is back: one at a time, and by nobody who has work."""
    a, b = Fake("a"), Fake("b")
    asked, going_on = [], threading.Event()

    def hang() -> bool:
        asked.append(1)
        return going_on.wait(20)

    b.answers = hang  # type: ignore[method-assign]
    pool = pool_of(a, b)
    b.up = False
    start = time.monotonic()
    assert list(in_order(lambda n: pool.run(lambda s: s.work(n)), range(200), 4)) == [
        10 * n for n in range(200)
    ]
    assert time.monotonic() - start < 5 and asked == [1]
    going_on.set()


def test_a_busy_server_is_not_taken_for_dead_after_one_failure() -> None:
    """What it had under way goes on being answered, later than its patience would last."""
    a = Fake("a")
    a.answers = lambda: False  # type: ignore[method-assign]  # the question waits in its queue
    failed = threading.Event()

    def work(item: int) -> int:
        if item == 0:
            time.sleep(0.1)
            failed.set()
            raise RequestFailed("HTTP 503")
        failed.wait()
        time.sleep(0.3 * item)
        return item

    pool = pool_of(a, patience_s=0.7)
    tries = Counter()

    def once(item: int) -> int:
        tries[item] += 1
        return work(item) if tries[item] == 1 else item

    found = list(in_order(lambda n: pool.run(lambda _: once(n)), range(5), 5))
    assert found == list(range(5)) and tries[0] == 2


def test_patience_ends() -> None:
    a = Fake("a")
    a.up = False
    start = time.monotonic()
    with pytest.raises(RequestFailed, match=r"run the same command again.*\nhttp://a does not"):
        pool_of(a, patience_s=0.5).run(lambda s: s.work(1))
    assert 0.4 < time.monotonic() - start < 5


def test_a_server_of_our_own_that_has_ended_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    a = Fake("a")
    a.up = False
    monkeypatch.setattr(Server, "ended", lambda _: True)
    start = time.monotonic()
    with pytest.raises(RequestFailed):
        pool_of(a, patience_s=60).run(lambda s: s.work(1))
    assert time.monotonic() - start < 5


def test_work_that_no_server_can_do_is_given_up() -> None:
    a, b = Fake("a"), Fake("b")
    tries = []

    def poison(server: Fake) -> None:
        tries.append(server.url)
        raise RequestFailed("HTTP 500")

    with pytest.raises(RequestFailed, match="HTTP 500"):
        pool_of(a, b).run(poison)
    assert len(tries) == MAX_TRIES


def test_a_refused_request_is_not_tried_again() -> None:
    a, b = Fake("a"), Fake("b")
    tries = []

    def refuse(server: Fake) -> None:
        tries.append(server.url)
        raise RequestRefused("HTTP 400")

    with pytest.raises(RequestRefused):
        pool_of(a, b).run(refuse)
    assert len(tries) == 1


def test_a_server_that_answers_but_fails_at_the_work_does_not_draw_all_of_it() -> None:
    """It is always the least busy one: the same piece of work came back to it until given up."""
    a, b = Fake("a"), Fake("b")
    pool = pool_of(a, b)

    def work(server: Fake, item: int) -> int:
        if server is a:  # its spool is full, say
            raise RequestFailed("did not capture it")
        return server.work(item)

    found = list(in_order(lambda n: pool.run(lambda s: work(s, n)), range(60), 8))
    assert found == [n * 10 for n in range(60)] and b.done.total() == 60
