"""The page: runs side by side, as one HTML file that needs no other."""

from collections.abc import Sequence
from html import escape
from pathlib import Path

from lightning_sparsecomm.basis import PHASES
from lightning_sparsecomm.basis.ledger import OURS
from lightning_sparsecomm.report.chart import COLORS, Axis, Line, bar, chart, plain, size
from lightning_sparsecomm.report.run import SUFFIX, Point, Run

PAGE = "report.html"

_PHASE_COLORS = dict(zip(PHASES, ("#cbd5e1", "#7dd3fc", "#86efac", "#fca5a5", "#d8b4fe")))

_STYLE = """
:root { color-scheme: light; }
body { font: 15px/1.5 system-ui, sans-serif; color: #1e293b; background: #fff; max-width: 1010px; margin: 2rem auto;
  padding: 0 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin-top: 2.2rem; }
table { border-collapse: collapse; width: 100%; } th, td { text-align: right; padding: .3rem .6rem; }
th { font-weight: 600; border-bottom: 1px solid #94a3b8; } td { border-bottom: 1px solid #e2e8f0; }
th:first-child, td:first-child { text-align: left; }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(420px, 1fr)); gap: 1rem 2rem;
  margin-top: 1.6rem; }
figure { margin: 0; } figcaption { font-weight: 600; }
svg path { stroke: #e2e8f0; } svg polyline { fill: none; stroke-width: 1.8; }
svg text { font: 11px system-ui, sans-serif; fill: #475569; } svg .label { font-size: 12px; }
.dot { display: inline-block; width: .7rem; height: .7rem; border-radius: 50%; margin-right: .4rem; }
td:has(.bar) { width: 34%; }
.bar { display: flex; width: 100%; height: 1.1rem; background: #f1f5f9; } .bar span { height: 100%; }
.small { color: #475569; font-size: .87rem; } code { font-size: .87rem; overflow-wrap: anywhere; }
"""


def page(runs: Sequence[Run]) -> str:
    """The HTML of a page that compares runs."""
    colors = [COLORS[index % len(COLORS)] for index in range(len(runs))]
    body = "\n".join(
        [
            "<h1>What was trained, and what that sent</h1>",
            _summary(runs, colors),
            _charts(runs, colors),
            _phases(runs, colors),
            _purposes(runs, colors),
            _notes(runs),
        ]
    )
    head = '<meta charset="utf-8"><meta name="viewport" content="width=device-width">'
    title = f"<title>{escape(', '.join(run.name for run in runs))}: lightning_sparsecomm</title>"
    whole = f"<head>{head}{title}<style>{_STYLE}</style></head><body>\n{body}\n</body>"
    return f'<!DOCTYPE html>\n<html lang="en">{whole}</html>\n'


