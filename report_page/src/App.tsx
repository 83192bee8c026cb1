import { useRef, useState } from "preact/hooks";
import { Browser } from "./browse/Browser";
import { Compare } from "./browse/Compare";
import { Curves } from "./curves/Curves";
import type { Data, Run } from "./data";
import { plural } from "./format";

const TABS = ["Curves", "Completions", "Before and after"] as const;
type Tab = (typeof TABS)[number];

export function App({ data }: { data: Data }) {
  const [tab, setTab] = useState<Tab>("Curves");
  const recorded = data.runs.findIndex((run) => run.records.length);
  const [at, setAt] = useState(Math.max(0, recorded));
  const run = data.runs[at]!;
  return (
    <>
      <header class="top">
        <h1>{data.runs.length === 1 ? data.runs[0]!.name : plural(data.runs.length, "run")}</h1>
        <Runs runs={data.runs} />
      </header>
      <main>
        <Tabs tab={tab} setTab={setTab} />
        <div id="panel" role="tabpanel" aria-label={tab}>
        {tab !== "Curves" && data.runs.length > 1 && (
          <div class="bar">
            <label class="wide">
              Run{" "}
              <select value={at} onChange={(event) => setAt(Number(event.currentTarget.value))}>
                {data.runs.map((item, index) => <option key={index} value={index}>{item.name}</option>)}
              </select>
            </label>
          </div>
        )}
        {tab === "Curves" && <Curves runs={data.runs} />}
        {tab === "Completions" && <Browser key={at} data={data} run={run} />}
        {tab === "Before and after" && <Compare key={at} data={data} run={run} />}
        </div>
      </main>
      <Licences />
    </>
  );
}

function Tabs({ tab, setTab }: { tab: Tab; setTab: (tab: Tab) => void }) {
  const box = useRef<HTMLDivElement>(null);
  function move(event: KeyboardEvent) {
    const at = TABS.indexOf(tab);
    const next = { ArrowRight: (at + 1) % TABS.length, ArrowLeft: (at + TABS.length - 1) % TABS.length, Home: 0, End: TABS.length - 1 }[event.key];
    if (next === undefined) return;
    event.preventDefault();
    setTab(TABS[next]!);
    (box.current?.children[next] as HTMLElement).focus();
  }
  return (
    <div ref={box} class="tabs" role="tablist" aria-label="Views" onKeyDown={move}>
      {TABS.map((name) => (
        <button key={name} type="button" role="tab" aria-selected={name === tab} aria-controls="panel" tabIndex={name === tab ? 0 : -1} onClick={() => setTab(name)}>
          {name}
        </button>
      ))}
    </div>
  );
}

function Runs({ runs }: { runs: Run[] }) {
  return (
    <ul class="runs">
      {runs.map((run, index) => (
        <li key={index}>
          {runs.length > 1 && <b>{run.name} </b>}
          <span class="muted">{[run.model, run.created.replace("T", " ").replace("Z", " UTC"), plural(run.records.length, "recorded step")].filter(Boolean).join(" · ")}</span>
          {run.notes.map((note) => <p key={note} class="note">{note}</p>)}
        </li>
      ))}
    </ul>
  );
}

function Licences() {
  const [open, setOpen] = useState(false);
  return (
    <footer>
      <details onToggle={(event) => setOpen(event.currentTarget.open)}>
        <summary>Licences of the libraries in this page</summary>
        {open && <pre>{document.getElementById("licences")?.textContent?.trim()}</pre>}
      </details>
    </footer>
  );
}
