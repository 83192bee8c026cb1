import { useLayoutEffect, useMemo, useRef, useState } from "preact/hooks";
import uPlot from "uplot";
import { runColour, runDash } from "../colours";
import type { Numbers, Run } from "../data";
import { number } from "../format";
import { useDark } from "../hooks";
import { type Axis, along } from "./axis";
import { type Line, type Panel, weightChanges } from "./panels";
import { asSvg, save, savePng } from "./picture";

const HEIGHT = 162;
const FONT = "11px system-ui";
const SHARED = uPlot.sync("step");

/** Exponential moving average over the steps that have a value; `amount` in [0, 1), 0 leaves the values alone. */
function smoothed(values: Numbers, amount: number): Numbers {
  let mean: number | null = null;
  return values.map((value) => {
    if (value === null) return null;
    mean = mean === null ? value : amount * mean + (1 - amount) * value;
    return mean;
  });
}

/** uPlot's own, but of nothing but noughts up to 1: it would take 100. */
function range(_: uPlot, low: number | null, high: number | null): uPlot.Range.MinMax {
  if (low === null || high === null) return [null, null];
  return low === 0 && high === 0 ? [0, 1] : uPlot.rangeNum(low, high, 0.1, true);
}

/** On a logarithmic axis: uPlot's own would go on to the next power of ten. */
const rangeAbove0 = (_: uPlot, low: number | null, high: number | null): uPlot.Range.MinMax => (low && high ? [low / 1.1, high * 1.1] : [null, null]);

/** Where numbers stand on a logarithmic axis: at 1, 2 and 5 of every power of ten, at even distances if there are few of these. */
function ticks(low: number, high: number): number[] {
  const first = Math.floor(Math.log10(low));
  const powers = Array.from({ length: Math.ceil(Math.log10(high)) - first + 1 }, (_, i) => 10 ** (first + i));
  const round = powers.flatMap((power) => (powers.length > 5 ? [power] : [power, 2 * power, 5 * power])).filter((tick) => tick >= low && tick <= high);
  if (round.length > 2) return round;
  const step = 10 ** Math.floor(Math.log10(high - low));
  const apart = [0.1, 0.2, 0.5, 1].map((part) => part * step).find((size) => (high - low) / size <= 5)! ?? step;
  return Array.from({ length: Math.floor(high / apart) - Math.ceil(low / apart) + 1 }, (_, i) => (Math.ceil(low / apart) + i) * apart);
}

/** What tells a line from the others of its chart; "" if there are none. */
function label({ run, part, mode }: Line, runs: Run[], lines: Line[]): string {
  const evaluated = mode === "eval" && lines.some((line) => line.mode !== mode);
  const several = new Set(lines.map((line) => line.run)).size > 1 || runs.length > 1;
  return [several && runs[run]!.name, part, evaluated && "evaluation"].filter(Boolean).join(" · ");
}

/** Runs are told apart by colour; the segments of one run too, those of several by dash. */
function look({ run, part }: Line, lines: Line[]): { colour: number; dash: number } {
  if (!part) return { colour: run, dash: run };
  const parts = [...new Set(lines.map((line) => line.part))];
  const alone = lines.every((line) => line.run === run);
  return { colour: alone ? parts.indexOf(part) : run, dash: parts.indexOf(part) };
}

function summary(panel: Panel, runs: Run[]): string {
  const parts = panel.lines.map((line) => {
    const { steps, values } = line.curve;
    const known = values.map((value, i) => [steps[i]!, value] as const).filter(([, value]) => value !== null);
    const [first, last] = [known[0], known.at(-1)];
    if (!first || !last) return "";
    return `${label(line, runs, panel.lines) || "the run"}: ${number(first[1])} at step ${first[0]}, ${number(last[1])} at step ${last[0]}`;
  });
  return `${panel.title}. ${parts.filter(Boolean).join("; ")}. Arrow keys move along the steps.`;
}

export interface Drawing {
  smoothing: number;
  axis: Axis;
  logarithmic: boolean;
}

const SHORT = new Intl.NumberFormat("en", { notation: "compact", maximumSignificantDigits: 3 });

