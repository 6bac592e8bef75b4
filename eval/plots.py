"""The plots of an evaluation's report."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def write(results: dict[str, Any], history: list[dict[str, Any]], folder: Path) -> list[Path]:
    """Draw what there is into the folder; returns the files.

    Args:
        results: what results.json holds. history: lines of a training's metrics.jsonl, if any.
    """
    plots = [_acceptance(results, folder), _speed(results, folder)]
    return [*plots, _history(history, folder)] if history else plots


def _figure(title: str, columns: int = 1, width: float = 6) -> tuple[Any, Any]:
    """A figure and its axes, side by side with one scale [columns]."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(
        1, columns, figsize=(width, 4), layout="constrained", sharey=True, squeeze=False
    )
    figure.suptitle(title)
    for one in axes[0]:
        one.grid(alpha=0.3)
    return figure, axes[0]


def _save(figure: Any, path: Path) -> Path:
    from matplotlib import pyplot

    figure.savefig(path, dpi=110)
    pyplot.close(figure)
    return path


def _acceptance(results: dict[str, Any], folder: Path) -> Path:
    figure, (axes,) = _figure("Acceptance per draft step; bars: 95% interval of step 0", width=7.5)
    for number, (name, runs) in enumerate(results["benchmarks"].items()):
        first, color = next(iter(runs.values())), f"C{number}"
        low, high = first["step0_acceptance"]["ci95"]
        axes.plot([0, 0], [low, high], color=color, linewidth=4, alpha=0.4)
        axes.plot(first["acceptance_per_step"], color=color, marker="o", label=f"{name}, live")
        if bigram := first.get("bigram"):
            per_step = bigram["acceptance_per_step"]
            axes.plot(per_step, color=color, marker="x", linestyle=":", label=f"{name}, bigram")
    if results["offline"] is not None:
        offline = results["offline"]["marginal"]
        axes.plot(offline, color="black", marker="s", linestyle="--", label="offline, held out")
    axes.set(ylim=(0, 1), xlabel="draft step", ylabel="share of verify steps")
    axes.set_xticks(range(len(results["acceptance_per_step"])))
    figure.legend(loc="outside right center", fontsize="small")
    return _save(figure, folder / "acceptance.png")


def _speed(results: dict[str, Any], folder: Path) -> Path:
    tables = results["benchmarks"]
    widest = max(len(runs) for runs in tables.values())
    figure, panels = _figure(
        "Generation speed", len(tables), max(6, len(tables) * (1 + 0.7 * widest))
    )
    for axes, (name, runs) in zip(panels, tables.items(), strict=True):
        places = range(len(runs))
        for side, shift, label in (("plain", -0.2, "plain"), ("speculative", 0.2, "EAGLE-3")):
            heights = [r["tok_s"][side] for r in runs.values()]
            bars = axes.bar([p + shift for p in places], heights, width=0.4, label=label)
        axes.bar_label(bars, [f"{r['speedup']:.2f}x" for r in runs.values()], fontsize="small")
        axes.set_xticks(list(places), list(runs))
        axes.set(title=name, xlabel="concurrency")
    panels[0].set_ylabel("tokens per second, all requests")
    panels[0].legend()
    return _save(figure, folder / "speed.png")


def _history(history: list[dict[str, Any]], folder: Path) -> Path:
    figure, (axes,) = _figure("Learning curve", width=7.5)
    for prefix, style in (("train", ":"), ("validation", "-")):
        for k in range(8):
            key = f"{prefix}/acceptance_{k}"
            points = [(line["step"], line[key]) for line in history if key in line]
            if points:
                axes.plot(
                    *zip(*points, strict=True), style, color=f"C{k}", label=f"{prefix}, step {k}"
                )
    axes.set(ylim=(0, 1), xlabel="optimizer step", ylabel="acceptance")
    figure.legend(loc="outside right center", fontsize="small")
    return _save(figure, folder / "learning.png")
