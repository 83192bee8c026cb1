import { useEffect, useMemo, useState } from "preact/hooks";
import { QUANTITIES, type Quantity } from "../colours";
import type { Data, Entry } from "../data";
import { number, percent, visible } from "../format";
import { look } from "./attention";
import { Metrics, Rewards } from "./Facts";
import { Overlay } from "./Overlay";
import { Scale, Tokens } from "./Tokens";
import { Verdict } from "./Verdict";

interface Props {
  data: Data;
  entry: Entry;
  quantity: Quantity;
  lit: boolean;
}

export function CompletionView({ data, entry, quantity, lit }: Props) {
  const { completion } = entry;
  const [chosen, setChosen] = useState<number | null>(null);
  useEffect(() => setChosen(null), [completion]);
  const token = chosen !== null && chosen < completion.tokens.length ? chosen : null;
  const seen = useMemo(() => look(completion, token), [completion, token]);
  const whose = token === null ? "the whole completion" : `token ${token + 1}`;
  return (
    <article class="completion" aria-label={`Completion of step ${entry.step}`}>
      <header>
        <span class="step">{entry.mode === "eval" ? "evaluation, " : ""}step {entry.step}</span>
        <Verdict completion={completion} />
        <span>reward {number(completion.reward)}</span>
        {completion.replayed && <span class="tag">replayed</span>}
        {completion.replaced && <span class="tag">replaced, not trained on</span>}
      </header>
      <div class="sides">
        <div class="text">
          <details open={completion.prompt.length < 1200}>
            <summary>Prompt</summary>
            <p class="prompt">{visible(completion.prompt)}</p>
          </details>
          {completion.solution !== null && <p class="solution"><span class="muted">Solution</span> {visible(completion.solution)}</p>}
          <Tokens completion={completion} quantity={quantity} chosen={token} onChoose={setChosen} />
          <Scale completion={completion} quantity={quantity} />
        </div>
        {completion.images.length > 0 && (
          <div class="look">
            <p class="whose" aria-live="polite">
              {!seen
                ? "The attention over the image was not recorded, or had no room in this page."
                : lit
                  ? <>Lit where <b>{token === null ? whose : <>“{visible(completion.tokens[token]!).trim() || "␣"}” ({whose})</>}</b> looked: {percent(seen.mass)} of its attention is on the {completion.images.length > 1 ? "images" : "image"}.</>
                  : "Attention is not drawn."}
            </p>
            {token !== null && <button type="button" onClick={() => setChosen(null)}>Whole completion</button>}
            {completion.images.map((picture, index) => (
              <Overlay key={index} picture={picture} index={index} count={completion.images.length} whose={whose}
                source={picture.file !== null && data.images[picture.file] ? `data:image/webp;base64,${data.images[picture.file]}` : null}
                cells={lit ? (seen?.images[index] ?? null) : null} most={seen?.most ?? 0} mass={seen?.mass ?? 0} />
            ))}
          </div>
        )}
      </div>
      <div class="facts"><Rewards completion={completion} /><Metrics completion={completion} /></div>
    </article>
  );
}

/** What colours the tokens, and whether the attention is drawn: for all completions of a view. */
export function useColouring() {
  const [name, setName] = useState<Quantity["name"]>("vgr");
  const [lit, setLit] = useState(true);
  const quantity = QUANTITIES.find((item) => item.name === name)!;
  const controls = (
    <>
      <label>
        Colour tokens by{" "}
        <select value={name} onChange={(event) => setName(event.currentTarget.value as Quantity["name"])}>
          {QUANTITIES.map((item) => <option key={item.name} value={item.name}>{item.title}</option>)}
        </select>
      </label>
      <label class="check">
        <input type="checkbox" checked={lit} onChange={(event) => setLit(event.currentTarget.checked)} /> Draw attention
      </label>
    </>
  );
  return { quantity, lit, controls };
}
