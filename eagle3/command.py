"""What every command does around its work: compose, check, log, record, and tell mistakes."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from omegaconf import DictConfig

from eagle3 import composition, writing
from eagle3.config import Config
from eagle3.errors import UserError


def command(name: str) -> Callable[[Callable[[Config], None]], Callable[[], None]]:
    """Make a `main()` of a function of a Config: compose conf/<name>.yaml, check, log, call.

    Exit status: 0 done, 2 a user's mistake (told in one message), 1 anything else (with traceback,
    but for commands that look for something wrong and found it), 128 + n ended by signal n.
    """

    def decorate(run: Callable[[Config], None]) -> Callable[[], None]:
        def main() -> None:
            import hydra

            from eagle3 import logging as console

            console.setup()
            end_by_signals()
            composition.register()
            started = False

            def task(composed: DictConfig) -> None:
                nonlocal started
                started = True
                with _user_errors():
                    config = composition.from_dict_config(composed)
                    with writing.told(config.run_dir, config.checkpoints_dir):
                        writing.require(
                            config.checkpoints_dir if name == "train" else config.run_dir
                        )
                        with recorded(name, config):
                            run(config)

            os.environ["HYDRA_FULL_ERROR"] = "1"  # else Hydra prints and exits, with status 1
            with _user_errors():
                try:
                    hydra.main(
                        version_base="1.3", config_path=str(composition.CONF), config_name=name
                    )(task)()
                except composition.complaints() as error:
                    if started:
                        raise
                    raise UserError(f"configuration: {composition.in_words(error)}") from error

        return main

    return decorate


def end_by_signals() -> None:
    """Have a request to end, or a terminal that is gone, end servers and spools, too.

    What is ignored (SIGHUP under nohup) stays so.
    """
    for kind in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(kind) != signal.SIG_IGN:
            signal.signal(kind, lambda number, _: sys.exit(128 + number))


def recorded(name: str, config: Config) -> AbstractContextManager[None]:
    """Record the command's time and memory in <run>/usage.json, on rank 0."""
    from eagle3 import logging as console
    from eagle3 import usage

    if console.rank() != 0 or config.train_dir is not None:  # a sweep's jobs share one run folder
        return nullcontext()
    if name == "extract" and config.extract.of_eval:
        name = "extract eval's answers"
    return usage.recorded(name, config.run_dir / "usage.json")


class _user_errors:
    """Turns a UserError into one message on stderr and exit status 2."""

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, UserError):
            sys.stderr.write(f"error: {error}\n")
            raise SystemExit(2) from None
