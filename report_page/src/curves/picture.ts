// A chart as a file: SVG, and PNG drawn from it.
import type { Numbers } from "../data";
import { number } from "../format";

export interface Stroke {
  label: string;
  colour: string;
  dash: number[];
  values: Numbers;
  low?: Numbers;
  high?: Numbers;
}

const [WIDTH, HEIGHT, LEFT, RIGHT, TOP, ROW] = [640, 320, 64, 16, 34, 16];
const safe = (text: string) => text.replace(/[<>&"]/g, (char) => `&#${char.charCodeAt(0)};`);

/** `places`: where the values stand along the horizontal axis; `logarithmic`: the vertical one. */
export function asSvg(title: string, axis: string, places: number[], strokes: Stroke[], logarithmic: boolean): string {
  const scale = (value: number | null | undefined) => (value === null || value === undefined || (logarithmic && value <= 0) ? null : logarithmic ? Math.log10(value) : value);
  const all = strokes.flatMap(({ values, low = [], high = [] }) => [...values, ...low, ...high]).map(scale).filter((value) => value !== null);
  const reduce = (pick: (...of: number[]) => number, of: number[]) => of.reduce((a, b) => pick(a, b), of[0] ?? 0);
  const [bottom, top] = [reduce(Math.min, all), reduce(Math.max, all)];
  const [first, last] = [places[0] ?? 0, places.at(-1) ?? 1];
  const x = (place: number) => (LEFT + ((WIDTH - LEFT - RIGHT) * (place - first)) / (last - first || 1)).toFixed(1);
  const y = (value: number) => (HEIGHT - 40 - ((HEIGHT - 40 - TOP) * (value - bottom)) / (top - bottom || 1)).toFixed(1);
  const points = (values: Numbers) => places.flatMap((place, i) => { const value = scale(values[i]); return value === null ? [] : [`${x(place)},${y(value)}`]; });
  const text = (at: string, words: string, more = "") => `<text ${at} ${more}>${safe(words)}</text>`;
  const quarters = [0, 0.25, 0.5, 0.75, 1];
  const parts = [
    text(`x="${LEFT}" y="20"`, title, 'font-size="14" font-weight="600"'),
    ...quarters.map((part) => { const value = bottom + part * (top - bottom); return `<path d="M${LEFT} ${y(value)}H${WIDTH - RIGHT}" stroke="#ddd"/>${text(`x="${LEFT - 6}" y="${y(value)}" dy="4"`, number(logarithmic ? 10 ** value : value, 3), 'text-anchor="end"')}`; }),
    ...quarters.map((part) => text(`x="${x(first + part * (last - first))}" y="${HEIGHT - 24}"`, number(first + part * (last - first), 3), 'text-anchor="middle"')),
    text(`x="${(WIDTH + LEFT) / 2}" y="${HEIGHT - 8}"`, axis, 'text-anchor="middle"'),
    ...strokes.flatMap(({ colour, dash, values, low, high, label }, i) => [
      ...(low && high ? [`<polygon points="${[...points(high), ...points(low).reverse()].join(" ")}" fill="${colour}" fill-opacity="0.2"/>`] : []),
      `<polyline points="${points(values).join(" ")}" fill="none" stroke="${colour}" stroke-width="1.75" stroke-dasharray="${dash.join(" ")}"/>`,
      ...(points(values).length === 1 ? [`<circle cx="${points(values)[0]!.split(",")[0]}" cy="${points(values)[0]!.split(",")[1]}" r="3" fill="${colour}"/>`] : []),
      ...(label ? [`<path d="M${LEFT} ${HEIGHT + ROW * i + 4}h22" stroke="${colour}" stroke-width="2.5" stroke-dasharray="${dash.join(" ")}"/>${text(`x="${LEFT + 28}" y="${HEIGHT + ROW * i + 8}"`, label)}`] : []),
    ]),
  ];
  const height = HEIGHT + ROW * strokes.filter(({ label }) => label).length;
  return `<svg xmlns="http://www.w3.org/2000/svg" width="${WIDTH}" height="${height}" viewBox="0 0 ${WIDTH} ${height}" font-family="sans-serif" font-size="11" fill="#333"><rect width="100%" height="100%" fill="#fff"/>${parts.join("")}</svg>`;
}

export function save(name: string, content: Blob) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(content);
  link.download = name.replace(/[^\w.-]+/g, "_");
  link.click();
  URL.revokeObjectURL(link.href);
}

/** Save an SVG as PNG of twice its size. */
export async function savePng(name: string, svg: string) {
  const image = new Image();
  image.src = `data:image/svg+xml,${encodeURIComponent(svg)}`;
  await image.decode();
  const canvas = document.createElement("canvas");
  [canvas.width, canvas.height] = [2 * image.width, 2 * image.height];
  canvas.getContext("2d")!.drawImage(image, 0, 0, canvas.width, canvas.height);
  canvas.toBlob((content) => content && save(name, content));
}
