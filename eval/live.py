"""The proof: plain and EAGLE-3 server on the same held-out prompts.

`python -m eval.live experiment=<name>` starts the target without and with the exported drafter (no
capture plugin in either), answers every benchmark at every concurrency greedily, and writes
<run>/eval/results.json, report.md and plots. Prefix caching is off, so that no run profits from the
one before it. Each run is kept in <run>/eval/kept/ until the report is there, so that an evaluation
that was ended goes on where it was.
"""

from __future__ import annotations

import sys
from typing import Any

from eagle3 import export as formats
from eagle3 import provenance
from eagle3.command import command
from eagle3.config import Config
from eagle3.errors import UserError
from eagle3.manifest import Manifest, require_match, write_json
from eagle3.metrics import Wandb
from eagle3.serving.server import require_drafter_flags
from eagle3.target import Target
from eval import benchmarks, outputs, report
from eval.baseline import Bigram
from eval.differences import Differences
from eval.held_out import prompts_in, trained_on
from eval.kept import Kept, claimed, discard
from eval.measure import Run
from eval.offline import offline
from eval.requirements import require_measurable
from eval.served import Served, measured_with, run_server
from eval.speculation import Speculation
from eval.stats import acceptance


def require_servable(config: Config, target: Target) -> Manifest:
    """Manifest of the run's drafter.

    Raises:
        UserError: it is not for this target, is not whole, or the installed SGLang would serve it
            wrongly.
    """
    manifest = Manifest.load(config.drafter_dir, formats.KIND)
    require_match(
        {"target": target.identity()}, manifest.match, f"{config.drafter_dir}",
        "Evaluate a drafter on the target it was trained for.",
    )  # fmt: skip
    if found := formats.problems(config.drafter_dir):
        raise UserError(f"{config.drafter_dir} cannot be served:\n  " + "\n  ".join(found))
    if config.eval.speculative_url is None:
        require_drafter_flags(formats.norms_of(config.drafter_dir))
    return manifest


def compare(
    plain: Run,
    speculative: Run,
    differing: Differences,
    bigram: Bigram | None,
    num_steps: int,
) -> dict[str, Any]:
    """Figures of one benchmark at one concurrency."""
    live = acceptance(speculative.histograms)
    prompts = len(plain.answers)
    speeds = {"plain": plain.speed(), "speculative": speculative.speed()}
    figures = {
        "step0_acceptance": {"value": live.step0, "ci95": live.step0_ci95},
        "acceptance_per_step": live.marginal,
        "conditional_per_step": live.conditional,
        "accept_length": live.accept_length,
        "accept_length_ci95": live.accept_length_ci95,
        "verify_steps": live.verify_steps,
        "tok_s": {k: v["tok_s"] for k, v in speeds.items()},
        "tok_s_per_request": {k: v["tok_s_per_request"] for k, v in speeds.items()},
        "cached_tokens": {k: v["cached_tokens"] for k, v in speeds.items()},
        "retries": {k: v["retries"] for k, v in speeds.items()},
        **{
            name: {"plain": value, "speculative": speculative.latencies()[name]}
            for name, value in plain.latencies().items()
        },
        "speedup": speeds["speculative"]["tok_s"] / speeds["plain"]["tok_s"],
        "identical_outputs": (prompts - differing.outputs) / prompts,
        "differences": differing.as_dict(),
        "prompts": prompts,
        "output_tokens": speculative.tokens,
        "concurrency": speculative.concurrency,
    }
    if bigram is not None:
        outputs = [a.output_ids for a in plain.answers]
        base = acceptance([bigram.histogram(ids, num_steps) for ids in outputs])
        figures["bigram"] = {
            "step0_acceptance": base.step0,
            "acceptance_per_step": base.marginal,
            "accept_length": base.accept_length,
        }
    return figures


def _table(
    plain: Served, speculative: Served, bigram: Bigram | None, num_steps: int
) -> dict[str, dict[str, Any]]:
    """Figures by benchmark and concurrency."""
    table: dict[str, dict[str, Any]] = {}
    for place, run in plain.runs.items():
        name, concurrency = place
        table.setdefault(name, {})[str(concurrency)] = compare(
            run, speculative.runs[place], plain.differences[place], bigram, num_steps
        )
    return table


