import { useEffect, useMemo, useRef, useState } from "preact/hooks";
import type { Run } from "../data";
import { plural, visible } from "../format";
import { useDark } from "../hooks";
import { go, usePlace } from "../place";
import { asCsv, axes } from "./axis";
import { Chart, type Drawing, Swatch } from "./Chart";
import { Lazy } from "./Lazy";
import { save } from "./picture";
import { type Panel, type Section, sections, whatMatters } from "./panels";

const SMOOTHING = [
  ["none", 0],
  ["light", 0.6],
  ["strong", 0.9],
] as const;
const MOST = 60; // charts of a section at once

export function Curves({ runs, single }: { runs: Run[]; single: Run[] | null }) {
  const all = useMemo(() => sections(runs), [runs]);
  const first = useMemo(() => whatMatters(all), [all]);
  const place = usePlace();
  const [wanted, setWanted] = useState(place.find ?? "");
  const smoothing = Number(place.smooth) || 0;
  const over = useMemo(() => axes(runs), [runs]);
  const axis = over.find(({ name }) => name === place.over) ?? over[0]!;
  const logarithmic = place.scale === "log";
  const drawing = useMemo(() => ({ smoothing, axis, logarithmic }), [smoothing, axis, logarithmic]);
  const dark = useDark();
  const rewards = useMemo(() => new Set(runs.filter(({ scores }) => !scores).map(({ setup }) => setup.rewards ?? "unknown")), [runs]);
  const open = (place.open ?? "").split("|");
  const evaluation = useMemo(() => runs.some((run) => run.curves.some((curve) => curve.mode === "eval")), [runs]);
  const shown = useMemo(() => (wanted ? found(all, wanted.toLowerCase()) : all), [all, wanted]);
  if (!all.length) return runs.every(({ scores }) => scores) ? null : <p class="empty">Nothing was logged: there are no curves.</p>;
  const set = (title: string, now: boolean) => {
    if (wanted || open.includes(title) === now) return;
    go({ open: (now ? [...open, title] : open.filter((item) => item !== title)).filter(Boolean).join("|") });
  };
  const jump = (title: string) => {
    set(title, true);
    requestAnimationFrame(() => document.getElementById(`section-${title}`)?.scrollIntoView());
  };
  return (
    <>
      <div class="bar">
        <label>
          Find <input type="search" value={wanted} placeholder="name of a value" onInput={(event) => { setWanted(event.currentTarget.value); go({ find: event.currentTarget.value }); }} />
        </label>
        <label>
          Smoothing{" "}
          <select value={smoothing} onChange={(event) => go({ smooth: event.currentTarget.value === "0" ? null : event.currentTarget.value })}>
            {SMOOTHING.map(([name, amount]) => <option key={name} value={amount}>{name}</option>)}
          </select>
        </label>
        {over.length > 1 && (
          <label>
            Over{" "}
            <select value={axis.name} onChange={(event) => go({ over: event.currentTarget.value === "step" ? null : event.currentTarget.value })}>
              {over.map(({ name, of }) => <option key={name} value={name}>{of ? name : "steps"}</option>)}
            </select>
          </label>
        )}
        <label>
          <input type="checkbox" checked={logarithmic} onChange={(event) => go({ scale: event.currentTarget.checked ? "log" : null })} /> Logarithmic
        </label>
        {single && (
          <label class="check">
            <input type="checkbox" checked={place.seeds !== "0"} onChange={(event) => go({ seeds: event.currentTarget.checked ? null : "0" })} /> Mean ± deviation over seeds
          </label>
        )}
        <button type="button" onClick={() => save("curves.csv", new Blob([asCsv(single ?? runs)], { type: "text/csv" }))}>Download CSV</button>
      </div>
      {!wanted && (
        <nav class="index" aria-label="Sections">
          {all.map(({ title }) => <button key={title} type="button" onClick={() => jump(title)}>{title}</button>)}
        </nav>
      )}
      <ul class="legend" aria-label="Lines">
        {runs.length > 1 && runs.map((run, index) => !run.scores && <li key={index}><Swatch colour={index} dash={index} dark={dark} /> is {run.name}.</li>)}
        {evaluation && <li><Swatch colour={0} dash={0} dark={dark} evaluation /> A line with dots is an evaluation.</li>}
        {rewards.size > 1 && <li class="note">The runs have different rewards ({[...rewards].map(visible).join(" | ")}): their curves of the weighted sum cannot be compared.</li>}
        {logarithmic && <li>What is 0 or below is not drawn on a logarithmic axis.</li>}
      </ul>
      {shown.length === 0 && <p class="empty">No value has “{wanted}” in its name.</p>}
      {!wanted && <Charts panels={first} runs={runs} drawing={drawing} />}
      {shown.map((section) => (
        <Folded key={section.title} section={section} open={wanted !== "" || open.includes(section.title)} set={(now) => set(section.title, now)} runs={runs} drawing={drawing} />
      ))}
    </>
  );
}

function found(all: Section[], wanted: string): Section[] {
  const fits = ({ name, title, lines }: Panel) => [title, name, ...lines.map(({ curve }) => curve.name)].some((text) => text.toLowerCase().includes(wanted));
  return all
    .map((section) => ({ ...section, panels: [...section.panels, ...section.minor].filter(fits), minor: [] }))
    .filter((section) => section.panels.length);
}

interface FoldedProps {
  section: Section;
  open: boolean;
  set: (open: boolean) => void;
  runs: Run[];
  drawing: Drawing;
}

function Folded({ section: { title, note, panels, minor }, open, set, runs, drawing }: FoldedProps) {
  const [all, setAll] = useState(false);
  return (
    <details id={`section-${title}`} class="curves" open={open} onToggle={(event) => set(event.currentTarget.open)}>
      <summary><h2>{title}</h2> <span class="muted">{plural(panels.length + minor.length, "chart")}<span class="note-text">{note && ` · ${note}`}</span></span></summary>
      {open && <Charts panels={all ? [...panels, ...minor] : panels} runs={runs} drawing={drawing} />}
      {open && minor.length > 0 && (
        <button type="button" class="more" onClick={() => setAll(!all)}>
          {all ? "Without" : "With"} deviations and what never changes ({minor.length})
        </button>
      )}
    </details>
  );
}

/** How many stand in each of as few rows as there can be, if `most` fit. */
const even = (count: number, most: number) => Math.ceil(count / Math.ceil(count / most)) || 1;

function Charts({ panels, runs, drawing }: { panels: Panel[]; runs: Run[]; drawing: Drawing }) {
  const [most, setMost] = useState(MOST);
  const before = useRef(panels);
  useEffect(() => { if (before.current !== panels) { before.current = panels; setMost(MOST); } }, [panels]);
  const count = Math.min(most, panels.length);
  return (
    <>
      <div class="charts" style={{ "--wide": even(count, 4), "--middle": even(count, 3), "--narrow": even(count, 2) }}>
        {panels.slice(0, most).map((panel) => <Lazy key={panel.name}><Chart panel={panel} runs={runs} drawing={drawing} /></Lazy>)}
      </div>
      {panels.length > most && <button type="button" class="more" onClick={() => setMost(most + MOST)}>{panels.length - most} more</button>}
    </>
  );
}
