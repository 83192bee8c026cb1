import { useMemo, useState } from "preact/hooks";
import type { Data, Entry, Run } from "../data";
import { entries } from "../data";
import { distinct, preview } from "../format";
import { go, usePlace } from "../place";
import { CompletionView, useColouring } from "./CompletionView";

/** Completions of one question by one run at one step. */
interface Answers {
  key: string;
  run: number;
  step: number;
  mode: Entry["mode"];
  found: Entry[];
}

interface Question {
  id: string;
  answers: Answers[];
}

const MOST = 300; // questions in the list at once
const MOST_COLUMNS = 4;

const share = ({ found }: Answers) => found.filter(({ completion }) => completion.correct).length / found.length;
const judged = ({ found }: Answers) => found.every(({ completion }) => completion.correct !== null);
const asPercent = (answers: Answers) => `${Math.round(100 * share(answers))} %`;

const moment = (run: number, { mode, step }: Pick<Entry, "mode" | "step">) => `${run + 1}-${mode}-${step}`;

/** Whether a question has answers at two steps or in two runs. */
export function recurs(runs: Run[]): boolean {
  const seen = new Map<string, string>();
  return runs.some(({ records }, run) =>
    records.some((record) => record.completions.some(({ question }) => {
      const here = moment(run, record);
      if (!seen.has(question)) seen.set(question, here);
      return seen.get(question) !== here;
    })),
  );
}

/** Questions with an answer at two steps or in two runs at least; those that have improved most are the first. */
function questions(runs: Run[]): Question[] {
  const all = new Map<string, Map<string, Answers>>();
  runs.forEach((run, index) => {
    for (const entry of entries(run)) {
      const key = moment(index, entry);
      let answers = all.get(entry.completion.question);
      if (!answers) all.set(entry.completion.question, (answers = new Map()));
      let here = answers.get(key);
      if (!here) answers.set(key, (here = { key, run: index, step: entry.step, mode: entry.mode, found: [] }));
      here.found.push(entry);
    }
  });
  const found: Question[] = [];
  for (const [id, answers] of all) {
    if (answers.size < 2) continue;
    found.push({ id, answers: [...answers.values()].sort((a, b) => a.run - b.run || a.step - b.step) });
  }
  const gain = ({ answers }: Question) => share(answers.at(-1)!) - share(answers[0]!);
  return found.sort((a, b) => gain(b) - gain(a));
}

/** Each run at its last step, and the first of all before them. */
function ends({ answers }: Question): Answers[] {
  const lasts = answers.filter((item, index) => answers[index + 1]?.run !== item.run);
  const first = answers.reduce((best, item) => (item.step < best.step ? item : best));
  return [...new Set([first, ...lasts])].slice(0, MOST_COLUMNS);
}

function turn(question: Question): string {
  const [before, after] = [ends(question)[0]!, question.answers.at(-1)!];
  return judged(before) && judged(after) ? `${asPercent(before)} → ${asPercent(after)} right: ` : "";
}

export function Compare({ data: { runs, images } }: { data: Data }) {
  const all = useMemo(() => questions(runs), [runs]);
  const asked = useMemo(() => distinct(all.map(({ answers }) => answers[0]!.found[0]!.completion.prompt)), [all]);
  const place = usePlace();
  const { quantity, lit, controls } = useColouring(runs);
  const at = Math.max(0, all.findIndex(({ id }) => id === place.question));
  const question = all[at]!;
  const wanted = (place.columns ?? "").split("|").flatMap((key) => question.answers.find((item) => item.key === key) ?? []);
  const columns = wanted.length ? wanted : ends(question);
  const ask = (index: number) => go({ question: all[index]!.id, token: null }, "push");
  const show = (keys: string[]) => go({ columns: keys.join("|") });
  const keys = columns.map(({ key }) => key);
  const free = question.answers.find(({ key }) => !keys.includes(key));
  const first = Math.max(0, Math.min(at - MOST / 2, all.length - MOST));
  return (
    <>
      <div class="bar">
        <label class="wide">
          Question{" "}
          <select value={at} onChange={(event) => ask(Number(event.currentTarget.value))}>
            {all.slice(first, first + MOST).map((item, index) => (
              <option key={item.id} value={first + index}>{turn(item)}{preview(asked[first + index]!.replace(/<image>|<\|[^|<>]*\|>/g, ""), 70)}</option>
            ))}
          </select>
        </label>
        <button type="button" aria-label="Previous question" disabled={at === 0} onClick={() => ask(at - 1)}>◀</button>
        <button type="button" aria-label="Next question" disabled={at >= all.length - 1} onClick={() => ask(at + 1)}>▶</button>
        <span class="muted">{at + 1} of {all.length}</span>
        {controls}
        {free && columns.length < MOST_COLUMNS && <button type="button" onClick={() => show([...keys, free.key])}>Add a step or run</button>}
      </div>
      <div class={`compare of${columns.length}`}>
        {columns.map((answers, index) => (
          <Side key={`${question.id}-${answers.key}`} runs={runs} question={question} answers={answers} images={images} quantity={quantity} lit={lit}
            choose={(key) => show(keys.map((item, i) => (i === index ? key : item)))}
            remove={columns.length > 1 ? () => show(keys.filter((_, i) => i !== index)) : null} />
        ))}
      </div>
    </>
  );
}

interface SideProps extends Pick<ReturnType<typeof useColouring>, "quantity" | "lit"> {
  runs: Run[];
  question: Question;
  answers: Answers;
  images: Data["images"];
  choose: (key: string) => void;
  remove: (() => void) | null;
}

function nameOf({ run, step, mode }: Answers, runs: Run[]): string {
  const when = runs[run]!.scores ? [] : [`step ${step}`, step === 0 ? "before training" : mode === "eval" && "evaluation"];
  return [runs.length > 1 && runs[run]!.name, ...when].filter(Boolean).join(", ") || "vgr-trl evaluate";
}

function Side({ runs, question, answers, images, quantity, lit, choose, remove }: SideProps) {
  const [at, setAt] = useState(0);
  const { found } = answers;
  const title = nameOf(answers, runs);
  return (
    <section aria-label={title}>
      <div class="bar side">
        <select aria-label="Run and step" value={answers.key} onChange={(event) => choose(event.currentTarget.value)}>
          {question.answers.map((item) => <option key={item.key} value={item.key}>{nameOf(item, runs)}{judged(item) && ` – ${asPercent(item)} right`}</option>)}
        </select>
        {found.length > 1 && (
          <span class="stepper">
            <button type="button" aria-label={`Previous completion, ${title}`} disabled={at === 0} onClick={() => setAt(at - 1)}>◀</button>
            <span>{at + 1} of {found.length}</span>
            <button type="button" aria-label={`Next completion, ${title}`} disabled={at === found.length - 1} onClick={() => setAt(at + 1)}>▶</button>
          </span>
        )}
        {remove && <button type="button" aria-label={`Remove ${title}`} onClick={remove}>✕</button>}
      </div>
      <CompletionView images={images} entry={found[at]!} quantity={quantity} lit={lit} />
    </section>
  );
}
