"""What `extractor` refuses before it starts a server, and what one request may come to."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from eagle3.config import Config
from eagle3.errors import UserError
from eagle3.serving.client import Answer, Client, RequestFailed
from eagle3.store import codecs
from eagle3.target import Target
from extraction import capture
from extraction.capture import Station, _request, extractor
from extraction.samples import TokenSample
from extraction.spool import Session, Spool

BF16 = codecs.get("bf16")


def test_shared_memory_too_small_for_the_captures_is_told_before_a_server_starts(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A container has 64 MB of it unless told otherwise; every capture would fail, one by one."""
    config = Config(run_name="x", runs_dir=str(tmp_path))
    config.server.replicas = 2
    config.extract.spools = [str(tmp_path / "a"), str(tmp_path / "b")]
    needed = 2 * 8 * 100 * (4 * target.hidden_size * 2 + 4)
    usage = SimpleNamespace(free=needed - 1)
    monkeypatch.setattr(capture.shutil, "disk_usage", lambda _: usage)
    monkeypatch.setattr(capture, "get_servers", lambda *_, **__: 1 / 0)
    arguments: Any = (config, target, [1, 2, 3], BF16, 100)
    with (
        pytest.raises(UserError, match=rf"{needed:,} bytes .*extract\.spool_bytes"),
        extractor(*arguments),
    ):
        pass
    usage.free += 1
    with pytest.raises(ZeroDivisionError), extractor(*arguments):
        pass
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize("key", ["extract.concurrency", "server.replicas"])
def test_no_server_or_none_of_its_time_is_a_users_mistake(
    target: Target, tmp_path: Path, key: str
) -> None:
    config = Config(run_name="x", runs_dir=str(tmp_path))
    group, name = key.split(".")
    setattr(getattr(config, group), name, 0)
    arguments: Any = (config, target, [1, 2, 3], BF16, 100)
    with pytest.raises(UserError, match=rf"{key}=0 must be 1 or more"), extractor(*arguments):
        pass


def test_an_aborted_request_is_tried_again_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has no token to check a capture by, and none may come."""
    spool = Spool.create(tmp_path / "s")
    client = Client("http://fake")
    aborted = Answer(output_ids=[], finish="abort", latency_s=0.0)
    monkeypatch.setattr(client, "generate", lambda *_, **__: aborted)
    monkeypatch.setattr(spool, "take", lambda _: {})
    station = Station(client, spool, Session("0badcafe", BF16), spool.secret)
    with pytest.raises(RequestFailed, match=r"ended the request for sample s \(abort\)"):
        _request(station, 0, 0, TokenSample.of("s", [1, 2, 3], [0, 1, 1]))
