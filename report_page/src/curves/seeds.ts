// Runs that differ by their seed alone, as one: the means of their curves, and the deviations around them.
import type { Curve, Numbers, Run } from "../data";
import { preview } from "../format";

const OWN = new Set(["seed", "data_seed", "output_dir", "run_name", "logging_dir", "command", "commit"]);
const shared = (values: Record<string, unknown>) => Object.entries(values).filter(([name]) => !OWN.has(name)).sort();

/** The runs with those of equal options but for their different seeds replaced by one; the same array if there are none. */
export function bySeed(runs: Run[]): Run[] {
  const groups = new Map<string, Run[]>();
  const repeats = new Map<string, number>(); // of equal options and seeds: each run of them is of another group
  runs.forEach((run, index) => {
    const options = JSON.stringify([shared(run.setup), shared(run.options)]);
    const same = JSON.stringify([options, run.options.seed, run.options.data_seed]);
    const repeat = repeats.get(same) ?? 0;
    repeats.set(same, repeat + 1);
    const key = run.scores || !("seed" in run.options) ? String(index) : `${repeat} ${options}`;
    groups.set(key, [...(groups.get(key) ?? []), run]);
  });
  if (groups.size === runs.length) return runs;
  const firsts = [...groups.values()].map(([first]) => first!);
  return [...groups.values()].map((group) => (group.length === 1 ? group[0]! : joined(group, whatDiffers(group[0]!, firsts))));
}

const MOST = 3; // options in a name
const asText = (value: unknown) => (typeof value === "string" ? value : JSON.stringify(value) ?? "–");

/** The options, else the entries of the setup, that the runs do not share, with the values of one; "" if they share all. */
function whatDiffers(run: Run, runs: Run[]): string {
  for (const part of ["options", "setup"] as const) {
    const names = shared(run[part]).map(([name]) => name).filter((name) => new Set(runs.map((other) => JSON.stringify(other[part][name]))).size > 1);
    if (names.length) return names.slice(0, MOST).map((name) => `${name} ${preview(asText(run[part][name]), 60)}`).join(", ") + (names.length > MOST ? ", …" : "");
  }
  return "";
}

function joined(group: Run[], differs: string): Run {
  const curves = new Map<string, Curve[]>();
  for (const curve of group.flatMap((run) => run.curves)) {
    const key = `${curve.mode} ${curve.name}`;
    curves.set(key, [...(curves.get(key) ?? []), curve]);
  }
  const name = `${differs || `${group[0]!.name} and ${group.length - 1} more`}, mean of ${group.length} seeds`;
  const notes = [`Mean ± deviation of ${group.map((run) => run.name).join(", ")}.`];
  return { ...group[0]!, name, notes, signs: group.flatMap(({ signs }) => signs), compared: [], records: [], curves: [...curves.values()].map(mean) };
}

function mean(curves: Curve[]): Curve {
  const at = new Map<number, number[]>();
  for (const { steps, values } of curves) {
    steps.forEach((step, i) => {
      const value = values[i];
      if (value !== null && value !== undefined) at.set(step, [...(at.get(step) ?? []), value]);
    });
  }
  const steps = [...at.keys()].sort((a, b) => a - b);
  const values = steps.map((step) => at.get(step)!.reduce((sum, value) => sum + value, 0) / at.get(step)!.length);
  const deviation: Numbers = steps.map((step, i) => {
    const found = at.get(step)!;
    return found.length < 2 ? null : Math.sqrt(found.reduce((sum, value) => sum + (value - values[i]!) ** 2, 0) / (found.length - 1));
  });
  return { ...curves[0]!, steps, values, deviation };
}
