"""Settings and batches that a capturing server refuses, rather than store the wrong rows."""

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from eagle3.serving import cpu
from extraction import sglang_limits

PLAIN = {"disable_radix_cache": True, "tp_size": 8, "dp_size": 1, "pp_size": 1}


def test_tensor_and_data_parallel_servers_may_capture() -> None:
    sglang_limits.check_settings(SimpleNamespace(**PLAIN))
    sglang_limits.check_settings(
        SimpleNamespace(**{**PLAIN, "dp_size": 2}, attn_cp_size=1, enable_prefill_cp=False)
    )


@pytest.mark.parametrize(
    ("setting", "remedy"),
    [
        ({"disable_radix_cache": False}, "--disable-radix-cache"),
        ({"speculative_algorithm": "EAGLE3"}, "start it plain"),
        ({"pp_size": 2}, r"pp_size=2.*use tp_size"),
        ({"attn_cp_size": 2}, r"attn_cp_size=2.*use tp_size"),
        ({"enable_prefill_cp": True}, "context parallelism"),
        ({"enable_two_batch_overlap": True}, "two-batch overlap"),
        ({"enable_layernorm_sp": True}, "sequence parallelism"),
    ],
)
def test_settings_that_lose_or_split_rows_are_refused(setting: dict, remedy: str) -> None:
    with pytest.raises(RuntimeError, match=remedy):
        sglang_limits.check_settings(SimpleNamespace(**{**PLAIN, **setting}))


def test_a_forward_must_hold_all_rows_of_its_batch() -> None:
    ids, final = torch.zeros(8), torch.zeros(8, 4)
    sglang_limits.check_rows(8, ids, [final, final], final)
    sglang_limits.check_rows(7, ids, torch.zeros(8, 8), final)  # one row of padding
    for short in (
        (ids[:7], final, final), (ids, final[:7], final), (ids, final, final[:7]),
        (ids, [final, final[:7]], final),
    ):  # fmt: skip
        with pytest.raises(RuntimeError, match="split over processes"):
            sglang_limits.check_rows(8, *short)


def test_sglang_still_calls_its_settings_so() -> None:
    """A renamed setting would no longer be refused."""
    names = ["disable_radix_cache", *sglang_limits.ONE_ONLY, *sglang_limits.OFF_ONLY]
    code = (
        "import sys; from sglang.srt.server_args import ServerArgs; "
        "args = ServerArgs(model_path='none'); "
        "print(*[name for name in sys.argv[1:] if not hasattr(args, name)])"
    )
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code, *names],
        env={**os.environ, **cpu.environment()}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.splitlines()[-1].split() == []
