"""What an inspection has found, as a text and as tables that a page shows too."""

from collections.abc import Mapping

from vgr_trl.data.build.answers import MOST_LINES, commonest
from vgr_trl.data.build.statistics import ANSWERS, OPEN, on_one_line, ordered
from vgr_trl.data.inspect.cost import Budget, Cost, cost, histogram
from vgr_trl.data.inspect.findings import Findings
from vgr_trl.data.rows.text.prompts import LETTERS

BAR = 40  # characters of the longest bar
LONGEST_REASON = 200


def report(findings: Findings, budget: Budget) -> str:
    """Return the findings as a text for the terminal."""
    lines = [headline(findings), *_reasons(findings)]
    for title, counts in tables(findings).items():
        whole = sum(count for _, count in counts)
        lines += ["", title, *(f"  {count:>9,}  {count / whole:>6.1%}  {name}" for name, count in counts)]
    if findings.lengths:
        largest = max(rows for _, _, rows in histogram(findings.lengths))
        lines += ["", "prompt length in tokens, images included"]
        lines += [
            f"  {f'{first:,} to {last:,}':>19}  {rows:>9,}  {'#' * -(-BAR * rows // largest)}"
            for first, last, rows in histogram(findings.lengths)
        ]
        lines += ["", *sentences(cost(findings.lengths, budget), budget)]
    return "\n".join(lines) + "\n"


def headline(findings: Findings) -> str:
    """Return in one sentence how many rows can be used."""
    bad = f"{findings.bad:,} cannot be used" if findings.bad else "every one can be used"
    return f"{findings.split}: {findings.rows:,} rows, of which {bad}."


def tables(findings: Findings) -> dict[str, list[tuple[str, int]]]:
    """Return what the usable rows consist of: title → lines of name and count, at most twelve."""
    if not findings.usable:
        return {}
    counts = findings.counts
    found = {
        "rows by source": _shortened(counts.sources),
        "rows by number of choices": [*ordered(counts.choices, [*map(str, range(len(LETTERS) + 1)), OPEN]).items()],
        "rows by right letter": [*ordered(counts.letters, LETTERS).items()],
        ANSWERS: _shortened(counts.answers),
        "rows by number of images": _shortened(dict(sorted(counts.images.items(), key=lambda pair: int(pair[0])))),
    }
    return {title: lines for title, lines in found.items() if lines}


def sentences(found: Cost, budget: Budget) -> list[str]:
    """Return what prompts and steps cost, one sentence each."""
    prompts = (
        f"Prompts have {found.shortest:,} to {found.longest:,} tokens; half have at most {found.median:,}, 95 % at "
        f"most {found.percentile_95:,}."
    )
    limit = budget.max_prompt_length
    if limit is None:
        over = f"No max_prompt_length is given; with {found.longest} no row is left out."
    elif found.too_long:
        over = f"max_prompt_length={limit} leaves {found.too_long:,} rows out, whose prompts are longer."
    else:
        over = f"max_prompt_length={limit} leaves no row out."
    step = (
        f"A step of {budget.prompts_per_step:,} {'prompt' if budget.prompts_per_step == 1 else 'prompts'} with "
        f"num_generations={budget.num_generations} and max_completion_length={budget.max_completion_length} has at "
        f"most {found.shared:,} tokens where a prompt is computed once for its completions, {found.repeated:,} where "
        "it is computed for each (prompts of mean length)."
    )
    return [prompts, over, step]


def _reasons(findings: Findings) -> list[str]:
    lines = []
    for kind, reason in sorted(findings.reasons.items(), key=lambda pair: -pair[1].count)[:MOST_LINES]:
        lines += ["", f"{reason.count:,} left out: {on_one_line(kind)}"]
        for row in reason.examples:
            named = "" if row.id is None else f" (id {str(row.id)[:60]!a})"
            lines.append(f"  row {row.row}{named}: {on_one_line(row.reason)[:LONGEST_REASON]}")
    if (more := len(findings.reasons) - MOST_LINES) > 0:
        lines += ["", f"and rows left out for {more} other reasons."]
    return lines


def _shortened(counts: Mapping[str, int]) -> list[tuple[str, int]]:
    return [(on_one_line(name)[:80], count) for name, count in commonest(counts)]
