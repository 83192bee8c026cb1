"""What an inspection has found as one page of HTML that holds everything it shows."""

import re
from typing import Any

from jinja2 import Environment, StrictUndefined

from vgr_trl.data.inspect.lengths import Budget, cost, histogram
from vgr_trl.data.inspect.report import headline, sentences, tables
from vgr_trl.data.inspect.rows import Findings

HIDDEN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\u200e\u200f\u061c]")
TEMPLATE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; img-src data:; style-src 'unsafe-inline'">
<meta name="color-scheme" content="light dark">
<title>{{ source }}</title>
<style>
:root { --text: #1a1d21; --soft: #5a636e; --ground: #fff; --card: #f6f7f9; --line: #dde1e6; --mark: #005ea8;
  --right: #e0f2ea; --right-line: #00664a; --bad: #a33c00; }
@media (prefers-color-scheme: dark) { :root { --text: #e8eaed; --soft: #a3acb8; --ground: #14171b; --card: #1d2126;
  --line: #343a42; --mark: #6cb6ff; --right: #16352b; --right-line: #4fd1a5; --bad: #ff9a5c; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--ground); color: var(--text);
  font: 15px/1.5 system-ui, "Segoe UI", sans-serif; }
main { max-width: 1480px; margin: 0 auto; padding: 20px clamp(12px, 3vw, 36px) 40px; }
h1 { font-size: 1.5rem; line-height: 1.25; margin: 0 0 .25rem; overflow-wrap: anywhere; }
h2 { font-size: 1.15rem; margin: 2.25rem 0 .75rem; }
h3 { font-size: .95rem; margin: 0 0 .5rem; }
p { margin: .25rem 0; }
.soft { color: var(--soft); }
.bad { color: var(--bad); font-weight: 600; }
.card { background: var(--card); border-radius: 10px; padding: 10px 14px; min-width: 0; }
.tables { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 17rem), 1fr)); gap: 1rem;
  align-items: start; }
.questions { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 22rem), 1fr)); gap: 1rem; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; font-size: .925rem; }
td, th { padding: .15rem .5rem .15rem 0; vertical-align: top; text-align: left; font-weight: 400;
  overflow-wrap: anywhere; }
td.number { text-align: right; white-space: nowrap; width: 1%; }
.histogram th { white-space: nowrap; width: 1%; }
.bar { background: var(--mark); height: .8rem; border-radius: 3px; margin-top: .35rem; min-width: 2px; }
.pictures { display: grid; gap: .5rem; grid-template-columns: repeat(auto-fit, minmax(min(100%, 9rem), 1fr));
  margin-bottom: .75rem; }
