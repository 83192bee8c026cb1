import type { Completion } from "../data";

/** Right or wrong by sign, word and colour. */
export function Verdict({ completion }: { completion: Completion }) {
  if (completion.correct === null) return null;
  return completion.correct ? <span class="verdict right">✓ right</span> : <span class="verdict wrong">✗ wrong</span>;
}
