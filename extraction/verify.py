"""Check a run's store thoroughly: `python -m extraction.verify experiment=<name>`.

Checksums, index, sizes and values; then every final state is multiplied by the target's lm_head and
asked for the next token of the text. With `verify.recapture=N`, N random samples are captured again
through a server and compared. Exit status 1 if anything is wrong.
"""

from __future__ import annotations

import sys

import torch

from eagle3.command import command
from eagle3.config import Config
from eagle3.manifest import Manifest, require_match
from eagle3.store.reader import StoreReader
from eagle3.store.verify import Findings, verify
from eagle3.store.writer import KIND
from eagle3.target import Target
from extraction.recapture import recapture

SHOWN = 20


def run(config: Config) -> Findings:
    """Verify and print.

    Raises:
        UserError: there is no store, or one of another target.
    """
    target = Target.from_config(config.target)
    require_match(
        {"target": target.identity()},
        Manifest.load(config.store_dir, KIND).match,
        f"the store in {config.store_dir}",
        "Verify it with the target that it was captured from.",
    )
    # a product with the vocabulary for every row: hours on a CPU for millions of rows of a large
    # target
    lm_head = target.lm_head().to("cuda" if torch.cuda.is_available() else "cpu")
    findings = verify(config.store_dir, lm_head, config.verify.min_agreement)
    notes = []
    if findings.agreement is not None:
        notes.append(f"argmax agreement {findings.agreement:.2%}")
    if config.verify.recapture and not findings.problems:
        found = recapture(config, target, StoreReader(config.store_dir))
        findings.problems += found.problems
        notes.append(
            f"captured {found.samples} again: {found.identical} identical, largest difference "
            f"{found.largest:.1e}"
        )
    for problem in findings.problems[:SHOWN]:
        sys.stdout.write(f"{problem.where}: {problem.what}\n")
    if len(findings.problems) > SHOWN:
        sys.stdout.write(f"... and {len(findings.problems) - SHOWN} more\n")
    counts = [f"{findings.samples} samples", f"{findings.rows} rows"]
    counts += [f"{len(findings.problems)} problems", *notes]
    sys.stdout.write(f"{config.store_dir}: {', '.join(counts)}\n")
    return findings


@command("verify")
def main(config: Config) -> None:
    if run(config).problems:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
