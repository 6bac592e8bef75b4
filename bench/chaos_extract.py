"""Kill extraction at random moments, again and again: the store must come out the same to the bit.

    python bench/chaos_extract.py --kill-points 24 --out bench/results/chaos_extract.json

Two capturing servers are kept up by a supervisor. At each kill point an extraction starts afresh on
one or both of them, and at a seeded random moment SIGKILL hits the client, a server, or both. The
supervisor restarts the server under its old address; the client, if it was hit, is started again
until it ends well. Then the store's bytes must be those of a run that nobody disturbed, and the
spools must be empty. `--server URL=SPOOL` uses a running server instead, and hits only the client.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import psutil

import record
from eagle3 import provenance
from eagle3.manifest import write_json
from eagle3.serving import server as servers
from eagle3.serving import watch
from eagle3.serving.server import Launch, Server
from eagle3.target import Target
from extraction.capture import server_args
from extraction.spool import KEPT, Spool, environment

LAYERS = [1, 3, 4]
ARGS = {
    "context_length": 1024, "max_total_tokens": 8192, "max_running_requests": 16,
    "mem_fraction_static": 0.2, "skip_server_warmup": True, "chunked_prefill_size": 64,
}  # fmt: skip
MOST_STARTS = 10
KINDS = ["client"] * 4 + ["server", "both"]


class Supervised:
    """A capturing server that is started again when it is killed."""

    def __init__(self, target: Target, folder: Path) -> None:
        folder.mkdir(parents=True)
        self.spool = Spool.create(folder / "spool")
        self.what = Launch(
            model=target.folder,
            log=folder / "log",
            args={**ARGS, **server_args()},
            plugins=["eagle3_capture"],
            env=environment(self.spool.folder, LAYERS),
            port=servers._free_port(),
        )
        self.server: Server
        self.start().join()

    def start(self) -> threading.Thread:
        """Start it; the thread returned ends once it is ready.

        The process is made here and not there: it lives no longer than the thread that made it.
        """
        self.server = servers._spawn(self.what, None, 600.0)
        waiting = threading.Thread(target=servers._wait, args=(self.server, self.what))
        waiting.start()
        return waiting

    def kill(self) -> None:
        """SIGKILL to the server's main process and, a moment later, to what it left behind."""
        assert self.server.process is not None
        family = psutil.Process(self.server.process.pid).children(recursive=True)
        self.server.process.kill()
        self.server.process.wait()
        time.sleep(0.1)
        for child in family:
            if child.is_running():
                child.kill()

    def stop(self) -> None:
        if self.server.process is not None:
            watch.end(self.server.process.pid)


@dataclass(frozen=True)
class Place:
    """Address and spool of a server, as overrides name them."""

    url: str
    spool: Path


