"""Check a run's store thoroughly: `python -m extraction.verify experiment=<name>`.

Checksums, index, sizes and values; then every final state is multiplied by the target's lm_head and
asked for the next token of the text. Exit status 1 if anything is wrong.
"""

from __future__ import annotations

import logging
import sys

from eagle3.config import Config, command
from eagle3.store.verify import Findings, verify
from eagle3.target import Target

log = logging.getLogger(__name__)
SHOWN = 20


def run(config: Config) -> Findings:
    """Verify and print."""
    target = Target.from_config(config.target)
    findings = verify(config.store_dir, target.lm_head())
    for problem in findings.problems[:SHOWN]:
        sys.stdout.write(f"{problem.where}: {problem.what}\n")
    if len(findings.problems) > SHOWN:
        sys.stdout.write(f"... and {len(findings.problems) - SHOWN} more\n")
    agreement = "" if findings.agreement is None else f", argmax agreement {findings.agreement:.2%}"
    sys.stdout.write(
        f"{config.store_dir}: {findings.samples} samples, {findings.rows} rows, "
        f"{len(findings.problems)} problems{agreement}\n"
    )
    return findings


@command("verify")
def main(config: Config) -> None:
    if run(config).problems:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
