import { useMemo } from "preact/hooks";
import type { Run } from "../data";
import { visible } from "../format";
import { go, usePlace } from "../place";

const text = (value: unknown) => (value === undefined ? "–" : visible(typeof value === "string" ? value : JSON.stringify(value)));

/** What each run is about, and its options, side by side. */
export function Options({ runs }: { runs: Run[] }) {
  const place = usePlace();
  const trained = useMemo(() => runs.filter(({ scores, options, setup }) => !scores && Object.keys({ ...setup, ...options }).length), [runs]);
  const described = useMemo(() => [...new Set(trained.flatMap(({ setup }) => Object.keys(setup)))], [trained]);
  const names = useMemo(() => [...described, ...[...new Set(trained.flatMap(({ options }) => Object.keys(options)))].sort()], [trained, described]);
  const of = ({ setup, options }: Run, name: string) => text(described.includes(name) ? setup[name] : options[name]);
  const differs = (name: string) => new Set(trained.map((run) => of(run, name))).size > 1;
  const known = trained.some(({ changed }) => changed);
  const kinds = [
    trained.length > 1 && { value: "differ", title: "that differ between the runs", fits: differs },
    known && { value: "changed", title: "that are not at their defaults", fits: (name: string) => described.includes(name) || trained.some(({ changed }) => !changed || changed.includes(name)) },
    { value: "all", title: "all", fits: () => true },
  ].filter((kind) => kind !== false);
  const kind = kinds.find(({ value }) => value === place.options) ?? kinds[0]!;
  const wanted = (place.option ?? "").toLowerCase();
  const shown = names.filter((name) => kind.fits(name) && name.toLowerCase().includes(wanted));
  if (!trained.length) return <p class="empty">No configuration was recorded.</p>;
  return (
    <>
      <div class="bar">
        <label>
          Options{" "}
          <select value={kind.value} onChange={(event) => go({ options: event.currentTarget.value })}>
            {kinds.map(({ value, title }) => <option key={value} value={value}>{title}</option>)}
          </select>
        </label>
        <label>
          Find <input type="search" value={place.option ?? ""} placeholder="name of an option" onInput={(event) => go({ option: event.currentTarget.value })} />
        </label>
        <span class="muted" role="status">{shown.length} of {names.length} options</span>
      </div>
      {shown.length === 0 && <p class="empty">{wanted ? `No such option has “${place.option}” in its name.` : "There is none: the runs have the same configuration."}</p>}
      {shown.length > 0 && (
        <div class="scroll">
          <table class="options">
            <thead><tr><th scope="col">option</th>{trained.map((run, i) => <th key={i} scope="col">{trained.length > 1 ? run.name : "value"}</th>)}</tr></thead>
            <tbody>
              {shown.map((name) => (
                <tr key={name} class={trained.length > 1 && differs(name) ? "differs" : undefined}>
                  <th scope="row">{visible(name)}</th>
                  {trained.map((run, i) => <td key={i}>{of(run, name)}</td>)}
                </tr>
              ))}
            </tbody>
          </table>
        </div>
      )}
    </>
  );
}
