"""Several trainings in one group of processes: `several_runs.py '[[override, ...], ...]'`.

Starting ranks costs more than a tiny training, so the tests of ZeRO stages share the start.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore

from eagle3 import logging as console
from eagle3.config import Config, from_dict_config
from training.engine import World
from training.train import Trainer

ROOT = Path(__file__).resolve().parents[2]


def main() -> None:
    console.setup()
    ConfigStore.instance().store(name="schema", node=Config)
    world = World.join()
    with initialize_config_dir(version_base="1.3", config_dir=str(ROOT / "conf")):
        for overrides in json.loads(sys.argv[1]):
            Trainer(from_dict_config(compose("train", overrides)), world).run()


if __name__ == "__main__":
    main()
