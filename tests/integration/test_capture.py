"""The patched forward on a real server, against Hugging Face's own hidden states."""

from __future__ import annotations

import random

import pytest
import torch

from eagle3.errors import UserError
from eagle3.serving.client import in_order
from eagle3.store.writer import Sample
from eagle3.target import Target
from extraction.extract import Extractor, _require_room
from extraction.samples import TokenSample
from tests.integration.conftest import AUX_LAYERS, CHUNK

pytestmark = pytest.mark.server
TOLERANCE = 1e-4  # float32 on both sides, other summation orders


def make_samples(target: Target, lengths: list[int], seed: int = 0) -> list[TokenSample]:
    rng = random.Random(seed)
    return [
        TokenSample(
            id=f"s{i}",
            input_ids=[rng.randrange(3, target.vocab_size) for _ in range(n)],
            loss_mask=[0] * (n // 2) + [1] * (n - n // 2),
        )
        for i, n in enumerate(lengths)
    ]


@pytest.fixture(scope="module")
def model(target: Target):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(target.folder, dtype=torch.float32).eval()


@torch.no_grad()
def expected(model, sample: TokenSample) -> tuple[torch.Tensor, torch.Tensor]:
    states = model(torch.tensor([sample.input_ids]), output_hidden_states=True).hidden_states
    return torch.cat([states[k][0] for k in AUX_LAYERS], dim=-1), states[-1][0]


def capture_all(extractor: Extractor, samples: list[TokenSample], concurrency: int) -> list[Sample]:
    def work(number: int) -> Sample:
        found = extractor.capture(number, samples[number])
        assert isinstance(found, Sample), found
        return found

    return list(in_order(work, range(len(samples)), concurrency))


def test_states_equal_hugging_face_at_the_canonical_layers(
    capture_server: Extractor, target: Target, model
) -> None:
    """One token, around one chunk, several chunks, and everything at once."""
    lengths = [1, 2, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK + 17, 500, 33, 7, 129]
    samples = make_samples(target, lengths)
    for sample, found in zip(samples, capture_all(capture_server, samples, 8), strict=True):
        aux, final = expected(model, sample)
        assert found.input_ids.tolist() == sample.input_ids
        torch.testing.assert_close(found.aux, aux, rtol=TOLERANCE, atol=TOLERANCE)
        torch.testing.assert_close(found.final, final, rtol=TOLERANCE, atol=TOLERANCE)


def test_repeated_prompts_and_shared_prefixes_lose_no_row(
    capture_server: Extractor, target: Target, model
) -> None:
    (base,) = make_samples(target, [150], seed=1)
    longer = TokenSample(id="l", input_ids=[*base.input_ids, 9, 10, 11], loss_mask=[1] * 153)
    samples = [base, base, longer, base, longer]
    for sample, found in zip(samples, capture_all(capture_server, samples, 4), strict=True):
        torch.testing.assert_close(
            found.aux, expected(model, sample)[0], rtol=TOLERANCE, atol=TOLERANCE
        )


def test_the_result_does_not_depend_on_concurrency(
    capture_server: Extractor, target: Target
) -> None:
    samples = make_samples(target, [40, 90, 130, 20, 64, 65, 200, 11], seed=2)
    alone = capture_all(capture_server, samples, 1)
    together = capture_all(capture_server, samples, 8)
    for a, b in zip(alone, together, strict=True):
        torch.testing.assert_close(a.aux, b.aux, rtol=TOLERANCE, atol=TOLERANCE)
        torch.testing.assert_close(a.final, b.final, rtol=TOLERANCE, atol=TOLERANCE)


def test_only_requests_with_the_secret_are_captured(
    capture_server: Extractor, target: Target
) -> None:
    (sample,) = make_samples(target, [30], seed=3)
    sampling = {"max_new_tokens": 1, "temperature": 0}
    for rid in (None, "e3-" + "0" * 32 + "-5-0-30", "e3-../../x-1-0-30"):
        capture_server.client.generate(sample.input_ids, sampling, rid=rid)
    assert list(capture_server.spool.folder.glob("*.safetensors")) == []
    assert capture_server.spool.error() is None


def test_the_plugin_says_what_it_captures(capture_server: Extractor, target: Target) -> None:
    facts = capture_server.spool.capture()
    assert facts["aux_layers"] == AUX_LAYERS
    assert facts["architecture"] == "LlamaForCausalLM"
    assert facts["dtype"] == "float32" and facts["chunked_prefill_size"] == CHUNK


def test_samples_up_to_the_servers_limit_are_captured_and_longer_ones_refused(
    capture_server: Extractor, target: Target, model
) -> None:
    limit = capture_server.client.info()["max_req_input_len"]
    samples = make_samples(target, [limit - 1], seed=4)
    _require_room(capture_server.client, limit - 1)
    (found,) = capture_all(capture_server, samples, 1)
    torch.testing.assert_close(
        found.aux, expected(model, samples[0])[0], rtol=TOLERANCE, atol=TOLERANCE
    )
    with pytest.raises(UserError, match=f"has {limit} tokens"):
        _require_room(capture_server.client, limit)
