import pytest

from eagle3 import layers
from eagle3.errors import UserError


def test_translation_per_family() -> None:
    assert layers.to_sglang([3, 31, 59], "LlamaForCausalLM") == [2, 30, 58]
    assert layers.to_sglang([3, 31, 59], "DeepseekV3ForCausalLM") == [3, 31, 59]


@pytest.mark.parametrize("architecture", sorted(layers.FAMILIES))
@pytest.mark.parametrize("ids", [[2, 15, 27], [3, 31, 59]])
def test_translation_round_trips(architecture: str, ids: list[int]) -> None:
    assert layers.from_sglang(layers.to_sglang(ids, architecture), architecture) == ids


def test_a_deepseek_draft_that_starts_with_1_means_the_next_layers() -> None:
    assert layers.from_sglang([1, 29, 57], "DeepseekV3ForCausalLM") == [2, 30, 58]


@pytest.mark.parametrize(
    ("ids", "architecture"), [([0, 3], "LlamaForCausalLM"), ([1, 3], "DeepseekV3ForCausalLM")]
)
def test_what_sglang_cannot_express_is_refused(ids: list[int], architecture: str) -> None:
    with pytest.raises(UserError, match="SGLang cannot capture"):
        layers.to_sglang(ids, architecture)


@pytest.mark.parametrize("ids", [[], [3, 1], [2, 2], [2, 30], [-1, 2]])
def test_bad_layer_ids_are_refused(ids: list[int]) -> None:
    with pytest.raises(UserError, match="aux_layers"):
        layers.check(ids, 30)


def test_a_shallow_target_has_no_default_layers() -> None:
    assert layers.default(30) == [2, 15, 27]
    with pytest.raises(UserError, match="too shallow"):
        layers.default(4)


def test_an_unproven_architecture_is_refused() -> None:
    with pytest.raises(UserError, match="not known"):
        layers.family_of("GPT2LMHeadModel")
