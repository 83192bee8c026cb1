import { useMemo, useState } from "preact/hooks";
import type { Data, Entry, Run } from "../data";
import { entries } from "../data";
import { distinct, preview } from "../format";
import { CompletionView, useColouring } from "./CompletionView";

interface Question {
  id: string;
  before: Entry[];
  after: Entry[];
}

const share = (found: Entry[]) => found.filter(({ completion }) => completion.correct).length / found.length;

/** Questions that were recorded at two steps at least, with their completions at the first and at the last. */
function questions(run: Run): Question[] {
  const byQuestion = new Map<string, Entry[]>();
  for (const entry of entries(run)) {
    const known = byQuestion.get(entry.completion.question);
    if (known) known.push(entry);
    else byQuestion.set(entry.completion.question, [entry]);
  }
  const found: Question[] = [];
  for (const [id, all] of byQuestion) {
    const first = Math.min(...all.map(({ step }) => step));
    const last = Math.max(...all.map(({ step }) => step));
    if (first === last) continue;
    const at = (step: number) => all.filter((entry) => entry.step === step);
    found.push({ id, before: at(first), after: at(last) });
  }
  return found.sort((a, b) => share(b.after) - share(b.before) - (share(a.after) - share(a.before)));
}

function turn({ before, after }: Question): string {
  if ([...before, ...after].some(({ completion }) => completion.correct === null)) return "";
  return `${Math.round(100 * share(before))} → ${Math.round(100 * share(after))} % right: `;
}

export function Compare({ data, run }: { data: Data; run: Run }) {
  const all = useMemo(() => questions(run), [run]);
  const asked = useMemo(() => distinct(all.map(({ before }) => before[0]!.completion.prompt)), [all]);
  const [at, setAt] = useState(0);
  const { quantity, lit, controls } = useColouring();
  const question = all[Math.min(at, all.length - 1)];
  if (!question) return <p class="empty">No question of this run was recorded at two steps: there is no before and after to show.</p>;
  return (
    <>
      <div class="bar">
        <label class="wide">
          Question{" "}
          <select value={all.indexOf(question)} onChange={(event) => setAt(Number(event.currentTarget.value))}>
            {all.map((item, index) => (
              <option key={item.id} value={index}>{turn(item)}{preview(asked[index]!.replace(/<image>|<\|[^|<>]*\|>/g, ""), 70)}</option>
            ))}
          </select>
        </label>
        <button type="button" aria-label="Previous question" disabled={at === 0} onClick={() => setAt(at - 1)}>◀</button>
        <button type="button" aria-label="Next question" disabled={at >= all.length - 1} onClick={() => setAt(at + 1)}>▶</button>
        {controls}
      </div>
      <div class="compare">
        {(["before", "after"] as const).map((side) => (
          <Side key={`${question.id}-${side}`} title={side === "before" ? "Before" : "After"} found={question[side]} data={data} quantity={quantity} lit={lit} />
        ))}
      </div>
    </>
  );
}

type SideProps = { title: string; found: Entry[]; data: Data } & Pick<ReturnType<typeof useColouring>, "quantity" | "lit">;

function Side({ title, found, data, quantity, lit }: SideProps) {
  const [at, setAt] = useState(0);
  const entry = found[at]!;
  return (
    <section aria-label={title}>
      <h2>
        {title}
        {found.length > 1 && (
          <span class="stepper">
            <button type="button" aria-label={`Previous completion, ${title.toLowerCase()}`} disabled={at === 0} onClick={() => setAt(at - 1)}>◀</button>
            <span>{at + 1} of {found.length}</span>
            <button type="button" aria-label={`Next completion, ${title.toLowerCase()}`} disabled={at === found.length - 1} onClick={() => setAt(at + 1)}>▶</button>
          </span>
        )}
      </h2>
      <CompletionView data={data} entry={entry} quantity={quantity} lit={lit} />
    </section>
  );
}
