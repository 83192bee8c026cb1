import { useMemo, useState } from "preact/hooks";
import type { Picture } from "../data";
import { percent } from "../format";
import type { Span } from "./attention";

const LONGEST = 320; // units of the drawing
export const HEAT = [214, 0, 122] as const; // one hue, rare in pictures

interface Props {
  picture: Picture;
  source: string | null;
  name: string;
  /** Whether the completion has other images. */
  several: boolean;
  /** Attention on each cell; null: not shown. */
  cells: number[] | null;
  span: Span;
  mass: number;
  whose: string;
  opacity: number;
  grid: boolean;
  regions: boolean;
}

/** A picture of one pixel per cell, opaque where the attention is greatest. */
function heat(cells: number[], rows: number, columns: number, { low, high }: Span): string {
  const canvas = document.createElement("canvas");
  canvas.width = columns;
  canvas.height = rows;
  const context = canvas.getContext("2d")!;
  const pixels = context.createImageData(columns, rows);
  cells.forEach((value, i) => {
    const part = high > low ? Math.max(0, Math.min(1, (value - low) / (high - low))) : 0;
    pixels.data.set([...HEAT, Math.round(255 * part)], 4 * i);
  });
  context.putImageData(pixels, 0, 0);
  return canvas.toDataURL();
}

export function Overlay({ picture, source, name, several, cells, span, mass, whose, opacity, grid: drawGrid, regions }: Props) {
  const [cell, setCell] = useState<number | null>(null);
  const scale = LONGEST / Math.max(picture.width, picture.height, 1);
  const width = Math.max(8, picture.width * scale);
  const height = Math.max(8, picture.height * scale);
  const grid = cells ? picture.grid : null;
  const [rows, columns] = grid ?? [0, 0];

  function move(event: KeyboardEvent) {
    if (!grid) return;
    if (event.key === "Escape") return setCell(null);
    const [down, right] = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key] ?? [0, 0];
    if (!down && !right) return;
    event.preventDefault();
    const row = cell === null ? 0 : Math.min(rows - 1, Math.max(0, Math.floor(cell / columns) + down!));
    const column = cell === null ? 0 : Math.min(columns - 1, Math.max(0, (cell % columns) + right!));
    setCell(row * columns + column);
  }

  function point(event: PointerEvent) {
    if (!grid) return;
    const box = (event.currentTarget as Element).getBoundingClientRect();
    const row = Math.min(rows - 1, Math.max(0, Math.floor(((event.clientY - box.top) / box.height) * rows)));
    const column = Math.min(columns - 1, Math.max(0, Math.floor(((event.clientX - box.left) / box.width) * columns)));
    setCell(row * columns + column);
  }

  const drawn = useMemo(() => (grid ? heat(cells!, rows, columns, span) : ""), [cells, rows, columns, span.low, span.high]);
  const lines = useMemo(() => {
    if (!grid || !drawGrid) return "";
    const across = Array.from({ length: rows + 1 }, (_, i) => `M0 ${(i * height) / rows}H${width}`);
    const down = Array.from({ length: columns + 1 }, (_, i) => `M${(i * width) / columns} 0V${height}`);
    return [...across, ...down].join("");
  }, [drawGrid, rows, columns, width, height]);
  const said = cells && cell !== null && cell < cells.length
    ? `row ${Math.floor(cell / columns) + 1}, column ${(cell % columns) + 1}: ${percent(mass ? cells[cell]! / mass : 0)} of the attention on the ${several ? "images" : "image"}`
    : "";
  return (
    <figure class="picture">
      <svg viewBox={`0 0 ${width} ${height}`} width={width * 1.25} role="img" tabindex={grid ? 0 : undefined} onKeyDown={move} onPointerMove={point} onPointerDown={point} onPointerLeave={() => setCell(null)}
        aria-label={`${name}, ${picture.width} by ${picture.height} pixels${source ? "" : ", its thumbnail is missing"}${grid ? `, coloured where ${whose} looked, on ${rows} by ${columns} vision tokens. Arrow keys move over them.` : ""}`}>
        {source
          ? <image href={source} width={width} height={height} preserveAspectRatio="none" style={drawn ? { filter: `saturate(${(1 - 0.75 * opacity).toFixed(2)})` } : undefined} />
          : <rect width={width} height={height} class="missing" />}
        {drawn && <image class="heat" href={drawn} width={width} height={height} preserveAspectRatio="none" opacity={opacity} />}
        {lines && <path class="grid" d={lines} />}
        {regions && picture.regions?.map(([left, top, wide, high], i) => (
          <rect key={i} class="region" x={left * scale} y={top * scale} width={wide * scale} height={high * scale} />
        ))}
        {said && (
          <rect class="cursor" x={((cell! % columns) * width) / columns} y={(Math.floor(cell! / columns) * height) / rows}
            width={width / columns} height={height / rows} />
        )}
      </svg>
      <figcaption aria-live="polite">
        {said || (
          <>
            {several && `${name}: `}{grid ? `${rows} × ${columns} vision tokens` : `${picture.width} × ${picture.height} px`}
            {!source && " – its thumbnail is missing"}
          </>
        )}
      </figcaption>
    </figure>
  );
}
