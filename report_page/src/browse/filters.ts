import type { Entry } from "../data";
import type { Place } from "../place";

export interface Filters {
  /** `mode-step`; empty: all steps. */
  when: string;
  answer: "any" | "right" | "wrong";
  /** Name of a reward; empty: their weighted sum. */
  reward: string;
  least: string;
  most: string;
}

export const EVERYTHING: Filters = { when: "", answer: "any", reward: "", least: "", most: "" };

export function fromPlace({ when = "", answer, reward = "", least = "", most = "" }: Place): Filters {
  return { when, answer: answer === "right" || answer === "wrong" ? answer : "any", reward, least, most };
}

export function rewardOf({ completion }: Entry, name: string): number | null {
  return (name ? completion.rewards[name] : completion.reward) ?? null;
}

export function passes(entry: Entry, { when, answer, reward, least, most }: Filters): boolean {
  if (when && `${entry.mode}-${entry.step}` !== when) return false;
  if (answer !== "any" && entry.completion.correct !== (answer === "right")) return false;
  const value = rewardOf(entry, reward);
  if (least !== "" && !(value !== null && value >= Number(least))) return false;
  if (most !== "" && !(value !== null && value <= Number(most))) return false;
  return true;
}
