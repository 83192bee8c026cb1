// Attention of tokens over the vision tokens of all images of a prompt.
import { type Completion, bytes } from "../data";

export interface Look {
  /** Per image, in order: attention on each cell, row by row. */
  images: number[][];
  /** On all images together: the vision mass. */
  mass: number;
  cells: number;
}

/** Attention that is drawn with nothing, and with the full colour. */
export interface Span {
  low: number;
  high: number;
}

const decoded = new WeakMap<Completion, Uint8Array>();

/** Tokens whose attention is drawn: their numbers, and their name. */
export interface Part {
  tokens: number[];
  name: string;
}

/** The tokens of a turn, or all that the policy wrote. */
export function written({ tokens, turns }: Completion, turn: number | null): Part {
  const chosen = turn === null ? turns : turns?.slice(turn, turn + 1);
  const own = (chosen ?? []).flatMap(({ start, stop }) => Array.from({ length: stop - start }, (_, i) => start + i));
  return { tokens: own.length ? own : tokens.map((_, row) => row), name: turn === null ? "the whole completion" : `turn ${turn + 1}` };
}

/** Mean attention of tokens; null if it was not measured or does not fit the grids. */
export function look(completion: Completion, { tokens: rows }: Part): Look | null {
  const { attention, images, tokens } = completion;
  if (!attention || !tokens.length) return null;
  let values = decoded.get(completion);
  if (!values) decoded.set(completion, (values = bytes(attention.values)));
  const cells = values.length / tokens.length;
  const counts = images.map(({ grid }) => (grid ? grid[0] * grid[1] : 0));
  if (counts.some((count) => !count) || counts.reduce((sum, count) => sum + count, 0) !== cells) return null;
  const mean = new Array<number>(cells).fill(0);
  for (const row of rows) {
    const scale = (attention.scale[row] ?? 0) / 255 / rows.length;
    for (let cell = 0; cell < cells; cell++) mean[cell]! += scale * values[row * cells + cell]!;
  }
  let first = 0;
  const parts = counts.map((count) => mean.slice(first, (first += count)));
  return { images: parts, mass: mean.reduce((sum, value) => sum + value, 0), cells };
}

const OUTLIERS = 0.02; // of the cells may be beyond the full colour: single cells often take most of the attention

/** From the least to nearly the most of all looks, so that differences are seen however evenly a model looks. */
export function span(looks: Look[]): Span {
  const sorted = looks.flatMap(({ images }) => images.flat()).sort((a, b) => a - b);
  const low = sorted[0] ?? 0;
  const most = sorted.at(-1) ?? 0;
  const high = sorted[Math.min(sorted.length - 1, Math.ceil((1 - OUTLIERS) * sorted.length) - 1)] ?? 0;
  return { low, high: high > low ? high : most };
}
