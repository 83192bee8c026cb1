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
  return `${(100 * value).toFixed(value < 0.1 ? 1 : 0)} %`;
}

/** The first `length` characters of a text on one line. */
export function preview(text: string, length: number): string {
  const line = text.replace(/\s+/g, " ").trim();
  return visible(line.length > length ? `${line.slice(0, length)}…` : line);
}

export function plural(count: number, one: string): string {
  return `${count} ${one}${count === 1 ? "" : "s"}`;
}
