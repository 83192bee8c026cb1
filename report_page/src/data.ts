// What the page shows, as src/vgr_trl/reporting/page.py puts it in.

import { visible } from "./format";

export type Numbers = (number | null)[];
export type Mode = "train" | "eval";

export interface Picture {
  file: string | null;
  width: number;
  height: number;
  grid: [number, number] | null;
  /** Left, top, width and height in pixels of what the question is about, if the data say it. */
  regions?: [number, number, number, number][] | null;
  /** Thumbnail of the image as it was perturbed for the dependency. */
  perturbed?: string | null;
}

/** A turn of a completion that may call tools: the policy wrote `tokens` from `start` to before `stop`. */
export interface Turn {
  start: number;
  stop: number;
  calls: string[];
  /** With `<image>` for an image. */
  answers: string[];
  /** How many of the completion's images the tools returned in this turn. */
  images: number;
}

export interface Completion {
  question: string;
  group: number;
  prompt: string;
  solution: string | null;
  text: string;
  tokens: string[];
  weights: Numbers | null;
  dependency: Numbers | null;
  vgr: Numbers | null;
  advantages: Numbers | null;
  entropies: Numbers | null;
  logps: Numbers | null;
  /** Log-probability with the perturbed image less that with the image itself. */
  changes?: Numbers | null;
  /** Own signals, and weights of credit rules, by name. */
  signals?: Record<string, Numbers>;
  credit?: Record<string, Numbers>;
  rewards: Record<string, number | null>;
  reward: number | null;
  advantage: number | null;
  correct: boolean | null;
  metrics: Record<string, Record<string, number | null>> | null;
  images: Picture[];
  attention: { scale: number[]; values: string } | null;
  replaced: boolean;
  /** For each token, the one that the teacher finds most likely in its place. */
  teacher?: string[] | null;
  /** What the teacher sees. */
  teacher_images?: Picture[];
  turns?: Turn[];
  /** By `vgr-trl evaluate`: whether it is the most likely one. */
  drawn?: "greedy" | "sampled";
}

export interface Rollouts {
  step: number;
  mode: Mode;
  time: number;
  completions: Completion[];
  /** By the name of the reward, as in the weighted sum. */
  reward_weights?: Record<string, number>;
}

export interface Curve {
  name: string;
  mode: Mode;
  steps: number[];
  values: Numbers;
  /** Of the mean of several seeds. */
  deviation?: Numbers;
}

export interface Run {
  name: string;
  model: string;
  created: string;
  rewards: string[];
  notes: string[];
  options: Record<string, unknown>;
  /** Options that are not at their defaults; null where that is not known. */
  changed: string[] | null;
  /** What `vgr-trl evaluate` measured; null of a run that was trained. */
  scores: { questions: number; k: number; accuracy: number; interval?: [number, number]; mean_at_k?: number | null; pass_at_k?: number | null; format?: number | null; blind?: number | null } | null;
  /** What the configuration names before the options: recipe, data, rewards, versions, … */
  setup: Record<string, string>;
  /** What `vgr-trl demo` measured before and after training, of all questions and of each group. */
  compared: { name: string; before: Compared; after: Compared }[];
  /** Signs of collapse, with the step at which each is first seen. */
  signs: { step: number; seen: string }[];
  curves: Curve[];
  records: Rollouts[];
}

export interface Compared {
  questions?: number;
  k?: number;
  accuracy: number;
  /** Of the accuracy, 95 %. */
  interval?: [number, number] | null;
  mean_at_k?: number | null;
  format?: number | null;
  /** Accuracy with grey images. */
  blind?: number | null;
}

export interface Data {
  version: number;
  /** Seconds after which the page loads itself again. */
  live: number | null;
  runs: Run[];
  images: Record<string, string>;
}

export function bytes(base64: string): Uint8Array<ArrayBuffer> {
  const text = atob(base64);
  const found = new Uint8Array(text.length);
  for (let i = 0; i < text.length; i++) found[i] = text.charCodeAt(i);
  return found;
}

export function thumbnail(images: Data["images"], file: string | null): string | null {
  return file !== null && images[file] ? `data:image/webp;base64,${images[file]}` : null;
}

export async function readData(): Promise<Data> {
  const packed = document.getElementById("data")?.textContent?.trim() ?? "";
  const stream = new Blob([bytes(packed)]).stream().pipeThrough(new DecompressionStream("deflate"));
  const data = JSON.parse(await new Response(stream).text()) as Data;
  forgetInherited(data.images);
  for (const run of data.runs) {
    Object.assign(run, { name: visible(run.name), model: visible(run.model) });
    forgetInherited(run.options, run.setup);
    for (const { completions, reward_weights } of run.records) {
      forgetInherited(reward_weights);
      for (const { rewards, signals, credit, metrics } of completions) forgetInherited(rewards, signals, credit, metrics, ...Object.values(metrics ?? {}));
    }
  }
  return data;
}

/** Let values by name have no others: a reward may be named `constructor` or `toString`. */
function forgetInherited(...named: (object | null | undefined)[]) {
  for (const values of named) if (values) Object.setPrototypeOf(values, null);
}

/** When a completion was written, in words; `short` in a list. */
export function moment({ mode, step, completion: { drawn } }: Pick<Entry, "mode" | "step" | "completion">, short = false): string {
  if (drawn) return drawn;
  return mode === "eval" ? (short ? `eval ${step}` : `evaluation, step ${step}`) : short ? String(step) : `step ${step}`;
}

/** A completion with where it comes from. */
export interface Entry {
  key: string;
  step: number;
  mode: Mode;
  completion: Completion;
  weights: Record<string, number>;
}

export function entries(run: Run): Entry[] {
  return run.records.flatMap(({ step, mode, completions, reward_weights: weights = {} }) =>
    completions.map((completion, index) => ({ key: `${mode}-${step}-${index}`, step, mode, completion, weights })),
  );
}
