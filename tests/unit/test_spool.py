import errno
import os
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from eagle3.config import Config
from eagle3.errors import UserError
from eagle3.store import codecs, safetensors_file
from eagle3.store.codecs import CODECS
from eagle3.store.sample import Encoded
from extraction.assembler import QUEUE_SIZE, WRITERS, Assembler, row_range
from extraction.capture import _spools
from extraction.check import Rejection, Verifier, candidates
from extraction.samples import TokenSample
from extraction.sglang_plugin import Capture
from extraction.spool import CaptureFailed, Spool, Ticket

SECRET = "0123456789abcdef" * 2
SESSION = "0badcafe"
FP32 = codecs.get("fp32")


def ticket(**fields: int) -> Ticket:
    return Ticket(session=SESSION, **fields)


def test_tickets_travel_in_request_ids() -> None:
    mine = ticket(number=7, attempt=1, num_tokens=99)
    assert Ticket.parse(mine.rid(SECRET), SECRET) == mine


@pytest.mark.parametrize(
    "rid",
    [
        "health_check_1",
        ticket(number=7, attempt=1, num_tokens=9).rid("f" * 32),
        f"e3-{SECRET}-{SESSION}-../../etc-1-9",
        f"e3-{SECRET}-../../../x-7-1-9",
        f"e3-{SECRET}-{SESSION}-7-1-9/../x",
        f"e3-{SECRET}-{SESSION}-7-1",
        f"e3-{SECRET}-7-1-9",
        f"e3-{SECRET}-{SESSION}-7-1-9\n",
        f"x e3-{SECRET}-{SESSION}-7-1-9",
    ],
)
def test_other_request_ids_are_not_captured(rid: str) -> None:
    assert Ticket.parse(rid, SECRET) is None


def test_spool_is_private_and_starts_clean(tmp_path: Path) -> None:
    folder = tmp_path / "spool"
    spool = Spool.create(folder)
    first = spool.secret
    mine = ticket(number=1, attempt=0, num_tokens=3)
    spool.write(mine, {"input_ids": [torch.arange(3, dtype=torch.int32)]})
    assert folder.stat().st_mode & 0o777 == 0o700
    assert (folder / "secret").stat().st_mode & 0o777 == 0o600
    again = Spool.create(folder)
    assert again.secret != first and again.take(mine) is None


def test_a_folder_with_other_things_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "results.json").write_text("{}")
    with pytest.raises(UserError, match="no spool"):
        Spool.create(tmp_path)
    assert (tmp_path / "results.json").exists()


def test_a_sample_is_taken_once(tmp_path: Path) -> None:
    spool = Spool.create(tmp_path / "s")
    mine = ticket(number=1, attempt=0, num_tokens=3)
    assert spool.take(mine) is None
    spool.write(mine, {"input_ids": [torch.arange(3, dtype=torch.int32)]})
    found = spool.take(mine)
    assert found is not None and found["input_ids"].tolist() == [0, 1, 2]
    assert spool.take(mine) is None


