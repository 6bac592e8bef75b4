"""The patched forward on a real server, against Hugging Face's own hidden states."""

from __future__ import annotations

import random

import pytest
import torch

from eagle3.batch import needed_final
from eagle3.errors import UserError
from eagle3.store import codecs
from eagle3.target import Target
from extraction.capture import Extractor, _require_fit
from extraction.samples import TokenSample
from tests.integration.conftest import AUX_LAYERS, CHUNK, CaptureServer, capture_all

pytestmark = pytest.mark.server
TOLERANCE = 1e-4  # float32 on both sides, other summation orders


def close(found: torch.Tensor, wanted: torch.Tensor) -> None:
    torch.testing.assert_close(found, wanted, rtol=TOLERANCE, atol=TOLERANCE)


def make_samples(target: Target, lengths: list[int], seed: int = 0) -> list[TokenSample]:
    rng = random.Random(seed)
    return [
        TokenSample.of(
            f"s{i}",
            [rng.randrange(3, target.vocab_size) for _ in range(n)],
            [0] * (n // 2) + [1] * (n - n // 2),
        )
        for i, n in enumerate(lengths)
    ]


@pytest.fixture(scope="module")
def model(target: Target):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(target.folder, dtype=torch.float32).eval()


@torch.no_grad()
def expected(model, sample: TokenSample) -> tuple[torch.Tensor, torch.Tensor]:
    """Aux and the kept final states."""
    ids = torch.from_numpy(sample.input_ids).long()
    states = model(ids[None], output_hidden_states=True).hidden_states
    needed = needed_final(torch.from_numpy(sample.loss_mask))
    return torch.cat([states[k][0] for k in AUX_LAYERS], dim=-1), states[-1][0][needed]


def test_states_equal_hugging_face_at_the_canonical_layers(
    capturing: Extractor, target: Target, model
) -> None:
    """One token, around one chunk, several chunks, and everything at once."""
    lengths = [1, 2, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK + 17, 500, 33, 7, 129]
    samples = make_samples(target, lengths)
    for sample, found in zip(samples, capture_all(capturing, samples, 8), strict=True):
        aux, final = expected(model, sample)
        assert found.tensors["input_ids"].tolist() == sample.input_ids.tolist()
        close(found.tensors["aux.values"], aux)
        close(found.tensors["final.values"], final)


def test_repeated_prompts_and_shared_prefixes_lose_no_row(
    capturing: Extractor, target: Target, model
) -> None:
    (base,) = make_samples(target, [150], seed=1)
    longer = TokenSample.of("l", [*base.input_ids, 9, 10, 11], [1] * 153)
    samples = [base, base, longer, base, longer]
    for sample, found in zip(samples, capture_all(capturing, samples, 4), strict=True):
        close(found.tensors["aux.values"], expected(model, sample)[0])


def test_the_result_does_not_depend_on_concurrency(capturing: Extractor, target: Target) -> None:
    """Not by a bit."""
    samples = make_samples(target, [40, 90, 130, 20, 64, 65, 200, 11, 1, 2, 63, 300], seed=2)
    alone = [sample.sha256 for sample in capture_all(capturing, samples, 1)]
    for concurrency in (2, 8, 32):
        assert [s.sha256 for s in capture_all(capturing, samples, concurrency)] == alone


def test_only_requests_with_the_secret_are_captured(
    capturing: Extractor, capture_server: CaptureServer, target: Target
) -> None:
    (sample,) = make_samples(target, [30], seed=3)
    sampling = {"max_new_tokens": 1, "temperature": 0}
    secret, folder = capture_server.spool.secret, capture_server.spool.folder
    (session,) = {s.value.session.name for s in capturing.pool._members}
    before = sorted(p.name for p in folder.iterdir())
    for rid in (
        None,
        f"e3-{'0' * 32}-{session}-5-0-30",
        f"e3-{secret}-{session}-../../x-0-30",
        f"e3-{secret}-01234567-5-0-30",  # a client that is no more
    ):
        capture_server.server.client.generate(sample.input_ids.tolist(), sampling, rid=rid)
    capture_all(capturing, [sample], 1)  # the writer has seen them all once this one is there
    assert sorted(p.name for p in folder.iterdir()) == before
    assert capture_server.spool.error() is None


def test_the_plugin_says_what_it_captures(capture_server: CaptureServer, target: Target) -> None:
    facts = capture_server.spool.capture()
    assert facts is not None
    assert facts["aux_layers"] == AUX_LAYERS
    assert facts["architecture"] == "LlamaForCausalLM"
    assert facts["dtype"] == "float32" and facts["chunked_prefill_size"] == CHUNK


def test_samples_up_to_the_servers_limit_are_captured_and_longer_ones_refused(
    capturing: Extractor, capture_server: CaptureServer, target: Target, model
) -> None:
    limit = capture_server.server.client.info()["max_req_input_len"]
    (sample,) = make_samples(target, [limit - 1], seed=4)
    (found,) = capture_all(capturing, [sample], 1)
    close(found.tensors["aux.values"], expected(model, sample)[0])
    names = {str(target.folder)}
    place = (capture_server.server, capture_server.spool)
    assert _require_fit(*place, AUX_LAYERS, names, limit - 1)["dtype"] == "float32"
    with pytest.raises(UserError, match=f"has {limit} tokens"):
        _require_fit(*place, AUX_LAYERS, names, limit)


def test_a_server_that_captures_something_else_is_refused(
    capture_server: CaptureServer, target: Target
) -> None:
    names = {str(target.folder)}
    place = (capture_server.server, capture_server.spool)
    with pytest.raises(UserError, match=r"captures layers \[1, 3, 4\], this run \[1, 2, 3\]"):
        _require_fit(*place, [1, 2, 3], names, 1)
    with pytest.raises(UserError, match="serves"):
        _require_fit(*place, AUX_LAYERS, {"another/model"}, 1)


def test_two_clients_cannot_share_a_spool(
    capturing: Extractor, capture_server: CaptureServer
) -> None:
    with (
        pytest.raises(UserError, match="another process is at work"),
        capture_server.spool.session(codecs.get("fp32")),
    ):
        pass
