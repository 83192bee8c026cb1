const HIDDEN = /[\p{Cc}\p{Cf}\p{Cs}\p{Zl}\p{Zp}]/gu;

/** Text with line ends marked, and characters that do not show or that reorder text as their numbers. */
export function visible(text: string): string {
  return text.replace(HIDDEN, (char) => {
    if (char === "\n") return "↵\n";
    if (char === "\t") return char;
    return `⟨U+${char.codePointAt(0)!.toString(16).toUpperCase().padStart(4, "0")}⟩`;
  });
}

export function number(value: number | null | undefined, digits = 4): string {
  if (value === null || value === undefined) return "–";
  if (value !== 0 && (Math.abs(value) >= 1e5 || Math.abs(value) < 1e-3)) return value.toExponential(digits - 2);
  return String(Number(value.toPrecision(digits))).replace("-", "−");
}

export function percent(value: number): string {
  return `${(100 * value).toFixed(value < 0.1 ? 1 : 0)}\u00a0%`;
}

/** The first `length` characters of a text on one line. */
export function preview(text: string, length: number): string {
  const line = text.replace(/\s+/g, " ").trim();
  return visible(line.length > length ? `${line.slice(0, length)}…` : line);
}

/** The texts without the lines that all of them begin and end with; a text of which nothing is left stays whole. */
export function distinct(texts: string[]): string[] {
  if (!texts.length) return [];
  const lines = texts.map((text) => text.split("\n"));
  const shortest = Math.min(...lines.map(({ length }) => length));
  const alike = (at: number) => lines.every((found) => found.at(at) === lines[0]!.at(at));
  let first = 0;
  while (first < shortest && alike(first)) first++;
  let last = 0;
  while (last < shortest - first && alike(-1 - last)) last++;
  return lines.map((found, index) => found.slice(first, found.length - last).join(" ").trim() || texts[index]!);
}

export function plural(count: number, one: string): string {
  return `${count} ${one}${count === 1 ? "" : "s"}`;
}
