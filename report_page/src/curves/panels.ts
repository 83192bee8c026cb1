// Which curves stand in which section, under which title.
import type { Curve, Run } from "../data";

export interface Line {
  run: number;
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
}

interface Rule {
  section: string;
  pattern: RegExp;
  title?: (found: RegExpMatchArray) => string;
}

const SECTIONS: Record<string, string> = {
  Rewards: "The weighted sum that is trained on, and each reward of its own.",
  Accuracy: "Share of completions whose stated answer is right.",
  "Vision gain ratio by segment of layers":
    "Attention per instruction token over attention per vision token. Smaller: looks at the image more.",
  "Attention efficiency by segment of layers":
    "Share of the attention over share of the tokens. 1: in proportion.",
  "Dependency on the image": "How much the tokens change when the image is perturbed, and what the filters keep of them.",
  "Replay and resampling": "Groups without a gradient, and what takes their place.",
  "Clipping and divergence": "How far the policy has moved from the one that generated, and what the loss cuts off.",
  Entropy: "How undecided the policy is, token by token.",
  "Token weights": "How the credit is spread over the tokens of a completion.",
  "Attention by segment of layers": "Sum of the attention on all vision tokens, on all instruction tokens, and their balance.",
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
  { section: "Rewards", pattern: /^reward_std$/, title: () => "Reward, deviation within a group" },
  { section: "Rewards", pattern: /^rewards\/(.+)\/(mean|std)$/, title: ([, name, what]) => `${capital(plain(name!))}, ${what}` },
  { section: "Rewards", pattern: /^frac_reward_zero_std$/, title: () => "Groups whose rewards are all alike" },
  { section: "Rewards", pattern: /^reward_weights\/(.+)$/, title: ([, name]) => `Weight of ${plain(name!)}` },
  { section: "Rewards", pattern: /^(reward|frac_reward)/ },
  { section: "Vision gain ratio by segment of layers", pattern: /^attention\/(prompt\/)?(\w+)\/vgr$/, title: ([, prompt, segment]) => `VGR, ${segment} layers${prompt ? ", of the prompt" : ""}` },
  { section: "Vision gain ratio by segment of layers", pattern: /^vgr\// },
  { section: "Attention efficiency by segment of layers", pattern: /^attention\/(prompt\/)?(\w+)\/(aei_\w+)$/, title: ([, prompt, segment, what]) => `AEI ${AEI[what!] ?? what}, ${segment} layers${prompt ? ", of the prompt" : ""}` },
  { section: "Attention by segment of layers", pattern: /^attention\/(prompt\/)?(\w+)\/(\w+)$/, title: ([, prompt, segment, what]) => `${capital(plain(what!))}, ${segment} layers${prompt ? ", of the prompt" : ""}` },
  { section: "Dependency on the image", pattern: /dependency|perception|sensitivity|scaling|low_var_kl|combined_token_fraction|perturbed/ },
  { section: "Replay and resampling", pattern: /^(replay|sampling\/live|dynamic_sampling)/ },
  { section: "Clipping and divergence", pattern: /clip|(^|_)kl($|\/)|^sampling\// },
  { section: "Entropy", pattern: /entropy/ },
  { section: "Token weights", pattern: /token_weight/ },
  { section: "Completions", pattern: /^completions?\// },
  { section: "Optimisation", pattern: /^(loss|grad_norm|learning_rate)$/ },
  { section: "Speed", pattern: /^(perf\/|step_time|num_tokens|sharing\/|profiling)/ },
  { section: "Other", pattern: /./ },
];

function place(name: string): { section: string; title: string } {
  for (const { section, pattern, title } of RULES) {
    const found = name.match(pattern);
    if (found) return { section, title: title ? title(found) : capital(plain(name).replaceAll("/", ", ")) };
  }
  return { section: "Other", title: name };
}

const SEGMENTS = ["all", "early", "middle", "late"];

/** Within a section: as the rules are, means before deviations, segments from early to late, the prompt's last. */
function order(name: string): number {
  const rule = RULES.findIndex(({ pattern }) => pattern.test(name));
  const segment = 1 + SEGMENTS.findIndex((item) => name.includes(`/${item}/`));
  return 1000 * rule + (name.endsWith("/std") ? 500 : 0) + (name.includes("/prompt/") ? 100 : 0) + segment;
}

export function sections(runs: Run[]): Section[] {
  const panels = new Map<string, Panel & { section: string }>();
  runs.forEach(({ curves }, run) => {
    for (const curve of curves) {
      let panel = panels.get(curve.name);
      if (!panel) panels.set(curve.name, (panel = { name: curve.name, ...place(curve.name), lines: [] }));
      panel.lines.push({ run, mode: curve.mode, curve });
    }
  });
  const all = [...panels.values()];
  return Object.entries(SECTIONS)
    .map(([title, note]) => ({
      title,
      note,
      panels: all.filter((panel) => panel.section === title).sort((a, b) => order(a.name) - order(b.name)),
    }))
    .filter((section) => section.panels.length);
}