figure { margin: 0; }
img { display: block; max-width: 100%; max-height: 18rem; margin: 0 auto; border-radius: 6px;
  border: 1px solid var(--line); background: #fff; }
figcaption, .origin { color: var(--soft); font-size: .8rem; overflow-wrap: anywhere; }
figcaption { text-align: center; }
.message { white-space: pre-wrap; overflow-wrap: anywhere; margin: 0 0 .75rem; }
details { margin-bottom: .75rem; font-size: .9rem; }
summary { cursor: pointer; color: var(--soft); }
summary:focus-visible { outline: 2px solid var(--mark); outline-offset: 2px; }
ol { list-style: none; margin: 0; padding: 0; }
li { padding: .25rem .5rem; border-radius: 6px; border: 1px solid transparent; overflow-wrap: anywhere; }
li.right { background: var(--right); border-color: var(--right-line); }
.answer { overflow-wrap: anywhere; white-space: pre-wrap; }
</style>
</head>
<body>
<main>
<h1>{{ source }}</h1>
<p>{{ headline }}</p>

{% if findings.reasons %}
<h2>Rows that cannot be used</h2>
<div class="card"><table>
{% for kind, reason in reasons %}
<tr><td class="number bad">{{ "{:,}".format(reason.count) }}</td><td>{{ kind }}
{% for row in reason.examples %}<p class="soft">row {{ row.row }}{% if row.id is not none %}, id
{{ row.id | string | truncate(60) }}{% endif %}: {{ row.reason | truncate(300) }}</p>{% endfor %}</td></tr>
{% endfor %}
</table></div>
{% endif %}

{% if bins %}
<h2>Prompt length in tokens</h2>
<div class="card">
<table class="histogram">
{% for first, last, rows in bins %}
<tr><th>{{ "{:,}".format(first) }} to {{ "{:,}".format(last) }}</th>
<td class="number">{{ "{:,}".format(rows) }}</td>
<td>{% if rows %}<div class="bar" style="width: {{ (100 * rows / most) | round(2) }}%"></div>{% endif %}</td></tr>
{% endfor %}
</table>
{% for sentence in sentences %}<p>{{ sentence }}</p>{% endfor %}
</div>
{% endif %}

{% if tables %}
<h2>Usable rows</h2>
<div class="tables">
{% for title, lines in tables.items() %}
<div class="card"><h3>{{ title }}</h3><table>
{% for name, count in lines %}
<tr><th>{{ name }}</th><td class="number">{{ "{:,}".format(count) }}</td>
<td class="number soft">{{ "{:.1%}".format(count / (lines | sum(attribute=1))) }}</td></tr>
{% endfor %}
</table></div>
{% endfor %}
</div>
{% endif %}

{% if findings.sample %}
<h2>{{ findings.sample | length }} questions drawn at random (seed {{ seed }})</h2>
<div class="questions">
{% for one in findings.sample %}
<article class="card" aria-label="row {{ one.row }}">
{% if one.pictures %}<div class="pictures">
{% for picture in one.pictures %}
<figure><img src="{{ picture.url }}" alt="image {{ loop.index }} of row {{ one.row }}">
<figcaption>{{ picture.width }} × {{ picture.height }}</figcaption></figure>
{% endfor %}
</div>{% endif %}
{% if one.more_images %}<p class="soft">and {{ one.more_images }} more images</p>{% endif %}
{% for role, text in one.messages %}
{% if role == "system" %}<details><summary>system prompt</summary><div class="message">{{ text }}</div></details>
{% else %}
{% if role not in ("user", "text") %}<p class="soft">{{ role }}</p>{% endif %}
<p class="message">{{ text | without(one.choices) }}</p>{% endif %}
{% endfor %}
{% if one.choices %}<ol>
{% for letter, text, right in one.choices %}
<li{% if right %} class="right"{% endif %}><b>{{ letter }}.</b> {{ text }}{% if right %} <b>✓</b>{% endif %}</li>
{% endfor %}
</ol>
{% else %}<p class="answer"><span class="soft">answer:</span> {{ one.solution or "none" }}</p>{% endif %}
<p class="origin">row {{ one.row }}{% if one.id %} · {{ one.id }}{% endif %}{% if one.source %} · {{ one.source }}
{%- endif %}{% if one.length is not none %} · {{ "{:,}".format(one.length) }} tokens{% endif %}</p>
</article>
{% endfor %}
</div>
{% endif %}
</main>
</body>
</html>
"""


def page(findings: Findings, budget: Budget, source: str, seed: int = 0) -> bytes:
    """Return the page, in UTF-8: text of the data is shown as text, images are inside.

    Args:
        findings: what is shown.
        budget: limits, for what a step costs.
        source: the title, the path of the data.
        seed: of the sample.
    """
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, finalize=_shown
    )
    environment.filters["without"] = without_options
    bins = histogram(findings.lengths) if findings.lengths else []
    text = environment.from_string(TEMPLATE).render(
        findings=findings,
        source=source,
        headline=headline(findings),
        reasons=sorted(findings.reasons.items(), key=lambda pair: -pair[1].count),
        tables=tables(findings),
        bins=bins,
        most=max((rows for _, _, rows in bins), default=1),
        sentences=sentences(cost(findings.lengths, budget), budget) if findings.lengths else [],
        seed=seed,
    )
    return text.encode("utf-8", "replace")


def _shown(value: Any) -> Any:
    """A text with characters that a reader does not see, or that reorder others, as their numbers."""
    return HIDDEN.sub(lambda found: f"⟨U+{ord(found[0]):04X}⟩", value) if isinstance(value, str) else value


def without_options(text: str, choices: list[tuple[str, str, bool]]) -> str:
    """Return a question without the lines of its options at the end, which the page shows below it."""
    options = "".join(f"\n{letter}. {choice}" for letter, choice, _ in choices)
    return text.removesuffix(options) if options else text
