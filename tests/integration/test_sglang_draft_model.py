"""SGLang's own draft model, loaded from our folders, says what our drafter says."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from eagle3 import export, serving
from eagle3.manifest import Manifest
from eagle3.target import Target
from tests.chain_drafter import ChainDrafter
from tests.unit.test_export import AUX, target_drafter

ROOT = Path(__file__).resolve().parents[2]
OPTIONS = [
    {}, {"num_layers": 3}, {"norm_before_fc": True}, {"fc_norm": True, "num_layers": 2},
]  # fmt: skip


@torch.no_grad()
def test_logits_of_every_row_are_the_same(target: Target, tmp_path: Path) -> None:
    drafters, folders = [], []
    for number, options in enumerate(OPTIONS):
        drafter = target_drafter(target, **options)
        for name, parameter in drafter.named_parameters():
            if "norm" in name:
                parameter.add_(torch.randn_like(parameter) * 0.2)
        folders.append(tmp_path / str(number))
        manifest = Manifest(kind="drafter", match={})
        export.save_sglang(drafter, folders[-1], target, AUX, torch.float32, manifest)
        drafters.append(drafter)
    inputs = {
        "aux": torch.randn(20, len(AUX) * target.hidden_size),
        "tokens": torch.randint(0, target.vocab_size, (20,)),
        "embeddings": target.embeddings().float(),
    }
    save_file(inputs, tmp_path / "inputs.safetensors")
    kernels = Path(serving.__file__).parent / "cpu" / "kernels"
    env = os.environ | {
        "SGLANG_USE_CPU_ENGINE": "1", "TORCHDYNAMO_DISABLE": "1", "CUDA_VISIBLE_DEVICES": "",
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(kernels)]),
    }  # fmt: skip
    command = [sys.executable, "-m", "tests.integration.sglang_logits"]
    done = subprocess.run(
        [*command, str(tmp_path / "inputs.safetensors"), *map(str, folders)],
        cwd=ROOT, env=env, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    for drafter, folder in zip(drafters, folders, strict=True):
        found = load_file(folder / "logits.safetensors")["logits"]
        for row in range(20):
            chain = ChainDrafter(drafter)
            chain.extend(inputs["aux"][: row + 1], inputs["tokens"][: row + 1])
            torch.testing.assert_close(found[row], chain.logits(), rtol=1e-4, atol=1e-4)
        # SGLang makes this norm in every layer and uses it in the first
        unused = [
            f"model.layers.{i}.input_layernorm.weight" for i in range(1, drafter.config.num_layers)
        ]
        assert json.loads((folder / "unset.json").read_text()) == unused
