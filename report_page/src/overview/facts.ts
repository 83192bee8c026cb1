// A run in a few numbers: from which to which value the curves that matter went.
import type { Curve, Mode, Numbers, Run } from "../data";
import { plural } from "../format";

export interface Course {
  title: string;
  /** Where the two numbers come from. */
  of: string;
  /** Of the metric, as it is logged. */
  name: string;
  first: number;
  last: number;
  share: boolean;
  points: number[];
  /** Of the last value, over seeds. */
  deviation: number | null;
}

const PART = 10; // of the logged steps, as on the terminal: noise of single training steps says nothing
const ACCURACY = [/^rewards\/.*accuracy.*\/mean$/, /accuracy|pass@|mean@/];
const WANTED: { title: string; patterns: RegExp[]; share: boolean; complement?: boolean; mode?: Mode }[] = [
  { title: "Accuracy in evaluation", patterns: ACCURACY, share: true, mode: "eval" },
  { title: "Accuracy in training", patterns: ACCURACY, share: true, mode: "train" },
  { title: "Format", patterns: [/^rewards\/.*format.*\/mean$/], share: true },
  { title: "Tokens per completion", patterns: [/^completions\/mean_length$/], share: false },
  { title: "Non-zero variance", patterns: [/^sampling\/nonzero_variance_fraction$/], share: true },
  { title: "Non-zero variance", patterns: [/^frac_reward_zero_std$/], share: true, complement: true },
  { title: "VGR", patterns: [/^attention\/late\/vgr$/, /^attention\/(?!prompt)\w+\/vgr$/], share: false },
];

function find(run: Run, pattern: RegExp, mode: Mode): Curve | undefined {
  return run.curves.find((curve) => curve.mode === mode && pattern.test(curve.name));
}

export function known(values: Numbers): number[] {
  return values.filter((value) => value !== null);
}

function mean(values: number[]): number {
  return values.reduce((sum, value) => sum + value, 0) / values.length;
}

/** How the completions of evaluations come about; "" if the run does not say. */
function sampling({ options }: Run): string {
  const given = (...names: string[]) => names.map((name) => options[name]).find((value) => typeof value === "number");
  const [count, temperature] = [given("num_generations_eval", "num_generations"), given("eval_temperature", "temperature")];
  return count === undefined || temperature === undefined ? "" : `sampled, ${count} each, T=${temperature}, `;
}

/** First and last of an evaluation; of training, the means of the first and of the last tenth. */
export function courses(run: Run): Course[] {
  const found: Course[] = [];
  for (const { title, patterns, share, complement, mode: only } of WANTED) {
    if (found.some((course) => course.title === title)) continue;
    const modes: Mode[] = only ? [only] : ["train", "eval"];
    const curve = modes
      .flatMap((mode) => patterns.map((pattern) => find(run, pattern, mode)))
      .find((item) => item && known(item.values).length);
    if (!curve) continue;
    const points = known(curve.values).map((value) => (complement ? 1 - value : value));
    const width = curve.mode === "eval" ? 1 : Math.ceil(points.length / PART);
    const at = curve.steps.filter((_, i) => curve.values[i] !== null);
    found.push({
      title, name: curve.name, share, points,
      of: curve.mode === "train"
        ? `first → last ${width > 1 ? plural(width, "logged step") : "logged step"}`
        : sampling(run) + (at.length > 1 ? `step ${at[0]} → ${at.at(-1)}` : `step ${at[0]}`),
      deviation: curve.deviation?.at(-1) == null ? null : mean(known(curve.deviation).slice(-width)),
      first: mean(points.slice(0, width)), last: mean(points.slice(-width)),
    });
  }
  return found;
}

export function lastStep(run: Run): number {
  return Math.max(0, ...run.curves.map(({ steps }) => steps.at(-1) ?? 0));
}

export function duration(seconds: number): string {
  if (seconds < 120) return `${Math.round(seconds)} s`;
  if (seconds < 7200) return `${Math.round(seconds / 60)} min`;
  return `${(seconds / 3600).toFixed(seconds < 36_000 ? 1 : 0)} h`;
}
