import type { ComponentChildren } from "preact";
import { useMemo, useRef, useState } from "preact/hooks";
import type { Data, Entry, Run } from "../data";
import { entries, moment } from "../data";
import { distinct, number, plural, preview } from "../format";
import { useMedia } from "../hooks";
import { go, usePlace } from "../place";
import { CompletionView, useColouring } from "./CompletionView";
import { EVERYTHING, type Filters, fromPlace, passes, rewardOf } from "./filters";
import { Verdict } from "./Verdict";

const MOST = 100; // in the list at once

export function Browser({ data, run }: { data: Data; run: Run }) {
  const all = useMemo(() => entries(run), [run]);
  const asked = useMemo(() => {
    const texts = distinct(all.map(({ completion }) => completion.prompt)).map((text) => text.replace(/<image>|<\|[^|<>]*\|>/g, ""));
    return new Map(all.map(({ key }, index) => [key, preview(texts[index]!, 90)]));
  }, [all]);
  const place = usePlace();
  const filters = useMemo(() => fromPlace(place), [place.when, place.answer, place.reward, place.least, place.most]);
  const { quantity, lit, controls } = useColouring(useMemo(() => [run], [run]));
  const small = useMedia("(max-width: 820px)");
  const shown = useRef<HTMLDivElement>(null);
  const found = useMemo(() => all.filter((entry) => passes(entry, filters)), [all, filters]);
  if (!all.length) return <p class="empty">This run has no records of completions.</p>;
  const entry = found.find((item) => item.key === place.at) ?? found[0];
  const mates = all.filter((item) => entry && item.mode === entry.mode && item.step === entry.step && item.completion.group === entry.completion.group);
  const together = place.group === "1" && mates.length > 1;
  const set = (change: Partial<Filters>) => go(change.answer === "any" ? { ...change, answer: null } : change);
  const count = Object.entries(filters).filter(([name, value]) => value !== EVERYTHING[name as keyof Filters]).length;
  const everything = () => go({ when: null, answer: null, reward: null, least: null, most: null });
  const choose = (key: string) => {
    go({ at: key, token: null });
    if (small) requestAnimationFrame(() => shown.current?.scrollIntoView({ block: "start" }));
  };
  const bar = <FilterBar run={run} filters={filters} set={set} />;
  return (
    <>
      {!small && bar}
      <div class="bar">
        {small && <Sheet title={count ? `Filters (${count})` : "Filters"}>{bar}<div class="bar">{controls}</div></Sheet>}
        {!small && controls}
        {mates.length > 1 && (
          <label class="check">
            <input type="checkbox" checked={together} onChange={(event) => go({ group: event.currentTarget.checked ? "1" : null })} /> All {mates.length} recorded of the group
          </label>
        )}
        <span class="muted" role="status">{found.length} of {plural(all.length, "completion")}</span>
        {count > 0 && <button type="button" onClick={everything}>Show all</button>}
      </div>
      {entry ? (
        <div class="browser">
          <List found={found} entry={entry} asked={asked} reward={filters.reward} choose={choose} />
          <div ref={shown} class="shown">
            {together
              ? <div class="compare">{mates.map((item) => <CompletionView key={item.key} images={data.images} entry={item} quantity={quantity} lit={lit} />)}</div>
              : <CompletionView key={entry.key} images={data.images} entry={entry} quantity={quantity} lit={lit} placed />}
          </div>
        </div>
      ) : (
        <p class="empty">No completion passes these filters.</p>
      )}
    </>
  );
}

/** On small screens: what would push the completions off the screen. */
function Sheet({ title, children }: { title: string; children: ComponentChildren }) {
  const dialog = useRef<HTMLDialogElement>(null);
  return (
    <>
      <button type="button" onClick={() => dialog.current?.showModal()}>{title}</button>
      <dialog ref={dialog} class="sheet" aria-label="Filters" onClick={(event) => { if (event.target === event.currentTarget) event.currentTarget.close(); }}>
        <div>
          {children}
          <button type="button" onClick={() => dialog.current?.close()}>Show completions</button>
        </div>
      </dialog>
    </>
  );
}

function FilterBar({ run, filters, set }: { run: Run; filters: Filters; set: (change: Partial<Filters>) => void }) {
  const steps = ["", ...run.records.map(({ mode, step }) => `${mode}-${step}`)];
  const names = useMemo(
    () => [...new Set([...run.rewards, ...run.records.flatMap(({ completions }) => completions.flatMap((item) => Object.keys(item.rewards)))])],
    [run],
  );
  const at = Math.max(0, steps.indexOf(filters.when));
  return (
    <div class="bar" role="search" aria-label="Filters">
      <span class="stepper">
        <label>
          Step{" "}
          <select value={filters.when} onChange={(event) => set({ when: event.currentTarget.value })}>
            <option value="">all steps</option>
            {run.records.map(({ mode, step, completions }) => (
              <option key={`${mode}-${step}`} value={`${mode}-${step}`}>{run.scores ? "vgr-trl evaluate" : `${step}${mode === "eval" ? ", evaluation" : ""}`} ({completions.length})</option>
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
  /** Key of an entry -> its question. */
  asked: Map<string, string>;
  reward: string;
  choose: (key: string) => void;
}

function List({ found, entry, asked, reward, choose }: ListProps) {
  const box = useRef<HTMLUListElement>(null);
  const [most, setMost] = useState(MOST);
  const shown = useMemo(() => found.slice(0, most), [found, most]);
  const previews = useMemo(() => shown.map(({ completion }) => preview(completion.text, 90) || "(empty)"), [shown]);
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
      {shown.map((item, index) => (
        <li key={item.key}>
          <button type="button" aria-current={item === entry ? "true" : undefined} tabIndex={item === entry ? 0 : -1} onClick={() => choose(item.key)}>
            <span class="line">
              <span class="step">{moment(item, true)}</span>
              <Verdict completion={item.completion} />
              <span class="value">{number(rewardOf(item, reward), 3)}</span>
            </span>
            <span class="preview asked">{asked.get(item.key)}</span>
            <span class="preview">{previews[index]}</span>
          </button>
        </li>
      ))}
      {found.length > most && (
        <li><button type="button" class="more" onClick={() => setMost(most + MOST)}>{found.length - most} more</button></li>
      )}
    </ul>
  );
}
