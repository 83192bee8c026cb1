import { useMemo, useState } from "preact/hooks";
import type { Run } from "../data";
import { useDark } from "../hooks";
import { Chart, Swatch } from "./Chart";
import { sections } from "./panels";

const SMOOTHING = [
  ["none", 0],
  ["light", 0.6],
  ["strong", 0.9],
] as const;

export function Curves({ runs }: { runs: Run[] }) {
  const all = useMemo(() => sections(runs), [runs]);
  const [smoothing, setSmoothing] = useState(0);
  const [wanted, setWanted] = useState("");
  const dark = useDark();
  const evaluation = runs.some((run) => run.curves.some((curve) => curve.mode === "eval"));
  if (!all.length) return <p class="empty">Nothing was logged: there are no curves.</p>;
  const fits = (name: string, title: string) => `${name} ${title}`.toLowerCase().includes(wanted.toLowerCase());
  const shown = all
    .map((section) => ({ ...section, panels: section.panels.filter((panel) => fits(panel.name, panel.title)) }))
    .filter((section) => section.panels.length);
  return (
    <>
      <div class="bar">
        <label>
          Find <input type="search" value={wanted} placeholder="name of a value" onInput={(event) => setWanted(event.currentTarget.value)} />
        </label>
        <label>
          Smoothing{" "}
          <select value={smoothing} onChange={(event) => setSmoothing(Number(event.currentTarget.value))}>
            {SMOOTHING.map(([name, amount]) => <option key={name} value={amount}>{name}</option>)}
          </select>
        </label>
        <ul class="legend" aria-label="Lines">
          {runs.map((run, index) => <li key={index}><Swatch run={index} dark={dark} /> {run.name}</li>)}
          {evaluation && <li><Swatch run={0} dark={dark} evaluation /> with dots: evaluation</li>}
        </ul>
      </div>
      {shown.length === 0 && <p class="empty">No value has “{wanted}” in its name.</p>}
      {shown.map(({ title, note, panels }) => (
        <section key={title} class="curves">
          <h2>{title}</h2>
          {note && <p class="muted">{note}</p>}
          <div class="charts">
            {panels.map((panel) => <Chart key={panel.name} panel={panel} runs={runs} smoothing={smoothing} />)}
          </div>
        </section>
      ))}
    </>
  );
}
