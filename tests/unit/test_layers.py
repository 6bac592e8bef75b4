import json
import os
import subprocess
import sys

import pytest

from eagle3 import layers
from eagle3.errors import UserError
from eagle3.serving import cpu
from tests.integration import tiny_models


def test_translation_per_family() -> None:
    assert layers.to_sglang([3, 31, 59], "LlamaForCausalLM") == [2, 30, 58]
    assert layers.to_sglang([3, 31, 59], "DeepseekV3ForCausalLM") == [3, 31, 59]


@pytest.mark.parametrize("architecture", sorted(layers.FAMILIES))
@pytest.mark.parametrize("ids", [[2, 15, 27], [3, 31, 59]])
def test_translation_round_trips(architecture: str, ids: list[int]) -> None:
    assert layers.from_sglang(layers.to_sglang(ids, architecture), architecture) == ids


def test_a_deepseek_draft_that_starts_with_1_means_the_next_layers() -> None:
    assert layers.from_sglang([1, 29, 57], "DeepseekV3ForCausalLM") == [2, 30, 58]


def test_embeddings_can_be_captured() -> None:
    assert layers.to_sglang([0, 3], "LlamaForCausalLM") == [-1, 2]
    assert layers.from_sglang([-1, 2], "LlamaForCausalLM") == [0, 3]
    assert layers.to_sglang([0, 3], "DeepseekV3ForCausalLM") == [0, 3]


def test_what_sglang_cannot_express_is_refused() -> None:
    with pytest.raises(UserError, match="SGLang cannot capture"):
        layers.to_sglang([1, 3], "DeepseekV3ForCausalLM")


@pytest.mark.parametrize("ids", [[], [3, 1], [2, 2], [2, 30], [-1, 2]])
def test_bad_layer_ids_are_refused(ids: list[int]) -> None:
    with pytest.raises(UserError, match="aux_layers"):
        layers.check(ids, 30)


def test_a_shallow_target_has_no_default_layers() -> None:
    assert layers.default(30) == [2, 15, 27]
    with pytest.raises(UserError, match="too shallow"):
        layers.default(4)


def test_an_unproven_architecture_is_refused() -> None:
    with pytest.raises(UserError, match=r"not known.*LlamaForCausalLM.*tiny_models\.py"):
        layers.family_of("GPT2LMHeadModel")


def test_an_architecture_whose_states_are_others_is_refused_with_the_reason() -> None:
    with pytest.raises(UserError, match="without the residual stream"):
        layers.resolve([2, 3], 26, "Gemma3ForCausalLM")


def test_layers_of_a_run_are_checked_against_depth_and_kind() -> None:
    assert layers.resolve(None, 61, "DeepseekV3ForCausalLM") == [2, 30, 58]
    assert layers.resolve([3, 31, 59], 61, "KimiK25ForConditionalGeneration") == [3, 31, 59]
    with pytest.raises(UserError, match=r"0\.\.31"):
        layers.resolve([3, 31, 59], 32, "LlamaForCausalLM")
    with pytest.raises(UserError, match="SGLang cannot capture"):
        layers.resolve([1, 3], 61, "DeepseekV3ForCausalLM")


def test_every_architecture_of_the_table_is_probed_on_a_server() -> None:
    assert set(tiny_models.SHAPES) == set(layers.FAMILIES)


SETTERS = """
import json, sys
from types import SimpleNamespace
from sglang.srt.models import (
    deepseek_v2, glm4_moe, glm4_moe_lite, kimi_k25, llama, mistral, qwen2, qwen3, qwen3_moe,
)

found = {}
modules = (deepseek_v2, glm4_moe, glm4_moe_lite, kimi_k25, llama, mistral, qwen2, qwen3, qwen3_moe)
for name, ids in json.loads(sys.argv[1]).items():
    cls = next(getattr(m, name) for m in modules if hasattr(m, name))
    decoder = SimpleNamespace(layers_to_capture=[])
    decoder.set_eagle3_layers_to_capture = lambda k, d=decoder: setattr(d, "layers_to_capture", k)
    model = SimpleNamespace(model=decoder, pp_group=SimpleNamespace(is_last_rank=True))
    if name.startswith("Kimi"):  # hands the ids to the language model it wraps
        inner, text = model, deepseek_v2.DeepseekV3ForCausalLM
        inner.set_eagle3_layers_to_capture = lambda k: text.set_eagle3_layers_to_capture(inner, k)
        model = SimpleNamespace(language_model=inner)
    cls.set_eagle3_layers_to_capture(model, ids)
    found[name] = decoder.layers_to_capture
print(json.dumps(found))
"""


def test_sglangs_own_setters_arrive_at_the_canonical_ids() -> None:
    """The installed SGLang's classes, without weights, in a process like its CPU engine's."""
    wanted = {name: [3, 31, 59] for name in layers.FAMILIES}
    given = {name: layers.to_sglang(ids, name) for name, ids in wanted.items()}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", SETTERS, json.dumps(given)],
        env={**os.environ, **cpu.environment()}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(done.stdout.splitlines()[-1]) == wanted
