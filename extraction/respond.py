"""Let the target answer prompts: `python -m extraction.respond experiment=<name>`.

Drafts are judged by what the target itself says, so training text should be its own. Writes
<run>/responses/responses.jsonl: messages with the answer, and the exact `output_ids`. Resumes after
the last whole line.
"""

from __future__ import annotations

import json
import logging
import os
from collections import Counter
from collections.abc import Generator
from contextlib import closing
from pathlib import Path
from typing import Any

from eagle3 import checks, provenance
from eagle3 import logging as console
from eagle3.chat import ChatEncoder
from eagle3.command import command
from eagle3.config import Config
from eagle3.errors import UserError
from eagle3.lock import exclusive
from eagle3.manifest import Manifest
from eagle3.records import Record, RowError, read
from eagle3.serving.client import Client, RequestRefused, in_order
from eagle3.serving.from_config import get_servers, tell_other_target
from eagle3.serving.pool import Pool
from eagle3.target import Target

log = logging.getLogger(__name__)
KIND = "responses"
AHEAD = 4
"""Answers made or under way, in concurrencies: a long one must not leave the others' threads idle,
and what is made but not yet in line to be written is made again after a crash."""


def sampling_params(config: Config) -> dict[str, Any]:
    """SGLang sampling parameters of the run."""
    return {
        "temperature": config.respond.temperature,
        "top_p": config.respond.top_p,
        "max_new_tokens": config.respond.max_new_tokens,
    }


def answer(
    client: Client, encoder: ChatEncoder, record: Record, sampling: dict[str, Any]
) -> dict[str, Any]:
    """One response row; a prompt that the template or the server refuses (too long, say) gets an
    answer of no tokens.

    With no `output_ids` at all, the prompt's own assistant turns would pass for answers. The
    prompt's token ids go with them: a template may render another date tomorrow.
    """
    try:
        input_ids = encoder.prompt(record.prompt, record.tools)
        reply = client.generate(input_ids, sampling)
    except (RowError, RequestRefused) as refusal:
        log.warning("prompt %s: %s", record.id, refusal)
        return {
            "id": record.id,
            "messages": record.prompt,
            "output_ids": [],
            "finish": "refused",
        }
    text = encoder.tokenizer.decode(reply.output_ids, skip_special_tokens=True)
    row: dict[str, Any] = {
        "id": record.id,
        "messages": [*record.prompt, {"role": "assistant", "content": text}],
        "input_ids": input_ids,
        "output_ids": reply.output_ids,
        "finish": reply.finish,
    }
    if record.tools:
        row["tools"] = record.tools
    if record.weight != 1:
        row["weight"] = record.weight
    return row


def identity(record: Record) -> list[Any]:
    """What another answer, or another row for it, would follow from."""
    extra: list[Any] = [] if record.weight == 1 else [record.weight]
    if record.tools:
        extra.append(record.tools)
    return [record.id, record.prompt, *extra]


def respond(config: Config) -> Path:
    """Answer every prompt that has no answer yet; return the responses file.

    Raises:
        UserError: there is nothing to answer, or the folder holds other answers.
    """
    if config.data.prompts is None:
        raise UserError("data.prompts is not set: which prompts should the target answer?")
    checks.require(config)  # a server refuses every prompt with other values, one by one
    found, skipped = read(config.data.prompts, config.data.split)
    records = found[config.respond.skip :][: config.respond.limit]
    if not records:
        raise UserError(
            f"respond.skip={config.respond.skip} leaves none of the {len(found)} prompts in "
            f"{config.data.prompts}"
        )
    target = Target.from_config(config.target)
    manifest = Manifest(
        kind=KIND,
        match={
            "target": target.identity(),
            "template_kwargs": config.target.template_kwargs,
            "prompts": provenance.hash_json([identity(r) for r in records]),
            "sampling": sampling_params(config),
            "samples_per_prompt": config.respond.samples_per_prompt,
        },
        config=config.resolved(),
    )
    folder = config.responses_dir
    output = folder / "responses.jsonl"
    folder.mkdir(parents=True, exist_ok=True)
    work = [r for r in records for _ in range(config.respond.samples_per_prompt)]
    with exclusive(folder):
        remedy = "Resume with the same configuration, or choose another run_name."
        done = _whole_lines(output)
        if not manifest.resumes(folder, f"{folder}", remedy, begun=done > 0):
            manifest.save(folder)
        finishes = _answer_rest(config, target, work[done:], output)
        manifest.facts = {
            "complete": True,
            "responses": len(work),
            "skipped": dict(skipped),
            "sha256": provenance.hash_file(output),
        }
        manifest.save(folder)
    log.info(
        "%d responses in %s (new: %s, skipped: %s)",
        len(work),
        output,
        dict(finishes),
        dict(skipped),
    )
    return output


def _answer_rest(config: Config, target: Target, work: list[Record], output: Path) -> Counter[str]:
    """Append the answers that the file lacks; returns how they finished."""
    finishes: Counter[str] = Counter()
    if not work:
        return finishes
    encoder = ChatEncoder(target.tokenizer, config.target.template_kwargs)
    log_file = config.run_dir / "logs" / "respond-server.log"
    envs: list[dict[str, str]] = [{}] * config.server.replicas
    with get_servers(config.server, target.folder, log_file, envs=envs) as servers:
        if config.server.urls:
            for server in servers:
                names = {config.target.path, str(target.folder)}
                tell_other_target(server.client.info(), names, server.url)
        pool = Pool([(s, s.client) for s in servers], config.server.patience_s)
        with (
            output.open("a", encoding="utf-8") as file,
            closing(_answers(pool, encoder, work, config)) as rows,
        ):
            for row in rows:
                finishes[row["finish"]] += 1
                file.write(json.dumps(row, ensure_ascii=False) + "\n")
                file.flush()
    return finishes


def _answers(
    pool: Pool[Client], encoder: ChatEncoder, records: list[Record], config: Config
) -> Generator[dict[str, Any]]:
    """Rows in the records' order; to be closed before the servers, so that all threads end."""
    sampling = sampling_params(config)

    def work(record: Record) -> dict[str, Any]:
        return pool.run(lambda client: answer(client, encoder, record, sampling))

    with (
        console.progress("respond") as bar,
        closing(in_order(work, records, config.respond.concurrency, AHEAD)) as rows,
    ):
        task = bar.add_task("", total=len(records), note="")
        for row in rows:
            bar.advance(task)
            yield row


def _whole_lines(file: Path) -> int:
    """Number of complete lines; a torn last one is cut off, without touching the others."""
    if not file.exists():
        return 0
    lines = end = 0
    with file.open("rb") as data:
        for line in data:
            if line.endswith(b"\n"):
                lines, end = lines + 1, end + len(line)
    if end < file.stat().st_size:
        os.truncate(file, end)
    return lines


@command("respond")
def main(config: Config) -> None:
    respond(config)


if __name__ == "__main__":
    main()