def test_two_threads_may_write_the_same_sample(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client that lost its connection asks again under the same request id."""
    spool, mine = Spool.create(tmp_path / "s"), ticket(number=1, attempt=0, num_tokens=3)
    both = threading.Barrier(2, timeout=30)
    real = safetensors_file.write

    def write(path: Path, columns: dict[str, list[torch.Tensor]]) -> None:
        real(path, columns)
        both.wait()

    monkeypatch.setattr("eagle3.store.safetensors_file.write", write)
    with ThreadPoolExecutor(2) as pool:
        rows = [torch.full((3,), n, dtype=torch.int32) for n in range(2)]
        writing = [pool.submit(spool.write, mine, {"input_ids": [ids]}) for ids in rows]
        for future in writing:
            future.result()
    found = spool.take(mine)
    assert found is not None and found["input_ids"].tolist() in ([0, 0, 0], [1, 1, 1])
    assert {p.name for p in spool.folder.iterdir()} == {"secret"}


def test_a_write_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def half(path: Path, columns: object) -> None:
        path.write_bytes(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    spool = Spool.create(tmp_path / "s")
    monkeypatch.setattr("eagle3.store.safetensors_file.write", half)
    with pytest.raises(OSError, match="No space left"):
        spool.write(ticket(number=1, attempt=0, num_tokens=3), {})
    assert {p.name for p in spool.folder.iterdir()} == {"secret"}


def test_the_first_error_stays(tmp_path: Path) -> None:
    spool = Spool.create(tmp_path / "s")
    spool.publish_error("cause")
    spool.publish_error("consequence")
    assert spool.error() == "cause"


def test_a_session_leaves_no_orphan_and_takes_none_over(tmp_path: Path) -> None:
    spool = Spool.create(tmp_path / "s")
    spool.publish_capture({"aux_layers": [1]})
    kept = {"secret", "capture.json"}
    spool.write(
        ticket(number=1, attempt=0, num_tokens=3),
        {"input_ids": [torch.arange(3, dtype=torch.int32)]},
    )
    (spool.folder / f"{SESSION}-2.0.tmp").write_bytes(b"half")
    with spool.session(FP32) as session:
        assert {p.name for p in spool.folder.iterdir()} == {*kept, "session"}
        assert spool.current_session() == session
        late = Ticket(session=session.name, number=4, attempt=0, num_tokens=3)
        spool.write(late, {"input_ids": [torch.arange(3, dtype=torch.int32)]})
        with pytest.raises(UserError, match="another process"), spool.session(FP32):
            pass
    assert spool.current_session() is None
    assert {p.name for p in spool.folder.iterdir()} == kept


class Batch:
    """The fields of SGLang's ForwardBatch that the plugin reads."""

    class forward_mode:
        @staticmethod
        def is_extend() -> bool:
            return True

    def __init__(self, pieces: list[tuple[str, int, int]]) -> None:
        self.rids = [p[0] for p in pieces]
        self.extend_seq_lens_cpu = [p[1] for p in pieces]
        self.extend_prefix_lens_cpu = [p[2] for p in pieces]


def drain(spool: Spool, tickets: list[Ticket]) -> list[dict[str, torch.Tensor]]:
    """Wait for these samples."""
    found = []
    for wanted in tickets:
        while (sample := spool.take(wanted)) is None:
            time.sleep(0.001)
        found.append(sample)
    return found


def forward(
    capture: Capture, rows: torch.Tensor, pieces: list[tuple[str, int, int]], packed: bool = True
) -> None:
    """A forward whose states are the rows' numbers."""
    aux = [rows[:, None].repeat(1, 4), -rows[:, None].repeat(1, 4)]
    states = torch.cat(aux, 1) if packed else aux
    capture._collect(rows.int(), rows[:, None], Batch(pieces), states)


@pytest.mark.parametrize("packed", [True, False])
def test_chunks_of_interleaved_requests_are_joined(tmp_path: Path, packed: bool) -> None:
    spool = Spool.create(tmp_path / "s")
    capture = Capture(spool, [1, 2])
    capture.assembler.start()
    with spool.session(FP32) as session:
        a, b = (
            Ticket(session=session.name, number=n, attempt=0, num_tokens=t)
            for n, t in ((0, 5), (1, 2))
        )
        rows = torch.arange(10.0)
        first = [(a.rid(spool.secret), 2, 0), ("somebody else", 3, 0)]
        second = [(b.rid(spool.secret), 2, 0), (a.rid(spool.secret), 3, 2)]
        forward(capture, rows[:5], first, packed)
        forward(capture, rows[5:], second, packed)
        one, two = drain(spool, [a, b])
    assert one["input_ids"].tolist() == [0, 1, 7, 8, 9]
    assert one["final.values"].flatten().tolist() == [0, 1, 7, 8, 9]
    assert one["aux.values"][:, 0].tolist() == [0, 1, 7, 8, 9]
    assert one["aux.values"].shape == (5, 8) and one["last"].tolist() == [[9]]
    assert two["input_ids"].tolist() == [5, 6]


@pytest.mark.parametrize("codec", sorted(CODECS))
def test_what_the_forward_overwrites_later_does_not_matter(tmp_path: Path, codec: str) -> None:
    """SGLang reuses its buffers: nothing that waits to be written may lie in them."""
    spool = Spool.create(tmp_path / "s")
    assembler = Assembler(spool)
    with spool.session(codecs.get(codec)) as session:
        mine = Ticket(session=session.name, number=0, attempt=0, num_tokens=4)
        torch.manual_seed(0)
        ids = torch.arange(4, dtype=torch.int32)
        for packed in (True, False):
            aux = [torch.randn(4, 192)] if packed else [torch.randn(4, 64) for _ in range(3)]
            aux = [a.to(torch.bfloat16) for a in aux]
            final = torch.randn(4, 64, dtype=torch.bfloat16)
            assembler.add(mine, 0, ids, aux, final)
            piece = assembler._queue.get()
            before = {k: t.clone() for k, t in piece.tensors.items()}
            for buffer in (ids, *aux, final):
                buffer.zero_()
            for key, tensor in piece.tensors.items():
                assert torch.equal(tensor.view(torch.uint8), before[key].view(torch.uint8)), key
            assert before["last"].abs().sum() > 0


def test_a_sample_that_cannot_be_captured_is_reported_and_the_next_one_is_fine(
    tmp_path: Path,
) -> None:
    spool = Spool.create(tmp_path / "s")
    capture = Capture(spool, [1, 2])
    capture.assembler.start()
    with spool.session(FP32) as session:
        bad, retry, other = (
            Ticket(session=session.name, number=n, attempt=a, num_tokens=4)
            for n, a in ((0, 0), (0, 1), (1, 0))
        )
        rows = torch.arange(4.0)
        forward(capture, rows[:1], [(bad.rid(spool.secret), 1, 0)])
        forward(capture, rows[2:], [(bad.rid(spool.secret), 2, 2)])  # row 1 never came
        forward(capture, rows, [(other.rid(spool.secret), 4, 0)])
        assert drain(spool, [other])[0]["input_ids"].tolist() == [0, 1, 2, 3]
        with pytest.raises(CaptureFailed, match=r"rows 1\.\.2 .* were not seen"):
            spool.take(bad)
        forward(capture, rows[:3], [(retry.rid(spool.secret), 3, 0)])
        forward(capture, rows, [(retry.rid(spool.secret), 4, 0)])  # retracted, from the start
        assert drain(spool, [retry])[0]["input_ids"].tolist() == [0, 1, 2, 3]


def test_requests_of_a_client_that_is_gone_are_dropped(tmp_path: Path) -> None:
    spool = Spool.create(tmp_path / "s")
    capture = Capture(spool, [1, 2])
    capture.assembler.start()
    rows = torch.arange(4.0)
    with spool.session(FP32) as old:
        dead = Ticket(session=old.name, number=0, attempt=0, num_tokens=4)
        forward(capture, rows[:2], [(dead.rid(spool.secret), 2, 0)])
    with spool.session(FP32) as new:
        live = Ticket(session=new.name, number=0, attempt=0, num_tokens=4)
        forward(capture, rows[2:], [(dead.rid(spool.secret), 2, 2)])
        forward(capture, rows[:3] + 10, [(live.rid(spool.secret), 3, 0)])
        forward(capture, rows[3:] + 10, [(live.rid(spool.secret), 1, 3)])
        assert drain(spool, [live])[0]["input_ids"].tolist() == [10, 11, 12, 13]
        names = {p.name for p in spool.folder.iterdir()}
    assert names == {"secret", "session"}


def test_a_full_spool_is_told_to_the_client(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spool = Spool.create(tmp_path / "s")
    capture = Capture(spool, [1, 2])
    capture.assembler.start()

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("eagle3.store.safetensors_file.write", full)
    with spool.session(FP32) as session:
        mine = Ticket(session=session.name, number=0, attempt=0, num_tokens=4)
        forward(capture, torch.arange(4.0), [(mine.rid(spool.secret), 4, 0)])
        with pytest.raises(CaptureFailed, match="No space left"):
            drain(spool, [mine])


def test_samples_of_many_requests_in_random_pieces_are_whole(tmp_path: Path) -> None:
    """More samples than writers, cut and interleaved at random: each has its own rows in order."""
    rng = random.Random(0)
    spool = Spool.create(tmp_path / "s")
    capture = Capture(spool, [1, 2])
    capture.assembler.start()
    with spool.session(FP32) as session:
        lengths = [rng.randint(1, 40) for _ in range(60)]
        tickets = [
            Ticket(session=session.name, number=n, attempt=0, num_tokens=t)
            for n, t in enumerate(lengths)
        ]
        done = [0] * len(tickets)
        while unfinished := [n for n, t in enumerate(lengths) if done[n] < t]:
            pieces, rows = [], []
            for n in rng.sample(unfinished, min(len(unfinished), 5)):
                size = rng.randint(1, lengths[n] - done[n])
                pieces.append((tickets[n].rid(spool.secret), size, done[n]))
                rows += [1000.0 * n + done[n] + i for i in range(size)]
                done[n] += size
            forward(capture, torch.tensor(rows), pieces)
        for n, sample in enumerate(drain(spool, tickets)):
            wanted = [1000 * n + i for i in range(lengths[n])]
            assert sample["input_ids"].tolist() == wanted
            assert sample["aux.values"][:, 4].tolist() == [-w for w in wanted]
            assert sample["final.values"].flatten().tolist() == wanted
            assert sample["last"].tolist() == [wanted[-1:]]


def test_a_forward_waits_while_the_spool_is_slow_and_nothing_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spool = Spool.create(tmp_path / "s")
    capture = Capture(spool, [1, 2])
    go, at_once = threading.Event(), threading.Semaphore(0)
    real = safetensors_file.write

    def slow(path: Path, columns: dict[str, list[torch.Tensor]]) -> None:
        at_once.release()
        assert go.wait(60)
        real(path, columns)

    monkeypatch.setattr("eagle3.store.safetensors_file.write", slow)
    capture.assembler.start()
    most = (
        QUEUE_SIZE + 1 + WRITERS + WRITERS
    )  # waiting for the joining thread, in it, whole, written
    with spool.session(FP32) as session:
        tickets = [
            Ticket(session=session.name, number=n, attempt=0, num_tokens=1)
            for n in range(most + 20)
        ]
        taken = 0

        def forwards() -> None:
            nonlocal taken
            for mine in tickets:
                forward(capture, torch.ones(1) * mine.number, [(mine.rid(spool.secret), 1, 0)])
                taken += 1

        running = threading.Thread(target=forwards)
        running.start()
        for _ in range(WRITERS):
            assert at_once.acquire(timeout=30), "fewer samples written at once"
        deadline = time.monotonic() + 30
        while taken < most and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(0.1)  # time to go further than it may
        assert taken == most and running.is_alive()
        assert not at_once.acquire(blocking=False), "more samples written at once"
        go.set()
        found = drain(spool, tickets)
        running.join()
    assert [s["input_ids"].tolist() for s in found] == [[t.number] for t in tickets]


def test_a_writer_that_fails_goes_on_with_the_next_sample(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More failures than writers: all are told, none ends a writer."""
    spool = Spool.create(tmp_path / "s")
    capture = Capture(spool, [1, 2])
    real = safetensors_file.write

    def odd_fail(path: Path, columns: dict[str, list[torch.Tensor]]) -> None:
        if int(columns["input_ids"][0][0]) % 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(path, columns)

    monkeypatch.setattr("eagle3.store.safetensors_file.write", odd_fail)
    capture.assembler.start()
    with spool.session(FP32) as session:
        for number in range(4 * WRITERS):
            mine = Ticket(session=session.name, number=number, attempt=0, num_tokens=1)
            forward(capture, torch.ones(1) * number, [(mine.rid(spool.secret), 1, 0)])
            if number % 2:
                with pytest.raises(CaptureFailed, match="No space left"):
                    drain(spool, [mine])
            else:
                assert drain(spool, [mine])[0]["input_ids"].tolist() == [number]


def capture_of(target, codec: str = "fp32", **changes):
    ids = [5, 6, 7, 8]
    torch.manual_seed(0)
    final = torch.randn(4, target.hidden_size)
    token = int((target.lm_head().float() @ final[-1]).argmax())
    states = {"aux": torch.randn(4, 3 * target.hidden_size), "final": final}
    states |= {k: v for k, v in changes.items() if k in states}
    captured = {
        "input_ids": torch.tensor(ids, dtype=torch.int32),
        "last": final[-1:],
        "range": row_range(*(s[: min(map(len, states.values()))] for s in states.values())),
        **codecs.get(codec).encode(**states),
        **{k: v for k, v in changes.items() if k not in states},
    }
    return TokenSample.of("x", ids, [0, 0, 1, 1], weight=0.5), captured, [token]


@pytest.mark.parametrize("codec", sorted(CODECS))
def test_a_good_capture_becomes_a_sample(target, codec: str) -> None:
    sample, captured, output = capture_of(target, codec)
    found = Verifier(target, 3, codecs.get(codec)).check(sample, captured, output)
    assert isinstance(found, Encoded)
    assert found.tensors["loss_mask"].tolist() == [0, 0, 1, 1]
    assert found.rows == 4 and found.final_rows == 2 and found.weight == 0.5
    finals = [k for k in found.tensors if k.startswith("final.")]
    assert finals and all(torch.equal(found.tensors[k], captured[k][1:3]) for k in finals)


@pytest.mark.parametrize("codec", sorted(CODECS))
def test_bad_captures_are_rejected_with_a_reason(target, codec: str) -> None:
    verifier = Verifier(target, 3, codecs.get(codec))
    width = 3 * target.hidden_size
    nan = torch.randn(4, width)
    nan[2, 3] = torch.nan
    constant = torch.randn(4, width)
    constant[1] = 0.0
    cases = {
        "row count": {"aux": torch.randn(3, width)},
        "aux width": {"aux": torch.randn(4, width - target.hidden_size)},
        "token ids": {"input_ids": torch.tensor([5, 6, 8, 7], dtype=torch.int32)},
        "aux not finite": {"aux": nan},
        "aux constant": {"aux": constant},
        "final constant": {"final": torch.zeros(4, target.hidden_size)},
    }
    for reason, changes in cases.items():
        assert verifier.check(*capture_of(target, codec, **changes)) == Rejection(reason)
    sample, captured, (token,) = capture_of(target, codec)
    found = verifier.check(sample, captured, [token + 1])
    assert found == Rejection("argmax disagrees with the server's token")
    other = {"last": torch.randn(1, target.hidden_size)}
    assert isinstance(verifier.check(*capture_of(target, codec, **other)), Rejection)
    for kind, width in (("aux", 3), ("final", 1)):  # the copy is of something else
        states = codecs.get(codec).encode(**{kind: torch.randn(4, width * target.hidden_size) / 2})
        found = verifier.check(*capture_of(target, codec, **states))
        assert found == Rejection(f"{kind} not as computed")


def test_a_large_lm_head_is_thinned_out(target, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("extraction.check.MAX_CANDIDATES", 100 * target.hidden_size)
    verifier = Verifier(target, 3, codecs.get("fp32"))
    assert len(verifier.candidates) == 100
    sample, captured, (token,) = capture_of(target)
    assert isinstance(verifier.check(sample, captured, [token]), Encoded)
    logits = verifier.candidates @ captured["last"][0]
    lower = int((target.lm_head().float() @ captured["last"][0]).argmin())
    assert logits.max() > 0 and isinstance(verifier.check(sample, captured, [lower]), Rejection)


def test_the_commonest_tokens_and_some_of_all_others_are_candidates(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert candidates(50, 4).tolist() == list(range(50))
    monkeypatch.setattr("extraction.check.MAX_CANDIDATES", 4 * 20)
    found = candidates(100, 4)
    assert found[:10].tolist() == list(range(10)) and found[-1] == 99
    assert len(found) == 20 and found.diff().min() >= 1 and found[10:].diff().max() <= 10


def test_a_sample_that_was_taken_is_no_longer_in_shared_memory(tmp_path: Path) -> None:
    """The client has room for what it checks and packs; the spool's bytes are counted."""
    spool = Spool.create(tmp_path / "s")
    mine = ticket(number=1, attempt=0, num_tokens=3)
    spool.write(mine, {"input_ids": [torch.arange(3, dtype=torch.int32)]})
    found = spool.take(mine)
    assert found is not None and found["input_ids"].tolist() == [0, 1, 2]
    assert spool.path(mine).name not in Path("/proc/self/maps").read_text()


def test_a_server_that_was_started_again_is_not_held_to_its_past(tmp_path: Path) -> None:
    spool = Spool.create(tmp_path / "s")
    spool.publish_error("no such layer")
    spool.publish_capture({"aux_layers": [1]})
    assert spool.error() is None and spool.capture() == {"aux_layers": [1]}
    spool.publish_error("out of memory")
    assert spool.error() == "out of memory"


def test_a_reason_that_was_told_does_not_stay_in_the_spool(tmp_path: Path) -> None:
    spool = Spool.create(tmp_path / "s")
    mine = ticket(number=1, attempt=0, num_tokens=3)
    spool.fail(mine, "because")
    with pytest.raises(CaptureFailed, match="because"):
        spool.take(mine)
    assert {p.name for p in spool.folder.iterdir()} == {"secret"}


def test_a_spool_in_use_is_not_made_anew(tmp_path: Path) -> None:
    spool = Spool.create(tmp_path / "s")
    with spool.session(FP32) as session:
        secret = spool.secret
        with pytest.raises(UserError, match="another process"):
            Spool.create(spool.folder)
        assert spool.secret == secret and spool.current_session() == session
    assert Spool.create(spool.folder).secret != secret


@pytest.mark.parametrize("by", ["create", "remove"])
def test_a_kill_while_a_spool_is_cleared_leaves_a_spool(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by: str
) -> None:
    """At any file: what is left must not pass for somebody else's folder."""
    real = os.unlink
    for files in range(3):
        spool = Spool.create(tmp_path / f"s{files}")
        spool.publish_capture({})
        spool.publish_error("x")
        left = [files]

        def dying(path: object, *args: object, left: list[int] = left, **kwargs: object) -> None:
            if not left[0]:
                raise KeyboardInterrupt
            left[0] -= 1
            real(path, *args, **kwargs)  # type: ignore[arg-type]

        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(os, "unlink", dying)
            Spool.create(spool.folder) if by == "create" else spool.remove()
        again = Spool.create(spool.folder)
        for _ in range(2):  # whoever comes second finds nothing
            again.remove()
            assert not spool.folder.exists()


def test_spools_of_more_servers_than_now_do_not_stay_in_memory(tmp_path: Path) -> None:
    """A killed run leaves its spools; the next one makes them anew, were they for more servers."""
    config = Config(run_name="x", runs_dir=str(tmp_path))
    config.server.replicas = 3
    before = _spools(config, 3, own=True)
    config.server.replicas = 1
    (only,) = _spools(config, 1, own=True)
    try:
        assert [s.folder.exists() for s in before] == [True, False, False]
    finally:
        only.remove()
