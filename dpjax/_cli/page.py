"""The HTML page of `report`, which loads no other file, and a plot in characters."""

import html

import numpy as np

from dpjax._plan.guarantee import RunGuarantee, up
from dpjax.accounting._tradeoff_curve import curve

_STYLE = """
:root { color-scheme: light dark; --line: #00695c; --soft: #75757566; }
@media (prefers-color-scheme: dark) { :root { --line: #80cbc4; } }
body { font: 1rem/1.5 system-ui, sans-serif; max-width: 44rem; margin: auto;
  padding: 1rem; overflow-wrap: anywhere; }
h1 { font-size: 1.5rem; line-height: 1.25; }
h2 { font-size: 1.15rem; margin-top: 2rem; border-top: 1px solid var(--soft);
  padding-top: 1rem; }
blockquote { margin: 0; padding-left: 1rem; border-left: 4px solid var(--line); }
table { border-collapse: collapse; }
td, th { padding: 0.2rem 1.5rem 0.2rem 0; text-align: right; }
td:first-child, th:first-child { text-align: left; }
pre { white-space: pre-wrap; font-size: 0.85rem; border: 1px solid var(--soft);
  padding: 0.75rem; }
svg { display: block; width: 100%; max-width: 26rem; font: 13px system-ui, sans-serif; }
figcaption { margin-top: 0.75rem; }
svg text { fill: currentColor; }
"""
# Facts that no record of a run contains (docs/reporting.md).
_TO_ADD = (
    "anyone else who sees the data, the losses, the keys and the optimizer's state",
    "every other use of the same data: the choice of hyperparameters, earlier "
    "releases, statistics, filters",
    "unplanned events, such as a restart of the run",
)


def page(guarantee: RunGuarantee, statement: str) -> str:
    """Return an HTML page that explains a guarantee.

    Args:
      guarantee: the guarantee of a run.
      statement: the guarantee's statement for a paper, with the versions of the run.
    """
    first, *others = [html.escape(line) for line in statement.splitlines()]
    sentence, _, where = first.partition(" where ")
    steps, delta = guarantee.num_steps, guarantee.plan.delta
    quarters = sorted({-(-steps * part // 4) for part in (1, 2, 3, 4)})
    costs = [up(float(guarantee.at(t).epsilon(delta))) for t in quarters]
    rows = [
        f"<tr><td>{t:,}</td><td>{t / steps:.0%}</td><td>{cost}</td></tr>"
        for t, cost in zip(quarters, costs, strict=True)
    ]
    parts = {
        sentence: f"<p>This guarantee holds where {where}</p>",
        "What an attack can achieve": _curve(guarantee),
        "The budget by part of the run": "<table><tr><th>steps</th><th>share</th>"
        f"<th>ε at δ = {delta:g}</th></tr>{''.join(rows)}</table><p>Each ε is that of "
        "a run that is planned to stop after these steps.</p>",
        "What to write in a paper": "<blockquote>"
        + "".join(f"<p>{line}</p>" for line in [first, *others])
        + (
            "</blockquote><p>This record does not contain the following, and a paper "
            "must add:</p><ul>"
        )
        + "".join(f"<li>{html.escape(line)}</li>" for line in _TO_ADD)
        + "</ul>",
        "What to cite": f"<pre>{html.escape(guarantee.citations())}</pre>",
    }
    (title, lead), *rest = parts.items()
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{title}</title><style>{_STYLE}</style></head><body>\n"
        f"<h1>{title}</h1>{lead}\n"
        + "\n".join(f"<h2>{name}</h2>{part}" for name, part in rest)
        + "\n</body></html>"
    )


def _curve(guarantee: RunGuarantee) -> str:
    """Draw a guarantee's trade-off curve as an HTML figure with a caption."""
    rates = np.sin(np.linspace(0.0, np.pi / 2, 101)) ** 2  # dense at both ends
    missed = curve(guarantee.profile, rates)
    line = " ".join(
        f"{60 + 300 * x:.1f},{310 - 300 * y:.1f}"
        for x, y in zip(rates, missed, strict=True)
    )
    ticks = "".join(
        f'<text x="{60 + 300 * t}" y="328" text-anchor="middle">{t:g}</text>'
        f'<text x="53" y="{314 - 300 * t}" text-anchor="end">{t:g}</text>'
        for t in (0.0, 0.5, 1.0)
    )
    return (
        '<figure style="margin: 0"><svg viewBox="0 0 375 350" role="img" '
        'aria-label="Trade-off curve"><path d="M60 10V310H360" fill="none" '
        'stroke="currentColor"/><path d="M60 10L360 310" stroke="currentColor" '
        'stroke-dasharray="2 5" stroke-width="1.5"/>'
        f'<polyline points="{line}" fill="none" stroke="var(--line)" '
        f'stroke-width="3"/>{ticks}<text x="210" y="346" text-anchor="middle">'
        'false-positive rate</text><text transform="translate(14 160) rotate(-90)" '
        'text-anchor="middle">false-negative rate</text></svg><figcaption>The error '
        "rates of every attack are on or above the solid line. They are on the dotted "
        "line if the attack guesses.</figcaption></figure>"
    )


def text_plot(guarantee: RunGuarantee, width: int = 49, height: int = 11) -> str:
    """Draw the maximum true-positive rates of attacks in characters, rounded up."""
    rates = np.linspace(0.0, 1.0, width)
    powers = 1 - np.asarray(guarantee.tradeoff(rates), np.float64)
    rows = [[" "] * width for _ in range(height)]
    for column, (rate, power) in enumerate(zip(rates, powers, strict=True)):
        for value, mark in ((rate, "."), (power, "*")):
            rows[height - 1 - int(np.ceil(value * (height - 1)))][column] = mark
    labels = ["1.0", *[" " * 3] * (height - 2), "0.0"]
    lines = [
        f"{label} |{''.join(row)}".rstrip()
        for label, row in zip(labels, rows, strict=True)
    ]
    title = "true-positive rate of attacks, at most (*); of guesses (.)"
    below = [
        f"    +{'-' * width}",
        f"     0.0{'false-positive rate':^{width - 6}}1.0",
    ]
    return "\n".join([title, *lines, *below])
