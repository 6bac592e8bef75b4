"""Write a checkpoint as drafter folders: `python -m training.export experiment=<name>`.

<run>/drafter is what SGLang serves; <run>/drafter/speculators is the same for vLLM. A folder of any
origin, in either format, can be checked with `python -m training.export --check <folder>`.
"""

from __future__ import annotations

import logging
import shutil
import sys
from dataclasses import asdict
from pathlib import Path

import torch

from eagle3 import export as formats
from eagle3 import speculators_format
from eagle3.command import command
from eagle3.config import Config
from eagle3.errors import UserError
from eagle3.manifest import Manifest, require_match
from eagle3.store.reader import StoreReader
from eagle3.target import Target
from training import checkpoint
from training.model import build_model, draft_vocab, init_identity
from training.train import KIND

log = logging.getLogger(__name__)
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32, "float16": torch.float16}


def export(config: Config) -> Path:
    """Export the run's chosen checkpoint; return the folder for SGLang."""
    if config.export.dtype not in DTYPES:
        raise UserError(f"export.dtype={config.export.dtype} is not one of {sorted(DTYPES)}")
    target = Target.from_config(config.target)
    root = config.checkpoints_dir
    trained = Manifest.load(root, KIND)
    remedy = "Use the configuration the checkpoints were trained with."
    reader = StoreReader(config.store_dir)
    # norm_output, say, has no weights of its own: only the record tells another value apart
    wanted = {
        "target": target.identity(),
        "store": reader.manifest.hash(),
        "aux_layers": target.aux_layers(config.target.aux_layers),
        "draft": asdict(config.draft),
        "init_from": init_identity(config),
    }
    require_match(wanted, trained.match, f"{root}", remedy)
    chosen = checkpoint.choose(root, config.export.checkpoint)
    train_samples = formats.trained_samples(trained.facts, len(reader))
    vocab, _ = draft_vocab(config, reader, train_samples)
    drafter = build_model(config, target, vocab).drafter
    kind = "ema" if checkpoint.has_average(chosen) else "drafter"
    checkpoint.load_weights(drafter, chosen, kind)
    aux_layers = trained.match["aux_layers"]
    dtype = DTYPES[config.export.dtype]
    manifest = Manifest(
        kind=formats.KIND,
        match={"target": target.identity(), "aux_layers": aux_layers},
        config=config.resolved(),
        inputs={"store": reader.manifest.hash(), "checkpoint": chosen.name},
        facts={
            "state": checkpoint.load_state(chosen),
            "weights": "moving average" if kind == "ema" else "last step",
            "coverage": trained.facts["coverage"],
            "validation_samples": trained.facts["validation_samples"],
            "left_out_samples": trained.facts.get("left_out_samples", []),
        },
    )
    formats.save_sglang(drafter, config.drafter_dir, target, aux_layers, dtype, manifest)
    other = config.drafter_dir / "speculators"
    if other.exists():  # of an earlier export, with other weights perhaps
        shutil.rmtree(other)
    if config.export.speculators:
        speculators_format.save(
            drafter.to(dtype),
            other,
            target,
            aux_layers,
            trained.match["ttt_steps"],
        )
    log.info("exported %s (%s) to %s", chosen.name, kind, config.drafter_dir)
    return config.drafter_dir


def check(folder: Path) -> int:
    """Print a drafter folder's problems; exit status 0 if it has none, 2 otherwise."""
    try:
        theirs = speculators_format.recognised(folder)
        found = speculators_format.problems(folder) if theirs else formats.problems(folder)
    except UserError as error:
        found = [str(error)]
    sys.stdout.write("\n".join(found or [f"{folder}: complete and consistent"]) + "\n")
    return 2 if found else 0


@command("export")
def main(config: Config) -> None:
    export(config)


if __name__ == "__main__":
    if "--check" in sys.argv:
        if len(sys.argv) != 3 or sys.argv[1] != "--check":
            sys.stderr.write("usage: python -m training.export --check FOLDER\n")
            raise SystemExit(2)
        raise SystemExit(check(Path(sys.argv[2])))
    main()
