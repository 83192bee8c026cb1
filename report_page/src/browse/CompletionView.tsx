import { useMemo, useState } from "preact/hooks";
import { type Quantity, quantitiesOf } from "../colours";
import { type Data, type Entry, type Run, moment } from "../data";
import { number, visible } from "../format";
import { go, usePlace } from "../place";
import { Metrics, Rewards } from "./Facts";
import { Looking } from "./Looking";
import { Scale, Tokens } from "./Tokens";
import { Turns } from "./Turns";
import { Verdict } from "./Verdict";

interface Props {
  images: Data["images"];
  entry: Entry;
  quantity: Quantity;
  lit: boolean;
  /** The tokens chosen are those in the address. */
  placed?: boolean;
}

export function CompletionView({ images, entry, quantity, lit, placed }: Props) {
  const { completion } = entry;
  const place = usePlace();
  const [own, setOwn] = useState("");
  const [comparing, setComparing] = useState(false);
  const text = placed ? (place.token ?? "") : own;
  const chosen = useMemo(
    () => text.split(",").filter(Boolean).map((part) => Number(part) - 1).filter((token) => completion.tokens[token] !== undefined).slice(0, 2),
    [text, completion],
  );
  const named = Number(/^turn(\d+)$/.exec(text)?.[1] ?? 0) - 1;
  const turn = completion.turns?.[named] ? named : null;
  const write = (found: string) => {
    if (placed) go({ token: found });
    else setOwn(found);
  };
  const set = (tokens: number[]) => write(tokens.map((token) => token + 1).join());
  const chooseTurn = (next: number | null) => {
    setComparing(false);
    write(next === null ? "" : `turn${next + 1}`);
  };
  const choose = (token: number | null, beside: boolean) => {
    setComparing(false);
    if (token === null) set([]);
    else if (chosen.includes(token)) set(chosen.filter((item) => item !== token));
    else if (chosen.length && (beside || comparing)) set([chosen[0]!, token]);
    else set([token]);
  };
  return (
    <article class="completion" aria-label={`Completion of step ${entry.step}`}>
      <header>
        <span class="step">{moment(entry)}</span>
        <Verdict completion={completion} />
        {completion.reward !== null && <span>reward {number(completion.reward)}</span>}
        {completion.replaced && <span class="tag">replaced, not trained on</span>}
      </header>
      <div class="sides">
        <div class="column">
        <div class="text">
          <details open={completion.prompt.length < 600}>
            <summary>Prompt</summary>
            <p class="prompt">{visible(completion.prompt)}</p>
          </details>
          {completion.solution !== null && <p class="solution"><span class="muted">Solution</span> {visible(completion.solution)}</p>}
          <Tokens completion={completion} quantity={quantity} chosen={chosen} onChoose={choose} />
          {!completion.drawn && <Scale completion={completion} quantity={quantity} />}
          <Turns completion={completion} images={images} turn={turn} onChoose={chooseTurn} />
        </div>
        <Rewards completion={completion} weights={entry.weights} />
        {!completion.images.length && <Metrics completion={completion} />}
        </div>
        {completion.images.length > 0 && (
          <div class="column">
            <Looking completion={completion} images={images} lit={lit} tokens={chosen} turn={turn} onAll={() => chooseTurn(null)} comparing={comparing} onCompare={() => setComparing(!comparing)} />
            <Metrics completion={completion} />
          </div>
        )}
      </div>
    </article>
  );
}

/** What colours the tokens, and whether the attention is drawn: for all completions of a view. */
export function useColouring(runs: Run[]) {
  const place = usePlace();
  const quantities = useMemo(() => quantitiesOf(runs), [runs]);
  const quantity = quantities.find((item) => item.name === place.by) ?? quantities[0]!;
  const lit = place.lit !== "0";
  const controls = (
    <>
      <label>
        Colour tokens by{" "}
        <select value={quantity.name} onChange={(event) => go({ by: event.currentTarget.value })}>
          {quantities.map((item) => <option key={item.name} value={item.name}>{item.title}</option>)}
        </select>
      </label>
      <label class="check">
        <input type="checkbox" checked={lit} onChange={(event) => go({ lit: event.currentTarget.checked ? null : "0" })} /> Draw attention
      </label>
    </>
  );
  return { quantity, lit, controls };
}
