import { useMemo, useRef, useState } from "preact/hooks";
import type { Data, Entry, Run } from "../data";
import { entries } from "../data";
import { number, plural, preview } from "../format";
import { CompletionView, useColouring } from "./CompletionView";
import { EVERYTHING, type Filters, passes, rewardOf } from "./filters";
import { Verdict } from "./Verdict";

const MOST = 200; // in the list at once

export function Browser({ data, run }: { data: Data; run: Run }) {
  const all = useMemo(() => entries(run), [run]);
  const [filters, setFilters] = useState<Filters>(EVERYTHING);
  const [key, setKey] = useState("");
  const { quantity, lit, controls } = useColouring();
  const found = useMemo(() => all.filter((entry) => passes(entry, filters)), [all, filters]);
  if (!all.length) return <p class="empty">This run has no records of completions.</p>;
  const entry = found.find((item) => item.key === key) ?? found[0];
  const set = (change: Partial<Filters>) => setFilters({ ...filters, ...change });
  return (
    <>
      <FilterBar run={run} filters={filters} set={set} />
      <div class="bar">
        {controls}
        <span class="muted" role="status">{found.length} of {plural(all.length, "completion")}</span>
        {filters !== EVERYTHING && <button type="button" onClick={() => setFilters(EVERYTHING)}>Show all</button>}
      </div>
      {entry ? (
        <div class="browser">
          <List found={found} entry={entry} reward={filters.reward} choose={setKey} />
          <CompletionView key={entry.key} data={data} entry={entry} quantity={quantity} lit={lit} />
        </div>
      ) : (
        <p class="empty">No completion passes these filters.</p>
      )}
    </>
  );
}

function FilterBar({ run, filters, set }: { run: Run; filters: Filters; set: (change: Partial<Filters>) => void }) {
  const steps = ["", ...run.records.map(({ mode, step }) => `${mode}-${step}`)];
  const names = [...new Set([...run.rewards, ...run.records.flatMap(({ completions }) => completions.flatMap((item) => Object.keys(item.rewards)))])];
  const at = Math.max(0, steps.indexOf(filters.when));
  return (
    <div class="bar" role="search" aria-label="Filters">
      <span class="stepper">
        <label>
          Step{" "}
          <select value={filters.when} onChange={(event) => set({ when: event.currentTarget.value })}>
            <option value="">all steps</option>
            {run.records.map(({ mode, step, completions }) => (
              <option key={`${mode}-${step}`} value={`${mode}-${step}`}>{step}{mode === "eval" ? ", evaluation" : ""} ({completions.length})</option>
            ))}
          </select>
        </label>
        <button type="button" aria-label="Previous step" disabled={at === 0} onClick={() => set({ when: steps[at - 1] ?? "" })}>◀</button>
        <button type="button" aria-label="Next step" disabled={at === steps.length - 1} onClick={() => set({ when: steps[at + 1] ?? "" })}>▶</button>
      </span>
      <label>
        Answer{" "}
        <select value={filters.answer} onChange={(event) => set({ answer: event.currentTarget.value as Filters["answer"] })}>
          <option value="any">right or wrong</option>
          <option value="right">✓ right</option>
          <option value="wrong">✗ wrong</option>
        </select>
      </label>
      <label>
        Reward{" "}
        <select value={filters.reward} onChange={(event) => set({ reward: event.currentTarget.value })}>
          <option value="">weighted sum</option>
          {names.map((name) => <option key={name} value={name}>{name}</option>)}
        </select>
      </label>
      <span class="range">
        <label>from <input type="number" step="any" value={filters.least} onInput={(event) => set({ least: event.currentTarget.value })} /></label>
        <label>to <input type="number" step="any" value={filters.most} onInput={(event) => set({ most: event.currentTarget.value })} /></label>
      </span>
    </div>
  );
}

interface ListProps {
  found: Entry[];
  entry: Entry;
  reward: string;
  choose: (key: string) => void;
}

function List({ found, entry, reward, choose }: ListProps) {
  const box = useRef<HTMLUListElement>(null);
  const [most, setMost] = useState(MOST);
  const shown = found.slice(0, most);
  function move(event: KeyboardEvent) {
    const at = shown.indexOf(entry);
    const last = shown.length - 1;
    const next = { ArrowDown: Math.min(last, at + 1), ArrowUp: Math.max(0, at - 1), Home: 0, End: last }[event.key];
    if (next === undefined) return;
    event.preventDefault();
    choose(shown[next]!.key);
    box.current?.querySelectorAll("button")[next]?.focus();
  }
  return (
    <ul ref={box} class="list" aria-label="Completions" onKeyDown={move}>
      {shown.map((item) => (
        <li key={item.key}>
          <button type="button" aria-current={item === entry ? "true" : undefined} tabIndex={item === entry ? 0 : -1} onClick={() => choose(item.key)}>
            <span class="line">
              <span class="step">{item.mode === "eval" ? "eval " : ""}{item.step}</span>
              <Verdict completion={item.completion} />
              <span class="value">{number(rewardOf(item, reward), 3)}</span>
            </span>
            <span class="preview">{preview(item.completion.text, 90) || "(empty)"}</span>
          </button>
        </li>
      ))}
      {found.length > most && (
        <li><button type="button" class="more" onClick={() => setMost(most + MOST)}>{found.length - most} more</button></li>
      )}
    </ul>
  );
}
