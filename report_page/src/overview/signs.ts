// Red flags of a run, from its curves: the signs of collapse that training watches for (docs/metrics.md), on logged values.
import type { Curve, Run } from "../data";
import { number } from "../format";

export interface Sign {
  step: number;
  seen: string;
}

const WINDOW = 8; // logged values whose mean is compared with the means of any before

interface State {
  step: number;
  now: number;
  first: number;
  lowest: number;
  highest: number;
}

/** The course of a curve at each step from the sixteenth value on. */
function* course({ steps, values }: Curve): Generator<State> {
  const at: number[] = [];
  const sums = [0];
  values.forEach((value, i) => {
    if (value === null) return;
    at.push(steps[i]!);
    sums.push(sums.at(-1)! + value);
  });
  const mean = (end: number) => (sums[end]! - sums[end - WINDOW]!) / WINDOW;
  let [first, lowest, highest] = [NaN, Infinity, -Infinity];
  for (let end = 2 * WINDOW; end <= at.length; end++) {
    const before = mean(end - WINDOW);
    if (Number.isNaN(first)) first = before;
    lowest = Math.min(lowest, before);
    highest = Math.max(highest, before);
    yield { step: at[end - 1]!, now: mean(end), first, lowest, highest };
  }
}

const fell = (what: string) => ({ highest, now }: State) => `${what} fell from ${number(highest, 3)} to ${number(now, 3)}`;

const RULES: { pattern: RegExp; when: (state: State) => boolean; seen: (state: State, name: string) => string }[] = [
  {
    pattern: /^rewards\/.*(accuracy|format).*\/mean$/,
    when: ({ now, highest }) => highest >= 0.1 && now < highest / 2,
    seen: (state, name) => fell(name.split("/")[1]!)(state),
  },
  { pattern: /^completions\/mean_length$/, when: ({ now, highest }) => now < highest / 4, seen: fell("length") },
  {
    pattern: /^completions\/clipped_ratio$/,
    when: ({ now, lowest }) => now > 0.9 && lowest < 0.5,
    seen: ({ now }) => `${Math.round(100 * now)} % of the completions never end`,
  },
  { pattern: /^entropy$/, when: ({ now, highest }) => now < 0.005 && highest > 0.05, seen: fell("entropy") },
  {
    pattern: /^entropy$/,
    when: ({ now, lowest, first }) => now > Math.max(4 * lowest, 2 * first, 0.05),
    seen: ({ now, lowest }) => `entropy rose from ${number(lowest, 3)} to ${number(now, 3)}`,
  },
  {
    pattern: /^frac_reward_zero_std$/,
    when: ({ now, lowest }) => now >= 0.95 && lowest < 0.8,
    seen: ({ now }) => `${Math.round(100 * now)} % of the groups have equal rewards`,
  },
];

/** Each sign once, at the step where it is first seen. */
export function signs(run: Run): Sign[] {
  const found: Sign[] = [];
  for (const curve of run.curves) {
    if (curve.mode !== "train") continue;
    if (/^(loss|grad_norm)$/.test(curve.name)) {
      const broken = curve.values.indexOf(null);
      if (broken >= 0) found.push({ step: curve.steps[broken]!, seen: `${curve.name} is not finite` });
    }
    for (const { pattern, when, seen } of RULES) {
      if (!pattern.test(curve.name)) continue;
      for (const state of course(curve)) {
        if (!when(state)) continue;
        found.push({ step: state.step, seen: seen(state, curve.name) });
        break;
      }
    }
  }
  return found.sort((a, b) => a.step - b.step);
}
