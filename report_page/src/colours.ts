// Colours for numbers per token that colour-blind readers can tell apart: blue below the middle, orange above.
// The middle is dark in dark mode. Text on any of them has a contrast of at least 7, black in light mode, else white.
import type { Completion, Numbers, Run } from "./data";
import { visible } from "./format";

type Colour = [number, number, number];

export type QuantityName = "vgr" | "weights" | "dependency" | "advantages" | "entropies" | "logps" | "changes";

export interface Quantity {
  name: string;
  of: (completion: Completion) => Numbers | null | undefined;
  title: string;
  below: string;
  above: string;
  /** The middle is 1 and twice as far as half; otherwise it is 0. */
  ratio: boolean;
  /** Values lie on both sides of the middle. */
  twoSided: boolean;
}

const BUILT_IN: (Omit<Quantity, "of"> & { name: QuantityName })[] = [
  { name: "vgr", title: "Vision gain ratio", below: "looks more", above: "looks less", ratio: true, twoSided: true },
  { name: "weights", title: "Token weight", below: "less credit", above: "more credit", ratio: true, twoSided: true },
  { name: "dependency", title: "Dependency on the image", below: "hardly needs the image", above: "needs the image", ratio: false, twoSided: false },
  { name: "changes", title: "Change by the perturbation", below: "less likely", above: "more likely once the image is perturbed", ratio: false, twoSided: true },
  { name: "advantages", title: "Advantage", below: "made less likely", above: "made more likely", ratio: false, twoSided: true },
  { name: "entropies", title: "Entropy", below: "sure", above: "unsure", ratio: false, twoSided: false },
  { name: "logps", title: "Log-probability", below: "unlikely", above: "likely", ratio: false, twoSided: false },
];

/** What tokens of these runs can be coloured by: what every run may have, and own signals and credit rules by name. */
export function quantitiesOf(runs: Run[]): Quantity[] {
  const completions = runs.flatMap(({ records }) => records.flatMap((record) => record.completions));
  const own = (part: "signals" | "credit", kind: string, below: string, above: string) =>
    [...new Set(completions.flatMap((completion) => Object.keys(completion[part] ?? {})))].map((name) => ({
      name: `${part}:${name}`, title: `${kind} ${visible(name)}`, below, above, ratio: part === "credit", twoSided: part === "credit",
      of: (completion: Completion) => completion[part]?.[name],
    }));
  const gap = { title: "Gap to the teacher", below: "less likely", above: "more likely to the teacher", twoSided: true };
  return [
    ...BUILT_IN.map((item) => ({ ...item, of: (completion: Completion) => completion[item.name] })),
    ...own("signals", "Signal", "lower", "higher").map((item) => (item.name === "signals:teacher_gap" ? { ...item, ...gap } : item)),
    ...own("credit", "Credit rule", "less credit", "more credit"),
  ];
}

const SCALES: Record<"light" | "dark", { low: Colour; middle: Colour; high: Colour }> = {
  light: { low: [120, 182, 228], middle: [250, 250, 250], high: [246, 164, 82] },
  dark: { low: [20, 88, 148], middle: [32, 36, 42], high: [140, 66, 6] },
};

/** Where each value lies between the farthest one below the middle, -1, and above it, 1; the middle is 0. */
export function positions(values: Numbers, ratio: boolean): Numbers {
  const distances = values.map((value) => {
    if (value === null) return null;
    if (!ratio) return value;
    return value > 0 ? Math.log(value) : -Infinity;
  });
  let farthest = 0;
  for (const distance of distances) {
    if (distance !== null && Number.isFinite(distance)) farthest = Math.max(farthest, Math.abs(distance));
  }
  return distances.map((distance) =>
    distance === null ? null : Math.max(-1, Math.min(1, distance / (farthest || 1))),
  );
}

export function tokenStyle(position: number | null, dark: boolean): { background: string; color: string } | undefined {
  if (position === null) return undefined;
  const { low, middle, high } = SCALES[dark ? "dark" : "light"];
  const end = position < 0 ? low : high;
  const mixed = middle.map((from, i) => Math.round(from + Math.abs(position) * (end[i]! - from))) as Colour;
  return { background: `rgb(${mixed.join(" ")})`, color: dark ? "#fff" : "#000" };
}

/** Of runs: Okabe and Ito's palette, which colour-blind readers can tell apart, and a dash of its own for each. */
const RUNS: { light: string; dark: string; dash: number[] }[] = [
  { light: "#0072b2", dark: "#56b4e9", dash: [] },
  { light: "#d55e00", dark: "#e69f00", dash: [8, 4] },
  { light: "#007d5c", dark: "#2bc79d", dash: [2, 3] },
  { light: "#a8477f", dark: "#e08fbf", dash: [10, 3, 2, 3] },
  { light: "#5c5c5c", dark: "#c8c8c8", dash: [4, 2] },
  { light: "#8a6d00", dark: "#f0e442", dash: [12, 6] },
];

export function runColour(index: number, dark: boolean): string {
  return RUNS[index % RUNS.length]![dark ? "dark" : "light"];
}

export function runDash(index: number): number[] {
  const { dash } = RUNS[index % RUNS.length]!;
  const round = Math.floor(index / RUNS.length); // beyond the palette the dashes are longer
  return round && dash.length === 0 ? [14 * round, 3] : dash.map((part) => part * (1 + round));
}
