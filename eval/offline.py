"""Predict live acceptance without a server: `python -m eval.offline experiment=<name>`.

Loads the exported folder, as a server would, and replays speculative decoding over
samples of the store that training never saw (`eagle3.walk`). Writes <run>/eval/offline.json.
"""

from __future__ import annotations

import logging
from typing import Any

import numpy as np

from eagle3 import export as formats
from eagle3 import logging as console
from eagle3 import provenance
from eagle3.command import command
from eagle3.config import Config
from eagle3.errors import UserError
from eagle3.manifest import Manifest, require_match, write_json
from eagle3.store.reader import StoreReader
from eagle3.target import Target
from eagle3.walk import sample_histograms
from eval.stats import acceptance

log = logging.getLogger(__name__)


def offline(config: Config) -> dict[str, Any]:
    """Acceptance of the exported drafter on the store's validation samples.

    Raises:
        UserError: drafter or store is missing, or they do not belong together.
    """
    if not config.store_dir.exists():
        raise UserError(
            f"no store in {config.store_dir}, and without held-out samples acceptance cannot be "
            "predicted: copy it there, or run eval.live with eval.offline=false"
        )
    target = Target.from_config(config.target)
    manifest = Manifest.load(config.drafter_dir, formats.KIND)
    drafter, aux_layers = formats.load_sglang(config.drafter_dir, target)
    reader = StoreReader(config.store_dir)
    remedy = "Export the drafter that was trained on this store, or extract its store again."
    wanted = {"target": manifest.match["target"], "aux_layers": aux_layers}
    require_match(wanted, reader.manifest.match, f"the store in {config.store_dir}", remedy)
    if manifest.inputs["store"] != reader.manifest.hash():
        raise UserError(f"{config.drafter_dir} was trained on another store. {remedy}")
    numbers = manifest.facts["validation_samples"][: config.eval.offline_samples]
    if not numbers:
        raise UserError("the drafter was trained without validation samples to evaluate on")
    histograms: list[list[int]] = []
    with console.progress("offline") as bar:
        task = bar.add_task("", total=len(numbers), note="")
        for number in numbers:
            ids, mask = reader.tokens(number)
            aux, _ = reader.states(number)
            turns = sample_histograms(
                drafter, ids.tolist(), mask.int().tolist(), aux.float(), config.eval.num_steps
            )
            histograms.append(np.sum(turns, axis=0).tolist())
            bar.advance(task)
    result = {
        **acceptance(histograms).as_dict(),
        "samples": len(numbers),
        "num_steps": config.eval.num_steps,
        "versions": provenance.versions(),
    }
    write_json(config.eval_dir / "offline.json", result)
    log.info(
        "offline: step-0 acceptance %.1f%%, accept length %.2f on %d held-out samples",
        100 * result["step0"], result["accept_length"], len(numbers),
    )  # fmt: skip
    return result


@command("offline")
def main(config: Config) -> None:
    offline(config)


if __name__ == "__main__":
    main()