def data(target: Target, path: Path, samples: int) -> None:
    """Random pre-tokenised documents: single tokens, chunk borders, repeats, shared prefixes."""
    rng, rows = random.Random(0), []
    lengths = [2, 3, 63, 64, 65, 127, 128, 129, 250]
    for number in range(samples):
        ids = [rng.randrange(3, target.vocab_size) for _ in range(rng.choice(lengths))]
        if number % 7 == 3:
            ids = rows[-1]["input_ids"] + ids
        if number % 11 == 5:
            ids = rows[-1]["input_ids"]
        mask = [0] * (len(ids) // 3) + [1] * (len(ids) - len(ids) // 3)
        rows.append({"id": str(number), "input_ids": ids, "loss_mask": mask})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


class Trial:
    """Extractions of the same data, each into a folder of its own."""

    def __init__(self, target: Target, folder: Path, samples: int) -> None:
        self.folder, self.target = folder, target
        data(target, folder / "data.jsonl", samples)

    def command(self, module: str, name: str, places: list[Place]) -> list[str]:
        """Command line of a stage of that run."""
        urls, spools = [p.url for p in places], [p.spool for p in places]
        return [
            sys.executable, "-m", module, f"run_name={name}",
            f"runs_dir={self.folder}", f"target.path={self.target.folder}",
            f"target.aux_layers={LAYERS}", "codec=int6", "data.max_length=1000",
            f"data.conversations=[{self.folder}/data.jsonl]", "extract.shard_bytes=200000",
            "extract.concurrency=6", f"server.urls=[{','.join(urls)}]",
            f"extract.spools=[{','.join(map(str, spools))}]", "server.patience_s=400",
        ]  # fmt: skip

    def start(self, name: str, places: list[Place]) -> subprocess.Popen[bytes]:
        command = self.command("extraction.extract", name, places)
        with (self.folder / f"{name}.log").open("ab") as log:
            return subprocess.Popen(command, stdout=log, stderr=log)

    def finish(self, name: str, places: list[Place]) -> int:
        """Start until it ends well; returns how often."""
        for starts in range(1, MOST_STARTS):
            if self.start(name, places).wait() == 0:
                return starts
        raise RuntimeError(f"{name} does not finish:\n{watch.tail(self.folder / f'{name}.log')}")

    def committed(self, name: str) -> int:
        """Shards of a run that is under way."""
        return len(list((self.folder / name / "store").glob("shard-*.arrow")))

    def bytes_of(self, name: str) -> dict[str, str]:
        """Hash of every file of a store but its manifest, which has times in it."""
        files = sorted((self.folder / name / "store").iterdir())
        return {f.name: provenance.hash_file(f) for f in files if f.name != "manifest.json"}


def hit_client(client: subprocess.Popen[bytes]) -> None:
    client.kill()  # nothing if it has ended by itself
    client.wait()


def kill_point(
    trial: Trial,
    name: str,
    kind: str,
    moment: float,
    places: list[Place],
    victim: Supervised | None,
) -> dict[str, object]:
    """One extraction, hit `moment` seconds after its first shard; returns what happened."""
    client = trial.start(name, places)
    while not trial.committed(name) and client.poll() is None:
        time.sleep(0.005)
    time.sleep(moment)
    running, shards = client.poll() is None, trial.committed(name)
    if victim is not None:
        victim.kill()
    if kind in ("client", "both"):
        hit_client(client)
    restarted = victim.start() if victim is not None else None
    starts = 1 if client.wait() == 0 else 1 + trial.finish(name, places)
    if restarted is not None:
        restarted.join()
    return {
        "kind": kind,
        "servers": len(places),
        "hit": running,
        "shards": shards,
        "starts": starts,
    }


def undisturbed(trial: Trial, places: list[Place]) -> float:
    """The run to compare with; returns the seconds from its first shard to its end."""
    client = trial.start("undisturbed", places)
    while not trial.committed("undisturbed") and client.poll() is None:
        time.sleep(0.005)
    start = time.monotonic()
    if client.wait() != 0:
        raise RuntimeError(watch.tail(trial.folder / "undisturbed.log"))
    return time.monotonic() - start


def save(
    arguments: argparse.Namespace, shards: int, points: list[dict[str, object]], identical: int
) -> None:
    """Write what is known so far."""
    result = {
        "kill_points": len(points),
        "identical": identical,
        "hit_while_running": sum(bool(p["hit"]) for p in points),
        "kinds": dict(Counter(str(p["kind"]) for p in points)),
        "samples": arguments.samples,
        "shards": shards,
        "points": points,
        **record.facts(),
    }
    write_json(arguments.out, result)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", type=Path, default=Path("tests/assets/tiny-gsm-llama"))
    parser.add_argument("--kill-points", type=int, default=24)
    parser.add_argument("--samples", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--server", help="URL=SPOOL of a running server: only the client is hit")
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    target, rng = Target(folder=arguments.model.resolve()), random.Random(arguments.seed)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        trial = Trial(target, folder, arguments.samples)
        supervised: list[Supervised] = []
        if arguments.server:
            url, spool = arguments.server.split("=")
            places = [Place(url, Path(spool))]
        else:
            supervised = [Supervised(target, folder / f"server{n}") for n in range(2)]
            places = [Place(s.server.url, s.spool.folder) for s in supervised]
        try:
            span = undisturbed(trial, places)
            wanted, shards = trial.bytes_of("undisturbed"), trial.committed("undisturbed")
            points, identical = [], 0
            for number in range(arguments.kill_points):
                kind = rng.choice(
                    ["client", "client", "server", "both"] if supervised else ["client"]
                )
                chosen = rng.sample(range(len(places)), rng.randint(1, len(places)))
                victim = supervised[chosen[0]] if kind != "client" else None
                name, moment = f"kill{number}", rng.random() * span
                point = kill_point(trial, name, kind, moment, [places[i] for i in chosen], victim)
                point["identical"] = trial.bytes_of(name) == wanted
                point["spool_left"] = sum(
                    f.name not in KEPT for place in places for f in place.spool.iterdir()
                )
                identical += bool(point["identical"]) and point["spool_left"] == 0
                points.append(point)
                save(arguments, shards, points, identical)
                sys.stdout.write(json.dumps(point) + "\n")
                sys.stdout.flush()
        finally:
            for server in supervised:
                server.stop()
    sys.stdout.write(f"{identical} of {len(points)} identical\n")
    if identical != len(points):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
