from pathlib import Path

import pytest
import torch

from eagle3.errors import UserError
from eagle3.store.writer import Sample
from extraction.check import Rejection, Verifier
from extraction.samples import TokenSample
from extraction.sglang_plugin import Capture
from extraction.spool import Spool, Ticket

SECRET = "0123456789abcdef" * 2


def test_tickets_travel_in_request_ids() -> None:
    ticket = Ticket(number=7, attempt=1, num_tokens=99)
    assert Ticket.parse(ticket.rid(SECRET), SECRET) == ticket


@pytest.mark.parametrize(
    "rid",
    [
        "health_check_1",
        Ticket(number=7, attempt=1, num_tokens=9).rid("f" * 32),
        f"e3-{SECRET}-../../etc-1-9",
        f"e3-{SECRET}-7-1-9/../x",
        f"e3-{SECRET}-7-1",
        f"e3-{SECRET}-7-1-9\n",
        f"x e3-{SECRET}-7-1-9",
    ],
)
def test_other_request_ids_are_not_captured(rid: str) -> None:
    assert Ticket.parse(rid, SECRET) is None


def test_spool_is_private_and_starts_clean(tmp_path: Path) -> None:
    folder = tmp_path / "spool"
    spool = Spool.create(folder)
    first = spool.secret
    ticket = Ticket(number=1, attempt=0, num_tokens=3)
    spool.write(ticket, {"input_ids": torch.arange(3)})
    assert folder.stat().st_mode & 0o777 == 0o700
    assert (folder / "secret").stat().st_mode & 0o777 == 0o600
    again = Spool.create(folder)
    assert again.secret != first and again.take(ticket) is None


def test_a_folder_with_other_things_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "results.json").write_text("{}")
    with pytest.raises(UserError, match="no spool"):
        Spool.create(tmp_path)
    assert (tmp_path / "results.json").exists()


def test_a_sample_is_taken_once(tmp_path: Path) -> None:
    spool = Spool.create(tmp_path / "s")
    ticket = Ticket(number=1, attempt=0, num_tokens=3)
    assert spool.take(ticket) is None
    spool.write(ticket, {"input_ids": torch.arange(3)})
    assert spool.take(ticket)["input_ids"].tolist() == [0, 1, 2]
    assert spool.take(ticket) is None


def test_the_first_error_stays(tmp_path: Path) -> None:
    spool = Spool.create(tmp_path / "s")
    spool.publish_error("cause")
    spool.publish_error("consequence")
    assert spool.error() == "cause"


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


@pytest.mark.parametrize("packed", [True, False])
def test_chunks_of_interleaved_requests_are_joined(tmp_path: Path, packed: bool) -> None:
    spool = Spool.create(tmp_path / "s")
    capture = Capture(spool, [1, 2])
    a, b = (Ticket(number=n, attempt=0, num_tokens=t) for n, t in ((0, 5), (1, 2)))
    forwards = [
        [(a.rid(spool.secret), 2, 0), ("somebody else", 3, 0)],
        [(b.rid(spool.secret), 2, 0), (a.rid(spool.secret), 3, 2)],
    ]
    rows = torch.arange(10.0)
    for i, pieces in enumerate(forwards):
        part = rows[5 * i : 5 * i + 5]
        aux = [part[:, None].repeat(1, 4), -part[:, None].repeat(1, 4)]
        capture._collect(
            part.int(), part[:, None], Batch(pieces), torch.cat(aux, 1) if packed else aux
        )
    import threading

    threading.Thread(target=capture._write_samples, daemon=True).start()
    samples = []
    for ticket in (a, b):
        while (sample := spool.take(ticket)) is None:
            assert spool.error() is None, spool.error()
        samples.append(sample)
    assert samples[0]["input_ids"].tolist() == [0, 1, 7, 8, 9]
    assert samples[0]["final"].flatten().tolist() == [0, 1, 7, 8, 9]
    assert samples[0]["aux"][:, 0].tolist() == [0, 1, 7, 8, 9] and samples[0]["aux"].shape == (5, 8)
    assert samples[1]["input_ids"].tolist() == [5, 6]
    assert len(list((tmp_path / "s").glob("*.safetensors"))) == 0


def capture_of(target, **changes):
    ids = [5, 6, 7, 8]
    torch.manual_seed(0)
    final = torch.randn(4, target.hidden_size)
    token = int((target.lm_head().float() @ final[-1]).argmax())
    tensors = {
        "input_ids": torch.tensor(ids, dtype=torch.int32),
        "aux": torch.randn(4, 3 * target.hidden_size),
        "final": final,
    }
    sample = TokenSample(id="x", input_ids=ids, loss_mask=[0, 0, 1, 1])
    return sample, {**tensors, **changes}, [token]


def test_a_good_capture_becomes_a_sample(target) -> None:
    sample, tensors, output = capture_of(target)
    found = Verifier(target, 3).check(sample, tensors, output)
    assert isinstance(found, Sample) and found.loss_mask.tolist() == [0, 0, 1, 1]


def test_bad_captures_are_rejected_with_a_reason(target) -> None:
    verifier = Verifier(target, 3)
    width = 3 * target.hidden_size
    nan = torch.randn(4, width)
    nan[2, 3] = torch.nan
    constant = torch.randn(4, width)
    constant[1] = 0.0
    cases = {
        "row count": {"aux": torch.randn(3, width)},
        "aux width": {"aux": torch.randn(4, width - 1)},
        "token ids": {"input_ids": torch.tensor([5, 6, 8, 7])},
        "aux not finite": {"aux": nan},
        "aux constant": {"aux": constant},
        "final constant": {"final": torch.zeros(4, target.hidden_size)},
    }
    for reason, changes in cases.items():
        assert verifier.check(*capture_of(target, **changes)) == Rejection(reason)
    sample, tensors, (token,) = capture_of(target)
    found = verifier.check(sample, tensors, [token + 1])
    assert found == Rejection("argmax disagrees with the server's token")
    swapped = tensors["final"][[0, 1, 3, 2]]
    assert isinstance(verifier.check(sample, {**tensors, "final": swapped}, [token]), Rejection)
