// Which curves stand in which section, under which title.
import type { Curve, Run } from "../data";

export interface Line {
  run: number;
  /** Segment of layers; empty where the value is of none. */
  part: string;
  mode: Curve["mode"];
  curve: Curve;
}

export interface Panel {
  name: string;
  title: string;
  lines: Line[];
}

export interface Section {
  title: string;
  note: string;
  panels: Panel[];
  /** Deviations, and what never changes. */
  minor: Panel[];
}

interface Rule {
  section: string;
  pattern: RegExp;
  title?: (found: RegExpMatchArray) => string;
}

const SECTIONS: Record<string, string> = {
  Rewards: "The weighted sum that is trained on, and each reward of its own.",
  Accuracy: "Share of completions whose stated answer is right.",
  "Vision gain ratio":
    "Attention per instruction token over attention per vision token. Smaller: looks at the image more.",
  "Attention efficiency":
    "Share of the attention over share of the tokens. 1: in proportion.",
  "Dependency on the image": "How much the tokens change when the image is perturbed, and what the filters keep of them.",
  "Replay and resampling": "Groups without a gradient, and what takes their place.",
  "Clipping and divergence": "How far the policy has moved from the one that generated, and what the loss cuts off.",
  Entropy: "How undecided the policy is, token by token.",
  "Token weights": "How the credit is spread over the tokens of a completion.",
  "Attention": "Sum of the attention on all vision tokens, on all instruction tokens, and their balance.",
  Completions: "How long they are, and how many end.",
  Optimisation: "Loss, gradient and learning rate.",
  Speed: "",
  Other: "",
};

const plain = (name: string) =>
  name.replaceAll("_", " ").replace(/\b(vgr|mdi|kl|aei)\b/gi, (word) => word.toUpperCase());
const capital = (text: string) => text.charAt(0).toUpperCase() + text.slice(1);
const AEI = { aei_vision: "vision", aei_instruction: "instruction" } as Record<string, string>;

