import { useEffect, useMemo, useRef, useState } from "preact/hooks";
import { Browser } from "./browse/Browser";
import { Compare, recurs } from "./browse/Compare";
import { Curves } from "./curves/Curves";
import { bySeed } from "./curves/seeds";
import type { Data } from "./data";
import { plural } from "./format";
import { Options } from "./overview/Options";
import { Strips } from "./overview/Strip";
import { go, usePlace } from "./place";

const TABS = ["Curves", "Completions", "Same question", "Configuration"] as const;
type Tab = (typeof TABS)[number];

export function App({ data }: { data: Data }) {
  const place = usePlace();
  const comparable = useMemo(() => recurs(data.runs), [data]);
  const tabs = TABS.filter((name) => comparable || name !== "Same question");
  const tab = tabs.find((name) => name === place.tab) ?? "Curves";
  const setTab = (name: Tab) => go({ tab: name === "Curves" ? null : name }, "push");
  const recorded = data.runs.findIndex((run) => run.records.length);
  const asked = place.run ? Number(place.run) - 1 : recorded;
  const at = data.runs[asked] ? asked : 0;
  const run = data.runs[at]!;
  const grouped = useMemo(() => bySeed(data.runs), [data]);
  const drawn = place.seeds === "0" ? data.runs : grouped;
  return (
    <>
      <header class="top">
        <h1>{data.runs.length === 1 ? data.runs[0]!.name : plural(data.runs.length, "run")}</h1>
        {data.live && <Live seconds={data.live} />}
      </header>
      <main>
        <Tabs tabs={tabs} tab={tab} setTab={setTab} />
        <div id="panel" role="tabpanel" aria-label={tab}>
        {tab === "Curves" && <Strips runs={drawn} />}
        {tab === "Completions" && data.runs.length > 1 && (
          <div class="bar">
            <label class="wide">
              Run{" "}
              <select value={at} onChange={(event) => go({ run: String(Number(event.currentTarget.value) + 1), at: null, token: null, when: null })}>
                {data.runs.map((item, index) => <option key={index} value={index}>{item.name}</option>)}
              </select>
            </label>
          </div>
        )}
        {tab === "Curves" && <Curves runs={drawn} single={grouped === data.runs ? null : data.runs} />}
        {tab === "Completions" && <Browser key={at} data={data} run={run} />}
        {tab === "Same question" && <Compare data={data} />}
        {tab === "Configuration" && <Options runs={data.runs} />}
        </div>
      </main>
      <Licences />
    </>
  );
}

/** Loads the page again, at the same place, as long as `vgr-trl report --live` writes it. */
function Live({ seconds }: { seconds: number }) {
  const on = usePlace().live !== "0";
  useEffect(() => {
    if (!on) return;
    const timer = setTimeout(() => {
      sessionStorage.setItem("top", String(scrollY));
      location.reload();
    }, 1000 * seconds);
    return () => clearTimeout(timer);
  }, [on, seconds]);
  useEffect(() => {
    const top = sessionStorage.getItem("top");
    sessionStorage.removeItem("top");
    if (top) requestAnimationFrame(() => scrollTo(0, Number(top)));
  }, []);
  return (
    <label class="live">
      <input type="checkbox" checked={on} onChange={(event) => go({ live: event.currentTarget.checked ? null : "0" })} />
      Load again every {seconds} s; this is of {new Date(document.lastModified).toLocaleTimeString()}
    </label>
  );
}

function Tabs({ tabs, tab, setTab }: { tabs: Tab[]; tab: Tab; setTab: (tab: Tab) => void }) {
  const box = useRef<HTMLDivElement>(null);
  function move(event: KeyboardEvent) {
    const at = tabs.indexOf(tab);
    const next = { ArrowRight: (at + 1) % tabs.length, ArrowLeft: (at + tabs.length - 1) % tabs.length, Home: 0, End: tabs.length - 1 }[event.key];
    if (next === undefined) return;
    event.preventDefault();
    setTab(tabs[next]!);
    (box.current?.children[next] as HTMLElement).focus();
  }
  return (
    <div ref={box} class="tabs" role="tablist" aria-label="Views" onKeyDown={move}>
      {tabs.map((name) => (
        <button key={name} type="button" role="tab" aria-selected={name === tab} aria-controls="panel" tabIndex={name === tab ? 0 : -1} onClick={() => setTab(name)}>
          {name}
        </button>
      ))}
    </div>
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
