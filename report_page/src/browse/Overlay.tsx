import { useMemo, useState } from "preact/hooks";
import type { Picture } from "../data";
import { percent } from "../format";

const LONGEST = 320; // units of the drawing
const DARKEST = 0.8; // over a cell without attention

interface Props {
  picture: Picture;
  source: string | null;
  index: number;
  count: number;
  /** Attention on each cell; null: not shown. */
  cells: number[] | null;
  most: number;
  mass: number;
  whose: string;
}

export function Overlay({ picture, source, index, count, cells, most, mass, whose }: Props) {
  const [cell, setCell] = useState<number | null>(null);
  const scale = LONGEST / Math.max(picture.width, picture.height, 1);
  const width = Math.max(8, picture.width * scale);
  const height = Math.max(8, picture.height * scale);
  const grid = cells ? picture.grid : null;
  const [rows, columns] = grid ?? [0, 0];
  const name = count > 1 ? `Image ${index + 1}` : "Image";

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

  // Kept while only the pointer moves: there may be thousands of cells.
  const squares = useMemo(
    () => grid && cells!.map((value, i) => (
      <rect key={i} class="cell" x={((i % columns) * width) / columns} y={(Math.floor(i / columns) * height) / rows}
        width={width / columns} height={height / rows} onPointerEnter={() => setCell(i)}
        fill="#000" fill-opacity={most ? (DARKEST * (1 - value / most)).toFixed(3) : DARKEST} />
    )),
    [cells, most, rows, columns, width, height],
  );
  const said = cells && cell !== null && cell < cells.length
    ? `row ${Math.floor(cell / columns) + 1}, column ${(cell % columns) + 1}: ${percent(mass ? cells[cell]! / mass : 0)} of the attention on the ${count > 1 ? "images" : "image"}`
    : "";
  return (
    <figure class="picture">
      <svg viewBox={`0 0 ${width} ${height}`} width={width * 1.25} shape-rendering="crispEdges" role="img" tabindex={grid ? 0 : undefined} onKeyDown={move} onPointerLeave={() => setCell(null)}
        aria-label={`${name}, ${picture.width} by ${picture.height} pixels${source ? "" : ", its thumbnail is missing"}${grid ? `, lit where ${whose} looked, on ${rows} by ${columns} vision tokens. Arrow keys move over them.` : ""}`}>
        {source
          ? <image href={source} width={width} height={height} preserveAspectRatio="none" />
          : <rect width={width} height={height} class="missing" />}
        {squares}
        {said && (
          <rect class="cursor" x={((cell! % columns) * width) / columns} y={(Math.floor(cell! / columns) * height) / rows}
            width={width / columns} height={height / rows} />
        )}
      </svg>
      <figcaption aria-live="polite">
        {said || (
          <>
            {count > 1 && `${name}: `}{picture.width} × {picture.height} px
            {picture.grid ? `, ${picture.grid[0]} × ${picture.grid[1]} vision tokens` : ", vision tokens not known"}
            {!source && " – its thumbnail is missing"}
          </>
        )}
      </figcaption>
    </figure>
  );
}
