"""What an extraction would take, known beforehand: `python -m extraction.plan experiment=<name>`.

Counts the run's own data, or reckons with `extract.expect` where there is none yet. Neither a
server nor the target's weights are needed.
"""

from __future__ import annotations

import sys

from eagle3 import layers, target_shape
from eagle3.command import command
from eagle3.config import Config
from eagle3.store import budget, codecs
from eagle3.store.budget import Budget, Workload
from eagle3.target import Target
from extraction import samples
from extraction.extract import workload


def plans(config: Config) -> list[Budget]:
    """A budget for every codec."""
    codecs.get(config.codec.name)
    shape = target_shape.known(config.target)
    aux_layers = config.target.aux_layers or layers.default(shape.num_layers)
    layers.check(aux_layers, shape.num_layers)
    work = _expected(config)
    if work is None:
        work = workload(samples.load(config, Target.from_config(config.target))[0])
    return [
        budget.plan(
            config.store_dir,
            codec,
            work,
            num_aux=len(aux_layers),
            hidden_size=shape.hidden_size,
            tokens_per_s=config.extract.tokens_per_s,
        )
        for codec in codecs.CODECS.values()
    ]


def _expected(config: Config) -> Workload | None:
    expect = config.extract.expect
    data = config.data.conversations or (config.responses_dir / "responses.jsonl").exists()
    if expect is None or data:
        return None
    return Workload(
        num_samples=expect.samples,
        num_tokens=expect.tokens,
        num_final=round(expect.tokens * expect.answer_share),
    )


def run(config: Config) -> None:
    """Print the table; refuse what the configured codec cannot do."""
    found = plans(config)
    work, hours = found[0].work, found[0].hours
    rate = "unknown rate: set extract.tokens_per_s" if hours is None else f"{hours:,.1f} h"
    sys.stdout.write(
        f"{work.num_samples:,} samples, {work.num_tokens:,} tokens, {work.num_final:,} of them "
        f"with a final state; {rate}\n"
    )
    for plan in found:
        mark = "->" if plan.codec == config.codec.name else "  "
        sys.stdout.write(
            f"{mark} {plan.codec:5} {plan.bytes_per_token:9,.0f} bytes a token "
            f"{plan.store_bytes / 1e9:10,.1f} GB{'' if plan.fits else '  does not fit'}\n"
        )
    sys.stdout.write(f"{found[0].free_bytes / 1e9:,.1f} GB free for {config.store_dir}\n")
    (chosen,) = (plan for plan in found if plan.codec == config.codec.name)
    limits = config.extract
    budget.require(chosen, config.store_dir, max_bytes=limits.max_bytes, max_hours=limits.max_hours)


@command("plan")
def main(config: Config) -> None:
    run(config)


if __name__ == "__main__":
    main()
