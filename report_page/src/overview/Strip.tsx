import { useMemo } from "preact/hooks";
import { runColour } from "../colours";
import { Swatch } from "../curves/Chart";
import { CLOCK } from "../curves/axis";
import type { Run } from "../data";
import { number, percent, plural } from "../format";
import { useDark } from "../hooks";
import { type Course, courses, duration, lastStep } from "./facts";

/** What became of each run, in a line of numbers. */
export function Strips({ runs }: { runs: Run[] }) {
  return (
    <section class="strips" aria-label="Runs">
      {runs.map((run, index) => <Strip key={index} run={run} index={index} alone={runs.length === 1} />)}
    </section>
  );
}

function Strip({ run, index, alone }: { run: Run; index: number; alone: boolean }) {
  const dark = useDark();
  const found = useMemo(() => courses(run), [run]);
  const accuracies = found.filter(({ title }) => title.startsWith("Accuracy"));
  const steps = lastStep(run);
  const seconds = run.curves.find(({ name }) => name === CLOCK)?.values.at(-1) ?? null;
  const about = run.scores
    ? ["vgr-trl evaluate", plural(run.scores.questions, "question")]
    : [run.model, run.created.replace("T", " ").replace(/(:\d\d)?Z$/, " UTC"), plural(steps, "step"), run.records.length > 0 && plural(run.records.length, "recorded step")];
  return (
    <article class="strip">
      <header>
        {!alone && <h2><Swatch colour={index} dash={index} dark={dark} /> {run.name}</h2>}
        <span class="muted">{about.filter(Boolean).join(" · ")}</span>
      </header>
      {run.compared.length > 0 && <Compared compared={run.compared} />}
      <dl>
        {accuracies.map((course) => (
          <div key={course.title} class="main" title={course.name}>
            <dt>{course.title}, {course.of}</dt>
            <dd>
              <b>{course.points.length > 1 && `${value(course, "first")} → `}{value(course, "last")}{course.deviation !== null && ` ± ${course.share ? percent(course.deviation) : number(course.deviation, 2)}`}</b>
              <Spark points={course.points} colour={runColour(index, dark)} />
            </dd>
          </div>
        ))}
        {run.scores && <Scores scores={run.scores} />}
        {found.filter((course) => !accuracies.includes(course)).map((course) => (
          <div key={course.title} title={course.title === "VGR" ? "Vision gain ratio: attention per instruction token over attention per image token. Smaller: looks at the image more." : course.name}>
            <dt>{course.title}</dt>
            <dd>{value(course, "first")} → {value(course, "last")}</dd>
          </div>
        ))}
        {seconds !== null && <div title="from the first log to the last"><dt>Time</dt><dd>{duration(seconds)}</dd></div>}
      </dl>
      {run.signs.length > 0
        ? <ul class="flags" aria-label="Red flags">{run.signs.map(({ step, seen }) => <li key={seen}><b>step {step}</b> {seen}</li>)}</ul>
        : run.curves.length > 0 && <p class="calm">No red flag.</p>}
      {run.notes.map((note) => <p key={note} class="note">{note}</p>)}
    </article>
  );
}

/** Before and after training, on questions that neither training nor its evaluations saw. */
function Compared({ compared }: { compared: Run["compared"] }) {
  const [all] = compared;
  const sampled = typeof all!.after.mean_at_k === "number";
  const blind = typeof all!.after.blind === "number";
  const change = (name: "accuracy" | "mean_at_k" | "format" | "blind", { before, after }: Run["compared"][number]) =>
    [before, after].map((scores) => (typeof scores[name] === "number" ? percent(scores[name]!) : "–")).join(" → ");
  const sure = all!.before.interval && all!.after.interval;
  const range = ({ interval }: Run["compared"][number]["after"]) => (interval ? `${percent(interval[0])} to ${percent(interval[1])}` : "–");
  return (
    <>
      <p class="lead">Accuracy on {plural(all!.after.questions ?? 0, "new question")}, before → after training: <b>{change(sampled ? "mean_at_k" : "accuracy", all!)}</b></p>
      <div class="scroll">
        <table class="compared">
          <thead><tr><th scope="col">questions</th>{sampled && <th scope="col">sampled, {all!.after.k} each</th>}<th scope="col">greedy</th>{sure && <th scope="col">95 % sure</th>}<th scope="col">format</th>{blind && <th scope="col">greedy, grey image</th>}</tr></thead>
          <tbody>
            {compared.map((row) => (
              <tr key={row.name}><th scope="row">{row.name} ({row.after.questions})</th>{sampled && <td>{change("mean_at_k", row)}</td>}<td>{change("accuracy", row)}</td>{sure && <td>{range(row.before)} → {range(row.after)}</td>}<td>{change("format", row)}</td>{blind && <td>{change("blind", row)}</td>}</tr>
            ))}
          </tbody>
        </table>
      </div>
    </>
  );
}

function Scores({ scores: { accuracy, interval, k, mean_at_k, pass_at_k, format, blind } }: { scores: NonNullable<Run["scores"]> }) {
  const others: [string, number | null | undefined][] = [[`Mean of ${k} sampled`, mean_at_k], [`Any of ${k} right`, pass_at_k], ["Format", format], ["Accuracy with grey images", blind]];
  return (
    <>
      <div class="main">
        <dt>Accuracy of the greedy answers{interval && `, 95 % sure ${percent(interval[0])} to ${percent(interval[1])}`}</dt>
        <dd><b>{percent(accuracy)}</b></dd>
      </div>
      {others.map(([name, share]) => typeof share === "number" && <div key={name}><dt>{name}</dt><dd>{percent(share)}</dd></div>)}
    </>
  );
}

function value({ share, ...course }: Course, end: "first" | "last"): string {
  return share && course[end] >= 0 && course[end] <= 1 ? percent(course[end]) : number(course[end], 3);
}

const [WIDTH, HEIGHT, MOST] = [120, 28, 120];

function Spark({ points, colour }: { points: number[]; colour: string }) {
  if (points.length < 2) return null;
  const count = Math.min(points.length, MOST);
  const shown = Array.from({ length: count }, (_, i) => points[Math.round((i * (points.length - 1)) / (count - 1))]!);
  const [low, high] = [Math.min(...shown), Math.max(...shown)];
  const at = (point: number, i: number) =>
    `${((i * (WIDTH - 6)) / (count - 1) + 3).toFixed(1)},${(HEIGHT - 3 - ((HEIGHT - 6) * (point - low)) / (high - low || 1)).toFixed(1)}`;
  return (
    <svg class="spark" width={WIDTH} height={HEIGHT} aria-hidden="true">
      <polyline points={shown.map(at).join(" ")} fill="none" stroke={colour} stroke-width="1.75" stroke-linejoin="round" />
      <circle cx={WIDTH - 3} cy={at(shown.at(-1)!, count - 1).split(",")[1]} r="2.5" fill={colour} />
    </svg>
  );
}