def write_report(folder: Path) -> Path:
    """Makes the page of all runs in a folder, and returns its path.

    Raises:
        FileNotFoundError: There is no run in the folder.
        ValueError: A file of a run is damaged.
    """
    files = sorted(file for file in folder.glob(f"*{SUFFIX}") if file.is_file())
    if not files:
        raise FileNotFoundError(
            f"{folder} holds no run: no file ends with {SUFFIX}. Train with the callback"
            f" CompressionReport({str(folder)!r})."
        )
    path = folder / PAGE
    path.write_text(page([Run.load(file) for file in files]), encoding="utf-8")
    return path


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table; cells are HTML."""
    cells = "".join(f"<th>{escape(each)}</th>" for each in head)
    lines = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for row in rows)
    return f"<table><thead><tr>{cells}</tr></thead><tbody>{lines}</tbody></table>"


def _named(run: Run, color: str) -> str:
    return f'<span class="dot" style="background:{color}"></span>{escape(run.name)}'


def _summary(runs: Sequence[Run], colors: Sequence[str]) -> str:
    metrics = sorted({name for run in runs for name in run.metrics})
    rows = []
    for run, color in zip(runs, colors):
        last = run.points[-1] if run.points else None
        # Of the whole run, as ddp's: what is exchanged after the last point, too.
        sent = sum(link for purpose, (_, _, link) in run.rows.items() if purpose in OURS)
        rows.append(
            [
                _named(run, color),
                str(run.world_size),
                _steps(run),
                plain(last.loss) if last is not None and last.loss is not None else "–",
                *("–" if (value := run.metrics.get(name)) is None else plain(value) for name in metrics),
                size(sent),
                f"{run.ddp_link_bytes / sent:,.1f} ×" if sent else "–",
                f"{last.seconds:,.1f} s" if last is not None else "–",
            ]
        )
    head = ["run", "ranks", "steps", "last loss", *metrics, "sent by a rank", "fewer bytes than ddp", "time"]
    return _table(head, rows)


def _steps(run: Run) -> str:
    """The last step; of a run that was resumed, also the one that it went on from."""
    last = run.points[-1].step if run.points else run.resumed_at
    return f"{run.resumed_at:,} to {last:,}" if run.resumed_at else f"{last:,}"


def _charts(runs: Sequence[Run], colors: Sequence[str]) -> str:
    steps, seconds, sent = (
        Axis("optimizer steps", plain),
        Axis("seconds", plain),
        Axis("bytes sent by a rank", size, True),
    )
    loss, density = Axis("training loss", plain), Axis("density", plain, True)

    def lines(x: str, y: str) -> list[Line]:
        return [
            Line(run.name, color, [(_value(point, x), _value(point, y)) for point in run.points])
            for run, color in zip(runs, colors)
        ]

    charts = [
        chart("Training loss by bytes sent", sent, loss, lines("sent_bytes", "loss")),
        chart("Training loss by time", seconds, loss, lines("seconds", "loss")),
        chart("Density: elements sent of elements trained", steps, density, lines("step", "density")),
        chart("Norm of what waits in the residual", steps, Axis("norm", plain), lines("step", "residual_norm")),
        chart("Bytes sent per step", steps, Axis("bytes", size, True), lines("step", "bytes_sent")),
        chart("Share of a batch's time in exchange", steps, Axis("share", plain), lines("step", "exchange_share")),
    ]
    return f'<div class="charts">{"".join(charts)}</div>'


def _value(point: Point, name: str) -> float | None:
    value: float | None = getattr(point, name) if hasattr(point, name) else point.values.get(name)
    return value


def _phases(runs: Sequence[Run], colors: Sequence[str]) -> str:
    """The mean exchange of each run, by phase, in one scale."""
    means = []
    for run in runs:
        points = run.points[1:] or run.points
        means.append(
            {
                name: sum(point.values.get(f"seconds_{name}") or 0.0 for point in points) / max(len(points), 1)
                for name in PHASES
            }
        )
    longest = max((sum(mean.values()) for mean in means), default=0.0)
    rows = []
    for run, color, mean in zip(runs, colors, means):
        pieces = [
            (f"{name}: {1000 * seconds:.2f} ms", seconds / longest if longest else 0.0, _PHASE_COLORS[name])
            for name, seconds in mean.items()
        ]
        rows.append([_named(run, color), bar(pieces), *(f"{1000 * mean[name]:.2f}" for name in PHASES)])
    keys = " ".join(
        f'<span class="dot" style="background:{color}"></span>{name}' for name, color in _PHASE_COLORS.items()
    )
    return (
        f"<h2>An exchange, in milliseconds per step</h2><p class=small>{keys}</p>{_table(['run', '', *PHASES], rows)}"
    )


def _purposes(runs: Sequence[Run], colors: Sequence[str]) -> str:
    largest = max((link for run in runs for _, _, link in run.rows.values()), default=0.0)
    rows = []
    for run, color in zip(runs, colors):
        for purpose, (calls, handed, link) in run.rows.items():
            share = link / largest if largest else 0.0
            drawn = bar([(size(link), share, color)])
            rows.append([_named(run, color), escape(purpose), f"{calls:,}", size(handed), size(link), drawn])
    return f"<h2>Bytes by purpose</h2>{_table(['run', 'purpose', 'calls', 'handed over', 'on the link', ''], rows)}"


def _notes(runs: Sequence[Run]) -> str:
    said = "".join(f"<li>{escape(run.name)}: <code>{escape(run.strategy)}</code>{_resumed(run)}</li>" for run in runs)
    return (
        f"<h2>Notes</h2><ul class=small>{said}<li>Bytes on the link follow from the bytes handed over, by the"
        " collectives' published algorithms.</li><li>Losses are rank 0's, and means since the point before. Times are"
        " rank 0's, validation included. The first point of a run is left out of the phases where there are others."
        "</li><li>With ddp, only the time waited after the backward pass is known, from DDP's own samples.</li></ul>"
    )


def _resumed(run: Run) -> str:
    """Where a run has begun, if not at step 0."""
    return f", resumed after step {run.resumed_at:,}; its bytes and time begin there" if run.resumed_at else ""
