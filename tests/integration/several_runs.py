"""Several trainings in one group of processes: `several_runs.py '[{"overrides": [...]}, ...]'`.

Starting ranks costs more than a tiny training, so the tests of ZeRO stages share the start. A
training that ends with a UserError leaves error-<rank>.txt in its folder; the next one goes on.
"""

from __future__ import annotations

import json
import resource
import sys
import weakref
from pathlib import Path

from hydra import compose, initialize_config_dir

from eagle3 import logging as console
from eagle3.composition import from_dict_config, register
from eagle3.config import Config
from eagle3.errors import UserError
from training.train import Trainer
from training.world import World, group_left_at_end

ROOT = Path(__file__).resolve().parents[2]


def run(config: Config, world: World, largest_file: int | None) -> None:
    """Train; beyond `largest_file` bytes writes fail, as they do on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        trainer = Trainer(config, world)
        resource.setrlimit(resource.RLIMIT_FSIZE, (largest_file or soft, hard))
        trainer.run()
        weight = weakref.ref(trainer.engine.module.model.drafter.fc.weight)
        kept = trainer.engine.zero_optimization_stage() == 3 or "data_types" in config.deepspeed
        trainer.close()
        assert kept or weight() is None, "a training's weights outlive it"
    except UserError as error:
        (config.checkpoints_dir / f"error-{world.rank}.txt").write_text(str(error))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def main() -> None:
    console.setup()
    register()
    world = World.join()
    with initialize_config_dir(version_base="1.3", config_dir=str(ROOT / "conf")):
        for job in json.loads(sys.argv[1]):
            config = from_dict_config(compose("train", job["overrides"]))
            run(config, world, job.get("largest_file"))


if __name__ == "__main__":
    with group_left_at_end():
        main()