export function Chart({ panel, runs, drawing: { smoothing, axis, logarithmic } }: { panel: Panel; runs: Run[]; drawing: Drawing }) {
  const box = useRef<HTMLDivElement>(null);
  const plot = useRef<uPlot | null>(null);
  const [index, setIndex] = useState<number | null>(null);
  const [focused, setFocused] = useState(false); // the cursor moves in all charts, one of them speaks
  const dark = useDark();
  const data = useMemo(() => {
    const tables = panel.lines.map(({ run, curve, mode }) => {
      const values = mode === "eval" ? curve.values : smoothed(curve.values, smoothing);
      const places = along(runs[run]!, axis, curve.steps);
      const there = places.flatMap((place, i) => (place === null ? [] : [i]));
      return [there.map((i) => places[i]), there.map((i) => values[i] ?? null)] as uPlot.AlignedData;
    });
    // Behind the lines, in the same order, the upper and the lower ends of those that are means of seeds.
    const bands = panel.lines.filter(({ curve }) => curve.deviation).flatMap(({ run, curve, mode }) =>
      [1, -1].map((sign) => {
        const values = curve.values.map((value, i) => (value === null ? null : value + sign * (curve.deviation![i] ?? 0)));
        return [along(runs[run]!, axis, curve.steps), mode === "eval" ? values : smoothed(values, smoothing)] as uPlot.AlignedData;
      }));
    return uPlot.join([...tables, ...bands]);
  }, [panel, smoothing, axis, runs]);
  // What is 0 or below has no place on a logarithmic axis; a chart of nothing else stays linear.
  const drawn = useMemo(() => {
    if (!logarithmic) return null;
    const [places, ...lines] = data as Numbers[];
    const positive = lines.map((values) => values.map((value) => (value !== null && value !== undefined && value <= 0 ? null : value)));
    return positive.some((values) => values.some((value) => typeof value === "number")) ? [places, ...positive] as uPlot.AlignedData : null;
  }, [data, logarithmic]);

  // Under other weights, the sum of the rewards is another quantity.
  const changes = useMemo(() => (/^reward(_std)?$/.test(panel.name) ? runs.flatMap((run) => weightChanges(run).map((step) => ({ step, place: along(run, axis, [step])[0] }))) : []), [panel, axis, runs]);

  useLayoutEffect(() => { // before the page is printed, too
    const element = box.current!;
    const style = getComputedStyle(element);
    const ink = style.getPropertyValue("--muted");
    const rule = style.getPropertyValue("--rule");
    const line = { stroke: ink, grid: { stroke: rule, width: 1 }, ticks: { show: false }, font: FONT };
    const made = new uPlot(
      {
        width: element.clientWidth,
        height: HEIGHT,
        padding: [8, 26, 0, 0], // half of the last label of the axis
        legend: { show: false },
        cursor: { sync: { key: SHARED.key }, y: false, drag: { x: true, y: false } },
        scales: { x: { time: false }, y: drawn ? { distr: 3, range: rangeAbove0 } : { range } },
        axes: [
          { ...line, size: 24, space: 60, label: axis.name, labelSize: 14, labelFont: FONT, values: (_, ticks) => ticks.map((tick) => (axis.of ? SHORT.format(tick) : Number.isInteger(tick) ? String(tick) : "")) },
          { ...line, size: 56, ...(drawn && { splits: (_: uPlot, __: number, low: number, high: number) => ticks(low, high), filter: (_: uPlot, all: number[]) => all }), values: (_, all) => all.map((tick) => number(tick, 3)) },
        ],
        series: [
          {},
          ...panel.lines.map((line) => {
            const { mode } = line;
            const { colour, dash } = look(line, panel.lines);
            const stroke = runColour(colour, dark);
            return {
              stroke,
              width: mode === "eval" ? 1 : 1.75,
              dash: mode === "eval" ? [2, 4] : runDash(dash),
              spanGaps: true,
              points: { show: mode === "eval" || undefined, size: 7, fill: stroke, stroke },
            };
          }),
          ...panel.lines.filter(({ curve }) => curve.deviation).flatMap(() => [{ width: 0, points: { show: false } }, { width: 0, points: { show: false } }]),
        ],
        bands: panel.lines.filter(({ curve }) => curve.deviation).map((line, i) => ({
          series: [panel.lines.length + 1 + 2 * i, panel.lines.length + 2 + 2 * i] as [number, number],
          fill: `${runColour(look(line, panel.lines).colour, dark)}33`,
        })),
        hooks: {
          setCursor: [(self) => setIndex(self.cursor.idx ?? null)],
          draw: [({ ctx, bbox, valToPos }) => changes.forEach(({ place }) => {
            if (place === null || place === undefined) return;
            const x = Math.round(valToPos(place, "x", true));
            ctx.save();
            Object.assign(ctx, { strokeStyle: ink, lineWidth: devicePixelRatio });
            ctx.setLineDash([4, 4]);
            ctx.beginPath();
            ctx.moveTo(x, bbox.top);
            ctx.lineTo(x, bbox.top + bbox.height);
            ctx.stroke();
            ctx.restore();
          })],
        },
      },
      drawn ?? data,
      element,
    );
    plot.current = made;
    const watcher = new ResizeObserver(() => made.setSize({ width: element.clientWidth, height: HEIGHT }));
    watcher.observe(element);
    return () => {
      watcher.disconnect();
      made.destroy();
    };
  }, [panel, data, drawn, dark, changes]);

  const steps = data[0] as number[];
  function picture(): string {
    let band = panel.lines.length + 1;
    const strokes = panel.lines.map((line, i) => {
      const { colour, dash } = look(line, panel.lines);
      const [high, low] = line.curve.deviation ? [data[band++], data[band++]] as Numbers[] : [];
      return { label: label(line, runs, panel.lines), colour: runColour(colour, false), dash: line.mode === "eval" ? [2, 4] : runDash(dash), values: data[i + 1] as Numbers, high, low };
    });
    return asSvg(panel.title, axis.name, steps, strokes, drawn !== null);
  }
  function move(event: KeyboardEvent) {
    const last = steps.length - 1;
    const now = index ?? -1;
    const next = { ArrowRight: Math.min(last, now + 1), ArrowLeft: Math.max(0, now - 1), Home: 0, End: last }[event.key];
    if (next === undefined) return;
    event.preventDefault();
    plot.current!.setCursor({ left: plot.current!.valToPos(steps[next]!, "x"), top: 0 });
  }

  return (
    <figure class="chart">
      <figcaption>
        <strong title={panel.name}>{panel.title}</strong>
        <code>{panel.name}</code>
        <span class="save">
          <button type="button" aria-label={`Save ${panel.title} as SVG`} onClick={() => save(`${panel.name}.svg`, new Blob([picture()], { type: "image/svg+xml" }))}>SVG</button>
          <button type="button" aria-label={`Save ${panel.title} as PNG`} onClick={() => void savePng(`${panel.name}.png`, picture())}>PNG</button>
        </span>
      </figcaption>
      <div ref={box} class="plot" tabIndex={0} role="img" aria-label={summary(panel, runs)} onKeyDown={move} onFocus={() => setFocused(true)} onBlur={() => setFocused(false)} />
      <p class="readout" aria-live={focused ? "polite" : "off"}>
        {index === null
          ? panel.lines.map((line, i) => <Reading key={i} line={line} lines={panel.lines} runs={runs} dark={dark} value={lastOf(data[i + 1] as Numbers)} />)
          : panel.lines.map((line, i) => <Reading key={i} line={line} lines={panel.lines} runs={runs} dark={dark} value={(data[i + 1] as Numbers)[index] ?? null} />)}
        {changes.length > 0 && <span class="muted">The reward weights change at step {[...new Set(changes.map(({ step }) => step))].join(", ")}.</span>}
        <span class="muted">{index === null ? "last" : axis.of ? `${number(steps[index], 4)} ${axis.name}` : `step ${steps[index]}`}</span>
      </p>
    </figure>
  );
}

function lastOf(values: Numbers): number | null {
  return values.findLast((value) => value !== null && value !== undefined) ?? null;
}

interface ReadingProps {
  line: Line;
  lines: Line[];
  runs: Run[];
  dark: boolean;
  value: number | null;
}

function Reading({ line, lines, runs, dark, value }: ReadingProps) {
  const name = label(line, runs, lines);
  return (
    <span class="reading">
      <Swatch {...look(line, lines)} dark={dark} evaluation={line.mode === "eval"} />
      {name && <span class="muted name">{name} </span>}
      {number(value)}
    </span>
  );
}

export function Swatch({ colour, dash, dark, evaluation }: { colour: number; dash: number; dark: boolean; evaluation?: boolean }) {
  const stroke = runColour(colour, dark);
  return (
    <svg class="swatch" width="22" height="10" aria-hidden="true">
      <line x1="0" y1="5" x2="22" y2="5" stroke={stroke} stroke-width={evaluation ? 1 : 2.5} stroke-dasharray={(evaluation ? [2, 4] : runDash(dash)).join(" ")} />
      {evaluation && <circle cx="11" cy="5" r="3.5" fill={stroke} />}
    </svg>
  );
}
