"""EAGLE-3 drafters: the library behind the extraction, training and eval commands.

Nothing in here knows Hydra (except `config`), DeepSpeed, or HTTP (except `serving`).
"""

__version__ = "0.1.0"
