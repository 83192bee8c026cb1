import { useEffect, useMemo, useRef, useState } from "preact/hooks";
import type { Run } from "../data";
import { plural } from "../format";
import { useDark } from "../hooks";
import { go, usePlace } from "../place";
import { Chart, Swatch } from "./Chart";
import { Lazy } from "./Lazy";
import { type Panel, type Section, sections, whatMatters } from "./panels";

const SMOOTHING = [
  ["none", 0],
  ["light", 0.6],
  ["strong", 0.9],
] as const;
const MOST = 60; // charts of a section at once

export function Curves({ runs }: { runs: Run[] }) {
  const all = useMemo(() => sections(runs), [runs]);
  const first = useMemo(() => whatMatters(all), [all]);
  const place = usePlace();
  const [wanted, setWanted] = useState(place.find ?? "");
  const smoothing = Number(place.smooth) || 0;
  const dark = useDark();
  const open = (place.open ?? "").split("|");
  const evaluation = useMemo(() => runs.some((run) => run.curves.some((curve) => curve.mode === "eval")), [runs]);
  const shown = useMemo(() => (wanted ? found(all, wanted.toLowerCase()) : all), [all, wanted]);
  if (!all.length) return <p class="empty">Nothing was logged: there are no curves.</p>;
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
      </div>
      {!wanted && (
        <nav class="index" aria-label="Sections">
          {all.map(({ title }) => <button key={title} type="button" onClick={() => jump(title)}>{title}</button>)}
        </nav>
      )}
      <ul class="legend" aria-label="Lines">
        {runs.length > 1 && runs.map((run, index) => <li key={index}><Swatch colour={index} dash={index} dark={dark} /> {run.name}</li>)}
        {evaluation && <li><Swatch colour={0} dash={0} dark={dark} evaluation /> with dots: evaluation</li>}
      </ul>
      {shown.length === 0 && <p class="empty">No value has “{wanted}” in its name.</p>}
      {!wanted && <div class="charts first"><Charts panels={first} runs={runs} smoothing={smoothing} /></div>}
      {shown.map((section) => (
        <Folded key={section.title} section={section} open={wanted !== "" || open.includes(section.title)} set={(now) => set(section.title, now)} runs={runs} smoothing={smoothing} />
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
  smoothing: number;
}

function Folded({ section: { title, note, panels, minor }, open, set, runs, smoothing }: FoldedProps) {
  const [all, setAll] = useState(false);
  return (
    <details id={`section-${title}`} class="curves" open={open} onToggle={(event) => set(event.currentTarget.open)}>
      <summary><h2>{title}</h2> <span class="muted">{plural(panels.length + minor.length, "chart")}<span class="note-text">{note && ` · ${note}`}</span></span></summary>
      {open && (
        <div class="charts">
          <Charts panels={all ? [...panels, ...minor] : panels} runs={runs} smoothing={smoothing} />
        </div>
      )}
      {open && minor.length > 0 && (
        <button type="button" class="more" onClick={() => setAll(!all)}>
          {all ? "Without" : "With"} deviations and what never changes ({minor.length})
        </button>
      )}
    </details>
  );
}

function Charts({ panels, runs, smoothing }: { panels: Panel[]; runs: Run[]; smoothing: number }) {
  const [most, setMost] = useState(MOST);
  const before = useRef(panels);
  useEffect(() => { if (before.current !== panels) { before.current = panels; setMost(MOST); } }, [panels]);
  return (
    <>
      {panels.slice(0, most).map((panel) => <Lazy key={panel.name}><Chart panel={panel} runs={runs} smoothing={smoothing} /></Lazy>)}
      {panels.length > most && <button type="button" class="more" onClick={() => setMost(most + MOST)}>{panels.length - most} more</button>}
    </>
  );
}