def evaluate(config: Config) -> dict[str, Any]:
    """The whole stage; returns what results.json holds."""
    target = Target.from_config(config.target)
    manifest = require_servable(config, target)
    if config.server.urls and not (config.eval.plain_url or config.eval.speculative_url):
        raise UserError(
            "eval compares a server without and one with the drafter, so server.urls does not say "
            "enough: set eval.plain_url and eval.speculative_url, or server.urls=[] to have both "
            "started here"
        )
    prompts = benchmarks.load(config, target)
    require_measurable(config.eval, prompts)
    predicted = offline(config) if config.eval.offline else None
    samples = trained_on(config)
    seen = samples and prompts_in(samples(), prompts)
    bigram = samples and Bigram(ids[mask].tolist() for ids, mask in samples())
    num_steps = config.eval.num_steps
    chain = Speculation.chain(num_steps)
    folder = config.eval_dir / "kept"
    inputs = measured_with(config, target, prompts, manifest, num_steps=num_steps)
    with claimed(folder, inputs, refuse=False):
        speculative = run_server(
            config, target, prompts, "eval-speculative", chain, Kept(folder / "speculative")
        )
        plain = run_server(
            config, target, prompts, "eval-plain", None, Kept(folder / "plain"), speculative.runs
        )
        table = _table(plain, speculative, bigram, num_steps)
        results = {
            **table[next(iter(prompts))][str(config.eval.concurrency[0])],
            "offline_step0_acceptance": predicted and predicted["step0"],
            "offline": predicted,
            "prompts_in_training": seen,
            "benchmarks": table,
            "server_starts": {"plain": plain.starts, "speculative": speculative.starts},
            "versions": provenance.versions(),
            "git_commit": provenance.git_commit(),
            "machine": provenance.machine(),
            "settings": {
                "plain": plain.settings,
                "speculative": speculative.settings,
                "eval": config.resolved()["eval"],
                "max_new_tokens": config.eval.max_new_tokens,
                "temperature": 0,
            },
        }
        write_json(config.eval_dir / "results.json", results)
        outputs.write(config.outputs_file, prompts, plain.runs, speculative.runs)
        Manifest(
            kind="eval",
            match={"target": target.identity()},
            config=config.resolved(),
            inputs={"drafter": manifest.hash()},
        ).save(config.eval_dir)
        _tell(config, results)
        discard(folder)  # only now: whoever evaluates again wants new figures
    return results


def _tell(config: Config, results: dict[str, Any]) -> None:
    path = report.write(config.run_dir, config.checkpoints_dir)
    sys.stdout.write(report.summary(results) + f"\nreport: {path}\n")
    _log_to_wandb(config, results)


def _log_to_wandb(config: Config, results: dict[str, Any]) -> None:
    if not config.logger.wandb:
        return
    import wandb

    tracker = Wandb(
        config.eval_dir,
        project=config.logger.project,
        group=config.logger.group or config.run_name,
        name=f"{config.run_name}-eval",
        mode=config.logger.mode,
        config=config.resolved(),
        job_type="eval",
    )
    table = wandb.Table(columns=[*report.COLUMNS], data=report.rows(results))
    # as the next step, whatever it is: of an evaluation made again wandb would ignore a step 0
    tracker.run.log({"eval/benchmarks": table, "eval/step0": results["step0_acceptance"]["value"]})
    tracker.close()


@command("eval")
def main(config: Config) -> None:
    results = evaluate(config)
    if config.eval.require_identical:
        for name, runs in results["benchmarks"].items():
            for concurrency, figures in runs.items():
                if figures["identical_outputs"] < 1:
                    raise RuntimeError(
                        f"{name} at concurrency {concurrency}: only "
                        f"{figures['identical_outputs']:.1%} of outputs are identical"
                    )


if __name__ == "__main__":
    main()
