// What the curves are drawn over, and the curves as a table.
import type { Mode, Run } from "../data";
import { visible } from "../format";

export const CLOCK = "time/seconds"; // as src/vgr_trl/reporting/page.py names it

export interface Axis {
  name: string;
  /** The curve whose value at a step is its place; none: the step itself. */
  of?: string;
  /** Of that curve, in one unit of the axis. */
  unit: number;
}

/** The axes that the runs allow; the unit of time is such that the longest run has a few of them. */
export function axes(runs: Run[]): Axis[] {
  const longest = Math.max(0, ...runs.map((run) => run.curves.find(({ name }) => name === CLOCK)?.values.at(-1) ?? 0));
  const [name, unit] = longest < 180 ? ["seconds", 1] as const : longest < 10_800 ? ["minutes", 60] as const : ["hours", 3600] as const;
  const all: Axis[] = [{ name: "step", unit: 1 }, { name, of: CLOCK, unit }, { name: "tokens", of: "num_tokens", unit: 1 }];
  return all.filter(({ of }) => !of || runs.some((run) => run.curves.some((curve) => curve.name === of && curve.mode === "train")));
}

/** Where steps lie on the axis, on straight lines between those that were logged; null: nowhere, or where the step before does. */
export function along(run: Run, { of, unit }: Axis, steps: number[]): (number | null)[] {
  if (!of) return steps;
  const clock = run.curves.find((curve) => curve.name === of && curve.mode === "train");
  const known = clock ? clock.steps.flatMap((step, i) => (clock.values[i] === null ? [] : [[step, clock.values[i]! / unit] as const])) : [];
  let at = 0;
  let before = -Infinity;
  return steps.map((step) => {
    while (at < known.length - 1 && known[at]![0] < step) at++;
    const [next, last] = [known[at], known[Math.max(0, at - 1)]];
    if (!next || !last) return null;
    const part = next[0] > last[0] ? Math.min(1, Math.max(0, (step - last[0]) / (next[0] - last[0]))) : 1;
    const place = last[1] + part * (next[1] - last[1]);
    if (place <= before) return null;
    return (before = place);
  });
}

/** Text of a cell that no spreadsheet takes for a formula. */
const asText = (text: string) => text.replace(/^[=+@-]/, "'$&");

/** A line for each step of each run, in training and in evaluation, with a column for each value. */
export function asCsv(runs: Run[]): string {
  const names = [...new Set(runs.flatMap(({ curves }) => curves.map(({ name }) => name)))].sort();
  const lines = [["run", "mode", "step", ...names.map((name) => asText(visible(name)))]];
  for (const run of runs) {
    for (const mode of ["train", "eval"] satisfies Mode[]) {
      const rows = new Map<number, string[]>();
      for (const curve of run.curves.filter((item) => item.mode === mode)) {
        const column = names.indexOf(curve.name);
        curve.steps.forEach((step, i) => {
          if (!rows.has(step)) rows.set(step, names.map(() => ""));
          rows.get(step)![column] = String(curve.values[i] ?? "");
        });
      }
      for (const [step, values] of [...rows].sort(([a], [b]) => a - b)) lines.push([asText(run.name), mode, String(step), ...values]);
    }
  }
  return lines.map((cells) => cells.map((cell) => (/[",\r\n]/.test(cell) ? `"${cell.replaceAll('"', '""')}"` : cell)).join()).join("\n") + "\n";
}