// The first that fits.
const RULES: Rule[] = [
  { section: "Accuracy", pattern: /^rewards\/(.*accuracy.*)\/(mean|std)$/, title: ([, name, what]) => `${capital(plain(name!))}, ${what}` },
  { section: "Accuracy", pattern: /accuracy|pass@|mean@/ },
  { section: "Rewards", pattern: /^reward$/, title: () => "Reward" },
  { section: "Rewards", pattern: /^reward_late_weights$/, title: () => "Reward under the late weights" },
  { section: "Rewards", pattern: /^reward_std$/, title: () => "Reward, deviation within a group" },
  { section: "Rewards", pattern: /^rewards\/(.+)\/(mean|std)$/, title: ([, name, what]) => `${capital(plain(name!))}, ${what}` },
  { section: "Rewards", pattern: /^frac_reward_zero_std$/, title: () => "Groups whose rewards are all alike" },
  { section: "Rewards", pattern: /^reward_weights\/(.+)$/, title: ([, name]) => `Weight of ${plain(name!)}` },
  { section: "Rewards", pattern: /^(reward|frac_reward)/ },
  { section: "Vision gain ratio", pattern: /^attention\/(prompt\/)?(\w+)\/vgr$/, title: ([, prompt]) => `VGR${prompt ? " of the prompt" : ""} – smaller: looks more` },
  { section: "Vision gain ratio", pattern: /^vgr\// },
  { section: "Attention efficiency", pattern: /^attention\/(prompt\/)?(\w+)\/(aei_\w+)$/, title: ([, prompt, , what]) => `AEI ${AEI[what!] ?? what}${prompt ? ", of the prompt" : ""}` },
  { section: "Attention", pattern: /^attention\/(prompt\/)?(\w+)\/(\w+)$/, title: ([, prompt, , what]) => `${capital(plain(what!))}${prompt ? ", of the prompt" : ""}` },
  { section: "Dependency on the image", pattern: /dependency|perception|sensitivity|scaling|low_var_kl|combined_token_fraction|perturbed/ },
  { section: "Replay and resampling", pattern: /^(replay|sampling\/nonzero|dynamic_sampling)/ },
  { section: "Clipping and divergence", pattern: /clip|(^|_)kl($|\/)|^sampling\// },
  { section: "Entropy", pattern: /entropy/ },
  { section: "Token weights", pattern: /token_weight/ },
  { section: "Completions", pattern: /^completions?\// },
  { section: "Optimisation", pattern: /^(loss|grad_norm|learning_rate)$/ },
  { section: "Speed", pattern: /^time\/seconds$/, title: () => "Seconds since the first log" },
  { section: "Speed", pattern: /^(time\/|perf\/|step_time|num_tokens|sharing\/|profiling)/ },
  { section: "Other", pattern: /./ },
];

function place(name: string): { section: string; title: string } {
  for (const { section, pattern, title } of RULES) {
    const found = name.match(pattern);
    if (found) return { section, title: title ? title(found) : capital(plain(name).replaceAll("/", ", ")) };
  }
  return { section: "Other", title: name };
}

const SEGMENTS = ["early", "middle", "late", "all"];
const SEGMENT = /^attention\/(prompt\/)?(\w+)\/(\w+)$/;

/** The name under which curves share a chart: the segments of layers are lines of one. */
function shared(name: string): { key: string; part: string } {
  const found = name.match(SEGMENT);
  return found ? { key: `attention/${found[1] ?? ""}*/${found[3]}`, part: found[2]! } : { key: name, part: "" };
}

/** Within a section: as the rules are, the prompt's last. */
function order(name: string): number {
  const rule = RULES.findIndex(({ pattern }) => pattern.test(name));
  return 1000 * rule + (name.includes("/prompt/") ? 100 : 0);
}

/** Deviations and what never changes are worth a look only when something is odd. */
function minor({ name, lines }: Panel): boolean {
  if (/(^|[/_])std$/.test(name)) return true;
  return lines.every(({ curve: { values } }) => values.length > 1 && values.every((value) => value === values[0]));
}

const byPart = (a: Line, b: Line) => a.run - b.run || SEGMENTS.indexOf(a.part) - SEGMENTS.indexOf(b.part);

export function sections(runs: Run[]): Section[] {
  const panels = new Map<string, Panel>();
  const places = new Map<Panel, { section: string; order: number }>();
  runs.forEach(({ curves }, run) => {
    for (const curve of curves) {
      const { key, part } = shared(curve.name);
      let panel = panels.get(key);
      if (!panel) {
        const { section, title } = place(curve.name);
        panels.set(key, (panel = { name: key, title, lines: [] }));
        places.set(panel, { section, order: order(curve.name) });
      }
      panel.lines.push({ run, part, mode: curve.mode, curve });
    }
  });
  const bySection = new Map<string, Panel[]>(Object.keys(SECTIONS).map((title) => [title, []]));
  for (const panel of panels.values()) {
    if (panel.lines.some(({ part }) => part)) panel.lines.sort(byPart);
    bySection.get(places.get(panel)!.section)!.push(panel);
  }
  const all = [...bySection].filter(([, found]) => found.length).map(([title, found]) => {
    found.sort((a, b) => places.get(a)!.order - places.get(b)!.order);
    const folded = new Set(found.filter(minor));
    return { title, note: SECTIONS[title]!, panels: found.filter((panel) => !folded.has(panel)), minor: [...folded] };
  });
  // A section in which nothing ever changes would open on nothing.
  const full = all.filter(({ panels }) => panels.length);
  const left = all.filter(({ panels }) => !panels.length).flatMap((section) => section.minor);
  const other = full.find(({ title }) => title === "Other");
  if (other) other.minor.push(...left);
  else if (left.length) full.push({ title: "Other", note: SECTIONS.Other!, panels: [], minor: left });
  return full;
}

/** The steps from which a run has other reward weights than before. */
export function weightChanges({ curves }: Run): number[] {
  const weights = curves.filter(({ name, mode }) => mode === "train" && name.startsWith("reward_weights/"));
  const steps = weights.flatMap(({ steps, values }) => steps.filter((_, i) => i > 0 && values[i] !== values[i - 1]));
  return [...new Set(steps)].sort((a, b) => a - b);
}

/** Whether a chart would be a line at 0. */
const flat = ({ lines }: Panel) => lines.every(({ curve: { values } }) => values.every((value) => !value));

// What says first whether a run goes well: of each line, the first that was logged.
const MATTERS = [
  [/^rewards\/.*accuracy.*\/mean$/, /accuracy|pass@|mean@/],
  [/^reward_late_weights$/, /^reward$/],
  [/^attention\/\*\/vgr$/],
  [/^completions\/mean_length$/],
  [/^sampling\/nonzero_variance_fraction$/, /^frac_reward_zero_std$/],
  [/^entropy$/],
];

export function whatMatters(all: Section[]): Panel[] {
  const panels = all.flatMap((section) => [...section.panels, ...section.minor]).filter((panel) => !flat(panel));
  return MATTERS.flatMap((patterns) => {
    const found = patterns.flatMap((pattern) => panels.find(({ name }) => pattern.test(name)) ?? []);
    return found.slice(0, 1).map(ofLateLayers);
  });
}

/** Of several runs, the late layers alone: four lines of each, and as many of evaluations, cannot be told apart. */
function ofLateLayers(panel: Panel): Panel {
  const late = panel.lines.filter(({ part }) => part === "late");
  const several = new Set(panel.lines.map(({ run }) => run)).size > 1;
  return several && late.length ? { ...panel, title: `${panel.title} (late layers)`, lines: late.map((line) => ({ ...line, part: "" })) } : panel;
}
